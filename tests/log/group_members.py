"""Groups and their members, for the tests of both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
from nats.js import JetStreamContext

from jetstream_ext import StoredMsg
from jetstream_ext.log import Group
from jetstream_ext.log.member import Member
from jetstream_ext.testing import NatsServer

MakeGroup = Callable[..., Group]


async def ignore(_: Exception) -> None: ...


async def until(condition: Callable[[], Any], what: str = "") -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def take(member: Member, count: int) -> list[StoredMsg]:
    async with asyncio.timeout(60):
        return [await anext(member) for _ in range(count)]


@contextlib.asynccontextmanager
async def breakable_server() -> AsyncIterator[tuple[NatsServer, JetStreamContext]]:
    """A server that the test may stop, with a stream "S" and a client that reconnects."""
    async with NatsServer() as server:
        nc = await nats.connect(server.url, error_cb=ignore, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        patient = nc.jetstream(timeout=30)
        await patient.add_stream(name="S", subjects=["S"], allow_direct=True)
        await patient.publish("S", b"1")
        yield server, nc.jetstream(timeout=2)
        # nats-py raises the first; asyncio the second, where a transport is closed that has more to write (Python 3.12, 3.13).
        with contextlib.suppress(ConnectionError, TypeError):
            await nc.close()
