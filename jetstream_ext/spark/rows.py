"""Rows that Spark hands to a sink, as messages: which columns there may be, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

from jetstream_ext.errors import BadSubjectError, JetStreamExtError
from jetstream_ext.protocol.subjects import check_subject, covers
from jetstream_ext.spark.given import OptionError
from jetstream_ext.spark.write_options import NatsHeaders, Semantics, WriteOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_HEADERS: Final = (MapType(StringType(), StringType()), MapType(StringType(), ArrayType(StringType())))
_TYPES: Final[dict[str, tuple[DataType, ...]]] = {
    "subject": (StringType(),),
    "data": (BinaryType(), StringType()),
    "headers": _HEADERS,
    "msgId": (StringType(),),
}
_REMEMBERED: Final = 65_536


class RowError(JetStreamExtError):
    """A row cannot be a message; the text names its partition, its place and what is wrong."""


Message: TypeAlias = tuple[str, bytes, Mapping[str, str] | None, str | None]
"""One row: subject, data, headers, message id. A plain tuple, for there are millions."""


class _Several(dict[str, str]):
    """Headers of which some names have several values: `items` repeats the name."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        """Return every pair."""
        return self._pairs


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the columns are.

    Attributes:
        subject: Index of the column, or None: the option says it.
        data: Index of the column.
        headers: Index of the column, or None.
        msg_id: Index of the column, or None.
        multiple: Whether a header has a list of values.
    """

    subject: int | None
    data: int
    headers: int | None
    msg_id: int | None
    multiple: bool

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> Columns:
        """Look at a schema.

        Raises:
            OptionError: A column is missing, unknown, of another type, or in conflict with an option.
        """
        where: dict[str, int] = {}
        known = {name.lower(): name for name in _TYPES}
        for index, field in enumerate(schema.fields):
            name = known.get(field.name.lower())
            if name is None:
                raise OptionError(
                    f"column {field.name!r}: a message has the columns subject, data, headers and msgId only; select "
                    "those (df.select('subject', 'data')), and put the rest into data or headers"
                )
            if name in where:
                raise OptionError(f"column {field.name!r}: it is there twice")
            if not any(_same(field.dataType, kind) for kind in _TYPES[name]):
                kinds = " or ".join(kind.simpleString() for kind in _TYPES[name])
                raise OptionError(
                    f"column {field.name!r}: it is {field.dataType.simpleString()}, but must be {kinds}; cast it, or "
                    "use to_json() or to_avro() for structures"
                )
            where[name] = index
        if "data" not in where:
            raise OptionError("column 'data': it is missing; it holds the messages' payloads, binary or string")
        if "subject" in where and options.subject is not None:
            raise OptionError("option 'subject': there is a column 'subject', too; drop one of them")
        if "subject" not in where and options.subject is None:
            raise OptionError("column 'subject': it is missing; add it, or give the option 'subject' for all rows")
        if "msgId" in where and options.semantics is not Semantics.DEDUPE:
            raise OptionError(
                f"column 'msgId': it belongs to semantics=dedupe, not {options.semantics.value}; drop it"
                + (" (servers refuse a whole transaction for one id they know)" if options.sink_partitions else "")
            )
        headers = where.get("headers")
        multiple = headers is not None and isinstance(schema.fields[headers].dataType.valueType, ArrayType)  # type: ignore[attr-defined]
        return cls(where.get("subject"), where["data"], headers, where.get("msgId"), multiple)


def _same(one: DataType, other: DataType) -> bool:
    # Whether values can be null is not part of it.
    return one.simpleString() == other.simpleString()


class RowReader:
    """Makes messages of rows, in order.

    Args:
        columns: Where the columns are.
        options: The write.
        subjects: The stream's subjects: what is stored elsewhere, or nowhere, is refused.
        partition: The partition, for errors.
    """

    def __init__(self, columns: Columns, options: WriteOptions, subjects: tuple[str, ...], partition: int) -> None:
        self._columns = columns
        self._options = options
        self._subjects = subjects
        self._partition = partition
        self._known: set[str] = set()
        self._row = 0

    def from_arrow(self, batch: RecordBatch) -> list[Message]:
        """Return the messages of a record batch.

        Raises:
            RowError: A row cannot be one.
        """
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
            # Nothing is left to look at in any row.
            self._row += count
            return list(rows)
        return list(self._messages(rows))

    def from_rows(self, rows: Iterable[Any]) -> list[Message]:
        """Return the messages of Spark's rows; otherwise as `from_arrow`."""
        columns = self._columns

        def value(row: Any, index: int | None) -> Any:
            return None if index is None else row[index]

        return list(
            self._messages(
                (
                    self._options.subject if columns.subject is None else row[columns.subject],
                    row[columns.data],
                    value(row, columns.headers),
                    value(row, columns.msg_id),
                )
                for row in rows
            )
        )

    def _messages(self, rows: Iterable[tuple[Any, Any, Any, Any]]) -> Iterator[Message]:
        known = self._known
        for subject, given, pairs, msg_id in rows:
            if subject not in known:
                self._check_subject(subject)
            data = given
            if type(data) is not bytes:
                data = b"" if data is None else data.encode() if isinstance(data, str) else bytes(data)
            if msg_id == "":
                raise self._bad("its msgId is empty")
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
                f"its subject {subject!r} is not among those of stream {self._options.stream!r} "
                f"({', '.join(self._subjects)})"
            )
        if self._options.semantics is Semantics.TRANSACTIONAL and covers(f"{self._options.marker_prefix}.>", subject):
            raise self._bad(f"its subject {subject!r} is one of the sink's own markers (see 'markerPrefix')")
        if len(self._known) < _REMEMBERED:
            self._known.add(subject)

    def _headers(self, given: Any) -> Mapping[str, str] | None:
        pairs: list[tuple[str, str]] = []
        for name, value in given.items() if isinstance(given, dict) else given:
            if name[:5].lower() == "nats-":
                if self._options.nats_headers is NatsHeaders.STRIP:
                    continue
                raise self._bad(
                    f"its header {name!r} would tell the server to do something; set the option natsHeaders to strip to "
                    "leave such headers out" + (", and give ids in the column msgId" if name == "Nats-Msg-Id" else "")
                )
            if self._columns.multiple:
                pairs += [(name, one or "") for one in value or ()]
            else:
                pairs.append((name, value or ""))
        if not pairs:
            return None
        headers = dict(pairs)
        if len(headers) == len(pairs):
            return headers
        if self._options.semantics is Semantics.DEDUPE:
            raise self._bad(
                "a header of it has several values, which semantics=dedupe cannot send again; join them, or use "
                "semantics=transactional"
            )
        return _Several(pairs)

    def _bad(self, what: str) -> RowError:
        return RowError(f"row {self._row} of partition {self._partition} cannot be a message: {what}")
