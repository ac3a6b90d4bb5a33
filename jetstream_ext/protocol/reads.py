"""Which requests answer a read, and which rows of their replies count.

`range_read.RangeRead` drives a `Plan`: `Scan` reads a whole range, `OneReply` is one request, `MultiLast` reads the
last message of many subjects at one point in time::

    next_request() ──► request on the wire ──► accept(request, block)  ─► the rows to deliver
                                               finish(request, end)    ─► rows held back; done, or more requests
                                               retry()                 ─► the rest is asked for again

A `Link` knows what the connection carries, so that a read asks for no more than other calls can wait for.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from jetstream_ext.protocol.direct import Block, EndOfBatch, Request, StoredMsg
from jetstream_ext.protocol.subjects import NOT_INDEXED, SubjectMatcher, filter_for

FIRST_BATCH: Final = 1_000
MAX_BATCH: Final = 16_000
MAX_BATCH_GAPPY: Final = 64_000
MAX_IN_FLIGHT: Final = 8  # requests of the reads of one `Group`
NEWEST: Final = (1 << 64) - 1  # as `MultiLast.wanted`: the leader's newest message

_MOST_SKIPS: Final = 16  # how many messages a `MultiLast` passes over that no filter finds
_UNLIMITED: Final = 1 << 31  # as `max_bytes`: the messages are known and few
# The replies in flight of one read take about this many seconds: other calls on the connection wait behind them.
_SECONDS_IN_FLIGHT: Final = 0.5
# Before anything is known of a connection: so slow that a first request keeps no other call waiting for long.
_FIRST_RATE: Final = float(1 << 19)
# One reply may come in one burst from a buffer on the way, so it raises the known rate only so far.
_FASTER: Final = 4.0
# A request asks for so much of its `max_bytes`: a reply that `max_bytes` cuts makes the guess after it wrong.
_FULL: Final = 0.75
# In less time than this, the pauses of the machine are longer than those of the connection.
_SLOW: Final = 0.1
# Replies of fewer bytes show too little of a link. At the least rate, requests ask for as much, so that a link that has
# become faster is noticed.
_TELLING: Final = 1 << 16
_LEAST_RATE: Final = _TELLING / _SECONDS_IN_FLIGHT
# About the bytes of the header lines that a server adds to a message and does not count for `max_bytes`.
_ADDED: Final = 256


@dataclass(slots=True)
class Link:
    """What a connection carries, in bytes per second, as the replies to reads show it."""

    rate: float = _FIRST_RATE
    _measured: float = 0.0

    def adapt(self, size: int, seconds: float, *, at_least: bool = False) -> None:
        """Take that bytes of a reply arrived in so many seconds, or `at_least` in so few."""
        measured = size / seconds if seconds > 0 else self.rate * _FASTER
        if not at_least:
            before, self._measured = self._measured, measured
            measured = max(before, measured)  # one slow reply may be a pause of the server or of this machine
        if measured > self.rate or (seconds >= _SLOW and not at_least):
            self.rate = max(_LEAST_RATE, min(measured, self.rate * _FASTER))

    def room(self, requests: int) -> int:
        """Return the bytes that each of so many requests in flight may ask for."""
        return int(self.rate * _SECONDS_IN_FLIGHT / requests)


@dataclass(slots=True)
class Group:
    """Reads that are merged, so that together they keep to the limits of one read: `max_bytes`, and what the `Link` carries.

    A server answers the requests of a connection one after the other. So a request waits while the server answers those of
    the other reads, and that is no silence.
    """

    readers: int  # how many of the reads have not ended
    heard: float = -math.inf  # when the newest bytes of a reply to any of them arrived, by the caller's clock

    @property
    def in_flight(self) -> int:
        """The number of requests that may be in flight, each for its part of the limits."""
        return max(1, min(self.readers, MAX_IN_FLIGHT))

    @property
    def lazy(self) -> bool:
        """Whether a read may send its next request only when its rows have been taken, because the reads are too many."""
        return self.readers > MAX_IN_FLIGHT


class Stopwatch:
    """Measures how long the bytes of replies take to arrive.

    The time until a reply's first bytes is also that of the server and of the way to it. So it counts only for a reply
    whose first bytes are most of it, and then only shows what the link carries at least. All times are the caller's
    clock, in seconds.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._first = self._rest = 0
        self._first_seconds = self._rest_seconds = 0.0

    def start(self, now: float) -> None:
        """Note that a request is sent while no reply is on its way."""
        self._last = now

    def add(self, size: int, now: float, *, first: bool) -> None:
        """Note that bytes of a reply, perhaps its first ones, have arrived."""
        seconds, self._last = max(0.0, now - self._last), now
        if first:
            self._first += size
            self._first_seconds += seconds
        else:
            self._rest += size
            self._rest_seconds += seconds

    def lap(self) -> tuple[int, float, bool]:
        """Return bytes that have arrived since the last call, the seconds that they took, and whether that is at least."""
        total, size, seconds = self._first + self._rest, self._rest, self._rest_seconds
        mostly_first = size * 4 < self._first
        if mostly_first:
            size, seconds = total, seconds + self._first_seconds
        self._first = self._rest = 0
        self._first_seconds = self._rest_seconds = 0.0
        return size, seconds, mostly_first or total < _TELLING


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request in flight and what its reply has shown so far."""

    request: Request
    start: int = 0  # the first sequence that can be in the reply (0: unknown)
    count: int = 0  # how many messages it asked for
    rows: int = 0
    size: int = 0  # as `max_bytes` counts
    wire: int = 0  # bytes that have arrived
    held: Block = field(default_factory=Block)  # rows that count only with the whole reply
    pending: int = 0  # how many matching messages follow the newest row
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
    def finish(self, sent: SentRequest, end: EndOfBatch) -> Block | None:
        """Take the end of the oldest reply; return rows that `accept` held back and that now count."""

    @property
    def only_end_missing(self) -> bool:
        """Whether everything was delivered, so that the end of the reply can only tell what follows the range.

        Then `retry` ends the read.
        """
        return False

    @abstractmethod
    def retry(self) -> bool:
        """Go back to the last good row; return False, and change nothing, if that could change the answer.

        With the same `in_flight` as before, the read goes on as if this had not been called.
        """

    def _send(self, request: Request, start: int = 0, count: int = 0) -> SentRequest:
        sent = SentRequest(request, start, count)
        self.in_flight.append(sent)
        return sent

    def _finish_early(self, end: EndOfBatch) -> None:
        self.end, self.done = end, True


class RangePlan(Plan):
    """A plan whose rows are the messages of a range in order, so that the leader can prove that none is missing.

    Everything up to the cursor, `position`, was delivered.
    """

    def __init__(self, subject: str | None, seq: int, start_time: datetime | None, up_to_seq: int | None) -> None:
        super().__init__()
        self.position: int = seq - 1
        self.subject = subject
        self.start_time: datetime | None = start_time
        self.up_to_seq = up_to_seq
        self.most: int | None = None  # messages per request, one request at a time; None: no limit
        self._origin = (seq - 1, start_time)

    @property
    @abstractmethod
    def cut(self) -> bool:
        """Whether the caller's own limits end the read, so that nothing after the last row is missing."""

    def request_after(self, seq: int) -> Request:
        """Return the single get that finds the next message of the range behind `seq`, if there is one."""
        origin, start_time = self._origin
        if start_time is not None and seq == origin:
            return Request(start_time=start_time, next_by_subj=self.subject)
        return Request(seq=seq + 1, next_by_subj=self.subject or ">")

    def reopen(self) -> None:
        """Continue behind `position`: the range holds more than the replies had."""
        self.done: bool = False
        self.in_flight.clear()

    def take(self, messages: Sequence[StoredMsg], pending: int) -> Block:
        """Take the leader's next messages of the range, and return those within the limits, which may end the read.

        `pending` is how many matching messages follow the last one.
        """
        self.reopen()
        size = sum(message.size for message in messages)
        rows = self.accept(SentRequest(Request()), Block.of(messages, pending), size, pending)
        self.retry()
        return rows

    def end_here(self) -> None:
        """End the read, because the range has no message behind `position`."""
        self.in_flight.clear()
        last = self.position if self.position > self._origin[0] else 0
        self._finish_early(EndOfBatch(0, last, found=last > 0))


class OneReply(RangePlan):
    """The plan of one request, which one reply answers.

    With `whole`, the reply counts only as a whole, because it shows one moment of one server: if it breaks off after
    rows came, the read fails. Otherwise another request brings the rest of the batch.
    """

    def __init__(self, request: Request, *, whole: bool = False) -> None:
        super().__init__(request.next_by_subj, request.seq or 1, request.start_time, None)
        self._request = request
        self._whole = whole
        self._rows = self._size = self._pending = 0

    @property
    def _full(self) -> bool:
        batch, max_bytes = self._request.batch, self._request.max_bytes
        return batch is not None and (self._rows >= batch or (max_bytes is not None and self._size >= max_bytes))

    @property
    def cut(self) -> bool:
        return self._full or (self.end is not None and self.end.num_pending > 0)

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight:
            return None
        request = self._request
        if request.batch is None:
            return self._send(request)
        if self.position > self._origin[0]:
            left = None if request.max_bytes is None else request.max_bytes - self._size
            batch = request.batch - self._rows
            request = replace(request, seq=self.position + 1, start_time=None, batch=batch, max_bytes=left)
        if self.most is None or (request.batch or 0) <= self.most:
            return self._send(request)
        return self._send(replace(request, batch=self.most), count=self.most)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        sent.rows += len(block)
        self._rows += len(block)
        self._size += size - sent.size
        sent.size = size
        self.position: int = block.seqs[-1]
        self._pending = pending
        return block

    def take(self, messages: Sequence[StoredMsg], pending: int) -> Block:
        request, kept, size = self._request, 0, self._size
        for message in messages:
            kept, size = kept + 1, size + message.size
            if self._rows + kept == request.batch or (request.max_bytes is not None and size >= request.max_bytes):
                break
        return super().take(messages[:kept], pending + len(messages) - kept)

    @property
    def _last(self) -> int:
        return self.position if self._rows else 0

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        self.in_flight.clear()
        if sent.count and sent.rows == sent.count and end.num_pending and not self._full:
            return  # `most` ended the reply, and not the caller's limits
        if not end.found:  # a retry that found nothing more still ends where the rows before it ended
            end = replace(end, last_seq=self._last, found=self._rows > 0)
        elif self._request.multi_last is not None and self._rows:
            end = replace(end, num_pending=self._pending)  # as in `MultiLast`
        self._finish_early(end)

    @property
    def only_end_missing(self) -> bool:
        return self._rows > 0 and self._full and not self._whole

    def retry(self) -> bool:
        if self._whole and self._rows:
            return False
        self.in_flight.clear()
        if self.only_end_missing:  # the last message said the same
            self._finish_early(EndOfBatch(self._pending, self._last))
        return True


class _Step(enum.Enum):
    """What the next request of a `MultiLast` is for."""

    NOW = "the first page, of the moment when it is answered"
    POINT = "the message with the sequence of the point in time"
    PAGE = "a page at the point in time"
    FITS = "whether a server answers for the subjects without that of the witness"
    SUBJECTS = "the messages on the subjects of a page that is not the last one"


def reached_now(rows: Block, up_to_seq: int | None) -> int:
    """Return the sequence that a reply of now shows its responder to have (0: none); its end says `up_to_seq`.

    Such a reply is one to a `multi_last` request without a point in time. A responder that has reached a sequence has the
    last message of every subject as of then or later. A reply without messages does not name its responder.
    """
    return (up_to_seq or 0) if rows.seqs else 0


class MultiLast(Plan):
    """The plan of a `multi_last` read: pages at one pinned point in time, with both cursors (ADR-31, revision 6).

    Only the end of a reply without `up_to_seq` says what its responder had: see `reached_now`. So the first page is of now,
    without `up_to_seq`, and every subject that exists is in it, also if it is overwritten meanwhile. With `proved`, it counts
    if its responder has reached the newest message that the leader had before. If it is empty, its responder is unknown, and
    another request includes the subject of that message.

    With `up_to_seq`, file storage that has not reached it answers 404, and memory storage answers with what it has and
    repeats the asked sequence. So every other request is for the sequence of a message that is known, the *witness*, and
    asks for its subject, too. Rows are in the order of their sequences, and a replica has no gaps:

    * A page that ends with the witness shows the point in time.
    * A page that ends before, because it is full, only shows which subjects come next. Another request for these subjects
      alone has their messages and the witness.

    A direct get finds the witness at the point in time, or else (it was removed, no responder has it, or the stream ends
    before) the caller asks the leader for the newest message up to the sequence `wanted`. That message then is the point
    in time: a responder may lack what was stored, and removed, after it. If a page lacks the witness, the leader is asked
    again: either the witness was removed, or the responder is behind.

    On 2.11 the EOB of a cut page counts one message too few, so the count on the page's last message decides whether
    more follows. A 404 does not prove that no message matches.

    In a request, a wildcard stands for a token that is not UTF-8, and rows that no filter of the caller matches are left out.

    The subject of the witness may be one more than a server answers for, or its filter may match too many. If the others
    alone are not too many, the witness becomes the newest message that matches: up to the point in time, the leader has no
    later one. Of now, it is any message that matches; without one, nothing is found. It is the same if servers find the
    witness by no filter.

    `request` is the first page; its `batch` is the caller's limit for all pages together. With `proved`, every row is
    proved to be the leader's, also if there is no `up_to_seq`.
    """

    def __init__(self, request: Request, *, proved: bool = False) -> None:
        super().__init__()
        self.wanted: int | None = (request.up_to_seq or NEWEST) if proved else None
        self.behind: bool = False  # the last reply is not what the leader has; taken back with `next_request`
        self._request = request
        self._step = _Step.NOW if request.up_to_seq is None else _Step.POINT
        self.among: tuple[str, ...] = (">",)  # the filters that the message `wanted` matches
        self._filters = SubjectMatcher(request.multi_last or ())
        self._with_witness = False  # the first page asks for the witness
        self.point: int | None = request.up_to_seq  # what `EndOfBatch.up_to_seq` says
        self._witness = (0, "")  # its sequence and its subject
        self._skips = _MOST_SKIPS
        self._page, self._page_pending = Block(), 0  # a page that shows what comes next
        self._page_subjects: tuple[str, ...] = ()
        self._rows = self._last = self._pending = 0
        self._cursor = 0  # the pages up to this sequence have been read

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight or self.wanted is not None:
            return None
        self.behind = False
        seq, subject = self._witness
        request = self._request
        if self._step is _Step.NOW and self._with_witness:
            filters = (*(request.multi_last or ()), filter_for(subject))
            request = replace(request, multi_last=filters, batch=None, max_bytes=_UNLIMITED)
        elif self._step is _Step.POINT:
            request = Request(seq=self.point, next_by_subj=">", batch=1, max_bytes=1)
        elif self._step is _Step.FITS:
            request = replace(request, up_to_seq=seq, up_to_time=None, batch=1, max_bytes=1)
        elif self._step is _Step.SUBJECTS:
            request = Request(multi_last=self._page_subjects, up_to_seq=seq, max_bytes=_UNLIMITED)
        elif self._step is _Step.PAGE:
            request = replace(
                request,
                multi_last=(*(request.multi_last or ()), *(() if self._matches(subject) else (filter_for(subject),))),
                seq=self._cursor + 1 if self._cursor else None,
                up_to_seq=seq,
                up_to_time=None,
                batch=None if request.batch is None else request.batch - self._rows,
            )
        return self._send(request)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        sent.held.stream = block.stream
        sent.held.extend(block)
        sent.pending = pending
        return Block(block.stream)

    def finish(self, sent: SentRequest, end: EndOfBatch) -> Block | None:
        self.in_flight.clear()
        reply, pending = sent.held, sent.pending
        newest = reply.seqs[-1] if reply.seqs else 0
        seq, subject = self._witness
        match self._step:
            case _Step.NOW if reached_now(reply, end.up_to_seq) < seq:
                if reply.seqs:
                    self.behind = True
                elif self._with_witness or self._matches(subject):
                    self.wanted, self._with_witness = NEWEST, False
                else:
                    self._with_witness = True
            case _Step.NOW if self._with_witness and (pending or any(self._filters.mask(reply.subjects))):
                self.behind, self._with_witness = True, False  # there are messages that match, after all
            case _Step.NOW:
                self.point = end.up_to_seq or newest or None
                if not pending or len(reply) == self._request.batch:
                    return self._deliver(reply, pending, ended=True)
                self._page, self._page_pending, self._step = reply, pending, _Step.POINT
            case _Step.POINT if newest == self.point:
                self._witness = newest, reply.message(0).subject
                return self._deliver(self._page, self._page_pending, ended=False)
            case _Step.POINT:
                self.wanted = self.point
            case _Step.FITS:
                self.among, self.wanted = self._request.multi_last or (), seq
            case _Step.PAGE | _Step.SUBJECTS if newest != seq and not (self._step is _Step.PAGE and pending):
                self.wanted, self._step = seq, _Step.PAGE
            case _Step.PAGE if newest != seq:
                self._page, self._page_pending = reply, pending - (not self._matches(subject))
                subjects = (*(message.subject for message in reply.messages()), subject)
                self._page_subjects, self._step = tuple(dict.fromkeys(map(filter_for, subjects))), _Step.SUBJECTS
            case _Step.PAGE:
                return self._deliver(reply, 0, ended=True)
            case _Step.SUBJECTS:
                cursor = self._page.seqs[-1]
                reply.keep(bisect_right(reply.seqs, self._cursor), bisect_right(reply.seqs, cursor))
                self._cursor = cursor
                return self._deliver(reply, self._page_pending, ended=False)
        return None

    def _deliver(self, rows: Block, pending: int, *, ended: bool) -> Block:
        self._step, self._pending = _Step.PAGE, pending
        # A witness that was not asked for; its filter may match more.
        rows.select(self._filters.mask(rows.subjects))
        if rows.seqs:
            self._rows += len(rows)
            self._last = rows.seqs[-1]
            self._cursor = max(self._cursor, self._last)
        if ended or (self._request.batch is not None and self._rows >= self._request.batch):
            self._end()
        return rows

    def _matches(self, witness: str) -> bool:
        """Whether a filter of the request surely matches the witness."""
        [matches] = self._filters.mask([witness.replace("\ufffd", "\udcff").encode("utf-8", "surrogateescape")])
        return matches

    def _end(self) -> None:
        self._finish_early(EndOfBatch(self._pending, self._last, self.point, found=bool(self._rows)))

    def found(self, newest: tuple[int, str] | None, last_seq: int) -> None:
        """Take sequence and subject of the leader's newest message up to `wanted`, and the leader's last sequence.

        If it is the witness, the last responder is `behind`.
        """
        assert self.wanted is not None
        wanted, self.wanted = self.wanted, None
        if newest is not None and NOT_INDEXED in newest[1] and self._skips:
            # It is in no reply to a request with filters, so no page ends with it.
            self._skips -= 1
            if self.among == (">",):
                filters = dict.fromkeys(self._request.multi_last or ())
                self.among, self.wanted = ("*", "*.>") if ">" in filters else tuple(filters), wanted
                return
            if wanted != NEWEST:
                self.wanted = newest[0] - 1
                return
        if newest is None or newest[0] <= self._cursor:  # what followed has been removed
            self.point = self.point if self._rows else min(wanted, last_seq)
            self._pending = 0
            self._end()
            return
        # The first page was empty; the leader's newest message may be another one each time.
        again = self._step is _Step.NOW and self._witness[0] > 0
        self.behind = again or newest == self._witness
        self._witness = newest
        if self.among == (">",):
            self.point = newest[0]
        if self._step is not _Step.NOW:
            self._step = _Step.PAGE

    def fewer_subjects(self) -> bool:
        """Leave the subject of the witness out, because a server does not answer for so many; return whether it was asked."""
        if self._step is _Step.NOW and self._with_witness:
            self.among, self.wanted, self._with_witness = self._request.multi_last or (), NEWEST, False
        elif self._step is _Step.PAGE and not self._matches(self._witness[1]):
            self._step = _Step.FITS
        else:
            return False
        self.in_flight.clear()
        return True

    def pin(self, seq: int) -> None:
        """Read what was stored up to a sequence, and not up to a time."""
        self._request = replace(self._request, up_to_seq=seq, up_to_time=None)
        self.point, self.wanted = seq, seq or None
        self._step = _Step.POINT
        if not seq:
            self._end()

    @property
    def up_to_time(self) -> datetime | None:
        return self._request.up_to_time

    def retry(self) -> bool:
        self.in_flight.clear()
        return True


class Scan(RangePlan):
    """The plan of one range read.

    A request starts behind the cursor, except a *guess*: on a dense, unfiltered range the next request can be sent before
    the reply to the last one has arrived, because its start is known. A wrong guess costs only itself: rows up to the
    cursor are dropped, and a guess that starts beyond the cursor's successor is dropped and requested again.

    `max_bytes` and what the `link` carries bound the bytes of a reply. Without `batch`, a request asks for about as many
    messages as fit. Servers count the pending messages again for each request. On a stream with many deleted sequences
    that costs more than the messages, so there requests grow beyond the guess by bytes. Without `up_to_seq`, the range
    ends where the responder's stream does. With a `group`, `max_bytes` is for all of its reads together.
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
        group: Group | None = None,
    ) -> None:
        super().__init__(subject, seq, start_time, up_to_seq)
        self.link: Link = Link()
        self.group = group
        if up_to_seq is not None and up_to_seq < seq and start_time is None:
            self._finish_early(EndOfBatch(0, 0, found=False))
        self._fixed = batch
        self._batch = batch or FIRST_BATCH
        self._max_bytes = max_bytes
        self._prefetch = prefetch
        self._dense = self._reached = False
        self._ahead = prefetch  # requests in flight, as far as the range allows
        self._pending = self._beyond = 0

    @property
    def cut(self) -> bool:
        return False

    def next_request(self) -> SentRequest | None:
        if self.done or self._reached or len(self.in_flight) >= (self._prefetch if self.most is None else 1):
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
        max_bytes, carried = self._limits()
        count = self._batch if self.most is None else min(self._batch, self.most)
        if self.up_to_seq is not None:
            count = max(1, min(count, self.up_to_seq - start + 1))
        if self.group is not None:  # many reads of small messages hold more bytes than `max_bytes` counts
            count = max(1, min(count, max_bytes // _ADDED))
        by_time = self.start_time  # None once the first row has arrived
        request = Request(
            seq=None if by_time else start,
            start_time=by_time,
            # Without a subject, 2.11.0 answers 404 if the message at `start` was deleted.
            next_by_subj=self.subject or ">",
            batch=count,
            max_bytes=max(1, min(max_bytes, int(carried / _FULL))),
        )
        return self._send(request, 0 if by_time else start, count)

    def _limits(self) -> tuple[int, int]:
        """Return the most bytes that a request may ask for, and the bytes that the connection carries for it."""
        if self.group is None:
            return self._max_bytes, self.link.room(self._ahead)
        return self._max_bytes // self.group.readers, self.link.room(self._ahead * self.group.in_flight)

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
            self.position: int = seqs[stop - 1]
            self.start_time: datetime | None = None
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
        self.done: bool = self._reached or (end.num_pending == 0 and not doubtful)
        self._resize(sent)
        if self.done or doubtful or (self.in_flight and self.in_flight[0].start > self.position + 1):
            self.in_flight.clear()

    @property
    def only_end_missing(self) -> bool:
        return self._reached

    def retry(self) -> bool:
        self.in_flight.clear()
        if self._reached:  # the newest row said nearly the same
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
        self._ahead = self._prefetch if self._dense else 1
        max_bytes, room = self._limits()
        carried = int(room * sent.rows / max(1, sent.wire, sent.size))
        if self._fixed is not None:
            self._batch = max(1, min(self._fixed, carried))
            return
        fits = int(max_bytes * _FULL / max(1.0, sent.size / sent.rows))
        ceiling = MAX_BATCH if span <= 1.1 * sent.rows else MAX_BATCH_GAPPY
        self._batch = max(1, min(fits, carried, sent.count * 4, ceiling))

    def reopen(self) -> None:
        super().reopen()
        self._reached = self._dense = False
        self._beyond = 0
