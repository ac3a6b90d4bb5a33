"""What can go wrong, as one tree rooted in `nats.errors.Error`.

::

    JetStreamExtError
    ├─ UnsupportedFeatureError      the server is too old
    ├─ DirectGetDisabledError       no ``allow_direct``, or no such stream
    ├─ MessageNotFoundError         a single get found nothing
    ├─ BadRequestError              the server refused a direct-get request
    ├─ TooManySubjectsError         ``multi_last`` matched too many subjects
    ├─ ResponseError                a reply that breaks the protocol
    ├─ MessagesLostError            a hole in a direct-get reply
    │  └─ PositionLostError         what a log reader should read next is gone
    ├─ StreamRecreatedError         a log reader's stream was deleted and made again
    ├─ FencedError                  another reader or worker of the same name has gone on
    ├─ RequestTimeoutError          no answer in time
    ├─ StreamConfigMismatchError    a stream exists with another configuration
    ├─ HistoryUnavailableError      the past that was asked for is gone
    ├─ BadSubjectError, BadHeaderError, MaxPayloadError   refused here, before anything was sent
    ├─ IngestError                  `ingest` stopped; knows where, and what is stored
    ├─ BatchError                   a batch that cannot go on; knows what was stored
    │  ├─ BatchClosedError          used after its end
    │  ├─ EmptyBatchError           there is nothing to commit
    │  ├─ BatchAbandonedError       the server or the connection gave the batch up
    │  ├─ BatchGapError             messages of a fast batch were lost
    │  ├─ BatchOutcomeUnknownError  the answer was lost; the messages may be stored
    │  └─ NoStreamError             no stream listens on the subject
    └─ ServerError                  the server's own refusal: one class per error code
       └─ KeyConflictError          a key is not at the revision that a key-value operation expected

A server's refusal of a batch is its `ServerError` class and a `BatchError` at once, so that both
``except WrongLastSequenceError`` and ``except BatchError`` see it and ``.outcome`` is always there.
All of them can be pickled (Spark carries them from executor to driver), hashed, and built with no argument.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import nats.errors
import nats.js.errors
from typing_extensions import override

if TYPE_CHECKING:
    from jetstream_ext.types import BatchAck, IngestReport


class JetStreamExtError(nats.errors.Error):
    """Root of every error this library raises on its own account."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        # nats-py's constructors do not pass the text on; without it a repr, and so a log line, would be empty.
        self.args: tuple[Any, ...] = (message,) if message else ()
        self.message = message

    @override
    def __str__(self) -> str:
        return self.message or type(self).__name__

    # By identity, as every exception; nats-py's API errors compare fields, and have no hash.
    @override
    def __eq__(self, other: object) -> bool:
        return object.__eq__(self, other)

    @override
    def __hash__(self) -> int:
        return BaseException.__hash__(self)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own pickling forgets the cause.
        state = dict(self.__dict__)
        if self.__cause__ is not None:
            state["__cause__"] = self.__cause__
        return type(self), self.args, state


class UnsupportedFeatureError(JetStreamExtError):
    """The connected server does not know the feature.

    Attributes:
        feature: What was asked for, in the words of the documentation.
        required_api_level: The JetStream API level that has it (`None`: it predates levels).
        server_version: The version of the connected server, where known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        feature: str = "",
        required_api_level: int | None = None,
        server_version: str | None = None,
    ) -> None:
        super().__init__(message)
        self.feature = feature
        self.required_api_level = required_api_level
        self.server_version = server_version


class RequestTimeoutError(JetStreamExtError, nats.errors.TimeoutError):
    """No answer came in time."""


class StreamConfigMismatchError(JetStreamExtError):
    """A stream exists with another configuration. ``diff`` maps each field to (wanted, found)."""

    def __init__(self, message: str = "", *, diff: dict[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(message)
        self.diff: dict[str, tuple[Any, Any]] = dict(diff or {})


def _fill_api_error(
    error: nats.js.errors.APIError,
    *,
    code: int | None,
    err_code: int | None,
    description: str,
    stream: str | None,
) -> None:
    """Set the fields that a handler of nats-py's API errors reads; its constructor would replace the exception's args."""
    error.code = code
    error.err_code = err_code
    error.description = description
    error.stream = stream
    error.seq = None


class DirectGetDisabledError(JetStreamExtError):
    """Nobody answers direct gets for the stream: it lacks ``allow_direct``, or it does not exist."""

    def __init__(self, message: str = "", *, stream: str = "") -> None:
        super().__init__(message)
        self.stream = stream


class MessageNotFoundError(JetStreamExtError, nats.js.errors.NotFoundError):
    """A single get found no message. A replica may lag: ask with ``min_seq`` when that matters."""

    def __init__(self, message: str = "", *, stream: str = "", code: int = 404) -> None:
        JetStreamExtError.__init__(self, message)
        _fill_api_error(self, code=code, err_code=None, description=message, stream=stream)


class BadRequestError(JetStreamExtError, nats.js.errors.BadRequestError):
    """The server refused a direct-get request (status 408) and said why in ``description``."""

    def __init__(self, message: str = "", *, description: str = "", stream: str = "", code: int = 408) -> None:
        JetStreamExtError.__init__(self, message or description)
        _fill_api_error(self, code=code, err_code=None, description=description or message, stream=stream)


class TooManySubjectsError(JetStreamExtError):
    """A ``multi_last`` matched more subjects than the server answers at once (status 413; 1024 by default)."""


class ResponseError(JetStreamExtError):
    """A reply broke the protocol. ``frame`` holds (a bounded part of) its bytes."""

    def __init__(self, message: str = "", *, frame: bytes = b"") -> None:
        super().__init__(message)
        self.frame: bytes = frame[:1024]


class MessagesLostError(JetStreamExtError):
    """A direct-get reply had a hole: messages were dropped between the server and here.

    Attributes:
        expected: The stream sequence the reply should have continued from.
        got: The stream sequence it named instead.
    """

    def __init__(self, message: str = "", *, expected: int | None = None, got: int | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class PositionLostError(MessagesLostError):
    """What a log reader should read next is no longer stored: purged, expired, or lost with the stream's end.

    ``expected`` is the reader's position. ``got`` is where the stream begins now (or one more than its last sequence,
    where that is before the position): `LogReader.seek` there to go on without what is gone.

    Attributes:
        stream: The stream.
    """

    def __init__(
        self, message: str = "", *, stream: str = "", expected: int | None = None, got: int | None = None
    ) -> None:
        super().__init__(message, expected=expected, got=got)
        self.stream = stream


class StreamRecreatedError(JetStreamExtError):
    """A stream is not the one that a position belongs to: it was deleted and made again, and sequences began anew.

    Attributes:
        stream: The stream.
        expected: When the position's stream was created, in the server's words.
        found: When the stream of that name was created that there is now.
    """

    def __init__(self, message: str = "", *, stream: str = "", expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.stream = stream
        self.expected = expected
        self.found = found


class FencedError(JetStreamExtError):
    """Another reader, worker or Spark query of the same name has gone on; this one must stop, and can store nothing more.

    Attributes:
        name: The name that both have.
        seq: The position that the other one has stored, where there is one.
    """

    def __init__(self, message: str = "", *, name: str = "", seq: int | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.seq = seq


class HistoryUnavailableError(JetStreamExtError):
    """The past that was asked for is no longer held. ``keys`` names what cannot be known."""

    def __init__(self, message: str = "", *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys: tuple[str, ...] = tuple(keys)


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


class ErrorCode(enum.IntEnum):
    """The servers' error numbers (``err_code``) that this library knows; `SERVER_ERRORS` has the class of each.

    Codes of the ADR drafts (10203-10206 for fast ingest) mean other things on released servers and are absent.
    """

    ACCOUNT_RESOURCES_EXCEEDED = 10002
    CLUSTER_UNAVAILABLE = 10008
    NOT_LEADER = 10009
    CONSUMER_NOT_FOUND = 10014
    INSUFFICIENT_RESOURCES = 10023
    INVALID_JSON = 10025
    MEMORY_EXCEEDED = 10028
    MESSAGE_NOT_FOUND = 10037
    NOT_ENABLED_FOR_ACCOUNT = 10039
    STORAGE_EXCEEDED = 10047
    MESSAGE_TOO_LARGE = 10054
    STREAM_NAME_EXISTS = 10058
    STREAM_NOT_FOUND = 10059
    STREAM_MISMATCH = 10060
    WRONG_LAST_SEQUENCE = 10071
    NOT_ENABLED = 10076
    STREAM_OFFLINE = 10118
    CONSUMER_EXISTS = 10148
    DUPLICATE_IN_PROCESS = 10158
    WRONG_LAST_SEQUENCE_CONSTANT = 10164
    MESSAGE_TTL_INVALID = 10165
    MESSAGE_TTL_DISABLED = 10166
    TOO_MANY_REQUESTS = 10167
    ATOMIC_DISABLED = 10174
    ATOMIC_MISSING_SEQUENCE = 10175
    ATOMIC_INCOMPLETE = 10176
    ATOMIC_UNSUPPORTED_HEADER = 10177
    ATOMIC_INVALID_BATCH_ID = 10179
    REQUIRED_API_LEVEL = 10185
    ATOMIC_MIRROR = 10198
    ATOMIC_TOO_LARGE = 10199
    ATOMIC_INVALID_COMMIT = 10200
    ATOMIC_DUPLICATE_MESSAGE_ID = 10201
    CONSUMER_INVALID_RESET = 10204
    FAST_DISABLED = 10205
    FAST_INVALID_PATTERN = 10206
    FAST_INVALID_BATCH_ID = 10207
    FAST_UNKNOWN_BATCH = 10208
    FAST_MIRROR = 10209
    ATOMIC_TOO_MANY_INFLIGHT = 10210
    FAST_TOO_MANY_INFLIGHT = 10211


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
        _fill_api_error(self, code=code, err_code=err_code, description=description or message, stream=None)

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


SERVER_ERRORS: Final[dict[int, type[ServerError]]] = {
    ErrorCode.MESSAGE_TOO_LARGE: MessageTooLargeError,
    ErrorCode.STREAM_MISMATCH: StreamMismatchError,
    ErrorCode.WRONG_LAST_SEQUENCE: WrongLastSequenceError,
    ErrorCode.WRONG_LAST_SEQUENCE_CONSTANT: WrongLastSequenceError,
    ErrorCode.MESSAGE_TTL_INVALID: MessageTTLInvalidError,
    ErrorCode.MESSAGE_TTL_DISABLED: MessageTTLDisabledError,
    ErrorCode.TOO_MANY_REQUESTS: TooManyRequestsError,
    ErrorCode.ATOMIC_DISABLED: AtomicPublishDisabledError,
    ErrorCode.ATOMIC_MISSING_SEQUENCE: AtomicPublishMissingSequenceError,
    ErrorCode.ATOMIC_INCOMPLETE: AtomicPublishIncompleteError,
    ErrorCode.ATOMIC_UNSUPPORTED_HEADER: AtomicPublishUnsupportedHeaderError,
    ErrorCode.ATOMIC_INVALID_BATCH_ID: AtomicPublishInvalidBatchIDError,
    ErrorCode.REQUIRED_API_LEVEL: RequiredApiLevelError,
    ErrorCode.ATOMIC_MIRROR: AtomicPublishMirrorError,
    ErrorCode.ATOMIC_TOO_LARGE: AtomicPublishTooLargeError,
    ErrorCode.ATOMIC_INVALID_COMMIT: AtomicPublishInvalidCommitError,
    ErrorCode.ATOMIC_DUPLICATE_MESSAGE_ID: AtomicPublishDuplicateMessageIDError,
    ErrorCode.CONSUMER_INVALID_RESET: ConsumerInvalidResetError,
    ErrorCode.FAST_DISABLED: FastPublishDisabledError,
    ErrorCode.FAST_INVALID_PATTERN: FastPublishInvalidPatternError,
    ErrorCode.FAST_INVALID_BATCH_ID: FastPublishInvalidBatchIDError,
    ErrorCode.FAST_UNKNOWN_BATCH: FastPublishUnknownBatchError,
    ErrorCode.FAST_MIRROR: FastPublishMirrorError,
    ErrorCode.ATOMIC_TOO_MANY_INFLIGHT: AtomicPublishTooManyInflightError,
    ErrorCode.FAST_TOO_MANY_INFLIGHT: FastPublishTooManyInflightError,
}
"""The class of each error code that has one."""


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


# In the order of the tree, which is the order of the reference.
__all__ = [  # noqa: RUF022
    "Outcome",
    "JetStreamExtError",
    "UnsupportedFeatureError",
    "DirectGetDisabledError",
    "MessageNotFoundError",
    "BadRequestError",
    "TooManySubjectsError",
    "ResponseError",
    "MessagesLostError",
    "PositionLostError",
    "StreamRecreatedError",
    "FencedError",
    "RequestTimeoutError",
    "StreamConfigMismatchError",
    "HistoryUnavailableError",
    "BadSubjectError",
    "BadHeaderError",
    "MaxPayloadError",
    "IngestError",
    "BatchError",
    "BatchClosedError",
    "EmptyBatchError",
    "BatchAbandonedError",
    "BatchGapError",
    "BatchOutcomeUnknownError",
    "NoStreamError",
    "ServerError",
    "BatchServerError",
    "WrongLastSequenceError",
    "KeyConflictError",
    "StreamMismatchError",
    "MessageTooLargeError",
    "MessageTTLInvalidError",
    "MessageTTLDisabledError",
    "TooManyRequestsError",
    "AtomicPublishDisabledError",
    "AtomicPublishMissingSequenceError",
    "AtomicPublishIncompleteError",
    "AtomicPublishUnsupportedHeaderError",
    "AtomicPublishInvalidBatchIDError",
    "RequiredApiLevelError",
    "AtomicPublishMirrorError",
    "AtomicPublishTooLargeError",
    "AtomicPublishInvalidCommitError",
    "AtomicPublishDuplicateMessageIDError",
    "ConsumerInvalidResetError",
    "FastPublishDisabledError",
    "FastPublishInvalidPatternError",
    "FastPublishInvalidBatchIDError",
    "FastPublishUnknownBatchError",
    "FastPublishMirrorError",
    "AtomicPublishTooManyInflightError",
    "FastPublishTooManyInflightError",
    "ErrorCode",
    "SERVER_ERRORS",
    "server_error",
    "batch_refusal",
]
