"""With ``failOnDataLoss``, a read either has every row that was stored when it was planned, or it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jetstream_ext.errors import JetStreamExtError

# Several times what a reader takes from the server before Spark takes it from the reader.
MESSAGES = 100_000


@pytest.fixture
def fill(make_stream: Any, publish: Any, with_js: Any) -> Callable[[int], str]:
    """Make a stream with some messages deleted near its beginning."""

    def make(deleted: int) -> str:
        name: str = make_stream()
        publish([(f"{name}.a", b"")] * MESSAGES)
        for seq in range(500, 500 + deleted):
            with_js(lambda js, seq=seq: js.delete_msg(name, seq))
        return name

    return make


def _purge_while_reading(reader: Any, partition: Any, purge: Callable[[], Any]) -> int | None:
    """Return how many rows the read has, or None: it failed."""
    batches = reader.batches(partition)
    rows = next(batches).num_rows
    purge()
    try:
        return rows + sum(batch.num_rows for batch in batches)
    except JetStreamExtError:
        return None


STARTS = [("first sequence", 1), ("earliest", 0)]


def _starting(name: str, start: str) -> str:
    return json.dumps({name: 1}) if start == "first sequence" else start


def test_a_purge_during_a_batch_read_is_noticed(cell: Any, fill: Any, batch_read: Any, with_js: Any) -> None:
    def check(start: str, deleted: int) -> None:
        name = fill(deleted)
        reader = batch_read(name, minPartitions="1", startingOffsets=_starting(name, start))
        [partition] = reader.partitions()
        rows = _purge_while_reading(reader, partition, lambda: with_js(lambda js: js.purge_stream(name)))
        assert rows in (None, MESSAGES - deleted)

    for start, deleted in STARTS:
        with cell(start, deleted):
            check(start, deleted)


def test_a_purge_during_a_micro_batch_is_noticed(cell: Any, fill: Any, stream_query: Any, with_js: Any) -> None:
    def check(start: str, deleted: int) -> None:
        name = fill(deleted)
        query = stream_query(name, minPartitions="1", startingOffsets=_starting(name, start))
        begin = query.initial()
        [partition] = query.partitions(begin, query.latest(begin))
        rows = _purge_while_reading(query, partition, lambda: with_js(lambda js: js.purge_stream(name)))
        assert rows in (None, MESSAGES - deleted)

    for start, deleted in STARTS:
        with cell(start, deleted):
            check(start, deleted)


def test_a_purge_during_a_read_by_subject_is_noticed(
    make_stream: Any, publish: Any, batch_read: Any, with_js: Any
) -> None:
    name, matching = make_stream(), 200
    # One of seven messages matches, so that the server filters.
    rows = [(f"{name}.{number % 7}", b"" if number % 7 else bytes(1 << 18)) for number in range(7 * matching)]
    publish(rows)
    reader = batch_read(
        name, subjects=f"{name}.0", minPartitions="1", startingOffsets=_starting(name, "first sequence")
    )
    [partition] = reader.partitions()
    assert _purge_while_reading(reader, partition, lambda: with_js(lambda js: js.purge_stream(name))) in (
        None,
        matching,
    )
