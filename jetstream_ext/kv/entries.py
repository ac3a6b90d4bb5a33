"""What a bucket holds: entries and snapshots, and how stored messages become entries (ADR-8, 43 and 48)."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from nats.js.api import Header
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE, MSG_ROLLUP_SUBJECT

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import ROW_STORED, ROW_SUBJECT, ROW_TIME, decode_stored, parse_time_ns
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.ttl import marker_reason

Operation = Literal["PUT", "DEL", "PURGE"]


@dataclass(frozen=True, slots=True)
class KeyValueEntry:
    """A key as a read found it.

    Attributes:
        bucket: The bucket's name.
        key: The key.
        value: Its value; ``b""`` where it was deleted.
        revision: The stream sequence that wrote it.
        created: When that was, by the server's clock (aware, UTC).
        operation: ``"PUT"``, ``"DEL"`` or ``"PURGE"``.
        reason: On a marker that the server placed, why (``"MaxAge"``: the time to live ran out); else None.
    """

    bucket: str
    key: str
    value: bytes
    revision: int
    created: datetime
    operation: Operation = "PUT"
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyValueSnapshot(Mapping[str, KeyValueEntry]):
    """Which keys had which values at one point of a bucket's history: a mapping from key to entry.

    Attributes:
        revision: The revision (stream sequence) at which it is exact.
        time: When that was, by the server's clock (aware, UTC); for a snapshot at a time, that time. A revision whose
            message is not stored any more has the time of the next one that is.
        unavailable: Keys left out because the history needed for them is gone (only with ``strict=False``), sorted.
        complete: Whether it is certain that no key is missing from both. False only for reads of the past: messages
            up to the revision were removed since, and a key that left nothing behind cannot be seen.
    """

    _entries: dict[str, KeyValueEntry]
    revision: int
    time: datetime
    unavailable: tuple[str, ...] = ()
    complete: bool = True

    def __getitem__(self, key: str) -> KeyValueEntry:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    # The dict's own views: those of Mapping look every key up again.

    def keys(self) -> KeysView[str]:
        """Return the keys."""
        return self._entries.keys()

    def values(self) -> ValuesView[KeyValueEntry]:
        """Return the entries."""
        return self._entries.values()

    def items(self) -> ItemsView[str, KeyValueEntry]:
        """Return the pairs of key and entry."""
        return self._entries.items()

    def __repr__(self) -> str:
        more = f", {len(self.unavailable)} unavailable" if self.unavailable else ""
        return f"<KeyValueSnapshot of {len(self)} keys at revision {self.revision} ({self.time.isoformat()}){more}>"


_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

Row = tuple[int, str, bytes, Mapping[str, str], datetime]
"""A `Record`, or the same without its names."""


class Record(NamedTuple):
    """One stored message."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    time: datetime


class Records:
    """Stored messages, in ascending order.

    As columns, because a large bucket has a million of them: iterating makes one tuple after the other, and none stays.
    """

    __slots__ = ("_datas", "_headers", "_subjects", "_times", "seqs")

    def __init__(self) -> None:
        self.seqs: list[int] = []
        """Their sequences."""
        self._subjects: list[str] = []
        self._datas: list[bytes] = []
        self._headers: list[Mapping[str, str]] = []
        self._times: list[datetime] = []

    def __iter__(self) -> Iterator[Row]:
        return zip(self.seqs, self._subjects, self._datas, self._headers, self._times, strict=True)

    def __len__(self) -> int:
        return len(self.seqs)

    def __getitem__(self, index: int) -> Record:
        return Record(
            self.seqs[index], self._subjects[index], self._datas[index], self._headers[index], self._times[index]
        )

    def add(self, block: Block) -> None:
        """Append the messages of a block.

        Raises:
            ResponseError: One is malformed.
        """
        subjects, times, headers = self._subjects.append, self._times.append, self._headers.append
        for row in block.each_row():
            subjects(row[ROW_SUBJECT].decode("utf-8", "replace"))
            times(_time(row[ROW_TIME]))
            headers(decode_stored(row[ROW_STORED]) if row[ROW_STORED] else _NO_HEADERS)
        self.seqs += block.seqs
        self._datas += block.datas


def _time(line: bytes) -> datetime:
    try:
        return datetime.fromisoformat(line[17:].decode())
    except ValueError:
        # Not as servers write it: the form of a draft, or none, which is an error there.
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=parse_time_ns(line[17:]) // 1000)


def records_of(block: Block) -> Records:
    """Return the messages of a block."""
    records = Records()
    records.add(block)
    return records


def record(message: StoredMsg) -> Record:
    """Return one message."""
    return Record(message.seq, message.subject, message.data, message.headers, message.time)


TTL: Final = Header.MSG_TTL.value
ROLLUP: Final = Header.ROLLUP.value
_EXPECTED: Final = Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value
_EXPECTED_OF: Final = f"{_EXPECTED}-Subject"

PURGE_HEADERS: Final = {KV_OP: KV_PURGE, ROLLUP: MSG_ROLLUP_SUBJECT}
DELETE_HEADERS: Final = {KV_OP: KV_DEL}
ROLLUP_HEADERS: Final = {ROLLUP: MSG_ROLLUP_SUBJECT}

_OPERATIONS: Final[dict[str, Operation]] = {KV_DEL: "DEL", KV_PURGE: "PURGE"}
# nats-py reads markers so; a reason that is not known yet says no less that the key is gone.
_REASONS: Final[dict[str, Operation]] = {"MaxAge": "PURGE", "Purge": "PURGE", "Remove": "DEL"}

_GO_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|h|m|s)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Subjects:
    """How a bucket's subjects and the keys of one read go together."""

    bucket: str
    prefix: str
    """What comes before the key: ``$KV.<bucket>.``."""
    wanted: Callable[[str], bool]
    """Whether a key is asked for."""


def operation(headers: Mapping[str, str]) -> tuple[Operation, str | None]:
    """Return what a message with these headers does to its key, and the reason on a server's marker."""
    known = _OPERATIONS.get(headers.get(KV_OP, ""))
    if known is not None:
        return known, None
    reason = marker_reason(headers)
    return ("PUT", None) if reason is None else (_REASONS.get(reason, "PURGE"), reason)


def entry_of(bucket: str, key: str, record: Record) -> KeyValueEntry:
    """Return a stored message as the entry it is."""
    if not record.headers:
        return KeyValueEntry(bucket, key, record.data, record.seq, record.time)
    op, reason = operation(record.headers)
    return KeyValueEntry(bucket, key, record.data, record.seq, record.time, op, reason)


def ttl_of(headers: Mapping[str, str]) -> timedelta | None:
    """Return the time to live in a message's headers as servers read it, in whole seconds; None: it has none."""
    text = headers.get(TTL, "").strip()
    if text.isdigit():
        seconds = float(text)
    else:
        parts = _GO_DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            return None
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    try:
        return timedelta(seconds=int(seconds))
    except OverflowError:
        return None


def lives_forever(headers: Mapping[str, str]) -> bool:
    """Return whether the bucket's maximum age does not count for a message."""
    return headers.get(TTL, "").strip().lower() == "never"


def follows(headers: Mapping[str, str], subject: str) -> int | None:
    """Return the revision of the same key that a message replaced (0: there was none); None: it does not say.

    Servers store a message with an expectation only if it held.
    """
    if ROLLUP in headers:
        return None
    expected = headers.get(_EXPECTED, "")
    if not expected.isdigit() or headers.get(_EXPECTED_OF, subject) != subject:
        return None
    return int(expected)


def replaced_all(headers: Mapping[str, str]) -> bool:
    """Return whether storing a message removed every older one of its key."""
    return ROLLUP in headers or marker_reason(headers) is not None


def shows_expiry(headers: Mapping[str, str]) -> bool:
    """Return whether a message tells that values of this bucket have times to live of their own."""
    if marker_reason(headers) is not None:
        return True
    return TTL in headers and KV_OP not in headers and not lives_forever(headers)
