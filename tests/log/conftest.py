"""Streams, buckets of positions, and messages for the tests of the log."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import StoredMsg
from jetstream_ext.log import DeadLetter, Group, LogReader, OffsetStore, exactly_once

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
