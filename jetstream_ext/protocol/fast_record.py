"""What is known of a fast batch: where it stands, what the server reported, and how it ended."""

from __future__ import annotations

import copy
import enum
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from jetstream_ext.errors import BatchClosedError, BatchError, JetStreamExtError, Outcome
from jetstream_ext.protocol.fast_replies import UnknownReply
from jetstream_ext.protocol.options import check_batch_id
from jetstream_ext.types import (
    BatchAck,
    BatchFlowAck,
    BatchFlowError,
    BatchFlowGap,
    EndReason,
    GapMode,
    InDoubt,
)

KEPT_REPORTS: Final = 1000
"""How many of the newest gap and error reports a batch keeps."""


class State(enum.Enum):
    """Where a fast batch is; the drawing is on top of `protocol.fast`."""

    NEW = "new"
    STARTING = "starting"
    OPEN = "open"
    SUSPENDED = "suspended"
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


Event = BatchFlowAck | BatchFlowGap | BatchFlowError | InDoubt | Pong | UnknownReply | Ended


class FastRecord:
    """The state of one batch, for its machine to change and everybody to read."""

    def __init__(self, *, batch_id: str, flow: int, max_outstanding_acks: int, gap: GapMode) -> None:
        self.batch_id: str = check_batch_id(batch_id)
        self.gap: GapMode = GapMode(gap)
        self.flow: int = check_flow(flow)
        self.max_outstanding_acks: int = check_outstanding(max_outstanding_acks)

        self.state: State = State.NEW
        self.sent: int = 0
        """The highest batch sequence handed out for a message."""
        self.acked: int = 0
        """The highest batch sequence the server acknowledged."""
        self.received: int = 0
        """The highest batch sequence that a ping proved to have arrived (or to be reported as a gap)."""
        self.answered: int = 0
        """The highest batch sequence that the window no longer waits for, though it was not acknowledged."""
        self.pongs: int = 0
        """How many pings were answered."""
        self.end_reason: EndReason | None = None
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        """What an operation on the ended batch raises; None after a commit or a discard."""
        self.gaps: deque[BatchFlowGap] = deque(maxlen=KEPT_REPORTS)
        self.gap_count: int = 0
        self.errors: deque[BatchFlowError] = deque(maxlen=KEPT_REPORTS)
        self.error_count: int = 0
        self.in_doubt: deque[InDoubt] = deque(maxlen=KEPT_REPORTS)
        """What nobody knows of after a loss of the connection."""
        self._refused: deque[list[int]] = deque()
        """Runs (first, last) of refused messages after the last acknowledged one.

        No ack covers them before a later message is stored, so the window must not wait for them. Every run but one
        has a message before it that the window does wait for, so there are no more of them than the window is wide.
        """
        self._refused_count = 0
        self.cause: BatchError | None = None
        """Why it is draining."""

    @property
    def room(self) -> int:
        """How many messages the window still takes."""
        if self.state in (State.STARTING, State.SUSPENDED):
            return 0
        done = max(self.answered, self.acked) + self._refused_count
        return self.flow * self.max_outstanding_acks - (self.sent - done)

    @property
    def ready(self) -> bool:
        """Whether a message can be sent, or never will: neither the first reply nor the connection is waited for."""
        return self.state not in (State.STARTING, State.SUSPENDED, State.DRAINING)

    @property
    def settled(self) -> bool:
        """Whether the server has dealt with everything sent.

        Servers acknowledge every `flow` messages only, so for the last ones the answer to a ping has to do: it comes
        after everything before it was taken in, and after the report of any gap.
        """
        return max(self.acked, self.received) >= self.sent

    def note_ack(self, ack: BatchFlowAck, events: list[Event]) -> None:
        """Move the window; an ack that is older than what is known changes nothing."""
        if ack.seq >= self.acked:
            self.acked = min(ack.seq, self.sent)
            self.flow = max(1, ack.msgs)
            self._forget_refused(self.acked)
            events.append(ack)

    def note_refusal(self, report: BatchFlowError, events: list[Event]) -> None:
        """Take that a message was checked and refused: it is dealt with, and has no place in the window."""
        runs = self._refused
        newest = runs[-1][1] if runs else max(self.answered, self.acked)
        if newest < report.seq <= self.sent:
            if runs and report.seq == newest + 1:
                runs[-1][1] = report.seq
            else:
                runs.append([report.seq, report.seq])
            self._refused_count += 1
        self.note_error(report, events)

    def note_answered(self, seq: int) -> None:
        """Take that the window need not wait for anything up to `seq`."""
        self.answered = seq
        self._forget_refused(seq)

    def _forget_refused(self, up_to: int) -> None:
        runs = self._refused
        while runs and runs[0][0] <= up_to:
            first, last = runs[0]
            self._refused_count -= min(last, up_to) - first + 1
            if last > up_to:
                runs[0][0] = up_to + 1
                break
            runs.popleft()

    def note_gap(self, report: BatchFlowGap, events: list[Event]) -> None:
        """Keep and count the report of a gap."""
        self.gaps.append(report)
        self.gap_count += 1
        events.append(report)

    def note_error(self, report: BatchFlowError, events: list[Event]) -> None:
        """Keep and count a message that was refused."""
        self.errors.append(report)
        self.error_count += 1
        events.append(report)

    def check_open(self) -> None:
        """Raise what ended the batch, if something did.

        Raises:
            BatchError: The reason.
        """
        if self.state in (State.NEW, State.STARTING, State.OPEN, State.SUSPENDED):
            return
        failure = self.cause if self.state is State.DRAINING else self.error
        if failure is not None:
            raise copy.copy(failure) from failure.__cause__  # one object raised twice would chain its tracebacks
        reason = self.end_reason.value if self.end_reason else "open"
        what = "is being committed" if self.state is State.COMMITTING else f"has ended ({reason})"
        raise BatchClosedError(f"batch {self.batch_id} {what}", **self.facts())

    def facts(self, outcome: Outcome | None = None) -> dict[str, Any]:
        """Return what every `BatchError` says of the batch; None works the outcome out of what was reported."""
        if outcome is None:
            outcome = self._outcome()
        return {
            "batch_id": self.batch_id,
            "sent": self.sent,
            "acked": self.acked,
            "outcome": outcome,
            "ack": self.ack,
        }

    def _outcome(self) -> Outcome:
        if not self.sent:
            return "not_stored"
        if self.acked < self.sent:
            return "unknown" if self.ack is None else "partial"
        return "partial" if self.gap_count or self.error_count or self.in_doubt else "stored"


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
