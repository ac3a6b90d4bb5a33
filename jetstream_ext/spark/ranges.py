"""Sequence ranges of streams, and where to cut them: decisions without any I/O.

Where messages are spread unevenly over the sequences (most were deleted, or a filter matches few), the cuts need counts.
A `Search` asks for them: it yields sequences, is sent how many messages follow from each of them on, and returns its result.
Counts may come from replicas that lag, so a result is a matter of balance, never of correctness.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Final, TypeAlias, TypeVar

from jetstream_ext.spark.offsets import Ends, Held

_Result = TypeVar("_Result")
Search: TypeAlias = Generator[list[int], list[int], _Result]

# How many cells a balanced partition consists of, so that its size is off by less than one of them.
_CELLS_PER_PARTITION: Final = 4
# In how many parts a cell with too many messages is divided at once.
_DIVISIONS: Final = 8


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences `first` to `last` of one stream, both inclusive; empty where `last` is smaller. A partition is one."""

    stream: str
    first: int
    last: int
    filters: tuple[str, ...] = ()  # of subjects, any of which may match; none: all messages
    on_server: bool = False  # the server filters, not the executor
    from_head: bool = False  # it starts where the stream starts (``earliest``): an expired head is no loss
    # Of the stream when the range was planned (see `offsets.Position`); empty if that is unknown.
    created: str = ""
    ends: Ends = ()
    held: Held | None = None
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
    largest = [
        (-weight / count, index)
        for index, (weight, count) in enumerate(zip(weights, counts, strict=True))
        if count < most[index]
    ]
    heapq.heapify(largest)
    for _ in range(total - sum(counts)):
        if not largest:
            break
        _, index = heapq.heappop(largest)
        counts[index] += 1
        if counts[index] < most[index]:
            heapq.heappush(largest, (-weights[index] / counts[index], index))
    return counts


def balanced_cuts(
    first: int, last: int, parts: int, most: int | None = None, *, probes: int = 512
) -> Search[tuple[int, ...]]:
    """Return cuts that make about `parts` ranges of about as many messages each, and none of more than `most`.

    No more than `probes` questions are asked for balance alone.
    """
    following = dict(zip((first, last + 1), (yield [first, last + 1]), strict=True))
    total = following[first] - following[last + 1]
    if most is not None:
        parts = max(parts, -(-total // most))
    if parts < 2 or total < 2:
        return ()
    wanted = max(1, total // (parts * _CELLS_PER_PARTITION))
    bounds = [first, last + 1]
    while True:
        points = _inside_of_heavy_cells(bounds, following, wanted)
        if len(points) > probes:  # even enough
            points = _inside_of_heavy_cells(bounds, following, most or total)
        if not points:
            break
        following |= zip(points, (yield points), strict=True)
        probes -= len(points)
        bounds = sorted([*bounds, *points])
    counts = [max(0, following[start] - following[stop]) for start, stop in pairwise(bounds)]
    return _quantiles(bounds, counts, parts) if most is None else _filled(bounds, counts, min(most, -(-total // parts)))


def _inside_of_heavy_cells(bounds: Sequence[int], following: Mapping[int, int], limit: int) -> list[int]:
    """Return where to divide the cells between `bounds` that have more than `limit` messages."""
    points: list[int] = []
    for start, stop in pairwise(bounds):
        count = following[start] - following[stop]
        if count > limit:
            points += even_cuts(start, stop - 1, min(_DIVISIONS, 1 + count // limit))
    return points


def _quantiles(bounds: Sequence[int], counts: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return cuts for `parts` equal ranges; inside a cell, its messages are taken as evenly spread."""
    before = [0, *accumulate(counts)]
    cuts: set[int] = set()
    for part in range(1, parts):
        wanted = before[-1] * part / parts
        cell = min(max(0, bisect_right(before, wanted) - 1), len(counts) - 1)
        inside = (wanted - before[cell]) / max(1, counts[cell])
        cuts.add(bounds[cell] + int(min(1.0, inside) * (bounds[cell + 1] - bounds[cell])))
    return tuple(sorted(cuts - {bounds[0], bounds[-1]}))


def _filled(bounds: Sequence[int], counts: Sequence[int], most: int) -> tuple[int, ...]:
    """Return cuts between cells, so that no range has more than `most` messages."""
    cuts: list[int] = []
    held = 0
    for start, count in zip(bounds, counts, strict=False):
        if held and held + count > most:
            cuts.append(start)
            held = 0
        held += count
    return tuple(cuts)


def end_of_rows(first: int, last: int, rows: int, *, divisions: int = _DIVISIONS) -> Search[int]:
    """Return the last sequence of a range that starts at `first` and has the next `rows` messages, or `last`.

    More `divisions` need fewer rounds of questions, and fewer need fewer questions.
    """
    low, high = first, last + 1
    at_low, at_high = yield [low, high]
    wanted = at_low - rows
    if at_high >= wanted:
        return last
    # More messages than wanted follow from `low` on, and fewer from `high` on.
    while at_low > wanted and high - low > 1:
        points = list(even_cuts(low, high - 1, divisions))
        counts = yield points
        # Counts descend: the last point from which at least `wanted` follow, and the one after it.
        place = bisect_right(counts, -wanted, key=lambda count: -count)
        if place:
            low, at_low = points[place - 1], counts[place - 1]
        if place < len(points):
            high = points[place]
    return max(first, low - 1)
