"""``jetstream-ext serve``: a real nats-server to try things on."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import click

from jetstream_ext.cli.output import write_json
from jetstream_ext.testing import NatsServer

_LOOK_EVERY = 0.2


@click.command("serve", short_help="Run a nats-server until Ctrl-C.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4222,
    metavar="PORT",
    show_default=True,
    help="Where it listens; 0 is any free port.",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this folder; otherwise it is gone at the end.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="More configuration, in nats-server's own language.",
)
@click.option("--json", "as_json", is_flag=True, help="Say where it is as a JSON object.")
def command(port: int, store: Path | None, config: Path | None, as_json: bool) -> None:
    """Run a nats-server with JetStream on this machine until Ctrl-C.

    It listens on 127.0.0.1 only. The binary comes with nats-jetstream-ext[server], or is the one on the path.
    """
    kept = () if store is None else ("--jetstream", "--store_dir", str(store.absolute()))
    server = NatsServer(jetstream=store is None, config=config, port=port or -1, args=kept)
    with _stop_signals() as stopping, server:
        _say(server, store, as_json=as_json)
        while server.running:
            if stopping:
                click.echo("stopping", err=True)
                return
            time.sleep(_LOOK_EVERY)
        last = server.log.rstrip().rpartition("\n")[2] or "nothing"
        raise click.ClickException(f"the server ended; its last words: {last}")


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM: an exception from a handler could come anywhere, also while the server is stopped."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(server: NatsServer, store: Path | None, *, as_json: bool) -> None:
    if as_json:
        write_json({"url": server.url, "version": server.version, "store": str(store.absolute()) if store else None})
        return
    click.echo(f"nats-server {server.version} at {server.url}")
    click.echo(f"data in {store.absolute()}" if store else "its data is gone when it stops")
    click.echo("Ctrl-C stops it")
