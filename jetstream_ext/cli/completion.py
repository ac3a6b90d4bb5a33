"""What the shell completes: the names of streams and buckets, which the server knows."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import redirect_stderr
from typing import Final

import click

from jetstream_ext.cli.connection import Target, connected, target_of
from jetstream_ext.client.api import Api, stream_names
from jetstream_ext.client.connection import Context
from jetstream_ext.protocol.subjects import bucket_stream

_LIMIT: Final = 1.0  # seconds until the shell gets no names
# A shell inserts the name into the user's command line, so a server must not choose characters that it obeys.
_HARMLESS: Final = re.compile(r"[\w.=@+-]+", re.ASCII)


def complete_streams(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the streams whose names begin with `incomplete`; none if the server does not list them within a second."""
    return _names(ctx, incomplete)


def complete_buckets(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the buckets whose names begin with `incomplete`, like `complete_streams`."""
    prefix = bucket_stream("")
    return [name.removeprefix(prefix) for name in _names(ctx, prefix + incomplete)]


def _names(ctx: click.Context, start: str) -> list[str]:
    with redirect_stderr(io.StringIO()):  # an error would stand in the middle of the user's command line
        try:
            found = asyncio.run(_ask(target_of(ctx)))
        except Exception:  # a name to complete is no reason to fail
            return []
    return sorted(name for name in found if name.startswith(start) and _HARMLESS.fullmatch(name))


async def _ask(where: Target) -> list[str]:
    async with asyncio.timeout(_LIMIT), connected(where) as js:
        return await stream_names(Api(Context(js)))
