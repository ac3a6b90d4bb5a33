"""A stream whose messages are spread over 100,000,000 sequences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource

import jetstream_ext as jsx

RUNS, ROWS, DISTANCE = (
    100,
    500,
    1_000_000,
)  # runs of messages without a gap, the messages of each, and between their starts
SUBJECTS = 10


@pytest.fixture(scope="module")
def names() -> list[str]:
    return []


@pytest.fixture
def sparse(names: list[str], with_js: Any, stream_name: Callable[[], str]) -> str:
    """Make the stream: a mirror of one whose sequence goes on far behind its last message after each purge."""

    async def fill(js: JetStreamContext) -> str:
        origin, mirror = stream_name(), stream_name()
        await js.add_stream(
            StreamConfig(name=origin, subjects=[f"{origin}.*"], allow_batched=True, storage="memory")  # type: ignore[arg-type]
        )
        await js.add_stream(StreamConfig(name=mirror, mirror=StreamSource(name=origin), allow_direct=True))
        for run in range(RUNS):
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((f"{origin}.{row % SUBJECTS}", b"%d" % row) for row in range(ROWS))
            last = run * DISTANCE + ROWS
            while (await js.stream_info(mirror)).state.last_seq < last:
                await asyncio.sleep(0.01)
            request = json.dumps({"seq": last - ROWS + DISTANCE + 1}).encode()
            await js._nc.request(f"$JS.API.STREAM.PURGE.{origin}", request, timeout=10)
        await js.delete_stream(origin)
        return mirror

    if not names:
        names.append(with_js(fill))
    return names[0]


def _expected(rows: Callable[[int], bool] = lambda _: True) -> list[int]:
    return [run * DISTANCE + row + 1 for run in range(RUNS) for row in range(ROWS) if rows(row)]


def test_it_is_planned_with_few_requests_in_even_partitions(sparse: str, batch_read: Any, requests_seen: Any) -> None:
    query = batch_read(sparse, minPartitions="4")
    with requests_seen(sparse) as requests:
        parts = query.partitions()
    assert len(requests) < 100
    found = [[row["seq"] for row in query.read(part)] for part in parts]
    assert [seq for part in found for seq in part] == _expected()
    assert len(found) == 4
    assert all(0.8 <= len(part) * 4 / (RUNS * ROWS) <= 1.2 for part in found)


def test_a_filter_reads_only_what_it_matches(cell: Any, sparse: str, batch_read: Any) -> None:
    def check(wanted: list[str]) -> None:
        query = batch_read(sparse, subjects=",".join(f"*.{subject}" for subject in wanted), minPartitions="3")
        assert [row["seq"] for row in query.rows()] == _expected(lambda row: str(row % SUBJECTS) in wanted)

    for wanted in [["3"], ["3", "7"]]:
        with cell(wanted):
            check(wanted)


def test_no_partition_has_more_rows_than_allowed(sparse: str, batch_read: Any) -> None:
    query = batch_read(sparse, maxRecordsPerPartition="7000")
    counts = [len(query.read(part)) for part in query.partitions()]
    assert sum(counts) == RUNS * ROWS
    assert max(counts) <= 7000
    assert len(counts) <= 2 * RUNS * ROWS // 7000


def test_a_micro_batch_has_as_many_rows_as_the_limit_allows(sparse: str, stream_query: Any) -> None:
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="limits need Spark 4.2")
    query = stream_query(sparse, maxRowsPerTrigger="20000")
    at, found = query.initial(), []
    while (end := query.latest(at)) != at:
        found.append(query.seqs(at, end))
        at = end
    assert [len(rows) for rows in found] == [20_000, 20_000, 10_000]
    assert [seq for rows in found for seq in rows] == _expected()
