"""A read does not cost the connection: a server closes one that has more than `max_pending` bytes to receive."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import nats.errors
import pytest
from client_cells import each, named
from clients import connected
from frame_proxy import Frame, FrameProxy
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow, errors
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer

MAX_PENDING = (400_000, 1_000_000, 4_000_000)
CAUTIOUS = 15.0  # the seconds for which a connection asks for less after it was lost
# Sizes of messages, and how many of them a stream has: about 12 MB.
COUNTS = {1_000: 12_000, 60_000: 200, 300_000: 40}
SUBJECTS = 40
# The read that finds out what the server can take may lose the connection so many times.
LOSSES, LOSSES_ON_THE_FALLBACK = 2, 3


def config(max_pending: int) -> str:
    return f"max_pending: {max_pending}\nmax_payload: {min(max_pending, 1_000_000) - 50_000}\n"


async def fill(url: str) -> None:
    async with connected(url) as nc:
        js = nc.jetstream(timeout=30)
        for size, count in COUNTS.items():
            await js.add_stream(name=f"S{size}", subjects=[f"S{size}.*"], allow_direct=True, allow_batched=True)
            async with jsx.FastPublisher(js) as publisher:
                for n in range(1, count + 1):
                    await publisher.add(f"S{size}.{n % SUBJECTS}", b"%09d" % n + bytes(size - 9))


@pytest.fixture(scope="module", params=MAX_PENDING)
def max_pending(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def server(max_pending: int) -> Iterator[NatsServer]:
    with NatsServer(config=config(max_pending)) as server:
        asyncio.run(fill(server.url))
        yield server


@pytest.fixture(autouse=True)
def _bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--fallback"):
        monkeypatch.setitem(globals(), "LOSSES", LOSSES_ON_THE_FALLBACK)


class Losses:
    """Counts how often a connection is lost."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._learned_at = -math.inf

    async def note(self) -> None:
        self._times.append(time.monotonic())

    def __bool__(self) -> bool:
        """Whether the connection was lost since the last check."""
        return bool(self._times)

    def check(self, most: int | None = None) -> None:
        """Fail if the connection was lost more than `most` times, or again soon after a read that had lost it.

        Whether a reply that is too large costs the connection depends on how fast the client reads: the first read may be
        lucky.
        """
        learned_at, times = self._learned_at, self._times
        self.forget(LOSSES if most is None else most)
        assert not times or times[0] > learned_at + CAUTIOUS, "the connection was lost again"
        self._learned_at = max(times, default=learned_at)

    def forget(self, most: int) -> None:
        """Fail if the connection was lost more than `most` times; nothing is learned."""
        times, self._times = self._times, []
        assert len(times) <= most, f"the connection was lost {len(times)} times"


@asynccontextmanager
async def counted(url: str) -> AsyncIterator[tuple[JetStreamContext, Losses]]:
    losses = Losses()
    async with connected(url, disconnected_cb=losses.note, reconnect_time_wait=0.01) as nc:
        yield nc.jetstream(timeout=20), losses
        assert not nc.is_closed
        nc._disconnected_cb = None


Read = Callable[[JetStreamContext, str, int], Awaitable[list[Any]]]


async def of_reader(js: JetStreamContext, stream: str, count: int) -> list[jsx.StoredMsg]:
    return [message async for message in LogReader(js, stream)]


async def columns(js: JetStreamContext, stream: str, count: int) -> list[int]:
    return (await arrow.to_arrow(js, stream)).column("seq").to_pylist()  # type: ignore[no-any-return]


def all_of(size: int) -> range:
    return range(1, COUNTS[size] + 1)


def as_many_as_fit(size: int) -> range:
    """Return the sequences that fit into the default `max_bytes` of a batch."""
    return range(1, 6_000_000 // size + 1)


# Each read, given the number of messages that it is to return, and what it finds.
READS: dict[str, tuple[Read, Callable[[int], range]]] = {
    "scan": (lambda js, stream, count: jsx.DirectGet(js, stream).scan().to_list(), all_of),
    "confirmed scan": (lambda js, stream, count: jsx.DirectGet(js, stream).scan(confirm=True).to_list(), all_of),
    "LogReader": (of_reader, all_of),
    "batch": (lambda js, stream, count: jsx.DirectGet(js, stream).batch(count).to_list(), as_many_as_fit),
}
LASTS: Read = lambda js, stream, count: jsx.DirectGet(js, stream).multi_last([f"{stream}.>"]).to_list()  # noqa: E731


async def check(
    server: NatsServer, max_pending: int, size: int, read: Read, expected: range, *, learns: bool = True
) -> None:
    """Read twice: everything is there, and only the first time may lose the connection, unless the read `learns` nothing.

    The server counts a reply for a moment longer than the client takes to receive it. So a message of more than half of
    `max_pending` may cost the connection whatever the client asks for; then the error says so.
    """
    tight = 2 * size > max_pending
    async with counted(server.url) as (js, losses):
        for turn in range(2):
            with named(size=size, turn=turn):
                try:
                    found = await read(js, f"S{size}", len(expected))
                except errors.MessagesLostError as error:
                    assert tight
                    assert "max_bytes" in str(error)  # noqa: PT017
                    losses.forget(20)
                    continue
                assert [message.seq for message in found] == list(expected)
                assert all(len(message.data) == size and int(message.data[:9]) == message.seq for message in found)
                if tight:
                    losses.forget(20)
                elif not learns:
                    losses.forget(LOSSES)
                else:
                    losses.check()


@each("what", READS)
async def test_a_read_returns_every_message(server: NatsServer, max_pending: int, what: str) -> None:
    for size in COUNTS:
        read, expected = READS[what]
        await check(server, max_pending, size, read, expected(size))


async def test_the_last_messages_of_subjects_are_all_read(server: NatsServer, max_pending: int) -> None:
    """Each read asks for all that the caller allows first: in one page it is sure to have every subject."""
    for size, count in COUNTS.items():
        newest = range(count - SUBJECTS + 1, count + 1)
        await check(server, max_pending, size, LASTS, newest, learns=False)


@each("size", COUNTS)
async def test_one_read_of_a_connection_learns_for_the_others(server: NatsServer, max_pending: int, size: int) -> None:
    """What a scan has found out holds for each read of this connection, also of other streams."""
    if 2 * size > max_pending:
        return  # see `check`
    async with counted(server.url) as (js, losses):
        await READS["scan"][0](js, "S60000", COUNTS[60_000])
        losses.check()
        for what, (read, expected) in (READS | {"to_arrow": (columns, all_of)}).items():
            with named(read=what):
                assert len(await read(js, f"S{size}", len(expected(size)))) == len(expected(size))
                losses.check()


async def test_a_connection_is_not_lost_beside_other_work(server: NatsServer) -> None:
    """While the application computes, what is on its way waits at the server; a loss would cost other requests their answers."""
    async with counted(server.url) as (js, losses):
        for _ in range(3):
            seqs: list[int] = []
            async with jsx.DirectGet(js, "S60000").scan() as messages:
                async for message in messages:
                    seqs.append(message.seq)
                    if message.seq % 20 == 0:
                        time.sleep(0.01)
            assert seqs == list(all_of(60_000))
            losses.check()
        reading = asyncio.ensure_future(READS["scan"][0](js, "S60000", COUNTS[60_000]))
        while not reading.done():
            try:
                assert (await js.account_info()).streams == len(COUNTS)
            except nats.errors.TimeoutError:
                # The scans before were lucky, so that this one is the first to find out what the server takes.
                assert losses, "an answer is missing, and the connection was not lost"
        assert len(await reading) == COUNTS[60_000]
        losses.check()


# -- no size is small enough ---------------------------------------------------------------------------------------------


def cutter(port: int, limit: int) -> FrameProxy:
    """Return a proxy that aborts a connection that has brought more than `limit` bytes since the client's last request."""
    brought = 0

    async def ask(frame: Frame) -> Frame:
        nonlocal brought
        brought = 0
        return frame

    async def bring(frame: Frame) -> Frame:
        nonlocal brought
        brought += len(frame.header) + len(frame.payload)
        if brought > limit:
            raise ConnectionResetError
        return frame

    return FrameProxy(port, ask, bring)


@pytest.fixture(scope="module")
def small_server() -> Iterator[NatsServer]:
    """A server with one stream of 30 messages of 60 kB."""

    async def fill_one(url: str) -> None:
        async with connected(url) as nc:
            js = nc.jetstream(timeout=30)
            await js.add_stream(name="S", subjects=["s.*"], allow_direct=True)
            for n in range(30):
                await js.publish(f"s.{n}", bytes(60_000))

    with NatsServer() as server:
        asyncio.run(fill_one(server.url))
        yield server


HOPELESS: dict[str, Callable[[JetStreamContext], Awaitable[Any]]] = {
    "scan": lambda js: jsx.DirectGet(js, "S").scan(confirm=True).to_list(),
    "batch": lambda js: jsx.DirectGet(js, "S").batch(30).to_list(),
    "multi_last": lambda js: jsx.DirectGet(js, "S").multi_last(["s.>"]).to_list(),
    "to_arrow": lambda js: arrow.to_arrow(js, "S"),
}


@each("what", HOPELESS)
async def test_an_error_names_max_bytes_if_each_attempt_loses_the_connection(
    small_server: NatsServer, what: str
) -> None:
    async with cutter(small_server.port, 50_000) as proxy, counted(proxy.url) as (js, losses):
        async with asyncio.timeout(60):
            with pytest.raises(errors.MessagesLostError, match=r"'S'.*max_bytes"):
                await HOPELESS[what](js._nc.jetstream(timeout=2))
        losses.check(20)


@each("limit", [70_000, 200_000, 500_000])
async def test_a_read_finds_the_size_that_the_connection_brings(small_server: NatsServer, limit: int) -> None:
    """The proxy counts exactly, where a server also depends on how fast the client is.

    A page of `multi_last` also brings the newest message, so there two messages must fit.
    """
    async with cutter(small_server.port, limit) as proxy, counted(proxy.url) as (js, losses):
        for turn in range(2):
            for what, read in HOPELESS.items():
                with named(turn=turn, read=what):
                    fits = what != "multi_last" or limit > 2 * 60_000
                    with nullcontext() if fits else pytest.raises(errors.MessagesLostError, match="max_bytes"):
                        assert len(await read(js)) == 30
                    if what == "multi_last":  # its first page is as long as the caller allows
                        await js.account_info()  # the last loss has been counted
                        losses.forget(20)
                    else:
                        losses.check(10)


async def test_a_reply_may_cost_the_connection_twice(server: NatsServer, max_pending: int) -> None:
    """nats-py restores the subscription of an inbox, so the rest of a reply that is too large may cost the next connection.

    A read of now asks for everything, also after other reads have found out how little the connection may be asked for.
    """
    if max_pending != MAX_PENDING[-1]:
        return  # the connection is lost in the proxy
    losses = 0

    async def lose(frame: Frame) -> Frame | None:
        nonlocal losses
        if ".DIRECT.GET." in frame.subject and losses:
            losses -= 1
            raise ConnectionResetError
        return frame

    async with FrameProxy(server.port, on_publish=lose) as proxy, connected(proxy.url, reconnect_time_wait=0.01) as nc:
        js = nc.jetstream(timeout=20)
        for losses in (2, 2, 2):
            assert len(await LASTS(js, "S60000", SUBJECTS)) == SUBJECTS
            assert losses == 0
        losses = 20
        with pytest.raises(errors.MessagesLostError, match="max_bytes"):
            await LASTS(js, "S60000", SUBJECTS)
