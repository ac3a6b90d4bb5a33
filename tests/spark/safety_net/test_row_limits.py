"""The row limits of a micro-batch, however many sequences its rows are spread over."""

from __future__ import annotations

from typing import Any

import pytest

try:
    import pyspark.sql.streaming.datasource  # noqa: F401
except ImportError:
    pytest.skip("limits need Spark 4.2", allow_module_level=True)


def _micro_batches(query: Any) -> list[int]:
    """Return how many rows each micro-batch has until all are read."""
    counts: list[int] = []
    at = query.initial()
    while (end := query.latest(at)) != at:
        counts.append(len(query.seqs(at, end)))
        at = end
    return counts


def test_max_rows_per_trigger_counts_the_rows_that_match_a_filter(
    make_stream: Any, stream_query: Any, publish: Any
) -> None:
    name = make_stream()
    publish([(f"{name}.{'wanted' if number % 100 == 99 else 'other'}", b"") for number in range(5000)])
    query = stream_query(name, subjects=f"{name}.wanted", maxRowsPerTrigger="20")
    assert _micro_batches(query) == [20, 20, 10]


def test_min_rows_per_trigger_waits_for_enough_rows(make_stream: Any, stream_query: Any, publish: Any) -> None:
    name = make_stream(5)
    query = stream_query(name, minRowsPerTrigger="10", maxTriggerDelay="1h")
    start = query.initial()
    assert query.seqs(start, query.latest(start)) == []
    publish([(f"{name}.a", b"")] * 5)
    assert query.seqs(start, query.next(start)) == list(range(1, 11))


def test_max_trigger_delay_ends_the_wait_for_enough_rows(make_stream: Any, stream_query: Any) -> None:
    query = stream_query(make_stream(5), minRowsPerTrigger="10", maxTriggerDelay="1s")
    start = query.initial()
    assert query.latest(start) == start
    assert query.seqs(start, query.next(start)) == [1, 2, 3, 4, 5]


def test_min_rows_per_trigger_waits_while_no_row_matches(make_stream: Any, stream_query: Any) -> None:
    stream = make_stream(10)
    query = stream_query(stream, subjects=f"{stream}.other", minRowsPerTrigger="5")
    start = query.initial()
    assert query.latest(start) == start
