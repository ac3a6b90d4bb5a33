"""Partitions of filtered and gappy ranges have about the same number of messages."""

from collections import Counter
from collections.abc import Callable

from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import plan_read
from jetstream_ext.spark.ranges import SequenceRange


async def counts(js: JetStreamContext, parts: list[SequenceRange]) -> list[int]:
    found: Counter[int] = Counter()
    for message in (
        await jsx.DirectGet(js, parts[0].stream)
        .scan(subject=parts[0].filters[0] if parts[0].filters else None)
        .to_list()
    ):
        [at] = [index for index, part in enumerate(parts) if part.first <= message.seq <= part.last]
        found[at] += 1
    return [found[index] for index in range(len(parts))]


async def fill(js: JetStreamContext, stream: str, subjects: list[str]) -> None:
    config = StreamConfig(name=stream, subjects=[f"{stream}.*"], allow_direct=True, allow_batched=True)
    await js.add_stream(config)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((f"{stream}.{subject}", b"") for subject in subjects)


async def plan(js: JetStreamContext, stream: str, **options: str) -> list[SequenceRange]:
    return await plan_read(js, ReadOptions.parse({"servers": "nats://unused", "stream": stream} | options))


async def test_partitions_are_even_where_a_filter_matches_in_one_place(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    stream = stream_name()
    await fill(js, stream, [*["a"] * 15_000, *["b"] * 1_000, *["a"] * 4_000])
    parts = await plan(js, stream, minPartitions="4", subjects=f"{stream}.b")
    assert (parts[0].filters, parts[0].on_server) == ((f"{stream}.b",), True)
    assert (parts[0].first, parts[-1].last) == (1, 20_000)
    assert all(200 <= count <= 300 for count in await counts(js, parts))


async def test_a_dense_stream_is_cut_by_sequence(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    stream = stream_name()
    await fill(js, stream, ["a"] * 100)
    await js.delete_msg(stream, 50)
    assert [(part.first, part.last) for part in await plan(js, stream)] == [(1, 50), (51, 100)]
    assert [(part.first, part.last) for part in await plan(js, stream, subjects=f"{stream}.none")] == [
        (1, 50),
        (51, 100),
    ]
