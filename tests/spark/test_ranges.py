"""Where ranges of sequences are cut."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.spark.ranges import find_ranks

SEQUENCES = st.one_of(
    st.sets(st.integers(1, 200), max_size=200),
    st.sets(st.integers(1, 1 << 40), max_size=50),
    st.builds(lambda first, count: set(range(first, first + count)), st.integers(1, 1 << 40), st.integers(0, 300)),
).map(sorted)


@given(SEQUENCES, st.lists(st.integers(1, 400), min_size=1, max_size=20).map(sorted), st.integers(0, 40))
def test_a_rank_has_so_many_messages_before_it_whatever_the_gaps(
    stored: list[int], ranks: list[int], slack: int
) -> None:
    first, last = (stored[0], stored[-1] + 7) if stored else (1, 10)
    search = find_ranks(first, last, ranks, slack)
    asked, points = 0, next(search)
    try:
        while True:
            asked += len(points)
            points = search.send([len(stored) - bisect_left(stored, seq) for seq in points])
    except StopIteration as end:
        found: list[int] = end.value
    for rank, seq in zip(ranks, found, strict=True):
        assert first <= seq <= last + 1
        wanted = min(rank, len(stored))
        assert wanted - slack <= bisect_left(stored, seq) <= wanted
    assert asked <= 2 + len(ranks) * 7 * 15


@given(st.data())
def test_a_search_ends_whatever_the_counts_are(data: st.DataObject) -> None:
    """Counts come from replicas, which may contradict each other."""
    search = find_ranks(1, 1 << 20, [1, 4, 7], data.draw(st.integers(0, 2)))
    asked = next(search)
    for _ in range(200):
        try:
            asked = search.send(data.draw(st.lists(st.integers(0, 9), min_size=len(asked), max_size=len(asked))))
        except StopIteration:
            return
    pytest.fail("the search does not end")
