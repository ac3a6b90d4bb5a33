"""Merges the reads of several subject filters in the order of the sequences, without I/O.

A direct get takes one filter, so there is one read for each. A message is the next one as soon as every other read is known
to have nothing before it::

    needed() ──► the reads that must go on ──► add(read, block) or end(read)
    forget() ──► the reads to close: their rows are dropped, and read again when they are needed
    take()   ──► blocks in order, each message once

`filtering_pays` says whether a read of everything would cost less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import ge
from typing import Final

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT, Group
from jetstream_ext.protocol.subjects import check_filter, covers, is_literal

# A row has about as many bytes again as `max_bytes` counts: see `Scan`.
_HELD: Final = 2
_BEYOND: Final = 1 << 64

# What filtered reads cost. The unit is one message of a read of everything, of server and client together, measured with
# nats-server 2.15.1 and messages of 128 bytes. First for each message that matches: for a wildcard, a server may compare
# each message with every subject that the wildcard matches.
_LITERAL: Final = 1.1
_WILDCARD: Final = 5.0
# For each message of the blocks of storage that a filter matches in: the server looks for the next match, after it has
# read the block unless an earlier read did so a moment before.
_UNREAD: Final = 0.08
_READ: Final = 0.02
_BLOCK: Final = 8 << 20  # bytes: a server's default for large streams
# Servers keep a block for 10 s after its last use. Of so many bytes, every block is still there for the next filter.
_KEPT: Final = 2 << 30


def widest(filters: Iterable[str]) -> list[str]:
    """Return the filters without those that another one covers."""
    once = list(dict.fromkeys(filters))
    wild = [subject for subject in once if not is_literal(subject)]
    return [each for each in once if not any(wide != each and covers(wide, each) for wide in wild)]


def filtering_pays(matching: Mapping[str, int], messages: int, size: int) -> bool:
    """Return whether merged reads of several filters cost less than a read of everything, filtered by the client.

    Args:
        matching: The filters, and about how many messages of the range each of them matches.
        messages: How many messages the range has.
        size: Their bytes.
    """
    blocks = size / _BLOCK
    cost, per_message = 0.0, _UNREAD
    for subject in widest(matching):
        count = matching[subject]
        touched = min(1.0, count / blocks) if blocks else 1.0
        cost += count * (_LITERAL if is_literal(subject) else _WILDCARD) + messages * touched * per_message
        if size <= _KEPT:
            per_message = _READ
    return cost < messages


@dataclass(eq=False, slots=True)
class FilteredRead:
    """The read of one filter, with the rows that have arrived and were not taken."""

    subject: str
    next_seq: int  # the read has nothing before this sequence that was not taken
    ended: bool = False  # nothing follows the rows
    size: int = 0  # of the rows, in bytes
    blocks: deque[Block] = field(default_factory=deque)

    @property
    def known_to(self) -> int:
        """Up to this sequence, the rows are all that the read has."""
        return self.blocks[-1].seqs[-1] if self.blocks else self.next_seq - 1

    def take(self, last: int) -> list[Block]:
        """Return the rows up to the sequence `last`, which the read then no longer holds."""
        taken: list[Block] = []
        while self.blocks and self.blocks[0].seqs[0] <= last:
            block = self.blocks.popleft()
            stop = bisect_right(block.seqs, last)
            if stop < len(block):
                self.blocks.appendleft(block.part(stop, len(block)))
                block.keep(0, stop)
            taken.append(block)
            self.size -= block.size
            self.next_seq = block.seqs[-1] + 1
        return taken


class Merge:
    """The reads of one stream from the sequence `first` on, one for each of `filters` that no other one covers.

    Args:
        filters: At least one; they may overlap.
        first: The first sequence.
        max_bytes: The bytes that all requests in flight ask for together. About twice as many are held.

    Raises:
        BadSubjectError: A filter is not valid.
        ValueError: No filters.
    """

    def __init__(self, filters: Sequence[str], first: int, max_bytes: int) -> None:
        for subject in filters:
            check_filter(subject)
        if not filters:
            raise ValueError("filters must be at least one")
        self.reads: list[FilteredRead] = [FilteredRead(subject, first) for subject in widest(filters)]
        """Those that have not ended or have rows; none if everything was taken."""
        self.group: Group = Group(len(self.reads))
        self._max_bytes = max_bytes

    def needed(self) -> list[FilteredRead]:
        """Return the reads that must go on before more can be taken, the most urgent ones, at most `MAX_IN_FLIGHT`."""
        near = min((read.known_to for read in self.reads if read.blocks), default=_BEYOND)
        waiting = [read for read in self.reads if not read.blocks and read.next_seq <= near]
        return sorted(waiting, key=lambda read: read.next_seq)[:MAX_IN_FLIGHT]

    def add(self, read: FilteredRead, block: Block) -> None:
        """Add the next rows of a read, at least one."""
        read.blocks.append(block)
        read.size += block.size

    def end(self, read: FilteredRead) -> None:
        """Note that nothing follows the rows of a read."""
        read.ended = True
        self._count()

    def take(self) -> list[Block]:
        """Return the rows that are the next ones of the merged read, as `in_order` does."""
        known_to = min((read.known_to for read in self.reads if not read.ended), default=_BEYOND)
        taken = [block for read in self.reads for block in read.take(known_to)]
        self.reads = [read for read in self.reads if read.blocks or not read.ended]
        return in_order(taken)

    def forget(self) -> list[FilteredRead]:
        """Drop the rows that are needed last while too many bytes are held; return their reads, which are to be closed.

        A reply has at least one message, however many reads share `max_bytes`. So this is for large messages.
        """
        held = sorted((read for read in self.reads if read.blocks), key=lambda read: read.blocks[0].seqs[0])
        size = sum(read.size for read in held)
        forgotten: list[FilteredRead] = []
        while size > _HELD * self._max_bytes and len(held) > 1:
            read = held.pop()
            size -= read.size
            # Filters overlap: a message that is the next one of two reads need not be read again for both of them.
            read.next_seq = max(read.blocks[0].seqs[0], held[0].blocks[0].seqs[0] + 1)
            read.size, read.ended = 0, False
            read.blocks.clear()
            forgotten.append(read)
        self._count()
        return forgotten

    def _count(self) -> None:
        self.group.readers = max(1, sum(not read.ended for read in self.reads))


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """Return the rows of some blocks in the order of their sequences, and each sequence once.

    The blocks have increasing sequences. The result is one block, or one for each run of messages of the same responder.
    """
    if len(blocks) < 2:
        return list(blocks)
    whole = Block(blocks[0].stream)
    for block in blocks:
        whole.extend(block)
    order: Sequence[int] = range(len(whole))
    if any(map(ge, whole.seqs, whole.seqs[1:])):
        row_of = dict(zip(whole.seqs, order, strict=True))
        order = list(map(row_of.__getitem__, sorted(row_of)))
        whole.arrange(order)
    if all(block.stream == whole.stream for block in blocks):
        return [whole]
    responders = [block.stream for block in blocks for _ in block.seqs]
    runs: list[Block] = []
    start = 0
    for responder, run in groupby(map(responders.__getitem__, order)):
        stop = start + len(list(run))
        runs.append(whole.part(start, stop))
        runs[-1].stream, start = responder, stop
    return runs
