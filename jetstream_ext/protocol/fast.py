"""A fast-ingest batch as a machine: one table of states and inputs (ADR-50, fast ingest; server API level 4).

`TABLE` says what every input does in every state, and nothing else changes the state. docs/design/fast-batch.md shows
each reply in each state.

A deadline belongs to a wait. It starts when a caller begins to wait, when a ping goes out, or when a state is entered
in which the server owes an answer; every sign of the server's life moves it.

Any client may publish to an inbox. A reply that cannot be about this batch (malformed, of another batch, about messages
that were never sent) changes nothing: a real reply that is missing is asked for again, or a deadline ends the wait.
"""

from __future__ import annotations

import copy
import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from jetstream_ext import errors
from jetstream_ext.errors import BatchError, ErrorCode, JetStreamExtError, Outcome, ServerError
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import fast_wire as wire
from jetstream_ext.protocol.api import StreamState, Target
from jetstream_ext.protocol.fast_window import Window
from jetstream_ext.protocol.fast_wire import BatchFlowError, Encoded, FastWire, Reply, UnrecognisedReply
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import check_batch_id, check_choice, check_seconds
from jetstream_ext.protocol.trace_context import TraceContext
from jetstream_ext.text import counted, get_logger, log_state, numbered, plural
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowGap, BatchMessage, EndReason, Entry, GapMode, InDoubt

_OTHERS: Final = "another publisher, or an earlier one of up to 10 s ago"
_ADVICE: Final = "give each publisher its own batch_id"
_OLDER: Final = f": the server may be older than {FAST_INGEST.since}, or the stream may have no_ack set"
KEPT_REPORTS: Final = 1000  # how many of the newest gap and error reports a batch keeps

_log: Final = get_logger("fast")


class State(enum.Enum):
    """Where a batch is: the columns of `TABLE`."""

    NEW = "new"
    # The reply to the first message decides whether anything may follow it: a server without fast ingest stores every
    # message, including pings, as a separate message.
    STARTING = "starting"
    # Messages go out as the window allows. While a caller waits, the server is pinged every `stall_ping` seconds, and
    # three times before `ack_timeout`, because the answer recovers a lost ack. An idle batch is kept alive by a ping
    # every `keepalive` seconds, because servers drop a batch after 10 s without a message.
    OPEN = "open"
    # Only in ok mode: nothing is sent until the server has answered a ping on the new connection. That ping makes it
    # report what was lost with the old one. Reports that were lost with it leave their messages in doubt.
    SUSPENDED = "suspended"
    # No ping is sent: the server forgets a batch that it has committed, and would answer with "unknown batch", with a
    # false gap, or by opening a new batch. The last message is stored by an ordinary append, and the batch ends with
    # the end-of-batch marker: servers 2.14.0 to 2.14.2 never answer a committing message that is a duplicate or fails a
    # check. A marker that the server is known not to have taken (503, 429) is sent again.
    COMMITTING = "committing"
    # The server has ended the batch, but its final ack, the only record of what is stored, is still to come.
    DRAINING = "draining"
    ENDED = "ended"


class Input(enum.Enum):
    """What can happen to a batch: the rows of `TABLE`."""

    MESSAGE = "a message is sent"
    PING = "a ping is sent"
    COMMIT = "the end-of-batch marker is sent"
    DISCARD = "the caller ends the batch without a commit"
    CONNECTION_LOST = "nats-py reconnects"
    CONNECTION_CLOSED = "the connection is closed"
    DEADLINE = "no reply from the server before the deadline"
    ACK = "an ack frame"
    ALL_ARRIVED = "the answer to a ping that follows every message, on the current connection"
    GAP = "messages did not reach the server"
    WENT_BACK = "the server received a sequence of the batch twice"
    MESSAGE_REFUSED = "an err frame: a check failed"
    MESSAGE_DROPPED = "no leader, overload, or no space; the server still has the batch"
    UNKNOWN_BATCH = "the server does not have the batch"
    BATCH_REFUSED = "the server has refused the batch"
    FINAL_ACK = "the final ack covers every message"
    SHORT_FINAL_ACK = "the final ack covers fewer messages"
    FOREIGN_ACK = "the final ack of another batch with the same id"
    ORDINARY_ACK = "the ack of a server without fast ingest"


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """How a batch ends: the reason, and the error that its callers get from then on."""

    reason: EndReason
    error: type[BatchError] | None = None
    text: str = ""
    outcome: Outcome | None = "unknown"  # None: it follows from the acks and reports


_UNKNOWN, _ABANDONED = errors.BatchOutcomeUnknownError, errors.BatchAbandonedError
# fmt: off
DONE: Final = Ending(EndReason.COMMITTED)
LEFT: Final = Ending(EndReason.DISCARDED)
LEFT_COMMIT: Final = Ending(
    EndReason.DISCARDED, _UNKNOWN, "the batch was discarded before its commit was answered; {rest}")
UNUSED: Final = Ending(EndReason.DISCONNECTED, _ABANDONED, "{cut}; nothing was sent", None)
CUT: Final = Ending(EndReason.DISCONNECTED, _ABANDONED, "{cut}; {rest}", None)
CUT_COMMIT: Final = Ending(EndReason.DISCONNECTED, _UNKNOWN, "{cut}, and the commit was not answered; {rest}")
NO_RESUME: Final = Ending(
    EndReason.DISCONNECTED, _ABANDONED,
    "the connection was lost, and the server did not answer on a new one within {wait:g} s; {rest}", None)
GONE: Final = Ending(
    EndReason.DISCONNECTED, _ABANDONED,
    "the connection was lost, and the server no longer knows the batch; {rest}", None)
NO_START: Final = Ending(
    EndReason.TIMEOUT, _UNKNOWN,
    "no answer to the first message within {wait:g} s{start}; {rest}")
SILENCE: Final = Ending(
    EndReason.TIMEOUT, _UNKNOWN,
    "the server acknowledged {acked:,} of {messages} and then nothing for {wait:g} s{silence}; {rest}")
NO_COMMIT: Final = Ending(
    EndReason.TIMEOUT, _UNKNOWN, "no answer to the commit within {wait:g} s{silence}; {rest}")
FORGOTTEN: Final = Ending(  # perhaps because it has committed the batch, and the final ack was lost
    EndReason.ERROR, _UNKNOWN, "the server no longer knows the batch; {rest}")
STOPPED: Final = Ending(
    EndReason.ERROR, _ABANDONED,
    "the server ended the batch after message {acked} of {sent}; later messages are not stored", "partial")
CLASH: Final = Ending(
    EndReason.ERROR, _ABANDONED,
    "the server ended another batch with the same batch id, of {others}; {rest}; {advice}")
CLASH_FIRST: Final = Ending(
    EndReason.ERROR, _ABANDONED,
    "the server ended another batch with the same batch id, of {others}; nothing is stored; {advice}", "not_stored")
# The errors of these depend on a reply; see `FastBatch._ending`.
REFUSED: Final = Ending(EndReason.ERROR)
SHORT: Final = Ending(EndReason.ERROR)
CAUSE: Final = Ending(EndReason.ERROR)
NO_FEATURE: Final = Ending(EndReason.ERROR)
# fmt: on


class NoChange(enum.Enum):
    """The cells of `TABLE` that change nothing."""

    IGNORE = enum.auto()
    REFUSE = enum.auto()


_Step = State | Ending | NoChange
Cell = _Step | tuple[_Step, _Step]
"""What an input does: enter a state, end the batch, or change nothing. A pair is for fail mode and for ok mode."""

NEW, STARTING, OPEN, SUSPENDED, COMMITTING, DRAINING, ENDED = State
___: Final = NoChange.IGNORE
ERR: Final = NoChange.REFUSE

TABLE: Final[dict[Input, tuple[Cell, Cell, Cell, Cell, Cell, Cell, Cell]]] = {
    #                         NEW       STARTING          OPEN              SUSPENDED  COMMITTING       DRAINING    ENDED
    Input.MESSAGE:           (STARTING, ___,              ___,              ERR,       ERR,             ERR,        ERR),
    Input.PING:              (ERR,      ___,              ___,              ERR,       ERR,             ERR,        ERR),
    Input.COMMIT:            (ERR,      COMMITTING,       COMMITTING,       ERR,       ERR,             ERR,        ERR),
    Input.DISCARD:           (LEFT,     LEFT,             LEFT,             LEFT,      LEFT_COMMIT,     LEFT,       ___),
    Input.CONNECTION_LOST:   (___,      (CUT, SUSPENDED), (CUT, SUSPENDED), ___,       CUT_COMMIT,      CAUSE,      ___),
    Input.CONNECTION_CLOSED: (UNUSED,   CUT,              CUT,              CUT,       CUT_COMMIT,      CAUSE,      ___),
    Input.DEADLINE:          (___,      NO_START,         SILENCE,          NO_RESUME, NO_COMMIT,       CAUSE,      ___),
    Input.ACK:               (___,      OPEN,             ___,              ___,       ___,             ___,        ___),
    Input.ALL_ARRIVED:       (___,      ___,              ___,              OPEN,      ___,             ___,        ___),
    Input.GAP:               (___,      (DRAINING, ___),  (DRAINING, ___),  ___,       (DRAINING, ___), ___,        ___),
    Input.WENT_BACK:         (___,      DRAINING,         DRAINING,         DRAINING,  DRAINING,        ___,        ___),
    Input.MESSAGE_REFUSED:   (___,      (DRAINING, OPEN), (DRAINING, ___),  ___,       (DRAINING, ___), ___,        ___),
    Input.MESSAGE_DROPPED:   (___,      REFUSED,          (DRAINING, ___),  ___,       ___,             ___,        ___),
    Input.UNKNOWN_BATCH:     (___,      REFUSED,          REFUSED,          GONE,      FORGOTTEN,       CAUSE,      ___),
    Input.BATCH_REFUSED:     (___,      REFUSED,          REFUSED,          REFUSED,   REFUSED,         CAUSE,      ___),
    Input.FINAL_ACK:         (___,      ___,              STOPPED,          STOPPED,   DONE,            CAUSE,      ___),
    Input.SHORT_FINAL_ACK:   (___,      ___,              STOPPED,          STOPPED,   (SHORT, DONE),   CAUSE,      ___),
    Input.FOREIGN_ACK:       (___,      CLASH_FIRST,      CLASH,            CLASH,     CLASH,           CAUSE,      ___),
    Input.ORDINARY_ACK:      (___,      NO_FEATURE,       NO_FEATURE,       NO_FEATURE, NO_FEATURE,     NO_FEATURE, ___),
}  # fmt: skip
"""What happens: ``___`` changes nothing, and with ``ERR`` the call raises BatchError."""

_TABLES: Final[dict[GapMode, dict[tuple[State, Input], _Step]]] = {
    mode: {
        (state, event): cell[index] if isinstance(cell, tuple) else cell
        for event, cells in TABLE.items()
        for state, cell in zip(State, cells, strict=True)
    }
    for index, mode in enumerate((GapMode.FAIL, GapMode.OK))
}
_OWES_AN_ANSWER: Final = frozenset({STARTING, SUSPENDED, COMMITTING, DRAINING})
# Refusals after which the server still has the batch and lacks only the message that they answer.
_BATCH_LIVES: Final = {
    ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.ACCOUNT_RESOURCES_EXCEEDED,
    ErrorCode.MEMORY_EXCEEDED, ErrorCode.STORAGE_EXCEEDED,
}  # fmt: skip
_DROPPED: Final[dict[GapMode, set[ErrorCode]]] = {
    GapMode.FAIL: _BATCH_LIVES,
    # In fail mode a server without resources also refuses the ping that would bring the final ack.
    GapMode.OK: _BATCH_LIVES | {ErrorCode.INSUFFICIENT_RESOURCES},
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The batch is over; nothing more will happen to it."""

    reason: EndReason


Event = BatchFlowAck | BatchFlowGap | BatchFlowError | InDoubt | UnrecognisedReply | Ended


class FastBatch:
    """One fast-ingest batch. Times are seconds of one monotonic clock; bytes go to the connection as they are.

    The shell calls `open` once it has an inbox, listens on ``<inbox>.<batch_id>.>``, and passes everything on: replies
    to `receive`, the connection's state to `disconnected` and `reconnected`, and the time to `handle_timer`. Calls that
    send (`add`, `ping`, `commit`, …) raise BatchError and change nothing where `TABLE` has ``ERR``. The arguments are
    those of `FastPublisher`.
    """

    def __init__(
        self,
        *,
        batch_id: str,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        ack_timeout: float = 5.0,
        stall_ping: float = 1.0,
        keepalive: float = 5.0,
        max_payload: int = 1 << 20,
        inbox_size: int = 0,
    ) -> None:
        self.batch_id: str = check_batch_id(batch_id)
        self.gap: GapMode = check_choice(gap, GapMode, "gap")
        self.window: Window = Window(flow, max_outstanding_acks)
        self.ack_timeout: float = check_seconds(ack_timeout, "ack_timeout")
        self.state: State = NEW
        self.sent: int = 0  # the highest batch sequence of a message
        self.pongs: int = 0  # how many pings were answered
        self.end_reason: EndReason | None = None
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None  # of the ended batch; None after a commit or a discard
        self.cause: BatchError | None = None  # why the batch is DRAINING
        self.gaps: deque[BatchFlowGap] = deque(maxlen=KEPT_REPORTS)
        self.gap_count: int = 0
        self.errors: deque[BatchFlowError] = deque(maxlen=KEPT_REPORTS)
        self.error_count: int = 0
        self.in_doubt: deque[InDoubt] = deque(maxlen=KEPT_REPORTS)
        self.silence: str = ""  # why the server may not answer, for the error of a deadline
        self.no_jetstream: str = ""  # why perhaps no JetStream answers, for the error about a subject without a stream

        self.target: Target = Target()
        self.other: str = ""  # another stream that has answered

        self._source = f"batch {batch_id}"  # for the log
        self._table = _TABLES[self.gap]
        self._wire = FastWire(
            batch_id=batch_id, flow=flow, gap=self.gap, max_payload=max_payload, inbox_size=inbox_size
        )
        self._stall_ping = min(stall_ping, self.ack_timeout / 3)
        self._keepalive = check_seconds(keepalive, "keepalive", zero=True) or math.inf
        self._waiting_since = math.inf  # the oldest wait without a sign of life since
        self._unanswered_since = math.inf  # the oldest ping without one
        self._asked_at = self._wrote_at = self._opening_took = 0.0
        self._asks_again = False  # COMMITTING, DRAINING: the server is to be asked again
        self._connected = True
        self._cut = "the connection was lost"
        self._stream = ""  # the batch's, if it is known
        self._resumed = 0  # replies about messages up to this one may have been lost with a connection
        self._probed = False  # SUSPENDED: the server was asked on a new connection once
        self._doubtful = 0  # SUSPENDED: nothing is known from this sequence on
        self._refusal: ServerError | None = None  # of the newest ping or marker, with no other reply since

    # -- for the shell's decisions --------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many messages may be sent now, if the batch takes any."""
        return 0 if self.state is STARTING or self.state is SUSPENDED else self.window.limit - self.sent

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent now, and the batch is under way."""
        return self.state is OPEN and self.sent < self.window.limit

    @property
    def acked(self) -> int:
        return self.window.acked

    # The goals of waits; see `reached`. Each raises what ended the batch if it cannot be reached any more.

    def can_ask(self) -> bool:
        """Whether a ping or the commit can be sent now."""
        if self.state is NEW or self.state is COMMITTING or self.state is ENDED:
            self._raise()
        return self.state is OPEN

    def can_send(self) -> bool:
        return (self.state is NEW or self.can_ask()) and self.room > 0

    def started(self) -> bool:
        """Whether what was sent is on a connection on which the server knows the batch."""
        return self.state is OPEN or self.state is COMMITTING

    def committed(self) -> bool:
        return self.end_reason is EndReason.COMMITTED

    def is_settled(self, seq: int) -> bool:
        """Whether the server has dealt with everything up to `seq`.

        Servers acknowledge only every `flow` messages. For the last ones the answer to a ping is enough: the server
        sends it after it has taken everything before the ping, and after it has reported any gap.
        """
        return max(self.window.acked, self.window.arrived) >= seq

    @property
    def first_subject(self) -> str:
        return self._wire.subject.decode()

    def result(self) -> BatchAck:
        """Return the server's final ack; raise BatchError, or what ended the batch, if the server has sent no ack."""
        if self.ack is not None:
            return self.ack
        if self.state is ENDED and self.end_reason is not EndReason.DISCARDED:
            self._raise()
        if self.state is ENDED:
            text = f"it was discarded, so it has no final ack; {self._rest()}"
            raise self._error(errors.BatchClosedError, text)
        raise self._error(BatchError, "it is still open; its final ack comes with the commit or the end of its block")

    def reached(self, goal: Callable[[], bool]) -> bool:
        """Whether a wait for `goal` is over; raise BatchError if the batch has ended, other than by its commit.

        While the batch drains it is not over: the final ack, which belongs on the error, is still to come.
        """
        if self.committed():
            return True
        if self.state is ENDED:
            self._raise()
        return self.state is not DRAINING and goal()

    # -- sending --------------------------------------------------------------------------------------------------

    def open(self, inbox: str, took: float = 0.0, stream: StreamState | None = None) -> None:
        """Set the prefix of the reply subjects before the first message; raise if the batch was discarded.

        From then on a message that `stream` does not store raises SubjectElsewhere. `took` are the seconds that the shell
        needed to get that far; the wait for the first reply is shorter by them.
        """
        self._check(Input.MESSAGE)
        self._wire.open(inbox)
        self._opening_took = took
        if stream is not None:
            self._stream = stream.name
            self._wire.subjects.limit_to(stream.stores)

    def check_stream(self, subject: str, stream: str | None) -> None:
        """Take the answer to a SubjectElsewhere, as `SubjectCache.answer` does."""
        self._wire.subjects.answer(subject, stream, self._stream, f"batch {self.batch_id}", "a fast batch")

    def set_max_payload(self, max_payload: int) -> None:
        self._wire.max_payload = max_payload

    def set_max_msg_size(self, max_msg_size: int | None) -> None:
        """Set the limit of the stream, which no message exceeds only because of its trace context."""
        self._wire.max_msg_size = max_msg_size

    def encode(self, message: BatchMessage) -> Encoded:
        """As `FastWire.encode`, for `add`; the batch does not change."""
        return self._wire.encode(message)

    def add(self, message: BatchMessage | Encoded, now: float) -> bytes:
        """Return the bytes that publish `message`; it has a batch sequence from here on."""
        self._check(Input.MESSAGE)
        encoded = message if isinstance(message, Encoded) else self._wire.encode(message)
        data = self._wire.message(encoded, self.sent + 1)
        self._sent(1, now)
        return data

    def add_plain(self, subject: str, payload: bytes, now: float) -> bytes:
        """As `add`, for a message that has no headers and no options."""
        if self.state is not OPEN:
            self._check(Input.MESSAGE)
        data = self._wire.plain(subject, payload, self.sent + 1)
        self._sent(1, now)
        return data

    def add_many(
        self, entries: Iterator[Entry], now: float, trace: TraceContext | None = None
    ) -> tuple[bytes, int, int, BaseException | None]:
        """Take a block of messages from `entries`: as many as the window has room for, up to its flow and about 1 MiB.

        The server acknowledges a block while the next one is encoded. A new batch takes only one message. Returns the
        bytes, count and payload bytes of the messages, and the exception that ended them: what `entries` raises
        (``StopIteration`` at its end), or the refusal of a message. The messages before it have their sequences, the
        refused one has none.
        """
        self._check(Input.MESSAGE)
        limit = 1 if self.state is NEW else min(self.room, self.window.flow)
        data, count, size, stopped = self._wire.many(entries, limit, self.sent, trace)
        if count:
            self._sent(count, now)
        return data, count, size, stopped

    def _sent(self, count: int, now: float) -> None:
        self.sent += count
        self._wrote_at = now
        if self.state is NEW:
            self._happen(Input.MESSAGE, now)

    def ping(self, now: float) -> bytes:
        """Return the bytes that ask the server for its position."""
        self._check(Input.PING)
        self._asked_at = self._wrote_at = now
        self._unanswered_since = min(self._unanswered_since, now)
        return self._ping_command()

    def _ping_command(self) -> bytes:
        log_state(_log, self._source, "ping sent", sent=self.sent, acked=self.acked)
        return self._wire.ping(self.sent)

    def commit(self, now: float) -> bytes:
        """Return the bytes that end the batch; a last message goes before it by `add`."""
        self._happen(Input.COMMIT, now)
        self._wrote_at = now
        return self._wire.end(self.sent)

    def discard(self) -> list[Event]:
        """End the batch here; the server forgets it after its idle time. What was sent stays stored."""
        return self._happen(Input.DISCARD, 0.0)

    # -- the connection -------------------------------------------------------------------------------------------

    def disconnected(self, now: float, *, for_good: bool = False, why: str = "the connection was lost") -> list[Event]:
        """Take the loss of the connection: `for_good`, or until `reconnected`; `why` is for the error."""
        self._connected, self._cut = False, why
        return self._happen(Input.CONNECTION_CLOSED if for_good else Input.CONNECTION_LOST, now)

    def reconnected(self, now: float) -> bytes:
        """Take the new connection; return the ping that finds out whether the server has the batch.

        The shell is subscribed on the new connection, and sends its unsent bytes of the old one before the ping.
        """
        lost, self._connected = not self._connected, True
        if not lost or self.state is not SUSPENDED:
            return b""
        if not self._probed:
            self._probed = True
            self._wait(now)  # only once: a connection that comes and goes must not move the deadline every time
        self._asked_at = self._wrote_at = now
        return self._ping_command()

    def write_timed_out(self, now: float) -> list[Event]:
        """Note that the connection has written nothing of its buffer for `ack_timeout` seconds."""
        return self._happen(Input.DEADLINE, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def waiting(self, now: float) -> None:
        """Note that a caller waits from now on: for the first reply, the window, or acknowledgements."""
        if self._waiting_since == math.inf and self.state is not NEW and self.state is not ENDED:
            self._waiting_since = self._asked_at = now

    def not_waiting(self) -> None:
        if self.state is OPEN:
            self._waiting_since = math.inf

    def next_timer(self) -> float | None:
        due = min(self._deadline, self._next_ask)
        return None if due == math.inf else due

    def handle_timer(self, now: float) -> tuple[list[Event], bytes]:
        """Do what is due; return what happened, and bytes to send."""
        if now >= self._deadline:
            return self._happen(Input.DEADLINE, now), b""
        if now < self._next_ask:
            return [], b""
        if self.state is OPEN:
            return [], self.ping(now)
        self._asked_at = self._wrote_at = now
        if self.state is COMMITTING:
            self._asks_again = False
            log_state(_log, self._source, "commit sent again", self._refusal or "", sent=self.sent)
            return [], self._wire.end(self.sent)
        return [], self._ping_command()

    @property
    def _deadline(self) -> float:
        return min(self._waiting_since, self._unanswered_since) + self.ack_timeout

    @property
    def _next_ask(self) -> float:
        stalled = self._deadline < math.inf
        again = self._asked_at + self._stall_ping if stalled else math.inf
        if self.state is OPEN:
            return min(again, self._wrote_at + self._keepalive)
        asks = self._connected if self.state is SUSPENDED else self._asks_again
        return again if asks else math.inf

    def _wait(self, now: float) -> None:
        self._waiting_since = self._asked_at = now
        self._unanswered_since = math.inf

    # -- replies --------------------------------------------------------------------------------------------------

    def receive(self, frames: Iterable[Frame], now: float) -> tuple[list[Event], bytes]:
        """Take what the server sent; return what happened, and bytes to send in turn (usually none)."""
        events: list[Event] = []
        out = b""
        for frame in frames:
            if self.state is NEW or self.state is ENDED:
                break
            try:
                if other := self.target.other(frame[1][frame[2] :]):
                    self._note_other(other)
                    continue
                reply = self._decode(frame)
            except errors.ResponseError as error:
                events.append(UnrecognisedReply(error.frame))
            else:
                out += self._take(reply, now, events)
        return events, out

    def _note_other(self, other: str) -> None:
        self.other = self.target.answered_by(other)
        log_state(_log, self._source, "ignored an answer", other)

    def _decode(self, frame: Frame) -> Reply:
        """Decode a reply, or raise ResponseError if it cannot be about this batch."""
        reply = wire.decode(frame)
        said = reply.said
        if isinstance(said, UnrecognisedReply):
            raise errors.ResponseError("a reply has an unknown type", frame=said.payload)
        if isinstance(said, BatchAck):
            foreign = said.batch_id != self.batch_id
        else:
            covers = reply.seq if isinstance(said, ServerError | wire.OrdinaryAck) else said.seq
            foreign = covers > self.sent + 1  # the marker that ends the batch has a sequence too
        if foreign:
            raise errors.ResponseError("a reply is about another batch", frame=frame[1])
        return reply

    def _take(self, reply: Reply, now: float, events: list[Event]) -> bytes:
        said = reply.said
        if isinstance(said, ServerError) and reply.op in (wire.PING, wire.COMMIT_EOB):
            # A server that refuses a ping or the marker does not have the batch at present: that is no sign of life.
            self._refusal = said
        elif self.state is not DRAINING or reply.op != wire.PING:
            # The final ack answers the pings of a draining batch; other answers must not extend its wait indefinitely.
            self._refusal = None
            self._unanswered_since = math.inf
            if self._waiting_since != math.inf and not self._is_idle(reply):
                self._waiting_since = now
        match said:
            case BatchFlowAck():
                self._flow_ack(reply, said, now, events)
            case BatchFlowGap():
                self._gap(reply, said, now, events)
            case BatchFlowError():
                self._note_error(said, events, refused=True)
                events += self._happen(Input.MESSAGE_REFUSED, now, reply)
            case BatchAck() if self._is_of_another_batch(reply, said):
                if reply.op != wire.START:  # the server ended this batch with the other one
                    self.ack = said
                events += self._happen(Input.FOREIGN_ACK, now, reply)
            case BatchAck():
                self.ack = said
                count = said.batch_size or 0
                self.window.acknowledge_final(min(count, self.sent))
                events += self._happen(Input.FINAL_ACK if count >= self.sent else Input.SHORT_FINAL_ACK, now, reply)
            case ServerError():
                return self._refused(reply, said, now, events)
            case _:
                if self.state is STARTING:
                    self.window.acknowledge_final(1)  # nothing but the first message was sent, and it is stored
                events += self._happen(Input.ORDINARY_ACK, now, reply)
        return b""

    def _is_idle(self, reply: Reply) -> bool:
        """Whether a server answers that has not stored or received anything since: waits must end nevertheless.

        A stream's leader without its followers takes messages and answers pings, and acknowledges nothing. Another server
        may repeat one ack or one gap endlessly.
        """
        said, window = reply.said, self.window
        if isinstance(said, BatchFlowGap):
            return said in self.gaps
        arrived = min(reply.seq, self.sent) if reply.op == wire.PING else 0
        return isinstance(said, BatchFlowAck) and said.seq <= window.acked and arrived <= window.arrived

    def _is_of_another_batch(self, reply: Reply, ack: BatchAck) -> bool:
        """Whether a final ack counts messages that this batch cannot have had on the server.

        A message ends its own batch only because messages before it are missing, so the first one cannot. But if the stream
        has replicas, the marker arrives before the messages are stored, and the last one that is stored is answered.
        """
        own = self.sent
        if reply.op in (wire.START, wire.APPEND):
            if self.state is not COMMITTING:
                own = reply.seq - 1
            elif self.gap is GapMode.FAIL:  # otherwise lost messages at the end are counted
                own = reply.seq
        return self.state is STARTING or (ack.batch_size or 0) > own

    def _flow_ack(self, reply: Reply, ack: BatchFlowAck, now: float, events: list[Event]) -> None:
        if reply.op == wire.START and self.state is not STARTING and self.target.elsewhere and not self.other:
            self._note_other("another stream")  # message 1 is acknowledged once by each stream
        events += self._happen(Input.ACK, now, reply)
        flow = self.window.flow
        if self.window.acknowledge(ack, self.sent, pong=reply.op == wire.PING):
            events.append(ack)
        if self.window.flow != flow:
            log_state(_log, self._source, "flow changed", flow=self.window.flow, before=flow, acked=self.acked)
        if reply.op != wire.PING:
            return
        seq = min(reply.seq, self.sent)
        full = self.gap is GapMode.OK and self.room <= 0
        self.window.prove(seq, now, self._stall_ping if full else math.inf, self._resumed)
        self.pongs += 1
        if self._connected and seq >= self.sent:
            events += self._happen(Input.ALL_ARRIVED, now, reply)

    def _gap(self, reply: Reply, gap: BatchFlowGap, now: float, events: list[Event]) -> None:
        if gap.first_lost <= 1 and reply.op == wire.PING:
            # The first message opens the batch, so a batch never lacks it: servers before 2.15 open a batch for a ping
            # after message 1 when they no longer have it.
            events += self._happen(Input.UNKNOWN_BATCH, now, reply)
        elif self.state is DRAINING or gap in self.gaps:
            pass  # the batch has ended, or the report came twice
        elif gap.seq <= gap.first_lost:
            events += self._happen(Input.WENT_BACK, now, reply)
        else:
            self.gaps.append(gap)
            self.gap_count += 1
            events.append(gap)
            log_state(_log, self._source, "gap", first_lost=gap.first_lost, last_lost=gap.last_lost)
            events += self._happen(Input.GAP, now, reply)

    def _refused(self, reply: Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        code = error.err_code
        if code == ErrorCode.FAST_UNKNOWN_BATCH:
            events += self._happen(Input.UNKNOWN_BATCH, now, reply)
        elif code is not None and code not in _DROPPED[self.gap]:
            events += self._happen(Input.BATCH_REFUSED, now, reply)
        elif reply.op == wire.COMMIT_EOB:
            self._asks_again = True  # the marker was not taken: the batch is as it was
        elif reply.op != wire.PING:  # a refused ping is repeated until the deadline
            return self._dropped(reply, error, now, events)
        return b""

    def _dropped(self, reply: Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        before = self.state
        ended = self._happen(Input.MESSAGE_DROPPED, now, reply)
        if not ended:
            # A message that is too large was refused for good. Any other stays in the window, which closes while the
            # server takes no messages.
            report = BatchFlowError(reply.seq, error)
            self._note_error(report, events, refused=error.err_code == ErrorCode.MESSAGE_TOO_LARGE)
        events += ended
        if self.state is before or self.state is not DRAINING:
            return b""
        # The server ends the batch as soon as it sees what follows the hole. A ping makes it see that now.
        self._asks_again = True
        self._wrote_at = now
        return self._ping_command()

    def _note_error(self, report: BatchFlowError, events: list[Event], *, refused: bool) -> None:
        if refused:
            self.window.refuse(report.seq, self.sent)
        self.errors.append(report)
        self.error_count += 1
        events.append(report)
        log_state(_log, self._source, "message refused", report.error, seq=report.seq)

    # -- changes of state -----------------------------------------------------------------------------------------

    def _check(self, call: Input) -> None:
        if self._table[self.state, call] is ERR:
            self._raise()

    def _happen(self, event: Input, now: float, reply: Reply | None = None) -> list[Event]:
        cell = self._table[self.state, event]
        if cell is ERR:
            self._raise()
        if isinstance(cell, NoChange):
            return []
        old, events = self.state, list[Event]()
        if isinstance(cell, Ending):
            self.end_reason, self.error = self._ending(cell, reply)
            if isinstance(self.error, BatchError):
                self.error.sent, self.error.acked, self.error.ack = self.sent, self.acked, self.ack
            events.append(Ended(self.end_reason))
            new = ENDED
        else:
            new = cell
        if old is SUSPENDED:
            events = self._doubts(new) + events
            self._resumed = self.sent
        elif new is SUSPENDED:
            self._doubtful, self._probed = self.acked + 1, False
        if new is DRAINING:
            assert reply is not None
            self.cause = self._loss(reply)
        self.state = new
        self._asks_again = False
        self._waiting_since = self._unanswered_since = math.inf
        if new in _OWES_AN_ANSWER:
            self._wait(now)
        if new is STARTING:
            self._waiting_since -= self._opening_took
        log_state(
            _log, self._source, f"{old.name} -> {new.name}", event.value,
            sent=self.sent, acked=self.acked,
            end_reason=self.end_reason and self.end_reason.value, error=self.error or self.cause,
        )  # fmt: skip
        return events

    def _doubts(self, new: State) -> list[Event]:
        """Return the messages in doubt after SUSPENDED; those that the ping proved lost are not in doubt."""
        last = self.gaps[-1] if self.gaps and new is OPEN else None
        tail = self.sent + 1
        if last is not None and last.seq > self.sent and last.first_lost >= self._doubtful:
            tail = last.first_lost
        if self._doubtful >= tail:
            return []
        doubt = InDoubt(self._doubtful, tail - 1)
        self.in_doubt.append(doubt)
        log_state(_log, self._source, "messages in doubt", first=self._doubtful, last=tail - 1)
        return [doubt]

    # -- errors ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._table[self.state, Input.MESSAGE] is ERR and self.state is not SUSPENDED:
            self._raise()

    def _raise(self) -> NoReturn:
        """Raise why the batch takes no message, ping or commit in its state."""
        failure = self.cause if self.state is DRAINING else self.error
        if failure is not None:
            raise copy.copy(failure) from failure.__cause__  # one object raised twice would chain its tracebacks
        if self.state is NEW:
            raise self._error(errors.EmptyBatchError, "the batch has no messages; add one before flush() or a commit")
        if self.state is SUSPENDED:
            text = (
                "the connection was lost; the batch takes no messages until the server has answered after the reconnect"
            )
            raise self._error(errors.BatchClosedError, text, "unknown")
        ended = f"has ended ({self.end_reason.value})" if self.end_reason else "is being committed"
        raise errors.BatchClosedError(f"batch {self.batch_id} {ended}", **self._facts(None))

    def _facts(self, outcome: Outcome | None) -> dict[str, Any]:
        """Return the fields of a `BatchError`; without an outcome, the acks and reports decide it."""
        if outcome is None and not self.sent:
            outcome = "not_stored"
        elif outcome is None and self.acked < self.sent:
            outcome = "unknown" if self.ack is None else "partial"
        elif outcome is None:
            outcome = "partial" if self.gap_count or self.error_count or self.in_doubt else "stored"
        return {
            "batch_id": self.batch_id, "sent": self.sent, "acked": self.acked, "outcome": outcome, "ack": self.ack,
        }  # fmt: skip

    def _ending(self, ending: Ending, reply: Reply | None) -> tuple[EndReason, JetStreamExtError | None]:
        error: JetStreamExtError | None = None
        if ending is CAUSE:
            error = self.cause
        elif ending is SHORT:
            assert self.ack is not None
            error = self._lost((self.ack.batch_size or 0) + 1, self.sent)
        elif ending is REFUSED:
            assert reply is not None
            error = self._refused_batch(reply)
        elif ending is NO_FEATURE:
            assert reply is not None
            error = FAST_INGEST.unsupported(detail=f"message {reply.seq} is stored, as a separate message")
        elif ending.error is not None:
            text = ending.text.format(
                acked=self.acked, sent=self.sent, messages=counted(self.sent, "message"), wait=self.ack_timeout,
                cut=self._cut, silence=self.silence, start=self.silence or _OLDER, others=_OTHERS, advice=_ADVICE, rest=self._rest(),
            )  # fmt: skip
            refusal = self._refusal if ending.reason is EndReason.TIMEOUT else None
            if refusal is not None:
                text += f"; the last error of the server: {refusal.description}"
            error = self._error(ending.error, text, ending.outcome)
            error.__cause__ = refusal
        return EndReason.GAP if isinstance(error, errors.BatchGapError) else ending.reason, error

    def _rest(self) -> str:
        """Return which messages may be stored besides those that are acknowledged."""
        if self.sent == self.acked:
            return "every message was acknowledged" if self.sent else "nothing was sent"
        messages, are = numbered(self.acked + 1, self.sent), plural(self.sent - self.acked, "is", "are")
        return f"{messages} {are} not acknowledged and may be stored"

    def _loss(self, reply: Reply) -> BatchError:
        """Return the error of a batch that the server ends because of `reply`."""
        said = reply.said
        if isinstance(said, BatchFlowError):
            return self._refused_message(said.error, said.seq, "partial")
        if isinstance(said, ServerError):
            return self._refused_message(said, reply.seq, "partial")
        assert isinstance(said, BatchFlowGap)
        if said.seq > said.first_lost:
            return self._lost(said.first_lost, said.last_lost)
        first = self.state is STARTING
        stored = "nothing is stored" if first else self._rest()
        text = (
            f"the server received message {said.seq} after message {said.first_lost - 1}, because {_OTHERS}, used the"
        )
        text += f" same batch id; {stored}; {_ADVICE}"
        return self._error(_ABANDONED, text, "not_stored" if first else "unknown")

    def _lost(self, first: int, last: int) -> BatchError:
        for report in self.errors:
            if report.seq == first:  # not lost on its way: it was refused after the commit was sent
                return self._refused_message(report.error, first, "partial")
        before = f"{numbered(1, first - 1)} {plural(first - 1, 'is', 'are')} stored, later ones are not"
        lost = f"{numbered(first, last)} {plural(last - first + 1, 'was', 'were')} lost"
        text = f"{lost}; {'nothing is stored' if first == 1 else before}"
        return self._error(errors.BatchGapError, text, "partial", first_lost=first, last_lost=last)

    def _refused_batch(self, reply: Reply) -> BatchError:
        first = self.state is STARTING or (reply.seq == 1 and reply.op == wire.START)
        error = reply.said
        if not isinstance(error, ServerError):  # a gap of message 1, which only another batch can have
            error = errors.server_error(code=errors.Status.INVALID_REQUEST, err_code=ErrorCode.FAST_UNKNOWN_BATCH)
        if first and errors.reached_no_stream(error):
            text = f"no stream stores subject {self.first_subject!r}, or the stream has no leader{self.no_jetstream}"
            return self._error(errors.NoStreamError, f"{text}; nothing is stored", "not_stored")
        if doubt := self.target.doubt(error.err_code):
            text = f"message {reply.seq} was refused: {error.description}; {self._rest()}; {doubt}"
            return errors.batch_refusal(error, f"batch {self.batch_id}: {text}", **self._facts("unknown"))
        return self._refused_message(error, reply.seq, "not_stored" if first else "unknown")

    def _refused_message(self, error: ServerError, seq: int, outcome: Outcome) -> BatchError:
        stored = self._rest()
        if self.other:  # whose acks and refusals these are is not known
            stored, outcome = "it is not known which messages are stored", "unknown"
        elif outcome == "not_stored" or (outcome == "partial" and seq == 1):
            stored = "nothing is stored"
        elif outcome == "partial":
            stored = "neither it nor any later message is stored; messages up to the error's `acked` are stored"
        text = f"message {seq} was refused: {error.description}; {stored}"
        stream, subject = error.stream or self._stream, self.first_subject
        if error.err_code == ErrorCode.FAST_DISABLED:
            how = advice.enable_stream(stream, "batched", subject=subject)
            where = f"stream {stream!r}, which stores" if stream else "the stream of"
            text = f"fast ingest is disabled on {where} subject {subject!r}; {stored}; {how}"
        elif error.err_code == ErrorCode.FAST_UNKNOWN_BATCH:
            text = f"the server no longer has the batch; {stored}"
        text += advice.after_refusal(error.err_code, stream, subject, self._wire.expected_streams) + self._and_other
        return errors.batch_refusal(error, f"batch {self.batch_id}: {text}", **self._facts(outcome))

    def _error(self, kind: type[BatchError], text: str, outcome: Outcome | None = None, **fields: Any) -> BatchError:
        return kind(f"batch {self.batch_id}: {text}{self._and_other}", **self._facts(outcome), **fields)

    @property
    def _and_other(self) -> str:
        return f"; {self.other}" if self.other else ""
