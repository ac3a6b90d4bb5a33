"""Whether a stream stored an atomic batch, decided by what it holds now.

A stored batch is a run of sequences, and every message of it has the batch's id in a header. So one message with the
id proves that all were stored, and a stream in which nothing is missing proves that none was. Messages that were
removed since (by limits, by newer messages on their subjects, by hand) leave holes: where a hole has room for the whole
batch, nothing can be known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from jetstream_ext.protocol import headers as h

#: An expectation that no stream meets: the refusal says how far the stream is. (The largest that servers parse.)
IMPOSSIBLE_SEQ: Final = (1 << 63) - 1

_AT: Final = re.compile(r"wrong last sequence: (\d+)\Z")


def ends_batch(batch_id: str, size: int, headers: Mapping[str, str]) -> bool:
    """Return whether a stored message is the last of a batch with that many messages.

    Servers leave the commit on it, or put it there when the batch ended with a marker.
    """
    return (
        headers.get(h.BATCH_ID) == batch_id and headers.get(h.BATCH_SEQUENCE) == str(size) and h.BATCH_COMMIT in headers
    )


class Search:
    """Takes the messages of a stream in order.

    Args:
        batch_id: The batch.
        size: How many messages it has.
        after: A sequence that the stream had before the batch was committed.
        contiguous: Whether the messages of a batch follow each other. On a stream that stores messages of other
            streams as well they need not.
    """

    def __init__(self, batch_id: str, size: int, after: int, *, contiguous: bool = True) -> None:
        self.last_seq: int | None = None
        """The sequence of the batch's last message, once one of its messages was seen."""
        self.next_seq: int = after + 1
        self._batch_id = batch_id
        self._size = size
        self._contiguous = contiguous
        self._hole = 0

    def see(self, seq: int, headers: Mapping[str, str]) -> None:
        """Take a message."""
        self.skip(seq - 1)
        self.next_seq = seq + 1
        number = headers.get(h.BATCH_SEQUENCE, "")
        if headers.get(h.BATCH_ID) == self._batch_id and number.isdecimal() and 0 < int(number) <= self._size:
            self.last_seq = seq + self._size - int(number)

    def skip(self, to: int) -> None:
        """Take it that the stream has no more messages up to the sequence `to`."""
        missing = to + 1 - self.next_seq
        if missing > 0:
            self._hole = max(self._hole, missing) if self._contiguous else self._hole + missing
            self.next_seq = to + 1

    @property
    def room(self) -> bool:
        """Whether the batch could have been where messages are missing."""
        return self._hole >= self._size


def fence(batch_id: str, stream: str) -> tuple[bytes, bytes]:
    """Return the header blocks of two messages that are never stored, to be sent after a commit on one connection.

    The first makes the server drop the batch, if it still has it: no batch goes on with sequence 0 (10176). The second
    expects a last sequence that no stream has, and its refusal (10071) names the sequence that the leader has given
    out: what is under way to its followers is counted, though it cannot be read yet.
    """
    kill = h.encode([(h.BATCH_ID, batch_id), (h.BATCH_SEQUENCE, "0")])
    mark = h.encode([(h.EXPECTED_STREAM, stream), (h.EXPECTED_LAST_SEQ, str(IMPOSSIBLE_SEQ))])
    return kill, mark


def reached(description: str) -> int | None:
    """Return the sequence in the refusal of a fence's second message, where it names one."""
    found = _AT.search(description)
    return int(found[1]) if found else None
