"""Which requests answer the read of a whole range, and which rows of their replies count.

One cursor, `position`: everything up to it was delivered. A request starts behind the cursor, except a *guess*: on a
dense, unfiltered range the next request can be sent before the reply to the last one is in, because its start is
known. A guess that turns out wrong costs nothing but itself: rows up to the cursor are dropped, and a guess that
starts beyond the cursor's successor is thrown away and asked for again.

The size of a request follows the messages: `max_bytes` bounds the memory, and a request asks for about as many
messages as fit. Servers count what is pending anew for each request, which on a stream with many deleted sequences
costs more than the messages: there requests grow beyond the guess by bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import replace
from datetime import datetime
from typing import Final

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request
from jetstream_ext.protocol.plans import Ask

FIRST_BATCH: Final = 1_000
MAX_BATCH: Final = 16_000
MAX_BATCH_GAPPY: Final = 64_000


class Scan:
    """The plan of one range read.

    Args:
        subject: Filter on the server, or None.
        seq: First sequence.
        start_time: Start by time instead.
        up_to_seq: Last sequence, or None for the end of the stream as found.
        batch: Messages per request, or None to follow the messages.
        max_bytes: Bytes per reply.
        prefetch: Requests in flight at most.
    """

    def __init__(
        self,
        *,
        subject: str | None = None,
        seq: int = 1,
        start_time: datetime | None = None,
        up_to_seq: int | None = None,
        batch: int | None = None,
        max_bytes: int,
        prefetch: int = 2,
    ) -> None:
        self.position: int = seq - 1
        self.read: bool = False
        self.done: bool = up_to_seq is not None and up_to_seq < seq and start_time is None
        self.end: EndOfBatch | None = EndOfBatch(0, 0, found=False) if self.done else None
        self.subject = subject
        self.start_time = start_time
        self.up_to_seq = up_to_seq
        self._fixed = batch
        self._batch = batch or FIRST_BATCH
        self._max_bytes = max_bytes
        self._prefetch = prefetch
        self._asks: deque[Ask] = deque()
        self._dense = False
        self._pending = 0
        self._reached = False
        self._beyond = 0

    @property
    def oldest(self) -> Ask | None:
        """The request whose reply comes next."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the next request to send, or None: nothing to ask (now)."""
        if self.done or self._reached or len(self._asks) >= self._prefetch:
            return None
        if not self._asks:
            return self._ask(self.position + 1)
        newest = self._asks[-1]
        start = newest.start + newest.count
        in_flight = sum(ask.count - ask.rows for ask in self._asks)
        if not self._dense or self._pending <= in_flight or (self.up_to_seq is not None and start > self.up_to_seq):
            return None
        return self._ask(start)

    def _ask(self, start: int) -> Ask:
        count = self._batch
        if self.up_to_seq is not None:
            count = max(1, min(count, self.up_to_seq - start + 1))
        by_time = self.start_time  # only until the first row has shown where that is
        request = Request(
            seq=None if by_time else start,
            start_time=by_time,
            # Without a subject 2.11.0 answers 404 where `start` itself was deleted.
            next_by_subj=self.subject or ">",
            batch=count,
            max_bytes=self._max_bytes,
        )
        ask = Ask(request, 0 if by_time else start, count)
        self._asks.append(ask)
        return ask

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows of the oldest reply; return them without those already delivered or beyond the range.

        Args:
            ask: The oldest request in flight.
            block: Its next rows.
            size: Bytes of its messages so far.
            pending: Matching messages that the newest row says come after it.
        """
        assert ask is self.oldest
        if not block.seqs:
            return block
        seqs = block.seqs
        ask.rows += len(seqs)
        ask.size = size
        ask.first = ask.first or seqs[0]
        ask.last = seqs[-1]
        self._pending = pending
        start = bisect_right(seqs, self.position) if seqs[0] <= self.position else 0
        stop = len(seqs)
        if self.up_to_seq is not None and seqs[-1] >= self.up_to_seq:
            stop = bisect_right(seqs, self.up_to_seq)
            # Only the end of the reply says what is pending: on 2.11 a message counts itself.
            self._reached = True
            self._beyond += len(seqs) - stop
        if stop > start:
            self.position = seqs[stop - 1]
            self.read = True
            self.start_time = None
        if start or stop < len(seqs):
            block.keep(start, stop)
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end of the oldest reply; return the guesses that are void now and must be dropped unread."""
        assert ask is self.oldest
        self._asks.popleft()
        self.end = replace(end, num_pending=end.num_pending + self._beyond, last_seq=self.position if self.read else 0)
        # A replica that lags may answer "nothing" where another one just counted more: that is asked once again.
        doubtful = not end.found and self._pending > 0
        self._pending = end.num_pending
        self.done = self._reached or (end.num_pending == 0 and not doubtful)
        self._resize(ask)
        void: list[Ask] = []
        if self.done or doubtful or (self._asks and self._asks[0].start > self.position + 1):
            void = list(self._asks)
            self._asks.clear()
        return void

    def retry(self) -> list[Ask] | None:
        """Start over behind the cursor; return everything in flight, to be dropped unread."""
        void = list(self._asks)
        self._asks.clear()
        if self._reached:
            # All of the range came and only the end of the reply did not: the newest row said nearly the same.
            self.end = EndOfBatch(self._pending + self._beyond, self.position if self.read else 0)
            self.done = True
        return void

    def _resize(self, ask: Ask) -> None:
        if not ask.rows:
            return
        span = ask.last - (ask.start or ask.first) + 1
        self._dense = self.subject is None and span == ask.rows and ask.start != 0
        if self._fixed is not None:
            return
        # Leave a quarter of the bytes free: a reply that max_bytes cuts makes the guess after it void.
        fits = int(self._max_bytes * 0.75 / max(1.0, ask.size / ask.rows))
        ceiling = MAX_BATCH if span <= 1.1 * ask.rows else MAX_BATCH_GAPPY
        self._batch = max(1, min(fits, ask.count * 4, ceiling))

    def rest(self) -> Request:
        """Return the single get that finds the next message of the range, if there is one."""
        if self.start_time is not None:
            return Request(start_time=self.start_time, next_by_subj=self.subject)
        return Request(seq=self.position + 1, next_by_subj=self.subject or ">")

    def reopen(self) -> None:
        """Go on behind the cursor after all: the range was found to hold more."""
        self.done = self._reached = self._dense = False
        self._beyond = 0
        self._asks.clear()  # the reader can have left in the middle of a reply
