"""The publish options: what is refused before anything is sent."""

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cells import walk

from jetstream_ext.errors import BadHeaderError
from jetstream_ext.protocol import options
from jetstream_ext.types import NEVER, BatchMessage, RepeatedHeaders


@walk("ttl, text", [
    (1, "1"), (1.0, "1"), (90, "90"), (86400.0, "86400"), (timedelta(seconds=1), "1"), (timedelta(days=2), "172800"),
    (NEVER, "never"), (options.MAX_TTL, "3155760000"), (timedelta(days=36525), "3155760000"),
])  # fmt: skip
def test_a_ttl_becomes_header_text(ttl: Any, text: str) -> None:
    assert options.ttl_value(ttl) == text


@walk("ttl", [
    0, -1, 0.5, 1.5, 0.999, -0.0, math.nan, math.inf, -math.inf, timedelta(0), timedelta(milliseconds=1500),
    timedelta(seconds=-1), timedelta(microseconds=1), options.MAX_TTL + 1, timedelta.max, 2**63, 1e300,
])  # fmt: skip
def test_a_ttl_the_server_would_refuse_or_truncate_is_refused(ttl: Any) -> None:
    with pytest.raises(ValueError, match="TTL"):
        options.ttl_value(ttl)


@walk("ttl", ["5", "never", True, None, b"5", [5]])
def test_a_ttl_of_the_wrong_type_is_refused(ttl: Any) -> None:
    with pytest.raises(TypeError, match="TTL"):
        options.ttl_value(ttl)


OPTIONS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({}, []),
    ({"headers": {}}, []),
    ({"headers": {"X": "1"}}, [("X", "1")]),
    ({"msg_id": "m1"}, [("Nats-Msg-Id", "m1")]),
    ({"msg_ttl": 5}, [("Nats-TTL", "5")]),
    ({"stream": "S"}, [("Nats-Expected-Stream", "S")]),
    ({"expected_last_seq": 0}, [("Nats-Expected-Last-Sequence", "0")]),
    ({"expected_last_seq": 2**64 - 1}, [("Nats-Expected-Last-Sequence", str(2**64 - 1))]),
    ({"expected_last_subject_seq": 0}, [("Nats-Expected-Last-Subject-Sequence", "0")]),
    (
        {"expected_last_subject_seq": 3, "expected_last_subject": "a.*"},
        [("Nats-Expected-Last-Subject-Sequence", "3"), ("Nats-Expected-Last-Subject-Sequence-Subject", "a.*")],
    ),
    (
        {"headers": {"Nats-Expected-Last-Subject-Sequence": "3"}, "expected_last_subject": "a"},
        [("Nats-Expected-Last-Subject-Sequence", "3"), ("Nats-Expected-Last-Subject-Sequence-Subject", "a")],
    ),
    (
        {"headers": {"X": "1"}, "msg_id": "m", "msg_ttl": NEVER},
        [("X", "1"), ("Nats-Msg-Id", "m"), ("Nats-TTL", "never")],
    ),
]


@walk("given_options, headers", OPTIONS)
def test_options_become_headers(given_options: dict[str, Any], headers: list[tuple[str, str]]) -> None:
    assert options.message_headers(BatchMessage("a", b"", **given_options)) == headers


@walk("given_options, error", [
    ({"msg_id": ""}, ValueError), ({"msg_ttl": 0.5}, ValueError), ({"expected_last_seq": -1}, ValueError),
    ({"expected_last_seq": 2**64}, ValueError), ({"expected_last_seq": 1.0}, TypeError),
    ({"expected_last_seq": True}, TypeError), ({"expected_last_subject_seq": "3"}, TypeError),
    ({"expected_last_subject_seq": -1}, ValueError), ({"expected_last_subject": "a"}, ValueError),
    ({"headers": {"Nats-Msg-Id": "1"}, "msg_id": "2"}, BadHeaderError),
    ({"headers": {"Nats-TTL": "1"}, "msg_ttl": 2}, BadHeaderError),
    ({"headers": {"Nats-Expected-Stream": "S"}, "stream": "S"}, BadHeaderError),
])  # fmt: skip
def test_options_out_of_range_are_refused(given_options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        options.message_headers(BatchMessage("a", b"", **given_options))


@walk(
    "when",
    [
        datetime(2026, 11, 20, 21, 23, 31, 123456, UTC),
        datetime(2026, 11, 20, 21, 23, 31, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
        datetime(1, 1, 1, tzinfo=UTC),
        # Local mean time, as zoneinfo gives for the 19th century, has seconds in its offset.
        datetime(1880, 1, 1, tzinfo=timezone(timedelta(minutes=19, seconds=32))),
        datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=1))),
    ],
)
def test_an_aware_time_stays_the_same_instant(when: datetime) -> None:
    text = options.rfc3339(when, "when")
    assert datetime.fromisoformat(text) == when
    offset = text[19:].lstrip(".0123456789")
    assert offset == "Z" or (len(offset) == 6 and offset[3] == ":")
    assert text[10] == "T"


@walk("zero", [False, True])
def test_seconds_are_numbers_over_zero_or_from_zero(zero: bool) -> None:
    assert options.check_seconds(2, "timeout", zero=zero) == 2.0
    assert options.check_seconds(float("inf"), "timeout", zero=zero) == float("inf")
    for value in (-1, float("nan"), *([] if zero else [0, 0.0])):
        with pytest.raises(ValueError, match=r"timeout must be (over|at least) 0 seconds"):
            options.check_seconds(value, "timeout", zero=zero)
    for other in (True, "1", None, [1]):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            options.check_seconds(other, "timeout", zero=zero)  # type: ignore[arg-type]
    if zero:
        assert options.check_seconds(0, "timeout", zero=True) == 0.0


def test_an_instruction_to_the_server_has_one_value() -> None:
    with pytest.raises(BadHeaderError, match=r"header 'Nats-Msg-Id' has several values; servers take only the first"):
        options.message_headers(BatchMessage("a", b"", RepeatedHeaders([("Nats-Msg-Id", "1"), ("Nats-Msg-Id", "2")])))
    pairs = [("A", "1"), ("Nats-Msg-Id", "1"), ("A", "2")]
    assert options.message_headers(BatchMessage("a", b"", RepeatedHeaders(pairs))) == pairs
