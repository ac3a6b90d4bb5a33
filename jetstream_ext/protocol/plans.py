"""Which requests answer a read, and which rows of their replies count.

Plans with one interface: `OneBatch` (one request), `Scan` (a whole range), `MultiLast` (the last message of many
subjects at one point in time), `OneAnswer` (one reply, whole). The shell sends what a plan asks for and hands it what
comes back.

::

    next_request() ──► Request ──► (wire) ──► accept(request, block)  ─► the rows to deliver
                                              finish(request, end)    ─► done, or more requests

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
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Protocol

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request

FIRST_BATCH: Final = 1_000
MAX_BATCH: Final = 16_000
MAX_BATCH_GAPPY: Final = 64_000


class Plan(Protocol):
    """What the shell drives."""

    done: bool
    end: EndOfBatch | None

    @property
    def oldest(self) -> Ask | None:
        """The request whose reply comes next."""

    def next_request(self) -> Ask | None:
        """Return the next request to send, or None: nothing to ask (now)."""

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows of the oldest reply; return those to deliver."""

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end of the oldest reply; return the requests in flight that are void now."""

    def retry(self) -> list[Ask] | None:
        """Go back to the last good row; return what is void. None: that cannot be done without changing the answer."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request in flight and what its reply has shown so far."""

    request: Request
    start: int
    """The first sequence it can answer (0: by time, unknown)."""
    count: int
    """How many messages it asked for."""
    rows: int = 0
    size: int = 0
    first: int = 0
    last: int = 0


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


class OneBatch:
    """The plan of one batch request: at most `request.batch` messages, in one reply."""

    def __init__(self, request: Request) -> None:
        assert request.batch is not None
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._left: int = request.batch
        self._last = 0
        self._pending = 0
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the request, once (and the rest of it after `retry`)."""
        if self.done or self._asks:
            return None
        request = self._request
        if self._last:
            request = replace(request, seq=self._last + 1, start_time=None, batch=self._left)
        self._asks.append(Ask(request, request.seq or 0, self._left))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count."""
        if block.seqs:
            self._left -= len(block.seqs)
            self._last = block.seqs[-1]
            self._pending = pending
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end."""
        self._asks.clear()
        # A retry that found nothing more still ends where the rows before it ended.
        self.end = end if end.found else replace(end, last_seq=self._last, found=bool(self._last))
        self.done = True
        return []

    def retry(self) -> list[Ask] | None:
        """Ask for the rest, if there can be one."""
        void = list(self._asks)
        self._asks.clear()
        if self._left <= 0:
            # Everything came but the EOB, and the last message said the same.
            self.end = EndOfBatch(self._pending, self._last)
            self.done = True
        return void


class MultiLast:
    """The plan of a `multi_last` read: pages at one pinned point in time, with both cursors (ADR-31, revision 6).

    The page's EOB is not what says whether more follows: on 2.11 it counts one too few when it was cut. The value on
    the page's last message is right everywhere.

    A 404 is not what says that there is nothing, either. Servers with file storage answer so, too, if they have not
    reached `up_to_seq` yet. So on the first page it is asked what they did reach, and that becomes the point in time; on
    a later page somebody did have the point, and is asked once again.

    Args:
        request: The first page; its `batch` is the caller's cap on all pages together.
    """

    def __init__(self, request: Request) -> None:
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._pinned = request.up_to_seq
        self._rows = 0
        self._last = 0
        self._pending = 0
        self._doubted = False
        self._probing = False
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the next page's request."""
        if self.done or self._asks:
            return None
        request = self._request
        if self._probing:
            request = replace(request, up_to_seq=None, batch=1)
        elif self._last:
            cap = None if request.batch is None else request.batch - self._rows
            request = replace(request, seq=self._last + 1, up_to_seq=self._pinned, up_to_time=None, batch=cap)
        elif self._pinned is not None:
            request = replace(request, up_to_seq=self._pinned)
        self._asks.append(Ask(request, 0, 0))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count, but for those of a question how far the stream goes."""
        if self._probing:
            block.keep(0, 0)
        elif block.seqs:
            self._rows += len(block.seqs)
            self._last = block.seqs[-1]
            self._pending = pending
            ask.rows += len(block.seqs)
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the page's end."""
        self._asks.clear()
        if self._probing:
            self._probing = False
            if end.up_to_seq is not None and end.up_to_seq < (self._pinned or 0):
                self._pinned = end.up_to_seq
                return []
            end = replace(end, num_pending=0, found=False)
        elif not end.found and not self._doubted and self._pinned is not None:
            self._doubted = True
            self._probing = not self._rows
            if self._probing or self._pending:
                return []
        if self._pinned is None:
            self._pinned = end.up_to_seq
        if not ask.rows:
            self._pending = 0
        self.end = EndOfBatch(self._pending, self._last, self._pinned, found=bool(self._rows))
        self.done = self._capped or self._pending == 0
        return []

    @property
    def _capped(self) -> bool:
        return self._request.batch is not None and self._rows >= self._request.batch

    def retry(self) -> list[Ask] | None:
        """Ask for the rest at the pinned point; impossible once rows came and the point is not known yet."""
        if self._rows and self._pinned is None:
            return None
        void = list(self._asks)
        self._asks.clear()
        if self._capped:
            self.end = EndOfBatch(self._pending, self._last, self._pinned)
            self.done = True
        return void


class OneAnswer:
    """The plan of one request whose reply counts as a whole, because it tells one moment of one server.

    A reply that breaks off is never continued by another one; after rows came, the reader has to start anew.
    """

    def __init__(self, request: Request) -> None:
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self._request = request
        self._pending = 0
        self._asks: list[Ask] = []

    @property
    def oldest(self) -> Ask | None:
        """The request in flight."""
        return self._asks[0] if self._asks else None

    def next_request(self) -> Ask | None:
        """Return the request, once."""
        if self.done or self._asks:
            return None
        self._asks.append(Ask(self._request, self._request.seq or 0, self._request.batch or 0))
        return self._asks[0]

    def accept(self, ask: Ask, block: Block, size: int, pending: int) -> Block:
        """Take rows; all of them count."""
        ask.rows += len(block.seqs)
        self._pending = pending
        return block

    def finish(self, ask: Ask, end: EndOfBatch) -> list[Ask]:
        """Take the end."""
        self._asks.clear()
        # As in `MultiLast`: on 2.11 the EOB of a cut multi_last counts one too few, its last message does not.
        cut_multi = self._request.multi_last is not None and ask.rows
        self.end = replace(end, num_pending=self._pending) if cut_multi else end
        self.done = True
        return []

    def retry(self) -> list[Ask] | None:
        """Ask again, unless rows came."""
        if any(ask.rows for ask in self._asks):
            return None
        void = list(self._asks)
        self._asks.clear()
        return void
