"""Rows that Spark passes to a sink, as messages: the columns, the checks, and how large a message can be.

Spark passes record batches, and before 4.1 rows to a streaming sink, which are made into record batches first. Spark does not
check that text is UTF-8. Payloads are stored as their bytes. Other text is read with surrogates in place of wrong bytes, and
its row is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql.types import StructType

from jetstream_ext.errors import BadHeaderError, BadSubjectError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.frames import check_line
from jetstream_ext.protocol.options import COLUMN_SYNONYMS, MAX_TTL
from jetstream_ext.protocol.subjects import check_subject, covers
from jetstream_ext.spark.bad_rows import BadRow, BadRows, RowError, is_utf8
from jetstream_ext.spark.digests import Rows
from jetstream_ext.spark.options import OptionError, WriteOptions
from jetstream_ext.spark.ttls import ttl_text
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import own_headers

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# As text, which leaves out whether values can be null. The last two are the shape of Kafka's source and sink.
_ONE: Final = "map<string,string>"
_SEVERAL: Final = "map<string,array<string>>"
_STRUCTS: Final = ("array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>")
_TYPES: Final = {
    "subject": ("string",),
    "data": ("binary", "string"),
    "headers": (_ONE, _SEVERAL, *_STRUCTS),
    "msgId": ("string",),
    "msgTtl": ("tinyint", "smallint", "int", "bigint", "string"),
}
_REMEMBERED: Final = 65_536
_ROWS_AT_ONCE: Final = 1000  # where Spark passes rows one by one
_LONGEST_REPLY: Final = 160  # more bytes than a reply subject of this library has

_Pairs: TypeAlias = Sequence[tuple[str | None, str]]


# -- columns ------------------------------------------------------------------------------------------------------


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


def record_batches(rows: Iterator[Any], schema: StructType) -> Iterator[RecordBatch]:
    """Return the rows that Spark 4.0 passes one by one, as the record batches that later versions pass."""
    from pyspark.sql.conversion import LocalDataToArrowConversion

    while True:
        try:
            some = list(islice(rows, _ROWS_AT_ONCE))
        except UnicodeDecodeError as error:
            raise RowError(
                f"a text column has a row that is not UTF-8 ({error}), which Spark 4.0 cannot pass to a sink; cast the column to "
                "binary, or use Spark 4.1"
            ) from None
        if not some:
            return
        yield from LocalDataToArrowConversion.convert(some, schema, False).to_batches()


def payloads(column: Any) -> list[bytes]:
    """Return the bytes of a binary or text column, empty ones for null."""
    column = column.cast("binary")
    values: list[bytes] = (column.fill_null(b"") if column.null_count else column).to_pylist()
    return values


def values(column: Any) -> list[Any]:
    """Return Python's values; a text that is not UTF-8 has surrogates for its wrong bytes."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(_in_bytes(column.type)).to_pylist()]
    return found


def _in_bytes(kind: Any) -> Any:
    """Return an Arrow type with binaries in place of texts."""
    import pyarrow as pa

    if pa.types.is_map(kind):
        return pa.map_(_in_bytes(kind.key_type), _in_bytes(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_in_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _in_bytes(field.type)) for field in kind])
    return pa.binary()


def _decoded(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="surrogateescape")
        case list() | tuple():
            return type(value)(map(_decoded, value))
        case dict():
            return {name: _decoded(one) for name, one in value.items()}
    return value


def _pairs_of(kind: str) -> Callable[[Any], _Pairs]:
    """Return how the headers of a row become pairs, each value by itself, for a column of this type."""
    if kind == _ONE:
        return lambda given: [(name, value or "") for name, value in given]
    if kind == _SEVERAL:
        return lambda given: [(name, value or "") for name, several in given for value in several or ()]
    return lambda given: [(one["key"], _decoded(one["value"]) or "") for one in given if one is not None]


@dataclass(frozen=True, slots=True)
class Columns:
    """The indexes of the columns of the sink for streams."""

    subject: int | None
    data: int
    headers: int | None
    msg_id: int | None
    ttl: int | None
    headers_type: str = ""

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
        kind = "" if headers is None else schema.fields[headers].dataType.simpleString()
        return cls(where.get("subject"), where["data"], headers, where.get("msgId"), where.get("msgTtl"), kind)


# -- sizes --------------------------------------------------------------------------------------------------------

_NO_HEADERS: Final = len(h.encode(()))  # bytes of a block without headers
_LONGEST_TTL: Final = len(f"{h.MSG_TTL}: {MAX_TTL}\r\n")
_BATCH_ID: Final = 22  # characters of the id of an atomic batch


def batch_headers(stream: str) -> list[tuple[str, str]]:
    """Return the longest headers that an atomic batch adds to a message."""
    return [
        (h.BATCH_ID, "x" * _BATCH_ID),
        (h.BATCH_SEQUENCE, str(1 << 32)),
        (h.BATCH_COMMIT, "eob"),
        (h.EXPECTED_STREAM, stream),
    ]


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The limits for the messages of one sink, in bytes.

    Attributes:
        most: What a message can have, headers and payload together.
        limit: What limits it, for errors.
        added: The header block that the sink adds to a row, at its longest; 0 for none.
    """

    most: int
    limit: str
    added: int = 0

    @classmethod
    def of(cls, max_payload: int, state: StreamState, added: Iterable[tuple[str, str]] = ()) -> RowSizes:
        """Return the limits of a server and a stream for rows that get the headers `added`."""
        limits = [(max_payload, "the server's max_payload")]
        if state.max_msg_size is not None:
            limits.append((state.max_msg_size, "the stream's max_msg_size"))
        if state.max_bytes is not None:
            limits.append((state.max_bytes, "the stream's max_bytes"))
        most, limit = min(limits)
        pairs = list(added)
        return cls(most, f"{limit} ({most})", len(h.encode(pairs)) if pairs else 0)

    def with_ttl(self) -> RowSizes:
        """Return the limits for rows that also get a time to live."""
        return replace(self, added=max(self.added, _NO_HEADERS) + _LONGEST_TTL)

    @property
    def of_data(self) -> int:
        """How large the data of a row without headers can be."""
        return self.most - self.added

    def problem(self, data: bytes, headers: Mapping[str, str] | None, msg_id: str | None = None) -> str | None:
        """Return why a row is too large, or None; its headers and its own id can be sent as they are."""
        size = self.added
        if headers or msg_id is not None:
            items = [*(headers or {}).items(), *([] if msg_id is None else [(h.MSG_ID, msg_id)])]
            size = max(self.added, _NO_HEADERS) if msg_id is None else _NO_HEADERS
            size += sum(len(f"{name}: {value.strip()}\r\n".encode()) for name, value in items)
            if size > h.MAX_BLOCK:
                return f"its headers have {size} bytes; servers store at most {h.MAX_BLOCK} with a message"
        if size + len(data) > self.most:
            return f"it has {size + len(data)} bytes with its headers, more than {self.limit}"
        return None


# -- rows ---------------------------------------------------------------------------------------------------------


class _UnstorableError(Exception):
    """A row cannot become a message; the text says why."""


class RowReader:
    """Turns the rows of a partition into messages, in order; those that no attempt could store go to `bad`.

    Messages are for the stream's `subjects`, and must not be larger than `sizes` allows; `ttls` says whether they may expire.
    """

    def __init__(
        self,
        columns: Columns,
        options: WriteOptions,
        subjects: tuple[str, ...],
        sizes: RowSizes,
        bad: BadRows,
        *,
        ttls: bool = True,
    ) -> None:
        self._columns = columns
        self._options = options
        self._subjects = subjects
        self._sizes = sizes if columns.ttl is None and options.msg_ttl is None else sizes.with_ttl()
        self._bad = bad
        self._pairs_of = _pairs_of(columns.headers_type)
        self._ttls_allowed = ttls
        self._known: set[str] = set()
        self._names: set[str | None] = set()  # of headers
        # The headers for the times to live of the column; null means that of the option.
        self._ttls: dict[Any, Mapping[str, str] | None] = {
            None: None if options.msg_ttl is None else {h.MSG_TTL: options.msg_ttl}
        }
        self._row = 0

    def read(self, batch: RecordBatch) -> Rows:
        """Return the rows of a record batch; raise RowError for a bad row if the option `onBadRow` is to fail."""
        columns, count = self._columns, batch.num_rows

        def column(index: int | None) -> list[Any] | None:
            found: Any = None if index is None else batch.column(index)
            return None if found is None or found.null_count == count else values(found)

        subjects: list[Any] = [self._options.subject] * count
        if columns.subject is not None:
            subjects = values(batch.column(columns.subject))
        data = payloads(batch.column(columns.data))
        pairs, ids, ttls = column(columns.headers), column(columns.msg_id), column(columns.ttl)
        if pairs is None and ids is None and max(map(len, data), default=0) <= self._sizes.of_data:
            with suppress(_UnstorableError):  # the loop below finds out which row it is
                for subject in set(subjects).difference(self._known):
                    self._check_subject(subject)
                headers = {ttl: self._ttl_header(ttl) for ttl in set(ttls or (None,))}
                self._row += count
                return Rows(
                    subjects,
                    data,
                    [headers[ttl] for ttl in ttls or repeat(None, count)] if any(headers.values()) else None,
                )
        none = repeat(None)
        found: list[tuple[Any, ...]] = []
        for row in zip(subjects, data, pairs or none, ids or none, ttls or none, strict=False):
            try:
                found.append(self._message(*row))
            except _UnstorableError as error:
                self._bad.add(BadRow(self._row, str(error), *row[:2], self._all_headers(*row[2:])))
            self._row += 1
        if not found:
            return Rows((), ())
        subjects_, data_, headers_, ids_ = zip(*found, strict=True)
        return Rows(subjects_, data_, headers_ if any(headers_) else None, ids_ if any(ids_) else None)

    def _message(
        self, subject: Any, data: bytes, given: Any, msg_id: str | None, ttl: Any
    ) -> tuple[str, bytes, Mapping[str, str] | None, str | None]:
        if subject not in self._known:
            self._check_subject(subject)
        headers = self._headers(given, ttl) if given else self._ttl_header(ttl)
        if msg_id is not None:
            if not msg_id or msg_id != msg_id.strip():
                # Servers and clients leave out white space around an id.
                raise _UnstorableError(
                    "its msgId is empty or has white space around it; give null to let the sink make an id"
                )
            if not msg_id.isprintable():
                self._check_header(h.MSG_ID, msg_id)
        if problem := self._sizes.problem(data, headers, msg_id):
            raise _UnstorableError(problem)
        return subject, data, headers, msg_id

    def _all_headers(self, given: Any, msg_id: Any, ttl: Any) -> Mapping[str, str] | None:
        """Return the headers of a bad row, with its id and its time to live as the headers that they would be."""
        headers = [(name or "", value) for name, value in self._pairs_of(given or ())]
        headers += [(name, str(value)) for name, value in ((h.MSG_ID, msg_id), (h.MSG_TTL, ttl)) if value is not None]
        return own_headers(headers) if headers else None

    def _ttl_header(self, ttl: Any) -> Mapping[str, str] | None:
        if ttl in self._ttls:
            return self._ttls[ttl]
        try:
            header = {h.MSG_TTL: ttl_text(ttl)}
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
                f"{error}" if is_utf8(subject) else f"its subject {subject!r} is not UTF-8"
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

    def _check_header(self, name: str | None, value: str) -> None:
        if name is None:
            raise _UnstorableError("one of its headers has no name (key)")
        try:
            h.check_header(name, value)
        except BadHeaderError as error:
            what = f"{error}" if is_utf8(name + value) else f"its header {name!r} is not UTF-8"
            raise _UnstorableError(what) from None
        if len(self._names) < _REMEMBERED:
            self._names.add(name)

    def _headers(self, given: Any, ttl: Any) -> Mapping[str, str] | None:
        header = self._ttl_header(ttl)
        pairs: list[tuple[Any, str]] = []
        for name, value in self._pairs_of(given):
            if name == h.MSG_ID:
                # Several rows may come from one message: by its id the server would take the second one for a duplicate.
                continue
            if name == h.MSG_TTL:
                if not self._ttls_allowed:
                    raise _UnstorableError(
                        f"its header {name!r} needs allow_msg_ttl, which stream {self._options.stream!r} does not have"
                    )
                header = header or self._ttl_header(value)
                continue
            if name is not None and h.is_instruction(name):
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
