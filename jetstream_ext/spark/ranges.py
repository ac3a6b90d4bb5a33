"""Sequence ranges and how they become partitions: arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
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
        created: When the stream was created, in the server's words; empty is not known.
        points: Pairs of a sequence and how many messages follow from there on, ascending, from `first` to
            ``last + 1``; none: messages are as even as sequences.
    """

    stream: str
    first: int
    last: int
    size: int = 0
    subject: str | None = None
    filters: tuple[str, ...] = ()
    from_head: bool = False
    gapless: bool = False
    created: str = ""
    points: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def split(self, parts: int) -> list[SequenceRange]:
        """Return `parts` consecutive ranges (fewer if there are not as many sequences), as even as can be."""
        count = len(self)
        parts = min(parts, count)
        if self.points and parts:
            cuts = sorted({self.first, self.last + 1, *(self._quantile(part / parts) for part in range(1, parts))})
        else:
            cuts = [self.first + count * part // parts for part in range(parts + 1)] if parts else []
        return [
            replace(
                self,
                first=start,
                last=stop - 1,
                size=self.size // parts,
                from_head=self.from_head and not part,
                points=(),
            )
            for part, (start, stop) in enumerate(pairwise(cuts))
        ]

    def _quantile(self, share: float) -> int:
        """Return the sequence before which `share` of the messages are."""
        seqs = [seq for seq, _ in self.points]
        before = [self.points[0][1] - following for _, following in self.points]
        wanted = before[-1] * share
        cell = min(max(0, bisect_right(before, wanted) - 1), len(seqs) - 2)
        inside = max(1, before[cell + 1] - before[cell])
        return seqs[cell] + int(min(1.0, (wanted - before[cell]) / inside) * (seqs[cell + 1] - seqs[cell]))


def partition(ranges: Sequence[SequenceRange], *, min_partitions: int, max_bytes: int) -> list[SequenceRange]:
    """Cut `ranges` into partitions of about `max_bytes` at most and, if there are the sequences, `min_partitions` at least.

    Streams get partitions in proportion to their bytes.
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


def partition_evenly(ranges: Sequence[SequenceRange], count: int) -> list[SequenceRange]:
    """Cut `ranges` into `count` partitions by their sequences alone, so that the same ranges always give the same ones.

    What a micro-batch's sink has stored is found again by partition and row: a replay must be cut as the first time,
    whatever the streams hold by then. There are `count` of them even if that leaves some empty; none for no ranges.
    """
    ranges = [replace(one, size=len(one)) for one in ranges if len(one)]
    parts = partition(ranges, min_partitions=count, max_bytes=1 << 80)
    if parts:
        last = parts[-1]
        parts += [replace(last, first=last.last + 1, size=0, from_head=False)] * (count - len(parts))
    return parts
