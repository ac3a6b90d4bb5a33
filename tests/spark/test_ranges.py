"""Sequence ranges, cut into partitions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.spark.ranges import SequenceRange

RANGES = st.lists(
    st.builds(
        lambda stream, first, count, size: SequenceRange(stream, first, first + count - 1, size=size),
        st.sampled_from("ABC"),
        st.integers(1, 1 << 62),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
    ),
    max_size=4,
)


@given(RANGES, st.integers(1, 50), st.integers(1 << 34, 1 << 40))
def test_every_sequence_is_in_one_partition(ranges: list[SequenceRange], least: int, most: int) -> None:
    parts = partition(ranges, min_partitions=least, max_bytes=most)
    assert parts == partition(ranges, min_partitions=least, max_bytes=most)
    rest = iter(parts)
    for one in ranges:
        position = one.first
        while position <= one.last:
            part = next(rest)
            assert (part.stream, part.first) == (one.stream, position)
            assert part.last >= part.first
            position = part.last + 1
        assert position == max(one.first, one.last + 1)
    assert next(rest, None) is None
    assert len(parts) >= min(least, sum(map(len, ranges)))


@given(st.integers(1, 1000), st.integers(1, 60))
def test_partitions_are_even(count: int, parts: int) -> None:
    sizes = [len(part) for part in SequenceRange("A", 5, 4 + count).split(parts)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("size", "least", "expected"),
    [(0, 1, 1), (0, 2, 2), (0, 5, 5), (100, 1, 1), (101, 1, 2), (1000, 1, 10), (1000, 3, 10), (10**9, 1, 1000)],
)
def test_the_size_decides_the_number_of_partitions(size: int, least: int, expected: int) -> None:
    assert len(partition([SequenceRange("A", 1, 1000, size=size)], min_partitions=least, max_bytes=100)) == expected


def test_large_streams_get_more_partitions() -> None:
    ranges = [SequenceRange("A", 1, 1000, size=900), SequenceRange("B", 1, 1000, size=100)]
    parts = partition(ranges, min_partitions=10, max_bytes=10_000)
    assert [part.stream for part in parts].count("A") == 9
    assert len(parts) == 10


def test_an_empty_range_has_no_partitions() -> None:
    assert partition([], min_partitions=2, max_bytes=1) == []
    assert partition([SequenceRange("A", 5, 4)], min_partitions=2, max_bytes=1) == []


def test_only_the_first_partition_starts_at_the_head() -> None:
    parts = SequenceRange("A", 1, 9, size=90, subject="x", filters=("y",), from_head=True, gapless=True).split(3)
    assert [part.from_head for part in parts] == [True, False, False]
    assert all((part.subject, part.filters, part.size, part.gapless) == ("x", ("y",), 30, True) for part in parts)
    assert all(one.last + 1 == other.first for one, other in pairwise(parts))
