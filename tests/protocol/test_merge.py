"""Merged reads without a server: every message once and in order, whatever arrives when, with few bytes held."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.merge import FilteredRead, Merge, widest
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


def test_a_message_of_many_reads_is_held_once() -> None:
    readers = Readers([[1, 2, 7]] * 20, 10, Random(1), 5000)
    assert readers.run() == [1, 2, 7]
    assert readers.most < 5 * 5100


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
