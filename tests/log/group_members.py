"""Groups and their members, for the tests of both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import PubAck

from jetstream_ext import StoredMsg
from jetstream_ext.client.connection import Context
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.log import Group, Member
from jetstream_ext.testing import NatsServer

MakeGroup = Callable[..., Group]
NewGroup = Callable[..., Awaitable[Group]]


async def ignore(_: Exception) -> None: ...


async def until(condition: Callable[[], Any], what: str = "") -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def take(member: Member, count: int) -> list[StoredMsg]:
    async with asyncio.timeout(60):
        return [await anext(member) for _ in range(count)]


async def positions(group: Group) -> list[int]:
    return [each.position for each in (await group.status()).partitions]


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run something meanwhile, and cancel it then; raise its error."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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


def replace_publish(
    patch: pytest.MonkeyPatch, js: JetStreamContext, function: Callable[..., Awaitable[PubAck]]
) -> None:
    """Call `function`, with the arguments of nats-py's ``js.publish``, for what the library publishes with a context."""
    real = Context.publish

    async def publish(
        self: Context, subject: str, payload: bytes, headers: Mapping[str, str], timeout: float, what: str
    ) -> PubAck:
        if self.js is not js:
            return await real(self, subject, payload, headers, timeout, what)
        try:
            return await function(subject, payload, timeout=timeout, headers=dict(headers))
        except nats.errors.TimeoutError as late:
            raise RequestTimeoutError(f"timed out while waiting for {what}") from late

    patch.setattr(Context, "publish", publish)
