"""The newest message of each key of a bucket, in whatever order messages are read."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.kv.entries import KeyValueSnapshot, Subjects, updates_of
from jetstream_ext.protocol import table
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.headers import format_time_ns
from jetstream_ext.protocol.subjects import matcher
from jetstream_ext.protocol.table import Content

START = datetime(2026, 1, 1, tzinfo=UTC)
ALL = Subjects("B", "$KV.B.", matcher([">"]))


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def put(seq: int, key: str, value: bytes = b"v", *, prefix: str = "$KV.B.", **headers: str) -> StoredMsg:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    time_ns = int(at(seq).timestamp()) * 1_000_000_000
    return StoredMsg(stream="KV_B", subject=prefix + key, seq=seq, data=value, headers=names, time_ns=time_ns)


def fed(
    messages: list[StoredMsg], subjects: Subjects = ALL, *, max_age: timedelta | None = None, markers: bool = False
) -> Content:
    content = Content(max_age=max_age, markers=markers)
    content.feed(updates_of(messages, subjects))
    return content


def entries(content: Content) -> KeyValueSnapshot:
    held = {**content.values, **content.deleted}
    return KeyValueSnapshot(held, bucket="B", revision=1, time=START)


def test_the_newest_revision_of_each_key_wins_in_any_order() -> None:
    messages = [put(n, f"k{n % 7}", b"%d" % n) for n in range(1, 40)]
    random.Random(1).shuffle(messages)
    content = Content()
    for start in range(0, 39, 5):
        content.feed(updates_of(messages[start : start + 5], ALL))
    content.feed(updates_of(messages[:10], ALL))  # a page that is read twice
    assert {key: entry.revision for key, entry in entries(content).items()} == {f"k{n % 7}": n for n in range(33, 40)}


def test_deleted_keys_are_kept_apart() -> None:
    messages = [
        put(1, "a"),
        put(2, "b"),
        put(3, "b", b"", KV_Operation="DEL"),
        put(4, "c", b"", KV_Operation="PURGE"),
        put(5, "d", b"", Nats_Marker_Reason="MaxAge"),
    ]
    content = fed(messages)
    assert list(content.values) == ["a"]
    again = fed([*messages, put(6, "b", b"again")])
    assert {key: record[1] for key, record in again.values.items()} == {"a": b"v", "b": b"again"}
    shown = entries(content)
    assert [(shown[key].operation, shown[key].reason) for key in "abcd"] == [
        ("PUT", None),
        ("DEL", None),
        ("PURGE", None),
        ("PURGE", "MaxAge"),
    ]


def test_other_keys_are_ignored() -> None:
    content = fed([put(1, "a.x"), put(2, "b"), put(3, "a.x.y")], Subjects("B", "$KV.B.", matcher(["a.*"])))
    assert list(content.values) == ["a.x"]


def test_entries_expired_at_the_given_time_are_omitted() -> None:
    content = fed(
        [put(1, "short", Nats_TTL="10"), put(2, "long", Nats_TTL="1h"), put(3, "ever"), put(4, "odd", Nats_TTL="x")]
    )
    content.expire(at(10.9))
    assert set(content.values) == {"short", "long", "ever", "odd"}
    content.expire(at(11))
    assert set(content.values) == {"long", "ever", "odd"}


def test_new_revision_does_not_inherit_the_ttl() -> None:
    content = fed([put(1, "a", Nats_TTL="10"), put(2, "a")])
    content.expire(at(100))
    assert set(content.values) == {"a"}


@pytest.mark.parametrize(("seconds", "left"), [(10.9, {"a", "b", "c"}), (11, {"b", "c"}), (12, {"c"}), (99, {"c"})])
def test_bucket_ttl_applies_unless_the_message_never_expires(seconds: float, left: set[str]) -> None:
    messages = [put(1, "a"), put(2, "b", Nats_TTL="100"), put(3, "c", Nats_TTL="never")]
    content = fed(messages, max_age=timedelta(seconds=10))
    content.expire(at(seconds))
    assert set(content.values) == left


def test_with_markers_only_markers_expire_without_a_revision() -> None:
    messages = [
        put(1, "session", Nats_TTL="1"),
        put(2, "gone", b"", KV_Operation="PURGE", Nats_TTL="1"),
        put(3, "kept"),
    ]
    for markers, left in ((True, {"session", "kept"}), (False, {"kept"})):
        content = fed(messages, markers=markers)
        content.expire(at(100))
        assert {*content.values, *content.deleted} == left


def test_entries_below_the_lowest_sequence_are_omitted() -> None:
    content = fed([put(1, "a"), put(2, "b"), put(3, "c", b"", KV_Operation="DEL"), put(4, "d"), put(5, "a")])
    content.drop_below(4)
    assert {*content.values, *content.deleted} == {"a", "d"}


def test_subjects_of_others_are_ignored() -> None:
    assert ALL.key_of("$KV.B.a.b") == "a.b"
    assert ALL.key_of("$KV.C.a") is None
    assert Subjects("B", "$KV.B.", matcher(["a.*"])).key_of("$KV.B.b") is None
    content = fed([put(1, "a"), put(2, "a", prefix="$KV.C."), put(3, "a", prefix="")])
    assert content.values["a"][0] == 1


@pytest.mark.parametrize("ttl", ["0", "00", "300000000000", "9" * 30])
def test_ttls_that_never_end_a_message_are_ignored(ttl: str) -> None:
    content = fed([put(1, "a", Nats_TTL=ttl)])
    content.expire(at(1000))
    assert set(content.values) == {"a"}


@settings(deadline=None)
@given(st.data())
def test_blocks_from_the_wire_and_the_leaders_messages_are_the_same(data: st.DataObject) -> None:
    """Also where only some messages of a block have headers, and for subjects that look like the server's lines."""
    messages = []
    for seq in range(1, data.draw(st.integers(1, 6)) + 1):
        key = data.draw(st.sampled_from(["a", "Nats-Subject:", "Nats-Time-Stamp:", "NATS/1.0"]))
        headers = data.draw(
            st.sampled_from([{}, {}, {"Nats_TTL": "1"}, {"KV_Operation": "DEL"}, {"Nats_Subject": "x"}])
        )
        messages.append(put(seq, key, data.draw(st.binary(max_size=4)), **headers))
    block = Block.of(messages, 0)
    block.from_leader = False
    times = [format_time_ns(message.time_ns).encode() for message in messages]
    columns = block.plain_columns()
    assert columns is None or columns == ([message.subject for message in messages], times)
    assert (columns is None) == any(message.stored_lines for message in messages)
    assert list(table.each(updates_of(block, ALL))) == updates_of(messages, ALL)
