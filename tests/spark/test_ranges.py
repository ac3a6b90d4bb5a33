"""Sequence ranges, and where they are cut."""

from bisect import bisect_left
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.spark.ranges import Search, balanced_cuts, end_of_rows

_Result = TypeVar("_Result")

SEQUENCES = st.one_of(
    st.sets(st.integers(1, 200), max_size=200),
    st.sets(st.integers(1, 1 << 40), max_size=50),
    st.builds(lambda first, count: set(range(first, first + count)), st.integers(1, 1 << 40), st.integers(0, 300)),
).map(sorted)


def run(search: Search[_Result], stored: list[int]) -> tuple[_Result, int]:
    """Answer the questions of a search; return its result and how many counts it asked for."""
    asked, counts = 0, next(search)
    while True:
        asked += len(counts)
        try:
            counts = search.send([len(stored) - bisect_left(stored, seq) for seq in counts])
        except StopIteration as end:
            return end.value, asked


def held(stored: list[int], bounds: list[int]) -> list[int]:
    """Return how many messages each of the ranges between `bounds` has."""
    return [bisect_left(stored, stop) - bisect_left(stored, start) for start, stop in pairwise(bounds)]


@given(SEQUENCES, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 40)))
def test_balanced_cuts_are_balanced(stored: list[int], parts: int, most: int | None) -> None:
    first, last = (stored[0], stored[-1] + 7) if stored else (1, 10)
    cuts, asked = run(balanced_cuts(first, last, parts, most), stored)
    bounds = [first, *cuts, last + 1]
    assert list(cuts) == sorted(set(cuts))
    assert all(first < cut <= last for cut in cuts)
    sizes = held(stored, bounds)
    if most is not None:
        assert max(sizes) <= most
    else:
        assert len(sizes) <= parts
        assert max(sizes) <= len(stored) / parts * 1.5 + 2
    assert asked <= 512 + 8 * (len(stored) + 2) * 8


@given(SEQUENCES, st.integers(1, 400))
def test_the_end_of_rows_has_that_many_rows(stored: list[int], rows: int) -> None:
    first, last = (stored[0], stored[-1] + 7) if stored else (1, 10)
    end, asked = run(end_of_rows(first, last, rows), stored)
    assert held(stored, [first, end + 1]) == [min(rows, len(stored))]
    assert first <= end <= last
    assert asked <= 7 * 20


@given(st.data())
def test_searches_end_whatever_the_counts_are(data: st.DataObject) -> None:
    """Counts come from replicas, which may contradict each other."""
    search: Search[object] = data.draw(
        st.sampled_from([end_of_rows(1, 1 << 20, 5), balanced_cuts(1, 1 << 20, 4), balanced_cuts(1, 1 << 20, 4, 3)])
    )
    asked = next(search)
    for _ in range(200):
        try:
            asked = search.send(data.draw(st.lists(st.integers(0, 9), min_size=len(asked), max_size=len(asked))))
        except StopIteration:
            return
    pytest.fail("the search does not end")
