"""Reads by direct gets as a machine without I/O.

`TABLE` says what every input does in every state, and nothing else changes the state. docs/design/range-read.md shows
each event in each state. The caller loops over `RangeRead.next_action`, does what it says, and hands in what happens.

A proof needs a replica. A mirror that answers under the stream's name (``mirror_direct``) can lack any message, because it
has limits of its own, perhaps a filter, perhaps a start in the middle. It keeps what the stream has removed, and even the
messages of an earlier stream of the same name. It may change subjects. So its rows never count in a proved read. The read
asks again, because the next responder may be a replica, and gives up after `timeout` seconds without one.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.errors import (
    DirectGetDisabledError,
    JetStreamExtError,
    MessagesLostError,
    MirrorAnswersError,
    RequestTimeoutError,
    ResponseError,
)
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, EndOfBatch, ReplyDecoder, StoredMsg
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.reads import Plan, Question, SentRequest
from jetstream_ext.text import counted, get_logger, log_state

_log = get_logger("direct")

_FIRST_PAUSE: Final = 0.001  # short, because another responder may answer the next request
_LONGEST_PAUSE: Final = 0.1  # while mirrors answer, whose replies are of no use
_MOST_ROWS: Final = 1 << 14
"""Of a reply to a request without `batch`: servers send up to 1024, one for each subject."""
_ROW_OVERHEAD: Final = 2048
"""More than the bytes of the header lines that a server adds to a message and does not count for `max_bytes`."""


class State(enum.Enum):
    """Where a read is: the columns of `TABLE`."""

    READING = "reading"
    ASKING = "asking"  # the leader is asked what only it knows
    PAUSED = "paused"
    RESUMING = "resuming"  # the next request needs a usable connection
    ENDED = "ended"


class Input(enum.Enum):
    """What can happen to a read, except that rows arrive: the rows of `TABLE`."""

    COMPLETE = "everything was delivered, and nothing is left to prove"
    UNPROVED = "only the leader knows whether the replies show what is asked for"
    LEARNED = "the leader has said what the replies must show"
    BEHIND = "a responder does not have what the leader has"
    MIRROR = "a mirror answers, and a replica may answer the next request"
    NO_RESPONDER = "no responder answers"
    INTERRUPTED = "the connection or messages are lost, or no reply comes"
    REFUSED = "the server refuses a request, or a reply breaks the protocol"
    FAILED = "a request, the leader's answer or the reconnect fails"
    PAUSE_OVER = "the pause is over"
    CONNECTED = "the connection is usable"


READING, ASKING, PAUSED, RESUMING, ENDED = State
ERR: Final = None

TABLE: Final[dict[Input, tuple[State | tuple[State, State] | None, ...]]] = {
    #                     READING             ASKING           PAUSED    RESUMING  ENDED
    Input.COMPLETE:      (ENDED,              ENDED,           ERR,      ERR,      ERR),
    Input.UNPROVED:      (ASKING,             (ASKING, ENDED), ERR,      ERR,      ERR),
    Input.LEARNED:       (ERR,                READING,         ERR,      ERR,      ERR),
    Input.BEHIND:        ((PAUSED, ENDED),    (PAUSED, ENDED), ERR,      ERR,      ERR),
    Input.MIRROR:        ((PAUSED, ENDED),    ERR,             ERR,      ERR,      ERR),
    Input.NO_RESPONDER:  ((PAUSED, ENDED),    ERR,             ERR,      ERR,      ERR),
    Input.INTERRUPTED:   ((RESUMING, ENDED),  ERR,             ERR,      ERR,      ERR),
    Input.REFUSED:       (ENDED,              ERR,             ERR,      ERR,      ERR),
    Input.FAILED:        (ENDED,              ENDED,           ENDED,    ENDED,    ENDED),
    Input.PAUSE_OVER:    (ERR,                ERR,             RESUMING, ERR,      ERR),
    Input.CONNECTED:     (ERR,                ERR,             ERR,      READING,  ERR),
}  # fmt: skip
"""Where an input leads; with ``ERR`` it raises RuntimeError.

Of a pair, the second is for a read that gives up: the second INTERRUPTED at one place, unless the read can ask for less;
BEHIND, MIRROR, NO_RESPONDER, another question to the leader and a request that cannot be sent after `timeout` seconds without a new row; NO_RESPONDER
before any answer.
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
    """Ask the stream's leader; hand what it has to `leader_answered`."""

    question: Question


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
Action = SendRequest | DropReply | AskLeader | AwaitConnection | Deliver | Wait | Done


@dataclass(slots=True)
class _Reply:
    decoder: ReplyDecoder
    frames: list[Frame] = field(default_factory=list)
    lost: bool = False  # nothing comes after `frames`
    error: Exception | None = None  # why, if it is not the lost connection
    unsent: bool = False
    whole: bool = False  # its last frame has arrived
    count: int = 0  # how many frames have arrived
    first: int = 0  # the bytes that arrived first
    waited: float = 0.0  # how long nothing had arrived before them
    first_at: float = 0.0
    last_at: float = 0.0


class _Flight:
    """The requests of a plan in flight, and the wait for the reply to the oldest one.

    The wait has `timeout` seconds, which sending and the reply share. After half of them the oldest request is *silent*,
    because its server may have died. It is repeated once, and the first reply to either counts.
    """

    def __init__(self, stream: str, plan: Plan, timeout: float, pause: float, server_version: str) -> None:
        self._stream = stream
        self._plan = plan
        self._timeout = timeout
        self._pause = pause
        self._server_version = server_version
        self._replies: dict[SentRequest, _Reply] = {}
        self._heard = 0.0  # when the newest bytes arrived, or a request was sent while no reply was on its way
        self.dropped: list[SentRequest] = []
        self.late: tuple[SentRequest, ...] = ()
        """Requests in flight before the oldest, which is silent, was repeated."""
        self._deadline = 0.0
        # How long sending has taken since the last answer, and when the request was handed out that is being sent.
        self._sending = 0.0
        self.sending_since: float | None = None

    def __getitem__(self, sent: SentRequest) -> _Reply:
        return self._replies[sent]

    def add(self, sent: SentRequest, now: float) -> float:
        """Add a request that is being sent; return until when that may take."""
        decoder = ReplyDecoder(self._stream, start=sent.request.seq or 1, server_version=self._server_version)
        if all(reply.whole for reply in self._replies.values()):
            self._heard = now
        self._replies[sent] = _Reply(decoder)
        self._plan.link.in_flight += 1
        self.sending_since = now
        return self._deadline if self.late else now + self._timeout - self._sending

    def sent(self, now: float) -> None:
        """Note that nothing is being sent any more."""
        if self.sending_since is not None:
            self._sending, self.sending_since = self._sending + now - self.sending_since, None

    def receive(self, sent: SentRequest, frames: list[Frame], now: float) -> None:
        reply = self._replies.get(sent)
        if reply is None or reply.lost:
            return
        self._sending = 0.0
        if self.sending_since is not None:
            self.sending_since = now
        size = sum([len(body) for _, body, _ in frames])
        if not sent.wire:
            reply.first, reply.waited, reply.first_at = size, max(0.0, now - self._heard), now
        self._heard = reply.last_at = now
        sent.wire += size
        reply.count += len(frames)
        newest = frames[-1][1]
        reply.whole = newest.startswith(b"NATS/1.0 ")  # a status ends a reply
        if self._exceeds(sent, reply, len(newest)):
            allowed = f"{sent.request.body()}"[:300]
            text = f"stream {self._stream!r}: the reply to a direct get is longer than its request {allowed} allows"
            reply.lost, reply.error = True, ResponseError(f"{text}; the messages that were returned are valid")
        if reply.frames:
            reply.frames += frames
        else:
            reply.frames = frames

    def _exceeds(self, sent: SentRequest, reply: _Reply, newest: int) -> bool:
        """Return whether a reply is longer than a server makes it, so that it may never end; its newest frame has a size.

        A server exceeds `max_bytes` by at most the last message, of any size.
        """
        request = sent.request
        size = sent.wire - newest - reply.count * _ROW_OVERHEAD
        too_long = size > (request.max_bytes or DEFAULT_MAX_BYTES) and not reply.whole
        return too_long or reply.count > (request.batch or _MOST_ROWS) + reply.whole

    def lost(self, error: Exception | None) -> None:
        """Note that the rest of all replies is lost; `error` is why, if the connection is closed for good."""
        for reply in self._replies.values():
            reply.lost, reply.error = True, reply.error or error

    @property
    def asked(self) -> int:
        """The bytes that the replies in flight may have together."""
        return sum(min(sent.request.max_bytes or 0, DEFAULT_MAX_BYTES) for sent in self._replies)

    def oldest(self) -> tuple[SentRequest, _Reply]:
        """Return the oldest request that counts; if it was repeated, the first one of the two that is answered."""
        if self.late:
            repeated = self._replies[self._plan.in_flight[0]]
            if (late := self._replies[self.late[0]]).frames:
                self._plan.in_flight = deque(self.late)
            if late.frames or repeated.frames or repeated.lost:
                self.late = ()
                self.drop()
        oldest = self._plan.in_flight[0]
        return oldest, self._replies[oldest]

    def clear(self) -> None:
        """Forget the silence of the requests that are lost."""
        self.late, self._sending = (), 0.0

    def drop(self) -> None:
        """Forget the replies to requests that no longer count."""
        for sent in [sent for sent in self._replies if sent not in (*self._plan.in_flight, *self.late)]:
            del self._replies[sent]
            self._plan.link.in_flight -= 1
            self.dropped.append(sent)

    def close(self) -> None:
        """Forget all requests."""
        self._plan.link.in_flight -= len(self._replies)
        self._replies.clear()

    # -- the wait ---------------------------------------------------------------------------------------------------

    def wait(self, now: float) -> float:
        """Begin to wait for more of the oldest reply; return until when."""
        self._deadline = now + max(self._pause, self._timeout - self._sending)
        patience = self._timeout / 2
        if self._plan.only_end_missing:
            patience = min(patience, self._pause)
        return min(self._deadline, now + patience)

    @property
    def silent(self) -> bool:
        """Whether nothing has arrived that was not taken."""
        first, reply = self._first(), self._replies[self._plan.in_flight[0]]
        return not (reply.frames or reply.lost or first.frames)

    def may_repeat(self, until: float) -> bool:
        """Return whether the wait until then was not all of it."""
        return until < self._deadline

    def repeat(self, now: float) -> float:
        """Wait on; return until when. A loop that was blocked for that long may still have to read the reply."""
        self._deadline = max(self._deadline, now + self._pause)
        return self._deadline

    def _first(self) -> _Reply:
        return self._replies[self.late[0] if self.late else self._plan.in_flight[0]]

    def silence(self) -> RequestTimeoutError:
        if not (messages := self._first().decoder.count):
            return no_answer(self._stream, self._timeout)
        return RequestTimeoutError(
            f"stream {self._stream!r}: the answer to a direct get stopped after {counted(messages, 'message')}, with nothing more for "
            f"{self._timeout:.4g} s (if the API is imported from another account, its export needs response_type stream)"
        )


def no_answer(stream: str, timeout: float, *, connected: bool = True) -> RequestTimeoutError:
    what = "no answer to a direct get" if connected else "the connection was lost and did not come back"
    return RequestTimeoutError(f"stream {stream!r}: {what} within {timeout:.4g} s")


class RangeRead:
    """The machine of a read. All times are the caller's clock, in seconds.

    Args:
        stream: The stream's name.
        plan: Which requests answer the read, and what has to be proved.
        timeout: Seconds that may pass without an answer, or without a new row while responders lag or do not answer. After
            half of it, a request without an answer is repeated, and both replies are awaited.
        pause: Seconds, at most, between two requests while responders lag or do not answer, and to wait for the end of a
            reply whose messages have all arrived.
        allowed: The stream is known to allow direct gets, so that a first answer without a responder ends nothing.
        server_version: The connected server's version, for errors.
    """

    def __init__(
        self,
        stream: str,
        plan: Plan,
        timeout: float,
        *,
        pause: float,
        allowed: bool = False,
        server_version: str = "",
    ) -> None:
        self.state: State = READING
        self.error: Exception | None = None  # of a read that has ENDED; None if it is complete
        self._stream = stream
        self._source = f"stream {stream!r}"  # for the log
        self._plan = plan
        self._timeout = timeout
        self._pause = pause
        self.allowed: bool = allowed  # or a responder has answered
        self._flight = _Flight(stream, plan, timeout, pause, server_version)
        self.session: int = 0
        """Counts the connections of the client; set when a request is sent."""
        self._most = plan.link.most  # as of the last loss
        self._rows: Block | None = None
        self._timer: float | None = None
        self._give_up_at: float | None = None  # unless a row comes
        self._next_pause = _FIRST_PAUSE
        self._mirror = ""  # the mirror that has answered since the last row
        self._retried = False  # an interruption since the last row
        self._repeated = False  # a silent request, since the last complete reply

    def next_action(self, now: float) -> Action:
        flight, plan = self._flight, self._plan
        if flight.sending_since is not None:
            flight.sent(now)
        while True:
            if flight.dropped:
                return DropReply(flight.dropped.pop())
            # Before rows are delivered, so that the server works while the reader does.
            may_send = self.state is READING and not (flight.late and plan.in_flight)
            may_send &= self._rows is None or plan.group is None or not plan.group.lazy
            if may_send and (sent := plan.next_request()) is not None:
                log_state(_log, self._source, "request sent", request=sent.request)
                return SendRequest(sent, flight.add(sent, now))
            if self._rows is not None:
                rows, self._rows = self._rows, None
                return Deliver(rows)
            if self.state is ASKING:
                assert plan.question is not None
                return AskLeader(plan.question)
            if self.state is RESUMING:
                return AwaitConnection()
            if self.state is ENDED:
                return Done(self.error)
            if self.state is PAUSED or not self._read(now):
                if self._timer is None and self.state is PAUSED:
                    longest = _LONGEST_PAUSE if self._mirror else self._pause
                    self._timer = now + min(longest, self._next_pause)
                    self._next_pause *= 2
                elif self._timer is None:
                    self._timer = flight.wait(now)
                return Wait(self._timer)

    def receive(self, sent: SentRequest, frames: list[Frame], now: float) -> None:
        """Take frames of a reply, in order; they are decoded when the reply is the oldest."""
        self._flight.receive(sent, frames, now)

    def disconnected(self, closed: Exception | None = None) -> None:
        """Note that the connection is lost, and the rest of all replies; `closed` is the error if that is for good."""
        self._flight.lost(closed)

    def not_sent(self, sent: SentRequest, error: Exception) -> None:
        """Note that a request was not sent because the connection is lost."""
        reply = self._flight[sent]
        reply.lost, reply.unsent, reply.error = True, True, error

    def connected(self) -> None:
        self._happen(Input.CONNECTED)

    def failed(self, error: Exception) -> None:
        """Take an error of the caller's own: it could not do what the machine needs."""
        self._happen(Input.FAILED, error)

    def closed(self) -> None:
        """Note that the reader leaves: no call follows."""
        self._flight.close()
        if self.state is not ENDED:
            log_state(_log, self._source, "closed", "its reader has left", before=self.state.name)

    def leader_answered(self, found: StoredMsg | None, last_seq: int | None, now: float) -> None:
        """Take the message that the leader has, if any, and the leader's last sequence, if it was asked for."""
        plan = self._plan
        try:
            rows = plan.learn(found, last_seq)
        except JetStreamExtError as error:
            self._happen(Input.FAILED, error)
            return
        if rows is not None and rows.seqs:
            self._progress(rows)
        if plan.behind:
            self._behind(now)
        elif plan.question is not None:
            text = f"{self._source}: the leader has too many messages in a row that no request can name"
            late = RequestTimeoutError(f"{text} (asked for {self._timeout:.4g} s)")
            self._happen(Input.UNPROVED, late, give_up=self._patience_ends(now))
        elif plan.done:
            self._happen(Input.COMPLETE, why="the leader has nothing else")
        else:
            self._happen(Input.LEARNED)

    def handle_timer(self, now: float) -> None:
        if self._timer is None or now < self._timer:
            return
        if self.state is PAUSED:
            self._happen(Input.PAUSE_OVER)
            return
        flight, plan = self._flight, self._plan
        if not flight.silent:
            return
        if plan.only_end_missing:
            plan.retry()
            flight.drop()
        elif flight.may_repeat(self._timer):
            self._timer = flight.repeat(now)
            self._repeat()
        else:
            self._happen(Input.INTERRUPTED, flight.silence(), give_up=True)

    def _repeat(self) -> None:
        """Ask once more for what a silent reply lacks: its server may have died. Whichever comes first then counts.

        Not for each message: an import without ``response_type: stream`` brings one for each request.
        """
        if self._repeated:
            return
        self._repeated = True
        late = tuple(self._plan.in_flight)
        self._plan.retry()
        if self._plan.done:
            self._flight.drop()
        else:
            self._flight.late = late
            log_state(_log, self._source, "request repeated", "no answer", seconds=self._timeout / 2)

    def _read(self, now: float) -> bool:
        """Take what has arrived of the oldest reply; return whether there is something new to do."""
        plan = self._plan
        if plan.question is not None:
            self._happen(Input.UNPROVED)
            return True
        if plan.done:
            self._happen(Input.COMPLETE)
            return True
        oldest, reply = self._flight.oldest()
        if reply.frames:
            frames, reply.frames = reply.frames, []
            self._timer = None
            self._decode(oldest, reply, frames, now)
            return True
        if isinstance(reply.error, ResponseError):
            self._happen(Input.REFUSED, reply.error)
        elif reply.lost:
            self._interrupt(reply, now)
        return reply.lost

    def _interrupt(self, reply: _Reply, now: float) -> None:
        """Ask for the rest once more, or give up; a request that was not sent is not yet repeated."""
        # A server that holds too much for a connection closes it, so another request for as much would cost it again.
        # If nobody has noticed a reconnection, messages that are missing in the reply are its only sign.
        lost = not reply.unsent and (reply.error is None or isinstance(reply.error, MessagesLostError))
        if lost:
            self._plan.link.lost(self._flight.asked, now, self.session)
        less, self._most = self._plan.link.most != self._most, self._plan.link.most
        text = (
            f"stream {self._stream!r}: the connection was lost twice before the direct get was answered completely; repeat the "
            "read, with a smaller max_bytes, or run fewer reads at once on this connection, if the server closes connections that "
            "read so much (max_pending)"
        )
        error = reply.error or MessagesLostError(text, expected=reply.decoder.last_seq)
        give_up = self._patience_ends(now) if reply.unsent else (self._retried or self._repeated) and not less
        self._flight.clear()
        self._plan.retry()
        asked_for_more = lost and self._plan.ask_for_less()
        self._flight.drop()
        if not self._plan.done:
            self._retried |= not (reply.unsent or asked_for_more)
            self._happen(Input.INTERRUPTED, error, give_up=give_up)

    def _decode(self, sent: SentRequest, reply: _Reply, frames: list[Frame], now: float) -> None:
        decoder, plan = reply.decoder, self._plan
        try:
            block = decoder.feed(frames)
            pending = block.pending(-1) if block.seqs else 0
            self.allowed |= bool(block.seqs)
            if plan.proved and block.seqs and block.stream != self._stream:
                self._ask_again(Input.MIRROR, now, block.stream)
                return
            rows = plan.accept(sent, block, decoder.size, pending) if block.seqs else block
            if rows.seqs:
                self._progress(rows)
            if decoder.broken is not None:
                reply.lost, reply.error = True, decoder.broken
            elif decoder.end is not None:
                self._finish(sent, reply, decoder.end, now)
        except DirectGetDisabledError as error:
            self._ask_again(Input.NO_RESPONDER, now, error=error)
        except JetStreamExtError as error:
            self._happen(Input.REFUSED, error)

    def _finish(self, sent: SentRequest, reply: _Reply, end: EndOfBatch, now: float) -> None:
        log_state(_log, self._source, "reply ended", rows=reply.decoder.count, pending=end.num_pending)
        if reply.decoder.count:
            seconds = reply.last_at - reply.first_at
            self._plan.link.adapt(reply.first, sent.wire - reply.first, reply.waited, seconds, now)
        rows = self._plan.finish(sent, end)
        self._flight.drop()
        self._repeated = False
        if rows is not None and rows.seqs:
            self._progress(rows)
        if self._plan.behind:
            self._behind(now)

    def _progress(self, rows: Block) -> None:
        self._rows = rows
        self._retried, self._mirror, self._plan.probing = False, "", False
        self._give_up_at, self._next_pause = None, _FIRST_PAUSE

    def _behind(self, now: float) -> None:
        self._ask_again(Input.BEHIND, now)

    def _ask_again(self, event: Input, now: float, mirror: str = "", error: Exception | None = None) -> None:
        """Drop what was asked, and pause before the next request, or give up."""
        self._plan.retry()
        self._flight.drop()
        self._plan.probing = bool(self._mirror)
        self._mirror = mirror or self._mirror
        give_up = self._patience_ends(now) or (error is not None and not self.allowed)
        self._happen(
            event, error or self._not_proved(), f"mirror {mirror!r} answers" if mirror else "", give_up=give_up
        )

    def _not_proved(self) -> Exception:
        stream, tried = f"stream {self._stream!r}", f"(tried for {self._timeout:.4g} s)"
        if self._mirror:
            return MirrorAnswersError(
                f"{stream}: mirror {self._mirror!r} answers direct gets under the stream's name, and no replica of the stream proved "
                f"its answer {tried}. A mirror can lack messages, so its answers prove nothing. Read with confirm=False and without "
                f"min_seq, or read the mirror by its own name (with allow_direct on), or set mirror_direct=False on it, or "
                f"connect to a server nearer to a replica",
                stream=self._stream,
                mirror=self._mirror,
            )
        return RequestTimeoutError(
            f"{stream}: no replica that answers has {self._plan.behind}, which the leader has {tried}"
        )

    def _patience_ends(self, now: float) -> bool:
        if self._give_up_at is None:
            self._give_up_at = now + self._timeout
        return now >= self._give_up_at

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
