"""Feed mutated frames to every decoder and machine, or replay one case.

python tests/mutations [--frames 10000000] [--first 0] [--processes 2]
python tests/mutations --replay states:4711
"""

import argparse
import random
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from families import FAMILIES, SECONDS, Report, run_case, run_cases

SHARE = 200  # cases per task of a process
MEMORY = 256 << 10  # how much the memory of a process may grow after its first cases, in KiB


def run_share(name: str, first: int) -> tuple[Report, int]:
    """Return what some cases showed, and the largest memory that the process has had, in KiB."""
    return run_cases(name, first, SHARE), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frames", type=int, default=10_000_000, help="how many mutated frames to feed (default: 10,000,000)"
    )
    parser.add_argument("--first", type=int, help="the first seed (default: random)")
    parser.add_argument("--processes", type=int, default=2, help="the number of processes")
    parser.add_argument("--replay", help="run the case of this name, as in the report of a failure")
    options = parser.parse_args()
    if options.replay:
        name, _, seed = options.replay.partition(":")
        print(f"{run_case(name, int(seed))} frames, no failure")
        return 0
    first = random.Random().randrange(10**9) if options.first is None else options.first
    print(f"first seed {first}", flush=True)
    began, frames, slowest, failures = time.monotonic(), 0, 0.0, 0
    base, largest = 0, 0
    shown: set[tuple[str, str]] = set()
    with ProcessPoolExecutor(options.processes) as pool:
        for start in count(first, SHARE):
            tasks = [pool.submit(run_share, name, start) for name in FAMILIES]
            reports, memory = zip(*(task.result() for task in tasks), strict=True)
            frames += sum(report.frames for report in reports)
            slowest = max(slowest, *(report.slowest for report in reports))
            largest = max(largest, *memory)
            base = base or largest
            for failure in (failure for report in reports for failure in report.failures):
                failures += 1
                name, _, error = failure.split(":", 2)
                if (name, error) not in shown:  # one example of each
                    shown.add((name, error))
                    print(failure, flush=True)
            if frames >= options.frames:
                break
    print(
        f"{frames} mutated frames in {time.monotonic() - began:.0f} s: {failures} failures; the slowest case took "
        f"{slowest * 1000:.0f} ms; the memory grew by {(largest - base) >> 10} MiB"
    )
    if failures:
        print("replay with: python tests/mutations --replay <name>")
    return int(bool(failures) or slowest > SECONDS or largest - base > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
