"""The group of commands."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import click
import nats.errors

from jetstream_ext.cli.output import STOPPED, one_line
from jetstream_ext.testing import NatsServerError

_COMMANDS: Final = ("bench", "demo", "doctor", "export", "ingest", "serve", "snapshot")


class _Commands(click.Group):
    """Imports a command from the module of its name, and reports its errors in one line."""

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
            ctx.exit(STOPPED)
        except BrokenPipeError:
            raise  # click exits silently
        except (nats.errors.Error, NatsServerError, OSError, TimeoutError) as error:
            raise click.ClickException(one_line(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nats-jetstream-ext")
def cli() -> None:
    """Bulk work on NATS JetStream: examine servers, ingest and export files, read buckets.

    The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 130 after Ctrl-C.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # nats-py causes a warning for every TLS connection
