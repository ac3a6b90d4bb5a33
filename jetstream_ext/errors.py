"""The errors of this library, as one tree rooted in `nats.errors.Error`.

::

    JetStreamExtError
    ├─ UnsupportedFeatureError      the server is too old
    ├─ DirectGetDisabledError       no allow_direct, or no such stream
    ├─ MessageNotFoundError         a single get found nothing
    ├─ BadRequestError              the server refused a direct-get request
    ├─ TooManySubjectsError         multi_last matched too many subjects
    ├─ ResponseError                a reply breaks the protocol
    ├─ MessagesLostError            a direct-get reply has a gap
    │  └─ PositionLostError         the next message of a log reader is no longer stored
    ├─ StreamRecreatedError         the stream was deleted and created again
    ├─ FencedError                  another reader or worker of the same name has stored a newer position
    ├─ GroupActiveError             a group has members that are alive
    ├─ RequestTimeoutError          no answer in time
    ├─ StreamConfigMismatchError    a stream exists with another configuration
    ├─ HistoryUnavailableError      the requested history is no longer stored
    ├─ ConversionError              a message does not fit an Arrow table, or a row cannot be a message
    ├─ BadSubjectError, BadHeaderError, MaxPayloadError   refused before anything was sent
    ├─ IngestError                  ingest stopped; says where, and what is stored
    ├─ BatchError                   a batch has failed; says what is stored
    │  ├─ BatchClosedError          the batch was used after its end
    │  ├─ EmptyBatchError           there is nothing to commit
    │  ├─ BatchAbandonedError       the server or the connection dropped the batch
    │  ├─ BatchGapError             messages of a fast batch were lost
    │  ├─ BatchOutcomeUnknownError  the answer was lost; the messages may be stored
    │  └─ NoStreamError             no stream stores the subject
    └─ ServerError                  the server refused: one class per error code
       └─ KeyConflictError          a key is not at the revision that a key-value operation expected

A server's refusal of a batch is both its `ServerError` class and a `BatchError`: ``except WrongLastSequenceError`` and
``except BatchError`` catch it, and it always has ``.outcome``. Every error can be pickled (Spark carries them from the
executors to the driver), hashed, and constructed without arguments.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import nats.errors
import nats.js.errors

from jetstream_ext.text import printable
from jetstream_ext.types import BatchAck, IngestReport

__all__ = [
    "AtomicPublishDisabledError",
    "AtomicPublishDuplicateMessageIDError",
    "AtomicPublishIncompleteError",
    "AtomicPublishInvalidBatchIDError",
    "AtomicPublishInvalidCommitError",
    "AtomicPublishMirrorError",
    "AtomicPublishMissingSequenceError",
    "AtomicPublishTooLargeError",
    "AtomicPublishTooManyInflightError",
    "AtomicPublishUnsupportedHeaderError",
    "BadHeaderError",
    "BadRequestError",
    "BadSubjectError",
    "BatchAbandonedError",
    "BatchClosedError",
    "BatchError",
    "BatchGapError",
    "BatchOutcomeUnknownError",
    "BatchServerError",
    "ConsumerInvalidResetError",
    "ConversionError",
    "DirectGetDisabledError",
    "EmptyBatchError",
    "ErrorCode",
    "FastPublishDisabledError",
    "FastPublishInvalidBatchIDError",
    "FastPublishInvalidPatternError",
    "FastPublishMirrorError",
    "FastPublishTooManyInflightError",
    "FastPublishUnknownBatchError",
    "FencedError",
    "GroupActiveError",
    "HistoryUnavailableError",
    "IngestError",
    "JetStreamExtError",
    "KeyConflictError",
    "MaxPayloadError",
    "MessageNotFoundError",
    "MessageTTLDisabledError",
    "MessageTTLInvalidError",
    "MessageTooLargeError",
    "MessagesLostError",
    "MirrorAnswersError",
    "NoStreamError",
    "Outcome",
    "PositionLostError",
    "RequestTimeoutError",
    "RequiredApiLevelError",
    "ResponseError",
    "ServerError",
    "Status",
    "StreamConfigMismatchError",
    "StreamMismatchError",
    "StreamRecreatedError",
    "TooManyRequestsError",
    "TooManySubjectsError",
    "UnsupportedFeatureError",
    "WrongLastSequenceError",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


# The constructor of each `dataclass` below also takes the fields of its bases.
@dataclass(kw_only=True, eq=False, repr=False)
class JetStreamExtError(nats.errors.Error):
    """Root of every error that this library defines."""

    message: str = field(default="", kw_only=False)

    def __post_init__(self) -> None:
        self.args: tuple[Any, ...] = (self.message,) if self.message else ()  # repr and pickling use them

    def __str__(self) -> str:
        return printable(self.message) or type(self).__name__

    # By identity: nats-py's API errors compare fields and have no hash.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's pickling drops the cause.
        state = dict(self.__dict__)
        if self.__cause__ is not None:
            state["__cause__"] = self.__cause__
        return type(self), self.args, state


@dataclass(kw_only=True, eq=False, repr=False)
class UnsupportedFeatureError(JetStreamExtError):
    """The server is too old for the feature.

    Attributes:
        feature: The feature's name in the documentation's feature table.
        required_api_level: The JetStream API level that has it (None: it is older than levels).
        server_version: The server's version, if known.
    """

    feature: str = ""
    required_api_level: int | None = None
    server_version: str | None = None


class RequestTimeoutError(JetStreamExtError, nats.errors.TimeoutError):
    """No answer arrived in time."""


@dataclass(kw_only=True, eq=False, repr=False)
class MirrorAnswersError(JetStreamExtError):
    """Only a mirror answered a read that has to be proved, until the timeout.

    Attributes:
        stream: The stream that was read.
        mirror: The name of the mirror, which answers direct gets under the stream's name (``mirror_direct``).
    """

    stream: str = ""
    mirror: str = ""


class StreamConfigMismatchError(JetStreamExtError):
    """A stream exists with another configuration. ``diff`` maps each field to (wanted, found)."""

    def __init__(self, message: str = "", *, diff: dict[str, tuple[Any, Any]] | None = None) -> None:
        super().__init__(message)
        self.diff: dict[str, tuple[Any, Any]] = dict(diff or {})


@dataclass(kw_only=True, eq=False, repr=False)
class DirectGetDisabledError(JetStreamExtError):
    """No server answers direct gets for the stream: it lacks ``allow_direct``, or it does not exist."""

    stream: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class MessageNotFoundError(JetStreamExtError, nats.js.errors.NotFoundError):
    """A single get found no message. The replica that answered may lag: pass ``min_seq`` to exclude that."""

    stream: str = ""
    code: int | None = 404
    err_code: int | None = field(default=None, init=False)
    description: str = field(default="", init=False)
    seq: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.description = self.message


@dataclass(kw_only=True, eq=False, repr=False)
class BadRequestError(JetStreamExtError, nats.js.errors.BadRequestError):
    """The server refused a direct-get request (status 408); ``description`` is the server's reason."""

    description: str = ""
    stream: str = ""
    code: int | None = 408
    err_code: int | None = field(default=None, init=False)
    seq: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.message: str = self.message or self.description
        self.description = self.description or self.message
        super().__post_init__()


class TooManySubjectsError(JetStreamExtError):
    """A ``multi_last`` matched more subjects than the server allows in one answer (status 413; 1024 by default)."""


class ResponseError(JetStreamExtError):
    """A reply breaks the protocol. ``frame`` holds its first 1024 bytes."""

    def __init__(self, message: str = "", *, frame: bytes = b"") -> None:
        super().__init__(message)
        self.frame: bytes = frame[:1024]


@dataclass(kw_only=True, eq=False, repr=False)
class MessagesLostError(JetStreamExtError):
    """A direct-get reply has a gap: messages were lost between the server and this client.

    Attributes:
        expected: The stream sequence that the reply had to continue from.
        got: The stream sequence that it named instead.
    """

    expected: int | None = None
    got: int | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class PositionLostError(MessagesLostError):
    """The next message of a log reader is no longer stored: it was purged, expired, or lost with the end of the stream.

    ``expected`` is the reader's position. ``got`` is the first sequence of the stream now, or the one after its last if
    the stream ends before the position. `LogReader.seek` to ``got`` skips the missing messages.

    Attributes:
        stream: The stream.
    """

    stream: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class StreamRecreatedError(JetStreamExtError):
    """The stream was deleted and created again, so that positions and revisions in the earlier stream are void.

    Attributes:
        stream: The stream.
        expected: The creation time of the earlier stream, as the server writes it; empty if a message showed that it is
            another stream.
        found: The creation time of the stream that exists now, or empty as well.
    """

    stream: str = ""
    expected: str = ""
    found: str = ""


@dataclass(kw_only=True, eq=False, repr=False)
class FencedError(JetStreamExtError):
    """Another reader, worker or Spark query of the same name has stored a newer position; this one must stop.

    Attributes:
        name: The name that both use.
        seq: The position that the other one has stored, if known.
    """

    name: str = ""
    seq: int | None = None


class GroupActiveError(JetStreamExtError):
    """A group has members that are alive, so it was not changed. ``members`` are their labels."""

    def __init__(self, message: str = "", *, members: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.members: tuple[str, ...] = tuple(members)


class HistoryUnavailableError(JetStreamExtError):
    """The requested history is no longer stored. ``keys`` are the keys whose past value is unknown."""

    def __init__(self, message: str = "", *, keys: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys: tuple[str, ...] = tuple(keys)


class ConversionError(JetStreamExtError, ValueError):
    """A value does not fit its column, a payload cannot be decoded, or a row cannot be a message (`jetstream_ext.arrow`).

    The text names the stream, the sequence and the column, or the row. Nothing was replaced or cut off.
    """


class BadSubjectError(JetStreamExtError, nats.errors.BadSubjectError, ValueError):
    """A subject or name is invalid; nothing was sent."""


class BadHeaderError(JetStreamExtError, nats.errors.BadHeaderError, ValueError):
    """A header is invalid, or one that only the library may set; nothing was sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.key: str = self.message  # nats-py's field


@dataclass(kw_only=True, eq=False, repr=False)
class MaxPayloadError(JetStreamExtError, nats.errors.MaxPayloadError, ValueError):
    """A message (with its headers) is larger than the server's ``max_payload``; nothing was sent.

    Attributes:
        subject: The message's subject, if known.
        size: Its size in bytes, with its headers, if known.
        limit: The server's ``max_payload``, if known.
    """

    subject: str = ""
    size: int | None = None
    limit: int | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class IngestError(JetStreamExtError):
    """An `ingest` stopped. Every message before ``index`` is stored; the error's cause says why it stopped.

    Attributes:
        index: The zero-based position in the source of the first message that is not known to be stored. If that
            message itself is the cause, no message after it is stored.
        subject: The subject of that message, if it was taken from the source.
        report: The report up to then.
        in_doubt: How many messages from `index` on were sent and not answered, or were acknowledged by a stream that was
            deleted and created again since; each of them may be stored.
    """

    index: int = 0
    subject: str | None = None
    report: IngestReport | None = None
    in_doubt: int = 0


Outcome = Literal["not_stored", "partial", "stored", "unknown"]


@dataclass(kw_only=True, eq=False, repr=False)
class BatchError(JetStreamExtError):
    """A batch has failed.

    Attributes:
        batch_id: The batch.
        sent: The number of its messages that were handed to the connection.
        acked: The highest batch sequence that the server acknowledged.
        outcome: ``"not_stored"``, ``"partial"``, ``"stored"`` or ``"unknown"``.
        ack: The server's final ack of the batch, if there was one.
    """

    batch_id: str = ""
    sent: int = 0
    acked: int = 0
    outcome: Outcome = "unknown"
    ack: BatchAck | None = None


class BatchClosedError(BatchError):
    """The batch was used after its end."""


class EmptyBatchError(BatchError):
    """There is nothing to commit."""


class BatchAbandonedError(BatchError):
    """The batch was dropped: the connection was lost, or the server no longer knows the batch."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchGapError(BatchError):
    """Messages of a fast batch never reached the stream.

    Attributes:
        first_lost: The first lost batch sequence.
        last_lost: The last lost batch sequence.
    """

    first_lost: int = 0
    last_lost: int = 0


class BatchOutcomeUnknownError(BatchError):
    """The answer was lost: the messages may or may not be stored. Do not treat this as a failure."""


class NoStreamError(BatchError, nats.js.errors.NoStreamResponseError):
    """No stream stores the subject, or its leader is away (status 503)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.description: str = self.message  # nats-py's field


class Status(enum.IntEnum):
    """The statuses that servers send as the ``code`` of an error, or as the status line of a reply."""

    END_OF_BATCH = 204
    INVALID_REQUEST = 400
    NOT_FOUND = 404
    BAD_REQUEST = 408
    REQUIRED_API_LEVEL = 412
    TOO_MANY_SUBJECTS = 413
    TOO_MANY_REQUESTS = 429
    INTERNAL_ERROR = 500
    UNAVAILABLE = 503


class ErrorCode(enum.IntEnum):
    """The server error codes (``err_code``) that this library knows.

    The codes of the ADR drafts for fast ingest (10203-10206) are absent: released servers use them for other errors.
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
    STREAM_SUBJECTS_OVERLAP = 10065
    WRONG_LAST_SEQUENCE = 10071
    NOT_ENABLED = 10076
    STORE_FAILED = 10077
    CONSUMER_DELIVER_CYCLE = 10081
    HEADERS_TOO_LARGE = 10097
    CONSUMER_WORK_QUEUE_UNFILTERED = 10099
    CONSUMER_WORK_QUEUE_NOT_UNIQUE = 10100
    CONSUMER_WORK_QUEUE_NOT_ALL = 10101
    STREAM_SEALED = 10109
    ROLLUP_REFUSED = 10111
    STREAM_OFFLINE = 10118
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


# No leader; a server that is overloaded or without resources; another copy of the message is on its way to the replicas.
TRANSIENT_CODES: Final = frozenset({
    ErrorCode.CLUSTER_UNAVAILABLE, ErrorCode.NOT_LEADER, ErrorCode.STREAM_OFFLINE, ErrorCode.INSUFFICIENT_RESOURCES,
    ErrorCode.DUPLICATE_IN_PROCESS, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.ATOMIC_TOO_MANY_INFLIGHT,
    ErrorCode.FAST_TOO_MANY_INFLIGHT,
})  # fmt: skip

SERVER_ERRORS: Final[dict[int, type[ServerError]]] = {}  # the class of each error code that has one


@dataclass(kw_only=True, eq=False, repr=False)
class ServerError(JetStreamExtError, nats.js.errors.APIError):
    """The server refused a request or message.

    Attributes:
        code: The HTTP-like status (400, 412, 429, 500, 503 …).
        err_code: The server's error code.
        description: The server's text.
        stream: The stream that refused a message, if the server named it.
        retryable: Whether the same call may succeed later, unchanged: without a leader, overloaded, out of resources.
    """

    code: int | None = None
    err_code: int | None = None
    description: str = ""
    stream: str | None = field(default=None, init=False)
    seq: int | None = field(default=None, init=False)

    @property
    def retryable(self) -> bool:
        return self.err_code in TRANSIENT_CODES

    def __init_subclass__(cls, codes: tuple[int, ...] = ()) -> None:
        super().__init_subclass__()
        SERVER_ERRORS.update(dict.fromkeys(codes, cls))

    def __post_init__(self) -> None:
        self.message: str = self.message or self.description
        self.description = self.description or self.message
        super().__post_init__()

    def __str__(self) -> str:
        text = JetStreamExtError.__str__(self)
        return f"{text} (error {self.err_code})" if self.err_code else text


@dataclass(kw_only=True, eq=False, repr=False)
class BatchServerError(ServerError, BatchError):
    """The server refused a batch with an error code that has no class of its own."""


class WrongLastSequenceError(
    BatchServerError, codes=(ErrorCode.WRONG_LAST_SEQUENCE, ErrorCode.WRONG_LAST_SEQUENCE_CONSTANT)
):
    """10071, 10164: the stream or the subject has a newer message than the expected sequence."""


@dataclass(kw_only=True, eq=False, repr=False)
class KeyConflictError(WrongLastSequenceError, nats.js.errors.KeyWrongLastSequenceError):
    """A key is not at the revision that an operation expected; nothing was written.

    Attributes:
        keys: The keys in conflict; empty if only a newer revision of the bucket is known.
        stale_read: Whether a transaction had read one of the keys before it changed, so that it can be run again.
    """

    keys: tuple[str, ...] = ()
    stale_read: bool = False
    code: int | None = Status.INVALID_REQUEST
    err_code: int | None = ErrorCode.WRONG_LAST_SEQUENCE
    outcome: Outcome = "not_stored"

    def __str__(self) -> str:
        return JetStreamExtError.__str__(self)


class StreamMismatchError(BatchServerError, codes=(ErrorCode.STREAM_MISMATCH,)):
    """10060: another stream than the expected one stores the subject."""


@dataclass(kw_only=True, eq=False, repr=False)
class MessageTooLargeError(BatchServerError, codes=(ErrorCode.MESSAGE_TOO_LARGE,)):
    """10054: the message is larger than the stream's ``max_msg_size``.

    Attributes:
        subject: The message's subject, if it is known which message it is.
        size: Its size in bytes, with its headers, if known.
        limit: The stream's ``max_msg_size``, if known.
    """

    subject: str = ""
    size: int | None = None
    limit: int | None = None


class MessageTTLInvalidError(BatchServerError, codes=(ErrorCode.MESSAGE_TTL_INVALID,)):
    """10165: the message's TTL is malformed or under 1 s."""


class MessageTTLDisabledError(BatchServerError, codes=(ErrorCode.MESSAGE_TTL_DISABLED,)):
    """10166: the stream lacks ``allow_msg_ttl``."""


class TooManyRequestsError(BatchServerError, codes=(ErrorCode.TOO_MANY_REQUESTS,)):
    """10167: the stream's ingest queue is full; the message was dropped."""


class AtomicPublishDisabledError(BatchServerError, codes=(ErrorCode.ATOMIC_DISABLED,)):
    """10174: the stream lacks ``allow_atomic``."""


class AtomicPublishMissingSequenceError(BatchServerError, codes=(ErrorCode.ATOMIC_MISSING_SEQUENCE,)):
    """10175: a message of the batch has no valid sequence."""


class AtomicPublishIncompleteError(BatchServerError, codes=(ErrorCode.ATOMIC_INCOMPLETE,)):
    """10176: the batch has a gap, or the server no longer knows it."""


class AtomicPublishUnsupportedHeaderError(BatchServerError, codes=(ErrorCode.ATOMIC_UNSUPPORTED_HEADER,)):
    """10177: a message has a header that atomic batches must not use."""


class AtomicPublishInvalidBatchIDError(BatchServerError, codes=(ErrorCode.ATOMIC_INVALID_BATCH_ID,)):
    """10179: the batch id is too long."""


class RequiredApiLevelError(BatchServerError, codes=(ErrorCode.REQUIRED_API_LEVEL,)):
    """10185: the server's API level is lower than the request requires."""


class AtomicPublishMirrorError(BatchServerError, codes=(ErrorCode.ATOMIC_MIRROR,)):
    """10198: a mirror cannot take atomic batches."""


class AtomicPublishTooLargeError(BatchServerError, codes=(ErrorCode.ATOMIC_TOO_LARGE,)):
    """10199: the batch has more messages than the server allows (1000 by default)."""


class AtomicPublishInvalidCommitError(BatchServerError, codes=(ErrorCode.ATOMIC_INVALID_COMMIT,)):
    """10200: the server does not know the value of the commit header."""


class AtomicPublishDuplicateMessageIDError(BatchServerError, codes=(ErrorCode.ATOMIC_DUPLICATE_MESSAGE_ID,)):
    """10201: a message id is in the stream's duplicate window, or occurs twice in the batch."""


class ConsumerInvalidResetError(
    ServerError, nats.js.errors.ConsumerInvalidResetError, codes=(ErrorCode.CONSUMER_INVALID_RESET,)
):
    """10204: the consumer's deliver policy forbids this reset."""


class FastPublishDisabledError(BatchServerError, codes=(ErrorCode.FAST_DISABLED,)):
    """10205: the stream lacks ``allow_batched``."""


class FastPublishInvalidPatternError(BatchServerError, codes=(ErrorCode.FAST_INVALID_PATTERN,)):
    """10206: the reply subject of a fast-ingest message is malformed."""


class FastPublishInvalidBatchIDError(BatchServerError, codes=(ErrorCode.FAST_INVALID_BATCH_ID,)):
    """10207: the batch id is too long."""


class FastPublishUnknownBatchError(BatchServerError, codes=(ErrorCode.FAST_UNKNOWN_BATCH,)):
    """10208: the server does not know the batch, or no longer does."""


class FastPublishMirrorError(BatchServerError, codes=(ErrorCode.FAST_MIRROR,)):
    """10209: a mirror cannot take fast ingest."""


class AtomicPublishTooManyInflightError(BatchServerError, codes=(ErrorCode.ATOMIC_TOO_MANY_INFLIGHT,)):
    """10210: too many atomic batches are open on the stream or the server."""


class FastPublishTooManyInflightError(BatchServerError, codes=(ErrorCode.FAST_TOO_MANY_INFLIGHT,)):
    """10211: too many fast batches are open on the stream or the server."""


def server_error(
    *, code: int | None = None, err_code: int | None = None, description: str = "", message: str = ""
) -> ServerError:
    """Return the error for a server's refusal; an unknown code gives a plain `ServerError`."""
    cls = SERVER_ERRORS.get(err_code or 0, ServerError)
    return cls(message, code=code, err_code=err_code, description=description)


def reached_no_stream(refusal: ServerError) -> bool:
    """Return whether a message reached no stream: none stores the subject, or the stream has no leader."""
    return refusal.code == Status.UNAVAILABLE and refusal.err_code is None


def batch_refusal(error: ServerError, message: str, **batch: Any) -> BatchServerError:
    """Return `error` as a `BatchServerError` with the batch's fields (the keywords of `BatchError`)."""
    cls = type(error) if isinstance(error, BatchServerError) else BatchServerError
    refusal = cls(message, code=error.code, err_code=error.err_code, description=error.description or "", **batch)
    refusal.stream = error.stream
    return refusal
