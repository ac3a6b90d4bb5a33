"""`Past`: every row of the table in docs/key-value.md ("Reads of the past"), and random histories."""

import random
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from jetstream_ext.kv.entries import Subjects
from jetstream_ext.kv.history import Past, Verdict
from jetstream_ext.protocol.gaps import Gaps
from jetstream_ext.protocol.subjects import matcher

START = datetime(2026, 1, 1, tzinfo=UTC)
ALL = Subjects("B", "$KV.B.", matcher([">"]))
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
PURGE = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
MARKER = {"Nats-Marker-Reason": "MaxAge", "Nats-Rollup": "sub"}


class Record(NamedTuple):
    """The fields of a `Row`, by name."""

    seq: int
    subject: str
    data: bytes
    headers: dict[str, str]
    time: datetime


def message(seq: int, key: str, headers: dict[str, str] | None = None) -> Record:
    return Record(seq, f"$KV.B.{key}", b"%d" % seq, headers or {}, START + timedelta(seconds=seq))


def judge(
    past: Past,
    *,
    named: tuple[str, ...] = (),
    wild: bool = True,
    missing: bool = True,
    lost: bool = False,
    expire: bool = False,
) -> Verdict:
    return past.verdict(named=named, wild=wild, missing=missing, lost=lost, expire=expire)


def known(verdict: Verdict) -> dict[str, int]:
    return {key: entry.revision for key, entry in verdict.entries.items()}


def test_newest_message_up_to_the_revision_decides() -> None:
    past = Past(ALL, revision=4, history=3)
    past.feed([message(2, "a"), message(4, "a"), message(5, "a")])
    verdict = judge(past)
    assert known(verdict) == {"a": 4}
    assert verdict.unavailable == ()


@pytest.mark.parametrize(
    ("history", "after", "unavailable"),
    [
        (1, [message(5, "a")], True),
        (1, [message(5, "a", {EXPECTED: "0"})], False),
        (1, [message(5, "a", {EXPECTED: "3"})], True),
        (1, [message(5, "a", {EXPECTED: "0", f"{EXPECTED}-Subject": "$KV.B.other"})], True),
        (3, [message(5, "a")], False),
        (3, [message(5, "a"), message(6, "a")], False),
        (3, [message(5, "a"), message(6, "a"), message(7, "a")], True),
        (3, [message(5, "a", {EXPECTED: "0"}), message(6, "a"), message(7, "a")], False),
        (3, [message(5, "a", {EXPECTED: "2"})], True),
        (3, [message(5, "a", PURGE)], True),
        (3, [message(5, "a", MARKER)], True),
        (3, [message(5, "a", {"KV-Operation": "DEL"})], False),
        (3, [message(5, "a", {"Nats-Rollup": "sub", EXPECTED: "0"})], True),
        (0, [message(n, "a") for n in range(5, 90)], False),
    ],
)
def test_oldest_message_decides_if_none_is_old_enough(history: int, after: list[Record], unavailable: bool) -> None:
    past = Past(ALL, revision=4, history=history)
    past.feed(after)
    assert past.uncertain(())
    assert judge(past).unavailable == (("a",) if unavailable else ())
    assert judge(past, named=("a",), wild=False, lost=True).unavailable == ("a",)
    assert judge(past, missing=False).unavailable == ()
    assert known(judge(past)) == {}


@pytest.mark.parametrize(
    ("headers", "unavailable"), [({}, True), ({"KV-Operation": "DEL"}, True), ({EXPECTED: "0"}, False)]
)
def test_oldest_message_that_does_not_say_what_it_replaced_may_have_replaced_an_expired_one(
    headers: dict[str, str], unavailable: bool
) -> None:
    past = Past(ALL, revision=4, history=3)
    past.feed([message(5, "a", headers)])
    assert judge(past, expire=True).unavailable == (("a",) if unavailable else ())
    assert judge(past, expire=True, missing=False).unavailable == ()


def test_rollup_of_the_stream_accounts_only_for_what_was_removed_up_to_the_revision() -> None:
    rollup = message(5, "x", {"Nats-Rollup": "all"})
    after = Past(ALL, revision=6, history=3)
    after.feed([rollup, message(6, "a")], log=True)
    assert not after.emptied
    assert after.accounts_for() == 5
    before = Past(ALL, revision=4, history=3)
    before.feed([rollup, message(6, "a")], log=True)
    assert before.emptied
    assert before.accounts_for() == 0
    assert judge(before).unavailable == ("x",)


def test_other_subjects_of_the_stream_are_no_keys_but_account_for_gaps() -> None:
    past = Past(ALL, revision=4, history=1)
    foreign = message(1, "k", {EXPECTED: "0"})._replace(subject="$KV.C.k")
    past.feed([foreign, message(5, "k"), message(9, "")._replace(subject="k")], log=True)
    assert past.accounts_for() == 9
    assert judge(past).unavailable == ("k",)


def test_named_key_without_messages_is_unavailable() -> None:
    past = Past(ALL, revision=4, history=1)
    past.feed([message(2, "a")])
    assert not past.uncertain(["a"])
    assert past.uncertain(["a", "gone"])
    assert judge(past, named=("a", "gone"), wild=False) == Verdict(
        judge(past).entries, ("gone",), complete=True, lost=False
    )
    assert judge(past, named=("a", "gone"), missing=False).unavailable == ()


def test_answer_is_complete_if_no_message_is_missing() -> None:
    past = Past(ALL, revision=4, history=1)
    past.feed([message(2, "a"), message(9, "b", PURGE)])
    verdict = judge(past, missing=False, lost=True)
    assert verdict.complete
    assert not verdict.lost


def test_pattern_read_is_incomplete_if_messages_are_missing() -> None:
    past = Past(ALL, revision=4, history=1)
    past.feed([message(2, "a")])
    assert judge(past).complete is False
    assert judge(past, lost=True).lost
    assert judge(past, wild=False).complete
    assert not judge(past, wild=False, lost=True).lost


def test_named_keys_without_a_value_are_unavailable_if_keys_vanish() -> None:
    past = Past(ALL, revision=4, history=3)
    past.feed([message(1, "deleted", {"KV-Operation": "DEL"}), message(2, "kept"), message(7, "new", {EXPECTED: "0"})])
    named = ("deleted", "kept", "new")
    assert judge(past, named=named, wild=False).unavailable == ()
    verdict = judge(past, named=named, wild=False, lost=True)
    assert verdict.unavailable == ("deleted", "new")
    assert known(verdict) == {"kept": 2}
    assert past.uncertain(named)
    assert judge(past, lost=True).unavailable == ()  # the keys were not named, so the whole answer is in doubt


def test_repeated_messages_count_once() -> None:
    past = Past(ALL, revision=4, history=3)
    for _ in range(3):
        past.feed([message(5, "a"), message(6, "a")])
    assert judge(past).unavailable == ()


def test_full_histories_and_purges_account_for_gaps() -> None:
    past = Past(Subjects("B", "$KV.B.", matcher(["a"])), revision=9, history=2)
    past.feed([message(3, "b"), message(4, "c"), message(6, "b"), message(7, "a")], log=True)
    assert (
        past.accounts_for() == 3
    )  # b has two messages, as many as are kept: the gaps below may have been its messages
    past.feed([message(8, "d", PURGE)], log=True)
    assert past.accounts_for() == 8
    assert known(judge(past)) == {"a": 7}
    assert judge(past).unavailable == ()


def test_history_accounts_only_for_what_it_can_have_removed() -> None:
    past = Past(ALL, revision=9, history=1)
    past.feed([message(8, "created", {EXPECTED: "0"})], log=True)
    assert past.accounts_for() == 0
    past.feed([message(7, "updated", {EXPECTED: "4"})], log=True)
    assert past.accounts_for() == 4
    past.feed([message(6, "put")], log=True)
    assert past.accounts_for() == 6


class Server:
    """A bucket that keeps `history` messages of a key, and every message that it ever stored."""

    def __init__(self, history: int) -> None:
        self.history = history
        self.happened: list[Record] = []

    def store(self, key: str, headers: dict[str, str]) -> None:
        self.happened.append(message(len(self.happened) + 1, key, headers))

    def held(self) -> list[Record]:
        held: dict[str, list[Record]] = {}
        for record in self.happened:
            mine = held.setdefault(record.subject, [])
            if "Nats-Rollup" in record.headers:
                mine.clear()
            mine.append(record)
            del mine[: -self.history]
        return sorted((record for mine in held.values() for record in mine), key=lambda record: record.seq)


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_give_no_wrong_answer(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(history=rng.choice([1, 2, 3, 8]))
    for _ in range(50):
        key = rng.choice("abcdef")
        before = [record.seq for record in server.happened if record.subject == f"$KV.B.{key}"]
        last = str(before[-1] if before else 0)
        server.store(
            key, rng.choice([{}, {}, {EXPECTED: last}, {"KV-Operation": "DEL"}, PURGE if rng.random() < 0.3 else {}])
        )
    held = server.held()
    for revision in range(1, 51):
        truth = {record.subject.removeprefix("$KV.B."): record.seq for record in server.happened[:revision]}
        past, gaps, up_to = Past(ALL, revision=revision, history=server.history), Gaps(1, 50), Gaps(1, revision)
        past.feed(held, log=True)
        for each in (gaps, up_to):
            each.add([record.seq for record in held])
            each.close()
        verdict = past.verdict(
            named=("a", "z"),
            wild=True,
            missing=up_to.highest > 0,
            lost=gaps.highest > past.accounts_for(),
        )
        assert not verdict.lost, "histories account for all that is missing"
        assert known(verdict).items() <= truth.items()
        assert truth.keys() - known(verdict).keys() <= set(verdict.unavailable)
        assert known(verdict).keys().isdisjoint(verdict.unavailable)
