"""Failures during an answer to a direct get: each wait ends with the rest of the answer or with an error."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Container
from datetime import UTC, datetime
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import seqs
from clients import connected
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

Frame = tuple[bytes, bytes]
Answer = Callable[[dict[str, Any]], list[Frame]]
TIMEOUT = 20


def row(seq: int, last: int, pending: int, stream: str = "FAKE") -> Frame:
    block = (
        f"NATS/1.0\r\nNats-Stream: {stream}\r\nNats-Subject: a\r\nNats-Sequence: {seq}\r\n"
        f"Nats-Time-Stamp: 2026-11-20T21:23:31.2Z\r\nNats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}\r\n\r\n"
    )
    return block.encode(), b"%d" % seq


def end(last: int, pending: int) -> Frame:
    return b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n" % (pending, last), b""


class Responder:
    """Answers direct gets for a stream whose servers answer none, with the given frames.

    The timeout passes at once behind the answers to the requests with the numbers in `silent`, from 1 on: when the client
    has received them.
    """

    def __init__(self, nc: Client, own: Client, pass_time: Callable[[float], None]) -> None:
        self.silent: Container[int] = ()
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self._nc, self._own, self._pass_time = nc, own, pass_time

    async def respond(self, message: Msg) -> None:
        self.requests.append(json.loads(message.data))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for header, payload in answer(self.requests[-1]):
            sizes = b"%d %d" % (len(header), len(header) + len(payload))
            frame = b"HPUB %b %b\r\n%b%b\r\n" % (message.reply.encode(), sizes, header, payload)
            await self._own._send_command(frame)  # nats-py would publish no status line
        await self._own._flush_pending()
        if len(self.requests) in self.silent:
            await self._own.flush(timeout=60)
            await self._nc.flush(timeout=60)
            self._pass_time(TIMEOUT + 1)


@pytest.fixture
def name(stream_name: Callable[[], str]) -> str:
    return stream_name()


@pytest.fixture
async def fake(
    server: NatsServer, nc: Client, name: str, leak_check: Any, pass_time: Callable[[float], None]
) -> AsyncIterator[Responder]:
    await nc.jetstream().add_stream(name=name)
    async with connected(server.url) as own:
        responder = Responder(nc, own, pass_time)
        await own.subscribe(f"$JS.API.DIRECT.GET.{name}", cb=responder.respond)
        await own.flush(timeout=30)
        yield responder
    await leak_check.assert_clean()


@pytest.fixture
def direct(js: JetStreamContext, fake: Responder, name: str) -> jsx.DirectGet:
    return jsx.DirectGet(js, name, timeout=TIMEOUT)


async def read_until_error(batch: jsx.MessageBatch, read: list[int]) -> None:
    async for message in batch:
        read.append(message.seq)  # noqa: PERF401 - keeps the messages before the error


def from_(first: int, last: int, total: int) -> list[Frame]:
    """Return the rows from `first` to `last` of `total`, without an end-of-batch."""
    return [row(seq, seq - 1 if seq > first else 0, total - seq) for seq in range(first, last + 1)]


class TestSilence:
    async def test_after_a_row_the_rest_is_requested(self, fake: Responder, direct: jsx.DirectGet) -> None:
        fake.answers = [lambda _: from_(1, 3, 5), lambda _: [*from_(4, 5, 5), end(5, 0)]]
        fake.silent = (1,)
        assert await seqs(direct.scan(batch=5, prefetch=1)) == [1, 2, 3, 4, 5]
        assert [request["seq"] for request in fake.requests] == [1, 4]

    async def test_a_page_of_multi_last_counts_only_as_a_whole(self, fake: Responder, direct: jsx.DirectGet) -> None:
        fake.answers = [lambda _: [row(4, 0, 2)]]
        fake.silent = (1, 2)
        read: list[int] = []
        with pytest.raises(errors.RequestTimeoutError, match="stopped after 1"):
            await read_until_error(direct.multi_last(["a"]), read)
        assert (read, len(fake.requests)) == ([], 2)
        fake.answers = [lambda _: [row(4, 0, 1)], lambda _: [row(4, 0, 1), row(6, 4, 0), end(6, 0)]]
        fake.silent = (3,)
        assert await seqs(direct.multi_last(["a"])) == [4, 6]


class TestGaps:
    async def test_a_gap_is_requested_again(self, fake: Responder, direct: jsx.DirectGet) -> None:
        holed = [*from_(1, 2, 5), row(4, 3, 1), row(5, 4, 0), end(5, 0)]
        fake.answers = [lambda _: holed, lambda _: [*from_(3, 5, 5), end(5, 0)]]
        assert await seqs(direct.scan(prefetch=1)) == [1, 2, 3, 4, 5]
        assert [request["seq"] for request in fake.requests] == [1, 3]


async def test_a_connection_closed_in_mid_read_ends_it(fake: Responder, server: NatsServer, name: str) -> None:
    fake.answers = [lambda _: from_(1, 3, 5)]
    nc = await nats.connect(server.url, connect_timeout=10)
    scan = jsx.DirectGet(nc.jetstream(), name, timeout=30).scan(batch=5)
    assert [(await anext(scan)).seq for _ in range(3)] == [1, 2, 3]
    waiting = asyncio.ensure_future(anext(scan))
    await asyncio.sleep(0.05)
    await nc.close()
    async with asyncio.timeout(29):  # less than the timeout of the read
        with pytest.raises(nats.errors.ConnectionClosedError):
            await waiting
    await scan.aclose()
    assert not nc._subs


async def test_a_connection_that_stays_away_is_a_timeout_that_names_the_whole_timeout(own_server: NatsServer) -> None:
    async with connected(own_server.url) as nc:
        own_server.kill()
        while nc.is_connected:
            await asyncio.sleep(0.01)
        direct = jsx.DirectGet(nc.jetstream(), "S", timeout=0.3)
        for read in (direct.get(1), direct.get_last("a"), direct.get_at(datetime.now(UTC)), direct.scan().to_list()):
            with pytest.raises(errors.RequestTimeoutError, match=r"did not come back within 0\.3 s"):
                await read
