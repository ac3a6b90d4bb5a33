"""Which of some messages a stream holds, by their ids: what a backward search of the stream proves.

`client.ingest` asks when the server may have forgotten the ids. The messages were sent in order, and all of them after
the stream had the sequence `base`. A sequence that is missing now may have been any of them: limits, purges and rollups
remove messages. A fast batch stores a prefix of what was sent. So a message with an id of this run alone proves that
everything sent before it was stored too, even if it is no longer there. An id of the caller proves nothing about other
messages: an earlier message may have had it too, or one of another publisher.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final

_LARGEST_BLOCK: Final = 1 << 17


class Verdict(enum.Enum):
    """What is known about one message."""

    STORED = "it was stored once"
    DOUBTFUL = "it was stored, and perhaps more than once"
    MISSING = "it was not stored before the search began"
    UNKNOWN = "it may have been stored and removed, or not stored"


class IdSearch:
    """Looks for messages among those of a stream after the sequence `base`, backwards from its `last_seq`.

    Args:
        ids: The ids of the messages, in the order in which they were sent.
        own: The start of the ids that no other sender uses.
        before: The id of the newest message that is known to be stored, which was sent before them; "" if none is.
        base: A sequence that the stream had when the first of them was sent.
        last_seq: The last sequence of the stream.
        sent_again: The first message was sent again since. Its place then proves nothing about those behind it.
        settled: The leader has processed everything that was sent. Otherwise another copy of the first message, if it
            was sent again, may be stored later.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        own: str,
        before: str,
        base: int,
        last_seq: int,
        sent_again: bool = False,
        settled: bool = True,
    ) -> None:
        self._ids = ids
        self._own = own
        self._before = before
        self._base = base
        self._end = last_seq
        self._size = 2 * len(ids) + 16  # enough, unless others write much more
        self._sent_again = sent_again
        self._settled = settled
        self._seqs: dict[str, list[int]] = {msg_id: [] for msg_id in ids}
        self._hole = 0  # the highest missing sequence after `base`

    def next_block(self) -> tuple[int, int] | None:
        """Return the first and last sequence to read next, or None at the end of the search."""
        return (max(self._base + 1, self._end - self._size + 1), self._end) if self._end > self._base else None

    def see(self, found: Iterable[tuple[int, str]]) -> None:
        """Take the sequences and ids of all messages of the block that `next_block` returned, in ascending order."""
        block = self.next_block()
        assert block is not None
        previous, hole = block[0] - 1, 0
        for seq, msg_id in found:
            if seq != previous + 1:
                hole = seq - 1
            previous = seq
            if msg_id in self._seqs:
                self._seqs[msg_id].append(seq)
            elif self._before and msg_id == self._before:
                self._base, hole = seq, 0  # all of them were sent later
        if previous != block[1]:
            hole = block[1]
        self._hole = max(self._hole, hole)
        self._end = block[0] - 1
        self._size = min(self._size * 2, _LARGEST_BLOCK)

    def verdicts(self) -> list[Verdict]:
        """Return what the whole search proves about each message."""
        proof, after = -1, self._base  # the newest message that only this sender can have stored
        for index, msg_id in enumerate(self._ids):
            if self._seqs[msg_id] and msg_id.startswith(self._own) and not (index == 0 and self._sent_again):
                proof, after = index, min(self._seqs[msg_id])
        return [self._verdict(index, proof, after) for index in range(len(self._ids))]

    def _verdict(self, index: int, proof: int, after: int) -> Verdict:
        copies, sent_again = len(self._seqs[self._ids[index]]), index == 0 and self._sent_again
        removed = self._hole > self._base
        if copies:
            # Sent again, it may have been stored twice and removed once.
            once = copies == 1 and not (sent_again and (removed or not self._settled))
            return Verdict.STORED if once else Verdict.DOUBTFUL
        if index < proof and removed:
            return Verdict.DOUBTFUL if sent_again else Verdict.STORED
        return Verdict.UNKNOWN if self._hole > after else Verdict.MISSING
