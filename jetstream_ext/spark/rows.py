"""Rows that Spark passes to a sink, as messages: the columns, the checks, and the digest and message id of each row.

A second attempt at a partition may get its rows in another order, without some, or with others. A row is therefore known by
its content, and among equal rows of the partition by how many came before it: by its place, other rows would be lost or
repeated; by its content alone, equal rows would be lost.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, compress, islice, repeat
from operator import add
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from pyspark.sql.types import StructType

from jetstream_ext.errors import BadSubjectError, JetStreamExtError
from jetstream_ext.protocol.headers import MSG_ID, EncodedHeaders, encode, is_reserved
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
"""One row: subject, data, headers, message id."""


class Rows:
    """Rows of a partition, by columns: an object for each of millions of rows would cost more than its encoding."""

    __slots__ = ("data", "headers", "ids", "subjects")

    def __init__(
        self,
        subjects: Sequence[str] = (),
        data: Sequence[bytes] = (),
        headers: Sequence[Mapping[str, str] | None] | None = None,
        ids: Sequence[str | None] | None = None,
    ) -> None:
        self.subjects: Sequence[str] = subjects
        self.data: Sequence[bytes] = data
        self.headers: Sequence[Mapping[str, str] | None] | None = headers  # None: no row has any
        self.ids: Sequence[str | None] | None = ids  # the rows' own message ids; None: no row has one

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Rows:
        subjects, data, headers, ids = zip(*messages, strict=True) if (messages := list(messages)) else ((),) * 4
        return cls(subjects, data, headers if any(headers) else None, None if ids.count(None) == len(ids) else ids)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all `parts`, in order."""
        if len(parts) == 1:
            return parts[0]

        def column(name: str) -> list[Any]:
            return list(chain.from_iterable(getattr(part, name) or repeat(None, len(part)) for part in parts))

        headers = any(part.headers is not None for part in parts)
        ids = any(part.ids is not None for part in parts)
        return cls(
            column("subjects"), column("data"), column("headers") if headers else None, column("ids") if ids else None
        )

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Message]:
        return zip(self.subjects, self.data, self.headers or repeat(None), self.ids or repeat(None), strict=False)

    def __getitem__(self, where: slice) -> Rows:
        return self._map(lambda column: column[where])

    def where(self, selected: Sequence[bool]) -> Rows:
        """Return the selected rows."""
        return self._map(lambda column: list(compress(column, selected)))

    def _map(self, change: Callable[[Sequence[Any]], Sequence[Any]]) -> Rows:
        headers, ids = self.headers, self.ids
        return Rows(
            change(self.subjects),
            change(self.data),
            None if headers is None else change(headers),
            None if ids is None else change(ids),
        )

    def sizes(self) -> list[int]:
        """Return about how many bytes each row has."""
        sizes = list(map(add, map(len, self.subjects), map(len, self.data)))
        for index, headers in enumerate(self.headers or ()):
            if headers:
                sizes[index] += sum(len(name) + len(value) for name, value in headers.items())
        return sizes

    def entries(self) -> list[Entry]:
        """Return the messages of the rows, without their own ids."""
        if self.headers is None:
            return list(zip(self.subjects, self.data, strict=True))
        columns = zip(self.subjects, self.data, self.headers, strict=True)
        return [(subject, data, headers) if headers else (subject, data) for subject, data, headers in columns]


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

    def from_arrow(self, batch: RecordBatch) -> Rows:
        """Return the rows of a record batch; raise RowError if one cannot become a message."""
        columns, count = self._columns, batch.num_rows

        def values(index: int | None) -> list[Any] | None:
            column: Any = None if index is None else batch.column(index)
            return None if column is None or column.null_count == count else column.to_pylist()

        subjects: list[Any] = [self._options.subject] * count
        if columns.subject is not None:
            subjects = batch.column(columns.subject).to_pylist()
        data: Any = batch.column(columns.data)  # the stubs know no type that is named by a string
        data = data.cast("binary")
        payloads = (data.fill_null(b"") if data.null_count else data).to_pylist()
        headers, ids = values(columns.headers), values(columns.msg_id)
        if headers is None and ids is None and self._are_accepted(subjects):
            self._row += count
            return Rows(subjects, payloads)
        rows = zip(subjects, payloads, headers or repeat(None), ids or repeat(None), strict=False)
        return Rows.of(self._messages(rows))

    def from_rows(self, rows: Iterable[Any]) -> Rows:
        """Return the rows that Spark passes one by one; otherwise as `from_arrow`."""
        columns, subject = self._columns, self._options.subject

        def values() -> Iterator[tuple[Any, Any, Any, Any]]:
            for row in rows:
                yield (
                    subject if columns.subject is None else row[columns.subject],
                    row[columns.data],
                    None if columns.headers is None else row[columns.headers],
                    None if columns.msg_id is None else row[columns.msg_id],
                )

        return Rows.of(self._messages(values()))

    def chunks_from_rows(self, rows: Iterator[Any]) -> Iterator[Rows]:
        """Yield the rows that Spark passes one by one, some at a time."""
        collected: list[Rows] = []
        count = size = 0
        while some := self.from_rows(islice(rows, _ROWS_A_TIME)):
            collected.append(some)
            count += len(some)
            size += sum(some.sizes())
            if count >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield Rows.joined(collected)
                collected, count, size = [], 0, 0
        if collected:
            yield Rows.joined(collected)

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

    def _are_accepted(self, subjects: Iterable[Any]) -> bool:
        """Return whether rows can have these subjects; each distinct one is checked once."""
        try:
            for subject in set(subjects).difference(self._known):
                self._check_subject(subject)
        except RowError:  # the caller finds out which row it is
            return False
        return True

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


def content(subject: str, data: bytes, headers: Mapping[str, str] | None) -> bytes:
    """Return bytes that differ for messages that differ in subject, data or headers."""
    if not headers:
        return b"%d %d %b%b" % (0, len(subject), subject.encode(), data)
    text = "".join(f"{len(name)}:{name}{len(value)}:{value}" for name, value in headers.items())
    pairs = text.encode(errors="surrogatepass")  # the message is refused when its headers are encoded
    return b"%d %d %b%b%b" % (len(pairs), len(subject), pairs, subject.encode(), data)


def digests_of(rows: Rows) -> bytes:
    """Return the digests of those rows that have no id, joined; equal rows have equal digests."""
    if rows.ids is not None:
        rows = rows.where([own is None for own in rows.ids])
    begun: dict[str, Any] = {}  # by subject: a copy of the digest of the start of `content`, for rows without headers
    digests: list[bytes] = []
    for subject, data, headers in zip(rows.subjects, rows.data, rows.headers or repeat(None), strict=False):
        if headers:
            digests.append(blake2b(content(subject, data, headers), digest_size=DIGEST_SIZE).digest())
            continue
        try:
            digest = begun[subject]()
        except KeyError:
            begun[subject] = blake2b(content(subject, b"", None), digest_size=DIGEST_SIZE).copy
            digest = begun[subject]()
        digest.update(data)
        digests.append(digest.digest())
    return b"".join(digests)


class MessageIds:
    """Makes the message ids of a partition's rows: a prefix, the row's digest, and how often that came before.

    The prefix names the query, the micro-batch and the partition.
    """

    def __init__(self, prefix: str) -> None:
        block = encode([(MSG_ID, f"{prefix}:-")])
        self._start, _, self._end = block.rpartition(b"-")
        self._seen = DigestCounts()

    def entries(self, rows: Rows) -> Iterator[Entry]:
        """Return the messages of the partition's next rows with their ids, their own or else new ones.

        Their headers become objects when they are sent: thousands at once would slow the garbage collector.
        """
        made = map(EncodedHeaders, self._blocks(digests_of(rows)))
        if rows.headers is None and rows.ids is None:
            return zip(rows.subjects, rows.data, made, strict=True)
        return self._among_own(rows, made)

    def _among_own(self, rows: Rows, made: Iterator[EncodedHeaders]) -> Iterator[Entry]:
        for subject, data, headers, own in rows:
            named = next(made) if own is None else {MSG_ID: own}
            yield subject, data, {**headers, **named} if headers else named

    def _blocks(self, digests: bytes) -> list[bytes]:
        """Return the headers of rows that have only an id, encoded."""
        count, start, end = len(digests) // DIGEST_SIZE, len(self._start), len(self._end)
        table = np.empty((count, start + _DIGEST_TEXT + end), np.uint8)
        table[:, :start] = np.frombuffer(self._start, np.uint8)
        table[:, start:-end] = np.frombuffer(b2a_base64(digests, newline=False), np.uint8).reshape(count, _DIGEST_TEXT)
        table[:, -end:] = np.frombuffer(self._end, np.uint8)
        blocks: list[bytes] = table.view(f"V{table.shape[1]}").ravel().tolist()
        # Digests that have only their starts in common get a higher number than they need.
        before = self._seen.add(np.frombuffer(digests, _START_OF_DIGEST)["start"])
        for index in np.flatnonzero(before).tolist():
            blocks[index] = b"%b:%d%b" % (blocks[index][:-end], before[index], self._end)
        return blocks
