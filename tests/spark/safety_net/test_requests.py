"""The cost of a read for the server: messages sent for rows, and requests for a plan, an idle query and a partition."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

import jetstream_ext as jsx

MESSAGES = 20_000


@pytest.fixture(scope="module")
def rare(measured: Any) -> str:
    """A stream of many messages, three of which are on rare subjects."""

    async def fill() -> None:
        async with await nats.connect(measured.url, connect_timeout=10) as nc:
            js = nc.jetstream()
            await js.add_stream(StreamConfig(name="RARE", subjects=["RARE.>"], allow_direct=True, allow_batched=True))
            subjects = {100: "RARE.first", 10_000: "RARE.second", 19_000: "RARE.first"}
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((subjects.get(seq, "RARE.common"), b"") for seq in range(1, MESSAGES + 1))

    asyncio.run(fill())
    return "RARE"


def test_a_batch_read_of_several_rare_subjects_is_sent_few_other_messages(
    measured: Any, rare: str, batch_read: Any
) -> None:
    reader = batch_read(rare, servers=measured.url, subjects="RARE.first,RARE.second")
    before = measured.sent()
    assert sorted(row["seq"] for row in reader.rows()) == [100, 10_000, 19_000], "rows are missing"
    assert measured.sent() - before < 500


@pytest.mark.parametrize("options", [{"minPartitions": "20"}, {"maxRowsPerTrigger": "50"}], ids=str)
def test_many_subjects_are_planned_with_few_requests(
    make_stream: Any, stream_query: Any, publish: Any, requests_seen: Any, options: dict[str, str]
) -> None:
    if "maxRowsPerTrigger" in options:
        pytest.importorskip("pyspark.sql.streaming.datasource", reason="limits need Spark 4.2")
    name = make_stream()
    publish([(f"{name}.{number % 500}", b"") for number in range(5000)])
    query = stream_query(name, subjects=",".join(f"{name}.{number}" for number in range(50)), **options)
    start = query.initial()
    with requests_seen(name) as requests:
        query.latest(start)
    assert len(requests) < 1500


def test_an_idle_query_asks_the_server_at_most_twice_a_second(
    make_stream: Any, stream_query: Any, requests_seen: Any
) -> None:
    name, seconds = make_stream(10), 3
    query = stream_query(name)
    end = query.latest(query.initial())
    until = time.monotonic() + seconds
    with requests_seen(name) as requests:
        while time.monotonic() < until:
            assert query.latest(end) == end, "there is something new"
            time.sleep(0.01)  # as Spark does
    assert len(requests) <= 2 * seconds + 1


@pytest.mark.parametrize("streaming", [False, True])
def test_the_identity_of_a_stream_is_checked_once_for_all_partitions(
    make_stream: Any, batch_read: Any, stream_query: Any, requests_seen: Any, streaming: bool
) -> None:
    name = make_stream(800)
    reader = (stream_query if streaming else batch_read)(name, minPartitions="8")
    start = reader.initial() if streaming else {}
    partitions = reader.partitions(start, reader.latest(start)) if streaming else reader.partitions()
    with requests_seen(name) as requests:
        assert [len(reader.read(partition)) for partition in partitions] == [100] * 8, "rows are missing"
    assert sum(".STREAM.INFO." in request for request in requests) <= 1
