"""Reads by direct gets as machines without I/O: `RangeRead` for many messages, `SingleRead` for one.

`TABLE` says what every input does in every state, and nothing else changes the state. docs/design/range-read.md shows
each event in each state. The caller loops over `RangeRead.next_action`, does what it says, and hands in what happens.

A replica of the stream has its messages in order and without gaps of its own, but it may lag. So only the end of the
range needs a proof. A mirror that answers under the stream's name (``mirror_direct``) can lack any message, because it
has limits of its own, perhaps a filter, perhaps a start in the middle. It keeps what the stream has removed, and even the
messages of an earlier stream of the same name. It may change subjects. So its rows never count in a proved read. The read
asks again, because the next responder may be a replica. If a mirror is near, no replica ever answers. Then the leader
sends the messages, and the mirror's rows only say where to look for them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.errors import (
    DirectGetDisabledError,
    JetStreamExtError,
    MessagesLostError,
    RequestTimeoutError,
    ResponseError,
    TooManySubjectsError,
)
from jetstream_ext.protocol.direct import (
    DEFAULT_MAX_BYTES,
    Block,
    EndOfBatch,
    ReplyDecoder,
    Request,
    StoredMsg,
    decode_single,
)
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.reads import Group, Link, MultiLast, Plan, RangePlan, Scan, SentRequest, Stopwatch
from jetstream_ext.text import counted, get_logger, log_state

_log = get_logger("direct")

MAX_LEADER_REQUESTS: Final = 64
"""Requests to the leader at once."""
MAX_MIRROR_ANSWERS: Final = 8
"""After so many answers in a row that are a mirror's, or do not say whose, no replica of the stream seems to be near."""
_MOST_ROWS: Final = 1 << 14
"""Of a reply to a request without `batch`: servers send up to 1024, one for each subject."""
_ROW_OVERHEAD: Final = 2048
"""More than the bytes of the header lines that a server adds to a message and does not count for `max_bytes`."""


class State(enum.Enum):
    """Where a read is: the columns of `TABLE`."""

    READING = "reading"
    PROVING = "proving"  # the leader is asked for the next messages of the range, or for the newest message
    PAUSED = "paused"
    RESUMING = "resuming"  # the next request needs a usable connection
    ENDED = "ended"


class Input(enum.Enum):
    """What can happen to a read, except that rows arrive: the rows of `TABLE`."""

    COMPLETE = "everything was delivered, and nothing is left to prove"
    SHORT = "the replies end before the sequence to prove"
    UNPROVED = "only the leader knows whether the replies show what is asked for"
    PROVED = "the leader has sent messages, or said what the replies must show"
    BEHIND = "a responder does not have what is asked for"
    MIRROR = "a mirror answers, and a replica may answer the next request"
    MISSING = "the leader has a message that no responder delivered"
    NO_RESPONDER = "no responder answers"
    INTERRUPTED = "the connection or messages are lost, or no reply comes"
    REFUSED = "the server refuses a request, or a reply breaks the protocol"
    FAILED = "a request, the leader's answer or the reconnect fails"
    PAUSE_OVER = "the pause is over"
    CONNECTED = "the connection is usable"


READING, PROVING, PAUSED, RESUMING, ENDED = State
ERR: Final = None

TABLE: Final[dict[Input, tuple[State | tuple[State, State] | None, ...]]] = {
    #                     READING              PROVING          PAUSED    RESUMING  ENDED
    Input.COMPLETE:      (ENDED,               ENDED,           ERR,      ENDED,    ENDED),
    Input.SHORT:         (PROVING,             ERR,             ERR,      ERR,      ERR),
    Input.UNPROVED:      (PROVING,             ERR,             ERR,      ERR,      ERR),
    Input.PROVED:        (ERR,                 READING,         ERR,      ERR,      ERR),
    Input.BEHIND:        ((PAUSED, ENDED),     (PAUSED, ENDED), ERR,      ERR,      ERR),
    Input.MIRROR:        (RESUMING,            ERR,             ERR,      ERR,      ERR),
    Input.MISSING:       (ERR,                 PAUSED,          ERR,      ERR,      ERR),
    Input.NO_RESPONDER:  ((PAUSED, ENDED),     ERR,             ERR,      ERR,      ERR),
    Input.INTERRUPTED:   ((RESUMING, ENDED),   ERR,             ERR,      RESUMING, ENDED),
    Input.REFUSED:       (ENDED,               ERR,             ERR,      ERR,      ERR),
    Input.FAILED:        (ENDED,               ENDED,           ENDED,    ENDED,    ENDED),
    Input.PAUSE_OVER:    (ERR,                 ERR,             RESUMING, ERR,      ERR),
    Input.CONNECTED:     (ERR,                 ERR,             ERR,      READING,  ERR),
}  # fmt: skip
"""Where an input leads; with ``ERR`` it raises RuntimeError.

Of a pair, the second is for a read that gives up: the second INTERRUPTED at one place; BEHIND, NO_RESPONDER and a request
that cannot be sent after `timeout` seconds without a new row; NO_RESPONDER before any answer.
"""

_CELLS: Final = {(state, event): cell for event, row in TABLE.items() for state, cell in zip(State, row, strict=True)}


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send `sent.request` with a reply inbox of its own; hand replies to `receive`, or call `not_sent`.

    At `until`, the wait for the reply begins even if the write buffer is still full.
    """

    sent: SentRequest
    until: float


@dataclass(frozen=True, slots=True)
class DropReply:
    sent: SentRequest


@dataclass(frozen=True, slots=True)
class AskLeader:
    """Ask the stream's leader for each of these messages; hand what it has to `leader_answered`."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class FindNewest:
    """Ask the leader for its newest message up to the sequence `seq` that matches `filters`; hand it to `newest_found`.

    For `NEWEST` and filters other than ``>``, any message that matches will do.
    """

    seq: int
    filters: tuple[str, ...] = (">",)


@dataclass(frozen=True, slots=True)
class AwaitConnection:
    """Wait until the connection is usable, then call `connected`."""


@dataclass(frozen=True, slots=True)
class Deliver:
    block: Block


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a reply or a lost connection, at most until the time `until`; then call `handle_timer`."""

    until: float


@dataclass(frozen=True, slots=True)
class Done:
    """The read is over: everything was delivered, or it failed with `error`."""

    error: Exception | None = None


# After an action that fails in another way, the caller calls `failed`.
Action = SendRequest | DropReply | AskLeader | FindNewest | AwaitConnection | Deliver | Wait | Done


@dataclass(slots=True)
class _Reply:
    decoder: ReplyDecoder
    frames: list[Frame] = field(default_factory=list)
    lost: bool = False  # nothing comes after `frames`
    error: Exception | None = None  # why, if it is not the lost connection
    unsent: bool = False
    hints: list[int] = field(default_factory=list)  # the sequences of a mirror's rows
    whole: bool = False  # its last frame has arrived
    count: int = 0  # how many frames have arrived
    largest: int = 0  # of them, in bytes
    lap: tuple[int, float, bool] = (0, 0.0, True)  # see `Stopwatch.lap`


def no_answer(stream: str, timeout: float, *, connected: bool = True) -> RequestTimeoutError:
    what = "no answer to a direct get" if connected else "the connection was lost and did not come back"
    return RequestTimeoutError(f"stream {stream!r}: {what} within {timeout:.4g} s")


class _Read:
    def __init__(self, stream: str, timeout: float) -> None:
        self.state: State = READING
        self.error: Exception | None = None  # of a read that has ENDED; None if it is complete
        self._stream = stream
        self._source = f"stream {stream!r}"  # for the log
        self._timeout = timeout
        self._timer: float | None = None

    def connected(self) -> None:
        self._happen(Input.CONNECTED)

    def failed(self, error: Exception) -> None:
        """Take an error of the caller's own: it could not do what the machine needs."""
        self._happen(Input.FAILED, error)

    def _happen(self, event: Input, error: Exception | None = None, why: str = "", *, give_up: bool = False) -> None:
        """Do what `TABLE` says."""
        before, cell = self.state, _CELLS[self.state, event]
        if cell is ERR:
            raise RuntimeError(f"stream {self._stream!r}: {event.name} cannot happen to a read that is {before.name}")
        after = cell[give_up] if isinstance(cell, tuple) else cell
        if after is before:
            return
        self.state, self._timer = after, None
        if self.state is ENDED:
            self.error = error
        log_state(_log, self._source, f"{before.name} -> {after.name}", why or error or event.value, error=self.error)


class SingleRead(_Read):
    """The machine of one get: its request is sent once more if its answer is lost with the connection.

    The caller sends the request while the state is READING, and waits for the connection while it is RESUMING, for
    at most `timeout` seconds in total.
    """

    def __init__(self, stream: str, timeout: float) -> None:
        super().__init__(stream, timeout)
        self._answer: Frame | None = None
        self._retried = False

    def receive(self, frames: list[Frame]) -> None:
        self._answer = frames[0]
        self._happen(Input.COMPLETE)

    def disconnected(self, closed: Exception | None) -> None:
        """As `RangeRead.disconnected`."""
        text = f"stream {self._stream!r}: the connection was lost before the direct get was answered; repeat it"
        self._happen(Input.INTERRUPTED, closed or MessagesLostError(text, expected=0), give_up=self._retried)
        self._retried = True

    def not_sent(self, error: Exception) -> None:
        self._happen(Input.INTERRUPTED, error)

    def expired(self) -> None:
        """Note that `timeout` seconds have passed."""
        self.failed(no_answer(self._stream, self._timeout, connected=self.state is not RESUMING))

    def result(self, server_version: str = "", request: Request | None = None) -> StoredMsg:
        """Return the message of a read that has ENDED, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self._answer is not None
        return decode_single(self._stream, self._answer, server_version, request)


class RangeRead(_Read):
    """The machine of a read of many messages. All times are the caller's clock, in seconds.

    Args:
        stream: The stream's name.
        plan: Which requests answer the read.
        timeout: Seconds that may pass without an answer, or without a new row while responders lag or do not answer. After
            half of it, a request without an answer is repeated, and both replies are awaited.
        pause: Seconds between two requests while responders lag or do not answer, and to wait for the end of a reply whose
            messages have all arrived.
        prove_to: Prove a `RangePlan` up to this sequence, or accept for a `MultiLast` only answers of the stream itself;
            None believes the responders.
        link: What is known of the connection; the replies add to it.
        server_version: The connected server's version, for errors.
    """

    def __init__(
        self,
        stream: str,
        plan: Plan,
        timeout: float,
        *,
        pause: float,
        prove_to: int | None = None,
        link: Link | None = None,
        server_version: str = "",
    ) -> None:
        super().__init__(stream, timeout)
        self._plan = plan
        self._pause = pause
        self._server_version = server_version
        self._range: RangePlan | None = None
        self._prove_to = 0
        if prove_to is not None and isinstance(plan, RangePlan):
            self._range = plan
            self._prove_to = prove_to if plan.up_to_seq is None else min(prove_to, plan.up_to_seq)
        self._own_only = prove_to is not None
        self._hints: list[int] = []  # of the sequences that the leader is asked about
        self._pending = 0  # how many messages follow `_hints`, as the mirror says
        self._asked: tuple[int, ...] = ()  # the leader is asked for the message behind each of them
        self._width = 1  # how many of `_asked` do not come from a mirror
        self._link = link or Link()
        self._group: Group | None = None
        if isinstance(plan, Scan):
            plan.link, self._group = self._link, plan.group
        self._stopwatch = Stopwatch()
        self._replies: dict[SentRequest, _Reply] = {}
        self._dropped: list[SentRequest] = []
        self._rows: Block | None = None
        self._give_up_at: float | None = None
        self._answered = self._retried = self._silent = False
        self._late: tuple[SentRequest, ...] = ()  # requests in flight before the oldest, which is silent, was repeated
        self._deadline = 0.0  # of the wait for the oldest reply
        self._waiting_since = 0.0
        # How long sending has taken since the last answer, and when the request was handed out that is being sent.
        self._sending = 0.0
        self._sending_since: float | None = None
        self._mirror_answers = 0  # in a row; see `MAX_MIRROR_ANSWERS`

    def next_action(self, now: float) -> Action:
        if self._sending_since is not None:
            self._sending, self._sending_since = self._sending + now - self._sending_since, None
        while True:
            if self._dropped:
                return DropReply(self._dropped.pop())
            # Before rows are delivered, so that the server works while the reader does.
            may_send = self.state is READING and not (self._late and self._plan.in_flight)
            may_send &= self._rows is None or self._group is None or not self._group.lazy
            if may_send and (sent := self._plan.next_request()) is not None:
                decoder = ReplyDecoder(self._stream, start=sent.request.seq or 1, server_version=self._server_version)
                if all(reply.whole for reply in self._replies.values()):
                    self._stopwatch.start(now)
                self._replies[sent] = _Reply(decoder)
                log_state(_log, self._source, "request sent", request=sent.request)
                self._sending_since = now
                until = self._deadline if self._late else now + self._timeout - self._sending
                return SendRequest(sent, until)
            if self.state is PROVING and isinstance(self._plan, MultiLast):
                assert self._plan.wanted is not None
                return FindNewest(self._plan.wanted, self._plan.among)
            if self.state is PROVING:
                assert self._range is not None
                return AskLeader(tuple(map(self._range.request_after, self._asked)))
            if self._rows is not None:
                rows, self._rows = self._rows, None
                self._give_up_at = None
                return Deliver(rows)
            if self.state is RESUMING:
                return AwaitConnection()
            if self.state is ENDED:
                return Done(self.error)
            if self.state is PAUSED or not self._read(now):
                if self._timer is None and self.state is PAUSED:
                    self._timer = now + self._pause
                elif self._timer is None:
                    self._waiting_since = now
                    self._deadline = now + max(self._pause, self._timeout - self._sending)
                    patience = self._timeout / 2
                    if self._plan.only_end_missing:
                        patience = min(patience, self._pause)
                    self._timer = min(self._deadline, now + patience)
                return Wait(self._timer)

    def receive(self, sent: SentRequest, frames: list[Frame], now: float) -> None:
        """Take frames of a reply, in order; they are decoded when the reply is the oldest."""
        reply = self._replies.get(sent)
        if reply is None or reply.lost:
            return
        self._sending = 0.0
        if self._sending_since is not None:
            self._sending_since = now
        if self._group is not None:
            self._group.heard = now
        sizes = [len(body) for _, body, _ in frames]
        size = sum(sizes)
        self._stopwatch.add(size, now, first=not sent.wire)
        sent.wire += size
        reply.count += len(frames)
        reply.largest = max(reply.largest, *sizes)
        if self._exceeds(sent, reply):
            allowed = f"{sent.request.body()}"[:300]
            text = f"stream {self._stream!r}: the reply to a direct get is longer than its request {allowed} allows"
            reply.lost, reply.error = True, ResponseError(f"{text}; the messages that were returned are valid")
        if frames[-1][1].startswith(b"NATS/1.0 "):  # a status ends a reply
            reply.whole, reply.lap = True, self._stopwatch.lap()
        if reply.frames:
            reply.frames += frames
        else:
            reply.frames = frames

    def closed(self) -> None:
        """Note that the reader leaves: no call follows."""
        if self.state is not ENDED:
            log_state(_log, self._source, "closed", "its reader has left", before=self.state.name)

    def _exceeds(self, sent: SentRequest, reply: _Reply) -> bool:
        """Return whether a reply is longer than a server makes it, so that it may never end.

        A server exceeds `max_bytes` by at most one message, of any size.
        """
        request = sent.request
        most = (request.batch or _MOST_ROWS) + 1  # and the end of the reply
        size = sent.wire - reply.largest - reply.count * _ROW_OVERHEAD
        return reply.count > most or size > (request.max_bytes or DEFAULT_MAX_BYTES)

    def disconnected(self, closed: Exception | None = None) -> None:
        """Note that the connection is lost, and the rest of all replies; `closed` is the error if that is for good."""
        for reply in self._replies.values():
            reply.lost, reply.error = True, reply.error or closed

    def not_sent(self, sent: SentRequest, error: Exception) -> None:
        """Note that a request was not sent because the connection is lost."""
        reply = self._replies[sent]
        reply.lost, reply.unsent, reply.error = True, True, error

    def handle_timer(self, now: float) -> None:
        if self._timer is None or now < self._timer:
            return
        if self.state is PAUSED:
            self._happen(Input.PAUSE_OVER)
            return
        reply = self._replies[self._plan.in_flight[0]]
        first = self._replies[self._late[0]] if self._late else reply
        if reply.frames or reply.lost or first.frames:
            return
        if self.others_answered(self._waiting_since):
            self._timer = None  # the wait begins again
            return
        if self._plan.only_end_missing:
            self._plan.retry()
            self._drop_replies()
        elif self._timer < self._deadline:
            # A loop that was blocked for that long may still have to read the reply.
            self._timer = self._deadline = max(self._deadline, now + self._pause)
            self._repeat()
        else:
            self._happen(Input.INTERRUPTED, self._silence(first.decoder.count), give_up=True)

    def _repeat(self) -> None:
        """Ask once more for what a silent reply lacks: its server may have died. Whichever comes first then counts."""
        late = tuple(self._plan.in_flight)
        if self._silent or not self._plan.retry():
            return
        self._silent = True
        if self._plan.done:
            self._drop_replies()
        else:
            self._late = late
            log_state(_log, self._source, "request repeated", "no answer", seconds=self._timeout / 2)

    def others_answered(self, since: float) -> bool:
        """Return whether another read of the group was answered since then: a server answers one request after the other."""
        return self._group is not None and self._group.heard > since

    def leader_answered(self, found: Sequence[StoredMsg | None], now: float) -> None:
        """Take what the leader found for the requests of `AskLeader`; None is no message."""
        assert self._range is not None
        plan, hints = self._range, self._hints
        following = dict(zip(self._asked, found, strict=True))
        messages: list[StoredMsg] = []
        position = plan.position
        while (message := following.get(position)) is not None:
            if message.seq <= position:
                wrong = (
                    f"stream {self._stream!r}: the leader sent sequence {message.seq} as the next one after {position}"
                )
                self._happen(Input.FAILED, ResponseError(wrong))
                return
            messages.append(message)
            position = message.seq
        # The leader has nothing more, or the responders have not, and now nothing is left to prove.
        ended = position in following or (not hints and position >= self._prove_to)
        self._retried = self._silent = False
        if messages and (hints or messages[0].seq <= self._prove_to):
            known = self._pending + len(hints)  # as the mirror counts
            block = plan.take(messages, 0 if ended else max(0, known - len(messages)))
            if block.seqs:
                self._rows = block
            lacking = not ended and position not in hints and len(messages) >= self._width
            fitting = DEFAULT_MAX_BYTES * len(messages) // max(1, sum(message.size for message in messages))
            self._width = max(1, min(2 * self._width, MAX_LEADER_REQUESTS, fitting)) if lacking else 1
        else:
            ended = True
        if ended and not plan.done:
            plan.end_here()
        if plan.done:
            self._happen(Input.COMPLETE, why=f"the leader has nothing else in the range after sequence {plan.position}")
        elif hints or self._mirror_answers > MAX_MIRROR_ANSWERS:
            self._happen(Input.PROVED, why=f"the leader sent messages up to sequence {plan.position}")
        else:
            why = f"the leader has sequence {messages[0].seq}, which no responder delivered"
            self._happen(Input.MISSING, why=why)

    def newest_found(self, newest: tuple[int, str] | None, last_seq: int, now: float) -> None:
        """Take sequence and subject of the message that `FindNewest` asked for, if any, and the leader's last sequence."""
        assert isinstance(self._plan, MultiLast)
        self._plan.found(newest, last_seq)
        if self._plan.behind:
            self._behind(now)
        else:
            self._happen(Input.PROVED)

    def _read(self, now: float) -> bool:
        """Take what has arrived of the oldest reply; return whether there is something new to do."""
        plan = self._plan
        if isinstance(plan, MultiLast) and plan.wanted is not None:
            self._happen(Input.UNPROVED, why=f"the newest message up to sequence {plan.wanted} is needed")
            return True
        if plan.done:
            if self._range is None or self._range.position >= self._prove_to or self._range.cut:
                self._happen(Input.COMPLETE)
            else:
                self._ask_behind([])
                self._happen(Input.SHORT, why=f"nothing came after sequence {self._range.position}")
            return True
        oldest = plan.in_flight[0]
        reply = self._replies[oldest]
        if self._late and (self._replies[self._late[0]].frames or reply.frames or reply.lost):
            if self._replies[self._late[0]].frames:
                plan.in_flight = deque(self._late)
            self._late = ()
            self._drop_replies()
            return True
        if reply.frames:
            frames, reply.frames = reply.frames, []
            self._timer = None
            self._decode(oldest, reply, frames, now)
            return True
        if isinstance(reply.error, ResponseError):
            self._happen(Input.REFUSED, reply.error)
        elif reply.lost:
            text = f"stream {self._stream!r}: the connection was lost before the direct get was answered completely"
            lost = reply.error or MessagesLostError(text, expected=reply.decoder.last_seq)
            self._interrupt(lost, now, unsent=reply.unsent)
        return reply.lost

    def _interrupt(self, error: Exception, now: float, *, unsent: bool = False) -> None:
        """Ask for the rest once more, or give up; a request that was not sent is not yet repeated."""
        away = isinstance(error, DirectGetDisabledError)
        give_up = self._patience_ends(now) if away or unsent else self._retried or self._silent
        give_up |= away and not self._answered
        self._late, self._sending = (), 0.0
        resumable = self._plan.retry()
        self._drop_replies()
        if self._plan.done:
            return
        if not away:
            self._retried |= not unsent
        self._happen(Input.NO_RESPONDER if away else Input.INTERRUPTED, error, give_up=give_up or not resumable)

    def _decode(self, sent: SentRequest, reply: _Reply, frames: list[Frame], now: float) -> None:
        decoder = reply.decoder
        try:
            block = decoder.feed(frames)
            pending = block.pending(-1) if block.seqs else 0
        except DirectGetDisabledError as error:
            self._interrupt(error, now)
            return
        except TooManySubjectsError as error:
            if not isinstance(self._plan, MultiLast) or not self._plan.fewer_subjects():
                self._happen(Input.REFUSED, error)
            self._drop_replies()
            return
        except JetStreamExtError as error:
            self._happen(Input.REFUSED, error)
            return
        if block.seqs:
            self._answered = True
            if self._own_only and block.stream != self._stream:
                reply.hints += block.seqs
                self._pending = pending
            else:
                self._replica_answered()
                rows = self._plan.accept(sent, block, decoder.size, pending)
                if rows.seqs:
                    self._retried = False
                    self._rows = rows
        if reply.hints:
            self._distrust(reply, now)
        elif decoder.broken is not None:
            reply.lost, reply.error = True, decoder.broken
        elif decoder.end is not None:
            self._silent = False
            self._finish(sent, decoder.end, now)

    def _finish(self, sent: SentRequest, end: EndOfBatch, now: float) -> None:
        plan = self._plan
        reply = self._replies[sent]
        log_state(_log, self._source, "reply ended", rows=reply.decoder.count, pending=end.num_pending)
        if reply.decoder.count:
            size, seconds, at_least = reply.lap
            self._link.adapt(size, seconds, at_least=at_least)
        try:
            rows = plan.finish(sent, end)
        except JetStreamExtError as error:  # a malformed header, which is otherwise decoded on access
            self._happen(Input.REFUSED, error)
            return
        self._drop_replies()
        if rows is not None and rows.seqs:
            self._rows = rows
        if isinstance(plan, MultiLast) and plan.behind:
            self._behind(now)

    def _replica_answered(self) -> None:
        self._mirror_answers, self._width = 0, 1
        if self._range is not None:
            self._range.most = None

    def _count_mirror(self) -> None:
        self._mirror_answers += 1
        if self._range is not None and self._mirror_answers >= MAX_MIRROR_ANSWERS:
            self._range.most = MAX_LEADER_REQUESTS

    def _distrust(self, reply: _Reply, now: float) -> None:
        """Drop a mirror's answer; if no replica seems to be near, ask the leader for the range, or pause."""
        mirror, hints = reply.decoder.responder, reply.hints
        last_resort = self._mirror_answers >= MAX_MIRROR_ANSWERS
        more = reply.decoder.end is None and reply.decoder.broken is None and len(hints) < MAX_LEADER_REQUESTS
        if last_resort and self._range is not None and more:
            return
        self._count_mirror()
        self._plan.retry()
        self._drop_replies()
        self._retried = self._silent = False
        if not last_resort:
            self._happen(Input.MIRROR, why=f"mirror {mirror!r} answers")
        elif self._range is None:
            self._behind(now, f"only mirror {mirror!r} answers, which may hold other messages")
        else:
            self._ask_behind(hints)
            self._happen(Input.UNPROVED, why=f"only mirror {mirror!r} answers")

    def _ask_behind(self, hints: list[int]) -> None:
        """Choose the sequences behind which the leader is asked for the next message of the range."""
        assert self._range is not None
        start = self._range.position
        self._hints = hints
        if not hints:
            self._pending = 0
            self._count_mirror()
        near = range(start, max(start + 1, min(start + self._width, self._prove_to)))
        self._asked = tuple(dict.fromkeys((*near, *hints)))[:MAX_LEADER_REQUESTS]

    def _behind(self, now: float, why: str = "") -> None:
        """Pause, because another responder may have what this one lacks."""
        assert isinstance(self._plan, MultiLast)
        why = (
            why
            or f"no replica or mirror that answers direct gets has sequence {self._plan.point}, which the leader has"
        )
        text = f"stream {self._stream!r}: {why} (tried for {self._timeout:g} s)"
        self._happen(Input.BEHIND, RequestTimeoutError(text), why, give_up=self._patience_ends(now))

    def _patience_ends(self, now: float) -> bool:
        if self._give_up_at is None:
            self._give_up_at = now + self._timeout
        return now >= self._give_up_at

    def _drop_replies(self) -> None:
        """Forget the replies to requests that no longer count."""
        for sent in [sent for sent in self._replies if sent not in (*self._plan.in_flight, *self._late)]:
            del self._replies[sent]
            self._dropped.append(sent)

    def _silence(self, messages: int) -> RequestTimeoutError:
        if not messages:
            return no_answer(self._stream, self._timeout)
        return RequestTimeoutError(
            f"stream {self._stream!r}: the answer to a direct get stopped after {counted(messages, 'message')}, with nothing more for "
            f"{self._timeout:.4g} s (if the API is imported from another account, its export needs response_type stream)"
        )
