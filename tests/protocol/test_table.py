"""A table against a model dictionary: random messages, commits, expiry, purges and reloads, with slow and fast watchers."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from cells import walk
from hypothesis import given, settings
from hypothesis import strategies as st

from jetstream_ext.protocol import updates as limits
from jetstream_ext.protocol.headers import format_time_ns
from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import FOREVER, Change, Record, Update, Watcher

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def record(seq: int, seconds: float = 0.0, value: bytes = b"") -> Record:
    return seq, value, format_time_ns(int(at(seconds).timestamp()) * 1_000_000_000).encode(), b""


def put(key: str, seq: int, seconds: float = 0.0, *, ttl: timedelta | None = None) -> Update:
    return key, record(seq, seconds), False, ttl


def delete(key: str, seq: int, seconds: float = 0.0) -> Update:
    return key, record(seq, seconds), True, None


def seqs(content: Content) -> dict[str, int]:
    return {key: held[0] for key, held in content.values.items()}


@pytest.fixture(autouse=True)
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CHANGES", 256)


def watched(content: Content) -> Watcher:
    watcher = Watcher(lambda: None)
    content.watchers.add(watcher)
    return watcher


def drain(watcher: Watcher) -> list[Change]:
    found = []
    while (change := watcher.pop()) is not None:
        found.append(change)
    return found


class TestContent:
    def test_ttls_that_the_server_does_not_heed_do_not_count(self) -> None:
        content = Content(own_ttls=False)
        content.feed([put("a", 1, ttl=timedelta(seconds=5))])
        assert content.next_expiry() is None
        content.expire(at(9))
        assert seqs(content) == {"a": 1}

    def test_where_the_server_leaves_markers_only_they_expire_without_a_message(self) -> None:
        content = Content(max_age=timedelta(seconds=10), markers=True)
        content.feed([put("a", 1, ttl=timedelta(seconds=5)), put("b", 2), delete("c", 3)])
        content.expire(at(4))
        assert (content.next_expiry(), content.overdue) == (at(5), False)
        content.expire(at(5))
        assert (seqs(content), content.overdue) == ({"a": 1, "b": 2}, True)
        content.stage([delete("a", 4, 5)])
        content.commit(4)
        assert not content.overdue
        content.expire(at(10))
        assert (seqs(content), content.overdue, set(content.deleted)) == ({"b": 2}, True, {"a"})

    @walk("found", ["older", "the same", "newer", "nothing"])
    def test_a_value_that_expires_may_expose_an_older_one(self, found: str) -> None:
        content = Content(deep=True, markers=True)
        content.feed([put("a", 5, ttl=timedelta(seconds=10))])
        assert content.next_expiry() == at(10)
        assert content.expire(at(11)) == ["a"]
        assert content.overdue
        seq = {"older": 2, "the same": 5, "newer": 7, "nothing": 0}[found]
        content.expose(["a"], {"a": put("a", seq)} if seq else {})
        assert seqs(content) == ({"a": 2} if found == "older" else {})
        assert not content.overdue

    def test_what_a_staged_message_replaces_stays_until_the_commit(self) -> None:
        content = Content(max_age=timedelta(seconds=10))
        content.feed([put("a", 1), put("b", 2, ttl=timedelta(seconds=5)), put("c", 3), delete("d", 4)])
        watcher = watched(content)
        content.stage([put("a", 5, 9), put("b", 6, 9), put("e", 7, 9)])
        assert (content.count_after_commit(), content.newest_after_commit()) == (5, 4)
        content.settle(at(10), first_seq=4)
        assert (seqs(content), content.deleted) == ({"a": 1, "b": 2}, {})
        assert (content.count_after_commit(), content.newest_after_commit()) == (3, 0)
        content.commit(7)
        assert seqs(content) == {"a": 5, "b": 6, "e": 7}
        assert [(change.key, change.new and change.new[0]) for change in drain(watcher)] == [
            ("c", None), ("a", 5), ("b", 6), ("e", 7)
        ]  # fmt: skip
        content.settle(at(10), first_seq=6)
        assert seqs(content) == {"b": 6, "e": 7}, "also what was staged"

    def test_a_message_below_the_lowest_sequence_goes_also_if_it_is_staged_late(self) -> None:
        content = Content()
        content.feed([put("a", 1)])
        content.commit(1)
        content.settle(at(0), first_seq=5)
        content.stage([put("b", 3), put("c", 6)])
        content.commit(6)
        content.settle(at(0), first_seq=5)
        assert seqs(content) == {"c": 6}

    def test_staged_messages_are_bounded_by_the_number_of_keys(self) -> None:
        content = Content()
        watcher = watched(content)
        for seq in range(1, 20 * limits.MOST_CHANGES):
            content.stage([put(f"k{seq % 3}", seq)])
            assert content.staged <= 2 * limits.MOST_CHANGES
        content.commit(seq)
        assert sorted(seqs(content).values()) == [seq - 2, seq - 1, seq]
        changes = drain(watcher)
        assert sum(change.skipped for change in changes) + len(changes) == seq

    def test_the_maximum_age_applies_unless_a_message_never_expires(self) -> None:
        content = Content(max_age=timedelta(seconds=10))
        content.feed([put("b", 2, 1), put("never", 1, ttl=FOREVER), put("c", 3, 2), delete("d", 4, 2)])
        assert content.next_expiry() <= at(11)  # it was never looked
        content.expire(at(2))
        assert content.next_expiry() == at(11)
        content.expire(at(11))
        assert seqs(content) == {"never": 1, "c": 3}
        content.expire(at(12))
        assert seqs(content) == {"never": 1}
        assert len(content) == 1, "the delete marker has expired"


class TestWatcher:
    def test_a_slow_one_gets_the_newest_state_of_each_key(self) -> None:
        content = Content()
        content.feed([put("old", 1), put("gone", 2)])
        watcher = watched(content)
        seq = 2
        for _ in range(limits.MOST_CHANGES):
            for key in ("old", "new"):
                content.stage([put(key, seq := seq + 1)])
        content.stage([delete("gone", seq := seq + 1), put("brief", seq := seq + 1), delete("brief", seq := seq + 1)])
        content.commit(seq)
        found = drain(watcher)
        assert [(change.key, change.old and change.old[0], change.new and change.new[0]) for change in found] == [
            ("old", 1, seq - 4),
            ("new", None, seq - 3),
            ("gone", 2, None),
        ]
        assert sum(change.skipped for change in found) + len(found) == seq - 3, "all but one of those of `brief`"
        assert len(watcher) == 0

    def test_large_values_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MOST_BYTES", 1_000)
        content = Content()
        watcher = watched(content)
        for seq in range(1, 200):
            content.stage([(f"k{seq % 2}", record(seq, value=bytes(100)), False, None)], 100)
            assert content.staged <= 21
        content.commit(seq)
        for seq in range(200, 220):
            content.stage([(f"k{seq % 2}", record(seq, value=bytes(100)), False, None)], 100)
            content.commit(seq)
            assert len(watcher) <= 11
        changes = drain(watcher)
        assert (changes[-1].revision, sum(1 + change.skipped for change in changes)) == (219, 219)

    def test_a_reload_is_told_as_changes(self) -> None:
        content = Content()
        content.feed([put("same", 1), put("changed", 2), put("gone", 3)])
        watcher = watched(content)
        content.stage([put("staged", 4)])
        new = Content()
        new.feed([put("changed", 5), put("same", 1), put("added", 6)])
        new.commit(8)
        content.dirty = {"before"}
        new.succeed(content)
        assert new.dirty == {"before", "changed", "added", "gone"}
        assert drain(watcher) == [
            Change("changed", record(2), record(5), 5),
            Change("added", None, record(6), 6),
            Change("gone", record(3), None, 8),
        ]
        new.stage([delete("added", 9)])
        new.commit(9)
        assert [change.key for change in drain(watcher)] == ["added"], "the watcher goes on"


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 7]))
def test_a_table_is_a_dictionary_and_watchers_can_rebuild_it(seed: int, most: int) -> None:
    """At every commit the table is the model's dictionary, and what a watcher has got makes the same one."""
    dice = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MOST_CHANGES", most)
        content = Content(max_age=timedelta(seconds=50))
        model: dict[str, tuple[int, float]] = {}  # sequence and deadline
        count = dice.choice([0, 3])
        watchers = [(watched(content), dict[str, int](), dice.random() / 2) for _ in range(count)]
        seq, now, changes, told = 0, 0.0, 0, dict.fromkeys(range(3), 0)
        for _ in range(dice.randrange(1, 60)):
            now += dice.randrange(4)
            step = dice.randrange(10)
            if step < 7:
                batch: list[Update] = []
                for _ in range(dice.randrange(1, 6)):
                    key, seq = dice.choice("abcde"), seq + dice.randrange(1, 3)
                    if dice.random() < 0.3:
                        batch.append(delete(key, seq, now))
                        changes += 1
                        model.pop(key, None)
                    else:
                        ttl = dice.choice([None, None, None, None, timedelta(seconds=dice.randrange(1, 9)), FOREVER])
                        batch.append(put(key, seq, now, ttl=ttl))
                        changes += 1
                        ends = 50.0 if ttl is None else 1e9 if ttl == FOREVER else min(50.0, ttl.total_seconds())
                        model[key] = seq, now + ends
                plain = {key: held for key, held, deletes, ttl in batch if not deletes and ttl is None}
                content.stage(plain if len(plain) == len(batch) and dice.random() < 0.7 else batch)
                content.commit(seq)
            elif step < 9:
                content.settle(at(now), 0)
                gone = [key for key, (_, ends) in model.items() if ends <= now]
                changes += len(gone)
                for key in gone:
                    del model[key]
            else:
                first = seq - dice.randrange(4)
                content.drop_below(first)
                gone = [key for key, (held, _) in model.items() if held < first]
                changes += len(gone)
                for key in gone:
                    del model[key]
            assert seqs(content) == {key: held for key, (held, _) in model.items()}
            assert list(seqs(content).values()) == sorted(seqs(content).values())
            for number, (watcher, seen, speed) in enumerate(watchers):
                while dice.random() < speed or _ == 0:
                    change = watcher.pop()
                    if change is None:
                        break
                    told[number] += 1 + change.skipped
                    assert (change.old and change.old[0]) == seen.get(change.key)
                    if change.new is None:
                        del seen[change.key]
                    else:
                        seen[change.key] = change.new[0]
        for number, (watcher, seen, _) in enumerate(watchers):
            for change in drain(watcher):
                told[number] += 1 + change.skipped
                assert (change.old and change.old[0]) == seen.get(change.key)
                if change.new is None:
                    del seen[change.key]
                else:
                    seen[change.key] = change.new[0]
            assert seen == seqs(content)
            assert told[number] + watcher._skipped <= changes
