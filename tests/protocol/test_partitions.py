"""Partitions of subjects, and of members. tests/conformance/test_partitions.py compares the first with real servers."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.direct import StoredMsg, single_message
from jetstream_ext.protocol.partitions import Partitioner, assign, partition_of


def message(subject: str | bytes, seq: int = 1) -> StoredMsg:
    raw = subject if isinstance(subject, bytes) else subject.encode()
    return single_message("S", seq, b"", [raw, b"", b": 2026-01-01T00:00:00Z", b"", b"", b"", b""])


class TestPartitionOf:
    @walk("text, value", [("a", 0xE40C292C), ("foobar", 0xBF9CF968)])
    def test_it_is_fnv_1a_of_32_bits(self, text: str, value: int) -> None:
        assert partition_of(text, 2**32, None) == value
        assert partition_of(text, 7, None) == value % 7

    def test_tokens_are_joined_without_a_separator_in_the_order_of_the_key(self) -> None:
        assert partition_of("x.foo.bar", 2**32, (1, 2)) == 0xBF9CF968
        assert partition_of("bar.x.foo", 2**32, (2, 0)) == 0xBF9CF968
        assert partition_of("foo.bar", 2**32, None) != 0xBF9CF968
        assert partition_of("a.b.a", 2**32, (0, 2)) == partition_of("a", 2**32, (0, 0))

    def test_a_subject_that_is_too_short_is_refused(self) -> None:
        with pytest.raises(BadSubjectError) as caught:
            partition_of("orders.eu", 8, (1, 2))
        assert str(caught.value) == (
            "subject 'orders.eu' has 2 tokens, but the partition key is the tokens 1, 2, counted from 0; read only "
            "subjects that have them, with a filter such as '*.*.>', or take another key"
        )

    @walk("stored, from_leader", [
        (b"a.\xff.b", "a.\ufffd.b"), (b"a.\xe2\x82.b", "a.\ufffd\ufffd.b"),
        (b"a.\xed\xa0\x80x\xc3.b", "a.\ufffd\ufffd\ufffdx\ufffd.b"),
    ])  # fmt: skip
    def test_a_subject_that_is_not_utf_8_has_one_partition_in_every_form(self, stored: bytes, from_leader: str) -> None:
        for key in (None, (1,), (0, 1)):
            forms: list[str | bytes] = [stored, from_leader, from_leader.encode()]
            forms += [stored.decode("utf-8", errors) for errors in ("surrogateescape", "replace")]
            assert len({partition_of(form, 2**32, key) for form in forms}) == 1


class TestPartitioner:
    @given(st.lists(st.lists(st.text("abc漢", min_size=1, max_size=300), min_size=3, max_size=4).map(".".join)))
    def test_the_cache_changes_nothing(self, subjects: list[str]) -> None:
        for key in (None, (0, 2)):
            partitioner = Partitioner(97, key)
            expected = [partition_of(subject, 97, key) for subject in subjects]
            for _ in range(2):
                assert partitioner.of([message(subject) for subject in subjects]) == expected

    def test_the_message_with_a_bad_subject_is_named(self) -> None:
        messages = [message("a.b", 7), message("a", 8)]
        with pytest.raises(BadSubjectError, match=r"^stream 'S', sequence 8: subject 'a' has 1 token, but"):
            Partitioner(8, (1,)).of(messages)

    @walk("count, key", [(0, None), (-1, None), (4, ()), (4, (0, -1))])
    def test_invalid_arguments_are_refused(self, count: int, key: tuple[int, ...] | None) -> None:
        with pytest.raises(ValueError, match=r"^(partitions must be at least 1|key must be zero-based positions)"):
            Partitioner(count, key)


def owners(assignment: dict[str, list[int]]) -> dict[int, str]:
    return {partition: member for member, own in assignment.items() for partition in own}


GOLDEN = {"a": [2, 7, 9], "b": [0, 4, 5, 8], "c": [1, 3, 6]}

# Partitions, members before one joins, and how many may move on average; the member that joins gets at least 3, 12, 5,
# 15, 47.
MOVED = [(12, 3, 5), (64, 4, 17), (64, 10, 12), (256, 16, 28), (1000, 20, 75)]

NAMES = st.sets(st.text(max_size=8), max_size=12)


class TestAssign:
    @given(NAMES, st.integers(1, 70), st.randoms(use_true_random=False))
    def test_every_partition_has_one_owner_and_shares_are_within_one(
        self, members: set[str], count: int, rng: random.Random
    ) -> None:
        found = assign(members, count)
        assert found.keys() == members
        if not members:
            return
        assert sorted(partition for own in found.values() for partition in own) == list(range(count))
        sizes = [len(own) for own in found.values()]
        assert max(sizes) - min(sizes) <= 1
        assert all(own == sorted(own) for own in found.values())
        shuffled = [*members, *members]
        rng.shuffle(shuffled)
        assert assign(shuffled, count) == found

    def test_the_result_is_the_same_in_every_release(self) -> None:
        """Members of different releases share a group."""
        assert assign(["a", "b", "c"], 10) == GOLDEN
        assert assign(["only"], 4) == {"only": [0, 1, 2, 3]}
        assert assign([], 4) == {}

    @walk("count, members, most", MOVED)
    def test_few_partitions_move_when_a_member_joins_or_leaves(self, count: int, members: int, most: float) -> None:
        rng, moved = random.Random(count * members), []
        for _ in range(10):
            names = [f"member-{rng.random()}" for _ in range(members + 1)]
            before, after = owners(assign(names[:-1], count)), owners(assign(names, count))
            moved.append(sum(before[partition] != after[partition] for partition in before))
        assert mean(moved) <= most
