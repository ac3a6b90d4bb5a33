"""The server's own refusals: one class per error code, and the table of the codes."""

from typing import Any, ClassVar

import nats.js.errors
from typing_extensions import override

from jetstream_ext.errors.base import JetStreamExtError, fill_api_error
from jetstream_ext.errors.writing import BatchError


class ServerError(JetStreamExtError, nats.js.errors.APIError):
    """The server refused, with an error code of its own.

    Attributes:
        code: The HTTP-like status (400, 412, 429, 500, 503 …).
        err_code: The server's own number for the error.
        description: The server's text.
        retryable: Whether the same call may succeed later, unchanged.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str = "",
        *,
        code: int | None = None,
        err_code: int | None = None,
        description: str = "",
        **batch: Any,
    ) -> None:
        # Cooperative: a leaf that is a BatchError too takes the batch's fields on the way up.
        super().__init__(message or description, **batch)
        fill_api_error(self, code=code, err_code=err_code, description=description or message, stream=None)

    @override
    def __str__(self) -> str:
        text = JetStreamExtError.__str__(self)
        return f"{text} (error {self.err_code})" if self.err_code else text


class BatchServerError(ServerError, BatchError):
    """A refusal of a batch whose code has no class of its own here."""


class WrongLastSequenceError(BatchServerError):
    """10071, 10164: the stream or the subject moved on since the expected sequence."""


class KeyConflictError(WrongLastSequenceError, nats.js.errors.KeyWrongLastSequenceError):
    """A key is not at the revision that an operation expected; nothing was written.

    Attributes:
        keys: The keys in conflict; none where only the bucket as a whole is known to have moved on.
        stale_read: Whether a transaction had read one of them before it changed, so that it can be run again.
    """

    def __init__(
        self, message: str = "", *, keys: tuple[str, ...] = (), stale_read: bool = False, **refusal: Any
    ) -> None:
        super().__init__(message, **refusal)
        self.keys: tuple[str, ...] = tuple(keys)
        self.stale_read = stale_read

    @override
    def __str__(self) -> str:
        return JetStreamExtError.__str__(self)


class StreamMismatchError(BatchServerError):
    """10060: the subject belongs to another stream than expected."""


class MessageTooLargeError(BatchServerError):
    """10054: the message is larger than the stream's ``max_msg_size``."""


class MessageTTLInvalidError(BatchServerError):
    """10165: the time to live cannot be parsed, or is under a second."""


class MessageTTLDisabledError(BatchServerError):
    """10166: the stream lacks ``allow_msg_ttl``."""


class TooManyRequestsError(BatchServerError):
    """10167: the stream's ingest queue is full; the message was dropped."""

    retryable = True


class AtomicPublishDisabledError(BatchServerError):
    """10174: the stream lacks ``allow_atomic``."""


class AtomicPublishMissingSequenceError(BatchServerError):
    """10175: a batch message came without a valid sequence."""


class AtomicPublishIncompleteError(BatchServerError):
    """10176: the batch has a hole, or the server no longer knows it."""


class AtomicPublishUnsupportedHeaderError(BatchServerError):
    """10177: a header that may not be used inside an atomic batch."""


class AtomicPublishInvalidBatchIDError(BatchServerError):
    """10179: the batch id is too long."""


class RequiredApiLevelError(BatchServerError):
    """10185: the server is older than the API level that the request asks for."""


class AtomicPublishMirrorError(BatchServerError):
    """10198: a mirror cannot take atomic batches."""


class AtomicPublishTooLargeError(BatchServerError):
    """10199: the batch has more messages than the server allows (1000 by default)."""


class AtomicPublishInvalidCommitError(BatchServerError):
    """10200: the server does not know this way to commit."""


class AtomicPublishDuplicateMessageIDError(BatchServerError):
    """10201: a message id is in the stream's duplicate window, or twice in the batch."""


class ConsumerInvalidResetError(ServerError, nats.js.errors.ConsumerInvalidResetError):
    """10204: the consumer's deliver policy forbids this reset."""


class FastPublishDisabledError(BatchServerError):
    """10205: the stream lacks ``allow_batched``."""


class FastPublishInvalidPatternError(BatchServerError):
    """10206: the reply subject of a fast-ingest message is malformed."""


class FastPublishInvalidBatchIDError(BatchServerError):
    """10207: the batch id is too long."""


class FastPublishUnknownBatchError(BatchServerError):
    """10208: the server does not know the batch (any more)."""


class FastPublishMirrorError(BatchServerError):
    """10209: a mirror cannot take fast ingest."""


class AtomicPublishTooManyInflightError(BatchServerError):
    """10210: too many atomic batches are open on the stream or the server."""

    retryable = True


class FastPublishTooManyInflightError(BatchServerError):
    """10211: too many fast batches are open on the stream or the server."""

    retryable = True


SERVER_ERRORS: dict[int, type[ServerError]] = {
    10054: MessageTooLargeError,
    10060: StreamMismatchError,
    10071: WrongLastSequenceError,
    10164: WrongLastSequenceError,
    10165: MessageTTLInvalidError,
    10166: MessageTTLDisabledError,
    10167: TooManyRequestsError,
    10174: AtomicPublishDisabledError,
    10175: AtomicPublishMissingSequenceError,
    10176: AtomicPublishIncompleteError,
    10177: AtomicPublishUnsupportedHeaderError,
    10179: AtomicPublishInvalidBatchIDError,
    10185: RequiredApiLevelError,
    10198: AtomicPublishMirrorError,
    10199: AtomicPublishTooLargeError,
    10200: AtomicPublishInvalidCommitError,
    10201: AtomicPublishDuplicateMessageIDError,
    10204: ConsumerInvalidResetError,
    10205: FastPublishDisabledError,
    10206: FastPublishInvalidPatternError,
    10207: FastPublishInvalidBatchIDError,
    10208: FastPublishUnknownBatchError,
    10209: FastPublishMirrorError,
    10210: AtomicPublishTooManyInflightError,
    10211: FastPublishTooManyInflightError,
}
"""Every error code the library knows by name.

Codes of the ADR drafts (10203-10206 for fast ingest) mean other things on released servers and are deliberately absent.
"""


def server_error(
    *, code: int | None = None, err_code: int | None = None, description: str = "", message: str = ""
) -> ServerError:
    """Build the error for a server's refusal; an unknown code gives a plain `ServerError`."""
    cls = SERVER_ERRORS.get(err_code or 0, ServerError)
    return cls(message, code=code, err_code=err_code, description=description)


def batch_refusal(error: ServerError, message: str, **batch: Any) -> BatchServerError:
    """Return `error` as a `BatchError` too, with what is known of the batch (the keywords of `BatchError`)."""
    cls = type(error) if isinstance(error, BatchServerError) else BatchServerError
    return cls(message, code=error.code, err_code=error.err_code, description=error.description or "", **batch)
