"""How often each of many digests occurs, in little memory: what the sink knows about the rows of a partition.

The counts are in sorted arrays, which are merged when their sizes are similar. A digest therefore costs its own size and
four bytes, whatever the number of digests, and a look-up searches a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Digests: TypeAlias = NDArray[Any]
"""Digests of one type that numpy can sort."""
Counts: TypeAlias = NDArray[np.int64]

# Smaller arrays are always merged, because a search in many of them costs more.
_SMALL: Final = 8192


class DigestCounts:
    def __init__(self) -> None:
        # Largest first; a digest is in at most one of them.
        self._levels: list[tuple[Digests, NDArray[np.uint32]]] = []

    def __bool__(self) -> bool:
        return bool(self._levels)

    def add(self, digests: Digests) -> Counts:
        """Add digests; return for each of them how often it was added before."""
        distinct, counts = np.unique(digests, return_counts=True)
        before = np.zeros(len(distinct), np.int64)
        new = np.ones(len(distinct), bool)
        for known, at, found in self._find(distinct):
            before[found] = known[at]
            known[at] += counts[found].astype(np.uint32)
            new[found] = False
        if new.any():
            self._insert(distinct[new], counts[new].astype(np.uint32))
        return _occurrences(digests, counts, before)

    def take(self, digests: Digests) -> NDArray[np.bool_]:
        """Remove each of the digests once, as long as there are such; return which of them were there."""
        distinct, counts = np.unique(digests, return_counts=True)
        there = np.zeros(len(distinct), np.int64)
        for known, at, found in self._find(distinct):
            there[found] = known[at]
            known[at] -= np.minimum(known[at], counts[found].astype(np.uint32))
        return _occurrences(digests, counts, -there) < 0

    def _find(self, distinct: Digests) -> Iterator[tuple[NDArray[np.uint32], Counts, Counts]]:
        """Yield counts, the places in them of those digests that are there, and their places in `distinct`."""
        for digests, counts in self._levels:
            at = digests.searchsorted(distinct)
            at[at == len(digests)] = 0
            found = np.flatnonzero(digests[at] == distinct)
            if len(found):
                yield counts, at[found], found

    def _insert(self, digests: Digests, counts: NDArray[np.uint32]) -> None:
        while self._levels and len(self._levels[-1][0]) < max(2 * len(digests), _SMALL):
            others, their_counts = self._levels.pop()
            digests, counts = np.concatenate((others, digests)), np.concatenate((their_counts, counts))
            order = np.argsort(digests, kind="stable")  # the fastest one for two sorted arrays
            digests, counts = digests[order], counts[order]
        self._levels.append((digests, counts))


def _occurrences(digests: Digests, counts: Counts, before: Counts) -> Counts:
    """Number equal digests in their order; `counts` is how many of each there are, and `before` the first number."""
    if len(counts) == len(digests) and not before.any():
        return np.zeros(len(digests), np.int64)
    first = np.cumsum(counts) - counts
    numbers = np.empty(len(digests), np.int64)
    numbers[np.argsort(digests, kind="stable")] = np.arange(len(digests)) + np.repeat(before - first, counts)
    return numbers
