"""Offsets in Spark's checkpoint, and the lag computed from the progress of a query."""

import json

import pytest

from jetstream_ext.spark import lag
from jetstream_ext.spark.offsets import OffsetError, Position, decode, encode


def test_an_offset_is_decoded_as_it_was_encoded() -> None:
    positions = {"B": Position("2026-01-01T00:00:00Z", 7), "A": Position("", 0)}
    offset = encode(positions)
    assert json.dumps(offset) == (
        '{"v": 1, "streams": {"A": {"created": "", "seq": 0}, "B": {"created": "2026-01-01T00:00:00Z", "seq": 7}}}'
    )
    assert decode(json.loads(json.dumps(offset))) == positions


@pytest.mark.parametrize(
    "offset",
    [
        {},
        {"v": 2, "streams": {}},
        {"v": 1},
        {"v": 1, "streams": {"A": 5}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": -1}}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": 1.5}}},
        {"v": 1, "streams": {"A": {"created": "x", "seq": True}}},
    ],
)
def test_an_invalid_offset_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(OffsetError, match="the checkpoint"):
        decode(offset)


def source(end: dict[str, Position], latest: dict[str, Position]) -> dict[str, object]:
    return {"endOffset": json.dumps(encode(end)), "latestOffset": json.dumps(encode(latest))}


def test_lag_counts_sequences_behind() -> None:
    progress = {
        "sources": [
            source({"A": Position("c", 10)}, {"A": Position("c", 25)}),
            source({"B": Position("c", 10), "C": Position("c", 9)}, {"B": Position("d", 3), "C": Position("c", 9)}),
            {"endOffset": '{"topic": {"0": 5}}', "latestOffset": '{"topic": {"0": 9}}'},
            {"endOffset": "5", "latestOffset": None},
        ]
    }
    assert lag(progress) == {"A": 15, "B": 3, "C": 0}
    assert lag(json.dumps(progress)) == {"A": 15, "B": 3, "C": 0}
    assert lag({}) == {}
    assert lag(None) == {}
