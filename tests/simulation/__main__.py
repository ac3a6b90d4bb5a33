"""Run schedules of the fast batch, or replay one.

python tests/simulation [--schedules 100000] [--first 0]
python tests/simulation --replay fail:chaos:4711
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fast_schedules import name_of, replay, run

SHARE = 500  # seeds that a process takes at a time


def failures(first: int, count: int) -> list[str]:
    return [f"{name_of(*schedule)}: {error}" for schedule, error in run(first, count) if error is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", type=int, default=100_000, help="of each mode, half of them on each kind of link"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many work at the same time")
    parser.add_argument("--replay", help="a schedule as a failure names it; prints all that happens")
    options = parser.parse_args()
    if options.replay:
        replay(options.replay, print)
        return 0
    began = time.monotonic()
    done = failed = 0
    last = options.first + options.schedules
    starts = range(options.first, last, SHARE)
    counts = [min(SHARE, last - start) for start in starts]
    with ProcessPoolExecutor(options.processes) as pool:
        for count, found in zip(counts, pool.map(failures, starts, counts), strict=True):
            for failure in found:
                print(failure, flush=True)
            failed += len(found)
            done += 2 * count
            if not done % 20_000 or done == 2 * options.schedules:
                print(f"{done:,} schedules, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
