"""What can go wrong while messages are stored: refused here, or in a batch whose end has to be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import nats.errors
import nats.js.errors

from jetstream_ext.errors.base import JetStreamExtError

if TYPE_CHECKING:
    from jetstream_ext.types import BatchAck, IngestReport

Outcome = Literal["not_stored", "partial", "stored", "unknown"]


class BadSubjectError(JetStreamExtError, nats.errors.BadSubjectError, ValueError):
    """A subject (or stream name) that may not be published to; nothing was sent."""


class BadHeaderError(JetStreamExtError, nats.errors.BadHeaderError, ValueError):
    """A header that would break the message apart, or that the library sets itself; nothing was sent."""


class MaxPayloadError(JetStreamExtError, nats.errors.MaxPayloadError, ValueError):
    """A message (with its headers) is larger than the server's ``max_payload``; nothing was sent."""


class IngestError(JetStreamExtError):
    """An `ingest` stopped. What stopped it is the cause; everything before ``index`` is stored.

    Attributes:
        index: The place in the source, from 0, of the first message that is not known to be stored. If the cause is the
            message itself, this is it, and nothing after it is stored.
        subject: That message's subject, if it was taken from the source.
        report: What was done until then.
    """

    def __init__(
        self, message: str = "", *, index: int = 0, subject: str | None = None, report: IngestReport | None = None
    ) -> None:
        super().__init__(message)
        self.index = index
        self.subject = subject
        self.report = report


class BatchError(JetStreamExtError):
    """A batch cannot go on.

    Attributes:
        batch_id: The batch.
        sent: How many of its messages were handed to the connection.
        acked: The highest batch sequence the server acknowledged.
        outcome: ``"not_stored"``, ``"partial"``, ``"stored"`` or ``"unknown"``.
        ack: The server's final word on the batch, where there was one.
    """

    def __init__(
        self,
        message: str = "",
        *,
        batch_id: str = "",
        sent: int = 0,
        acked: int = 0,
        outcome: Outcome = "unknown",
        ack: BatchAck | None = None,
    ) -> None:
        super().__init__(message)
        self.batch_id = batch_id
        self.sent = sent
        self.acked = acked
        self.outcome: Outcome = outcome
        self.ack = ack


class BatchClosedError(BatchError):
    """The batch was used after its end."""


class EmptyBatchError(BatchError):
    """There is nothing to commit."""


class BatchAbandonedError(BatchError):
    """The batch was given up: the connection was lost, or the server forgot it."""


class BatchGapError(BatchError):
    """Messages of a fast batch never reached the stream.

    Attributes:
        first_lost: The first batch sequence that was lost.
        last_lost: The last one.
    """

    def __init__(self, message: str = "", *, first_lost: int = 0, last_lost: int = 0, **batch: Any) -> None:
        super().__init__(message, **batch)
        self.first_lost = first_lost
        self.last_lost = last_lost


class BatchOutcomeUnknownError(BatchError):
    """The answer was lost: the messages may or may not be stored. Never treat it as a failure."""


class NoStreamError(BatchError, nats.js.errors.NoStreamResponseError):
    """No stream listens on the subject, or its leader is away (status 503)."""
