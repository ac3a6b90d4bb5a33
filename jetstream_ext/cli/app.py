"""The group of commands."""

from __future__ import annotations

import importlib
from typing import Any, Final

import click
import nats.errors
import nats.js.errors

from jetstream_ext.errors import IngestError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.testing.errors import NatsServerError

_COMMANDS: Final = ("bench", "demo", "doctor", "export", "ingest", "serve", "snapshot")
_STOPPED: Final = 130
_NOT_ENABLED: Final = frozenset({10039, 10076})  # for the account; at all


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
        except (nats.errors.Error, NatsServerError, OSError, TimeoutError) as error:
            raise click.ClickException(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Return what a user is told of an error."""
    if isinstance(error, nats.js.errors.APIError) and not isinstance(error, IngestError):
        described = error.description or type(error).__name__
        if error.err_code in _NOT_ENABLED:
            return f"JetStream is off for this account, or on this server ({described})"
        if isinstance(error, nats.js.errors.ServiceUnavailableError):
            asked = described if "nobody answers on" in described else "nobody answers"  # nats-py's own has no text
            if error.err_code is None:
                return f"{asked}: the server runs without JetStream, or its domain is another"
        if error.description and not isinstance(error, JetStreamExtError):  # nats-py's own texts are full of names
            return f"the server says: {error.description}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RequestTimeoutError | nats.errors.TimeoutError):
        text += " (the user may lack the permission; servers do not answer then)"
    return text


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jetstream-ext")
def cli() -> None:
    """Bulk work on NATS JetStream: look at servers, ingest and export files, read buckets."""
