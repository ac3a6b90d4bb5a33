"""Servers that a test may break, and connections that reconnect quickly."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import nats
import nats.errors
import pytest
from clients import close, quiet
from nats.aio.client import Client

import jetstream_ext as jsx
from jetstream_ext.testing import NatsCluster, NatsServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
Connect = Callable[..., Awaitable[Client]]
Stored = Callable[[str], Awaitable[list[int]]]


@pytest.fixture
def full() -> bool:
    """Whether to run at full length, as `nox -s full -- faults` does."""
    return FULL


@pytest.fixture
def victim() -> Iterator[NatsServer]:
    """A server for this test only."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """Three servers for this test only; request it before `connect`, so that connections are closed first."""
    with NatsCluster(3) as cluster:
        yield cluster


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """A factory of connections that reconnect indefinitely."""
    made: list[Client] = []

    async def connect(url: str | list[str]) -> Client:
        nc = await nats.connect(
            url, connect_timeout=10, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=quiet
        )
        made.append(nc)
        return nc

    yield connect
    for nc in made:
        await close(nc)


@pytest.fixture
def stored(connect: Connect) -> Callable[[str, str], Awaitable[list[int]]]:
    """Read the numbers in a stream over a separate connection."""

    async def stored(url: str | list[str], stream: str) -> list[int]:
        nc = await connect(url)
        reader = jsx.DirectGet(nc.jetstream(), stream)
        async with asyncio.timeout(60):
            while True:
                try:
                    return [int(message.data) async for message in reader.scan(confirm=True)]
                except nats.errors.Error:
                    # A killed leader is replaced after 5 to 8 seconds; until then no server answers.
                    await asyncio.sleep(0.1)

    return stored
