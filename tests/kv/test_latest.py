"""`Latest`: the newest message of each key, in whatever order messages are read."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from jetstream_ext.kv.entries import Row, Subjects
from jetstream_ext.kv.history import Latest
from jetstream_ext.protocol.subjects import matcher

START = datetime(2026, 1, 1, tzinfo=UTC)
ALL = Subjects("B", "$KV.B.", matcher([">"]))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def put(seq: int, key: str, value: bytes = b"v", **headers: str) -> Row:
    return (seq, f"$KV.B.{key}", value, {name.replace("_", "-"): text for name, text in headers.items()}, at(seq))


def fed(records: list[Row]) -> Latest:
    latest = Latest(ALL)
    latest.feed(records)
    return latest


def test_the_newest_revision_of_each_key_wins_in_any_order() -> None:
    records = [put(n, f"k{n % 7}", b"%d" % n) for n in range(1, 40)]
    random.Random(1).shuffle(records)
    latest = Latest(ALL)
    for start in range(0, 39, 5):
        latest.feed(records[start : start + 5])
    latest.feed(records[:10])  # a page that is read twice
    assert {key: entry.revision for key, entry in latest.entries().items()} == {f"k{n % 7}": n for n in range(33, 40)}


def test_deleted_keys_are_omitted_unless_requested() -> None:
    records = [
        put(1, "a"),
        put(2, "b"),
        put(3, "b", b"", KV_Operation="DEL"),
        put(4, "c", b"", KV_Operation="PURGE"),
        put(5, "d", b"", Nats_Marker_Reason="MaxAge"),
    ]
    assert list(fed(records).entries()) == ["a"]
    again = fed([*records, put(6, "b", b"again")])
    assert {key: entry.value for key, entry in again.entries().items()} == {"a": b"v", "b": b"again"}
    shown = fed(records).entries(include_deletes=True)
    assert [(shown[key].operation, shown[key].reason) for key in "abcd"] == [
        ("PUT", None),
        ("DEL", None),
        ("PURGE", None),
        ("PURGE", "MaxAge"),
    ]


def test_other_keys_are_ignored() -> None:
    latest = Latest(Subjects("B", "$KV.B.", matcher(["a.*"])))
    latest.feed([put(1, "a.x"), put(2, "b"), put(3, "a.x.y")])
    assert list(latest.entries()) == ["a.x"]


def test_entries_expired_at_the_given_time_are_omitted() -> None:
    records = [
        put(1, "short", Nats_TTL="10"),
        put(2, "long", Nats_TTL="1h"),
        put(3, "ever"),
        put(4, "odd", Nats_TTL="x"),
    ]
    assert set(fed(records).entries(at(10.9))) == {"short", "long", "ever", "odd"}
    assert set(fed(records).entries(at(11))) == {"long", "ever", "odd"}


def test_new_revision_does_not_inherit_the_ttl() -> None:
    latest = Latest(ALL)
    latest.feed([put(1, "a", Nats_TTL="10"), put(2, "a")])
    assert set(latest.entries(at(100))) == {"a"}


@pytest.mark.parametrize(("seconds", "left"), [(10.9, {"a", "b", "c"}), (11, {"b", "c"}), (12, {"c"}), (99, {"c"})])
def test_bucket_ttl_applies_unless_the_message_never_expires(seconds: float, left: set[str]) -> None:
    latest = Latest(ALL, max_age=timedelta(seconds=10))
    latest.feed([put(1, "a"), put(2, "b", Nats_TTL="100"), put(3, "c", Nats_TTL="never")])
    assert set(latest.entries(at(seconds))) == left


def test_with_markers_only_markers_expire_without_a_revision() -> None:
    rows = [put(1, "session", Nats_TTL="1"), put(2, "gone", b"", KV_Operation="PURGE", Nats_TTL="1"), put(3, "kept")]
    assert set(fed(rows).entries(at(100), markers=True, include_deletes=True)) == {"session", "kept"}
    assert set(fed(rows).entries(at(100), include_deletes=True)) == {"kept"}


def test_entries_below_the_lowest_sequence_are_omitted() -> None:
    rows = [put(1, "a"), put(2, "b"), put(3, "c", b"", KV_Operation="DEL"), put(4, "d"), put(5, "a")]
    assert set(fed(rows).entries(first_seq=4, markers=True, include_deletes=True)) == {"a", "d"}


def test_subjects_of_others_are_ignored() -> None:
    assert ALL.key_of("$KV.B.a.b") == "a.b"
    assert ALL.key_of("$KV.C.a") is None
    assert Subjects("B", "$KV.B.", matcher(["a.*"])).key_of("$KV.B.b") is None
    latest = fed([put(1, "a"), (2, "$KV.C.a", b"other", {}, at(2)), (3, "a", b"other", {}, at(3))])
    assert latest.entries()["a"].revision == 1


@pytest.mark.parametrize("ttl", ["0", "00", "300000000000", "9" * 30])
def test_ttls_that_never_end_a_message_are_ignored(ttl: str) -> None:
    assert set(fed([put(1, "a", Nats_TTL=ttl)]).entries(at(1000))) == {"a"}
