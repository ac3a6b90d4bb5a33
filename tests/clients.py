"""Connections of tests whose server may be gone when they are closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import ServiceUnavailableError


async def quiet(error: Exception) -> None:
    """Ignore the errors that nats-py reports about a server that is gone."""


async def close(nc: Client) -> None:
    with contextlib.suppress(OSError):  # nats-py raises it if it has something to send and the connection is lost
        await nc.close()


@contextlib.asynccontextmanager
async def connected(url: str | list[str], **options: Any) -> AsyncIterator[Client]:
    """A connection that reconnects at once, without end."""
    options = {
        "error_cb": quiet,
        "connect_timeout": 10,
        "reconnect_time_wait": 0.05,
        "max_reconnect_attempts": -1,
        **options,
    }
    nc = await nats.connect(url, **options)
    try:
        yield nc
    finally:
        await close(nc)


async def emptied(nc: Client, domain: str) -> JetStreamContext:
    """The context of a domain, without streams, once the leaf node is connected to the hub."""
    js = nc.jetstream(domain=domain, timeout=10)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ServiceUnavailableError):
                await js.account_info()
                break
    for info in await js.streams_info():
        await js.delete_stream(str(info.config.name))
    return js
