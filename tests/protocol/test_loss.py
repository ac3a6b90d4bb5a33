"""Gaps between sequences."""

from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol.loss import Gaps, find_gaps

some = st.sets(st.integers(1, 40)).map(sorted)


@given(seqs=some, previous=st.integers(0, 45), last=st.integers(0, 50))
def test_find_gaps_names_every_missing_sequence_before_the_end_of_the_run(
    seqs: list[int], previous: int, last: int
) -> None:
    seqs = [seq for seq in seqs if seq > previous]
    gaps = list(find_gaps(previous, seqs, last))
    end = min(last, seqs[-1] if seqs else 0)
    assert [seq for gap in gaps for seq in gap] == sorted(set(range(previous + 1, end + 1)) - set(seqs))
    assert all(len(gap) and (gap.stop in seqs or gap.stop == last + 1) for gap in gaps)


@given(seqs=some, first=st.integers(1, 45), last=st.integers(0, 50), piece=st.integers(1, 7))
def test_gaps_of_a_run_in_pieces(seqs: list[int], first: int, last: int, piece: int) -> None:
    seqs = [seq for seq in seqs if seq >= first]
    gaps = Gaps(first, last)
    for start in range(0, len(seqs), piece):
        gaps.add(seqs[start : start + piece])
    gaps.close()
    missing = set(range(first, last + 1)) - set(seqs)
    assert (gaps.lowest, gaps.highest) == (min(missing, default=0), max(missing, default=0))


@walk("pieces, lowest", [([[1, 2, 4]], 3), ([[1, 2], [3]], 0), ([[2]], 1), ([[]], 0)])
def test_a_gap_is_known_before_the_end(pieces: list[list[int]], lowest: int) -> None:
    gaps = Gaps(1, 9)
    for seqs in pieces:
        gaps.add(seqs)
    assert gaps.lowest == lowest
    gaps.close()
    assert gaps.highest == 9
