"""The plan of a batch read, made on the driver before any task runs."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.errors import DirectGetDisabledError, UnsupportedFeatureError
from jetstream_ext.spark import planning
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, PlanningError, plan_read
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.testing import NatsServer


async def fill(js: JetStreamContext, stream: str, messages: int = 10, size: int = 10, **config: object) -> str:
    await js.add_stream(
        StreamConfig(name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_batched=True).evolve(**config)
    )
    if messages:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{stream}.{i % 10}", bytes(size)) for i in range(messages))
    return stream


async def plan(js: JetStreamContext, stream: str, **options: str) -> list[SequenceRange]:
    return await plan_read(js, ReadOptions.parse({"servers": "nats://unused", "stream": stream} | options))


def spans(parts: list[SequenceRange]) -> list[tuple[int, int]]:
    return [(part.first, part.last) for part in parts]


async def test_a_time_finds_its_message_where_the_server_answers_with_another_one(cell: Any) -> None:
    for storage in ["memory", "file"]:
        with cell(storage):
            async with NatsServer(version="2.11.11") as old, await nats.connect(old.url, connect_timeout=10) as nc:
                js = nc.jetstream(timeout=10)
                await js.add_stream(name="S", subjects=["S"], allow_direct=True, storage=storage)
                for _ in range(10):
                    await js.publish("S")
                last = (await jsx.DirectGet(js, "S").get(9)).time
                for seq in (4, 5, 6, 10):
                    await js.delete_msg("S", seq)
                assert await plan(js, "S", startingTime="2100-01-01T00:00:00Z") == []
                for subjects in ({}, {"subjects": "S"}):
                    assert spans(await plan(js, "S", startingTime=last.isoformat(), **subjects)) == [(9, 9), (10, 10)]
                    assert spans(await plan(js, "S", endingTime=last.isoformat(), minPartitions="1")) == [(1, 8)]


async def test_an_empty_stream_has_no_partitions(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    stream = await fill(js, stream_name(), messages=0)
    assert await plan(js, stream) == []
    assert await plan(js, stream, startingTime="2020-01-01T00:00:00Z", endingTime="2030-01-01T00:00:00Z") == []
    other = await fill(js, stream_name())
    await js.purge_stream(other)
    assert await plan(js, other) == []


async def test_several_streams_share_the_partitions(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    large = await fill(js, stream_name(), messages=900)
    small = await fill(js, stream_name(), messages=100)
    parts = await plan(js, f"{large},{small}", minPartitions="4", startingOffsets=f'{{"{small}": 51}}')
    assert [(part.stream, part.first, part.last) for part in parts] == [
        (large, 1, 300),
        (large, 301, 600),
        (large, 601, 900),
        (small, 51, 100),
    ]


async def test_sequences_bound_the_read(cell: Any, js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    async def check(start: str, end: str, expected: tuple[int, int] | None) -> None:
        stream = await fill(js, stream_name())

        def option(text: str) -> str:
            return f'{{"{stream}": {text}}}' if text.isdigit() else text

        parts = await plan(js, stream, startingOffsets=option(start), endingOffsets=option(end), minPartitions="1")
        assert spans(parts) == ([expected] if expected else [])

    for start, end, expected in [
        ("earliest", "latest", (1, 10)),
        ("3", "7", (3, 7)),
        ("3", "latest", (3, 10)),
        ("10", "10", (10, 10)),
        ("11", "latest", None),
        ("5", "4", None),
    ]:
        with cell(start, end, expected):
            await check(start, end, expected)


async def test_times_bound_the_read(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    stream = await fill(js, stream_name(), messages=0)
    times: list[str] = []
    for _ in range(3):
        await asyncio.sleep(0.01)
        times.append(datetime.now(UTC).isoformat())
        await asyncio.sleep(0.01)
        await js.publish(f"{stream}.x", b"")
    before, after = "2020-01-01T00:00:00Z", (datetime.now(UTC) + timedelta(hours=1)).isoformat()

    async def between(start: str, end: str) -> list[tuple[int, int]]:
        return spans(await plan(js, stream, startingTime=start, endingTime=end, minPartitions="1"))

    assert await between(before, after) == [(1, 3)]
    assert await between(times[0], times[1]) == [(1, 1)]
    assert await between(times[1], after) == [(2, 3)]
    assert await between(times[1], times[1]) == []
    assert await between(before, times[0]) == []
    assert await between(after, after) == []
    # The time of a message itself: a start includes it, an end does not.
    second = (await jsx.DirectGet(js, stream).get(2)).time.isoformat()
    assert await between(second, after) in ([(2, 3)], [(3, 3)])  # stored in nanoseconds, returned in microseconds
    assert await between(before, second) == [(1, 1)]


async def test_a_stream_without_allow_direct_is_refused(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    stream = await fill(js, stream_name(), allow_direct=False)
    with pytest.raises(DirectGetDisabledError, match=f"'{stream}': .*jetstream-ext enable {stream} --direct"):
        await plan(js, stream)


async def test_an_unanswered_api_prefix_is_named(server: NatsServer, js: JetStreamContext) -> None:
    elsewhere = js._nc.jetstream(domain="nowhere", timeout=3)
    with pytest.raises(PlanningError, match=r"no server answers on \$JS.nowhere.API.STREAM.INFO.A: .*'domain'"):
        await plan(elsewhere, "A")


async def test_missing_sequences_are_a_loss(
    cell: Any, js: JetStreamContext, stream_name: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    for start, end, message, instead in [
        ("2", "8", "sequences 2 to 4 of stream .* are gone .*; the stream now starts at 5", [(5, 8)]),
        ("30", "40", "ends at sequence 10, before the start at 30; the stream may have been re-created", []),
        ("6", "12", "ends at sequence 10, before the end of the read at 12", [(6, 10)]),
    ]:
        with cell(start, end, message, instead):
            stream = await fill(js, stream_name())
            await js.purge_stream(stream, seq=5)
            ends = {"startingOffsets": f'{{"{stream}": {start}}}', "endingOffsets": f'{{"{stream}": {end}}}'}
            with pytest.raises(DataLossError, match=message):
                await plan(js, stream, **ends)
            parts = await plan(js, stream, failOnDataLoss="false", minPartitions="1", **ends)
            assert spans(parts) == instead
            assert "failOnDataLoss is false" in caplog.text
            assert spans(await plan(js, stream, minPartitions="1")) == [(5, 10)]  # earliest is the first stored message


async def test_a_filter_equal_to_the_subjects_still_filters(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    stream, other = stream_name(), stream_name()
    await js.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.*", other], allow_direct=True))
    await js.publish(other, b"from before")
    await js.update_stream(StreamConfig(name=stream, subjects=[f"{stream}.*"], allow_direct=True))
    await js.publish(f"{stream}.1", b"")
    assert {part.filters for part in await plan(js, stream, subjects=f"{stream}.*")} == {(f"{stream}.*",)}


async def test_a_server_before_2_11_is_refused(stream_name: Callable[[], str]) -> None:
    with NatsServer(version="2.10.26") as old:
        nc = await nats.connect(old.url, connect_timeout=10)
        try:
            js = nc.jetstream()
            stream = stream_name()
            await js.add_stream(StreamConfig(name=stream, subjects=[stream], allow_direct=True))
            await js.publish(stream, b"")
            with pytest.raises(UnsupportedFeatureError, match=r"needs nats-server 2\.11"):
                await plan(js, stream)
        finally:
            await nc.close()


async def test_too_many_partitions_are_refused(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    stream = await fill(js, stream_name(), messages=1000)
    assert len(await plan(js, stream, maxRecordsPerPartition="5")) == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MOST_PARTITIONS", 199)
        for option in ("maxRecordsPerPartition", "maxBytesPerPartition"):
            with pytest.raises(PlanningError, match=r"its 1,000 messages would make [\d,]+ partitions"):
                await plan(js, stream, **{option: "5"})
