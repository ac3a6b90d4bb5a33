"""The values that go in and come out: frozen, slotted, picklable, and hashable where their fields are."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypedDict, final

from jetstream_ext.errors import ServerError
from jetstream_ext.protocol import headers as _headers


class _Never(enum.Enum):
    NEVER = "never"

    def __repr__(self) -> str:
        return "NEVER"


NEVER: Final = _Never.NEVER
"""A time to live without end (``Nats-TTL: never``)."""

TTL = int | float | timedelta | _Never
"""A time to live: whole seconds from 1, a `timedelta` of whole seconds, or `NEVER`."""


class GapMode(enum.StrEnum):
    """What a fast batch does when messages are lost on their way to the stream."""

    OK = "ok"
    """Report the gap and go on."""
    FAIL = "fail"
    """End the batch."""


class EndReason(enum.StrEnum):
    """Why a fast batch ended."""

    COMMITTED = "committed"
    GAP = "gap"
    ERROR = "error"
    TIMEOUT = "timeout"
    DISCARDED = "discarded"
    DISCONNECTED = "disconnected"


class PublishOptions(TypedDict, total=False):
    """The keywords that every publishing call takes; `BatchMessage` says what they are."""

    headers: Mapping[str, str] | None
    msg_ttl: TTL | None
    msg_id: str | None
    stream: str | None
    expected_last_seq: int | None
    expected_last_subject_seq: int | None
    expected_last_subject: str | None


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """One message of a batch, with the options of `AtomicBatch.add` and `FastPublisher.add`.

    Args:
        subject: Where it is stored; no wildcards, spaces or control characters.
        payload: Its bytes; empty is an ordinary message.
        headers: Names and values; copied, never changed.
        msg_ttl: Time to live: whole seconds, a timedelta, or `NEVER` (ADR-43; server 2.11, stream ``allow_msg_ttl``).
        msg_id: ``Nats-Msg-Id`` for the stream's duplicate window.
        stream: ``Nats-Expected-Stream``.
        expected_last_seq: ``Nats-Expected-Last-Sequence``.
        expected_last_subject_seq: ``Nats-Expected-Last-Subject-Sequence``.
        expected_last_subject: ``Nats-Expected-Last-Subject-Sequence-Subject``; goes with the one before.
    """

    subject: str
    payload: bytes = b""
    headers: Mapping[str, str] | None = None
    msg_ttl: TTL | None = None
    msg_id: str | None = None
    stream: str | None = None
    expected_last_seq: int | None = None
    expected_last_subject_seq: int | None = None
    expected_last_subject: str | None = None

    def __post_init__(self) -> None:
        if type(self.headers) is dict:  # what else there is may know more than names and values; sending copies it
            object.__setattr__(self, "headers", self.headers.copy())


Entry = tuple[str, bytes] | tuple[str, bytes, Mapping[str, str]] | BatchMessage
"""What a bulk is made of: ``(subject, payload)``, ``(subject, payload, headers)`` or a `BatchMessage`. The first is the
fastest: a tuple costs a tenth of an object."""


@dataclass(frozen=True, slots=True)
class BatchAck:
    """The server's final word on a batch.

    Attributes:
        stream: The stream that stored it.
        seq: Stream sequence of its last stored message (0: none).
        batch_id: The batch.
        batch_size: For an atomic batch the messages stored; for a fast one the highest *batch sequence* that the
            server moved to, which counts lost, refused and duplicate messages too (ADR-50).
        domain: The JetStream domain, where there is one.
        val: The counter's value on counter streams (ADR-49).
    """

    stream: str
    seq: int
    batch_id: str | None = None
    batch_size: int | None = None
    domain: str | None = None
    val: str | None = None


@dataclass(frozen=True, slots=True)
class AbandonedBatch:
    """A server gave an atomic batch up; nothing of it is stored.

    Attributes:
        stream: The stream that it was for.
        batch_id: The batch.
        reason: ``"timeout"`` (idle for 10 s), ``"large"`` (too many messages), ``"incomplete"`` (a message is missing)
            or ``"unsupported"`` (it asked for a newer server; 2.14 and later say so). Newer servers may have others.
        time: When (aware, UTC).
    """

    stream: str
    batch_id: str
    reason: str
    time: datetime


@dataclass(frozen=True, slots=True)
class FastPubAck:
    """Where a fast batch stands: ``batch_seq`` was just sent, everything to ``ack_seq`` is acknowledged."""

    batch_seq: int
    ack_seq: int


@dataclass(frozen=True, slots=True)
class BatchFlowAck:
    """Everything up to batch sequence ``seq`` is dealt with; the next ack comes ``msgs`` messages later."""

    seq: int
    msgs: int


@dataclass(frozen=True, slots=True)
class BatchFlowGap:
    """Batch sequences ``first_lost … seq - 1`` never reached the stream; ``seq`` did."""

    first_lost: int
    seq: int

    @property
    def last_lost(self) -> int:
        """The last lost batch sequence."""
        return max(self.first_lost, self.seq - 1)


@dataclass(frozen=True, slots=True)
class BatchFlowError:
    """The message with batch sequence ``seq`` was refused."""

    seq: int
    error: ServerError


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Nobody knows of the batch sequences ``first … last``: what the server said of them went with the connection.

    They were sent before the connection was lost. The server had taken in everything up to ``last``, so they are
    stored, unless it refused one or reported it lost in an answer that nobody received.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far an `ingest` is.

    Attributes:
        stored: Messages of the source that are known to be in the stream.
        rate: Of them, how many per second since the last report.
        window: Messages that were taken from the source and are not known to be stored yet.
    """

    stored: int
    rate: float
    window: int


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an `ingest` did.

    Attributes:
        stored: Messages of the source that are in the stream: the first ``stored`` ones, each once. With message ids of
            the caller's own this counts those that the stream had before, too: a server skips a message whose id it
            knows and acknowledges it as it does the others.
        duplicates: Messages that were sent again and turned out to be stored the first time: what would be in the
            stream twice without message ids.
        resent: Messages that were sent again, because the batch they were sent in ended before they were acknowledged.
        batches: Fast batches that the server opened.
        seconds: How long it took.
    """

    stored: int
    duplicates: int
    resent: int
    batches: int
    seconds: float


_new = object.__new__


@final
class StoredMsg:
    """A message as the stream holds it.

    Headers and times are decoded when they are first asked for: a bulk read that only wants payloads does not pay
    for them.

    Attributes:
        stream: The stream that answered (a mirror answers with its own name).
        subject: Its subject.
        seq: Its stream sequence.
        data: Its payload; empty for markers and empty messages.
        headers: The stored headers, without those the server adds to a reply.
        time: When it was stored (aware, UTC, microseconds).
        time_ns: The same in nanoseconds since the epoch.
        num_pending: How many matching messages follow it, where the reply said so.
        last_seq: The sequence of the message before it in the same reply, where the reply said so.
    """

    __slots__ = (
        "_body",
        "_header_size",
        "_headers",
        "_last_seq",
        "_lines",
        "_num_pending",
        "_seq",
        "_stream",
        "_subject",
        "_time_ns",
    )

    def __init__(
        self,
        *,
        stream: str,
        subject: str,
        seq: int,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        time_ns: int = 0,
        num_pending: int | None = None,
        last_seq: int | None = None,
    ) -> None:
        self._lines: list[bytes] | None = None
        self._header_size = 0  # over 0: a message from the wire, cut up when it is asked for
        self._stream = stream
        self._subject = subject
        self._seq = seq
        self._body = data
        self._headers = dict(headers or {})
        self._time_ns = time_ns
        self._num_pending = num_pending
        self._last_seq = last_seq

    @classmethod
    def from_wire(cls, stream: str, seq: int, body: bytes, header_size: int) -> StoredMsg:
        """Make a message of what a batched direct-get reply has: the header block and the payload in one piece."""
        self = _new(cls)
        self._stream = stream
        self._seq = seq
        self._body = body
        self._header_size = header_size
        self._lines = None
        return self

    def _row(self) -> list[bytes]:
        lines = self._lines
        if lines is None:
            lines = self._lines = _headers.checked_row(self._body[: self._header_size])
        return lines

    @property
    def stream(self) -> str:  # noqa: D102 - documented in the class
        return self._stream

    @property
    def subject(self) -> str:  # noqa: D102
        return self._row()[0].decode("utf-8", "replace") if self._header_size else self._subject

    @property
    def seq(self) -> int:  # noqa: D102
        return self._seq

    @property
    def data(self) -> bytes:  # noqa: D102
        return self._body[self._header_size :]

    @property
    def headers(self) -> dict[str, str]:  # noqa: D102
        if not self._header_size:
            return dict(self._headers)
        stored = self._row()[_headers.ROW_STORED]
        return _headers.decode_stored(stored) if stored else {}

    @property
    def time_ns(self) -> int:  # noqa: D102
        if not self._header_size:
            return self._time_ns
        return _headers.parse_time_ns(_headers.line_value(self._row()[_headers.ROW_TIME]))

    @property
    def time(self) -> datetime:  # noqa: D102
        if self._header_size:
            # Six times as fast as by way of nanoseconds, and it cuts off the same digits.
            text = _headers.line_value(self._row()[_headers.ROW_TIME]).decode("ascii", "replace")
            try:
                if text.endswith("Z"):
                    return datetime.fromisoformat(text)
            except ValueError:
                pass
            # Not as servers write it; what follows says so.
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self.time_ns // 1000)

    @property
    def num_pending(self) -> int | None:  # noqa: D102
        if not self._header_size:
            return self._num_pending
        return _headers.line_number(self._row()[_headers.ROW_PENDING])

    @property
    def last_seq(self) -> int | None:  # noqa: D102
        if not self._header_size:
            return self._last_seq
        return _headers.line_number(self._row()[_headers.ROW_LAST])

    def _fields(self) -> dict[str, object]:
        return {
            "stream": self._stream,
            "subject": self.subject,
            "seq": self._seq,
            "data": self.data,
            "headers": self.headers,
            "time_ns": self.time_ns,
            "num_pending": self.num_pending,
            "last_seq": self.last_seq,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredMsg):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((self._stream, self._seq, self.data))

    def __repr__(self) -> str:
        return f"StoredMsg({', '.join(f'{name}={value!r}' for name, value in self._fields().items())})"

    def __reduce__(self) -> tuple[object, tuple[dict[str, object]]]:
        return _restore_stored_msg, (self._fields(),)


def _restore_stored_msg(fields: dict[str, object]) -> StoredMsg:
    return StoredMsg(**fields)  # type: ignore[arg-type]
