"""Whether messages of a range expired, or were purged, before they were read: decided without any I/O.

A missing message leaves no trace of why it is gone. Deletes, limits per subject, rollups and TTLs remove single messages,
which is no loss; `max_age`, `max_msgs`, `max_bytes` and purges remove everything up to some sequence and so move the first
sequence of the stream. (Where newer messages replace older ones, that moves it as well; see `planning.were_replaced`.) So a gap is a loss if the stream's first sequence has passed it *before it was read*. The first
sequence never goes back: if it is still at or below a gap after the gap was read, the gap is no loss. The reader therefore
asks for it soon after each gap, at most once a second, and rarely: a reader is usually far ahead of the first sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jetstream_ext.protocol.loss import find_gaps

_SECONDS: Final = 1.0  # between two questions for the first sequence, after the first few


class HeadWatch:
    """Watches the gaps of a range ``first … last`` that is read in order.

    With `from_head`, the range starts at whichever message is the first one: what expires before is no loss.
    """

    def __init__(self, first: int, last: int, *, from_head: bool, now: float) -> None:
        self._previous = first - 1
        self._last = last
        self._from_head = from_head
        self._gap: range | None = None  # the lowest one of which it is not known whether it is a loss
        self._pieces = 0
        self._next_piece = 1
        self._asked = now

    @property
    def in_doubt(self) -> bool:
        """Whether there is a gap of which it is not known whether it is a loss."""
        return self._gap is not None

    def add(self, seqs: Sequence[int], now: float) -> bool:
        """Take the next messages; return whether the stream's first sequence should be asked for."""
        self._find(seqs)
        self._pieces += 1
        return self._gap is not None and (self._pieces >= self._next_piece or now >= self._asked + _SECONDS)

    def close(self) -> bool:
        """Take the end of the range; return whether the first sequence must be asked for."""
        if self._previous < self._last:
            self._find([self._last + 1])
        return self._gap is not None

    def answered(self, first_seq: int, now: float) -> range | None:
        """Take the stream's first sequence; return the sequences that were lost, if any."""
        gap, self._gap = self._gap, None
        # In a range from the head, what has expired while the first messages arrived counts as expired before.
        tolerated = self._from_head and self._pieces == 1
        self._next_piece, self._asked = 2 * max(1, self._pieces), now
        if gap is None or tolerated or first_seq <= gap.start:
            return None
        return range(gap.start, min(gap.stop, first_seq))

    def _find(self, seqs: Sequence[int]) -> None:
        before, self._previous = self._previous, seqs[-1] if seqs else self._previous
        if self._gap is not None:
            return  # the lowest one decides
        at_head = self._from_head and not self._pieces
        for gap in find_gaps(before, seqs, self._last):
            if not at_head or gap.start != before + 1:
                self._gap = gap
                return
