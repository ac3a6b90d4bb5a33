"""Gaps in a run of stream sequences: the one place that finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def find_gaps(previous: int, seqs: Sequence[int], last: int) -> Iterator[range]:
    """Yield the missing sequences behind `previous` and between `seqs`, up to `last`, as ranges.

    What is missing behind the end of `seqs` is no gap yet: more may follow. Append ``last + 1`` to include it.

    Args:
        previous: The sequence before the first one of interest.
        seqs: Sequences over `previous`, ascending.
        last: The last sequence of interest.
    """
    if not seqs or seqs[-1] - previous == len(seqs):
        return
    for seq in seqs:
        if previous >= last:
            return
        if seq != previous + 1:
            yield range(previous + 1, min(seq, last + 1))
        previous = seq


def first_gap(seqs: Sequence[int], first: int, last: int) -> int | None:
    """Return the first sequence of ``first … last`` that is not in `seqs` (ascending); None: there is none."""
    if len(seqs) == last - first + 1:
        return None
    return next((gap.start for gap in find_gaps(first - 1, [*seqs, last + 1], last)), None)


class Gaps:
    """What is missing of ``first … last`` in sequences that come in pieces, ascending.

    Attributes:
        lowest: The lowest missing sequence (0: none so far).
        highest: The highest missing sequence (0: none so far).
    """

    def __init__(self, first: int, last: int) -> None:
        self.lowest: int = 0
        self.highest: int = 0
        self._previous = first - 1
        self._last = last

    def add(self, seqs: Sequence[int]) -> None:
        """Take the next sequences."""
        for gap in find_gaps(self._previous, seqs, self._last):
            self.lowest = self.lowest or gap.start
            self.highest = gap.stop - 1
        if seqs:
            self._previous = seqs[-1]

    def close(self) -> None:
        """Take the end: no more sequences follow."""
        if self._previous < self._last:
            self.add([self._last + 1])
