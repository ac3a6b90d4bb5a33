"""The partitions of a read: cut by its rows, wherever the stream starts, and the same for all attempts."""

from __future__ import annotations

from typing import Any

import pytest

from jetstream_ext.errors import JetStreamExtError


def test_the_first_micro_batch_is_cut_where_the_stream_starts(make_stream: Any, stream_query: Any) -> None:
    query = stream_query(make_stream(80, first_seq=900_000_000), minPartitions="8")
    start = query.initial()
    parts = query.parts(start, query.latest(start))
    assert sum(map(len, parts)) == 80, "rows are missing"
    assert max(map(len, parts)) <= 20


def test_a_batch_read_is_cut_where_the_stream_starts(make_stream: Any, batch_read: Any) -> None:
    reader = batch_read(make_stream(80, first_seq=900_000_000), minPartitions="8")
    assert [len(reader.read(partition)) for partition in reader.partitions()] == [10] * 8


def test_a_replay_with_other_min_partitions_has_the_same_partitions(make_stream: Any, stream_query: Any) -> None:
    name = make_stream(100)
    query = stream_query(name, minPartitions="2")
    start = query.initial()
    end = query.latest(start)
    before = query.parts(start, end)
    assert stream_query(name, minPartitions="4").parts(start, end) == before


def test_a_replay_of_a_stream_that_changed_has_the_same_partitions(
    make_stream: Any, stream_query: Any, publish: Any, with_js: Any
) -> None:
    name = make_stream(100)
    query = stream_query(name, minPartitions="4")
    start = query.initial()
    end = query.latest(start)
    before = query.parts(start, end)
    with_js(lambda js: js.purge_stream(name, seq=11))
    publish([(f"{name}.a", bytes(1000))] * 100)
    with pytest.raises(JetStreamExtError, match="sequences 1 to 10 of stream"):
        stream_query(name).parts(start, end)
    after = stream_query(name, failOnDataLoss="false").parts(start, end)
    assert after == [before[0][10:], *before[1:]]


def test_max_records_per_partition_bounds_the_rows_of_every_partition(make_stream: Any, stream_query: Any) -> None:
    query = stream_query(make_stream(95), minPartitions="2", maxRecordsPerPartition="10")
    start = query.initial()
    parts = query.parts(start, query.latest(start))
    assert [row["seq"] for part in parts for row in part] == list(range(1, 96))
    assert max(map(len, parts)) <= 10
