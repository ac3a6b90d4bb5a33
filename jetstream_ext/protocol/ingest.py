"""`ingest` as a machine: fast batches, one after the other, and a search of the stream after one that broke.

A fast batch in fail mode stores its messages in their order up to some point. Its final ack says up to which; without
one, the messages that were sent and not acknowledged may be stored, and the stream is searched for them. What it shows
is stored, what it lacks is sent again, in the next batch, under the same message ids, and what it can no longer show is
sent again and *in doubt*. `TABLE` says where each input leads in each state.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.outcome import Messages, Verdict
from jetstream_ext.text import get_logger, log_state

_log: Final = get_logger("ingest")


class State(enum.Enum):
    """What a run does: the columns of `TABLE`."""

    SENDING = "sending"  # a fast batch takes the messages of the window, and then those of the source
    SEARCHING = "searching"  # a batch broke: is the stream still the same, and what of the window does it have?
    DONE = "done"  # everything that was read is stored, or what stopped the run is known


class Input(enum.Enum):
    """What can happen to a run: the rows of `TABLE`."""

    ACKNOWLEDGED = "messages were acknowledged"
    BATCH_DONE = "the first batch was committed"
    BATCH_BROKE = "a batch ended without a commit, or it was a later one: the stream may be another one"
    FOUND = "the search has a verdict, or the stream cannot show what it has"
    STREAM_GONE = "the stream that has acknowledged messages was deleted, or deleted and created again"
    STOPPED = "the source has ended, a message was refused, or the time is over"


SENDING, SEARCHING, DONE = State
___: Final = None

TABLE: Final[dict[Input, tuple[State | None, ...]]] = {
    #                      SENDING    SEARCHING  DONE
    Input.ACKNOWLEDGED:   (SENDING,   ___,       ___),
    Input.BATCH_DONE:     (SENDING,   ___,       ___),
    Input.BATCH_BROKE:    (SEARCHING, ___,       ___),
    Input.FOUND:          (___,       SENDING,   ___),
    Input.STREAM_GONE:    (___,       DONE,      ___),
    Input.STOPPED:        (DONE,      DONE,      ___),
}  # fmt: skip
"""Where an input leads; ``___`` cannot happen."""

_NEXT: Final = {(state, event): after for event, row in TABLE.items() for state, after in zip(State, row, strict=True)}


@dataclass(slots=True)
class Counts:
    """What a report says."""

    stored: int = 0  # the first so many messages of the source
    found: int = 0  # of them, those that a search found, so that they were not sent again
    resent: int = 0
    batches: int = 0
    in_doubt: int = 0  # of them, those that may be stored more than once


class Ingest:
    """One run. `id_of` and `subject_of` read an entry of the window; `run_id` begins ids that nothing else has."""

    def __init__(
        self, run_id: str, window: deque[Any], id_of: Callable[[Any], str], subject_of: Callable[[Any], str]
    ) -> None:
        self.state: State = SENDING
        self.window: deque[Any] = window
        """The messages that were read and are not known to be stored, oldest first."""
        self.counts: Counts = Counts()
        self.unanswered: int = 0  # how many of them, from the oldest on, the batch that broke may have stored
        self.stream: StreamState | None = None  # as it was when it was last known to be the one of the whole run
        self._run_id = run_id
        self._id_of, self._subject_of = id_of, subject_of
        self._after = 0  # a sequence that the stream had before any message of the window was sent
        self._known: Any = None  # the newest message that is certainly stored
        self._late = 0  # how many of the oldest messages may still arrive over a connection that was lost
        self._doubtful = 0  # how many of the oldest messages may have a copy that a search cannot show
        self._in_batch = 0  # messages of the present batch that are acknowledged
        self._again = False  # it began with messages of an earlier one
        self._earlier = 0  # how many messages were stored before it began

    @property
    def may_be_stored(self) -> int:
        """How many messages of the window, from the oldest on, may be stored."""
        return max(self.unanswered, self._doubtful, self._late)

    # -- sending ----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Any]:
        """Begin a batch; return the messages that it takes before those of the source."""
        self._in_batch, self._again = 0, bool(self.window)
        self._earlier = self.counts.stored
        return list(self.window)

    def opened(self, stream: StreamState | None, last_seq: int) -> None:
        """Take what was known about the stream when the batch was opened."""
        if stream is not None:
            self.stream = stream
            if not self._again:
                self._after = max(self._after, last_seq)

    def acknowledged(self, up_to: int) -> bool:
        """Take that the server has the messages of the batch up to the sequence `up_to`; return whether that is new."""
        if up_to <= self._in_batch:
            return False
        self.counts.batches += not self._in_batch
        self._confirm(up_to - self._in_batch)
        self._in_batch = up_to
        self._enter(Input.ACKNOWLEDGED)
        return True

    def ended(self, *, sent: int, final: int | None, stored_nothing: bool, committed: bool) -> None:
        """Take the end of the batch, of which `sent` messages were sent.

        `final` is the sequence in its final ack, which acknowledged all that is stored; None without one. `stored_nothing`:
        the batch was refused.
        """
        if final is not None:
            self._after = max(self._after, final)
            self.counts.resent += sent - self._in_batch
        elif not stored_nothing:
            self.unanswered = sent - self._in_batch
        self._enter(Input.BATCH_DONE if committed and not self._earlier else Input.BATCH_BROKE)

    def distrust(self, sent: int) -> None:
        """Take that the acknowledgements of the batch, of which `sent` messages were sent, may be those of another stream."""
        self.counts.stored -= self._in_batch
        self.unanswered = sent

    def drop_unsent(self, sent: int) -> None:
        """Forget the messages of the window behind the first `sent` ones: the run ends before them."""
        while len(self.window) > sent:
            self.window.pop()

    def _confirm(self, count: int, *, found: bool = False) -> None:
        """Take the oldest `count` messages out of the window: they are stored."""
        for _ in range(count):
            self._known = self.window.popleft()
        counts, doubtful = self.counts, min(count, self._doubtful)
        counts.stored += count
        counts.found += count if found else 0
        counts.in_doubt += doubtful
        self._doubtful -= doubtful
        self._late = max(0, self._late - count)
        self.unanswered = max(0, self.unanswered - count)

    # -- searching --------------------------------------------------------------------------------------------------

    def write(self) -> Messages | None:
        """Return what is to be found out; None: the stream is not known."""
        if self.stream is None:
            return None
        sent = [self.window[index] for index in range(self.unanswered)]
        ids = tuple(map(self._id_of, sent))
        unique = all(msg_id.startswith(self._run_id) for msg_id in ids)
        subjects = list(map(self._subject_of, sent))
        subject = next((name for name in reversed(subjects) if self.stream.stores(name)), subjects[-1] if sent else "")
        known = "" if self._known is None else self._id_of(self._known)
        own = ("", frozenset[str]()) if not known else (self._subject_of(self._known), frozenset((known, *ids)))
        return Messages(subject, len(ids), self.stream, self._after, ids, unique, known, own)

    def found(self, verdict: Verdict) -> None:
        self._confirm(verdict.stored, found=True)
        self._after = max(self._after, verdict.seq)
        self.stream = verdict.stream or self.stream
        if verdict.doubt:
            self._doubtful = max(self._doubtful, self.unanswered)
        self.counts.resent += self.unanswered
        self._late = max(self._late, self.unanswered)
        self.unanswered = 0
        self._enter(Input.FOUND)

    def not_readable(self) -> None:
        """Take that the stream cannot show what it has."""
        self.found(Verdict(0, doubt="it cannot be read"))

    def gone(self) -> None:
        """Take that the stream is gone: nothing that it acknowledged is stored."""
        if self.counts.stored:
            self._enter(Input.STREAM_GONE)
        else:  # nothing was acknowledged, so nothing is lost: the messages go to the next stream of this name
            self._late = max(self._late, self.unanswered)
            self.stream, self._after, self.unanswered = None, 0, 0
            self._enter(Input.FOUND)

    def stop(self) -> None:
        self._enter(Input.STOPPED)

    def _enter(self, event: Input) -> None:
        before, after = self.state, _NEXT[self.state, event]
        assert after is not None, f"{event} in {before}"
        self.state = after
        if after is not before:
            log_state(
                _log, f"run {self._run_id}", f"{before.name} -> {after.name}", event.value,
                stored=self.counts.stored, waiting=len(self.window), unanswered=self.unanswered,
            )  # fmt: skip
