"""Which requests answer a read, which rows of their replies count, and what only the leader can say.

`range_read.RangeRead` drives a `Plan`: `Scan` reads a whole range, `OneReply` is one request, `MultiLast` reads the
last message of many subjects at one point in time::

    next_request() ──► request on the wire ──► accept(request, block)  ─► the rows to deliver
                                               finish(request, end)    ─► rows held back; done, or more requests
                                               retry()                 ─► the rest is asked for again
    question       ──► the stream's leader ──► learn(message)          ─► done, more requests, or `behind`

A `Link` knows what the connection carries, so that a read asks for no more than other calls, and the server's buffer, can wait
for.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from jetstream_ext.errors import HistoryUnavailableError, ResponseError
from jetstream_ext.protocol.direct import Block, EndOfBatch, Request, StoredMsg
from jetstream_ext.protocol.subjects import NOT_INDEXED, SubjectMatcher, can_be_asked_for, filter_for
from jetstream_ext.text import counted

FIRST_BATCH: Final = 1_000
MAX_BATCH: Final = 16_000
MAX_BATCH_GAPPY: Final = 64_000

_UNLIMITED: Final = 1 << 31  # as `max_bytes`: the messages are known and few
# A request asks for so much of its `max_bytes`: a reply that `max_bytes` cuts makes the guess after it wrong.
_FULL: Final = 0.75
# About the bytes of the header lines that a server adds to a message and does not count for `max_bytes`.
_ADDED: Final = 256

MAX_IN_FLIGHT: Final = 8  # requests of the reads of one `Group`

# The replies in flight of one read take about this many seconds: other calls on the connection wait behind them.
_SECONDS_IN_FLIGHT: Final = 0.5
# Before anything is known of a connection: so slow that a first request keeps no other call waiting for long.
_FIRST_RATE: Final = float(1 << 19)
# One reply may come in one burst from a buffer on the way, so it raises the known rate only so far.
_FASTER: Final = 4.0
# In less time than this, the pauses of the machine are longer than those of the connection.
_SLOW: Final = 0.1
# Replies of fewer bytes show too little of a link. At the least rate, requests ask for as much, so that a link that has
# become faster is noticed.
_TELLING: Final = 1 << 16
_LEAST_RATE: Final = _TELLING / _SECONDS_IN_FLIGHT
# A server closes a connection for which it holds more bytes than its ``max_pending``, and does not say so. That is never less
# than its ``max_payload``. It counts a reply for a moment longer than the client takes to receive it, and requests grow fourfold.
# So after a loss, replies have this part of both, for so many seconds; but a connection that is lost for other reasons must not
# become very slow.
_SMALLER: Final = 8
_LEAST: Final = 1 << 14
# The seconds after a loss; another loss soon after them makes them longer, because it was no accident.
_CAUTIOUS: Final = 15.0
_MOST_CAUTIOUS: Final = 960.0


class Link:
    """What a connection carries, in bytes per second, and what has cost it; the replies to reads show both."""

    def __init__(self) -> None:
        self.rate: float = _FIRST_RATE
        self.most: int | None = None
        """The bytes that the replies in flight may have together, after a reply was lost with the connection."""
        self.max_payload: int = 1 << 20
        """The server's limit for one message, in bytes."""
        self.in_flight: int = 0
        """The requests of all reads of the connection that are on their way."""
        self._measured = 0.0
        self._cautious_until = -math.inf
        self._cautious = _CAUTIOUS
        self._lost: int | None = None  # the session that was lost last

    def adapt(self, first: int, rest: int, waited: float, seconds: float, now: float) -> None:
        """Take that the first bytes of a reply arrived after a wait, and the rest in so many seconds after them.

        The wait is also that of the server and of the way to it. So it counts only for a reply whose first bytes are most of
        it, and then only shows what the link carries at least.
        """
        mostly_first = rest * 4 < first
        at_least = mostly_first or first + rest < _TELLING
        size, seconds = (first + rest, waited + seconds) if mostly_first else (rest, seconds)
        measured = size / seconds if seconds > 0 else self.rate * _FASTER
        if not at_least:
            before, self._measured = self._measured, measured
            measured = max(before, measured)  # one slow reply may be a pause of the server or of this machine
        if measured > self.rate or (seconds >= _SLOW and not at_least):
            self.rate = max(_LEAST_RATE, min(measured, self.rate * _FASTER))
        if now > self._cautious_until:
            self.most = None

    def lost(self, asked: int, now: float, session: int) -> None:
        """Note that a session of the connection was lost while replies of `asked` bytes came, perhaps to several reads."""
        held = asked if self.most is None else min(asked, self.most)
        if session == self._lost or held <= _LEAST:
            return
        again = now < self._cautious_until + _MOST_CAUTIOUS
        self._cautious = min(self._cautious * _SMALLER, _MOST_CAUTIOUS) if again else _CAUTIOUS
        self.most, self._lost = max(_LEAST, min(held, self.max_payload) // _SMALLER), session
        self._cautious_until = now + self._cautious

    def limit(self, max_bytes: int) -> int:
        """Return the bytes that a request for `max_bytes` may ask for, whatever the rate."""
        return max_bytes if self.most is None else min(max_bytes, self.most)

    def room(self, requests: int, own: int = 0) -> int:
        """Return the bytes that each of so many requests in flight may ask for, of which `own` are on their way already."""
        return self.limit(int(self.rate * _SECONDS_IN_FLIGHT)) // (requests + self.in_flight - own)


@dataclass(slots=True)
class Group:
    """Reads that are merged, so that together they keep to the `max_bytes` of one read."""

    readers: int  # how many of the reads have not ended

    @property
    def lazy(self) -> bool:
        """Whether a read may send its next request only when its rows have been taken, because the reads are too many."""
        return self.readers > MAX_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class NextMessage:
    """The leader's first message that matches a single get."""

    request: Request


@dataclass(frozen=True, slots=True)
class NewestMessage:
    """The leader's newest message up to the sequence `seq`."""

    seq: int


Question = NextMessage | NewestMessage


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
    def __init__(self, *, proved: bool = False) -> None:
        self.proved: bool = proved
        """Whether only rows of the stream itself count, and the leader says whether they are all."""
        self.done: bool = False
        self.end: EndOfBatch | None = None
        self.behind: str = ""
        """What the leader has and the last responder did not; taken back by the next request."""
        self.probing: bool = False
        """Mirrors answer: the next request of a range asks for one message, to find out whether a replica answers."""
        # Requests whose replies still count, in the order of the replies. The replies to others are dropped unread.
        self.in_flight: deque[SentRequest] = deque()
        self.link: Link = Link()
        self.group: Group | None = None

    @property
    @abstractmethod
    def question(self) -> Question | None:
        """What the leader has to be asked before the read can go on or end."""

    @abstractmethod
    def learn(self, found: StoredMsg | None, last_seq: int | None) -> Block | None:
        """Take the leader's answer to `question`, and its last sequence if known; return rows that now count."""

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

    def retry(self) -> None:
        """Go back to the last good row.

        With the same `in_flight` as before, the read goes on as if this had not been called.
        """
        self.in_flight.clear()

    def ask_for_less(self) -> bool:
        """Note, after `retry`, that the replies cost the connection, so that the link limits the next ones.

        Return whether the plan has asked for more than such a limit until now. Then the rest of its reply may cost the next
        connection as well: nats-py restores the subscription of the inbox, perhaps before the read closes it.
        """
        return False

    def _send(self, request: Request, start: int = 0, count: int = 0) -> SentRequest:
        self.behind = ""
        sent = SentRequest(request, start, count)
        self.in_flight.append(sent)
        return sent

    def _finish_early(self, end: EndOfBatch) -> None:
        self.end, self.done = end, True


class RangePlan(Plan):
    """A plan whose rows are the messages of a range in order, so that the leader can prove that none is missing.

    Everything up to the cursor, `position`, was delivered. A replica of the stream has its messages in order and without gaps
    of its own, but it may lag. So only the end of the range needs a proof.

    `up_to_ns` is a time in nanoseconds since the epoch: the range ends before the first message that was stored later.
    """

    def __init__(
        self, subject: str | None, seq: int, start_time: datetime | None, up_to_seq: int | None, up_to_ns: int | None
    ) -> None:
        super().__init__()
        self.position: int = seq - 1
        self.subject = subject
        self.start_time: datetime | None = start_time
        self.up_to_seq: int | None = None
        self._up_to_ns = up_to_ns
        self._prove_to = 0
        self._origin = (seq - 1, start_time)
        self._beyond = 0  # rows that came and lie after the range, so that nothing in it is missing
        self._pending = 0  # how many matching messages follow the newest row
        if up_to_seq is not None:
            self.end_at(up_to_seq)

    def start_at(self, seq: int) -> None:
        """Start with a sequence, and not with a time."""
        self.position, self.start_time, self._origin = seq - 1, None, (seq - 1, None)
        if self.up_to_seq is not None:
            self.end_at(self.up_to_seq)

    def end_at(self, seq: int) -> None:
        """End the range with a sequence."""
        self.up_to_seq = seq
        if self.position >= seq and (self.start_time is None or not seq):
            self._finish_early(EndOfBatch(0, 0, found=False))

    def prove(self, up_to: int) -> None:
        """Prove that nothing else is stored up to a sequence, or up to the end of the range if that is lower."""
        self.proved = True
        self._prove_to = up_to if self.up_to_seq is None else min(up_to, self.up_to_seq)

    @property
    def only_end_missing(self) -> bool:
        return self._beyond > 0 or (self.up_to_seq is not None and self.position >= self.up_to_seq)

    @property
    def question(self) -> Question | None:
        more = self.end is not None and self.end.num_pending > 0
        if not self.done or self.position >= self._prove_to or more:
            return None
        origin, start_time = self._origin
        if start_time is not None and self.position == origin:
            return NextMessage(Request(start_time=start_time, next_by_subj=self.subject or ">"))
        return NextMessage(Request(seq=self.position + 1, next_by_subj=self.subject or ">"))

    def learn(self, found: StoredMsg | None, last_seq: int | None) -> None:
        if found is not None and found.seq <= self.position:
            raise ResponseError(
                f"the leader sent message {found.seq} of stream {found.stream!r} as the next one after {self.position}"
            )
        later = found is None or found.seq > self._prove_to
        if later or (self._up_to_ns is not None and found is not None and found.time_ns > self._up_to_ns):
            self._prove_to = 0
            self._finish_early(EndOfBatch(0, self._last_seq, found=self._last_seq > 0))
        elif found is not None:
            self.behind: str = f"message {found.seq}"
            self._reopen()

    def _reopen(self) -> None:
        """Continue behind `position`: the range holds more than the replies had."""
        self.done: bool = False
        self.in_flight.clear()

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        """As `Plan.accept`; rows that were already delivered or are beyond the range do not count."""
        seqs = block.seqs
        sent.rows += len(seqs)
        sent.size = size
        sent.first = sent.first or seqs[0]
        sent.last = seqs[-1]
        self._pending = pending
        start = bisect_right(seqs, self.position) if seqs[0] <= self.position else 0
        stop = len(seqs) if self.up_to_seq is None or seqs[-1] <= self.up_to_seq else bisect_right(seqs, self.up_to_seq)
        stop = start if self._beyond else self._in_time(block, start, stop)
        # Only the end of the reply has the right count of pending messages: on 2.11 a message counts itself.
        self._beyond += len(seqs) - stop
        if stop > start:
            self.position = seqs[stop - 1]
            self.start_time = None
        if start or stop < len(seqs):
            block.keep(start, stop)
        return block

    def _in_time(self, block: Block, start: int, stop: int) -> int:
        """Return the first of the rows `start … stop` that was stored after the range, or `stop`; the times are ascending."""
        up_to = self._up_to_ns
        if up_to is None or start == stop:
            return stop

        def is_later(row: int) -> bool:
            try:
                return block.message(row).time_ns > up_to
            except ResponseError:  # the caller decides about a malformed time
                return False

        return next(filter(is_later, range(start, stop)), stop) if is_later(stop - 1) else stop

    def retry(self) -> None:
        super().retry()
        if self.only_end_missing:  # the newest row said nearly the same
            last = self._last_seq
            self._finish_early(EndOfBatch(self._pending + self._beyond, last, found=last > 0))

    @property
    def _last_seq(self) -> int:
        return self.position if self.position > self._origin[0] else 0


class OneReply(RangePlan):
    """The plan of one request, which one reply answers; if it breaks off, another request brings the rest."""

    def __init__(self, request: Request, *, up_to_ns: int | None = None) -> None:
        super().__init__(request.next_by_subj, request.seq or 1, request.start_time, None, up_to_ns)
        assert request.batch is not None
        assert request.max_bytes is not None
        self._request = request
        self._most, self._most_bytes = request.batch, request.max_bytes
        self._rows = self._size = 0

    def start_at(self, seq: int) -> None:
        super().start_at(seq)
        self._request = replace(self._request, seq=seq, start_time=None)

    @property
    def only_end_missing(self) -> bool:
        return self._beyond > 0 or self._rows >= self._most

    @property
    def more(self) -> bool:
        """Whether messages follow the last one."""
        return self.end is not None and self.end.num_pending > 0

    def learn(self, found: StoredMsg | None, last_seq: int | None) -> None:
        super().learn(found, last_seq)
        if self.behind and self.only_end_missing:  # the caller wants no more, and is told that there is more
            self.behind = ""
            self._finish_early(EndOfBatch(1, self._last_seq))

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight:
            return None
        max_bytes = 1 if self.probing else max(1, self.link.limit(self._most_bytes - self._size))
        request = replace(self._request, max_bytes=max_bytes)
        if self._last_seq:
            request = replace(request, seq=self.position + 1, start_time=None, batch=self._most - self._rows)
        return self._send(request)

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        self._size += size - sent.size
        kept = super().accept(sent, block, size, pending)
        self._rows += len(kept)
        return kept

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        self.in_flight.clear()
        asked, before = sent.request.max_bytes or 0, self._size - sent.size
        limited = asked < self._most_bytes - before and self._size < self._most_bytes
        if end.num_pending and limited and not self.only_end_missing:
            return  # the connection's limit ended the reply, and not the caller's
        doubtful, self._pending = not end.found and self._pending > 0, end.num_pending
        if doubtful:  # another responder has counted more
            return
        last = self._last_seq
        self._finish_early(replace(end, num_pending=end.num_pending + self._beyond, last_seq=last, found=last > 0))


class _Step(enum.Enum):
    """What the next request of a `MultiLast` is for."""

    NOW = "the first page, of the moment when it is answered"
    PAGE = "a page at the point in time"
    SUBJECTS = "the messages on the subjects of a page that is not the last one"


class MultiLast(Plan):
    """The plan of a `multi_last` read: pages at one pinned point in time, with both cursors (ADR-31, revision 6).

    Only the end of a reply without `up_to_seq` says what its responder had. So the first page is of now, without
    `up_to_seq`, and every subject that exists is in it, also if it is overwritten meanwhile. With `need`, it counts if its
    responder has reached this sequence. If it is empty, its responder is unknown: then another request includes the subject
    of a message that the leader has.

    With `up_to_seq`, file storage that has not reached it answers 404, and memory storage answers with what it has and
    repeats the asked sequence. So every other request is for the sequence of a message that the leader has, the *witness*,
    and asks for its subject, too. Rows are in the order of their sequences, and a replica has no gaps:

    * A page that ends with the witness shows the point in time.
    * A page that ends before, because it is full, only shows which subjects come next. Another request for these subjects
      alone has their messages and the witness.

    The witness is the leader's newest message up to the point in time. If a page lacks it, the leader is asked again: either
    the witness was removed, or the responder is behind. On 2.11 the EOB of a cut page counts one message too few, so the
    count on the page's last message decides whether more follows. A 404 does not prove that no message matches.

    In a request, a wildcard stands for a token that is not UTF-8, and rows that no filter of the caller matches are left out.

    `request` is the first page; its `batch` is the caller's limit for all pages together. With `need`, every row is proved to
    be the leader's. Without `paged`, the first page is all, and the end counts the rest.
    """

    def __init__(self, request: Request, *, need: int | None = None, paged: bool = True) -> None:
        super().__init__(proved=need is not None)
        self._request = request
        self._need = need or 0
        self._paged = paged
        self._shrunk = False  # a reply has cost the connection
        self._responder = ""
        self._counted: int | None = None  # how many rows there are, as the first page says
        self._filters = SubjectMatcher(request.multi_last or ())
        self.point: int | None = request.up_to_seq  # what `EndOfBatch.up_to_seq` says
        self._step = _Step.NOW if self.point is None else _Step.PAGE
        self._question: Question | None = None if self.point is None else NewestMessage(self.point)
        self._witness = (0, "")  # its sequence and its subject
        self._page, self._page_pending = Block(), 0  # a page that shows what comes next
        self._rows = self._last = self._pending = 0
        self._cursor = 0  # the pages up to this sequence have been read

    @property
    def question(self) -> Question | None:
        return self._question

    def next_request(self) -> SentRequest | None:
        if self.done or self.in_flight or self._question is not None:
            return None
        seq, subject = self._witness
        request = self._request
        if self._shrunk:  # only then: of a read of now, one page alone is sure to have every subject
            request = replace(request, max_bytes=self.link.limit(request.max_bytes or _UNLIMITED))
        filters = request.multi_last or ()
        if subject and not self._matches(subject):
            filters = (*filters, filter_for(subject))
        if self._step is _Step.NOW:
            return self._send(replace(request, multi_last=filters))
        if self._step is _Step.SUBJECTS:
            subjects = (*(message.subject for message in self._page.messages()), subject)
            filters = tuple(dict.fromkeys(map(filter_for, subjects)))
            return self._send(Request(multi_last=filters, up_to_seq=seq, max_bytes=_UNLIMITED))
        left = None if request.batch is None else request.batch - self._rows
        first = self._cursor + 1 if self._cursor else None
        return self._send(replace(request, multi_last=filters, seq=first, up_to_seq=seq, up_to_time=None, batch=left))

    def accept(self, sent: SentRequest, block: Block, size: int, pending: int) -> Block:
        sent.held.stream = block.stream
        sent.held.extend(block)
        sent.pending = pending
        return Block(block.stream)

    def finish(self, sent: SentRequest, end: EndOfBatch) -> Block | None:
        self.in_flight.clear()
        reply, pending = sent.held, sent.pending
        self._responder = reply.stream or self._responder
        newest = reply.seqs[-1] if reply.seqs else 0
        seq, subject = self._witness
        match self._step:
            case _Step.NOW if not reply.seqs and self._need and not seq:
                self._question = NextMessage(Request(seq=1, next_by_subj=">"))
            case _Step.NOW if not reply.seqs and self._need:
                self._witness, self.behind = (0, ""), f"message {seq}"
            case _Step.NOW if reply.seqs and (end.up_to_seq or 0) < self._need:
                self.behind = f"sequence {self._need}"
            case _Step.NOW if seq and pending:  # the witness may take the place of a row within the caller's limits
                self._witness, self.behind = (0, ""), f"sequence {self._need}"
            case _Step.NOW:
                self.point = end.up_to_seq or newest or None
                if not pending or not self._paged or len(reply) == self._request.batch:
                    return self._deliver(reply, pending, ended=True)
                self._page, self._page_pending = reply, pending
                self._counted = len(reply) + pending
                self._step, self._question = _Step.PAGE, NewestMessage(self.point or newest)
            case _Step.PAGE if newest == seq:
                return self._deliver(reply, 0, ended=True)
            case _Step.PAGE if pending:
                self._page, self._page_pending = reply, pending - (not self._matches(subject))
                exact = can_be_asked_for(subject) or self._matches(subject)  # otherwise its filter matches others
                if self._counted is None and exact:
                    self._counted = sum(self._filters.mask(reply.subjects)) + self._page_pending
                self._step = _Step.SUBJECTS
            case _Step.SUBJECTS if newest == seq:
                cursor = self._page.seqs[-1]
                reply.keep(bisect_right(reply.seqs, self._cursor), bisect_right(reply.seqs, cursor))
                self._cursor, self._step = cursor, _Step.PAGE
                return self._deliver(reply, self._page_pending)
            case _:
                self._page = Block()
                self._step, self._question = _Step.PAGE, NewestMessage(seq)
        return None

    def _deliver(self, rows: Block, pending: int, *, ended: bool = False) -> Block:
        self._pending = pending
        # The subject of a witness was not asked for by the caller, and its filter may match more.
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

    def _can_be_witness(self, subject: str) -> bool:
        """Whether a request can name a message's subject, or has to because a filter matches it."""
        if NOT_INDEXED in subject:  # it is in no reply to a request with filters
            return False
        unsure = any("\ufffd" in each for each in self._request.multi_last or ())
        return can_be_asked_for(subject) or unsure or self._matches(subject)

    def ask_for_less(self) -> bool:
        in_full, self._shrunk = not self._shrunk, True
        if self._step is _Step.SUBJECTS:
            self._step = _Step.PAGE  # of fewer subjects
        return in_full

    def _end(self) -> None:
        lacking = (self._counted or 0) - self._rows - self._pending
        if lacking > 0:
            raise HistoryUnavailableError(
                f"stream {self._responder!r}: {counted(lacking, 'subject')} of a multi_last in several pages changed meanwhile, and "
                "their older messages are no longer stored; repeat it with a larger max_bytes, or with fewer subjects"
            )
        self._question = None
        self._finish_early(EndOfBatch(self._pending, self._last, self.point, found=bool(self._rows)))

    def learn(self, found: StoredMsg | None, last_seq: int | None) -> Block | None:
        question, self._question = self._question, None
        passed = found is not None and not self._can_be_witness(found.subject)
        if self._step is _Step.NOW:
            if found is None:  # nothing that a filter finds is left of what the leader had
                self.point = max(self._need, last_seq or 0)
                self._end()
            elif passed:
                self._question = NextMessage(Request(seq=found.seq + 1, next_by_subj=">"))
            else:
                self._witness = found.seq, found.subject
            return None
        assert isinstance(question, NewestMessage)
        if found is not None and passed and found.seq > self._cursor + 1:
            self._question = NewestMessage(found.seq - 1)
        elif found is None or passed or found.seq <= self._cursor:  # what followed has been removed
            self.point = self.point if self._rows else question.seq if last_seq is None else min(question.seq, last_seq)
            self._pending = 0
            self._end()
        else:
            self.behind: str = f"message {found.seq}" if found.seq == self._witness[0] else ""
            self._witness = found.seq, found.subject
            first, self._page = self._page, Block()
            if first.seqs and found.seq == self.point:
                return self._deliver(first, self._page_pending)
            self.point = found.seq
        return None

    def pin(self, seq: int) -> None:
        """Read what was stored up to a sequence, and not up to a time."""
        self._request = replace(self._request, up_to_seq=seq, up_to_time=None)
        self.point, self._step, self._question = seq, _Step.PAGE, NewestMessage(seq)
        if not seq:
            self._end()

    @property
    def up_to_time(self) -> datetime | None:
        return self._request.up_to_time


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
        up_to_ns: int | None = None,
        batch: int | None = None,
        max_bytes: int,
        prefetch: int = 2,
        group: Group | None = None,
    ) -> None:
        super().__init__(subject, seq, start_time, up_to_seq, up_to_ns)
        self.group: Group | None = group
        self._fixed = batch
        self._batch = batch or FIRST_BATCH
        self._max_bytes = max_bytes
        self._prefetch = prefetch
        self._dense = False
        self._ahead = prefetch  # requests in flight, as far as the range allows

    def next_request(self) -> SentRequest | None:
        most = self._prefetch if self.link.most is None else 1
        if self.done or len(self.in_flight) >= most or self.only_end_missing:
            return None
        if not self.in_flight:
            return self._request_from(self.position + 1)
        if not self._dense:
            return None
        newest = self.in_flight[-1]
        start = newest.start + newest.count
        expected = sum(sent.count - sent.rows for sent in self.in_flight)
        if self._pending <= expected or (self.up_to_seq is not None and start > self.up_to_seq):
            return None
        return self._request_from(start)

    def _request_from(self, start: int) -> SentRequest:
        max_bytes, carried = self._limits()
        count = 1 if self.probing else self._batch
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
            max_bytes=max(1, min(max_bytes, self.link.limit(int(carried / _FULL)))),
        )
        return self._send(request, 0 if by_time else start, count)

    def _limits(self) -> tuple[int, int]:
        """Return the most bytes that a request may ask for, and the bytes that the connection carries for it."""
        share = 1 if self.group is None else self.group.readers
        return self._max_bytes // share, self.link.room(self._ahead, len(self.in_flight))

    def finish(self, sent: SentRequest, end: EndOfBatch) -> None:
        """As `Plan.finish`; guesses that the reply makes wrong leave `in_flight`."""
        self.in_flight.popleft()
        self.end: EndOfBatch | None = replace(end, num_pending=end.num_pending + self._beyond, last_seq=self._last_seq)
        # A lagging replica may find nothing after another one has counted more, so the plan asks once more.
        doubtful = not end.found and self._pending > 0
        self._pending = end.num_pending
        self.done: bool = self.only_end_missing or (end.num_pending == 0 and not doubtful)
        self._resize(sent)
        if self.done or doubtful or (self.in_flight and self.in_flight[0].start > self.position + 1):
            self.in_flight.clear()

    def _resize(self, sent: SentRequest) -> None:
        if not sent.rows or sent.count == 1 < self._batch:
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

    def _reopen(self) -> None:
        super()._reopen()
        self._dense = False
