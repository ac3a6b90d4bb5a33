"""Queries whose streams change: a stream is added on a restart, and a pattern finds new ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def _rows(query: Any, start: dict[str, Any], end: dict[str, Any], stream: str) -> list[int]:
    return [row["seq"] for part in query.parts(start, end) for row in part if row["stream"] == stream]


def test_a_stream_added_on_a_restart_starts_at_the_starting_time(
    make_stream: Any, stream_query: Any, with_js: Any
) -> None:
    old, added = make_stream(10), make_stream(10)
    when = (with_js(lambda js: js.get_msg(old, 1)).time - timedelta(hours=1)).isoformat()
    query = stream_query(old, startingTime=when)
    # Spark before 4.2 passes neither the start of a micro-batch nor a limit.
    begin = query.reader.latestOffset()
    query = stream_query(f"{old},{added}", startingTime=when)
    end = query.reader.latestOffset()
    assert _rows(query, begin, end, added) == list(range(1, 11))


def test_stream_pattern_discovers_a_stream_that_is_created_later(
    make_stream: Any, stream_query: Any, stream_name: Any
) -> None:
    prefix = stream_name()
    first, later = f"{prefix}_1", f"{prefix}_2"
    make_stream(10, name=first)
    query = stream_query("", streamPattern=f"{prefix}_.*")
    start = query.initial()
    end = query.latest(start)
    assert _rows(query, start, end, first) == list(range(1, 11))
    make_stream(5, name=later)
    assert _rows(query, end, query.latest(end), later) == [1, 2, 3, 4, 5]
