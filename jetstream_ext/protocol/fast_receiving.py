"""What a fast batch makes of what the server says: the half of `fast.FastBatch` that its replies come into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from jetstream_ext.errors import BatchError, JetStreamExtError, Outcome, ResponseError, ServerError, server_error
from jetstream_ext.protocol import fast_endings as endings
from jetstream_ext.protocol import fast_replies as replies
from jetstream_ext.protocol.fast_frames import FastFrames
from jetstream_ext.protocol.fast_record import Ended, Event, FastRecord, Pong, State
from jetstream_ext.protocol.fast_replies import COMMIT_EOB, PING, START
from jetstream_ext.protocol.fast_timers import FastTimers
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowError, BatchFlowGap, EndReason, GapMode, InDoubt

# Error codes after which the server still has the batch and only the message they answer is missing: it is too large, the
# stream's queue is full, or the account is.
_TOO_LARGE: Final = 10054
_STILL_OPEN: Final = frozenset({_TOO_LARGE, 10167, 10002, 10028, 10047})
# So, too, where the whole server is full; but then it refuses the ping of a fail batch that would bring the final ack.
_SERVER_FULL: Final = 10023
_UNKNOWN_BATCH: Final = 10208


class FastReceiver(FastRecord):
    """What is known of a batch, and how each reply changes it.

    Args:
        batch_id: The batch.
        flow: Messages per ack that are asked for.
        max_outstanding_acks: Acks' worth of messages in the window.
        gap: What a loss does.
        frames: Makes what is sent in turn.
        timers: Hear of every sign of life.
    """

    # Those of the record that are set here, again: some type checkers would guess their types anew.
    state: State
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
        flow: int,
        max_outstanding_acks: int,
        gap: GapMode,
        frames: FastFrames,
        timers: FastTimers,
    ) -> None:
        super().__init__(batch_id=batch_id, flow=flow, max_outstanding_acks=max_outstanding_acks, gap=gap)
        self._frames = frames
        self._timers = timers
        self._connected = True
        self._asks_again = False  # the server is to be asked again while draining or committing
        self._doubtful = 0  # while suspended: nothing is known from this sequence on
        self._proved = 0, 0  # what the newest ping proved to have arrived, and what was acknowledged then
        self._proved_at = 0.0
        self._refusal: ServerError | None = None  # of the newest ping or end marker, and nothing else came since

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

    def _resumed(self, tail: int, events: list[Event]) -> None:
        """Go on after the answer to the ping; the server lost what is from sequence `tail` on."""
        self.state = State.OPEN
        self._timers.stop()
        events += self._doubts(tail)

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

    def _doubts(self, tail: int) -> list[Event]:
        if self._doubtful >= tail:
            return []
        doubt = InDoubt(self._doubtful, tail - 1)
        self.in_doubt.append(doubt)
        return [doubt]

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
