"""What the headers of a stored message say about its key."""

from datetime import UTC, datetime, timedelta

import pytest

from jetstream_ext.kv.entries import KeyValueEntry, entry_of, never_expires, operation, ttl_of
from jetstream_ext.kv.history import replaced_all, replaced_everything, replaced_revision, shows_expiry

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, ("PUT", None)),
        ({"X": "y"}, ("PUT", None)),
        ({"KV-Operation": "DEL"}, ("DEL", None)),
        ({"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, ("PURGE", None)),
        ({"KV-Operation": "NEW"}, ("PUT", None)),
        ({"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "1m0s"}, ("PURGE", "MaxAge")),
        ({"Nats-Marker-Reason": "Purge"}, ("PURGE", "Purge")),
        ({"Nats-Marker-Reason": "Remove"}, ("DEL", "Remove")),
        ({"Nats-Marker-Reason": "Tomorrow"}, ("PURGE", "Tomorrow")),
        ({"Nats-Applied-Limit": "MaxAge"}, ("PURGE", "MaxAge")),
    ],
)
def test_headers_decide_the_operation(headers: dict[str, str], found: tuple[str, str | None]) -> None:
    assert operation(headers) == found
    entry = entry_of("B", "k", (7, "$KV.B.k", b"v", headers, NOW))
    assert entry == KeyValueEntry("B", "k", b"v", 7, NOW, *found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        ("05", 5),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1m0s", 60),
        ("1.5s", 1),
        ("1500ms", 1),
        (" 5", 5),
        ("never", None),
        ("", None),
        ("1d", None),
        ("abc", None),
        ("-1", None),
        ("9223372036854775807", None),
        ("\u00b2", None),
        ("\u0663", None),
        ("\u0663s", None),
        pytest.param("9" * 60_000, None, id="a header full of digits"),
    ],
)
def test_ttl_is_read_as_servers_read_it(text: str, seconds: int | None) -> None:
    assert ttl_of({"Nats-TTL": text}) == (None if seconds is None else timedelta(seconds=seconds))


def test_never_expires_ignores_case() -> None:
    assert never_expires({"Nats-TTL": "Never"})
    assert not never_expires({"Nats-TTL": "5"})
    assert not never_expires({})


@pytest.mark.parametrize(
    ("headers", "revision"),
    [
        ({}, None),
        ({EXPECTED: "7"}, 7),
        ({EXPECTED: "0"}, 0),
        ({EXPECTED: "x"}, None),
        ({EXPECTED: "\u00b2"}, None),
        ({EXPECTED: "-5"}, None),
        ({EXPECTED: "9" * 5000}, None),
        ({EXPECTED: str(1 << 64)}, None),
        ({EXPECTED: "7", f"{EXPECTED}-Subject": "s"}, 7),
        ({EXPECTED: "7", f"{EXPECTED}-Subject": "other"}, None),
        ({EXPECTED: "7", "Nats-Rollup": "sub"}, None),
    ],
)
def test_expectation_names_the_replaced_revision(headers: dict[str, str], revision: int | None) -> None:
    assert replaced_revision(headers, "s") == revision


def test_rollups_and_markers_replaced_all_older_messages() -> None:
    assert replaced_all({"Nats-Rollup": "sub"})
    assert replaced_all({"Nats-Marker-Reason": "MaxAge"})
    assert replaced_all({"Nats-Rollup": "all"})
    assert not replaced_all({"Nats-Rollup": ""}), "servers ignore it"
    assert not replaced_all({"KV-Operation": "DEL"})
    assert not replaced_all({})


def test_rollups_of_the_whole_stream() -> None:
    assert replaced_everything({"Nats-Rollup": "all"})
    assert replaced_everything({"Nats-Rollup": "ALL"})
    assert not replaced_everything({"Nats-Rollup": "sub"})
    assert not replaced_everything({"Nats-Marker-Reason": "MaxAge"})


def test_ttls_of_values_and_markers_show_expiry() -> None:
    assert shows_expiry({"Nats-TTL": "5"})
    assert shows_expiry({"Nats-Marker-Reason": "MaxAge"})
    assert not shows_expiry({"Nats-TTL": "never"})
    assert shows_expiry({"KV-Operation": "PURGE", "Nats-TTL": "5"}), "then nothing is left of its key"
    assert not shows_expiry({})
