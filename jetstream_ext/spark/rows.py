"""Rows that Spark passes to a sink, as messages: the columns, the checks, and the digest and message id of each row.

A second attempt at a partition may get its rows in another order, without some, or with others. A row is therefore known by
its content, and among equal rows of the partition by how many came before it: by its place, other rows would be lost or
repeated; by its content alone, equal rows would be lost.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from pyspark.sql.types import StructType

from jetstream_ext.errors import BadSubjectError, JetStreamExtError
from jetstream_ext.protocol.headers import MSG_ID, is_reserved
from jetstream_ext.protocol.subjects import check_subject, covers
from jetstream_ext.spark.digests import DigestCounts
from jetstream_ext.spark.options import OptionError, WriteOptions
from jetstream_ext.types import Entry, own_headers

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# As text, which leaves out whether values can be null.
_MULTIPLE: Final = "map<string,array<string>>"
_TYPES: Final = {
    "subject": ("string",),
    "data": ("binary", "string"),
    "headers": ("map<string,string>", _MULTIPLE),
    "msgId": ("string",),
}
DIGEST_SIZE: Final = 12
"""The number of bytes of a row's digest."""
_DIGEST_TEXT: Final = 16  # characters in base64
_START_OF_DIGEST: Final = np.dtype([("start", np.uint64), ("rest", np.uint32)])
_REMEMBERED: Final = 65_536
# Where Spark passes rows one by one: the limits of a chunk, and how many rows are taken before the bytes are counted.
_ROWS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 8 << 20
_ROWS_A_TIME: Final = 100

Message: TypeAlias = tuple[str, bytes, Mapping[str, str] | None, str | None]
"""One row: subject, data, headers, message id. A plain tuple, because there are millions."""


class RowError(JetStreamExtError):
    """A row cannot become a message; the text names its partition, its index and the reason."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The indexes of a sink's columns, and whether the values of headers are lists."""

    subject: int | None
    data: int
    headers: int | None
    msg_id: int | None
    multiple: bool

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> Columns:
        """Find the columns; raise OptionError if one is missing, unknown, of another type or in conflict with an option."""
        where: dict[str, int] = {}
        known = {name.lower(): name for name in _TYPES}
        for index, field in enumerate(schema.fields):
            name = known.get(field.name.lower())
            if name is None:
                raise OptionError(
                    f"column {field.name!r}: the sink writes only the columns subject, data, headers and msgId; select "
                    "those (df.select('subject', 'data')), and put other values into data or headers"
                )
            if name in where:
                raise OptionError(f"column {field.name!r}: the schema has it twice")
            kind = field.dataType.simpleString()
            if kind not in _TYPES[name]:
                raise OptionError(
                    f"column {field.name!r}: it is {kind}, but must be {' or '.join(_TYPES[name])}; cast it, or use "
                    "to_json() or to_avro() for structures"
                )
            where[name] = index
        if "data" not in where:
            raise OptionError("column 'data': it is missing; it holds the messages' payloads, binary or string")
        if "subject" in where and options.subject is not None:
            raise OptionError("option 'subject': there is a column 'subject' as well; drop one of them")
        if "subject" not in where and options.subject is None:
            raise OptionError("column 'subject': it is missing; add it, or give the option 'subject' for all rows")
        if "msgId" in where and options.semantics != "dedupe":
            raise OptionError(
                f"column 'msgId': it is for semantics=dedupe, not for {options.semantics}; drop it"
                + (" (servers refuse a whole transaction that has a known id)" if options.sink_partitions else "")
            )
        headers = where.get("headers")
        multiple = headers is not None and schema.fields[headers].dataType.simpleString() == _MULTIPLE
        return cls(where.get("subject"), where["data"], headers, where.get("msgId"), multiple)


class RowReader:
    """Turns the rows of a partition into messages, in order; a row outside of the stream's `subjects` is refused."""

    def __init__(self, columns: Columns, options: WriteOptions, subjects: tuple[str, ...], partition: int) -> None:
        self._columns = columns
        self._options = options
        self._subjects = subjects
        self._partition = partition
        self._known: set[str] = set()
        self._row = 0

    def from_arrow(self, batch: RecordBatch) -> list[Message]:
        """Return the messages of a record batch; raise RowError if a row cannot become one."""
        columns, count = self._columns, batch.num_rows

        def values(index: int | None) -> Iterable[Any]:
            return repeat(None, count) if index is None else batch.column(index).to_pylist()

        subjects = [self._options.subject] * count if columns.subject is None else list(values(columns.subject))
        data: Any = batch.column(columns.data)  # the stubs know no type that is named by a string
        data = data.cast("binary")
        rows: Iterable[tuple[Any, Any, Any, Any]] = zip(
            subjects,
            (data.fill_null(b"") if data.null_count else data).to_pylist(),
            values(columns.headers),
            values(columns.msg_id),
            strict=True,
        )
        if columns.headers is None and columns.msg_id is None and self._known.issuperset(subjects):
            # No row needs a check.
            self._row += count
            return list(rows)
        return list(self._messages(rows))

    def from_rows(self, rows: Iterable[Any]) -> list[Message]:
        """Return the messages of Spark's rows; otherwise as `from_arrow`."""
        columns, subject = self._columns, self._options.subject

        def values() -> Iterator[tuple[Any, Any, Any, Any]]:
            for row in rows:
                yield (
                    subject if columns.subject is None else row[columns.subject],
                    row[columns.data],
                    None if columns.headers is None else row[columns.headers],
                    None if columns.msg_id is None else row[columns.msg_id],
                )

        return list(self._messages(values()))

    def chunks_from_rows(self, rows: Iterator[Any]) -> Iterator[list[Message]]:
        """Yield the messages of Spark's rows, some at a time."""
        collected: list[Message] = []
        size = 0
        while some := self.from_rows(islice(rows, _ROWS_A_TIME)):
            collected += some
            size += sum(map(size_of, some))
            if len(collected) >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield collected
                collected, size = [], 0
        yield collected

    def _messages(self, rows: Iterable[tuple[Any, Any, Any, Any]]) -> Iterator[Message]:
        known = self._known
        for subject, given, pairs, msg_id in rows:
            if subject not in known:
                self._check_subject(subject)
            data = given
            if type(data) is not bytes:
                try:
                    data = b"" if data is None else data.encode() if isinstance(data, str) else bytes(data)
                except UnicodeEncodeError:
                    raise self._bad("its data has half of a surrogate pair, which UTF-8 cannot encode") from None
            if msg_id is not None and (not msg_id or msg_id != msg_id.strip()):
                # Servers and clients leave out white space around an id.
                raise self._bad("its msgId is empty or has white space around it; give null to let the sink make an id")
            yield subject, data, self._headers(pairs) if pairs else None, msg_id
            self._row += 1

    def _check_subject(self, subject: Any) -> None:
        if subject is None:
            raise self._bad("its subject is null")
        try:
            check_subject(subject)
        except BadSubjectError as error:
            raise self._bad(f"{error}") from None
        if not any(covers(one, subject) for one in self._subjects):
            raise self._bad(
                f"its subject {subject!r} is not among the subjects of stream {self._options.stream!r} "
                f"({', '.join(self._subjects)})"
            )
        if self._options.semantics == "transactional" and covers(f"{self._options.marker_prefix}.>", subject):
            raise self._bad(f"its subject {subject!r} is reserved for the markers of the sink (see 'markerPrefix')")
        if len(self._known) < _REMEMBERED:
            self._known.add(subject)

    def _headers(self, given: Any) -> Mapping[str, str] | None:
        pairs: list[tuple[str, str]] = []
        for name, value in given.items() if isinstance(given, dict) else given:
            if is_reserved(name):
                if self._options.strip_nats_headers:
                    continue
                raise self._bad(
                    f"its header {name!r} is an instruction to the server; set the option natsHeaders to strip to leave such "
                    "headers out" + (", and give ids in the column msgId" if name == MSG_ID else "")
                )
            if self._columns.multiple:
                pairs += [(name, one or "") for one in value or ()]
            else:
                pairs.append((name, value or ""))
        if not pairs:
            return None
        headers = own_headers(pairs)
        if self._options.semantics == "dedupe" and len(headers) < len(pairs):
            raise self._bad(
                "one of its headers has several values, which semantics=dedupe does not support; join them, or use "
                "semantics=transactional"
            )
        return headers

    def _bad(self, what: str) -> RowError:
        return RowError(f"row {self._row} of partition {self._partition} cannot be a message: {what}")


def size_of(message: Message) -> int:
    """Return about how many bytes a message has."""
    subject, data, headers, _ = message
    size = len(subject) + len(data)
    if headers:
        size += sum(len(name) + len(value) for name, value in headers.items())
    return size


def content(subject: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
    """Return bytes that differ for messages that differ in subject, data or headers."""
    if not headers:
        return b"%d %d %b%b" % (0, len(subject), subject.encode(), data)
    text = "".join(f"{len(name)}:{name}{len(value)}:{value}" for name, value in headers.items())
    pairs = text.encode(errors="surrogatepass")  # the message is refused when its headers are encoded
    return b"%d %d %b%b%b" % (len(pairs), len(subject), pairs, subject.encode(), data)


def digests_of(messages: Iterable[Message]) -> bytes:
    """Return the digests of those messages that have no id, joined; equal messages have equal digests."""
    begun: dict[str, Any] = {}  # by subject: the digest of the start of `content`, for messages without headers
    digests: list[bytes] = []
    for subject, data, headers, msg_id in messages:
        if msg_id is not None:
            continue
        if headers:
            digests.append(blake2b(content(subject, data, headers), digest_size=DIGEST_SIZE).digest())
            continue
        try:
            digest = begun[subject].copy()
        except KeyError:
            begun[subject] = start = blake2b(content(subject, b"", None), digest_size=DIGEST_SIZE)
            digest = start.copy()
        digest.update(data)
        digests.append(digest.digest())
    return b"".join(digests)


class MessageIds:
    """Makes the message ids of a partition's rows: a prefix, the row's digest, and how often that came before.

    The prefix names the query, the micro-batch and the partition.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}:"
        self._seen = DigestCounts()

    def of(self, messages: Sequence[Message]) -> list[str]:
        """Return the ids of the partition's next rows: their own, or else new ones."""
        digests = digests_of(messages)
        text, prefix = b2a_base64(digests, newline=False).decode(), self._prefix
        ids = [prefix + text[at : at + _DIGEST_TEXT] for at in range(0, len(text), _DIGEST_TEXT)]
        # Digests that have only their starts in common get a higher number than they need.
        before = self._seen.add(np.frombuffer(digests, _START_OF_DIGEST)["start"])
        for index in np.flatnonzero(before).tolist():
            ids[index] += f":{before[index]}"
        if len(ids) == len(messages):
            return ids
        made = iter(ids)
        return [next(made) if message[3] is None else message[3] for message in messages]


def with_ids(messages: Iterable[Message], ids: Iterable[str]) -> Iterator[Entry]:
    """Yield messages with their ids, each made when it is sent: thousands at once would slow the garbage collector."""
    for (subject, data, headers, _), msg_id in zip(messages, ids, strict=True):
        yield subject, data, {**headers, MSG_ID: msg_id} if headers else {MSG_ID: msg_id}


def without_ids(messages: Iterable[Message]) -> list[Entry]:
    return [(subject, data) if headers is None else (subject, data, headers) for subject, data, headers, _ in messages]
