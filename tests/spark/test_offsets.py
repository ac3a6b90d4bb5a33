"""Offsets in Spark's checkpoint, and the lag computed from the progress of a query."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from jetstream_ext.spark import lag
from jetstream_ext.spark.offsets import NOWHERE, Offset, OffsetError, Position, Seen, decode, encode

TIME = datetime(2026, 1, 31, 13, 45, 0, 123456, UTC)
SEEN = Seen("2026-01-01T00:00:00Z", ((9, TIME), (1, TIME)))


def test_an_offset_is_decoded_as_it_was_encoded() -> None:
    planned = Position(SEEN, 7, first=3, cuts=(5, 6))
    before_4_2 = Position(SEEN, 7, head=3)
    offset = Offset({"C": before_4_2, "B": planned, "A": NOWHERE}, partitions=3)
    encoded = encode(offset)
    assert json.dumps(encoded) == (
        '{"v": 2, "partitions": 3, "streams": {"A": {"created": "", "seq": 0}, '
        '"B": {"created": "2026-01-01T00:00:00Z", "seq": 7, "ends": [[9, "2026-01-31T13:45:00.123456+00:00"], [1, "2026-01-31T13:45:00.123456+00:00"]], '
        '"first": 3, "cuts": [5, 6]}, '
        '"C": {"created": "2026-01-01T00:00:00Z", "seq": 7, "ends": [[9, "2026-01-31T13:45:00.123456+00:00"], [1, "2026-01-31T13:45:00.123456+00:00"]], '
        '"head": 3}}}'
    )
    assert decode(json.loads(json.dumps(encoded))) == offset


def test_an_offset_without_a_plan_may_have_the_start_that_earlier_releases_wrote() -> None:
    at = {"created": "2026-01-01T00:00:00Z", "seq": 7, "head": 3, "skipped": 5}
    assert decode({"v": 2, "streams": {"A": at}}) == Offset({"A": Position(Seen("2026-01-01T00:00:00Z"), 7, 6, head=3)})


def test_an_offset_of_version_1_is_refused_and_the_error_says_how_to_go_on() -> None:
    with pytest.raises(OffsetError, match=r"of version 1, .*start with a new checkpoint, and with 'startingOffsets'"):
        decode({"v": 1, "streams": {"A": {"created": "2026-01-01T00:00:00Z", "seq": 7}}})


def test_an_invalid_offset_is_refused(cell: Any) -> None:
    for offset in [
        {},
        {"v": 3, "streams": {}},
        {"v": True, "streams": {}},
        {"v": [2], "streams": {}},
        {"v": 2},
        {"v": 2, "streams": {"A": 5}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": -1}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": 1.5}}},
        {"v": 2, "streams": {"A": {"created": "x", "seq": True}}},
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


C = Seen("c")


def test_lag_counts_sequences_behind() -> None:
    progress = {
        "sources": [
            source({"A": Position(C, 10)}, {"A": Position(C, 25)}),
            source({"B": Position(C, 10), "C": Position(C, 9)}, {"B": Position(Seen("d"), 3), "C": Position(C, 9)}),
            source({"D": Position(Seen("c", SEEN.ends), 10)}, {"D": Position(Seen("d", SEEN.ends), 12)}),
            {"endOffset": '{"topic": {"0": 5}}', "latestOffset": '{"topic": {"0": 9}}'},
            {"endOffset": "5", "latestOffset": None},
        ]
    }
    assert lag(progress) == {"A": 15, "B": 3, "C": 0, "D": 2}
    assert lag(json.dumps(progress)) == {"A": 15, "B": 3, "C": 0, "D": 2}
    assert lag({}) == {}
    assert lag(None) == {}
