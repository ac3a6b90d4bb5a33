"""The group of commands."""

from __future__ import annotations

import logging
from typing import Any

import click
import nats.errors

from jetstream_ext.cli import bench, doctor, export, ingest, local, snapshot
from jetstream_ext.cli.output import Stopped, one_line
from jetstream_ext.testing import NatsServerError


class _Commands(click.Group):
    """Reports the errors of a command in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            raise Stopped("stopped") from None
        except BrokenPipeError:
            raise  # click exits silently
        except (nats.errors.Error, NatsServerError, OSError, TimeoutError) as error:
            raise click.ClickException(one_line(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nats-jetstream-ext")
def cli() -> None:
    """Examine NATS JetStream servers, ingest and export files, and read buckets.

    The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 130 after Ctrl-C.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # nats-py causes a warning for every TLS connection


for _module in (bench, doctor, export, ingest, snapshot):
    cli.add_command(_module.command)
cli.add_command(local.demo)
cli.add_command(local.serve)
