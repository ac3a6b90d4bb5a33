"""Run schedules of the fast batch, of whole calls or of groups, or replay one.

python tests/simulation [--schedules 100000] [--first 0]
python tests/simulation --calls [--schedules 34000]
python tests/simulation --groups [--schedules 50000]
python tests/simulation --replay fail:chaos:4711
python tests/simulation --replay ingest:4711
python tests/simulation --replay group:calm:4711
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import call_schedules
import fast_schedules
import group_schedules
from call_world import JOBS

SHARE = 500  # seeds per task of a process


def fast_failures(first: int, count: int) -> list[str]:
    found = fast_schedules.run(first, count)
    return [f"{fast_schedules.name_of(*schedule)}: {error}" for schedule, error in found if error is not None]


def call_failures(first: int, count: int) -> list[str]:
    return [f"{name}: {error}" for name, error in call_schedules.run(first, count) if error is not None]


def group_failures(first: int, count: int) -> list[str]:
    return [f"{name}: {error}" for name, error in group_schedules.run(first, count) if error is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--calls",
        action="store_true",
        help="run whole calls: ingest, atomic batches and workers",
    )
    parser.add_argument("--groups", action="store_true", help="run the members of a group")
    parser.add_argument(
        "--schedules",
        type=int,
        help="schedules of each mode of the fast batch, half of them on each kind of link (default: 100,000), of each "
        "kind of call (default: 34,000), or of each kind of clocks of a group (default: 50,000)",
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="the number of processes")
    parser.add_argument(
        "--replay", help="run the schedule of this name, as in the report of a failure, and print every event"
    )
    options = parser.parse_args()
    if options.replay:
        kind = options.replay.partition(":")[0]
        module = call_schedules if kind in JOBS else group_schedules if kind == "group" else fast_schedules
        module.replay(options.replay, print)
        return 0
    failures, kinds, schedules = (call_failures, len(JOBS), 34_000) if options.calls else (fast_failures, 2, 100_000)
    if options.groups:
        failures, kinds, schedules = group_failures, 2, 50_000
    schedules = options.schedules or schedules
    began = time.monotonic()
    done = failed = 0
    last = options.first + schedules
    starts = range(options.first, last, SHARE)
    counts = [min(SHARE, last - start) for start in starts]
    with ProcessPoolExecutor(options.processes) as pool:
        for count, found in zip(counts, pool.map(failures, starts, counts), strict=True):
            for failure in found:
                print(failure, flush=True)
            failed += len(found)
            done += kinds * count
            if not done % (10 * kinds * SHARE) or done == kinds * schedules:
                print(f"{done:,} schedules, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print("replay one with: python tests/simulation --replay <name>")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
