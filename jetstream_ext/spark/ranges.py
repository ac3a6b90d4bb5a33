"""Sequence ranges of streams, and where to cut them: decisions without any I/O.

Where messages are spread unevenly over the sequences (most were deleted, or a filter matches few), the cuts need counts.
A `Search` asks for them: it yields sequences, is sent how many messages follow from each of them on, and returns its result.
Counts may come from replicas that lag, so a result is a matter of balance, never of correctness.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from math import inf
from typing import TypeAlias

from jetstream_ext.spark.offsets import Seen

Search: TypeAlias = Generator[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences `first` to `last` of one stream, both inclusive; empty where `last` is smaller. A partition is one."""

    stream: str
    first: int
    last: int
    filters: tuple[str, ...] = ()  # of subjects, any of which may match; none: all messages
    on_server: bool = False  # the server filters, not the executor
    from_head: bool = False  # what is missing at its beginning is no loss, or was reported already
    seen: Seen | None = None  # the stream when the range was planned; None if that is unknown
    since: datetime | None = None  # a time before which none of these messages was stored
    # Only the newest messages of their keys up to this sequence are read (0: all messages).
    snapshot: int = 0

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def cut(self, cuts: Iterable[int]) -> list[SequenceRange]:
        """Return the consecutive ranges of which the second and later ones begin at `cuts`."""
        if not len(self):
            return []
        # One range for each cut, whatever has become of the bounds: partitions have numbers.
        bounds = [min(max(self.first, bound), self.last + 1) for bound in (self.first, *sorted(cuts), self.last + 1)]
        return [
            replace(self, first=start, last=stop - 1, from_head=self.from_head and start == self.first)
            for start, stop in pairwise(bounds)
        ]


def even_cuts(first: int, last: int, parts: int) -> tuple[int, ...]:
    """Return where to cut `parts` consecutive ranges of about equal length (fewer if there are fewer sequences)."""
    count = max(0, last - first + 1)
    parts = min(parts, count)
    return tuple(first + count * part // parts for part in range(1, parts))


def shares(weights: Sequence[int], most: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Return how many partitions each of several ranges gets: `least` of each, then `total` of all, in proportion to weight.

    No range gets more than `most` of it, so the sum can be below `total`.
    """
    counts = [min(top, max(1, low)) for top, low in zip(most, least, strict=True)]
    largest = [(-weight / counts[index], index) for index, weight in enumerate(weights) if counts[index] < most[index]]
    heapq.heapify(largest)
    missing = total - sum(counts)
    while largest and missing > 0:
        _, index = heapq.heappop(largest)
        counts[index] += 1
        missing -= 1
        if counts[index] < most[index]:
            heapq.heappush(largest, (-weights[index] / counts[index], index))
    return counts


def find_ranks(
    first: int, last: int, ranks: Sequence[int], slack: int, *, divisions: int = 8, probes: float = inf
) -> Search:
    """Return, for each of the ascending `ranks`, a sequence of a range with so many of its messages before it.

    There may be up to `slack` fewer before it, or still fewer once about `probes` questions were asked. More `divisions` need
    fewer rounds of questions, and fewer need fewer questions.
    """
    points = [first, last + 1]
    total, behind = yield points
    before = [0, max(0, total - behind)]  # how many messages are before each point
    while True:
        places = [bisect_right(before, rank) - 1 for rank in ranks]
        inside: dict[int, tuple[int, ...]] = {}  # by the number of the point before them
        for rank, place in zip(ranks, places, strict=True):
            if rank - before[place] > slack and place + 1 < len(points):
                inside[place] = even_cuts(points[place], points[place + 1] - 1, divisions)
        asked = [point for each in inside.values() for point in each]
        if not asked or len(asked) > probes:
            return [points[place] for place in places]
        probes -= len(asked)
        following = iter((yield asked))
        known, points, before = list(zip(points, before, strict=True)), [], []
        for place, (point, count) in enumerate(known):
            points.append(point)
            before.append(count)
            for other in inside.get(place, ()):
                points.append(other)
                # Replicas may contradict each other.
                before.append(min(max(before[-1], total - next(following)), known[place + 1][1]))
