"""Gaps in a run of stream sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def find_gaps(previous: int, seqs: Sequence[int], last: int) -> Iterator[range]:
    """Yield the sequences after `previous`, up to `last`, that are missing before and between `seqs`, as ranges.

    `seqs` are ascending and over `previous`. The sequences after the end of `seqs` are not missing yet, because more
    may follow. Append ``last + 1`` to include them.
    """
    if not seqs or seqs[-1] - previous == len(seqs):
        return
    for seq in seqs:
        if previous >= last:
            return
        if seq != previous + 1:
            yield range(previous + 1, min(seq, last + 1))
        previous = seq


class Gaps:
    """The missing sequences of ``first … last``; those that are there come in pieces, ascending."""

    def __init__(self, first: int, last: int) -> None:
        self.lowest: int = 0  # the lowest missing sequence (0: none so far)
        self.highest: int = 0  # the highest one
        self._previous = first - 1
        self._last = last

    def add(self, seqs: Sequence[int]) -> None:
        for gap in find_gaps(self._previous, seqs, self._last):
            self.lowest = self.lowest or gap.start
            self.highest = gap.stop - 1
        if seqs:
            self._previous = seqs[-1]

    def close(self) -> None:
        if self._previous < self._last:
            self.add([self._last + 1])
