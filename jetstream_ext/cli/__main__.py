"""The entry point: the group of commands and their exit statuses; it names what to install if the extra is missing."""

from __future__ import annotations

import importlib.util
import io
import logging
import sys
import traceback
from typing import Any

try:
    if _missing := [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]:
        sys.exit(f"jetstream-ext: needs {' and '.join(_missing)}: pip install 'nats-jetstream-ext[cli]'")

    import click
    import nats.errors

    from jetstream_ext.cli import (
        dead_letters,
        doctor,
        enabling,
        export,
        groups,
        ingest,
        local,
        snapshot,
    )
    from jetstream_ext.cli.options import CommandGroup
    from jetstream_ext.cli.output import Stopped, one_line, printable_errors
    from jetstream_ext.testing import NatsServerError
    from jetstream_ext.text import printable
except KeyboardInterrupt:  # the imports take a moment
    sys.exit(130)


class _Commands(CommandGroup):
    """Reports the errors of a command in one line."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with printable_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with printable_errors():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            raise Stopped("stopped") from None
        except BrokenPipeError:
            raise  # click exits silently
        except (nats.errors.Error, NatsServerError, OSError, TimeoutError) as error:
            raise click.ClickException(one_line(error)) from error


class _Formatter(logging.Formatter):
    """Of records that no handler takes: nats-py's and asyncio's, with tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep_lines=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nats-jetstream-ext")
def cli() -> None:
    """Examine NATS JetStream servers, ingest and export files, read buckets, and manage groups and dead letters.

    The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 130 after Ctrl-C.

    Examples:
        jetstream-ext serve
        jetstream-ext doctor -s nats://127.0.0.1:4222
        jetstream-ext ingest orders.csv --stream ORDERS --create 'orders.>' --subject 'orders.{country}'
        jetstream-ext export ORDERS orders.parquet
        jetstream-ext snapshot prices --at '10 minutes ago'
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # nats-py causes a warning for every TLS connection
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


for _module in (dead_letters, doctor, export, groups, ingest, snapshot):
    cli.add_command(_module.command)
cli.add_command(enabling.stream_command)
cli.add_command(enabling.bucket_command)
cli.add_command(local.demo)
cli.add_command(local.serve)


def main() -> None:
    """Run the command line; the exit status is 0, 1 (failed), 2 (wrong usage) or 130 (stopped with Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for terminals that lack a character
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="jetstream-ext")
    except KeyboardInterrupt:  # before the group of commands handles it
        sys.exit(130)
    except Exception:
        sys.exit(printable(traceback.format_exc().rstrip(), keep_lines=True))


if __name__ == "__main__":
    main()
