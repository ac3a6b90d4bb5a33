"""One read by direct gets, as a machine without I/O: requests, retries, timers, and the proof that nothing is missing.

The caller loops over `RangeRead.next_action` and does what it says. It hands in what happens: `receive`,
`leader_answered`, `disconnected`, `connected`, `not_sent`, and `handle_timer` at the time of `Wait`.

=============  ==========================================================  ===================================
state          what happens                                                next state
=============  ==========================================================  ===================================
READING        rows arrive                                                 READING (they are delivered)
READING        the plan is done, and everything is proved                  ENDED (`Done`)
READING        the plan is done before the sequence to prove               PROVING
READING        messages are lost, the connection is lost, or nothing       RECONNECTING; ENDED (`Fail`) the second
               arrives for `timeout` seconds                               time at the same place
READING        503: no responder                                           PAUSED; ENDED (`Fail`) if none answered
                                                                           before, or none for `timeout` seconds
READING        the leader has a message that a mirror left out             PAUSED; ENDED (`Fail`) after `timeout`
                                                                           seconds without a new row
READING        a mirror leaves out more than 64 runs of messages           RECONNECTING (the answer is dropped)
PROVING        the leader has no message in the rest of the range          ENDED (`Done`)
PROVING        the leader has one                                          PAUSED or ENDED, as above
PAUSED         the pause is over                                           RECONNECTING
RECONNECTING   the connection is usable                                    READING
=============  ==========================================================  ===================================

A replica of the stream has its messages in order and without gaps of its own, but it may lag. So only the end of the
range needs a proof. A mirror that answers under the stream's name (``mirror_direct``) can lack any message: it has
limits of its own, perhaps a filter, perhaps a start in the middle. So every gap in a mirror's answer also needs a
proof, with one question to the leader for each.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.errors import DirectGetDisabledError, JetStreamExtError, MessagesLostError, RequestTimeoutError
from jetstream_ext.protocol.direct import Block, ReplyDecoder, Request
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.gaps import find_gaps
from jetstream_ext.protocol.reads import Plan, Scan, SentRequest

_log = logging.getLogger("jetstream_ext.direct")

MAX_QUESTIONS: Final = 64
"""Questions to the leader at once. To prove more gaps than these takes longer than to request the rows again."""
# Answers in a row that are dropped at most: if only a mirror is near, the stream itself never answers.
_MAX_ANSWERS_DROPPED: Final = 8


class State(enum.Enum):
    READING = "reading"
    PROVING = "proving"
    PAUSED = "paused"
    RECONNECTING = "reconnecting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send `sent.request` with a reply inbox of its own; hand replies to `receive`, or a failure to `interrupted`."""

    sent: SentRequest


@dataclass(frozen=True, slots=True)
class DropReply:
    sent: SentRequest


@dataclass(frozen=True, slots=True)
class AskLeader:
    """Ask the stream's leader for each of these messages; hand the sequences found to `leader_answered`."""

    requests: tuple[Request, ...]


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
class Fail:
    error: Exception


@dataclass(frozen=True, slots=True)
class Done:
    """The read is over: everything was delivered."""


Action = SendRequest | DropReply | AskLeader | AwaitConnection | Deliver | Wait | Fail | Done


@dataclass(slots=True)
class _Reply:
    decoder: ReplyDecoder
    frames: list[Frame] = field(default_factory=list)
    lost: bool = False


class RangeRead:
    """The machine of one read. All times are the caller's clock, in seconds.

    Args:
        stream: The stream's name.
        plan: Which requests answer the read.
        timeout: Seconds that may pass without an answer, or without a new row while responders lag or do not answer.
        pause: Seconds between two requests while responders lag or do not answer.
        prove_to: Prove a `Scan` up to this sequence; None believes the responders.
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
        server_version: str = "",
    ) -> None:
        self.state: State = State.READING
        self._stream = stream
        self._plan = plan
        self._timeout = timeout
        self._pause = pause
        self._server_version = server_version
        self._scan: Scan | None = None
        self._prove_to = 0
        self._before = 0  # the last sequence that was delivered
        if prove_to is not None:
            assert isinstance(plan, Scan)
            self._scan, self._before = plan, plan.position
            self._prove_to = prove_to if plan.up_to_seq is None else min(prove_to, plan.up_to_seq)
        self._replies: dict[SentRequest, _Reply] = {}
        self._dropped: list[SentRequest] = []
        self._rows: Block | None = None
        self._gaps: list[range] = []  # of `_rows`, which are held back until the leader has answered
        self._error: Exception | None = None
        self._timer: float | None = None
        self._give_up_at: float | None = None
        self._answered = self._retried = self._silent = False
        self._answers_dropped = 0
        self._mirror = ""

    # -- what to do -----------------------------------------------------------------------------------------------

    def next_action(self, now: float) -> Action:
        while True:
            if self._dropped:
                return DropReply(self._dropped.pop())
            # Before rows are delivered, so that the server works while the reader does.
            if self.state is State.READING and (sent := self._plan.next_request()) is not None:
                decoder = ReplyDecoder(self._stream, start=sent.request.seq or 1, server_version=self._server_version)
                self._replies[sent] = _Reply(decoder)
                _log.debug("stream %r: request sent: %s", self._stream, sent.request)
                return SendRequest(sent)
            if self._gaps:
                return AskLeader(tuple(self._after(gap.start - 1) for gap in self._gaps[:MAX_QUESTIONS]))
            if self._rows is not None:
                rows, self._rows = self._rows, None
                self._before = rows.seqs[-1]
                self._give_up_at = None
                return Deliver(rows)
            if self.state is State.READING:
                if not self._read(now):
                    if self._timer is None:
                        self._timer = now + self._timeout
                    return Wait(self._timer)
            elif self.state is State.PROVING:
                return AskLeader((self._after(self._before),))
            elif self.state is State.RECONNECTING:
                return AwaitConnection()
            elif self.state is State.ENDED:
                return Done() if self._error is None else Fail(self._error)
            else:
                assert self._timer is not None
                return Wait(self._timer)

    def _after(self, seq: int) -> Request:
        assert self._scan is not None
        return self._scan.request_after(seq)

    # -- what happens ---------------------------------------------------------------------------------------------

    def receive(self, sent: SentRequest, frames: list[Frame]) -> None:
        """Take frames of a reply, in order; they are decoded when the reply is the oldest."""
        reply = self._replies.get(sent)
        if reply is None:
            return
        if reply.frames:
            reply.frames += frames
        else:
            reply.frames = frames

    def disconnected(self) -> None:
        """Note that the connection is lost, and with it the replies that have not arrived."""
        for reply in self._replies.values():
            reply.lost = True

    def interrupted(self, error: Exception, now: float) -> None:
        """Ask for the rest once more, or fail: a request could not be sent, or its reply is lost or refused."""
        away = isinstance(error, DirectGetDisabledError)
        hopeless = not self._answered or self._patience_ends(now) if away else self._retried or self._silent
        resumable = self._plan.retry()
        self._drop_replies()
        if self._plan.done:
            return
        if hopeless or not resumable:
            self._fail(error)
        elif away:
            self._start_pause(now, "no responder answers")
        else:
            self._retried, self._silent = True, isinstance(error, RequestTimeoutError)
            self._enter(State.RECONNECTING, f"retry after {error}")

    def connected(self) -> None:
        self._enter(State.READING, "the connection is usable")

    def handle_timer(self, now: float) -> None:
        if self._timer is None or now < self._timer:
            return
        if self.state is State.PAUSED:
            self._enter(State.RECONNECTING, "the pause is over")
        elif self.state is State.READING:
            reply = self._replies[self._plan.in_flight[0]]
            if not reply.frames and not reply.lost:
                self.interrupted(self._silence(reply.decoder.count), now)

    def leader_answered(self, found: Sequence[int | None], now: float) -> None:
        """Take the sequences that the leader found for the requests of `AskLeader`; None is no message."""
        if not self._gaps:
            seq = found[0]
            if seq is None or seq > self._prove_to:
                self._enter(State.ENDED, f"the leader has nothing after sequence {self._before}")
            else:
                self._missing(seq, now)
            return
        asked, self._gaps = self._gaps[:MAX_QUESTIONS], self._gaps[MAX_QUESTIONS:]
        for gap, seq in zip(asked, found, strict=True):
            if seq is not None and seq < gap.stop:
                self._missing(seq, now)
                return

    # -- deciding -------------------------------------------------------------------------------------------------

    def _read(self, now: float) -> bool:
        """Take what has arrived of the oldest reply; return whether there is something new to do."""
        plan = self._plan
        if plan.done:
            if self._scan is None or self._before >= self._prove_to:
                self._enter(State.ENDED, "the read is complete")
            else:
                self._enter(State.PROVING, f"nothing came after sequence {self._before}")
            return True
        oldest = plan.in_flight[0]
        reply = self._replies[oldest]
        if reply.frames:
            frames, reply.frames = reply.frames, []
            self._timer = None
            self._decode(oldest, reply.decoder, frames, now)
            return True
        if reply.lost:
            error = MessagesLostError(
                f"stream {self._stream!r}: the connection was lost before the direct get was answered completely",
                expected=reply.decoder.last_seq,
            )
            self.interrupted(error, now)
        return reply.lost

    def _decode(self, sent: SentRequest, decoder: ReplyDecoder, frames: list[Frame], now: float) -> None:
        try:
            block = decoder.feed(frames)
        except DirectGetDisabledError as error:
            self.interrupted(error, now)
            return
        except JetStreamExtError as error:
            self._fail(error)
            return
        if block.seqs:
            self._answered = True
            rows = self._plan.accept(sent, block, decoder.size, block.pending(-1))
            if rows.seqs:
                self._retried = False
                self._rows = rows
                if self._scan is not None:
                    self._check_responder(rows)
        if sent not in self._plan.in_flight:
            return  # the answer was dropped
        if decoder.broken is not None:
            self.interrupted(decoder.broken, now)
        elif decoder.end is not None:
            self._silent = False
            self._plan.finish(sent, decoder.end)
            self._drop_replies()

    def _check_responder(self, rows: Block) -> None:
        """Note the gaps of a mirror's answer to prove them, or drop the answer if there are too many."""
        if rows.stream == self._stream:
            self._answers_dropped = 0
            return
        gaps = list(find_gaps(self._before, rows.seqs, self._prove_to))
        if len(gaps) > MAX_QUESTIONS and self._answers_dropped < _MAX_ANSWERS_DROPPED:
            self._answers_dropped += 1
            self._go_back(gaps[0].stop)
            self._enter(State.RECONNECTING, f"dropped an answer of mirror {rows.stream!r} with {len(gaps)} gaps")
        elif gaps:
            _log.debug("stream %r: checking %d gaps in an answer of mirror %r", self._stream, len(gaps), rows.stream)
            self._gaps, self._mirror = gaps, rows.stream

    def _missing(self, seq: int, now: float) -> None:
        """Read again from a message that the leader has and no responder delivered."""
        mirror = f" (mirror {self._mirror!r} answers)" if self._mirror else ""
        self._mirror = ""
        self._go_back(seq)
        if self._patience_ends(now):
            self._fail(
                RequestTimeoutError(
                    f"stream {self._stream!r}: the leader has sequence {seq}, but no replica or mirror that answers "
                    f"direct gets delivered it within {self._timeout:g} s{mirror}"
                )
            )
        else:
            self._start_pause(now, f"the leader has sequence {seq}, which no responder delivered{mirror}")

    def _go_back(self, seq: int) -> None:
        """Keep only the rows before `seq`, and forget what is in flight."""
        assert self._scan is not None
        rows, self._gaps = self._rows, []
        if rows is not None:
            rows.keep(0, bisect_left(rows.seqs, seq))
            if rows.seqs:
                self._give_up_at = None
            else:
                self._rows = rows = None
        self._scan.rewind(self._before if rows is None else rows.seqs[-1])
        self._error = None
        self._retried = self._silent = False
        self._drop_replies()

    def _patience_ends(self, now: float) -> bool:
        if self._give_up_at is None:
            self._give_up_at = now + self._timeout
        return now >= self._give_up_at

    def _start_pause(self, now: float, why: str) -> None:
        self._enter(State.PAUSED, why)
        self._timer = now + self._pause

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._enter(State.ENDED, f"failed: {error}")

    def _drop_replies(self) -> None:
        """Forget the replies to requests that no longer count."""
        for sent in [sent for sent in self._replies if sent not in self._plan.in_flight]:
            del self._replies[sent]
            self._dropped.append(sent)

    def _enter(self, state: State, why: str) -> None:
        _log.debug("stream %r: %s -> %s: %s", self._stream, self.state.value, state.value, why)
        self.state = state
        self._timer = None

    def _silence(self, messages: int) -> RequestTimeoutError:
        if not messages:
            return RequestTimeoutError(
                f"stream {self._stream!r}: no answer to a direct get within {self._timeout:.4g} s"
            )
        return RequestTimeoutError(
            f"stream {self._stream!r}: the answer to a direct get stopped after {messages} messages, with nothing more for "
            f"{self._timeout:.4g} s (if the API is imported from another account, its export needs response_type stream)"
        )
