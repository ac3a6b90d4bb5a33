"""Streams, buckets of positions, and messages for the tests of the log."""

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from clients import quiet
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import StoredMsg
from jetstream_ext.log import DeadLetter, Group, LogReader, OffsetStore, exactly_once, redrive
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parents[1] / "safety_net"))
sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import Frame
from redrive_wire import Die, FrameProxy, Wire, Wires

MakeStream = Callable[..., Awaitable[str]]
Bury = Callable[..., Awaitable[tuple[str, str, str]]]


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """Create a stream with a number of messages ``b"1"``, ``b"2"`` …; its subjects are ``<name>.>``."""

    async def make(messages: int = 0, **config: Any) -> str:
        name = stream_name()
        config = {"allow_direct": True, "allow_atomic": True, **config}
        await js.add_stream(name=name, subjects=[f"{name}.>"], **config)
        await fill(js, name, 1, messages)
        return name

    return make


async def fill(js: JetStreamContext, name: str, first: int, last: int) -> None:
    """Store the numbers from `first` to `last`, on three subjects in turn."""
    for begin in range(first, last + 1, 500):
        numbers = range(begin, min(last + 1, begin + 500))
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"{name}.{n % 3}", b"%d" % n) for n in numbers])


@pytest.fixture
def more(js: JetStreamContext) -> Callable[[str, int, int], Awaitable[None]]:
    """Store more numbers in a stream, as `fill` does."""

    async def store(name: str, first: int, last: int) -> None:
        await fill(js, name, first, last)

    return store


@pytest.fixture
def make_store(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., Awaitable[OffsetStore]]:
    """Return an `OffsetStore` for a bucket, which is created if it does not exist."""

    async def make(bucket: str | None = None) -> OffsetStore:
        return await OffsetStore(js, bucket or stream_name()).create()

    return make


@pytest.fixture
def make_group(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., Group]:
    """Return a group "g" in a bucket of its own, which is that of the other groups of the test."""
    bucket = stream_name()

    def make(stream: str, **options: Any) -> Group:
        options = {"partitions": 4, "heartbeat": 0.5, "poll": 0.05, "bucket": bucket, **options}
        return Group(options.pop("js", js), stream, options.pop("name", "g"), **options)

    return make


@pytest.fixture
async def offsets(js: JetStreamContext, stream_name: Callable[[], str]) -> OffsetStore:
    return OffsetStore(js, stream_name())


@pytest.fixture
def bury(js: JetStreamContext, make_stream: MakeStream, offsets: OffsetStore) -> Bury:
    """Make dead letters of some messages; return their stream and subject, and the inputs' stream."""

    async def make(count: int = 3, **config: Any) -> tuple[str, str, str]:
        source, target = await make_stream(**config), await make_stream()
        for n in range(count):
            headers = {"Kind": "test", "Nats-Msg-Id": f"id-{n}"}
            await js.publish(f"{source}.{n % 2}", b"%d" % n, headers=headers)

        def fail(_: StoredMsg) -> None:
            raise ZeroDivisionError("no")

        dead = f"{target}.dead"
        done = await exactly_once(
            LogReader(js, source),
            target,
            fail,
            name="w",
            prefix=f"{target}.at",
            dead_letter=DeadLetter(dead, attempts=1, backoff=0),
        )
        assert done.inputs == count
        return target, dead, source

    return make


@pytest.fixture
async def wires(server: NatsServer) -> AsyncIterator[Callable[..., Awaitable[Wire]]]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(before: Callable[[int], Awaitable[Any]] | None = None, timeout: float = 30.0) -> Wire:
            proxy = await stack.enter_async_context(FrameProxy(server.port))
            nc = await nats.connect(proxy.url, connect_timeout=10, error_cb=quiet)
            stack.push_async_callback(nc.close)
            wire = Wire(nc.jetstream(timeout=timeout), proxy, before)
            proxy.on_publish = wire.see
            return wire

        yield make


@pytest.fixture
def die(wires: Wires, offsets: OffsetStore) -> Die:
    """Kill a call when so many copies are stored, and all of their letters but the last one are deleted."""

    async def die(stream: str, dead: str, copies: int, **options: Any) -> Wire:
        wire = await wires()
        call = redrive(wire.js, stream, dead, offsets=OffsetStore(wire.js, offsets.bucket), **options)
        await wire.until_lost(f"STREAM.MSG.DELETE.{stream}", call, copies)
        return wire

    return die


class Interruptions:
    """A client behind a proxy that sees its requests, so that something can happen before one of them reaches the server."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        """The kinds of the requests: ``STREAM.INFO``, ``STREAM.MSG.GET`` and ``DIRECT.GET``."""
        self.js: JetStreamContext
        self._actions: dict[tuple[str, int], Callable[[], Awaitable[Any]]] = {}
        self._always: dict[str, Callable[[], Awaitable[Any]]] = {}

    def before(self, kind: str, number: int, action: Callable[[], Awaitable[Any]]) -> None:
        """Await `action` before the request of this kind with this number, from 1, from now on."""
        self._actions[kind, self.requests.count(kind) + number] = action

    def before_each(self, kind: str, action: Callable[[], Awaitable[Any]]) -> None:
        self._always[kind] = action

    async def pass_on(self, frame: Frame) -> Frame:
        for kind in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET"):
            if f".{kind}." in frame.subject:
                self.requests.append(kind)
                action = self._actions.pop((kind, self.requests.count(kind)), self._always.get(kind))
                if action is not None:
                    await action()
        return frame


@pytest.fixture
async def wire(server: NatsServer) -> AsyncIterator[Interruptions]:
    """A client whose requests a test can interrupt."""
    made = Interruptions()
    async with FrameProxy(server.port, made.pass_on) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        made.js = nc.jetstream(timeout=30)
        yield made
        await nc.close()
