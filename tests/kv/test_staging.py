"""`Staging`: the messages of a transaction, and the conflicts that it finds without a server."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.js.errors import InvalidKeyError

from jetstream_ext.errors import KeyConflictError, MaxPayloadError
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.kv.staging import Staging
from jetstream_ext.types import NEVER, BatchMessage

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def entry(key: str, revision: int, operation: str = "PUT") -> KeyValueEntry:
    return KeyValueEntry("B", key, b"v", revision, NOW, operation)  # type: ignore[arg-type]


@pytest.fixture
def staging() -> Staging:
    return Staging("$KV.B.", bucket="B", max_payload=1000)


def message(key: str, value: bytes = b"", **options: Any) -> BatchMessage:
    return BatchMessage(f"$KV.B.{key}", value, **options)


def test_messages_have_the_headers_of_every_client(staging: Staging) -> None:
    staging.write("PUT", "a", b"1")
    staging.create("b", b"2")
    staging.write("PUT", "c", b"3", last=17)
    staging.write("DEL", "d")
    staging.write("DEL", "e", last=5)
    staging.write("PURGE", "f")
    staging.write("PURGE", "g", ttl=60, last=6)
    purge = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
    assert staging.messages() == [
        message("a", b"1"),
        message("b", b"2", expected_last_subject_seq=0),
        message("c", b"3", expected_last_subject_seq=17),
        message("d", headers={"KV-Operation": "DEL"}),
        message("e", headers={"KV-Operation": "DEL"}, expected_last_subject_seq=5),
        message("f", headers=purge),
        message("g", headers=purge, expected_last_subject_seq=6, msg_ttl=60),
    ]
    assert staging.expectations == {"b": 0, "c": 17, "e": 5, "g": 6}


def test_read_key_with_another_message_at_its_revision_has_moved(staging: Staging) -> None:
    staging.read("a", entry("a", 1))
    staging.read("b", None)
    assert staging.moved({"a": entry("a", 1), "b": None}) is None
    other = replace(entry("a", 1), created=NOW + timedelta(seconds=1))
    conflict = staging.moved({"a": other, "b": None})
    assert conflict is not None
    assert (conflict.keys, conflict.stale_read) == (("a",), True)


def test_value_with_a_ttl_replaces_its_history(staging: Staging) -> None:
    staging.write("PUT", "a", b"1", timedelta(minutes=1))
    staging.write("PUT", "b", b"1", NEVER)
    staging.create("c", b"1", 60)
    staging.create("d", b"1", 60)
    assert staging.refused({"c": None, "d": entry("d", 7, "DEL")}) is None
    rollup = {"Nats-Rollup": "sub"}
    assert staging.messages() == [
        message("a", b"1", headers=rollup, msg_ttl=timedelta(minutes=1)),
        message("b", b"1", msg_ttl=NEVER),
        message("c", b"1", msg_ttl=60, expected_last_subject_seq=0),
        message("d", b"1", headers=rollup, msg_ttl=60, expected_last_subject_seq=7),
    ]


def test_last_operation_is_sent_with_the_first_condition(staging: Staging) -> None:
    staging.write("PUT", "a", b"1", last=17)
    staging.write("PUT", "b", b"1")
    staging.write("PUT", "a", b"2")
    staging.write("DEL", "a")
    staging.write("PURGE", "b")
    staging.create("b", b"3")
    staging.create("a", b"4")
    assert staging.messages() == [message("a", b"4", expected_last_subject_seq=17), message("b", b"3")]


def test_message_of_a_read_key_expects_its_revision(staging: Staging) -> None:
    staging.read("a", entry("a", 7))
    staging.read("b", None)
    staging.read("c", entry("c", 9, "DEL"))
    for key in "abc":
        staging.write("PUT", key, b"1")
    assert [m.expected_last_subject_seq for m in staging.messages()] == [7, 0, 9]
    assert not staging.only_read
    staging.read("a", entry("a", 99))
    assert staging.expectations["a"] == 7


def test_free_messages_carry_expectations_of_keys_only_read(staging: Staging) -> None:
    staging.read("x", entry("x", 7))
    staging.read("y", None)
    staging.read("a", entry("a", 3))
    staging.write("PUT", "a", b"1")
    staging.write("PUT", "b", b"2")
    staging.write("DEL", "c")
    assert not staging.needs_fence
    sent = staging.messages()
    assert sent[0] == message("a", b"1", expected_last_subject_seq=3)
    guards = {(m.expected_last_subject, m.expected_last_subject_seq) for m in sent[1:]}
    assert guards == {("$KV.B.x", 7), ("$KV.B.y", 0)}
    assert staging.expectations == {"a": 3, "x": 7, "y": 0}


def test_more_reads_than_free_messages_need_the_fence(staging: Staging) -> None:
    for key in "xyz":
        staging.read(key, entry(key, 5))
    staging.write("PUT", "a", b"1")
    staging.create("b", b"2")
    assert staging.needs_fence
    assert staging.messages(fence=40) == [
        message("a", b"1", expected_last_seq=40),
        message("b", b"2", expected_last_subject_seq=0),
    ]


def test_message_id_is_on_the_first_message(staging: Staging) -> None:
    staging.write("PUT", "a", b"1")
    staging.write("PUT", "b", b"2")
    assert [m.msg_id for m in staging.messages(msg_id="t1")] == ["t1", None]


def test_known_conflicts_are_raised_before_the_commit(staging: Staging) -> None:
    staging.read("there", entry("there", 7))
    staging.read("gone", entry("gone", 8, "PURGE"))
    staging.write("PUT", "mine", b"")
    for key in ("there", "mine"):
        with pytest.raises(KeyConflictError, match=key) as caught:
            staging.create(key, b"")
        assert caught.value.keys == (key,)
        assert not caught.value.stale_read
    with pytest.raises(KeyConflictError, match="revision 7, not 6"):
        staging.write("PUT", "there", b"", last=6)
    with pytest.raises(KeyConflictError):
        staging.write("DEL", "there", last=6)
    with pytest.raises(ValueError, match="no revision to compare with"):
        staging.write("PUT", "mine", b"", last=1)
    staging.write("PUT", "there", b"", last=7)
    staging.create("gone", b"")
    assert staging.expectations == {"there": 7, "gone": 8}


def test_invalid_arguments_change_nothing(staging: Staging) -> None:
    with pytest.raises(InvalidKeyError):
        staging.write("PUT", "a..b", b"")
    with pytest.raises(TypeError):
        staging.write("PUT", "a", "text")  # type: ignore[arg-type]
    with pytest.raises(MaxPayloadError, match="'a'"):
        staging.write("PUT", "a", b"x" * 1001)
    with pytest.raises(ValueError, match="TTL"):
        staging.write("PUT", "a", b"", 0.5)
    with pytest.raises(ValueError, match="last must be"):
        staging.write("PUT", "a", b"", last="7")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from 0 to"):
        staging.write("DEL", "a", last=-1)
    assert staging.writes == {}


class TestRefusals:
    def test_changed_keys_are_named(self, staging: Staging) -> None:
        staging.read("a", entry("a", 3))
        staging.write("PUT", "a", b"")
        staging.write("PUT", "b", b"", last=4)
        staging.write("PUT", "c", b"", last=5)
        conflict = staging.refused({"a": entry("a", 9), "b": None, "c": entry("c", 5)})
        assert conflict is not None
        assert conflict.keys == ("a", "b")
        assert conflict.stale_read
        assert str(conflict).endswith(
            "nothing was written; key 'a' is at revision 9, not 3, key 'b' is at revision 0, not 4"
        )

    def test_condition_of_the_caller_is_not_a_stale_read(self, staging: Staging) -> None:
        staging.read("a", entry("a", 3))
        staging.write("PUT", "a", b"")
        staging.write("PUT", "b", b"", last=4)
        staging.create("c", b"")
        conflict = staging.refused({"a": entry("a", 3), "b": entry("b", 6), "c": entry("c", 7)})
        assert conflict is not None
        assert conflict.keys == ("b", "c")
        assert not conflict.stale_read
        assert "cannot be created" in str(conflict)

    def test_deleted_key_can_be_created(self, staging: Staging) -> None:
        staging.create("a", b"1")
        assert staging.refused({"a": entry("a", 8, "DEL")}) is None
        assert staging.messages() == [message("a", b"1", expected_last_subject_seq=8)]
        conflict = staging.refused({"a": entry("a", 9)})
        assert conflict is not None
        assert conflict.keys == ("a",)

    def test_no_key_is_named_if_only_the_bucket_changed(self, staging: Staging) -> None:
        staging.read("a", entry("a", 3))
        staging.read("b", entry("b", 4))
        staging.write("PUT", "c", b"")
        conflict = staging.refused({"a": entry("a", 3), "b": entry("b", 4)})
        assert conflict is not None
        assert conflict.keys == ()
        assert conflict.stale_read

    def test_changed_reads_are_a_conflict(self, staging: Staging) -> None:
        staging.read("a", entry("a", 3))
        staging.read("b", None)
        assert staging.moved({"a": entry("a", 3), "b": None}) is None
        conflict = staging.moved({"a": entry("a", 3), "b": entry("b", 5)})
        assert conflict is not None
        assert (conflict.keys, conflict.stale_read) == (("b",), True)
