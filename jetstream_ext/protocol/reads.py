"""Which requests answer a read, and which rows of their replies count.

`range_read.RangeRead` drives a `Plan`: `Scan` reads a whole range, `OneReply` is one request, `MultiLast` reads the
last message of many subjects at one point in time::

    next_request() ──► request on the wire ──► accept(request, block)  ─► the rows to deliver
                                               finish(request, end)    ─► done, or more requests
                                               retry()                 ─► the rest is asked for again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request

FIRST_BATCH: Final = 1_000
MAX_BATCH: Final = 16_000
MAX_BATCH_GAPPY: Final = 64_000


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request in flight and what its reply has shown so far."""

    request: Request
    start: int = 0  # the first sequence that can be in the reply (0: unknown)
    count: int = 0  # how many messages it asked for
    rows: int = 0
    size: int = 0
    first: int = 0
    last: int = 0


class Plan(ABC):
    def __init__(self) -> None:
        self.done: bool = False
        self.end: EndOfBatch | None = None
        # Requests whose replies still count, in the order of the replies. The replies to others are dropped unread.
        self.in_flight: deque[SentRequest] = deque()

    @abstractmethod
    def next_request(self) -> SentRequest | None:
        """Return the next request to send, or None if no request is needed now."""

    @abstractmethod
    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        """Take the next rows of the oldest reply, at least one, and return those to deliver.

        `size` is the bytes of all its messages so far, `pending` how many matching messages follow its newest row.
        """

    @abstractmethod
    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        """Take the end of the oldest reply."""

    @abstractmethod
    def retry(self) -> bool:
        """Go back to the last good row; return False if that could change the answer."""

    def _send(self, request: Request, start: int = 0, count: int = 0) -> SentRequest:
        sent = SentRequest(request, start, count)
        self.in_flight.append(sent)
        return sent

    def _finish_early(self, end: EndOfBatch) -> None:
        self.end, self.done = end, True


class OneReply(Plan):
    """The plan of one request, which one reply answers.

    With `whole`, the reply counts only as a whole, because it shows one moment of one server: if it breaks off after
    rows came, the read fails. Otherwise another request brings the rest of the batch.
    """

    def __init__(self, request: Request, *, whole: bool = False) -> None:
        super().__init__()
        self._request = request
        self._whole = whole
        self._rows = self._last = self._pending = 0

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight:
            return None
        request = self._request
        if self._rows and request.batch is not None:
            request = replace(request, seq=self._last + 1, start_time=None, batch=request.batch - self._rows)
        return self._send(request)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        self._rows += len(block)
        self._last, self._pending = block.seqs[-1], pending
        return block

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        self.in_flight.clear()
        if not end.found:  # a retry that found nothing more still ends where the rows before it ended
            end = replace(end, last_seq=self._last, found=self._rows > 0)
        elif self._request.multi_last is not None and self._rows:
            end = replace(end, num_pending=self._pending)  # as in `MultiLast`
        self._finish_early(end)

    def retry(self) -> bool:
        if self._whole and self._rows:
            return False
        self.in_flight.clear()
        if self._rows and self._rows == self._request.batch:
            # Only the end of the reply is missing, and the last message said the same.
            self._finish_early(EndOfBatch(self._pending, self._last))
        return True


class MultiLast(Plan):
    """The plan of a `multi_last` read: pages at one pinned point in time, with both cursors (ADR-31, revision 6).

    On 2.11 the EOB of a cut page counts one message too few, so the count on the page's last message decides whether
    more follows. A 404 does not prove that no message matches: servers with file storage also send it when they have
    not reached `up_to_seq`. After a 404 on the first page the plan asks which sequence the server has reached, and uses
    that as the point in time. After a 404 on a later page it asks once more, because another server had the point.

    `request` is the first page; its `batch` is the caller's limit for all pages together.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._request = request
        self._pinned = request.up_to_seq
        self._rows = self._last = self._pending = 0
        self._doubted = self._probing = False

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight:
            return None
        request = self._request
        if self._probing:
            request = replace(request, up_to_seq=None, batch=1)
        elif self._last:
            limit = None if request.batch is None else request.batch - self._rows
            request = replace(request, seq=self._last + 1, up_to_seq=self._pinned, up_to_time=None, batch=limit)
        elif self._pinned is not None:
            request = replace(request, up_to_seq=self._pinned)
        return self._send(request)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        if self._probing:
            block.keep(0, 0)
            return block
        self._rows += len(block)
        self._last, self._pending = block.seqs[-1], pending
        sent.rows += len(block)
        return block

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        self.in_flight.clear()
        if self._probing:
            self._probing = False
            if end.up_to_seq is not None and end.up_to_seq < (self._pinned or 0):
                self._pinned = end.up_to_seq
                return
        elif not end.found and not self._doubted and self._pinned is not None:
            self._doubted = True
            self._probing = not self._rows
            if self._probing or self._pending:
                return
        if self._pinned is None:
            self._pinned = end.up_to_seq
        if not sent.rows:
            self._pending = 0
        self.end: EndOfBatch | None = EndOfBatch(self._pending, self._last, self._pinned, found=bool(self._rows))
        self.done: bool = self._full or self._pending == 0

    @property
    def _full(self) -> bool:
        return self._request.batch is not None and self._rows >= self._request.batch

    def retry(self) -> bool:
        if self._rows and self._pinned is None:
            return False  # the point of the rows that came is not known
        self.in_flight.clear()
        if self._full:
            self._finish_early(EndOfBatch(self._pending, self._last, self._pinned))
        return True


class Scan(Plan):
    """The plan of one range read.

    Everything up to the cursor, `position`, was delivered. A request starts behind the cursor, except a *guess*: on a
    dense, unfiltered range the next request can be sent before the reply to the last one has arrived, because its start
    is known. A wrong guess costs only itself: rows up to the cursor are dropped, and a guess that starts beyond the
    cursor's successor is dropped and requested again.

    `max_bytes` bounds the bytes of a reply. Without `batch`, a request asks for about as many messages as fit. Servers
    count the pending messages again for each request. On a stream with many deleted sequences that costs more than the
    messages, so there requests grow beyond the guess by bytes. Without `up_to_seq`, the range ends where the
    responder's stream does.
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
        super().__init__()
        self.position: int = seq - 1
        self.subject = subject
        self.start_time = start_time
        self.up_to_seq = up_to_seq
        if up_to_seq is not None and up_to_seq < seq and start_time is None:
            self._finish_early(EndOfBatch(0, 0, found=False))
        self._origin = (seq - 1, start_time)
        self._fixed = batch
        self._batch = batch or FIRST_BATCH
        self._max_bytes = max_bytes
        self._prefetch = prefetch
        self._dense = self._reached = False
        self._pending = self._beyond = 0

    def next_request(self) -> SentRequest | None:
        if self.done or self._reached or len(self.in_flight) >= self._prefetch:
            return None
        if not self.in_flight:
            return self._request_from(self.position + 1)
        newest = self.in_flight[-1]
        start = newest.start + newest.count
        expected = sum(sent.count - sent.rows for sent in self.in_flight)
        if not self._dense or self._pending <= expected or (self.up_to_seq is not None and start > self.up_to_seq):
            return None
        return self._request_from(start)

    def _request_from(self, start: int) -> SentRequest:
        count = self._batch
        if self.up_to_seq is not None:
            count = max(1, min(count, self.up_to_seq - start + 1))
        by_time = self.start_time  # None once the first row has arrived
        request = Request(
            seq=None if by_time else start,
            start_time=by_time,
            # Without a subject, 2.11.0 answers 404 if the message at `start` was deleted.
            next_by_subj=self.subject or ">",
            batch=count,
            max_bytes=self._max_bytes,
        )
        return self._send(request, 0 if by_time else start, count)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        """As `Plan.accept`; rows already delivered or beyond the range do not count."""
        seqs = block.seqs
        sent.rows += len(seqs)
        sent.size = size
        sent.first = sent.first or seqs[0]
        sent.last = seqs[-1]
        self._pending = pending
        start = bisect_right(seqs, self.position) if seqs[0] <= self.position else 0
        stop = len(seqs)
        if self.up_to_seq is not None and seqs[-1] >= self.up_to_seq:
            stop = bisect_right(seqs, self.up_to_seq)
            # Only the end of the reply has the right count of pending messages: on 2.11 a message counts itself.
            self._reached = True
            self._beyond += len(seqs) - stop
        if stop > start:
            self.position = seqs[stop - 1]
            self.start_time = None
        if start or stop < len(seqs):
            block.keep(start, stop)
        return block

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        """As `Plan.finish`; guesses that the reply makes wrong leave `in_flight`."""
        self.in_flight.popleft()
        self.end: EndOfBatch | None = replace(end, num_pending=end.num_pending + self._beyond, last_seq=self._last_seq)
        # A lagging replica may find nothing after another one has counted more, so the plan asks once more.
        doubtful = not end.found and self._pending > 0
        self._pending = end.num_pending
        self.done = self._reached or (end.num_pending == 0 and not doubtful)
        self._resize(sent)
        if self.done or doubtful or (self.in_flight and self.in_flight[0].start > self.position + 1):
            self.in_flight.clear()

    def retry(self) -> bool:
        self.in_flight.clear()
        if self._reached:
            # Only the end of the reply is missing, and the newest row said nearly the same.
            self._finish_early(EndOfBatch(self._pending + self._beyond, self._last_seq))
        return True

    @property
    def _last_seq(self) -> int:
        return self.position if self.position > self._origin[0] else 0

    def _resize(self, sent: SentRequest) -> None:
        if not sent.rows:
            return
        span = sent.last - (sent.start or sent.first) + 1
        self._dense = self.subject is None and span == sent.rows and sent.start != 0
        if self._fixed is not None:
            return
        # Leave a quarter of the bytes free: a reply that max_bytes cuts makes the guess after it wrong.
        fits = int(self._max_bytes * 0.75 / max(1.0, sent.size / sent.rows))
        ceiling = MAX_BATCH if span <= 1.1 * sent.rows else MAX_BATCH_GAPPY
        self._batch = max(1, min(fits, sent.count * 4, ceiling))

    def request_after(self, seq: int) -> Request:
        """Return the single get that finds the next message of the range behind `seq`, if there is one."""
        origin, start_time = self._origin
        if start_time is not None and seq == origin:
            return Request(start_time=start_time, next_by_subj=self.subject)
        return Request(seq=seq + 1, next_by_subj=self.subject or ">")

    def rewind(self, position: int) -> None:
        """Continue behind `position`: the range holds more than the replies had."""
        self.position = position
        origin, start_time = self._origin
        self.start_time = start_time if position == origin else None
        self.done: bool = False
        self._reached = self._dense = False
        self._beyond = 0
        self.in_flight.clear()
