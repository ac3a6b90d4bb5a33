"""Failures during an answer to a direct get: each wait ends with the rest of the answer or with an error."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from datetime import UTC, datetime
from typing import Any

import nats.errors
import pytest
from client_cells import seqs
from clients import connected
from frame_proxy import Frame, FrameProxy
from nats.aio.client import Client

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

Make = Callable[..., Awaitable[str]]


class Loss:
    """What a proxy drops: of the reply to the n-th direct get, from 1 on, every message whose place is not in ``kept[n]``."""

    def __init__(self) -> None:
        self.kept: dict[int, Container[int]] = {}
        self.requests: list[dict[str, Any]] = []
        self._replies: dict[str, tuple[int, int]] = {}  # the number of the request, and how many messages have come

    async def ask(self, frame: Frame) -> Frame:
        if ".DIRECT.GET." in frame.subject:
            self.requests.append(json.loads(frame.payload))
            self._replies[frame.reply] = len(self.requests), 0
        return frame

    async def bring(self, frame: Frame) -> Frame | None:
        if frame.subject not in self._replies:
            return frame
        number, place = self._replies[frame.subject]
        self._replies[frame.subject] = number, place + 1
        return frame if number not in self.kept or place in self.kept[number] else None


@pytest.fixture
def loss() -> Loss:
    return Loss()


@pytest.fixture
async def lossy(server: NatsServer, loss: Loss) -> AsyncIterator[Client]:
    """A connection through the proxy."""
    async with FrameProxy(server.port, loss.ask, loss.bring) as proxy, connected(proxy.url) as nc:
        yield nc


@pytest.fixture
async def stream(nc: Client, make_stream: Make) -> str:
    """A stream with one message on each of five subjects."""
    name = await make_stream()
    for number in range(1, 6):
        await nc.jetstream().publish(f"{name}.{number}")
    return name


@pytest.fixture
def direct(lossy: Client, stream: str) -> jsx.DirectGet:
    return jsx.DirectGet(lossy.jetstream(), stream, timeout=2)


async def test_after_silence_the_rest_is_requested(loss: Loss, direct: jsx.DirectGet) -> None:
    loss.kept = {1: range(3)}
    assert await seqs(direct.scan(batch=5, prefetch=1)) == [1, 2, 3, 4, 5]
    assert [request["seq"] for request in loss.requests] == [1, 4]


async def test_a_gap_is_requested_again(loss: Loss, direct: jsx.DirectGet) -> None:
    loss.kept = {1: (0, 1, 3, 4, 5)}
    assert await seqs(direct.scan(prefetch=1)) == [1, 2, 3, 4, 5]
    assert [request["seq"] for request in loss.requests] == [1, 3]


async def test_a_page_of_multi_last_counts_only_as_a_whole(loss: Loss, direct: jsx.DirectGet) -> None:
    loss.kept = {1: (0,), 2: (0,), 3: (0, 1)}
    batch = direct.multi_last([">"])
    with pytest.raises(errors.RequestTimeoutError, match="stopped after 1"):
        await anext(batch)
    assert len(loss.requests) == 2
    assert await seqs(direct.multi_last([">"])) == [1, 2, 3, 4, 5]
    assert len(loss.requests) == 4


async def test_a_connection_closed_in_mid_read_ends_it(loss: Loss, lossy: Client, stream: str) -> None:
    loss.kept = {1: range(3)}
    scan = jsx.DirectGet(lossy.jetstream(), stream, timeout=30).scan(batch=5)
    assert [(await anext(scan)).seq for _ in range(3)] == [1, 2, 3]
    waiting = asyncio.ensure_future(anext(scan))
    await asyncio.sleep(0.05)
    await lossy.close()
    async with asyncio.timeout(29):  # less than the timeout of the read
        with pytest.raises(nats.errors.ConnectionClosedError):
            await waiting
    await scan.aclose()
    assert not lossy._subs


async def test_a_connection_that_stays_away_is_a_timeout_that_names_the_whole_timeout(own_server: NatsServer) -> None:
    async with connected(own_server.url) as nc:
        own_server.kill()
        while nc.is_connected:
            await asyncio.sleep(0.01)
        direct = jsx.DirectGet(nc.jetstream(), "S", timeout=0.3)
        for read in (direct.get(1), direct.get_last("a"), direct.get_at(datetime.now(UTC)), direct.scan().to_list()):
            with pytest.raises(errors.RequestTimeoutError, match=r"did not come back within 0\.3 s"):
                await read
