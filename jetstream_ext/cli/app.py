"""The group of commands."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import click
import nats.errors

from jetstream_ext.cli.output import one_line
from jetstream_ext.testing import NatsServerError

_COMMANDS: Final = ("bench", "demo", "doctor", "export", "ingest", "serve", "snapshot")
_STOPPED: Final = 130


class _Commands(click.Group):
    """Finds a command in the module of its name, and makes one line of whatever it fails with."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"jetstream_ext.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("stopped", err=True)
            ctx.exit(_STOPPED)
        except BrokenPipeError:
            raise  # click ends without a word, as others do that nobody listens to any more
        except (nats.errors.Error, NatsServerError, OSError, TimeoutError) as error:
            raise click.ClickException(one_line(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nats-jetstream-ext")
def cli() -> None:
    """Bulk work on NATS JetStream: look at servers, ingest and export files, read buckets.

    The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 130 after Ctrl-C.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of what nats-py does with every TLS connection
