"""``jetstream-ext serve``: a local nats-server for trying things out."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import click

from jetstream_ext.cli.output import write_json
from jetstream_ext.testing import NatsServer

_POLL = 0.2


@click.command("serve", short_help="Run a nats-server until Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4222,
    metavar="PORT",
    show_default=True,
    help="Port to listen on; 0 is any free port.",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this folder; without it, the data is deleted at the end.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with further nats-server configuration.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the URL as one JSON object.")
def command(port: int, store: Path | None, config: Path | None, as_json: bool) -> None:
    """Run a nats-server with JetStream on this machine until Ctrl-C.

    The server listens on 127.0.0.1 only. The binary is that of nats-jetstream-ext[server], or the one on the PATH.
    """
    kept = () if store is None else ("--jetstream", "--store_dir", str(store.absolute()))
    server = NatsServer(jetstream=store is None, config=config, port=port or -1, args=kept)
    with _stop_signals() as stopping, server:
        _show(server, store, as_json=as_json)
        while server.running:
            if stopping:
                click.echo("stopping", err=True)
                return
            time.sleep(_POLL)
        last = server.log.rstrip().rpartition("\n")[2] or "nothing"
        raise click.ClickException(f"the server ended; the last line of its log: {last}")


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM: an exception from a handler could interrupt the stop of the server."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(server: NatsServer, store: Path | None, *, as_json: bool) -> None:
    if as_json:
        write_json({"url": server.url, "version": server.version, "store": str(store.absolute()) if store else None})
        return
    click.echo(f"nats-server {server.version} at {server.url}")
    click.echo(f"data in {store.absolute()}" if store else "the data is deleted when the server stops")
    click.echo("Ctrl-C stops the server")
