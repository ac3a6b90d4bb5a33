"""Requests to the JetStream API on a connection that is lost and comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from client_cells import each
from clients import connected
from nats.aio.client import Client
from test_fallback import with_unknown_internals

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

KINDS = [False, True]  # also with a nats-py whose internals are not known

pytestmark = pytest.mark.filterwarnings("ignore:jetstream_ext does not know the internals:RuntimeWarning")


@asynccontextmanager
async def connect(server: NatsServer, *, fallback: bool) -> AsyncIterator[Client]:
    async with connected(server.url, reconnect_time_wait=0.01) as nc:
        yield with_unknown_internals(nc) if fallback else nc


@each("fallback", KINDS)
async def test_a_request_that_changes_something_ends_when_the_connection_is_lost(
    own_server: NatsServer, fallback: bool
) -> None:
    async with connect(own_server, fallback=fallback) as nc:
        js = nc.jetstream(timeout=60)
        await jsx.ensure_stream(js, name="S", subjects=["s.>"])
        await js.add_consumer("S", durable_name="C")
        own_server.pause()
        reset = asyncio.ensure_future(jsx.reset_consumer(js, "S", "C"))
        await asyncio.sleep(0.1)
        own_server.kill()
        async with asyncio.timeout(20):
            with pytest.raises(errors.RequestTimeoutError, match="the connection was lost"):
                await reset
        own_server.restart()


@each("fallback", KINDS)
async def test_a_request_that_changes_nothing_is_sent_again(own_server: NatsServer, fallback: bool) -> None:
    async with connect(own_server, fallback=fallback) as nc:
        js = nc.jetstream(timeout=60)
        await jsx.ensure_stream(js, name="S", subjects=["s.>"])
        own_server.pause()
        asking = asyncio.ensure_future(jsx.source_health(js, "S"))
        await asyncio.sleep(0.1)
        own_server.kill()
        own_server.restart()
        assert not await asking


@each("fallback", KINDS)
async def test_a_request_waits_for_the_connection(own_server: NatsServer, fallback: bool) -> None:
    async with connect(own_server, fallback=fallback) as nc:
        js = nc.jetstream(timeout=60)
        own_server.kill()
        while nc.is_connected:
            await asyncio.sleep(0)
        creating = asyncio.ensure_future(jsx.ensure_stream(js, name="S", subjects=["s.>"]))
        await asyncio.sleep(0.1)
        assert not creating.done()
        own_server.restart()
        await creating


async def test_a_cancelled_request_leaves_nothing_behind(own_server: NatsServer, has_only: Any) -> None:
    async with connect(own_server, fallback=False) as nc:
        held: set[Any] = {*nc._subs}
        own_server.pause()
        for ticks in range(6):
            task = asyncio.ensure_future(jsx.ensure_stream(nc.jetstream(timeout=60), name="S", subjects=["s.>"]))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        own_server.resume()
        assert await has_only(nc, held)
