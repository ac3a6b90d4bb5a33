"""Streams, buckets of positions, and messages for the tests of the log."""

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import StoredMsg
from jetstream_ext.log import DeadLetter, Group, LogReader, OffsetStore, exactly_once
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parents[1] / "safety_net"))
sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import Frame, FrameProxy
from redrive_letters import Bury, Letters
from workers import MakePair, MakeStateful, Pair, StatefulPair

MakeStream = Callable[..., Awaitable[str]]


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


@pytest.fixture
def make_pair(js: JetStreamContext, make_stream: MakeStream) -> MakePair:
    """Create an input stream with a number of messages, and an output stream."""

    async def make(messages: int = 0, **config: Any) -> Pair:
        return Pair(js, await make_stream(messages), await make_stream(**config))

    return make


@pytest.fixture
def make_stateful(make_pair: MakePair) -> MakeStateful:
    """Create streams as `make_pair` does, for a worker with a state."""

    async def make(messages: int = 0, **config: Any) -> StatefulPair:
        pair = await make_pair(messages, **config)
        return StatefulPair(pair.js, pair.source, pair.target)

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
def new_group(make_stream: MakeStream, make_group: Callable[..., Group]) -> Callable[..., Awaitable[Group]]:
    """Return a group, as `make_group` does, of a new stream with a number of messages."""

    async def make(messages: int = 0, **options: Any) -> Group:
        return make_group(await make_stream(messages=messages), **options)

    return make


@pytest.fixture
async def bury(js: JetStreamContext, server: NatsServer, make_stream: MakeStream) -> AsyncIterator[Bury]:
    """Make dead letters of some messages."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(count: int = 3, *, duplicate_window: float = 0.1) -> Letters:
            source, target = await make_stream(duplicate_window=duplicate_window), await make_stream()
            for n in range(count):
                headers = {"Kind": "test", "Nats-Msg-Id": f"id-{n}"}
                await js.publish(f"{source}.{n % 2}", b"%d" % n, headers=headers)

            def fail(_: StoredMsg) -> None:
                raise ZeroDivisionError("no")

            made = Letters(js, stack, server.port, target, source, count)
            letter = DeadLetter(made.dead, attempts=1, backoff=0)
            done = await exactly_once(
                LogReader(js, source), target, fail, name="w", prefix=f"{target}.at", dead_letter=letter
            )
            assert done.inputs == count
            return made

        yield make


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
