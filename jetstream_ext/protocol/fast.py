"""A fast-ingest batch as a machine (ADR-50, the fast half; server API level 4).

::

                 send first             first reply              commit            final ack
       NEW ───────────────► STARTING ───────────────► OPEN ───────────────► COMMITTING ──────► ENDED
                                │                      │  fail mode: gap, error    │             ▲
                                │                      ├───────────► DRAINING ──────┼─────────────┤
                                └── refusal, silence ──┴── unknown batch, silence, discard ───────┘

* Every message carries a reply subject ``<inbox>.<id>.<flow>.<gap>.<seq>.<op>.$FI``. The server answers on the reply
  subject of the message that made it answer, so those tokens say which message an answer is about.
* The window: at most `flow` times `max_outstanding_acks` messages are unacknowledged, `flow` being what the server last
  set (it raises and lowers it). Acks are cumulative; one that is older than what we know changes nothing; a gap report
  never moves the window.
* DRAINING: the batch is dead on the server but its final ack, the only record of what was stored, is still to come.
* COMMITTING: a ping is never sent. The server forgets a batch it has committed, and would answer a ping with "unknown
  batch", with a gap that is none, or by opening a new batch.
* A commit stores its message by an ordinary append and ends with the end-of-batch marker: servers 2.14.0 to 2.14.2
  never answer a committing message that is a duplicate or fails a check.
"""

from __future__ import annotations

import copy
import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from jetstream_ext.errors import (
    BatchAbandonedError,
    BatchClosedError,
    BatchError,
    BatchGapError,
    BatchOutcomeUnknownError,
    EmptyBatchError,
    JetStreamExtError,
    NoStreamError,
    Outcome,
    ResponseError,
    ServerError,
    UnsupportedFeatureError,
    batch_refusal,
)
from jetstream_ext.protocol import fast_replies as replies
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.fast_replies import APPEND, COMMIT_EOB, PING, START
from jetstream_ext.protocol.frames import Frame, SubjectCache, check_size, pub
from jetstream_ext.protocol.options import check_batch_id, message_headers, payload_bytes
from jetstream_ext.types import (
    BatchAck,
    BatchFlowAck,
    BatchFlowError,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    GapMode,
)

# Error codes after which the server still has the batch: only the message they answer is missing.
_STILL_OPEN: Final = frozenset({10054, 10167})

KEPT_REPORTS: Final = 1000
"""How many of the newest gap and error reports a batch keeps."""


class State(enum.Enum):
    """Where a fast batch is; the drawing is on top of the module."""

    NEW = "new"
    STARTING = "starting"
    OPEN = "open"
    COMMITTING = "committing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Ended:
    """The batch is over; nothing more will happen to it."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Pong:
    """The ping with batch sequence ``seq`` was answered."""

    seq: int


Event = BatchFlowAck | BatchFlowGap | BatchFlowError | Pong | replies.UnknownReply | Ended
Entry = tuple[str, bytes] | tuple[str, bytes, Any] | BatchMessage
"""What the bulk road takes: ``(subject, payload)``, ``(subject, payload, headers)`` or a `BatchMessage`."""


class FastBatch:
    """One fast-ingest batch. Times are seconds of one monotonic clock; bytes go to the connection as they are.

    Args:
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``.
        inbox: The prefix of the reply subjects; the shell listens on ``<inbox>.<batch_id>.>``.
        flow: Messages per ack that are asked for, 1 to 65535 (servers give 500 at most).
        max_outstanding_acks: Acks' worth of messages in the window, 1 to 3.
        gap: What a loss does.
        max_payload: The server's limit for headers and payload together, in bytes.
        ack_timeout: Seconds without a sign of life that a wait may last.
        stall_ping: Seconds of stalling after which the server is asked where it is.
        keepalive: Seconds without traffic after which it is told that we are still here (0: never).
    """

    def __init__(
        self,
        *,
        batch_id: str,
        inbox: str,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        max_payload: int = 1 << 20,
        ack_timeout: float = 5.0,
        stall_ping: float = 1.0,
        keepalive: float = 5.0,
    ) -> None:
        self.batch_id = check_batch_id(batch_id)
        self.gap = GapMode(gap)
        self.flow = check_flow(flow)
        self.max_outstanding_acks = check_outstanding(max_outstanding_acks)
        self.ack_timeout = ack_timeout
        self.stall_ping = stall_ping
        self.keepalive = keepalive

        self.state = State.NEW
        self.sent = 0
        """The highest batch sequence handed out for a message."""
        self.acked = 0
        """The highest batch sequence the server acknowledged."""
        self.received = 0
        """The highest batch sequence that a ping proved to have arrived (or to be reported as a gap)."""
        self.pongs = 0
        """How many pings were answered."""
        self.end_reason: EndReason | None = None
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        """What an operation on the ended batch raises; None after a commit or a discard."""
        self.gaps: deque[BatchFlowGap] = deque(maxlen=KEPT_REPORTS)
        self.gap_count = 0
        self.errors: deque[BatchFlowError] = deque(maxlen=KEPT_REPORTS)
        self.error_count = 0

        self._max_payload = max_payload
        self._reply = f"{inbox}.{batch_id}.{flow}.{self.gap.value}.".encode()
        self._append_tail = b"." + APPEND + b".$FI"
        self._subjects = SubjectCache()
        self._first_subject = b""
        self._waiting_since: float | None = None  # of the newest sign of life while somebody waits
        self._pinged_at = 0.0
        self._unanswered_since: float | None = None  # the oldest ping with no sign of life since
        self._wrote_at = 0.0
        self._cause: JetStreamExtError | None = None  # why it is draining

    # -- sending ------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many messages the window still takes."""
        if self.state is State.STARTING:
            return 0
        return self.flow * self.max_outstanding_acks - (self.sent - self.acked)

    @property
    def settled(self) -> bool:
        """Whether the server has dealt with everything sent.

        Servers acknowledge every `flow` messages only, so for the last ones the answer to a ping has to do: it comes
        after everything before it was taken in, and after the report of any gap.
        """
        return max(self.acked, self.received) >= self.sent

    def add(self, message: BatchMessage, now: float) -> bytes:
        """Return the bytes that publish `message`; it has a batch sequence from here on.

        Raises:
            BatchError: The batch has ended, or its first reply is still out.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self.check_open()
        subject, header, payload = self._encode(message)
        return self._take(subject, header, payload, now)

    def add_plain(self, subject: str, payload: bytes, now: float) -> bytes:
        """As `add`, for a message that has no headers and no options."""
        if self.state is not State.OPEN or type(payload) is not bytes or len(payload) > self._max_payload:
            return self.add(BatchMessage(subject, payload), now)
        raw = self._subjects.encode(subject)
        self.sent += 1
        self._wrote_at = now
        return b"PUB %b %b%d%b %d\r\n%b\r\n" % (raw, self._reply, self.sent, self._append_tail, len(payload), payload)

    def add_many(
        self, entries: Iterator[Entry], limit: int, now: float
    ) -> tuple[bytes, int, int, BaseException | None]:
        """Take up to `limit` messages from `entries`; return their bytes, count, payload bytes, and what stopped it.

        What `entries` raises, and the refusal of a message, comes back as the last value: the messages before it are
        in the bytes and have their sequences, the refused one has none. ``StopIteration`` is the end of `entries`.
        """
        self.check_open()
        if self.state is State.NEW:
            limit = min(limit, 1)  # the first reply decides whether anything may follow
        out: list[bytes] = []
        size = 0
        stopped: BaseException | None = None
        reply, tail, known, top = self._reply, self._append_tail, self._subjects.encode, self._max_payload
        seq = self.sent
        try:
            while len(out) < limit:
                entry = next(entries)
                if seq and type(entry) is tuple and len(entry) == 2 and type(entry[1]) is bytes:
                    # Nearly every message of a bulk: PUB <subject> <reply> <size>\r\n<payload>\r\n, made in one step.
                    subject, payload = entry
                    if len(payload) <= top:
                        out.append(
                            b"PUB %b %b%d%b %d\r\n%b\r\n"
                            % (known(subject), reply, seq + 1, tail, len(payload), payload)
                        )
                        seq += 1
                        size += len(payload)
                        continue
                message = entry if isinstance(entry, BatchMessage) else BatchMessage(*entry)
                raw_subject, header, payload = self._encode(message)
                self.sent = seq
                out.append(self._take(raw_subject, header, payload, now))
                seq = self.sent
                size += len(payload)
        except BaseException as error:
            stopped = error
        if out:
            self.sent = seq
            self._wrote_at = now
        return b"".join(out), len(out), size, stopped

    def _encode(self, message: BatchMessage) -> tuple[bytes, bytes, bytes]:
        subject = self._subjects.encode(message.subject)
        pairs = message_headers(message)
        header = h.encode(pairs) if pairs else b""
        payload = payload_bytes(message.payload)
        check_size(header, payload, self._max_payload)
        return subject, header, payload

    def _take(self, subject: bytes, header: bytes, payload: bytes, now: float) -> bytes:
        self.sent += 1
        op = APPEND
        if self.state is State.NEW:
            self.state = State.STARTING
            self._first_subject = subject
            op = START
        self._wrote_at = now
        return pub(subject, self._reply_to(self.sent, op), header, payload)

    def _reply_to(self, seq: int, op: bytes) -> bytes:
        return b"%b%d.%b.$FI" % (self._reply, seq, op)

    def ping(self, now: float) -> bytes:
        """Return the bytes that ask the server where it is.

        Raises:
            EmptyBatchError: Nothing was sent yet, so there is nobody to ask.
            BatchError: The batch has ended.
        """
        self.check_open()
        if self.state is State.NEW:
            raise EmptyBatchError("a batch is known to the server only from its first message on", **self._facts())
        return self._ping(now)

    def _ping(self, now: float) -> bytes:
        self._pinged_at = self._wrote_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        return pub(self._first_subject, self._reply_to(max(1, self.sent), PING), b"", b"")

    def commit(self, now: float) -> bytes:
        """Return the bytes that end the batch; a message to store goes before it by `add`.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchError: The batch has ended.
        """
        self.check_open()
        if self.state is State.NEW:
            raise EmptyBatchError("there is nothing to commit", **self._facts())
        self.state = State.COMMITTING
        self._waiting_since = now
        self._unanswered_since = None  # the end of the batch answers for its pings
        self._wrote_at = now
        # The marker takes a sequence of its own but does not count as a message.
        return pub(self._first_subject, self._reply_to(self.sent + 1, COMMIT_EOB), b"", b"")

    def discard(self) -> list[Event]:
        """End the batch here; the server forgets it after its idle time. What was sent stays stored."""
        if self.state is State.ENDED:
            return []
        error = None
        if self.state is State.COMMITTING:
            error = BatchOutcomeUnknownError(
                f"batch {self.batch_id}: given up while the commit was on its way", **self._facts("unknown")
            )
        return self._end(EndReason.DISCARDED, error)

    def disconnected(self) -> list[Event]:
        """Take the loss of the connection."""
        if self.state in (State.NEW, State.ENDED):
            return []
        lost = f"{self.acked + 1} to {self.sent}" if self.sent > self.acked else "none"
        error: JetStreamExtError
        if self.state is State.COMMITTING:
            error = BatchOutcomeUnknownError(
                f"batch {self.batch_id}: the connection was lost after the commit was sent; "
                f"messages without an acknowledgement: {lost}",
                **self._facts("unknown"),
            )
        else:
            error = BatchAbandonedError(
                f"batch {self.batch_id}: the connection was lost; messages without an acknowledgement: {lost}",
                **self._facts("unknown" if self.sent > self.acked else "partial"),
            )
        return self._end(EndReason.DISCONNECTED, error)

    def check_open(self) -> None:
        """Raise what ended the batch, if something did.

        Raises:
            BatchError: The reason.
        """
        if self.state in (State.NEW, State.STARTING, State.OPEN):
            return
        failure = self._cause if self.state is State.DRAINING else self.error
        if failure is not None:
            raise copy.copy(failure) from failure.__cause__  # one object raised twice would chain its tracebacks
        what = "is being committed" if self.state is State.COMMITTING else f"has ended ({self._reason()})"
        raise BatchClosedError(f"batch {self.batch_id} {what}", **self._facts())

    def _reason(self) -> str:
        return self.end_reason.value if self.end_reason else "open"

    def _facts(self, outcome: Outcome | None = None) -> dict[str, Any]:
        if outcome is None:
            lossless = self.ack is not None and not self.gap_count and not self.error_count
            outcome = "not_stored" if not self.sent else "stored" if lossless else "partial"
        return {
            "batch_id": self.batch_id,
            "sent": self.sent,
            "acked": self.acked,
            "outcome": outcome,
            "ack": self.ack,
        }

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, frames: Iterable[Frame], now: float) -> tuple[list[Event], bytes]:
        """Take what the server sent; return what happened, and bytes to send in turn (usually none)."""
        events: list[Event] = []
        out = b""
        for frame in frames:
            if self.state is State.ENDED:
                break
            try:
                out += self._reply_came(replies.decode(frame), now, events)
            except ResponseError as error:
                events += self._end(EndReason.ERROR, self._as_batch_error(error))
        return events, out

    def _reply_came(self, reply: replies.Reply, now: float, events: list[Event]) -> bytes:
        said = reply.said
        if not (reply.op == PING and isinstance(said, replies.Refusal)):
            # A refused ping says that nobody has the batch right now: that is no sign of life.
            self._unanswered_since = None
            if self._waiting_since is not None:
                self._waiting_since = now
        if isinstance(said, BatchFlowAck):
            self._flow_ack(said, events)
            if reply.op == PING:
                self.received = max(self.received, min(reply.seq, self.sent))
                self.pongs += 1
                events.append(Pong(reply.seq))
        elif isinstance(said, BatchFlowGap):
            self._gap(said, now, events)
        elif isinstance(said, BatchFlowError):
            self._message_refused(said, now, events)
        elif isinstance(said, BatchAck):
            self._final(said, events)
        elif isinstance(said, replies.Refusal):
            return self._plain_error(reply, said.error, now, events)
        elif isinstance(said, replies.OrdinaryAck):
            events += self._end(EndReason.ERROR, self._unsupported())
        else:
            events.append(said)
        return b""

    def _flow_ack(self, ack: BatchFlowAck, events: list[Event]) -> None:
        if self.state is State.STARTING:
            self.state = State.OPEN
        if ack.seq > self.sent + 1:  # the marker that commits has a sequence too
            raise ResponseError(f"the server acknowledged {ack.seq} of {self.sent} messages")
        if ack.seq >= self.acked:
            self.acked = min(ack.seq, self.sent)
            self.flow = max(1, ack.msgs)
            events.append(ack)

    def _gap(self, gap: BatchFlowGap, now: float, events: list[Event]) -> None:
        self.gaps.append(gap)
        self.gap_count += 1
        events.append(gap)
        if self.gap is GapMode.FAIL and self.state is not State.DRAINING:
            self._drain(
                BatchGapError(
                    f"batch {self.batch_id}: messages {gap.first_lost} to {gap.last_lost} were lost; "
                    f"the server acknowledged up to {self.acked}",
                    first_lost=gap.first_lost,
                    last_lost=gap.last_lost,
                    **self._facts("partial"),
                ),
                now,
            )

    def _message_refused(self, report: BatchFlowError, now: float, events: list[Event]) -> None:
        if self.state is State.STARTING:
            self.state = State.OPEN
        self._report(report, events)
        if self.gap is GapMode.FAIL and self.state is not State.DRAINING:
            # The server ends the batch by itself; its final ack follows.
            self._drain(self._refused(report.error, report.seq, "partial"), now)

    def _report(self, report: BatchFlowError, events: list[Event]) -> None:
        self.errors.append(report)
        self.error_count += 1
        events.append(report)

    def _plain_error(self, reply: replies.Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        if error.err_code in _STILL_OPEN or error.err_code is None:
            return self._message_lost(reply, error, now, events)
        outcome: Outcome = "unknown"
        if self.state is State.STARTING or (reply.seq == 1 and reply.op == START):
            outcome = "not_stored"
        if self.state is State.DRAINING:
            events += self._end(self._drain_reason(), self._cause)
            return b""
        if self.state is State.COMMITTING and error.err_code == 10208:
            # It may have been committed before the server forgot it; only the lost ack would have told.
            failure: JetStreamExtError = BatchOutcomeUnknownError(
                f"batch {self.batch_id}: the server no longer knows the batch; it may be stored up to {self.sent}",
                **self._facts("unknown"),
            )
        else:
            failure = self._refused(error, reply.seq, outcome)
        events += self._end(EndReason.ERROR, failure)
        return b""

    def _message_lost(self, reply: replies.Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        """Take a refusal after which the server still has the batch, without this one message."""
        if self.state is State.STARTING:
            failure: JetStreamExtError
            if error.code == 503:
                failure = NoStreamError(
                    f"no stream listens on subject {self._first_subject.decode()!r}: "
                    "it does not exist, or its leader is away",
                    **self._facts("not_stored"),
                )
            else:
                failure = self._refused(error, reply.seq, "not_stored")
            events += self._end(EndReason.ERROR, failure)
            return b""
        if reply.op == PING:
            return b""  # not an answer to a message; the next ping, or the deadline, decides
        if reply.op == COMMIT_EOB:
            failure = BatchOutcomeUnknownError(
                f"batch {self.batch_id}: the end of the batch was refused ({error}); "
                f"messages up to {self.acked} are acknowledged, up to {self.sent} were sent",
                **self._facts("unknown"),
            )
            events += self._end(EndReason.ERROR, failure)
            return b""
        self._report(BatchFlowError(reply.seq, error), events)
        if self.gap is GapMode.OK or self.state is not State.OPEN:
            return b""
        # In fail mode the hole ends the batch as soon as the server sees what comes after it: make it see now, so
        # that the final ack says what is stored.
        self._drain(self._refused(error, reply.seq, "partial"), now)
        return self._ping(now)

    def _final(self, ack: BatchAck, events: list[Event]) -> None:
        if ack.batch_id != self.batch_id:
            raise ResponseError(f"the final ack names batch {ack.batch_id!r}, not {self.batch_id!r}")
        self.ack = ack
        count = ack.batch_size or 0
        self.acked = max(self.acked, min(count, self.sent))
        if self.state is State.COMMITTING and (count >= self.sent or self.gap is GapMode.OK):
            events += self._end(EndReason.COMMITTED, None)
            return
        if self.state is State.COMMITTING:
            # The report of the gap was itself lost.
            self._cause = BatchGapError(
                f"batch {self.batch_id}: messages {count + 1} to {self.sent} were lost; the rest is stored",
                first_lost=count + 1,
                last_lost=self.sent,
                **self._facts("partial"),
            )
            events += self._end(EndReason.GAP, self._cause)
            return
        if self.state is State.DRAINING:
            events += self._end(self._drain_reason(), self._cause)
            return
        events += self._end(
            EndReason.ERROR,
            BatchAbandonedError(
                f"batch {self.batch_id}: the server ended the batch at message {count} of {self.sent}",
                **self._facts("partial"),
            ),
        )

    # -- ending -------------------------------------------------------------------------------------------------

    def _drain(self, cause: JetStreamExtError, now: float) -> None:
        self._cause = cause
        self.state = State.DRAINING
        self._waiting_since = now
        self._unanswered_since = None

    def _drain_reason(self) -> EndReason:
        return EndReason.GAP if isinstance(self._cause, BatchGapError) else EndReason.ERROR

    def _end(self, reason: EndReason, error: JetStreamExtError | None) -> list[Event]:
        self.state = State.ENDED
        self.end_reason = reason
        self._waiting_since = self._unanswered_since = None
        if isinstance(error, BatchError):
            error.ack = self.ack
            error.sent, error.acked = self.sent, self.acked
        self.error = error
        return [Ended(reason)]

    def _refused(self, error: ServerError, seq: int, outcome: Outcome) -> BatchError:
        message = f"batch {self.batch_id}: message {seq} was refused: {error.description}"
        if error.err_code == 10205:
            message = f"batch {self.batch_id}: the stream does not take fast ingest; turn on allow_batched"
        return batch_refusal(error, message, **self._facts(outcome))

    def _unsupported(self) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"batch {self.batch_id}: the server does not know fast ingest (it needs nats-server 2.14); "
            "the first message was stored as an ordinary one",
            feature="fast ingest",
            required_api_level=4,
        )

    def _as_batch_error(self, error: JetStreamExtError) -> JetStreamExtError:
        failure = BatchOutcomeUnknownError(f"batch {self.batch_id}: {error}", **self._facts("unknown"))
        failure.__cause__ = error
        return failure

    # -- timers -------------------------------------------------------------------------------------------------

    def waiting(self, now: float) -> None:
        """Say that somebody waits from now on: for the first reply, the window, or acknowledgements."""
        if self._waiting_since is None:
            self._waiting_since = now
            self._pinged_at = now

    def not_waiting(self) -> None:
        """Say that nobody waits any more."""
        if self.state in (State.NEW, State.STARTING, State.OPEN):
            self._waiting_since = None

    def next_timer(self) -> float | None:
        """Return when `handle_timer` wants to be called, or None."""
        if self.state in (State.NEW, State.ENDED):
            return None
        times = [self._deadline()]
        if self.state is State.OPEN:
            if self._asking:
                times.append(self._pinged_at + self.stall_ping)
            if self.keepalive:
                times.append(self._wrote_at + self.keepalive)
        due = min(times)
        return None if due == math.inf else due

    @property
    def _asking(self) -> bool:
        """Whether the server is to be asked until it answers: somebody waits, or a ping was not answered."""
        return self._waiting_since is not None or self._unanswered_since is not None

    def _deadline(self) -> float:
        since = min(
            math.inf if self._waiting_since is None else self._waiting_since,
            math.inf if self._unanswered_since is None else self._unanswered_since,
        )
        return since + self.ack_timeout

    def handle_timer(self, now: float) -> tuple[list[Event], bytes]:
        """Do what is due; return what happened, and bytes to send."""
        if self.state in (State.NEW, State.ENDED):
            return [], b""
        if now >= self._deadline():
            return self._silence(), b""
        if self.state is State.OPEN:
            stalled = self._asking and now >= self._pinged_at + self.stall_ping
            idle = self.keepalive and now >= self._wrote_at + self.keepalive
            if stalled or idle:
                return [], self._ping(now)
        return [], b""

    def _silence(self) -> list[Event]:
        if self.state is State.DRAINING:
            return self._end(self._drain_reason(), self._cause)
        waited = f"within {self.ack_timeout:g} s"
        if self.state is State.STARTING:
            text = (
                f"no answer to the first message {waited}: the server may be older than 2.14, "
                "or the stream may have no_ack set"
            )
        elif self.state is State.COMMITTING:
            text = f"no answer to the commit {waited}: the batch may be stored up to message {self.sent}"
        else:
            text = f"no acknowledgement beyond message {self.acked} of {self.sent} {waited}"
        error = BatchOutcomeUnknownError(f"batch {self.batch_id}: {text}", **self._facts("unknown"))
        return self._end(EndReason.TIMEOUT, error)


def check_flow(flow: int) -> int:
    """Return `flow`, or raise ValueError unless it is 1 to 65535."""
    if isinstance(flow, bool) or not isinstance(flow, int) or not 1 <= flow <= 65535:
        raise ValueError(f"flow must be 1 to 65535, not {flow!r}")
    return flow


def check_outstanding(value: int) -> int:
    """Return `max_outstanding_acks`, or raise ValueError unless it is 1 to 3."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 3:
        raise ValueError(f"max_outstanding_acks must be 1 to 3, not {value!r}")
    return value
