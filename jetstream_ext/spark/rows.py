"""Rows that Spark passes to a sink, as messages: the columns, the checks, and the digest and message id of each row.

A second attempt at a partition may get its rows in another order, without some, or with others. A row is therefore known by
its content, and among equal rows of the partition by how many came before it: by its place, other rows would be lost or
repeated; by its content alone, equal rows would be lost.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, compress, islice, repeat
from operator import add
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from pyspark.sql.types import StructType

from jetstream_ext.errors import BadHeaderError, BadSubjectError
from jetstream_ext.protocol.frames import check_line
from jetstream_ext.protocol.headers import (
    CRLF,
    MSG_ID,
    MSG_TTL,
    VERSION,
    EncodedHeaders,
    HeaderCache,
    check_header,
    encode,
    is_instruction,
)
from jetstream_ext.protocol.options import COLUMN_SYNONYMS
from jetstream_ext.protocol.subjects import check_subject, covers
from jetstream_ext.spark.bad_rows import BadRow, BadRows, raw_bytes
from jetstream_ext.spark.digests import DigestCounts
from jetstream_ext.spark.options import OptionError, WriteOptions
from jetstream_ext.spark.row_sizes import RowSizes
from jetstream_ext.spark.ttls import ttl_text
from jetstream_ext.text import did_you_mean
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
    "msgTtl": ("tinyint", "smallint", "int", "bigint", "string"),
}
DIGEST_SIZE: Final = 12
"""The number of bytes of a row's digest."""
DIGEST_TEXT: Final = 16
"""The number of characters of a digest in a message id."""
_START_OF_DIGEST: Final = np.dtype([("start", np.uint64), ("rest", np.uint32)])
_REMEMBERED: Final = 65_536
# Where Spark passes rows one by one: the limits of a chunk, and how many rows are taken before the bytes are counted.
_ROWS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 8 << 20
_ROWS_A_TIME: Final = 100
_START: Final = VERSION + CRLF
_SHORT_ID: Final = 256  # characters of a message id that does not make a row too large, and
_SHORT_ID_LINE: Final = 4 * _SHORT_ID + 64  # the bytes of a header with it
_LONGEST_REPLY: Final = 160  # more bytes than a reply subject of this library has

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


class _UnstorableError(Exception):
    """A row cannot become a message; the text says why."""


def find_columns(
    schema: StructType, types: Mapping[str, Sequence[str]], advice: str, synonyms: Mapping[str, str] = COLUMN_SYNONYMS
) -> dict[str, int]:
    """Return where a sink's columns are, each of one of its `types`, whatever the case of their names.

    Raises OptionError if one is unknown (then `advice` says what to do, unless another name was probably meant), there
    twice or of another type.
    """
    where: dict[str, int] = {}
    known = {name.lower(): name for name in types}
    for index, field in enumerate(schema.fields):
        name = known.get(field.name.lower())
        if name is None:
            *others, last = types
            names = f"{', '.join(others)} and {last}"
            hint = did_you_mean(field.name, types, synonyms) or f"; {advice}"
            raise OptionError(f"column {field.name!r}: the sink writes only the columns {names}{hint}")
        if name in where:
            raise OptionError(f"column {field.name!r}: the schema has it twice")
        kind = field.dataType.simpleString()
        if kind not in types[name]:
            raise OptionError(
                f"column {field.name!r}: it is {kind}, but must be {' or '.join(types[name])}; cast it, or use "
                "to_json() or to_avro() for structures"
            )
        where[name] = index
    return where


@dataclass(frozen=True, slots=True)
class Columns:
    """The indexes of a sink's columns, and whether the values of headers are lists."""

    subject: int | None
    data: int
    headers: int | None
    msg_id: int | None
    multiple: bool
    ttl: int | None = None

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> Columns:
        """Find the columns; raise OptionError if one is missing, unknown, of another type or in conflict with an option."""
        advice = "select those (df.select('subject', 'data')), and put other values into data or headers"
        where = find_columns(schema, _TYPES, advice)
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
        if "msgTtl" in where and options.msg_ttl is not None:
            raise OptionError("option 'msgTtl': there is a column 'msgTtl' as well; drop one of them")
        headers = where.get("headers")
        multiple = headers is not None and schema.fields[headers].dataType.simpleString() == _MULTIPLE
        return cls(where.get("subject"), where["data"], headers, where.get("msgId"), multiple, where.get("msgTtl"))


class RowReader:
    """Turns the rows of a partition into messages, in order; those that no attempt could store go to `bad`.

    Messages are for the stream's `subjects`, and must not be larger than `sizes` allows.
    """

    def __init__(
        self, columns: Columns, options: WriteOptions, subjects: tuple[str, ...], sizes: RowSizes, bad: BadRows
    ) -> None:
        self._columns = columns
        self._options = options
        self._subjects = subjects
        self._sizes = sizes if columns.ttl is None and options.msg_ttl is None else sizes.with_ttl()
        self._bad = bad
        self._known: set[str] = set()
        self._names: set[str] = set()  # of headers
        self._ttls: dict[Any, Mapping[str, str] | None] = {None: None}  # the headers for values of the column
        self._ttl = None if options.msg_ttl is None else {MSG_TTL: options.msg_ttl}  # the header of all rows
        self._row = 0

    def from_arrow(self, batch: RecordBatch) -> Rows:
        """Return the rows of a record batch; raise RowError for a bad row if the option `onBadRow` is to fail."""
        columns, count = self._columns, batch.num_rows

        def values(index: int | None) -> list[Any] | None:
            column: Any = None if index is None else batch.column(index)
            return None if column is None or column.null_count == count else _values(column)

        subjects: list[Any] = [self._options.subject] * count
        if columns.subject is not None:
            subjects = _values(batch.column(columns.subject))
        data: Any = batch.column(columns.data)  # the stubs know no type that is named by a string
        data = data.cast("binary")
        payloads = (data.fill_null(b"") if data.null_count else data).to_pylist()
        headers, ids, ttls = values(columns.headers), values(columns.msg_id), values(columns.ttl)
        if headers is None and ids is None and self._are_accepted(subjects, payloads):
            with suppress(_UnstorableError):  # `_messages` finds out which row it is
                given = self._only_ttls(ttls, count)
                self._row += count
                return Rows(subjects, payloads, given)
        none = repeat(None)
        return Rows.of(
            self._messages(zip(subjects, payloads, headers or none, ids or none, ttls or none, strict=False))
        )

    def from_rows(self, rows: Iterable[Any]) -> Rows:
        """Return the rows that Spark passes one by one; otherwise as `from_arrow`."""
        columns, subject = self._columns, self._options.subject

        def values() -> Iterator[tuple[Any, Any, Any, Any, Any]]:
            for row in rows:
                yield (
                    subject if columns.subject is None else row[columns.subject],
                    row[columns.data],
                    None if columns.headers is None else row[columns.headers],
                    None if columns.msg_id is None else row[columns.msg_id],
                    None if columns.ttl is None else row[columns.ttl],
                )

        return Rows.of(self._messages(values()))

    def chunks_from_rows(self, rows: Iterator[Any]) -> Iterator[Rows]:
        """Yield the rows that Spark passes one by one, some at a time; a chunk has fewer if it has bad rows."""
        collected: list[Rows] = []
        count = size = 0
        while given := list(islice(rows, _ROWS_A_TIME)):
            some = self.from_rows(given)
            collected.append(some)
            count += len(given)
            size += sum(some.sizes())
            if len(some) < len(given):  # the bad ones take memory as well
                size += sum(len(row[self._columns.data] or b"") for row in given)
            if count >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
                yield Rows.joined(collected)
                collected, count, size = [], 0, 0
        if collected:
            yield Rows.joined(collected)

    def _messages(self, rows: Iterable[tuple[Any, Any, Any, Any, Any]]) -> Iterator[Message]:
        known, most = self._known, self._sizes.of_data - _SHORT_ID_LINE
        for subject, given, pairs, msg_id, ttl in rows:
            try:
                if subject not in known:
                    self._check_subject(subject)
                data = given
                if type(data) is not bytes:
                    data = _payload(given)
                headers = self._headers(pairs, ttl) if pairs or ttl is not None else self._ttl
                if msg_id is not None:
                    self._check_id(msg_id)
                may_be_large = headers or len(data) > most or (msg_id is not None and len(msg_id) > _SHORT_ID)
                if may_be_large and (problem := self._sizes.problem(data, headers, msg_id)):
                    raise _UnstorableError(problem)
            except _UnstorableError as error:
                reason = str(error)
            else:
                yield subject, data, headers, msg_id
                self._row += 1
                continue
            self._bad.add(BadRow(self._row, reason, subject, *self._given(given, pairs, msg_id, ttl)))
            self._row += 1

    def _given(self, data: Any, pairs: Any, msg_id: Any, ttl: Any) -> tuple[bytes, Mapping[str, str] | None]:
        """Return the data and headers of a bad row, with its id and its time to live as the headers that they would be."""
        payload = raw_bytes(data) if isinstance(data, str) else bytes(data or b"")
        headers = list(self._pairs(pairs or ()))
        headers += [(name, str(value)) for name, value in ((MSG_ID, msg_id), (MSG_TTL, ttl)) if value is not None]
        return payload, own_headers(headers) if headers else None

    def _are_accepted(self, subjects: Iterable[Any], payloads: Sequence[bytes]) -> bool:
        """Return whether rows can have these values without headers; each distinct subject is checked once."""
        if max(map(len, payloads), default=0) > self._sizes.of_data:
            return False
        try:
            for subject in set(subjects).difference(self._known):
                self._check_subject(subject)
        except _UnstorableError:  # the caller finds out which row it is
            return False
        return True

    def _only_ttls(self, ttls: list[Any] | None, count: int) -> list[Mapping[str, str] | None] | None:
        """Return the headers of rows without headers of their own; `ttls` are their times to live."""
        if ttls is None:
            return None if self._ttl is None else [self._ttl] * count
        headers = {ttl: self._ttl_header(ttl) for ttl in set(ttls)}
        return [headers[ttl] for ttl in ttls]

    def _ttl_header(self, ttl: Any) -> Mapping[str, str] | None:
        if ttl in self._ttls:
            return self._ttls[ttl]
        try:
            header = {MSG_TTL: ttl_text(ttl)}
        except ValueError as error:
            raise _UnstorableError(f"its msgTtl is invalid: {error}") from None
        if len(self._ttls) < _REMEMBERED:
            self._ttls[ttl] = header
        return header

    def _check_subject(self, subject: Any) -> None:
        if subject is None:
            raise _UnstorableError("its subject is null")
        try:
            check_subject(subject)
            check_line(subject, _LONGEST_REPLY)
        except BadSubjectError as error:
            raise _UnstorableError(
                f"{error}" if _is_utf8(subject) else f"its subject {subject!r} is not UTF-8"
            ) from None
        if not any(covers(one, subject) for one in self._subjects):
            raise _UnstorableError(
                f"its subject {subject!r} is not among the subjects of stream {self._options.stream!r} "
                f"({', '.join(self._subjects)})"
            )
        if self._options.semantics == "transactional" and covers(f"{self._options.marker_prefix}.>", subject):
            raise _UnstorableError(
                f"its subject {subject!r} is reserved for the markers of the sink (see 'markerPrefix')"
            )
        if len(self._known) < _REMEMBERED:
            self._known.add(subject)

    def _check_id(self, msg_id: str) -> None:
        if not msg_id or msg_id != msg_id.strip():
            # Servers and clients leave out white space around an id.
            raise _UnstorableError(
                "its msgId is empty or has white space around it; give null to let the sink make an id"
            )
        if not msg_id.isprintable():
            self._check_header(MSG_ID, msg_id)

    def _check_header(self, name: str, value: str) -> None:
        try:
            check_header(name, value)
        except BadHeaderError as error:
            what = f"{error}" if _is_utf8(name + value) else f"its header {name!r} is not UTF-8"
            raise _UnstorableError(what) from None
        if len(self._names) < _REMEMBERED:
            self._names.add(name)

    def _headers(self, given: Any, ttl: Any) -> Mapping[str, str] | None:
        header = self._ttl if ttl is None else self._ttl_header(ttl)
        if not given:
            return header
        pairs: list[tuple[str, str]] = []
        items = given.items() if isinstance(given, dict) else given
        for name, text in self._pairs(given) if self._columns.multiple else items:
            value = text or ""
            if name == MSG_ID or (name == MSG_TTL and header is not None):
                # Several rows may come from one message: by its id the server would take the second one for a duplicate.
                continue
            if is_instruction(name):
                raise _UnstorableError(
                    f"its header {name!r} is an instruction to the server, which was for another message; leave it out"
                )
            if name not in self._names or not value.isprintable():
                self._check_header(name, value)
            pairs.append((name, value))
        if header is not None:
            pairs += header.items()
        if not pairs:
            return None
        headers = own_headers(pairs)
        if self._options.semantics == "dedupe" and len(headers) < len(pairs):
            raise _UnstorableError(
                "one of its headers has several values, which semantics=dedupe does not support; join them, or use "
                "semantics=transactional"
            )
        return headers

    def _pairs(self, given: Any) -> Iterator[tuple[str, str]]:
        """Yield the headers of a row as Spark passes them, each value by itself."""
        for name, value in given.items() if isinstance(given, dict) else given:
            if self._columns.multiple:
                yield from ((name, one or "") for one in value or ())
            else:
                yield name, value or ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _payload(given: Any) -> bytes:
    if given is None:
        return b""
    if not isinstance(given, str):
        return bytes(given)
    try:
        return given.encode()
    except UnicodeEncodeError:
        raise _UnstorableError("its data has half of a surrogate pair, which UTF-8 cannot encode") from None


def _values(column: Any) -> list[Any]:
    """Return Python's values; a text that is not UTF-8, which Spark does not check, has surrogates for its wrong bytes."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(_in_bytes(column.type)).to_pylist()]
    return values


def _in_bytes(kind: Any) -> Any:
    """Return an Arrow type with binaries in place of texts."""
    from pyarrow import binary, list_, map_, types

    if types.is_map(kind):
        return map_(_in_bytes(kind.key_type), _in_bytes(kind.item_type))
    return list_(_in_bytes(kind.value_type)) if types.is_list(kind) else binary()


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return type(value)(map(_decoded, value)) if isinstance(value, list | tuple) else value


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
        self._headers = HeaderCache()

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
            if own is not None:
                yield subject, data, {**headers, MSG_ID: own} if headers else {MSG_ID: own}
                continue
            named = next(made)
            if headers:
                named = EncodedHeaders(self._headers.encode(headers)[: -len(CRLF)] + named.block[len(_START) :])
            yield subject, data, named

    def _blocks(self, digests: bytes) -> list[bytes]:
        """Return the headers of rows that have only an id, encoded."""
        count, start, end = len(digests) // DIGEST_SIZE, len(self._start), len(self._end)
        table = np.empty((count, start + DIGEST_TEXT + end), np.uint8)
        table[:, :start] = np.frombuffer(self._start, np.uint8)
        table[:, start:-end] = np.frombuffer(b2a_base64(digests, newline=False), np.uint8).reshape(count, DIGEST_TEXT)
        table[:, -end:] = np.frombuffer(self._end, np.uint8)
        blocks: list[bytes] = table.view(f"V{table.shape[1]}").ravel().tolist()
        # Digests that have only their starts in common get a higher number than they need.
        before = self._seen.add(np.frombuffer(digests, _START_OF_DIGEST)["start"])
        for index in np.flatnonzero(before).tolist():
            blocks[index] = b"%b:%d%b" % (blocks[index][:-end], before[index], self._end)
        return blocks
