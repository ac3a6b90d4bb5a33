"""A fast-ingest batch as a machine: one table of states and inputs (ADR-50, fast ingest; server API level 4).

`TABLE` says what every input does in every state, and nothing else changes the state. docs/design/fast-batch.md shows
each reply in each state.

The server owes an answer from when a caller begins to wait, a ping goes out, or a state is entered that it has to end;
`timeout` seconds later the batch ends, unless there was a sign of the server's life. Meanwhile it is asked again and again.

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
from jetstream_ext.protocol.api import Server
from jetstream_ext.protocol.fast_window import Window
from jetstream_ext.protocol.fast_wire import BatchFlowError, Encoded, FastWire, Reply, UnrecognisedReply
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import check_choice, check_seconds
from jetstream_ext.text import counted, get_logger, log_state, numbered, plural
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowGap, BatchMessage, EndReason, Entry, GapMode, InDoubt

_OLDER: Final = f": the server may be older than {FAST_INGEST.since}, or the stream may have no_ack set"
_ASK_EVERY: Final = 1.0  # seconds between two pings while the server owes an answer
KEPT_REPORTS: Final = 1000  # how many of the newest gap and error reports a batch keeps

_log: Final = get_logger("fast")


class State(enum.Enum):
    """Where a batch is: the columns of `TABLE`."""

    NEW = "new"
    # The reply to the first message decides whether anything may follow it: a server without fast ingest stores every
    # message, including pings, as a separate message.
    STARTING = "starting"
    # Messages go out as the window allows. While a caller waits, the server is pinged every `stall_ping` seconds, and
    # three times before `timeout`, because the answer recovers a lost ack. An idle batch is kept alive by a ping
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
    MESSAGE_REFUSED = "an err frame: a check failed"
    MESSAGE_DROPPED = "no leader, overload, no space, or another stream's; the server may still have the batch"
    UNKNOWN_BATCH = "the server does not have the batch"
    BATCH_REFUSED = "the server has refused the batch"
    FINAL_ACK = "the final ack covers every message"
    SHORT_FINAL_ACK = "the final ack covers fewer messages"
    ORDINARY_ACK = "the ack of a server without fast ingest"


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """How a batch ends: the reason, and the error that its callers get from then on."""

    reason: EndReason
    error: type[BatchError] | None = None
    text: str = ""
    outcome: Outcome | None = "unknown"  # None: it follows from the acks and reports


_UNKNOWN, _ABANDONED = errors.BatchOutcomeUnknownError, errors.BatchAbandonedError
DONE: Final = Ending(EndReason.COMMITTED)
LEFT: Final = Ending(EndReason.DISCARDED)
CUT: Final = Ending(EndReason.DISCONNECTED, _ABANDONED, "{cut}", None)
CUT_COMMIT: Final = Ending(EndReason.DISCONNECTED, _UNKNOWN, "{cut}, and the commit was not answered")
NO_RESUME: Final = Ending(
    EndReason.DISCONNECTED,
    _ABANDONED,
    "the connection was lost, and the server did not answer on a new one within {wait:g} s",
    None,
)
GONE: Final = Ending(
    EndReason.DISCONNECTED, _ABANDONED, "the connection was lost, and the server no longer knows the batch", None
)
NO_START: Final = Ending(EndReason.TIMEOUT, _UNKNOWN, "no answer to the first message{start}")
SILENCE: Final = Ending(
    EndReason.TIMEOUT,
    _UNKNOWN,
    "the server acknowledged {acked:,} of {messages} and then nothing for {wait:g} s{silence}",
)
NO_COMMIT: Final = Ending(EndReason.TIMEOUT, _UNKNOWN, "no answer to the commit within {wait:g} s{silence}")
# Perhaps because it has committed the batch, and the final ack was lost.
FORGOTTEN: Final = Ending(EndReason.ERROR, _UNKNOWN, "the server no longer knows the batch")
STOPPED: Final = Ending(
    EndReason.ERROR, _ABANDONED, "the server ended the batch after message {acked} of {sent}", "partial"
)
# The errors of these depend on a reply; see `FastBatch._failure`.
REFUSED: Final = Ending(EndReason.ERROR)
SHORT: Final = Ending(EndReason.ERROR)
CAUSE: Final = Ending(EndReason.ERROR)
NO_FEATURE: Final = Ending(EndReason.ERROR)


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
    Input.DISCARD:           (LEFT,     LEFT,             LEFT,             LEFT,      LEFT,            LEFT,       ___),
    Input.CONNECTION_LOST:   (___,      (CUT, SUSPENDED), (CUT, SUSPENDED), ___,       CUT_COMMIT,      CAUSE,      ___),
    Input.CONNECTION_CLOSED: (CUT,      CUT,              CUT,              CUT,       CUT_COMMIT,      CAUSE,      ___),
    Input.DEADLINE:          (___,      NO_START,         SILENCE,          NO_RESUME, NO_COMMIT,       CAUSE,      ___),
    Input.ACK:               (___,      OPEN,             ___,              ___,       ___,             ___,        ___),
    Input.ALL_ARRIVED:       (___,      ___,              ___,              OPEN,      ___,             ___,        ___),
    Input.GAP:               (___,      (DRAINING, ___),  (DRAINING, ___),  ___,       (DRAINING, ___), ___,        ___),
    Input.MESSAGE_REFUSED:   (___,      (DRAINING, OPEN), (DRAINING, ___),  ___,       (DRAINING, ___), ___,        ___),
    Input.MESSAGE_DROPPED:   (___,      REFUSED,          (DRAINING, ___),  ___,       ___,             ___,        ___),
    Input.UNKNOWN_BATCH:     (___,      REFUSED,          REFUSED,          GONE,      FORGOTTEN,       CAUSE,      ___),
    Input.BATCH_REFUSED:     (___,      REFUSED,          REFUSED,          REFUSED,   REFUSED,         CAUSE,      ___),
    Input.FINAL_ACK:         (___,      ___,              STOPPED,          STOPPED,   DONE,            CAUSE,      ___),
    Input.SHORT_FINAL_ACK:   (___,      ___,              STOPPED,          STOPPED,   (SHORT, DONE),   CAUSE,      ___),
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
_LAST_REPLIES: Final = frozenset({Input.FINAL_ACK, Input.SHORT_FINAL_ACK, Input.ORDINARY_ACK})
_OWES_AN_ANSWER: Final = frozenset({STARTING, SUSPENDED, COMMITTING, DRAINING})
# Refusals after which the server may still have the batch and lack only the message that they answer. Another stream, which
# stores that message's subject, does not know the batch.
_BATCH_LIVES: Final = {
    ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.ACCOUNT_RESOURCES_EXCEEDED,
    ErrorCode.MEMORY_EXCEEDED, ErrorCode.STORAGE_EXCEEDED, ErrorCode.FAST_UNKNOWN_BATCH,
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


class Reports:
    """What the server reported of single messages; the newest are kept, and all are counted."""

    def __init__(self) -> None:
        self.gaps: deque[BatchFlowGap] = deque(maxlen=KEPT_REPORTS)
        self.gap_count: int = 0
        self.errors: deque[BatchFlowError] = deque(maxlen=KEPT_REPORTS)
        self.error_count: int = 0
        self.in_doubt: deque[InDoubt] = deque(maxlen=KEPT_REPORTS)
        self.unknown_from: int = 0  # SUSPENDED: nothing is known from this sequence on
        self.resumed_at: int = 0  # reports about messages up to this one may have been lost with a connection

    def __bool__(self) -> bool:
        return bool(self.gap_count or self.error_count or self.in_doubt)


class Clock:
    """When the batch ends because the server is silent, and when it is asked meanwhile, in seconds of a monotonic clock."""

    def __init__(self, timeout: float, keepalive: float) -> None:
        self.timeout: float = check_seconds(timeout, "timeout")
        self._ask_every = min(_ASK_EVERY, self.timeout / 3)
        self._keepalive = check_seconds(keepalive, "keepalive", zero=True) or math.inf
        self._owed_since = math.inf  # with no sign of life since then
        self._began = self._asked_at = self._wrote_at = 0.0
        self.asked: bool = False  # and not answered
        self.awaited: bool = False  # a caller waits
        self.opening_took: float = 0.0  # seconds before the first message was sent, which count for its answer

    @property
    def deadline(self) -> float:
        return self._owed_since + self.timeout

    def expect(self, now: float, *, anew: bool = False) -> None:
        """Note that the server owes an answer from `now` on, unless it owes one already."""
        if anew or self._owed_since == math.inf:
            self._owed_since = self._asked_at = self._began = now

    def reconnected(self, now: float) -> None:
        """Wait as long again for the answer on a new connection, which may be lost as well."""
        self._owed_since = min(now, self._began + self.timeout)

    def alive(self, now: float) -> None:
        """Take a sign of life: what the server owes is on its way."""
        self._owed_since, self.asked = now, False

    def answered(self) -> None:
        """Take the answer to a ping: the server owes at most what others wait for."""
        self.asked = False

    def settled(self) -> None:
        """Note that the server owes nothing."""
        self._owed_since, self.asked = math.inf, False

    def nobody_waits(self) -> None:
        """Note that the server owes at most the answer to a ping."""
        if not self.asked:
            self._owed_since = math.inf

    def wrote(self, now: float, *, asks: bool = False) -> None:
        self._wrote_at = now
        if asks:
            self._asked_at, self.asked = now, True

    def due(self, *, asks: bool, idle: bool) -> float:
        """Return when the time is over, or a question is due while the server owes an answer, or a ping of an idle batch."""
        due = self._owed_since + self.timeout
        if asks and due < math.inf:
            due = min(due, self._asked_at + self._ask_every)
        return min(due, self._wrote_at + self._keepalive) if idle else due


class FastBatch:
    """One fast-ingest batch. Bytes go to the connection as they are.

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
        timeout: float = 5.0,
        keepalive: float = 5.0,
        max_payload: int = 1 << 20,
        inbox_size: int = 0,
        prefix: str = "",
    ) -> None:
        self.batch_id: str = batch_id
        self.gap: GapMode = check_choice(gap, GapMode, "gap")
        self.window: Window = Window(flow, max_outstanding_acks)
        self.clock: Clock = Clock(timeout, keepalive)
        self.wire: FastWire = FastWire(
            batch_id=batch_id,
            flow=flow,
            gap=self.gap,
            max_payload=max_payload,
            inbox_size=inbox_size,
            prefix=prefix,
        )
        self.reports: Reports = Reports()
        self.server: Server = Server(0, "")
        self.state: State = NEW
        self.sent: int = 0  # the highest batch sequence of a message
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None  # why the batch is DRAINING or ENDED, other than by the caller
        self.end_reason: EndReason | None = None
        self.other: str = ""  # another stream that has answered
        self._connected = True
        self._asks_again = False  # COMMITTING, DRAINING: the server is to be asked again
        self._last_words = b""
        self._cause: Reply | None = None  # why the batch is DRAINING
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
        return self.wire.subject.decode()

    def result(self) -> BatchAck:
        """Return the server's final ack; raise BatchError, or what ended the batch, if the server has sent no ack."""
        if self.ack is not None:
            return self.ack
        if self.state is not ENDED:
            what = "it is still open; its final ack comes with the commit or the end of its block"
            raise BatchError(f"batch {self.batch_id}: {what}", **self._facts(None))
        if self.error is None:
            raise self._error(errors.BatchClosedError, "it was discarded, so it has no final ack")
        return self._raise()

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

    def open(self, inbox: str, server: Server | None = None, took: float = 0.0) -> None:
        """Set the prefix of the reply subjects before the first message; raise if the batch was discarded.

        `took` are the seconds that the shell needed to get that far; the wait for the first reply is shorter by them.
        """
        self._check(Input.MESSAGE)
        self.wire.open(inbox)
        self.clock.opening_took = took
        self.server = server or self.server

    def add(self, message: BatchMessage | Encoded, now: float) -> bytes:
        """Return the bytes that publish `message`; it has a batch sequence from here on."""
        self._check(Input.MESSAGE)
        encoded = message if isinstance(message, Encoded) else self.wire.encode(message)
        data = self.wire.message(encoded, self.sent + 1)
        self._sent(1, now)
        return data

    def add_plain(self, subject: str, payload: bytes, now: float) -> bytes:
        """As `add`, for a message that has no headers and no options."""
        if self.state is not OPEN:
            self._check(Input.MESSAGE)
        data = self.wire.plain(subject, payload, self.sent + 1)
        self._sent(1, now)
        return data

    def add_many(self, entries: Iterator[Entry], now: float) -> tuple[bytes, int, int, BaseException | None]:
        """Take a block of messages from `entries`: as many as the window has room for, up to its flow and about 1 MiB.

        The server acknowledges a block while the next one is encoded. A new batch takes only one message. Returns the
        bytes, count and payload bytes of the messages, and the exception that ended them: what `entries` raises
        (``StopIteration`` at its end), or the refusal of a message. The messages before it have their sequences, the
        refused one has none.
        """
        self._check(Input.MESSAGE)
        limit = 1 if self.state is NEW else min(self.room, self.window.flow)
        data, count, size, stopped = self.wire.many(entries, limit, self.sent)
        if count:
            self._sent(count, now)
        return data, count, size, stopped

    def _sent(self, count: int, now: float) -> None:
        self.sent += count
        self.clock.wrote(now)
        if self.state is NEW:
            self._happen(Input.MESSAGE, now)

    def ping(self, now: float) -> bytes:
        """Return the bytes that ask the server for its position."""
        self._check(Input.PING)
        self.clock.expect(now)
        return self._ask(now)

    def _ask(self, now: float) -> bytes:
        self.clock.wrote(now, asks=True)
        self._log("ping sent")
        return self.wire.ping(self.sent)

    def commit(self, now: float) -> bytes:
        """Return the bytes that end the batch; a last message goes before it by `add`."""
        self._happen(Input.COMMIT, now)
        self.clock.wrote(now)
        return self.wire.end(self.sent)

    def discard(self) -> tuple[list[Event], bytes]:
        """End the batch; return what happened, and bytes that end it on the server. What was sent stays stored."""
        return self._happen(Input.DISCARD, 0.0), self._farewell()

    def _farewell(self) -> bytes:
        """Return, once, what ends a batch on the server that has ended only here; the server would count it for 10 s."""
        out, self._last_words = self._last_words, b""
        return out

    # -- the connection -------------------------------------------------------------------------------------------

    def disconnected(self, now: float, *, for_good: bool = False, why: str = "the connection was lost") -> list[Event]:
        """Take the loss of the connection: `for_good`, or until `reconnected`; `why` is for the error."""
        self._connected = False
        return self._happen(Input.CONNECTION_CLOSED if for_good else Input.CONNECTION_LOST, now, why=why)

    def reconnected(self, now: float) -> bytes:
        """Take the new connection; return the ping that finds out whether the server has the batch.

        The shell is subscribed on the new connection, and sends its unsent bytes of the old one before the ping.
        """
        lost, self._connected = not self._connected, True
        if not lost or self.state is not SUSPENDED:
            return b""
        self.clock.reconnected(now)
        return self._ask(now)

    def give_up(self, now: float, why: str = "") -> list[Event]:
        """Note that no answer can come: the write buffer is full for `timeout` seconds, or the message was refused."""
        return self._happen(Input.DEADLINE, now, why=why)

    # -- time -----------------------------------------------------------------------------------------------------

    def waiting(self, now: float) -> None:
        """Note that a caller waits from now on: for the first reply, the window, or acknowledgements."""
        self.clock.awaited = True
        if self.state is not NEW and self.state is not ENDED:
            self.clock.expect(now)

    def not_waiting(self) -> None:
        self.clock.awaited = False
        if self.state is OPEN:
            self.clock.nobody_waits()

    def next_timer(self) -> float | None:
        is_open = self.state is OPEN
        asks = is_open or (self._connected if self.state is SUSPENDED else self._asks_again)
        due = self.clock.due(asks=asks, idle=is_open)
        return None if due == math.inf else due

    def handle_timer(self, now: float, silence: str = "") -> tuple[list[Event], bytes]:
        """Do what is due; return what happened, and bytes to send. `silence` is why the server may not answer."""
        if now >= self.clock.deadline:
            return self._happen(Input.DEADLINE, now, why=silence), self._farewell()
        if (due := self.next_timer()) is None or now < due:
            return [], b""
        if self.state is OPEN:
            return [], self.ping(now)
        if self.state is not COMMITTING:
            return [], self._ask(now)
        self._asks_again = False
        self.clock.wrote(now, asks=True)
        self._log("commit sent again", self._refusal or "")
        return [], self.wire.end(self.sent)

    # -- replies --------------------------------------------------------------------------------------------------

    def receive(self, frames: Iterable[Frame], now: float) -> tuple[list[Event], bytes]:
        """Take what the server sent; return what happened, and bytes to send in turn (usually none)."""
        events: list[Event] = []
        out, window, reports = b"", self.window, self.reports
        for frame in frames:
            if self.state is NEW or self.state is ENDED:
                break
            try:
                if self.server.target.domain is not None and (other := self.server.target.other(frame[1][frame[2] :])):
                    self._note_other(other)
                    continue
                reply = self._decode(frame)
            except errors.ResponseError as error:
                events.append(UnrecognisedReply(error.frame))
            else:
                state, known = self.state, (window.acked, window.arrived, reports.gap_count, reports.error_count)
                out += self._take(reply, now, events)
                if self.state is state:
                    found = window.acked, window.arrived, reports.gap_count, reports.error_count
                    self._hear(reply, now, progress=found != known)
        return events, out + self._farewell() if self.state is ENDED else out

    def _note_other(self, other: str) -> None:
        self.other = self.server.target.answered_by(other)
        self._log("ignored an answer", other)

    def _decode(self, frame: Frame) -> Reply:
        """Decode a reply, or raise ResponseError if it cannot be about this batch."""
        reply = wire.decode(frame)
        said = reply.said
        if isinstance(said, UnrecognisedReply):
            raise errors.ResponseError("a reply has an unknown type", frame=said.payload)
        if isinstance(said, BatchAck):
            covers = said.batch_size or 0
        else:
            covers = reply.seq if isinstance(said, ServerError | wire.OrdinaryAck) else said.seq
        # The marker that ends the batch has a sequence too.
        if covers > self.sent + 1 or (isinstance(said, BatchAck) and said.batch_id != self.batch_id):
            raise errors.ResponseError("a reply is about another batch", frame=frame[1])
        return reply

    def _hear(self, reply: Reply, now: float, *, progress: bool) -> None:
        """Take a reply that has not changed the state: only progress is a sign of life, so that every wait ends.

        A stream's leader without its followers takes messages and answers pings, and acknowledges nothing.
        """
        if isinstance(reply.said, ServerError):
            if reply.op in (wire.PING, wire.COMMIT_EOB):
                self._refusal = reply.said  # the server does not have the batch at present
            return
        self._refusal = None
        if not self.clock.awaited and self.state not in _OWES_AN_ANSWER:
            self.clock.settled()
        elif progress:
            self.clock.alive(now)
        elif reply.op == wire.PING:
            self.clock.answered()

    def _take(self, reply: Reply, now: float, events: list[Event]) -> bytes:
        match said := reply.said:
            case BatchFlowAck():
                self._flow_ack(reply, said, now, events)
            case BatchFlowGap():
                self._gap(reply, said, now, events)
            case BatchFlowError():
                self._note_error(said, events, refused=True)
                events += self._happen(Input.MESSAGE_REFUSED, now, reply)
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

    def _flow_ack(self, reply: Reply, ack: BatchFlowAck, now: float, events: list[Event]) -> None:
        if (
            ack.seq == 0
            and reply.op == wire.START
            and self.state is not STARTING
            and self.server.target.elsewhere
            and not self.other
        ):
            self._note_other("another stream")  # each stream opens a batch once
        events += self._happen(Input.ACK, now, reply)
        flow, is_pong = self.window.flow, reply.op == wire.PING
        before = self.window.acked
        if self.window.acknowledge(ack, self.sent, pong=is_pong):
            events.append(ack)
        if self.window.flow != flow:
            self._log("flow changed", flow=self.window.flow, before=flow)
        if is_pong:
            self.window.pongs += 1
            self.window.arrived = max(self.window.arrived, min(reply.seq, self.sent))
            if (
                self.state is OPEN and self.acked == before
            ):  # what was sent before a reconnect was refused, if it is missing
                self.window.settle(min(reply.seq, self.reports.resumed_at))
            if self._connected and reply.seq >= self.sent:
                events += self._happen(Input.ALL_ARRIVED, now, reply)

    def _gap(self, reply: Reply, gap: BatchFlowGap, now: float, events: list[Event]) -> None:
        reports = self.reports
        if gap.first_lost <= 1 and reply.op == wire.PING:
            # The first message opens the batch, so a batch never lacks it: servers before 2.15 open a batch for a ping
            # after message 1 when they no longer have it.
            events += self._happen(Input.UNKNOWN_BATCH, now, reply)
        elif self.state is not DRAINING and gap not in reports.gaps and gap.seq > gap.first_lost:  # it is new
            reports.gaps.append(gap)
            reports.gap_count += 1
            events.append(gap)
            self._log("gap", first_lost=gap.first_lost, last_lost=gap.last_lost)
            events += self._happen(Input.GAP, now, reply)

    def _refused(self, reply: Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        code = error.err_code
        if code == ErrorCode.FAST_UNKNOWN_BATCH and reply.op != wire.APPEND:
            events += self._happen(Input.UNKNOWN_BATCH, now, reply)
        elif code is not None and code not in _DROPPED[self.gap]:
            events += self._happen(Input.BATCH_REFUSED, now, reply)
        elif reply.op == wire.COMMIT_EOB:
            self._asks_again = True  # the marker was not taken: the batch is as it was
        elif reply.op != wire.PING:  # a refused ping is repeated until the deadline
            before = self.state
            ended = self._happen(Input.MESSAGE_DROPPED, now, reply)
            if not ended and before is not DRAINING:
                # A message that is too large was refused for good. Any other stays in the window, which closes while the
                # server takes no messages.
                self._note_error(BatchFlowError(reply.seq, error), events, refused=code == ErrorCode.MESSAGE_TOO_LARGE)
            events += ended
            if self.state is DRAINING and before is not DRAINING:
                # The server ends the batch as soon as it sees what follows the hole. A ping makes it see that now.
                self._asks_again = True
                return self._ask(now)
            if self.state is OPEN and code == ErrorCode.FAST_UNKNOWN_BATCH and not self.clock.asked:
                return self.ping(now)  # is it the answer of another stream?
        return b""

    def _note_error(self, report: BatchFlowError, events: list[Event], *, refused: bool) -> None:
        if refused:
            self.window.refuse(report.seq, self.sent)
        self.reports.errors.append(report)
        self.reports.error_count += 1
        events.append(report)
        self._log("message refused", report.error, seq=report.seq)

    # -- changes of state -----------------------------------------------------------------------------------------

    def _check(self, call: Input) -> None:
        if _TABLES[self.gap][self.state, call] is ERR:
            self._raise()

    def check_open(self) -> None:
        if _TABLES[self.gap][self.state, Input.MESSAGE] is ERR and self.state is not SUSPENDED:
            self._raise()

    def _happen(self, event: Input, now: float, reply: Reply | None = None, why: str = "") -> list[Event]:
        step, old, events = _TABLES[self.gap][self.state, event], self.state, list[Event]()
        if step is ERR:
            self._raise()
        if isinstance(step, NoChange):
            return []
        if isinstance(step, Ending):
            self.error = self._failure(step, reply, why)
            is_gap = isinstance(self.error, errors.BatchGapError)
            self.end_reason = EndReason.GAP if is_gap else step.reason
            events.append(Ended(self.end_reason))
            # Only a server that is known to have fast ingest: another one stores the marker as a message.
            # The ping of a DRAINING batch makes some servers open it again.
            lives = old in (OPEN, SUSPENDED) or (old is STARTING and self.server.target.stream is not None)
            lives |= old is DRAINING and self._asks_again
            if lives and self._connected and event not in _LAST_REPLIES:
                self._last_words = self.wire.end(self.sent)
        new = ENDED if isinstance(step, Ending) else step
        if old is SUSPENDED:
            events = self._doubts(new) + events
            self.reports.resumed_at = self.sent
        elif new is SUSPENDED:
            self.reports.unknown_from = self.acked + 1
        elif new is DRAINING:
            assert reply is not None
            self._cause, self.error = reply, self._loss(reply)
        self.state = new
        self._asks_again, self._refusal = False, None
        if new in _OWES_AN_ANSWER or (self.clock.awaited and new is not ENDED):
            self.clock.expect(now - self.clock.opening_took if new is STARTING else now, anew=True)
        else:
            self.clock.settled()
        self._log(
            f"{old.name} -> {new.name}", event.value, sent=self.sent,
            end_reason=self.end_reason and self.end_reason.value, error=self.error,
        )  # fmt: skip
        return events

    def _doubts(self, new: State) -> list[Event]:
        """Return the messages in doubt after SUSPENDED; those that the ping proved lost are not in doubt."""
        gaps, tail = self.reports.gaps, self.sent + 1
        last = gaps[-1] if gaps and new is OPEN else None
        if last is not None and last.seq > self.sent and last.first_lost >= self.reports.unknown_from:
            tail = last.first_lost
        if self.reports.unknown_from >= tail:
            return []
        doubt = InDoubt(self.reports.unknown_from, tail - 1)
        self.reports.in_doubt.append(doubt)
        self._log("messages in doubt", first=self.reports.unknown_from, last=tail - 1)
        return [doubt]

    def _log(self, what: str, why: object = "", **facts: Any) -> None:
        log_state(_log, f"batch {self.batch_id}", what, why, acked=self.acked, **facts)

    # -- errors ---------------------------------------------------------------------------------------------------

    def _raise(self) -> NoReturn:
        """Raise why the batch takes no message, ping or commit in its state."""
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__  # one object raised twice would chain its tracebacks
        if self.state is NEW:
            text = "the batch has no messages; add one before flush() or a commit"
            raise errors.EmptyBatchError(f"batch {self.batch_id}: {text}", **self._facts(None))
        if self.state is SUSPENDED:
            text = (
                "the connection was lost; the batch takes no messages until the server has answered after the reconnect"
            )
            raise self._error(errors.BatchClosedError, text, "unknown")
        ended = f"has ended ({self.end_reason.value})" if self.end_reason else "is being committed"
        raise errors.BatchClosedError(f"batch {self.batch_id} {ended}", **self._facts(None))

    def _facts(self, outcome: Outcome | None) -> dict[str, Any]:
        """Return the fields of a `BatchError`; without an outcome, the acks and reports decide it."""
        if self.other and outcome != "not_stored":
            outcome = "unknown"  # whose acks and refusals these are is not known
        elif outcome is None and (not self.sent or (self.ack is not None and not self.acked)):
            outcome = "not_stored"
        elif outcome is None and self.acked < self.sent:
            outcome = "unknown" if self.ack is None else "partial"
        elif outcome is None:
            outcome = "partial" if self.reports else "stored"
        return {
            "batch_id": self.batch_id, "sent": self.sent, "acked": self.acked, "outcome": outcome, "ack": self.ack,
        }  # fmt: skip

    def _stored(self, outcome: Outcome, end: int) -> str:
        """Return what of the batch is stored; from the sequence `end` on, nothing is."""
        acked, last = self.acked, end - 1
        if not self.sent:
            return "nothing was sent"
        if outcome == "not_stored":
            return "nothing is stored"
        if self.other:
            return f"it is not known which messages are stored; {self.other}"
        text = f"{numbered(1, acked)} {plural(acked, 'is', 'are')} stored"
        if acked == self.sent:
            return "every message was acknowledged"
        if outcome != "partial" and acked < last:
            text = f"{numbered(acked + 1, last)} {plural(last - acked, 'is', 'are')} not acknowledged and may be stored"
        return text if outcome != "partial" and end > self.sent else f"{text}, later ones are not"

    def _error(
        self, kind: type[BatchError], text: str, outcome: Outcome | None = None, *, end: int = 0, **fields: Any
    ) -> BatchError:
        facts = self._facts(outcome)
        stored = self._stored(facts["outcome"], end or self.sent + 1)
        return kind(f"batch {self.batch_id}: {text}; {stored}", **facts, **fields)

    def _failure(self, ending: Ending, reply: Reply | None, why: str) -> JetStreamExtError | None:
        """Return the error of an ending, or None for one without an error."""
        if ending is NO_FEATURE:
            assert reply is not None
            return FAST_INGEST.unsupported(detail=f"message {reply.seq} is stored, as a separate message")
        if ending is SHORT:
            assert self.ack is not None
            return self._lost((self.ack.batch_size or 0) + 1, self.sent)
        if ending is CAUSE:
            assert self._cause is not None
            return self._loss(self._cause)
        if ending is REFUSED:
            assert reply is not None
            return self._refused_message(reply)
        if ending.error is None:
            return None
        text = ending.text.format(
            acked=self.acked, sent=self.sent, messages=counted(self.sent, "message"), wait=self.clock.timeout,
            cut=why, silence=why, start=why or f" within {self.clock.timeout:g} s{_OLDER}",
        )  # fmt: skip
        refusal = self._refusal if ending.reason is EndReason.TIMEOUT else None
        if refusal is not None:
            text += f"; the last error of the server: {refusal.description}"
        error = self._error(ending.error, text, ending.outcome)
        error.__cause__ = refusal
        return error

    def _loss(self, cause: Reply) -> BatchError:
        """Return the error of a batch that the server ends because of a lost or refused message."""
        said = cause.said
        return (
            self._lost(said.first_lost, said.last_lost)
            if isinstance(said, BatchFlowGap)
            else self._refused_message(cause)
        )

    def _lost(self, first: int, last: int) -> BatchError:
        for report in self.reports.errors:
            if report.seq == first:  # not lost on its way: it was refused after the commit was sent
                return self._refused_message(Reply(first, wire.APPEND, report))
        text = f"{numbered(first, last)} {plural(last - first + 1, 'was', 'were')} lost"
        return self._error(errors.BatchGapError, text, end=first, first_lost=first, last_lost=last)

    def _refused_message(self, reply: Reply) -> BatchError:
        seq, error = reply.seq, reply.said
        ends_later = isinstance(error, BatchFlowError) or self.state is DRAINING  # its acks say what is stored
        if isinstance(error, BatchFlowError):
            seq, error = error.seq, error.error
        elif not isinstance(error, ServerError):  # a gap of message 1, which only another batch can have
            error = errors.server_error(code=errors.Status.INVALID_REQUEST, err_code=ErrorCode.FAST_UNKNOWN_BATCH)
        code, is_first = error.err_code, self.state is STARTING or (seq == 1 and reply.op == wire.START)
        doubt = "" if ends_later or errors.reached_no_stream(error) else self.server.target.doubt(code)
        facts = self._facts(None if ends_later else "not_stored" if is_first and not doubt else "unknown")
        known = ends_later and code != ErrorCode.FAST_UNKNOWN_BATCH
        return advice.refused(
            error, f"message {seq}", self._stored(facts["outcome"], seq if known else self.sent + 1),
            self.first_subject, self.server.target.stream or "", self.wire.expected_streams,
            more=f"; {doubt}" if doubt else "", unreachable=self.server.no_jetstream if is_first else None, **facts,
        )  # fmt: skip
