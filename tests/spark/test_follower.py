"""The position of a streaming query in its streams, without Spark."""

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.client import api
from jetstream_ext.spark import lag
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, PlanningError
from jetstream_ext.spark.streaming import Follower

Offset = dict[str, Any]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "SETTLE", 0.3)


@pytest.fixture
def make(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., Awaitable[str]]:
    async def make_stream(messages: int = 10, name: str | None = None, **config: Any) -> str:
        name = name or stream_name()
        await js.add_stream(
            StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True).evolve(**config)
        )
        await more(js, name, messages)
        return name

    return make_stream


async def more(js: JetStreamContext, name: str, messages: int, size: int = 1) -> None:
    if messages:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{name}.{i % 10}", bytes(size)) for i in range(messages))


def follower(*streams: str, **options: str) -> Follower:
    named = {"stream": ",".join(streams)} if streams else {}
    given = {"servers": "nats://unused"} | named | options
    return Follower(ReadOptions.parse(given, streaming=True))


def seqs(offset: Offset) -> dict[str, int]:
    return {name: at["seq"] for name, at in offset["streams"].items()}


def spans(parts: list[Any]) -> list[tuple[int, int]]:
    return [(part.first, part.last) for part in parts]


async def test_a_start_that_depends_on_the_moment_is_pinned(
    cell: Any, js: JetStreamContext, make: Callable[..., Awaitable[str]]
) -> None:
    for option in ["startingOffsets", "startingTime"]:
        with cell(option):
            name = await make(10)
            options = {option: "latest" if option == "startingOffsets" else datetime.now(UTC).isoformat()}
            query = follower(name, **options)
            start = await query.initial(js)
            await more(js, name, 2)
            assert await query.initial(js) == start
            assert await query.latest(js, start) == start  # batch 0 is empty and puts it into the checkpoint
            end = await query.latest(js, start)
            assert (seqs(start), seqs(end)) == ({name: 10}, {name: 12})
            # The query died before batch 0 was committed: the start is resolved again, maybe later, and the end of the batch stays.
            again = follower(name, **options)
            await more(js, name, 3)
            moved = await again.initial(js)
            assert seqs(moved) == {name: 15 if option == "startingOffsets" else 10}
            assert await again.plan(js, moved, start) == []
            assert seqs(await again.latest(js, start)) == {name: 15}


async def test_a_query_starts_at_a_sequence(js: JetStreamContext, make: Callable[..., Awaitable[str]]) -> None:
    name = await make(10)
    query = follower(name, startingOffsets=json.dumps({name: 4}))
    start = await query.initial(js)
    end = await query.latest(js, start)
    assert (seqs(start), spans(await query.plan(js, start, end))) == ({name: 3}, [(4, 6), (7, 10)])
    with pytest.raises(DataLossError, match="before the start at 12"):
        await follower(name, startingOffsets=json.dumps({name: 12})).initial(js)
    waiting = follower(name, startingOffsets=json.dumps({name: 11}))
    start = await waiting.initial(js)
    assert await waiting.latest(js, start) == start


async def test_each_stream_may_start_at_another_end(js: JetStreamContext, make: Callable[..., Awaitable[str]]) -> None:
    whole, new = await make(10), await make(10)
    query = follower(whole, new, startingOffsets=json.dumps({whole: "earliest", new: "latest"}))
    start = await query.initial(js)
    assert seqs(start) == {whole: 0, new: 10}
    assert await query.latest(js, start) == start  # it is pinned
    await more(js, new, 1)
    end = await query.latest(js, start)
    assert [(part.stream, part.first, part.last) for part in await query.plan(js, start, end)] == [
        (name, *span) for name in sorted((whole, new)) for span in ([(1, 10)] if name == whole else [(11, 11)])
    ]


async def test_a_query_starts_at_a_time(js: JetStreamContext, make: Callable[..., Awaitable[str]]) -> None:
    name = await make(10)
    when = (await jsx.DirectGet(js, name).get(4)).time.isoformat()
    query = follower(name, startingTime=when)
    start = await query.initial(js)
    assert 1 <= seqs(start)[name] <= 3
    # A later request returns the same start, so nothing is pinned.
    assert seqs(await query.latest(js, start)) == {name: 10}
    assert seqs(await follower(name, startingTime=when).latest(js, None)) == {name: 10}
    await more(js, name, 5)
    assert seqs(await follower(name, startingTime=when).initial(js)) == seqs(start)


async def test_a_query_that_starts_in_the_future_reads_nothing_that_is_stored_before(
    js: JetStreamContext, make: Callable[..., Awaitable[str]]
) -> None:
    name = await make(10)
    soon = datetime.now(UTC) + timedelta(seconds=5)  # time enough to store five messages
    query = follower(name, startingTime=soon.isoformat())
    starting = asyncio.create_task(query.initial(js))
    await asyncio.sleep(0.1)
    await more(js, name, 5)
    start = await starting
    assert datetime.now(UTC) >= soon
    assert seqs(start) == {name: 15}
    with pytest.raises(PlanningError, match="is in the future"):
        await follower(name, startingTime="2100-01-01T00:00:00Z").initial(js)


async def test_streams_share_a_limit_by_their_backlogs(
    js: JetStreamContext, make: Callable[..., Awaitable[str]]
) -> None:
    large, small = await make(90), await make(10)
    query = follower(large, small, maxRowsPerTrigger="20")
    offset = await query.initial(js)
    taken = []
    for _ in range(30):
        last, offset = offset, await query.latest(js, offset)
        if offset == last:
            break
        taken.append(tuple(seqs(offset)[name] for name in (large, small)))
    assert taken[0] == (18, 2)
    assert taken[-1] == (90, 10)
    assert all(sum(after) - sum(before) <= 21 for before, after in itertools.pairwise(taken))
    state = (await js.stream_info(large)).state
    each = state.bytes / state.messages
    start = await follower(large).initial(js)
    by_size = await follower(large, maxBytesPerTrigger=f"{int(each * 30.5)}").latest(js, start)
    assert seqs(by_size) == {large: 30}
    least = await follower(large, maxBytesPerTrigger="1").latest(js, start)
    assert seqs(least) == {large: 1}


async def test_available_now_ends_at_the_messages_stored_before(
    js: JetStreamContext, make: Callable[..., Awaitable[str]]
) -> None:
    name = await make(10)
    query = follower(name)
    await query.freeze(js)
    await more(js, name, 5)
    end = await query.latest(js, await query.initial(js))
    assert seqs(end) == {name: 10}
    assert await query.latest(js, end) == end
    latest = follower(name, startingOffsets="latest")
    await latest.freeze(js)
    await more(js, name, 5)
    start = await latest.initial(js)
    assert await latest.latest(js, start) == await latest.latest(js, start) == start


async def test_a_restart_can_add_and_remove_streams(
    js: JetStreamContext, make: Callable[..., Awaitable[str]], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = await make(10), await make(5)
    first = follower(one)
    start = await first.latest(js, await first.initial(js))
    both = follower(one, other)
    end = await both.latest(js, start)
    assert seqs(end) == {one: 10, other: 5}
    parts = await both.plan(js, start, end)
    assert ({part.stream for part in parts}, spans(parts)) == ({other}, [(1, 2), (3, 5)])
    pinned = follower(one, other, startingOffsets="latest")
    added = await pinned.latest(js, start)
    assert seqs(added) == {one: 10, other: 5}
    assert await pinned.plan(js, start, added) == []  # and the next micro-batch continues there
    only = follower(other)
    # Before the offset is in Spark's log, so that the stream can be added again.
    with pytest.raises(
        DataLossError, match=f"'{one}' is in the checkpoint of this query but not in the option 'stream'"
    ):
        await only.latest(js, end)
    lax = follower(other, failOnDataLoss="false")
    gone = await lax.latest(js, end)
    assert seqs(gone) == {other: 5}
    assert caplog.text.count("is in the checkpoint of this query but not in") == 1
    assert await only.plan(js, end, gone) == []
    without_start = await follower(other).latest(js, None)
    with pytest.raises(DataLossError, match="is in the checkpoint of this query but not in"):
        await only.plan(js, end, without_start)


class TestLoss:
    @pytest.fixture
    async def read(self, js: JetStreamContext, make: Callable[..., Awaitable[str]]) -> tuple[str, Offset]:
        """A stream of 20, and an offset at 10."""
        name = await make(10)
        query = follower(name)
        offset = await query.latest(js, await query.initial(js))
        await more(js, name, 10)
        return name, offset

    async def test_a_head_purged_since_the_plan_is_a_loss(
        self, js: JetStreamContext, read: tuple[str, Offset], caplog: pytest.LogCaptureFixture
    ) -> None:
        name, start = read
        end = await follower(name).latest(js, start)
        await js.purge_stream(name, seq=15)
        with pytest.raises(DataLossError, match=f"sequences 11 to 14 of stream '{name}' are gone .*now starts at 15"):
            await follower(name).plan(js, start, end)
        with caplog.at_level(logging.WARNING, "jetstream_ext"):
            parts = await follower(name, failOnDataLoss="false").plan(js, start, end)
        assert (spans(parts), [part.from_head for part in parts]) == ([(11, 15), (16, 20)], [True, False])
        assert caplog.text.count("sequences 11 to 14") == 1

    async def test_a_micro_batch_passes_what_has_all_expired(
        self, js: JetStreamContext, read: tuple[str, Offset]
    ) -> None:
        name, start = read
        await js.purge_stream(name)
        for options in ({}, {"subjects": f"{name}.1", "maxRecordsPerPartition": "1"}):
            lax = follower(name, failOnDataLoss="false", **options)
            end = await lax.latest(js, start)
            assert (seqs(end), await lax.plan(js, start, end)) == ({name: 20}, [])
            assert await lax.latest(js, end) == end

    async def test_a_stream_that_lost_its_end_is_a_loss(self, js: JetStreamContext, read: tuple[str, Offset]) -> None:
        name, start = read
        start["streams"][name] |= {"seq": 30, "ends": []}
        with pytest.raises(DataLossError, match="ends at sequence 20, but the query has already read up to 30"):
            await follower(name).latest(js, start)
        lax = follower(name, failOnDataLoss="false")
        end = await lax.latest(js, start)
        for query in (lax, follower(name)):
            assert spans(await query.plan(js, start, end)) == [(1, 10), (11, 20)]
        end = {"v": 2, "streams": {name: {"created": start["streams"][name]["created"], "seq": 20, "head": 1}}}
        with pytest.raises(DataLossError, match=r"ends at sequence 20, .* has already read up to 30"):
            await follower(name).plan(js, start, end)

    async def test_a_missing_stream_is_a_loss(
        self, js: JetStreamContext, make: Callable[..., Awaitable[str]], stream_name: Callable[[], str]
    ) -> None:
        missing = stream_name()
        with pytest.raises(DataLossError, match="does not exist"):
            await follower(missing).initial(js)
        lax = follower(missing, failOnDataLoss="false")
        start = await lax.initial(js)
        assert await lax.latest(js, start) == start
        await make(3, missing)
        end = await lax.latest(js, start)
        assert spans(await lax.plan(js, start, end)) == [(1, 1), (2, 3)]

    async def test_streams_without_limits_retention_are_refused(
        self, cell: Any, js: JetStreamContext, make: Callable[..., Awaitable[str]]
    ) -> None:
        async def check(retention: str) -> None:
            name = await make(0, retention=retention)
            with pytest.raises(PlanningError, match=f"has {retention} retention.*allowUnstableRetention"):
                await follower(name).initial(js)
            assert seqs(await follower(name, allowUnstableRetention="true").initial(js)) == {name: 0}

        for retention in ["workqueue", "interest"]:
            with cell(retention):
                await check(retention)


class TestAStartThatTheStreamHasNotReached:
    async def test_a_restarted_query_still_waits_for_it(
        self, cell: Any, js: JetStreamContext, make: Callable[..., Awaitable[str]]
    ) -> None:
        for messages in [0, 10]:
            with cell(messages):
                name = await make(messages)
                options = {"startingOffsets": json.dumps({name: 20}), "failOnDataLoss": "false"}
                query = follower(name, **options)
                start = await query.initial(js)
                assert await query.latest(js, start) == await query.latest(js, start) == start
                restarted = follower(name, **options)
                assert await restarted.latest(js, start) == start
                await more(js, name, 21 - messages)
                assert spans(await restarted.plan(js, start, await restarted.latest(js, start))) == [(20, 20), (21, 21)]


class TestRecreation:
    async def test_fail_replays_no_micro_batch_of_a_recreated_stream(
        self, js: JetStreamContext, make: Callable[..., Awaitable[str]]
    ) -> None:
        """Otherwise Spark would take the micro-batch as done, and a stream that is restored then would lack it."""
        name = await make(10)
        query = follower(name)
        start = await query.initial(js)
        end = await query.latest(js, start)
        await js.delete_stream(name)
        await make(3, name)
        with pytest.raises(DataLossError, match="was deleted and re-created"):
            await follower(name, failOnDataLoss="false", onRecreate="fail").plan(js, start, end)

    async def test_keep_waits_before_spark_4_2_where_the_stream_is_away_for_a_while(
        self, js: JetStreamContext, make: Callable[..., Awaitable[str]]
    ) -> None:
        name = await make(10)
        query = follower(name, onRecreate="keep", failOnDataLoss="false")
        begun = await query.latest(js, None)
        await js.delete_stream(name)
        away = await query.latest(js, None)
        assert await query.plan(js, begun, away) == []
        await make(4, name)
        for _ in range(2):
            kept = await query.latest(js, None)
            assert seqs(kept) == {name: 10}
            assert await query.plan(js, away, kept) == []
        await more(js, name, 8)
        assert spans(await query.plan(js, kept, await query.latest(js, None))) == [(11, 11), (12, 12)]


async def test_a_pattern_follows_streams_that_come(
    js: JetStreamContext, make: Callable[..., Awaitable[str]], stream_name: Callable[[], str]
) -> None:
    prefix = stream_name()
    await make(3, f"{prefix}-a")
    await make(3, f"x-{prefix}-a")  # the pattern is that of a whole name
    query = follower(streamPattern=f"{prefix}-.*", startingOffsets="latest")
    start = await query.initial(js)
    assert seqs(start) == {f"{prefix}-a": 3}
    assert await query.latest(js, start) == start
    await make(4, f"{prefix}-b")
    end = await query.latest(js, start)
    assert [(part.stream, part.first, part.last) for part in await query.plan(js, start, end)] == [
        (f"{prefix}-b", 1, 2),
        (f"{prefix}-b", 3, 4),
    ]
    await js.delete_stream(f"{prefix}-b")
    with pytest.raises(DataLossError, match="not among the streams that match 'streamPattern'"):
        await query.latest(js, end)
    lax = follower(streamPattern=f"{prefix}-.*", failOnDataLoss="false")
    gone = await lax.latest(js, end)
    assert seqs(gone) == {f"{prefix}-a": 3}
    assert await lax.plan(js, end, gone) == []
    assert lag({"sources": [{"endOffset": gone, "latestOffset": lax.reported()}]}) == {f"{prefix}-a": 0}
