"""Offsets in Spark's checkpoint, and the lag computed from the progress of a query."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from jetstream_ext.spark import lag
from jetstream_ext.spark.offsets import Offset, OffsetError, Position, decode, encode

TIME = datetime(2026, 1, 31, 13, 45, 0, 123456, UTC)


def test_an_offset_is_decoded_as_it_was_encoded() -> None:
    planned = Position("2026-01-01T00:00:00Z", 7, ((9, TIME), (1, TIME)), first=3, cuts=(5, 6))
    before_4_2 = Position("2026-01-01T00:00:00Z", 7, ((9, TIME), (1, TIME)), head=3, skipped=0)
    offset = Offset({"C": before_4_2, "B": planned, "A": Position("", 0)}, partitions=3)
    encoded = encode(offset)
    assert json.dumps(encoded) == (
        '{"v": 2, "partitions": 3, "streams": {"A": {"created": "", "seq": 0}, '
        '"B": {"created": "2026-01-01T00:00:00Z", "seq": 7, "ends": [[9, "2026-01-31T13:45:00.123456+00:00"], [1, "2026-01-31T13:45:00.123456+00:00"]], '
        '"first": 3, "cuts": [5, 6]}, '
        '"C": {"created": "2026-01-01T00:00:00Z", "seq": 7, "ends": [[9, "2026-01-31T13:45:00.123456+00:00"], [1, "2026-01-31T13:45:00.123456+00:00"]], '
        '"head": 3, "skipped": 0}}}'
    )
    assert decode(json.loads(json.dumps(encoded))) == offset


def test_an_offset_of_version_1_is_decoded() -> None:
    offset = decode({"v": 1, "streams": {"A": {"created": "2026-01-01T00:00:00Z", "seq": 7}}})
    assert offset == Offset({"A": Position("2026-01-01T00:00:00Z", 7)}, version=1)


def test_an_invalid_offset_is_refused(cell: Any) -> None:
    for offset in [
        {},
        {"v": 3, "streams": {}},
        {"v": True, "streams": {}},
        {"v": [2], "streams": {}},
        {"v": 1},
        {"v": 1, "streams": {"A": 5}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": -1}}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": 1.5}}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": True}}},
        {"v": 2, "partitions": "2", "streams": {}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "ends": [1]}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "ends": [[1, "yesterday"]]}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "ends": [[1, "0001-01-01T00:00:00+01:00"]]}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1 << 63}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "first": "1"}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "cuts": 5}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1, "cuts": ["5"]}}},
    ]:
        with cell(offset), pytest.raises(OffsetError, match="the checkpoint"):
            decode(offset)


def source(end: dict[str, Position], latest: dict[str, Position]) -> dict[str, object]:
    return {"endOffset": json.dumps(encode(Offset(end))), "latestOffset": json.dumps(encode(Offset(latest)))}


def test_lag_counts_sequences_behind() -> None:
    progress = {
        "sources": [
            source({"A": Position("c", 10)}, {"A": Position("c", 25)}),
            source({"B": Position("c", 10), "C": Position("c", 9)}, {"B": Position("d", 3), "C": Position("c", 9)}),
            source({"D": Position("c", 10, ((12, TIME),))}, {"D": Position("d", 12, ((12, TIME),))}),
            {"endOffset": '{"topic": {"0": 5}}', "latestOffset": '{"topic": {"0": 9}}'},
            {"endOffset": "5", "latestOffset": None},
        ]
    }
    assert lag(progress) == {"A": 15, "B": 3, "C": 0, "D": 2}
    assert lag(json.dumps(progress)) == {"A": 15, "B": 3, "C": 0, "D": 2}
    assert lag({}) == {}
    assert lag(None) == {}
