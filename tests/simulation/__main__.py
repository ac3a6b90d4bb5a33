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

SHARE = 500  # seeds per task of a process


def failures(first: int, count: int) -> list[str]:
    return [f"{name_of(*schedule)}: {error}" for schedule, error in run(first, count) if error is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", type=int, default=100_000, help="schedules of each mode, half of them on each kind of link"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="the number of processes")
    parser.add_argument(
        "--replay", help="run the schedule of this name, as in the report of a failure, and print every event"
    )
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
