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

from jetstream_ext.errors.base import (
    JetStreamExtError,
    RequestTimeoutError,
    StreamConfigMismatchError,
    UnsupportedFeatureError,
)
from jetstream_ext.errors.reading import (
    BadRequestError,
    DirectGetDisabledError,
    FencedError,
    HistoryUnavailableError,
    MessageNotFoundError,
    MessagesLostError,
    PositionLostError,
    ResponseError,
    StreamRecreatedError,
    TooManySubjectsError,
)
from jetstream_ext.errors.server import (
    SERVER_ERRORS,
    AtomicPublishDisabledError,
    AtomicPublishDuplicateMessageIDError,
    AtomicPublishIncompleteError,
    AtomicPublishInvalidBatchIDError,
    AtomicPublishInvalidCommitError,
    AtomicPublishMirrorError,
    AtomicPublishMissingSequenceError,
    AtomicPublishTooLargeError,
    AtomicPublishTooManyInflightError,
    AtomicPublishUnsupportedHeaderError,
    BatchServerError,
    ConsumerInvalidResetError,
    FastPublishDisabledError,
    FastPublishInvalidBatchIDError,
    FastPublishInvalidPatternError,
    FastPublishMirrorError,
    FastPublishTooManyInflightError,
    FastPublishUnknownBatchError,
    KeyConflictError,
    MessageTooLargeError,
    MessageTTLDisabledError,
    MessageTTLInvalidError,
    RequiredApiLevelError,
    ServerError,
    StreamMismatchError,
    TooManyRequestsError,
    WrongLastSequenceError,
    batch_refusal,
    server_error,
)
from jetstream_ext.errors.writing import (
    BadHeaderError,
    BadSubjectError,
    BatchAbandonedError,
    BatchClosedError,
    BatchError,
    BatchGapError,
    BatchOutcomeUnknownError,
    EmptyBatchError,
    IngestError,
    MaxPayloadError,
    NoStreamError,
    Outcome,
)

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
    "SERVER_ERRORS",
    "server_error",
    "batch_refusal",
]

# They are shown, and pickled, under the name that users import them by, wherever they are defined.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
