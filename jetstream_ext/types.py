"""The values that calls take and return: frozen, slotted, picklable, and hashable if their fields are."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict


class _Never(enum.Enum):
    NEVER = "never"

    def __repr__(self) -> str:
        return "NEVER"


NEVER: Final = _Never.NEVER
"""A message TTL that never expires (``Nats-TTL: never``)."""

TTL = int | float | timedelta | _Never
"""A message TTL: whole seconds from 1 up, a `timedelta` of whole seconds, or `NEVER`."""


class GapMode(enum.StrEnum):
    """What a fast batch does after messages are lost on their way to the stream."""

    OK = "ok"
    """Report the gap and continue."""
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
    """The keyword arguments of every publishing call; see `BatchMessage`."""

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
        subject: Its subject, without wildcards, white space and control characters.
        payload: Its payload; may be empty. A bytearray or memoryview is copied.
        headers: Its headers; copied, never changed.
        msg_ttl: Its TTL: whole seconds, a timedelta, or `NEVER` (ADR-43; server 2.11, stream ``allow_msg_ttl``).
        msg_id: ``Nats-Msg-Id`` for the stream's duplicate window. Blanks around it are left out, as servers ignore them.
        stream: ``Nats-Expected-Stream``.
        expected_last_seq: ``Nats-Expected-Last-Sequence``.
        expected_last_subject_seq: ``Nats-Expected-Last-Subject-Sequence``.
        expected_last_subject: ``Nats-Expected-Last-Subject-Sequence-Subject``; needs `expected_last_subject_seq`.
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
        # The caller may use its buffer and its mapping again before the message is sent, or sent once more.
        payload: object = self.payload
        if type(payload) is not bytes and isinstance(payload, bytearray | memoryview):
            object.__setattr__(self, "payload", bytes(payload))
        headers = self.headers
        if type(headers) is dict:
            object.__setattr__(self, "headers", headers.copy())
        elif headers is not None and isinstance(headers, Mapping):
            object.__setattr__(self, "headers", own_headers(headers.items()))


class RepeatedHeaders(dict[str, str]):
    """Headers with several values for some names: `items` repeats the name. Nothing changes them."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = list(pairs)
        super().__init__(self._pairs)

    def items(self) -> Any:
        return self._pairs


def own_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers, with every value of a repeated name, that do not change with the mapping that `pairs` come from."""
    pairs = list(pairs)
    headers = dict(pairs)
    return headers if len(headers) == len(pairs) else RepeatedHeaders(pairs)


Entry = tuple[str, bytes] | tuple[str, bytes, Mapping[str, str]] | BatchMessage
"""A message of a bulk: ``(subject, payload)``, ``(subject, payload, headers)`` or a `BatchMessage`. A tuple costs a
tenth of an object."""


@dataclass(frozen=True, slots=True)
class BatchAck:
    """The server's final ack of a batch.

    Attributes:
        stream: The stream that stored it.
        seq: The stream sequence of its last stored message (0: none).
        batch_id: The batch.
        batch_size: For an atomic batch, the number of stored messages. For a fast batch, the highest *batch sequence*
            that the server processed, which includes lost, refused and duplicate messages (ADR-50).
        domain: The JetStream domain, if there is one.
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
    """A server dropped an atomic batch; nothing of the batch is stored.

    Attributes:
        stream: The stream that it was published to.
        batch_id: The batch.
        reason: ``"timeout"`` (idle for 10 s), ``"large"`` (too many messages), ``"incomplete"`` (a message is missing)
            or ``"unsupported"`` (it requires a newer server; announced by 2.14 and later). Newer servers may add
            reasons.
        time: When the server dropped it (aware, UTC).
    """

    stream: str
    batch_id: str
    reason: str
    time: datetime


@dataclass(frozen=True, slots=True, init=False)
class FastPubAck:
    """The state of a fast batch: ``batch_seq`` was sent last; everything up to ``ack_seq`` is acknowledged."""

    batch_seq: int
    ack_seq: int

    def __init__(self, batch_seq: int, ack_seq: int) -> None:
        # Every `add` makes one; the generated method takes twice as long.
        _set_batch_seq(self, batch_seq)
        _set_ack_seq(self, ack_seq)


_set_batch_seq, _set_ack_seq = (vars(FastPubAck)[name].__set__ for name in ("batch_seq", "ack_seq"))


@dataclass(frozen=True, slots=True)
class BatchFlowAck:
    """The server processed everything up to batch sequence ``seq``; the next ack comes ``msgs`` messages later."""

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
class InDoubt:
    """The outcome of the batch sequences ``first … last`` is unknown: the server's answers were lost with the connection.

    The messages were sent before the connection was lost, and the server processed everything up to ``last``. Each of
    them is stored unless the server refused it or reported it lost in an answer that did not arrive.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """The progress of an `ingest`.

    Attributes:
        stored: The number of messages of the source that are known to be stored.
        rate: Messages stored per second since the last report.
        window: The number of messages that were taken from the source and are not known to be stored yet.
    """

    stored: int
    rate: float
    window: int


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The result of an `ingest`.

    Attributes:
        stored: The number of messages of the source that are stored: the first ``stored`` ones, each once except those
            in doubt. With the caller's own message ids this includes messages that the stream had before: the server
            skips and acknowledges a message whose id it knows.
        duplicates: The number of messages that the stream had although their batch ended before they were acknowledged, so
            that they were not sent again.
        resent: The number of messages that were sent again because their batch ended and the stream did not show them.
        batches: The number of fast batches that the server opened.
        seconds: The duration.
        in_doubt: How many of the stored messages may be stored more than once. The server could no longer know their ids,
            and the stream did not show whether an earlier copy was stored: it has removed messages, or the client may
            not read it. They were sent again, so they are stored; if they were stored before, the second copy is out of
            order, and an older value may replace a newer one of its subject. 0: each message is stored once.
    """

    stored: int
    duplicates: int
    resent: int
    batches: int
    seconds: float
    in_doubt: int = 0
