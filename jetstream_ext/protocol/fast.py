"""A fast-ingest batch as a machine (ADR-50, the fast half; server API level 4).

::

                 send first             first reply              commit            final ack
       NEW ───────────────► STARTING ───────────────► OPEN ───────────────► COMMITTING ──────► ENDED
                                │                     ▲│  fail mode: gap, error    │             ▲
                                │                     │├───────────► DRAINING ──────┼─────────────┤
                    ok mode:    │      answer to the  ││ ok mode: connection lost                │
                    connection  │    ping after the   │▼                                         │
                    lost        ├────► reconnect ── SUSPENDED ─────────────────────────────────────┤
                                └── refusal, silence, connection lost, unknown batch, discard ─────┘

* Every message carries a reply subject ``<inbox>.<id>.<flow>.<gap>.<seq>.<op>.$FI``. The server answers on the reply
  subject of the message that made it answer, so those tokens say which message an answer is about.
* The window: at most `flow` times `max_outstanding_acks` messages are unacknowledged, `flow` being what the server last
  set (it raises and lowers it). Acks are cumulative; one that is older than what we know changes nothing; a gap report
  never moves the window.
* DRAINING: the batch is dead on the server but its final ack, the only record of what was stored, is still to come.
* COMMITTING: a ping is never sent. The server forgets a batch it has committed, and would answer a ping with "unknown
  batch", with a gap that is none, or by opening a new batch.
* SUSPENDED: nothing is sent until the server has answered a ping on the new connection. That ping makes it report what
  was lost with the old one. What it had reported on the old one and nobody read stays in doubt.
* A commit stores its message by an ordinary append and ends with the end-of-batch marker: servers 2.14.0 to 2.14.2
  never answer a committing message that is a duplicate or fails a check. A marker that the server is known not to have
  taken (503, 429) is sent again.
* What cannot be an answer to this batch (malformed, of another batch, about messages never sent) is left alone: anybody
  may publish to an inbox, and a real answer that is missing is asked for again or ends in a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from jetstream_ext.errors import (
    BatchClosedError,
    BatchError,
    EmptyBatchError,
    JetStreamExtError,
    Outcome,
    ResponseError,
    ServerError,
    server_error,
)
from jetstream_ext.protocol import fast_endings as endings
from jetstream_ext.protocol import fast_replies as replies
from jetstream_ext.protocol.fast_frames import FastFrames
from jetstream_ext.protocol.fast_record import Ended, Event, FastRecord, Pong, State
from jetstream_ext.protocol.fast_replies import COMMIT_EOB, PING, START
from jetstream_ext.protocol.fast_timers import FastTimers
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import (
    BatchAck,
    BatchFlowAck,
    BatchFlowError,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    Entry,
    GapMode,
    InDoubt,
)

# Error codes after which the server still has the batch and only the message they answer is missing: it is too large, the
# stream's queue is full, or the account is.
_TOO_LARGE: Final = 10054
_STILL_OPEN: Final = frozenset({_TOO_LARGE, 10167, 10002, 10028, 10047})
# So, too, where the whole server is full; but then it refuses the ping of a fail batch that would bring the final ack.
_SERVER_FULL: Final = 10023
_UNKNOWN_BATCH: Final = 10208


class FastBatch(FastRecord):
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

    # Those of the record that are set here, again: some type checkers would guess their types anew.
    state: State
    sent: int
    received: int
    pongs: int
    acked: int
    ack: BatchAck | None
    cause: BatchError | None
    end_reason: EndReason | None
    error: JetStreamExtError | None

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
        super().__init__(batch_id=batch_id, flow=flow, max_outstanding_acks=max_outstanding_acks, gap=gap)
        self._frames = FastFrames(batch_id=batch_id, inbox=inbox, flow=flow, gap=self.gap, max_payload=max_payload)
        self._timers = FastTimers(ack_timeout=ack_timeout, stall_ping=stall_ping, keepalive=keepalive)
        self._asks_again = False  # the server is to be asked again while draining or committing
        self._doubtful = 0  # while suspended: nothing is known from this sequence on
        self._connected = True
        self._proved = 0, 0  # what the newest ping proved to have arrived, and what was acknowledged then
        self._proved_at = 0.0
        self._probed = False  # while suspended: the connection was back once
        self._refusal: ServerError | None = None  # of the newest ping or end marker, and nothing else came since

    # -- sending ------------------------------------------------------------------------------------------------

    def add(self, message: BatchMessage, now: float) -> bytes:
        """Return the bytes that publish `message`; it has a batch sequence from here on.

        Raises:
            BatchError: The batch has ended, or is suspended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self._check_sending()
        data = self._frames.message(message, self.sent + 1)
        self._took(1, now)
        return data

    def add_plain(self, subject: str, payload: bytes, now: float) -> bytes:
        """As `add`, for a message that has no headers and no options."""
        if self.state is not State.OPEN:
            self._check_sending()
        data = self._frames.plain(subject, payload, self.sent + 1)
        self._took(1, now)
        return data

    def add_many(
        self, entries: Iterator[Entry], limit: int, now: float
    ) -> tuple[bytes, int, int, BaseException | None]:
        """Take up to `limit` messages from `entries`; return their bytes, count, payload bytes, and what stopped it.

        A block ends after about `fast_frames.BLOCK` payload bytes, too; then nothing has stopped it.

        What `entries` raises, and the refusal of a message, comes back as the last value: the messages before it are
        in the bytes and have their sequences, the refused one has none. ``StopIteration`` is the end of `entries`.
        """
        self._check_sending()
        if self.state is State.NEW:
            limit = min(limit, 1)  # the first reply decides whether anything may follow
        out, size, stopped = self._frames.many(entries, limit, self.sent)
        if out:
            self._took(len(out), now)
        return b"".join(out), len(out), size, stopped

    def _took(self, count: int, now: float) -> None:
        self.sent += count
        self._timers.wrote(now)
        if self.state is State.NEW:
            self.state = State.STARTING
            self._timers.wait_anew(now)

    def ping(self, now: float) -> bytes:
        """Return the bytes that ask the server where it is.

        Raises:
            EmptyBatchError: Nothing was sent yet, so there is nobody to ask.
            BatchError: The batch has ended, or is suspended.
        """
        self._check_sending()
        if self.state is State.NEW:
            raise EmptyBatchError("a batch is known to the server only from its first message on", **self.facts())
        return self._ping(now)

    def _ping(self, now: float) -> bytes:
        self._timers.pinged(now)
        return self._frames.ping(self.sent)

    def commit(self, now: float) -> bytes:
        """Return the bytes that end the batch; a message to store goes before it by `add`.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchError: The batch has ended, or is suspended.
        """
        self._check_sending()
        if self.state is State.NEW:
            raise EmptyBatchError("there is nothing to commit", **self.facts())
        self.state = State.COMMITTING
        self._timers.wait_anew(now)  # the end of the batch answers for its pings
        self._timers.wrote(now)
        return self._frames.end(self.sent)

    def discard(self) -> list[Event]:
        """End the batch here; the server forgets it after its idle time. What was sent stays stored."""
        if self.state is State.ENDED:
            return []
        error = None
        if self.state is State.COMMITTING:
            error = endings.unknown(self, "given up while the commit was on its way")
        return self._end(EndReason.DISCARDED, error)

    def _check_sending(self) -> None:
        self.check_open()
        if self.state is State.SUSPENDED:
            raise BatchClosedError(
                f"batch {self.batch_id} sends nothing until its connection is back", **self.facts("unknown")
            )

    # -- the connection -----------------------------------------------------------------------------------------

    def disconnected(self, now: float, *, for_good: bool = False) -> list[Event]:
        """Take the loss of the connection.

        In ok mode the batch is then suspended until `reconnected`, or a deadline, unless the loss is `for_good`.
        """
        if self.state in (State.NEW, State.ENDED):
            return []
        self._connected = False
        if self.gap is GapMode.OK and self.state in (State.STARTING, State.OPEN) and not for_good:
            self.state = State.SUSPENDED
            self._doubtful, self._probed = self.acked + 1, False
            self._timers.wait_anew(now)
            return []
        if self.state is State.SUSPENDED and not for_good:
            return []  # lost again before the server answered: its report may be lost, too, and the deadline stands
        if self.state is State.DRAINING:  # its final ack is lost, but not why it died
            return self._end(endings.reason_for(self.cause), self.cause)
        error = endings.disconnected(self, "the connection was lost", committing=self.state is State.COMMITTING)
        return self._end(EndReason.DISCONNECTED, error)

    def reconnected(self, now: float) -> tuple[list[Event], bytes]:
        """Take the new connection: return what happened, and the ping that finds out whether the batch is alive.

        The shell has to be subscribed on the new connection, and send what it still had of the old one before the ping.
        """
        if self.state is not State.SUSPENDED or self._connected:
            return [], b""
        self._connected = True
        if not self._probed:
            self._probed = True
            self._timers.wait_anew(now)  # once: a connection that comes and goes has no deadline of its own
        self._timers.asked(now)
        return [], self._frames.ping(self.sent)

    def _resumed(self, tail: int, events: list[Event]) -> None:
        """Go on after the answer to the ping; the server lost what is from sequence `tail` on."""
        self.state = State.OPEN
        self._timers.stop()
        events += self._doubts(tail)

    def _doubts(self, tail: int) -> list[Event]:
        if self._doubtful >= tail:
            return []
        doubt = InDoubt(self._doubtful, tail - 1)
        self.in_doubt.append(doubt)
        return [doubt]

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, frames: Iterable[Frame], now: float) -> tuple[list[Event], bytes]:
        """Take what the server sent; return what happened, and bytes to send in turn (usually none)."""
        events: list[Event] = []
        out = b""
        for frame in frames:
            if self.state is State.ENDED:
                break
            try:
                out += self._reply_came(self._decode(frame), now, events)
            except ResponseError as error:
                events.append(replies.UnknownReply(error.frame))
        return events, out

    def _decode(self, frame: Frame) -> replies.Reply:
        """Decode a reply, or raise ResponseError if it cannot be one to this batch."""
        reply = replies.decode(frame)
        said = reply.said
        if isinstance(said, replies.UnknownReply):
            raise ResponseError("a reply of an unknown type", frame=said.payload)
        if isinstance(said, BatchAck):
            foreign = said.batch_id != self.batch_id
        elif isinstance(said, BatchFlowGap):
            foreign = False
        else:
            reached = reply.seq if isinstance(said, replies.Refusal | replies.OrdinaryAck) else said.seq
            foreign = reached > self.sent + 1  # the marker that ends the batch has a sequence too
        if foreign:
            raise ResponseError("a reply is not about this batch", frame=frame[1])
        return reply

    def _reply_came(self, reply: replies.Reply, now: float, events: list[Event]) -> bytes:
        said = reply.said
        if reply.op in (PING, COMMIT_EOB) and isinstance(said, replies.Refusal):
            # What is asked again until it is answered: its refusal says that nobody has the batch right now.
            self._refusal = said.error
        elif self.state is not State.DRAINING or reply.op != PING:
            # A ping of a batch that is dead is answered by its end; what answers otherwise could do so for ever.
            self._timers.heard(now)
            self._refusal = None
        if isinstance(said, BatchFlowAck):
            self._flow_ack(said, events)
            if reply.op == PING:
                self._pong(reply.seq, now, events)
        elif isinstance(said, BatchFlowGap):
            self._gap(reply, said, now, events)
        elif isinstance(said, BatchFlowError):
            self._message_refused(said, now, events)
        elif isinstance(said, BatchAck):
            self._final(said, events)
        elif isinstance(said, replies.Refusal):
            return self._plain_error(reply, said.error, now, events)
        else:
            events += self._end(EndReason.ERROR, endings.unsupported(stored_as=reply.seq))
        return b""

    def _started(self) -> None:
        if self.state is State.STARTING:
            self.state = State.OPEN
            self._timers.stop()

    def _flow_ack(self, ack: BatchFlowAck, events: list[Event]) -> None:
        self._started()
        self.note_ack(ack, events)

    def _pong(self, seq: int, now: float, events: list[Event]) -> None:
        seq = min(seq, self.sent)
        if self._proved != (seq, self.acked):
            self._proved, self._proved_at = (seq, self.acked), now
        elif self.gap is GapMode.OK and self.room <= 0 and now >= self._proved_at + self._timers.stall_ping:
            # The server has it all and acknowledges no more of it: they were refused, and the reports are lost.
            self.note_answered(seq)
        self.received = max(self.received, seq)
        self.pongs += 1
        events.append(Pong(seq))
        if self.state is State.SUSPENDED and self._connected and seq >= self.sent:
            last = self.gaps[-1] if self.gaps else None
            lost_tail = last is not None and last.seq > self.sent and last.first_lost >= self._doubtful
            self._resumed(last.first_lost if last and lost_tail else self.sent + 1, events)

    def _gap(self, reply: replies.Reply, gap: BatchFlowGap, now: float, events: list[Event]) -> None:
        if gap.first_lost <= 1 and reply.op == PING:
            # The first message opens the batch, so it is never missing from one: servers before 2.15 open a batch
            # for a ping after message 1 when they have none (any more).
            self._forgotten(events)
            return
        if self.state is State.DRAINING or gap in self.gaps:
            return
        if gap.seq <= gap.first_lost:
            self._drain(endings.out_of_order(self, gap), now)
            return
        self.note_gap(gap, events)
        if self.gap is GapMode.FAIL:
            self._drain(endings.gap(self, gap), now)

    def _message_refused(self, report: BatchFlowError, now: float, events: list[Event]) -> None:
        self._started()
        self.note_refusal(report, events)
        if self.gap is GapMode.FAIL and self.state is not State.DRAINING:
            # The server ends the batch by itself; its final ack follows.
            self._drain(endings.refused(self, report.error, report.seq, "partial"), now)

    def _plain_error(self, reply: replies.Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        code = error.err_code
        if code is None or code in _STILL_OPEN or (code == _SERVER_FULL and self.gap is GapMode.OK):
            return self._message_lost(reply, error, now, events)
        if code == _UNKNOWN_BATCH:
            self._forgotten(events, error, reply.seq)
        elif self.state is State.DRAINING:
            events += self._end(endings.reason_for(self.cause), self.cause)
        else:
            first = self.state is State.STARTING or (reply.seq == 1 and reply.op == START)
            outcome: Outcome = "not_stored" if first else "unknown"
            events += self._end(EndReason.ERROR, endings.refused(self, error, reply.seq, outcome))
        return b""

    def _forgotten(self, events: list[Event], error: ServerError | None = None, seq: int = 1) -> None:
        """Take that the server does not know the batch (any more)."""
        if self.state is State.DRAINING:
            events += self._end(endings.reason_for(self.cause), self.cause)
        elif self.state is State.SUSPENDED:
            why = "the connection was lost, and the server no longer knows the batch"
            events += self._end(EndReason.DISCONNECTED, endings.disconnected(self, why))
        elif self.state is State.COMMITTING:
            # It may have been committed before the server forgot it; only the lost ack would have told.
            text = f"the server no longer knows the batch; it may be stored up to {self.sent}"
            events += self._end(EndReason.ERROR, endings.unknown(self, text))
        else:
            error = error or server_error(code=400, err_code=_UNKNOWN_BATCH, description="batch publish ID unknown")
            outcome: Outcome = "not_stored" if self.state is State.STARTING else "unknown"
            events += self._end(EndReason.ERROR, endings.refused(self, error, seq, outcome))

    def _message_lost(self, reply: replies.Reply, error: ServerError, now: float, events: list[Event]) -> bytes:
        """Take a refusal after which the server still has the batch, without this one message."""
        if self.state is State.STARTING:
            failure = (
                endings.no_stream(self, self._frames.subject)
                if error.code == 503
                else endings.refused(self, error, reply.seq, "not_stored")
            )
            events += self._end(EndReason.ERROR, failure)
            return b""
        if reply.op == PING:
            return b""  # not an answer to a message; the next ping, or the deadline, decides
        if reply.op == COMMIT_EOB:
            self._asks_again = True  # it was not taken, so the batch is as it was
            return b""
        report = BatchFlowError(reply.seq, error)
        if error.err_code == _TOO_LARGE:
            self.note_refusal(report, events)
        else:
            self.note_error(report, events)  # it stays in the window, which closes while nobody takes messages
        if self.gap is GapMode.OK or self.state is not State.OPEN:
            return b""
        # In fail mode the hole ends the batch as soon as the server sees what comes after it: make it see now, so
        # that the final ack says what is stored.
        self._drain(endings.refused(self, error, reply.seq, "partial"), now)
        self._asks_again = True
        self._timers.asked(now)
        return self._frames.ping(self.sent)

    def _final(self, ack: BatchAck, events: list[Event]) -> None:
        self.ack = ack
        count = ack.batch_size or 0
        self.acked = max(self.acked, min(count, self.sent))
        if self.state is State.COMMITTING and (count >= self.sent or self.gap is GapMode.OK):
            events += self._end(EndReason.COMMITTED, None)
        elif self.state is State.COMMITTING:
            cause = endings.short(self, count)
            events += self._end(endings.reason_for(cause), cause)
        elif self.state is State.DRAINING:
            events += self._end(endings.reason_for(self.cause), self.cause)
        else:
            events += self._end(EndReason.ERROR, endings.ended_by_server(self, count))

    # -- ending -------------------------------------------------------------------------------------------------

    def _drain(self, cause: BatchError, now: float) -> None:
        self.cause = cause
        self._asks_again = False
        self.state = State.DRAINING
        self._timers.wait_anew(now)

    def _end(self, reason: EndReason, error: JetStreamExtError | None) -> list[Event]:
        doubts = self._doubts(self.sent + 1) if self.state is State.SUSPENDED else []
        self.state = State.ENDED
        self.end_reason = reason
        self._timers.stop()
        if isinstance(error, BatchError):
            error.ack = self.ack
            error.sent, error.acked = self.sent, self.acked
        self.error = error
        return [*doubts, Ended(reason)]

    # -- timers -------------------------------------------------------------------------------------------------

    def waiting(self, now: float) -> None:
        """Say that somebody waits from now on: for the first reply, the window, or acknowledgements."""
        self._timers.waiting(now)

    def not_waiting(self) -> None:
        """Say that nobody waits any more."""
        if self.state in (State.NEW, State.OPEN):
            self._timers.not_waiting()

    @property
    def _next_ask(self) -> float:
        if self.state is State.OPEN:
            return min(self._timers.ask_again, self._timers.keep_alive)
        asks = self._connected if self.state is State.SUSPENDED else self._asks_again
        return self._timers.ask_again if asks else math.inf

    def next_timer(self) -> float | None:
        """Return when `handle_timer` wants to be called, or None."""
        if self.state in (State.NEW, State.ENDED):
            return None
        due = min(self._timers.deadline, self._next_ask)
        return None if due == math.inf else due

    def handle_timer(self, now: float) -> tuple[list[Event], bytes]:
        """Do what is due; return what happened, and bytes to send."""
        if self.state in (State.NEW, State.ENDED):
            return [], b""
        if now >= self._timers.deadline:
            return self._silence(), b""
        if now < self._next_ask:
            return [], b""
        if self.state is State.OPEN:
            return [], self._ping(now)
        self._timers.asked(now)
        if self.state is State.COMMITTING:
            self._asks_again = False
            return [], self._frames.end(self.sent)
        return [], self._frames.ping(self.sent)

    def _silence(self) -> list[Event]:
        if self.state is State.DRAINING:
            return self._end(endings.reason_for(self.cause), self.cause)
        waited = f"within {self._timers.ack_timeout:g} s"
        if self.state is State.SUSPENDED:
            what = "nobody answered for the batch" if self._connected else "was not back for good"
            why = f"the connection was lost and {what} {waited}"
            return self._end(EndReason.DISCONNECTED, endings.disconnected(self, why))
        return self._end(EndReason.TIMEOUT, endings.timed_out(self, waited, self._refusal))
