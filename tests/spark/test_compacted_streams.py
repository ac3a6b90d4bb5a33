"""Streams that keep the newest messages of each subject: what newer messages replaced is no loss, other removals are."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, plan_read
from jetstream_ext.spark.streaming import Follower

Offset = dict[str, Any]
Make = Callable[..., Awaitable[str]]


@pytest.fixture
def make(js: JetStreamContext, stream_name: Callable[[], str]) -> Make:
    async def make_stream(**config: Any) -> str:
        name = stream_name()
        config = {"max_msgs_per_subject": 1, **config}
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True).evolve(**config))
        return name

    return make_stream


def read_options(stream: str, **options: str) -> ReadOptions:
    return ReadOptions.parse({"servers": "nats://unused", "stream": stream} | options, streaming=True)


def follower(stream: str, **options: str) -> Follower:
    return Follower(read_options(stream, **options))


def through_the_log(offset: Offset) -> Offset:
    """Return an offset as Spark's log has it."""
    return dict(json.loads(json.dumps(offset)))


async def put(js: JetStreamContext, stream: str, *subjects: str) -> None:
    for subject in subjects:
        await js.publish(f"{stream}.{subject}", b"")


async def read_to_the_end(js: JetStreamContext, query: Follower) -> Offset:
    start = await query.initial(js)
    return through_the_log(await query.latest(js, start))


async def test_a_purge_of_a_stream_that_allows_rollups_is_a_loss_whatever_is_stored_since(
    js: JetStreamContext, make: Make
) -> None:
    name = await make(max_msgs_per_subject=-1, allow_rollup_hdrs=True)
    await put(js, name, "a")
    query = follower(name)
    at = await read_to_the_end(js, query)
    await put(js, name, "a", "b")
    await js.purge_stream(name)
    await put(js, name, "a", "b", "c")
    with pytest.raises(DataLossError, match="sequences 2 to 3"):
        await query.latest(js, at)


async def test_messages_that_may_have_expired_are_a_loss(js: JetStreamContext, make: Make) -> None:
    name = await make(max_age=5)
    await put(js, name, "a")
    query = follower(name)
    at = await read_to_the_end(js, query)
    await put(js, name, "a", "a")
    while (await js.stream_info(name)).state.messages:
        pass
    await put(js, name, "a")
    with pytest.raises(DataLossError, match="sequences 2 to 3"):
        await query.latest(js, at)


async def test_a_batch_read_may_start_at_a_replaced_sequence(js: JetStreamContext, make: Make) -> None:
    name = await make()
    await put(js, name, "a", "a", "b", "a")
    options = ReadOptions.parse({"servers": "nats://unused", "stream": name, "startingOffsets": json.dumps({name: 1})})
    assert next(part.first for part in await plan_read(js, options)) == 3
    await js.purge_stream(name)
    with pytest.raises(DataLossError, match="sequences 1 to 4"):
        await plan_read(js, options)
