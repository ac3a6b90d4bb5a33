"""An atomic batch as a machine (ADR-50, the atomic half; server API level 2, the end-of-batch marker level 4).

The server stages the messages of a batch and checks them only when it is committed, so until then nothing of it is
stored, whatever happens. After the commit was sent only its answer tells, and a lost answer means *unknown*.

`NEXT` says what leads where; an event that it does not have in a state changes nothing there, and an operation that it
does not have raises what ended the batch. In `OPEN` a loss means that nothing is stored, for no commit was sent; from
`COMMITTING` on it means that nobody knows.

The refusals after which the server still has the batch are those that never reached it (503) and those of one message
(10054 too large, 10167 queue full, 10175 bad sequence). The sequence is given back, if it is the newest and not the
first; a commit may be tried again. Any other refusal says that the server dropped the batch.

A server keeps a batch by its id, not by the connection, so a lost connection need not end it; but messages that were
not acknowledged may be gone, and so may the server. After a disconnection the next message therefore asks for a reply:
a zero-byte one proves that everything before it arrived, 10176 that the batch is lost (`BatchAbandonedError`).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator
from typing import Any, Final

from jetstream_ext.errors import (
    BatchAbandonedError,
    BatchClosedError,
    BatchOutcomeUnknownError,
    EmptyBatchError,
    JetStreamExtError,
    Outcome,
    ResponseError,
    ServerError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.atomic_messages import NO_OPTIONS, Block, Encoded, Encoder, header_of, options_of
from jetstream_ext.protocol.atomic_messages import Step as Step
from jetstream_ext.protocol.atomic_replies import Reply, failure, leaves_open, read_reply
from jetstream_ext.protocol.options import as_message, check_batch_id
from jetstream_ext.types import BatchAck, BatchMessage, Entry

ATOMIC_LEVEL: Final = feature_table.ATOMIC.api_level
MARKER_LEVEL: Final = feature_table.ATOMIC_EOB.api_level

# However few replies are asked for: a server that gave the batch up says so in replies only, and the source of the
# messages need not have an end. A bulk waits for the server where it is so many messages behind.
_ASK_AT_LEAST_EVERY: Final = 1000


class State(enum.Enum):
    """Where an atomic batch is."""

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DISCARDED = "discarded"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Event(enum.Enum):
    """What can happen to one."""

    COMMIT = "commit or commit_eob"
    DISCARD = "discard, or an exception"
    STAGED = "a zero-byte reply: the message is staged"
    ACK = "the ack of a batch"
    ORDINARY = "the ack of an ordinary message: the server is too old"
    REFUSED_ONE = "the refusal of the newest message alone"
    REFUSED = "any other refusal"
    MALFORMED = "a reply that breaks the protocol, an empty one to the commit among them"
    LOST = "silence, or a disconnection while a reply is awaited"
    FOUND = "resolve: the batch is stored"
    NOT_FOUND = "resolve: nothing of it is stored"


NEXT: Final[dict[State, dict[Event, State]]] = {
    State.OPEN: {
        Event.COMMIT: State.COMMITTING,
        Event.DISCARD: State.DISCARDED,
        Event.STAGED: State.OPEN,
        Event.ACK: State.UNKNOWN,  # of a commit that nobody sent
        Event.ORDINARY: State.FAILED,
        Event.REFUSED_ONE: State.OPEN,
        Event.REFUSED: State.FAILED,
        Event.MALFORMED: State.FAILED,
        Event.LOST: State.FAILED,
    },
    State.COMMITTING: {
        Event.DISCARD: State.UNKNOWN,
        Event.STAGED: State.COMMITTING,
        Event.ACK: State.COMMITTED,
        Event.ORDINARY: State.FAILED,
        Event.REFUSED_ONE: State.OPEN,
        Event.REFUSED: State.FAILED,
        Event.MALFORMED: State.UNKNOWN,
        Event.LOST: State.UNKNOWN,
    },
    State.UNKNOWN: {Event.FOUND: State.COMMITTED, Event.NOT_FOUND: State.FAILED},
    State.FAILED: {Event.FOUND: State.COMMITTED},  # refused, because its messages were stored before (10201)
    State.COMMITTED: {},
    State.DISCARDED: {},
}
"""Where a batch goes; what is not here changes nothing."""


class AtomicBatchMachine:
    """One atomic batch.

    Args:
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``.
        api_level: The server's JetStream API level. Under 4 the newest message is held back, because there the only
            way to commit is on a message.
        max_payload: The server's limit for headers and payload together, in bytes.
        ack_first: Ask for a reply to the first message.
        ack_every: Ask for one to every n-th message; None is every 1000th.
        hold_back: Hold the newest message back at any level: for a caller that commits by it, without a marker.
        server_version: The server's version, where it is known: 2.12.0 gets one thing wrong.
    """

    def __init__(
        self,
        *,
        batch_id: str,
        api_level: int,
        max_payload: int = 1 << 20,
        ack_first: bool = True,
        ack_every: int | None = None,
        hold_back: bool = False,
        server_version: str = "",
    ) -> None:
        self.batch_id: str = check_batch_id(batch_id)
        self.state: State = State.OPEN
        self.sent: int = 0
        """The highest batch sequence that was sent."""
        self.staged: int = 0
        """The highest batch sequence that the server said it has."""
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        self._marker = api_level >= MARKER_LEVEL
        self._hold_back = hold_back or not self._marker
        self._encoder = Encoder(batch_id, max_payload, server_version)
        self._ack_first = ack_first
        self._ack_every = ack_every or _ASK_AT_LEAST_EVERY
        self._held: Encoded | None = None
        self._first_subject = b""
        self._subjects: list[str] = []
        self._commit_stores = False
        self._commit_held: Encoded | None = None
        self._doubt_from = 0
        """The first sequence after a disconnection that no reply has settled, or 0."""

    @property
    def size(self) -> int:
        """How many messages are meant to be stored."""
        return len(self._subjects)

    @property
    def last_subject(self) -> str:
        """The subject of the newest of them."""
        return self._subjects[-1] if self._subjects else ""

    # -- operations ---------------------------------------------------------------------------------------------

    def check(self, message: BatchMessage) -> None:
        """Raise what `add` would raise of this message; nothing changes."""
        self._encoder.encode(message, None, first=not self.size)

    def add(self, message: BatchMessage, ack: bool | None = None) -> Step | None:
        """Take a message; return what to send (None: it is held back).

        Raises:
            BatchError: The batch has ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
            UnsupportedFeatureError: Refused, because this server would do something else with it.
        """
        self.check_open()
        return self._take(self._encoder.encode(message, ack, first=not self.size))

    def add_many(self, messages: Iterator[Entry], reply: bytes, limit: int) -> Block:
        """Take messages until their payloads are `limit` bytes, or something stops it.

        The messages before what stopped it are in the block and part of the batch; a refused one is not.

        Args:
            messages: Where they come from.
            reply: What the reply subject of a message begins with, its sequence follows.
            limit: Payload bytes after which to return; the message that reaches it is the last.

        Raises:
            BatchError: The batch has ended; nothing was taken.
        """
        self.check_open()
        out: list[bytes] = []
        size = ask = acked = 0
        names: list[str] = []  # counted in one go, unless something has to look at them
        stopped: BaseException | None = StopIteration()
        encode, hold_back, ack_every = self._encoder.encode, self._hold_back, self._ack_every
        plain, room, known = self._encoder.plain, self._encoder.plain_room, self._encoder.subjects.encode
        try:
            for message in messages:
                if (
                    type(message) is tuple
                    and len(message) == 2
                    and type(message[1]) is bytes
                    and len(message[1]) <= room
                ):
                    name, payload = message
                    encoded: Encoded = (name, known(name), plain, payload, None)
                elif (
                    type(message) is BatchMessage
                    and options_of(message) == NO_OPTIONS
                    and type(message.payload) is bytes
                    and len(message.payload) <= room
                ):
                    # These two are nearly every message of a bulk; the same as `Encoder.encode` makes of it.
                    encoded = (message.subject, known(message.subject), plain, message.payload, None)
                else:
                    given = as_message(message)
                    self._count(names)
                    names = []
                    encoded = encode(given, None, first=not self.size)
                names.append(encoded[0])
                if hold_back:
                    ready, self._held = self._held, encoded
                    if ready is None:
                        continue
                else:
                    ready = encoded
                seq = self.sent + 1
                if seq == 1 or not seq % ack_every or self._doubt_from or ready[4] is not None:
                    step = self._step(ready)
                    out.append(step.encode((reply + b"%d" % seq).decode() if step.wants_reply else ""))
                    if step.wants_reply:
                        acked = seq
                        ask = seq if self._doubt_from or seq - self.staged >= _ASK_AT_LEAST_EVERY else 0
                else:
                    self.sent = seq
                    _, subject, head, payload, _ = ready
                    total = len(head) + len(str(seq)) + 4
                    out.append(
                        b"HPUB %b %d %d\r\n%b%d\r\n\r\n%b\r\n"
                        % (subject, total, total + len(payload), head, seq, payload)
                    )
                size += len(ready[3])
                if size >= limit or ask:
                    stopped = None
                    break
        except BaseException as error:  # the caller raises it, once what was taken is sent
            stopped = error
        self._count(names)
        return Block(b"".join(out), len(out), size, ask, acked, stopped)

    def commit(self, message: BatchMessage | None) -> list[Step]:
        """Take the commit, with a last message or none; return what to send, the commit last.

        Raises:
            EmptyBatchError: Neither messages before nor one now; nothing changed.
            BatchError: The batch has ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self.check_open()
        steps: list[Step] = []
        if message is not None:
            last = self._encoder.encode(message, True, first=not self.size)
            if self._held is not None:
                held, self._held = self._held, None
                steps.append(self._step(held))
            self._count([last[0]])
            steps.append(self._step(last, commit=True))
        elif self._held is not None:
            self._commit_held, self._held = self._held, None
            steps.append(self._step(self._commit_held, commit=True))
        elif self.sent and self._marker:
            # The marker has a sequence of its own and is not stored.
            self.sent += 1
            steps.append(Step(self.sent, self._first_subject, self._encoder.marker(self.sent), b"", True))
        elif self.sent:
            raise EmptyBatchError(
                "a server before 2.14 can only commit on a message, and all are sent: give it one",
                **self._facts("not_stored"),
            )
        else:
            raise EmptyBatchError("there is nothing to commit", **self._facts("not_stored"))
        self._commit_stores = message is not None
        self._happened(Event.COMMIT)
        return steps

    def discard(self) -> None:
        """Give the batch up; the server forgets it by itself, and nothing of it is stored."""
        self._happened(Event.DISCARD, "given up while the commit was on its way")

    def check_open(self) -> None:
        """Raise what ended the batch, if something did.

        Raises:
            BatchError: The reason.
        """
        if self.state is State.OPEN:
            return
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__
        what = "is being committed" if self.state is State.COMMITTING else f"has ended ({self.state.value})"
        outcome: Outcome = {State.COMMITTED: "stored", State.DISCARDED: "not_stored"}.get(self.state, "unknown")  # type: ignore[assignment]
        raise BatchClosedError(f"batch {self.batch_id} {what}", **self._facts(outcome))

    # -- messages -----------------------------------------------------------------------------------------------

    def _take(self, encoded: Encoded) -> Step | None:
        step: Step | None = None
        if self._hold_back:
            held, self._held = self._held, encoded
            if held is not None:
                step = self._step(held)
        else:
            step = self._step(encoded)
        self._count([encoded[0]])
        return step

    def _step(self, encoded: Encoded, *, commit: bool = False) -> Step:
        seq = self.sent = self.sent + 1
        if seq == 1:
            self._first_subject = encoded[1]
        ack = encoded[4]
        if ack is None:
            ack = (seq == 1 and self._ack_first) or seq % self._ack_every == 0
        wants_reply = ack or commit or bool(self._doubt_from)
        return Step(seq, encoded[1], header_of(encoded, seq, commit=commit), encoded[3], wants_reply)

    def _count(self, names: list[str]) -> None:
        self._subjects += names
        self._encoder.count(names)

    def _uncount(self) -> None:
        self._encoder.uncount(self._subjects.pop())

    # -- replies ------------------------------------------------------------------------------------------------

    def receive(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        """Take the reply to the message with batch sequence `seq`.

        Returns:
            Why the message was refused, where the batch lives on without it; None otherwise (then `state` tells).
        """
        if Event.STAGED not in NEXT[self.state] or not 0 < seq <= self.sent:
            return None  # too late, or to nothing that was sent
        try:
            return self._receive(seq, header, payload)
        except ResponseError as error:
            self._happened(Event.MALFORMED, str(error), cause=error)
            return None

    def _receive(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        reply = read_reply(header, payload)
        if isinstance(reply, ServerError):
            return self._refused(seq, reply)
        if isinstance(reply, BatchAck):
            self._acknowledged(reply, payload)
        elif reply is Reply.ORDINARY:
            too_old = UnsupportedFeatureError(
                f"batch {self.batch_id}: the server does not know atomic batches (it needs nats-server "
                f"{feature_table.ATOMIC.since}); {self.sent} of its messages may be stored as ordinary ones",
                feature=feature_table.ATOMIC.title,
                required_api_level=ATOMIC_LEVEL,
            )
            self._happened(Event.ORDINARY, error=too_old)
        elif self.state is State.COMMITTING and seq == self.sent:
            raise ResponseError("the answer to the commit is empty", frame=header)
        else:
            self._happened(Event.STAGED)
            self.staged = max(self.staged, seq)
            if 0 < self._doubt_from <= seq:
                self._doubt_from = 0  # the server counts without gaps: all that came before is there
        return None

    def _acknowledged(self, ack: BatchAck, payload: bytes) -> None:
        if ack.batch_id != self.batch_id or (self.state is State.COMMITTING and ack.batch_size != self.size):
            raise ResponseError(
                f"the ack is for batch {ack.batch_id!r} with {ack.batch_size} messages, "
                f"not for {self.batch_id!r} with {self.size}",
                frame=payload,
            )
        self._happened(Event.ACK, "the server says that it committed the batch, which nobody asked it to")
        if self.state is State.COMMITTED:
            self.ack = ack

    def _refused(self, seq: int, refusal: ServerError) -> JetStreamExtError | None:
        what = "the commit" if self.state is State.COMMITTING and seq == self.sent else f"message {seq}"
        error = failure(refusal, self.batch_id, what, in_doubt=bool(self._doubt_from), facts=self._facts("not_stored"))
        # With a message held back the refusal is not of the newest one, and would reach its caller all the same.
        newest = seq == self.sent and seq > 1 and self._held is None
        if newest and leaves_open(refusal):
            # The server did not count it: its sequence is free, and the same message may be tried again.
            self.sent -= 1
            if self.state is State.OPEN or self._commit_stores:
                self._uncount()
            elif self._commit_held is not None:
                self._held = self._commit_held
            self._happened(Event.REFUSED_ONE)
            return error
        self._happened(Event.REFUSED, error=error, cause=error.__cause__)
        return None

    # -- endings without a reply --------------------------------------------------------------------------------

    def unheard(self, refusal: JetStreamExtError) -> None:
        """Take it that nobody waits for the refusal that `receive` returned: a message is missing, and no one knows."""
        if self.state is State.OPEN:
            self._happened(Event.REFUSED, error=refusal, cause=refusal.__cause__)

    def lost(self, why: str) -> None:
        """Take the loss of a reply that was waited for: silence, or a connection that is gone."""
        self._happened(Event.LOST, why)

    def disconnected(self) -> None:
        """Take the loss of the connection while no reply was waited for."""
        if self.state is State.OPEN and self.sent:
            self._doubt_from = self.sent + 1

    def resolved(self, ack: BatchAck | None) -> None:
        """Take the truth about a commit without a (good) answer: the ack it should have had, or None: nothing stored."""
        if ack is None:
            self._happened(Event.NOT_FOUND, "the stream has nothing of it: it was not committed", cause=self.error)
            return
        self._happened(Event.FOUND)
        if self.state is State.COMMITTED:
            self.ack, self.error = ack, None

    def _happened(
        self,
        event: Event,
        why: str = "",
        *,
        error: JetStreamExtError | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Go where `event` leads.

        Args:
            event: What happened.
            why: What that was, for the error that callers see from then on.
            error: That error, where the batch fails by a more telling one.
            cause: What it was raised from.
        """
        after = NEXT[self.state].get(event)
        if after is None or after is self.state:
            return
        self.state = after
        if after is State.UNKNOWN:
            self.error = BatchOutcomeUnknownError(
                f"batch {self.batch_id}: {why}; its {self.size} messages are either all stored or none",
                **self._facts("unknown"),
            )
            self.error.__cause__ = cause
        elif after is State.FAILED:
            self.error = error or BatchAbandonedError(
                f"batch {self.batch_id}: {why}; nothing of the batch is stored", **self._facts("not_stored")
            )
            self.error.__cause__ = cause
        if after in (State.FAILED, State.DISCARDED):
            self._held = None

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "batch_id": self.batch_id,
            "sent": self.sent,
            "acked": self.staged,
            "outcome": outcome,
            "ack": self.ack,
        }
