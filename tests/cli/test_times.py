"""Times as people write them on a command line, in the zone of the machine, and as a command shows them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import click
import pytest

from jetstream_ext.cli.times import duration, moment, shown


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def now() -> datetime:
    return datetime(2026, 11, 27, 10, 0).astimezone()


MOMENTS = (
    ("2026-03-01T12:00:00Z", "2026-03-01T12:00:00+00:00"),
    ("2026-03-01t12:00:00.123456789z", "2026-03-01T12:00:00.123456+00:00"),
    ("2026-03-01T12:00:00-05:00", "2026-03-01T12:00:00-05:00"),
    ("2026-03-01 12:00 UTC", "2026-03-01T12:00:00+00:00"),
    ("2026-03-01 12:00 +02:00", "2026-03-01T12:00:00+02:00"),
    ("2026-11-25", "2026-11-25T00:00:00+01:00"),
    ("2026-07-25 14:30", "2026-07-25T14:30:00+02:00"),
    ("2026-11-25T14:30:01.5", "2026-11-25T14:30:01.500000+01:00"),
    ("2026-10-25 02:30", "2026-10-25T02:30:00+02:00"),  # which occurs twice: the first
    ("14:30", "2026-11-27T14:30:00+01:00"),
    ("9:05:01.25", "2026-11-27T09:05:01.250000+01:00"),
    ("14:30Z", "2026-11-27T14:30:00+00:00"),
    ("now", "2026-11-27T10:00:00+01:00"),
    ("today", "2026-11-27T00:00:00+01:00"),
    ("Yesterday  14:30", "2026-11-26T14:30:00+01:00"),
    ("yesterday at 9:30", "2026-11-26T09:30:00+01:00"),
    ("10 minutes ago", "2026-11-27T09:50:00+01:00"),
    ("2h ago", "2026-11-27T08:00:00+01:00"),
    ("1h30m ago", "2026-11-27T08:30:00+01:00"),
    ("1.5 hours ago", "2026-11-27T08:30:00+01:00"),
    ("an hour ago", "2026-11-27T09:00:00+01:00"),
    ("1 day, 2 hours and 3 min ago", "2026-11-26T07:57:00+01:00"),
    ("500 ms ago", "2026-11-27T09:59:59.500000+01:00"),
    ("6 weeks ago", "2026-10-16T11:00:00+02:00"),  # exactly as long ago, in summer time
)


def test_a_time_is_understood() -> None:
    for text, expected in MOMENTS:
        assert moment(text, now()).isoformat() == expected, text


NO_MOMENTS = (
    *("", "14", "25:00", "soon", "ago", "5 ago", "5 x ago", "1 month ago", "10 minutesago", "10 minutes", "1e5 s ago"),
    *("yesterday noon", "yesterday 2026-01-01", "tomorrow", "2026-13-01", "2026-02-30", "12:00x", "٣ minutes ago"),
    *("999999999999 weeks ago", "9" * 400 + " s ago", "0001-01-01"),
)


def test_a_text_that_is_no_time_is_refused() -> None:
    for text in NO_MOMENTS:
        with pytest.raises(ValueError, match="is not a time such as 2026-03-01T12:00:00Z, "):
            pytest.fail(f"{text!r} is understood as {moment(text, now())}")


def test_a_local_time_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'2026-03-29 02:30' does not exist in this time zone"):
        moment("2026-03-29 02:30", now())


def test_a_time_is_shown_with_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        ("2026-11-25 14:30", "2026-11-25 14:30:00 CET (UTC+01:00)"),
        ("2026-07-25 14:30:01.5", "2026-07-25 14:30:01.500 CEST (UTC+02:00)"),
        ("2026-11-25 14:30Z", "2026-11-25 14:30:00 UTC"),
        ("2026-11-25 14:30-05:30", "2026-11-25 14:30:00 UTC-05:30"),
    ):
        assert shown(moment(text)) == expected, text
    monkeypatch.setenv("TZ", "America/Sao_Paulo")  # which has no name
    time.tzset()
    assert shown(moment("2026-11-25")) == "2026-11-25 00:00:00 UTC-03:00"


def test_a_duration_is_understood() -> None:
    for text, seconds in {"5": 5, "5s": 5, "500ms": 0.5, "1m30s": 90, "1.5h": 5400, "2.5s": 2.5, "2d": 172800}.items():
        assert duration(text) == seconds, text
    for text in ("", "0", "0s", "soon", "-1s", "5 s", "5x", "s", "1w", "1e999", "٣s", "9" * 400):
        with pytest.raises(click.BadParameter, match="is not a duration"):
            pytest.fail(f"{text!r} is understood as {duration(text)}")
