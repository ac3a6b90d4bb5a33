"""Keys, entries and snapshots of a bucket, and how stored messages become entries (ADR-8, ADR-43, ADR-48)."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Generic, Literal, cast

from nats.js.api import Header
from nats.js.errors import InvalidKeyError
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE, MSG_ROLLUP_SUBJECT

from jetstream_ext.errors import ResponseError
from jetstream_ext.protocol.direct import Block, StoredMsg, stored_block
from jetstream_ext.protocol.headers import (
    MSG_TTL,
    ROW_STORED,
    ROW_SUBJECT,
    ROW_TIME,
    decode_stored,
    format_time_ns,
    parse_time,
)
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.options import check_list
from jetstream_ext.protocol.subjects import anything
from jetstream_ext.protocol.updates import FOREVER, Record, Update, Updates
from jetstream_ext.text import counted
from jetstream_ext.ttl import marker_reason

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import TypeVar

    T = TypeVar("T", default=bytes)  # what the values are: bytes, unless a table decodes them
else:  # typing_extensions would take longer to import than the rest of this module
    T = typing.TypeVar("T")

Operation = Literal["PUT", "DEL", "PURGE"]


@dataclass(frozen=True, slots=True)
class KeyValueEntry(Generic[T]):
    """A key as a read found it.

    Attributes:
        bucket: The bucket's name.
        key: The key. Any publisher can store keys that clients refuse; bytes that are not UTF-8 are lone surrogates in it
            (``surrogateescape``, as in Python's file names).
        value: Its value, as bytes or as the ``decode`` of a table returned it; ``b""`` if the key was deleted.
        revision: The stream sequence of the message.
        created: When the server stored it, by the server's clock (aware, UTC).
        operation: ``"PUT"``, ``"DEL"`` or ``"PURGE"``.
        reason: Why the server wrote this delete marker (``"MaxAge"``: the TTL passed); None for any other entry.
    """

    bucket: str
    key: str
    value: T
    revision: int
    created: datetime
    operation: Operation = "PUT"
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyValueSnapshot(Mapping[str, KeyValueEntry]):
    """The keys and values of a bucket at one revision: a mapping from key to entry.

    Attributes:
        bucket: The bucket's name.
        revision: The revision (stream sequence) at which it is exact.
        time: When that revision was stored, by the server's clock (aware, UTC). For a snapshot at a time, that time. If
            the revision's message is no longer stored, the time of the next stored message.
        unavailable: Keys left out because the history needed for them is gone (only with ``strict=False``), sorted.
        complete: Whether every key of that revision is certainly here or in `unavailable`. False only for reads of the
            past: messages up to the revision were removed since, and a key may have left no message.
    """

    _entries: dict[str, KeyValueEntry | Record]
    bucket: str
    revision: int
    time: datetime
    unavailable: tuple[str, ...] = ()
    complete: bool = True

    def __getitem__(self, key: str) -> KeyValueEntry:
        held = self._entries[key]
        if isinstance(held, KeyValueEntry):
            return held
        entry = self._entries[key] = entry_of_record(self.bucket, key, held)
        return entry

    def _made(self) -> dict[str, KeyValueEntry]:
        for key in self._entries:
            self[key]
        return cast(dict[str, KeyValueEntry], self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> KeysView[str]:
        """Return the keys."""
        return self._entries.keys()

    def values(self) -> ValuesView[KeyValueEntry]:
        """Return the entries."""
        return self._made().values()

    def items(self) -> ItemsView[str, KeyValueEntry]:
        """Return the pairs of key and entry."""
        return self._made().items()

    def to_arrow(self, *, schema: pa.Schema | None = None) -> pa.Table:
        """Return the entries as a ``pyarrow.Table``.

        Args:
            schema: The columns, some of those of `jetstream_ext.arrow.BUCKET_SCHEMA` in any order. A column may have another
                type that can hold its values: a bucket with keys that are not UTF-8 needs ``binary`` for ``key``. None is
                ``BUCKET_SCHEMA``.

        Raises:
            ImportError: pyarrow is not installed.
            ValueError: `schema` has a column that does not exist, comes twice or cannot have its type.
            TypeError: `schema` is not a ``pyarrow.Schema``.
            ConversionError: A value does not fit its column; the text names the key.

        Requires: ``nats-jetstream-ext[arrow]``.
        """
        from jetstream_ext.arrow.buckets import entries_table  # pyarrow is an optional dependency

        return entries_table(self.values(), schema)

    def __repr__(self) -> str:
        more = f", {len(self.unavailable)} unavailable" if self.unavailable else ""
        return f"<KeyValueSnapshot of {counted(len(self), 'key')} at revision {self.revision} ({self.time.isoformat()}){more}>"


def records_of(found: Block | Sequence[StoredMsg]) -> Iterator[tuple[str, Record]]:
    """Return messages as pairs of subject and record.

    Different subjects are different texts (PEP 383); a leader's message must have none with U+FFFD, which stands for other
    bytes in its answers. Raises ResponseError at once if a message of a block is malformed.
    """
    names: list[str] = []
    records: list[Record] = []
    if not isinstance(found, Block):
        for message in found:
            names.append(message.subject)
            time = format_time_ns(message.time_ns).encode()
            records.append((message.seq, message.data, time, stored_block(message)))
        return zip(names, records, strict=True)
    try:
        for row, seq, data in zip(found.each_row(), found.seqs, found.datas, strict=True):
            names.append(row[ROW_SUBJECT].decode("utf-8", "surrogateescape"))
            time = row[ROW_TIME][17:]
            parse_time(time)
            records.append((seq, data, time, row[ROW_STORED]))
    except ResponseError:
        found.check()  # its error names the message
        raise
    return zip(names, records, strict=True)


# The headers by which a message deletes its key or expires; without them it is as one without headers.
_MEANT: Final = re.compile(rb"KV-Operation|Nats-TTL|Nats-Marker-Reason|Nats-Applied-Limit")
# The times that servers write, each with a comma before it.
_TIMES: Final = re.compile(
    rb"(?:,\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3])(?::[0-5]\d){2}(?:\.\d{1,9})?Z)*"
)


def updates_of(found: Block | Sequence[StoredMsg], subjects: Subjects) -> Updates:
    """Return messages as `protocol.table` takes them; raise as `records_of` does."""
    wanted = subjects.wanted
    plain = found.columns(subjects.prefix) if isinstance(found, Block) else None
    if plain is not None and (not _TIMES.fullmatch(b",".join([b"", *plain[1]])) or _MEANT.search(b"".join(plain[2]))):
        plain = None
    if not isinstance(found, Block) or plain is None:
        return [
            update_of(subjects, key, record)
            for name, record in records_of(found)
            if (key := subjects.key_of(name)) is not None
        ]
    seqs, datas, (keys, times, stored) = found.seqs, found.datas, plain

    def pairs() -> Iterable[tuple[str, Record]]:
        every = zip(
            keys, zip(seqs, datas, times, stored, strict=True), strict=True
        )  # tuples that C code makes cost half
        return every if wanted is anything else (pair for pair in every if wanted(pair[0]))

    records = dict(pairs())
    if len(records) == len(keys):
        return records
    updates: list[Update] = [(key, record, False, None) for key, record in pairs()]
    return records if len(records) == len(updates) else updates


def update_of(subjects: Subjects, key: str, record: Record) -> Update:
    """Return a message of a key as `protocol.table` takes it."""
    deletes, ttl = False, None
    if stored := record[3]:
        fields = decode_stored(stored)
        deletes = subjects.deletes(fields)
        ttl = FOREVER if never_expires(fields) else ttl_of(fields)
    return key, record, deletes, ttl


ROLLUP: Final = Header.ROLLUP.value

ROLLUP_HEADERS: Final = {ROLLUP: MSG_ROLLUP_SUBJECT}
DELETE_HEADERS: Final = {KV_OP: KV_DEL}
PURGE_HEADERS: Final = {KV_OP: KV_PURGE, **ROLLUP_HEADERS}

_GO_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|h|m|s)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_OPERATIONS: Final[dict[str, Operation]] = {KV_DEL: "DEL", KV_PURGE: "PURGE"}
# As nats-py reads markers. A marker with an unknown reason deletes the key as well.
_REASONS: Final[dict[str, Operation]] = {"MaxAge": "PURGE", "Purge": "PURGE", "Remove": "DEL"}


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of a bucket's keys, and which of the keys a read wants."""

    bucket: str
    prefix: str  # before each key: ``$KV.<bucket>.``
    wanted: Callable[[str], bool]
    deletes: Callable[[Mapping[str, str]], bool] = lambda headers: operation(headers)[0] != "PUT"

    def key_of(self, subject: str) -> str | None:
        """Return the key on a subject; None if the read does not want it, or if the bucket's stream stores it for others."""
        if subject.startswith(self.prefix):
            key = subject[len(self.prefix) :]
            if self.wanted(key):
                return key
        return None


def operation(headers: Mapping[str, str]) -> tuple[Operation, str | None]:
    """Return what a message with these headers does to its key, and the reason if it is a server's marker."""
    known = _OPERATIONS.get(headers.get(KV_OP, ""))
    if known is not None:
        return known, None
    reason = marker_reason(headers)
    return ("PUT", None) if reason is None else (_REASONS.get(reason, "PURGE"), reason)


def ttl_of(headers: Mapping[str, str]) -> timedelta | None:
    """Return the TTL in a message's headers as servers read it, in whole seconds; None if it has no finite one, or 0."""
    text = headers.get(MSG_TTL, "").strip()
    seconds: float | None = parse_number(text)
    if seconds is None:
        seconds = _go_duration(text)
    try:
        return timedelta(seconds=int(seconds or 0)) or None
    except OverflowError:
        return None


def _go_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``1h30m``; None for other text."""
    seconds, position = 0.0, 0
    while position < len(text):
        part = _GO_DURATION.match(text, position)  # not findall: it would take a minute for a header full of digits
        if part is None:
            return None
        seconds += float(part[1]) * _SECONDS[part[2]]
        position = part.end()
    return seconds


def never_expires(headers: Mapping[str, str]) -> bool:
    """Whether the TTL of a message overrides the bucket's maximum age."""
    return headers.get(MSG_TTL, "").strip().lower() == "never"


def entry_of_record(bucket: str, key: str, record: Record) -> KeyValueEntry:
    seq, data, time, stored = record
    if not stored:
        return KeyValueEntry(bucket, key, data, seq, parse_time(time))
    op, reason = operation(decode_stored(stored))
    return KeyValueEntry(bucket, key, data, seq, parse_time(time), op, reason)


def entry_of_message(bucket: str, key: str, message: StoredMsg) -> KeyValueEntry:
    stored = stored_block(message)
    op, reason = operation(decode_stored(stored)) if stored else ("PUT", None)
    return KeyValueEntry(bucket, key, message.data, message.seq, message.time, op, reason)


def key_text(key: str) -> str:
    r"""Return a key as valid text: ``\xNN`` for a byte that is not UTF-8, and two backslashes for one.

    Different keys are different texts, and a key that clients accept is its own text.
    """
    return key.replace("\\", "\\\\").encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# -- the keys and filters that a bucket accepts (ADR-8) -----------------------------------------------------------------

# nats-py's rule without its two gaps: its `$` accepts a trailing line feed, and "a..b" is not a valid subject.
_KEY: Final = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_FILTER: Final = re.compile(r"([-/_=a-zA-Z0-9]+|\*)(\.([-/_=a-zA-Z0-9]+|\*))*(\.>)?|>")

EVERYTHING: Final = ">"


def check_key(key: str) -> None:
    """Raise InvalidKeyError for a key that nats-py, nats.go and nats.js refuse; TypeError if it is not a str."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be str, not {type(key).__name__}")
    if not _KEY.fullmatch(key):
        raise InvalidKeyError(f"key {key!r} must be tokens of [-/_=a-zA-Z0-9] joined by single dots")


def check_keys(keys: Iterable[str]) -> dict[str, None]:
    """Return `keys` without repetitions, in order; raise as `check_key` does, and TypeError for a single key."""
    check_list(keys, "keys", "keys")
    wanted = dict.fromkeys(keys)
    for key in wanted:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            check_key(key)
    return wanted


def check_filters(filters: Sequence[str] | None) -> list[str]:
    """Return `filters` without repetitions (None is everything); raise as `check_keys` does, and ValueError for none."""
    if filters is None:
        return [EVERYTHING]
    check_list(filters, "filters", "keys or key patterns")
    wanted = list(dict.fromkeys(filters))
    if not wanted:
        raise ValueError("filters must not be empty; leave them out to read the whole bucket")
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"a filter must be str, not {type(pattern).__name__}")
        if not _FILTER.fullmatch(pattern):
            raise InvalidKeyError(f"filter {pattern!r} is neither a key nor a key pattern (with * and >)")
    return [EVERYTHING] if EVERYTHING in wanted else wanted
