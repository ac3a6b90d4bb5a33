"""Waits with a bound, and connections that a test may break."""

import asyncio
import contextlib
import gc
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from waiting import abandon, end_connection

Connect = Callable[..., Awaitable[Client]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]
MakeStream = Callable[..., Awaitable[str]]


@pytest.fixture
def within() -> Within:
    """Await something for at most `seconds`; return its result, or the error that it raised.

    The test fails with an `AssertionError` if the wait has not ended by then.
    """

    async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(awaitable)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            await abandon(task)
            raise AssertionError(f"the call has not ended within {seconds:g} s")
        if task.cancelled():
            raise AssertionError("the call ended as cancelled, though its caller did not cancel it")
        return task.exception() or task.result()

    return within


async def _ignore(error: Exception) -> None:
    pass


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """A factory of connections that a test may break; they reconnect indefinitely unless told otherwise."""
    made: list[Client] = []

    async def connect(url: str | list[str], **options: Any) -> Client:
        options = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "error_cb": _ignore, **options}
        nc = await nats.connect(url, connect_timeout=10, **options)
        made.append(nc)
        return nc

    yield connect
    for nc in made:
        await end_connection(nc)
    # nats-py can lose track of a reconnect task if the new connection is lost at once.
    for task in asyncio.all_tasks():
        if getattr(task.get_coro(), "__qualname__", "").startswith(("Client.", "Subscription.")):
            await abandon(task)
    made.clear()
    gc.collect()  # here, where warnings about sockets that nats-py leaves open are expected
    await asyncio.sleep(0)


@pytest.fixture
async def clog() -> AsyncIterator[Callable[[Client, NatsServer], Awaitable[None]]]:
    """Pause a server, and publish until over 2 MiB are pending, so that the connection takes no more bytes."""
    noises: list[asyncio.Task[None]] = []
    going_on = True

    async def noise(nc: Client) -> None:
        with contextlib.suppress(nats.errors.Error):
            while going_on:  # a cancellation alone may be lost
                await nc.publish("noise", bytes(1_000_000))

    async def clog(nc: Client, server: NatsServer) -> None:
        server.pause()
        # The first publishes wait for the write in progress; the bytes of the last one stay pending behind it.
        while nc.pending_data_size <= 1 << 21:
            assert len(noises) < 50
            noises.append(asyncio.create_task(noise(nc)))
            await asyncio.sleep(0.05)

    yield clog
    going_on = False
    for task in noises:
        await abandon(task)


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """Create a stream on the shared server with all features on (or as given); its subjects are ``<name>.>``."""

    async def make(**config: Any) -> str:
        name = stream_name()
        config = {
            "allow_direct": True,
            "allow_atomic": True,
            "allow_batched": True,
            "subjects": [f"{name}.>"],
            **config,
        }
        await js.add_stream(name=name, **config)
        return name

    return make


@pytest.fixture
def collect_connections() -> Iterator[None]:
    """Collect the failed connections of nats-py here, not in another test or while pytest writes a report.

    On Python 3.11, logging a traceback while another one is formatted breaks the formatting.
    """
    gc.disable()
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    gc.enable()
