"""Merged reads without a server: every message once and in order, whatever arrives when, with few bytes held."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.merge import FilteredRead, Merge, filtering_pays, in_order, widest
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT


def block(*seqs: int, stream: str = "S", size: int = 1) -> Block:
    return Block(stream, list(seqs), [b"%d" % seq + bytes(size) for seq in seqs], [0] * len(seqs))


def rows(blocks: Sequence[Block]) -> Iterator[tuple[str, int]]:
    """Yield responder and sequence of each row; the body is that of the row."""
    for each in blocks:
        for message in each.messages():
            assert message.data.rstrip(b"\0") == b"%d" % message.seq
            yield each.stream, message.seq


def seqs(blocks: Sequence[Block]) -> list[int]:
    return [seq for _, seq in rows(blocks)]


class Readers:
    """What the shell does: each read has its messages, which arrive in blocks of some size."""

    def __init__(self, held: Sequence[Sequence[int]], max_bytes: int, random: Random, size: int = 1) -> None:
        self.merge = Merge([f"f{index}" for index in range(len(held))], 1, max_bytes)
        self.held = {read: sorted(each) for read, each in zip(self.merge.reads, held, strict=True)}
        self.open: dict[FilteredRead, list[int]] = {}
        self.opened = self.most = self.added = 0
        self.random, self.size = random, size

    def run(self) -> list[int]:
        read: list[int] = []
        merge = self.merge
        for _ in range(10_000):
            if not merge.reads:
                return read
            needed = merge.needed()
            assert 0 < len(needed) <= MAX_IN_FLIGHT
            for each in needed:
                self.advance(each)
            for each in merge.forget():
                del self.open[each]
            self.most = max(
                self.most, sum(len(body) for each in merge.reads for one in each.blocks for body in one.bodies)
            )
            for taken in merge.take():
                assert taken.seqs
                read += seqs([taken])
        pytest.fail("the read does not end")

    def advance(self, read: FilteredRead) -> None:
        if read not in self.open:
            self.open[read] = [seq for seq in self.held[read] if seq >= read.next_seq]
            self.opened += 1
        coming = self.open[read]
        while coming:
            count = self.random.randint(1, 4)
            self.merge.add(read, block(*coming[:count], size=self.size))
            self.added += min(count, len(coming))
            del coming[:count]
            if self.random.random() < 0.5:
                return
        self.merge.end(read)


@given(
    held=st.lists(st.sets(st.integers(1, 60), max_size=30), min_size=1, max_size=20), max_bytes=st.integers(1, 300),
    seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_merging_is_sorting_without_repetition(held: list[set[int]], max_bytes: int, seed: int) -> None:
    readers = Readers([sorted(each) for each in held], max_bytes, Random(seed))
    assert readers.run() == sorted(set().union(*held))
    assert all(not read.blocks for read in readers.open)


@given(st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=10).map(sorted), max_size=6), st.data())
def test_rows_are_put_in_order_with_the_name_of_their_responder(runs: list[list[int]], data: st.DataObject) -> None:
    blocks = [block(*run, stream=data.draw(st.sampled_from("SM"))) for run in runs]
    responders: dict[int, set[str]] = {}
    for responder, seq in rows(blocks):
        responders.setdefault(seq, set()).add(responder)
    ordered = in_order(blocks)
    assert seqs(ordered) == sorted(responders)
    assert all(responder in responders[seq] for responder, seq in rows(ordered))
    assert all(one.stream != other.stream for one, other in pairwise(ordered)) or len(blocks) < 2


def test_a_message_of_many_reads_is_held_once() -> None:
    readers = Readers([[1, 2, 7]] * 20, 10, Random(1), 5000)
    assert readers.run() == [1, 2, 7]
    assert readers.most < 5 * 5100


def test_reads_that_end_leave_their_part_of_the_limits_to_the_others() -> None:
    merge = Merge(["a", "b", "c"], 1, 100)
    assert (merge.group.readers, merge.group.in_flight) == (3, 3)
    one, other, third = merge.needed()
    merge.end(one)
    merge.add(other, block(5, 6))
    merge.end(other)
    assert merge.group.readers == 1
    merge.add(third, block(2, 5))
    assert seqs(merge.take()) == [2, 5]
    assert merge.needed() == [third], "6 is held, and may not be the next message"
    merge.end(third)
    assert (seqs(merge.take()), merge.reads) == ([6], [])


def test_a_forgotten_read_is_continued_when_its_first_message_may_be_the_next() -> None:
    merge = Merge(["a", "b"], 1, 10)
    near, far = merge.needed()
    merge.add(near, block(1, 2))
    merge.add(far, block(50, size=1000))
    merge.end(far)
    assert merge.forget() == [far]
    assert (far.next_seq, far.ended) == (50, False)
    assert seqs(merge.take()) == [1, 2]
    merge.add(near, block(30))
    assert merge.needed() == []
    assert seqs(merge.take()) == [30]
    merge.add(near, block(60))
    assert merge.needed() == [far]
    assert merge.take() == []


def test_a_filter_that_another_one_covers_is_left_out() -> None:
    assert widest(["a.b", "a.*", "a.b", "c", "a.b.c", "b.>", "b.c.>", "c"]) == ["a.*", "c", "a.b.c", "b.>"]
    assert widest(["a.*", "*.b"]) == ["a.*", "*.b"]
    assert widest(["x", ">"]) == [">"]
    assert widest(["a*", "ab"]) == ["a*", "ab"]  # no wildcard


def test_invalid_filters_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Merge([], 1, 100)
    with pytest.raises(BadSubjectError):
        Merge(["a", "b..c"], 1, 100)


def counts(filters: int, matching: int, subject: str = "r.{}") -> dict[str, int]:
    return {subject.format(index): matching // filters for index in range(filters)}


@walk("filters", [2, 8, 32])
def test_whether_filtering_pays(filters: int) -> None:
    """Measured: the stream has 2,000,000 messages of 128 bytes, and 41 blocks."""
    messages, size = 2_000_000, 332_000_000
    for matching in (0, 10, 1000, 100_000):
        assert filtering_pays(counts(filters, matching), messages, size), matching
    if filters < 32:
        for share, pays in ((0.05, True), (0.2, True), (0.5, True), (1.0, False)):
            assert filtering_pays(counts(filters, int(share * messages)), messages, size) is pays, share
