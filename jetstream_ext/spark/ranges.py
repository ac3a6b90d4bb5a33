"""Sequence ranges and how they become partitions: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences `first` to `last` of one stream, both inclusive; empty where `last` is smaller.

    Attributes:
        stream: The stream's name.
        first: The first sequence.
        last: The last sequence.
        size: About how many bytes the messages of the range have.
        subject: A filter for the server, or None.
        filters: Filters for the reader, any of which lets a message through; none is all.
        from_head: The range starts wherever the stream does (``earliest``): a head that expires meanwhile is no loss.
        gapless: When it was planned, the stream held every sequence of the range.
    """

    stream: str
    first: int
    last: int
    size: int = 0
    subject: str | None = None
    filters: tuple[str, ...] = ()
    from_head: bool = False
    gapless: bool = False

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def split(self, parts: int) -> list[SequenceRange]:
        """Return `parts` consecutive ranges (fewer if there are not as many sequences), as even as can be."""
        count = len(self)
        parts = min(parts, count)
        cuts = [self.first + count * part // parts for part in range(parts + 1)] if parts else []
        return [
            replace(self, first=start, last=stop - 1, size=self.size // parts, from_head=self.from_head and not part)
            for part, (start, stop) in enumerate(pairwise(cuts))
        ]


def partition(ranges: Sequence[SequenceRange], *, min_partitions: int, max_bytes: int) -> list[SequenceRange]:
    """Cut `ranges` into partitions of about `max_bytes` at most and, if there are the sequences, `min_partitions` at least.

    The cuts are by sequence, so that they never depend on what a stream holds at the moment: the same ranges give the
    same partitions. Streams get partitions in proportion to their bytes.
    """
    ranges = [one for one in ranges if len(one)]
    shares = [min(len(one), max(1, -(-one.size // max_bytes))) for one in ranges]
    while sum(shares) < min_partitions:
        divisible = [index for index, one in enumerate(ranges) if shares[index] < len(one)]
        if not divisible:
            break
        largest = max(divisible, key=lambda index: ranges[index].size / shares[index])
        shares[largest] += 1
    return [part for one, share in zip(ranges, shares, strict=True) for part in one.split(share)]
