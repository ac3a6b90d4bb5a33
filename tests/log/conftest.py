"""Streams, buckets of positions, and messages for the tests of the log."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.log import Group, OffsetStore

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
