"""An atomic batch as a machine (ADR-50, the atomic half; server API level 2, the end-of-batch marker level 4).

The server stages the messages of a batch and checks them only when it is committed, so until then nothing of it is
stored, whatever happens. After the commit was sent only its answer tells, and a lost answer means *unknown*.

======================  ==========================  ===========================================================
event                   in state OPEN               in state COMMITTING
======================  ==========================  ===========================================================
add                     takes a sequence            refused: the batch is being committed
commit, commit_eob      COMMITTING                  refused
discard, exception      DISCARDED                   UNKNOWN
zero-byte reply         the message is staged       ignored
batch ack               FAILED (no commit sent)     COMMITTED
ack without a batch     FAILED: server too old      FAILED: server too old (the message itself was stored)
refusal, batch open     sequence given back, if it  OPEN again: the same commit may be tried again
                        is the newest; else FAILED
any other refusal       FAILED                      FAILED: the server dropped the batch
silence, disconnection  FAILED                      UNKNOWN
======================  ==========================  ===========================================================

The refusals after which the server still has the batch are those that never reached it (503) and those of one message
(10054 too large, 10167 queue full, 10175 bad sequence). In every other state each operation raises what ended the batch.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from jetstream_ext.errors import (
    AtomicPublishDisabledError,
    BadHeaderError,
    BatchAbandonedError,
    BatchClosedError,
    BatchOutcomeUnknownError,
    EmptyBatchError,
    JetStreamExtError,
    NoStreamError,
    Outcome,
    ResponseError,
    ServerError,
    UnsupportedFeatureError,
    batch_refusal,
    server_error,
)
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.acks import parse_batch_ack, parse_refusal
from jetstream_ext.protocol.frames import SubjectCache, check_size, pub
from jetstream_ext.protocol.options import check_batch_id, message_headers, payload_bytes
from jetstream_ext.types import BatchAck, BatchMessage

ATOMIC_LEVEL: Final = 2
MARKER_LEVEL: Final = 4

_STILL_OPEN: Final = frozenset({10054, 10167, 10175})
_MANAGED: Final = frozenset({h.BATCH_ID.lower(), h.BATCH_SEQUENCE.lower(), h.BATCH_COMMIT.lower()})


class State(enum.Enum):
    """Where an atomic batch is."""

    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DISCARDED = "discarded"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Step:
    """One message to send: `encode` makes its bytes once the reply subject is known."""

    seq: int
    subject: bytes
    header: bytes
    payload: bytes
    wants_reply: bool

    def encode(self, reply: str = "") -> bytes:
        """Return the command."""
        return pub(self.subject, reply.encode(), self.header, self.payload)


class AtomicBatchMachine:
    """One atomic batch.

    Args:
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``.
        api_level: The server's JetStream API level. Under 4 the newest message is held back, because there the only
            way to commit is on a message.
        max_payload: The server's limit for headers and payload together, in bytes.
        ack_first: Ask for a reply to the first message.
        ack_every: Ask for one to every n-th message.
    """

    def __init__(
        self,
        *,
        batch_id: str,
        api_level: int,
        max_payload: int = 1 << 20,
        ack_first: bool = True,
        ack_every: int | None = None,
    ) -> None:
        self.batch_id = check_batch_id(batch_id)
        self.state = State.OPEN
        self.size = 0
        """Messages that are meant to be stored."""
        self.sent = 0
        """The highest batch sequence that was sent."""
        self.staged = 0
        """The highest batch sequence that the server said it has."""
        self.ack: BatchAck | None = None
        self.error: JetStreamExtError | None = None
        self.last_subject = ""
        """The subject of the newest message."""
        self._marker = api_level >= MARKER_LEVEL
        self._max_payload = max_payload
        self._ack_first = ack_first
        self._ack_every = ack_every
        self._held: tuple[BatchMessage, bool | None] | None = None
        self._first_subject = b""
        self._written: Counter[str] = Counter()
        self._subjects = SubjectCache()
        self._subject_before = ""
        self._commit_stores = False
        self._commit_held: BatchMessage | None = None

    # -- operations ---------------------------------------------------------------------------------------------

    def add(self, message: BatchMessage, ack: bool | None = None) -> Step | None:
        """Take a message; return what to send (None: it is held back).

        Raises:
            BatchError: The batch has ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self.check_open()
        self._check(message)
        step: Step | None
        if self._marker:
            step = self._step(message, ack)
        else:
            step = self._release()
            # A copy: it is encoded later, when the caller may have put something else into its headers.
            headers = dict(message.headers) if message.headers else None
            self._held = (replace(message, headers=headers, payload=payload_bytes(message.payload)), ack)
        self._count(message)
        return step

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
            self._check(message)
            released = self._release()
            if released is not None:
                steps.append(released)
            self._count(message)
            steps.append(self._step(message, True, commit="1"))
        elif self._held is not None:
            self._commit_held, self._held = self._held[0], None
            steps.append(self._step(self._commit_held, True, commit="1"))
        elif self.sent and self._marker:
            # The marker has a sequence of its own and is not stored.
            self.sent += 1
            header = h.encode(
                [(h.BATCH_ID, self.batch_id), (h.BATCH_SEQUENCE, str(self.sent)), (h.BATCH_COMMIT, "eob")]
            )
            steps.append(Step(self.sent, self._first_subject, header, b"", True))
        elif self.sent:
            raise EmptyBatchError(
                "a server before 2.14 can only commit on a message, and all are sent: give it one",
                **self._facts("not_stored"),
            )
        else:
            raise EmptyBatchError("there is nothing to commit", **self._facts("not_stored"))
        self._commit_stores = message is not None
        self.state = State.COMMITTING
        return steps

    def discard(self) -> None:
        """Give the batch up; the server forgets it by itself, and nothing of it is stored."""
        if self.state is State.OPEN:
            self.state = State.DISCARDED
            self._held = None
        elif self.state is State.COMMITTING:
            self._unknown("given up while the commit was on its way")

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

    def _check(self, message: BatchMessage) -> None:
        """Refuse here what the server would refuse at commit, when it costs the whole batch."""
        given: Mapping[str, str] = message.headers or {}
        names = {name.lower() for name in given}
        for name in given:
            if name.lower() in _MANAGED:
                raise BadHeaderError(f"header {name!r} belongs to the batch itself")
            if name.lower() == h.EXPECTED_LAST_MSG_ID.lower():
                raise BadHeaderError(f"header {name!r} cannot be used in an atomic batch")
        if self.size and (message.expected_last_seq is not None or h.EXPECTED_LAST_SEQ.lower() in names):
            raise ValueError("expected_last_seq can only be on the first message of an atomic batch")
        if message.expected_last_subject_seq is not None or h.EXPECTED_LAST_SUBJECT_SEQ.lower() in names:
            subject = message.expected_last_subject or message.subject
            for name, value in given.items():
                if name.lower() == h.EXPECTED_LAST_SUBJECT.lower():
                    subject = value
            if self._written[subject]:
                raise ValueError(
                    f"expected_last_subject_seq on {subject!r}: an earlier message of the batch wrote to that subject"
                )
        # Built with the longest sequence it can get, so that a message that passes here fits when it is sent.
        self._build(message, seq=1 << 32, commit="1")

    def _build(self, message: BatchMessage, *, seq: int, commit: str | None) -> tuple[bytes, bytes, bytes]:
        subject = self._subjects.encode(message.subject)
        payload = payload_bytes(message.payload)
        pairs = message_headers(message)
        pairs += [(h.BATCH_ID, self.batch_id), (h.BATCH_SEQUENCE, str(seq))]
        if commit is not None:
            pairs.append((h.BATCH_COMMIT, commit))
        header = h.encode(pairs)
        check_size(header, payload, self._max_payload)
        return subject, header, payload

    def _step(self, message: BatchMessage, ack: bool | None, commit: str | None = None) -> Step:
        seq = self.sent + 1
        subject, header, payload = self._build(message, seq=seq, commit=commit)
        self.sent = seq
        if seq == 1:
            self._first_subject = subject
        if ack is None:
            ack = (seq == 1 and self._ack_first) or bool(self._ack_every and seq % self._ack_every == 0)
        return Step(seq, subject, header, payload, ack)

    def _count(self, message: BatchMessage) -> None:
        self.size += 1
        self._written[message.subject] += 1
        self._subject_before, self.last_subject = self.last_subject, message.subject

    def _uncount(self) -> None:
        self.size -= 1
        self._written[self.last_subject] -= 1
        self.last_subject = self._subject_before

    def _release(self) -> Step | None:
        if self._held is None:
            return None
        (message, ack), self._held = self._held, None
        return self._step(message, ack)

    # -- replies ------------------------------------------------------------------------------------------------

    def receive(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        """Take the reply to the message with batch sequence `seq`.

        Returns:
            Why the message was refused, where the batch lives on without it; None otherwise (then `state` tells).
        """
        if self.state not in (State.OPEN, State.COMMITTING):
            return None
        try:
            return self._receive(seq, header, payload)
        except ResponseError as error:
            if self.state is State.COMMITTING:
                self._unknown(str(error), error)
            else:
                self._fail(BatchAbandonedError(f"batch {self.batch_id}: {error}", **self._facts("not_stored")), error)
            return None

    def _receive(self, seq: int, header: bytes, payload: bytes) -> JetStreamExtError | None:
        if not payload:
            status = h.parse_status(header) if header else None
            if status is None:
                self.staged = max(self.staged, seq)
                return None
            code, text = status
            return self._refused(seq, server_error(code=code, description=text or "no responders"))
        try:
            reply = orjson.loads(payload)
        except orjson.JSONDecodeError:
            raise ResponseError("the reply to a batch message is not JSON", frame=payload) from None
        if not isinstance(reply, dict):
            raise ResponseError("the reply to a batch message is not a JSON object", frame=payload)
        if reply.get("error") is not None:
            return self._refused(seq, parse_refusal(reply["error"], payload))
        if "batch" not in reply:
            self._fail(
                UnsupportedFeatureError(
                    f"batch {self.batch_id}: the server does not know atomic batches (it needs nats-server 2.12); "
                    f"{self.sent} of its messages may be stored as ordinary ones",
                    feature="atomic batch",
                    required_api_level=ATOMIC_LEVEL,
                )
            )
            return None
        try:
            ack = parse_batch_ack(reply)
        except (TypeError, ValueError):
            raise ResponseError("the ack of a batch is malformed", frame=payload) from None
        if self.state is not State.COMMITTING:
            raise ResponseError("the server committed a batch that was not to be committed", frame=payload)
        if ack.batch_id != self.batch_id or ack.batch_size != self.size:
            raise ResponseError(
                f"the ack is for batch {ack.batch_id!r} with {ack.batch_size} messages, "
                f"not for {self.batch_id!r} with {self.size}",
                frame=payload,
            )
        self.ack = ack
        self.state = State.COMMITTED
        return None

    def _refused(self, seq: int, error: ServerError) -> JetStreamExtError | None:
        failure: JetStreamExtError
        away = error.code == 503 and error.err_code is None
        if away:
            failure = NoStreamError(
                f"batch {self.batch_id}: no stream listens on the subject of message {seq}: "
                "it does not exist, or its leader is away",
                **self._facts("not_stored"),
            )
        elif isinstance(error, AtomicPublishDisabledError):
            failure = batch_refusal(
                error,
                f"batch {self.batch_id}: the stream does not take atomic batches; turn on allow_atomic",
                **self._facts("not_stored"),
            )
        else:
            what = "the commit" if self.state is State.COMMITTING and seq == self.sent else f"message {seq}"
            failure = batch_refusal(
                error,
                f"batch {self.batch_id}: {what} was refused: {error.description}; nothing of the batch is stored",
                **self._facts("not_stored"),
            )
        # With a message held back the refusal is not of the newest one, and would reach its caller all the same.
        newest = seq == self.sent and seq > 1 and self._held is None
        if newest and (away or error.err_code in _STILL_OPEN):
            # The server did not count it: its sequence is free, and the same message may be tried again.
            self.sent -= 1
            if self.state is State.OPEN or self._commit_stores:
                self._uncount()
            elif self._commit_held is not None:
                self._held = (self._commit_held, None)
            self.state = State.OPEN
            return failure
        self._fail(failure)
        return None

    # -- endings without a reply --------------------------------------------------------------------------------

    def unheard(self, refusal: JetStreamExtError) -> None:
        """Take it that nobody waits for the refusal that `receive` returned: a message is missing, and no one knows."""
        if self.state is State.OPEN:
            self._fail(refusal)

    def lost(self, why: str) -> None:
        """Take the loss of a reply that was waited for: silence, or a connection that is gone."""
        if self.state is State.COMMITTING:
            self._unknown(why)
        elif self.state is State.OPEN:
            self._fail(
                BatchAbandonedError(
                    f"batch {self.batch_id}: {why}; nothing of the batch is stored", **self._facts("not_stored")
                )
            )

    def _unknown(self, why: str, cause: Exception | None = None) -> None:
        self.state = State.UNKNOWN
        self.error = BatchOutcomeUnknownError(
            f"batch {self.batch_id}: {why}; its {self.size} messages are either all stored or none",
            **self._facts("unknown"),
        )
        self.error.__cause__ = cause

    def _fail(self, error: JetStreamExtError, cause: Exception | None = None) -> None:
        self.state = State.FAILED
        self.error = error
        error.__cause__ = cause
        self._held = None

    def _facts(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "batch_id": self.batch_id,
            "sent": self.sent,
            "acked": self.staged,
            "outcome": outcome,
            "ack": self.ack,
        }
