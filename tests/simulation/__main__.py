"""Run schedules of the fast batch, or replay one.

python tests/simulation [--schedules 100000] [--first 0]
python tests/simulation --replay fail:chaos:4711
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fast_schedules import name_of, replay, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", type=int, default=100_000, help="of each mode, half of them on each kind of link"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", help="a schedule as a failure names it; prints all that happens")
    options = parser.parse_args()
    if options.replay:
        replay(options.replay, print)
        return 0
    began = time.monotonic()
    failed = 0
    for count, (schedule, error) in enumerate(run(options.first, options.schedules), 1):
        if error is not None:
            failed += 1
            print(f"{name_of(*schedule)}: {error}", flush=True)
        if count % 20_000 == 0:
            print(f"{count:,} schedules, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
