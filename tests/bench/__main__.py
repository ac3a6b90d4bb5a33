"""Run all benchmarks, and record the figures.

    python tests/bench                        measures, writes docs/bench.json, and renders it into the pages
    python tests/bench --quick --out FILE     tiny sizes, which only prove that everything runs; the pages do not change
    python tests/bench --only read kv         some groups, shown only

The groups run one after the other, each in a separate process; every case of a group runs once per round, in turn.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import memory
import render
from record import Group, whole

from jetstream_ext.spark.java import JavaError, require_java

# The module of each group. The groups that need the most memory come last.
MODULES = {
    "publish": "publish",
    "publish_500": "publish",
    "read": "publish",
    "direct_get": "direct_get",
    "sharing": "sharing",
    **{f"memory-{case}-{count}": "memory" for case in memory.CASES for count in memory.LONG},
    "kv": "kv",
    "otel": "tracing",
    "tables": "tables",
    "groups": "groups",
    "spark_read": "spark_read",
    "spark_write": "spark_write",
}
QUIET = 0.5


def run_group(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a group in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "group.json"
        command = [sys.executable, __file__, "--child", name, "--out", str(into), *(["--quick"] if quick else [])]
        # Spark's workers must find the sources that a benchmark defines.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)})
        found: dict[str, Any] = json.loads(into.read_text(encoding="utf-8"))
        return found


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def show(name: str, group: dict[str, Any]) -> None:
    """Print a group's medians."""
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in group['conditions'].items())}")
    for case, measures in group["figures"].items():
        shown = (
            f"{number(each['median'])} {measure} ({number(each['min'])} … {number(each['max'])})"
            for measure, each in measures.items()
        )
        print(f"  {case:44} {'; '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), metavar="GROUP")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=list(MODULES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run: Callable[..., Group] = import_module(MODULES[options.child]).run
        options.out.write_text(json.dumps(run(options.child, quick=options.quick).as_json()), encoding="utf-8")
        return
    everything = set(options.only) == set(MODULES)
    if any(name.startswith("spark") for name in options.only):
        try:
            require_java()  # before the other groups take minutes
        except JavaError as error:
            sys.exit(str(error))
    load = os.getloadavg()[0]
    if load > QUIET and not options.quick:
        print(f"the machine has a load of {load:.2f}: the figures will be too low", file=sys.stderr)
    groups = {}
    for name in options.only:
        groups[name] = run_group(name, quick=options.quick)
        show(name, groups[name])
    record = whole(groups, quick=options.quick, load=load)
    publish = everything and not options.quick and options.out is None
    out = render.RECORD if publish else options.out
    if out is not None:
        out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"written: {out}")
    if publish:
        for path in render.write(record):
            print(f"written: {path}")


if __name__ == "__main__":
    main()
