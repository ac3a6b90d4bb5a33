"""`from_arrow`: the rows of Arrow data as messages, through `ingest`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import pyarrow as pa
from nats.js import JetStreamContext
from pyarrow import types

from jetstream_ext.arrow.schemas import Array
from jetstream_ext.client.ingest import ProgressHandler, ingest
from jetstream_ext.errors import ConversionError
from jetstream_ext.protocol.headers import MSG_ID, is_instruction
from jetstream_ext.protocol.options import COLUMN_SYNONYMS
from jetstream_ext.protocol.subjects import check_subject
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import Entry, IngestReport, own_headers

_ROWS: Final = 10_000  # turned into Python's values at a time, or
_BYTES: Final = 8 << 20
_LEFT_OUT: Final = ("stream", "seq", "time")  # what the stream itself determines


async def from_arrow(
    js: JetStreamContext,
    source: object,
    *,
    subject: str | None = None,
    msg_id: Callable[[Entry], str] | None = None,
    flow: int = 100,
    max_outstanding_acks: int = 2,
    timeout: float | None = None,
    patience: float = 60.0,
    on_progress: ProgressHandler | None = None,
    progress_every: float = 0.5,
) -> IngestReport:
    """Store every row as a message, in order, and return a report; see `ingest` for what happens after errors.

    The columns are:

    * ``subject`` (text), unless the option `subject` is given;
    * ``data`` (binary or text): the payload;
    * ``headers`` (optional): a map, or a list of structs of name and value, from text to text or to a list of text. A
      header with several values is stored with all of them. Null is no headers. Instructions to the server that
      `StoredMsg.headers` leaves out, such as ``Nats-Rollup``, are refused;
    * ``msg_id`` (optional, text): the ``Nats-Msg-Id``. For null, it is that of ``headers``, or as for `ingest`;
    * ``stream``, ``seq`` and ``time`` are left out, so that what `to_arrow` returned can be stored again: its messages get
      new sequences and times.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        source: A ``pyarrow.Table``, ``RecordBatch`` or ``RecordBatchReader``; anything with ``__arrow_c_stream__``, such as a
            data frame of Polars or pandas or a relation of DuckDB; an iterable or async iterable of ``RecordBatch``. It is
            read as fast as the messages are stored, readers in a thread of their own.
        subject: The subject of every message.
        msg_id: As for `ingest`.
        flow: As for `ingest`.
        max_outstanding_acks: As for `ingest`.
        timeout: As for `ingest`.
        patience: As for `ingest`.
        on_progress: As for `ingest`.
        progress_every: As for `ingest`.

    Returns:
        An `IngestReport`.

    Raises:
        ValueError: A column is missing, unknown, there twice or of another type, or an argument is out of its range.
            Nothing is stored, unless it is a later batch of an iterable.
        TypeError: `source`, or another argument, has a type that is not accepted.
        BadSubjectError: `subject` is not a valid subject.
        ConversionError: A row cannot be a message; the text has its index, from 0. Everything before it is stored.
        IngestError, UnsupportedFeatureError: As for `ingest`.
        Exception: What `source` or `msg_id` raises, once everything before it is stored.

    Cancellation: It is unknown whether the messages of the last window are stored. A thread that is reading a batch of a
    reader finishes that.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """
    if subject is not None:
        check_subject(subject)
    messages = _Messages(subject)
    return await ingest(
        js,
        messages.read(source),
        msg_id=msg_id,
        flow=flow,
        max_outstanding_acks=max_outstanding_acks,
        timeout=timeout,
        patience=patience,
        on_progress=on_progress,
        progress_every=progress_every,
    )


class _Messages:
    """Turns rows into messages, and counts the rows for errors."""

    def __init__(self, subject: str | None) -> None:
        self._subject = subject
        self._row = 0
        self._schema: pa.Schema | None = None  # the newest one that was checked

    def read(self, source: Any) -> Iterator[Entry] | AsyncGenerator[Entry, None]:
        if isinstance(source, pa.Table):
            self._check(source.schema)
            return self._from_batches(source.to_batches())
        if isinstance(source, pa.RecordBatch):
            return self._from_batches([source])
        if isinstance(source, pa.RecordBatchReader):
            self._check(source.schema)
            return self._from_async(_pulled(source))
        if isinstance(source, AsyncIterable):
            return self._from_async(source)
        if hasattr(source, "__arrow_c_stream__"):
            return self._from_async(self._opened(source))
        if isinstance(source, Iterable) and not isinstance(source, str | bytes):
            return self._from_batches(source)
        raise TypeError(
            "source must be a pyarrow Table, RecordBatch or RecordBatchReader, have __arrow_c_stream__, or be an iterable of "
            f"RecordBatch, not {type(source).__name__}"
        )

    async def _opened(self, source: Any) -> AsyncGenerator[pa.RecordBatch, None]:
        # Opening a relation runs its query, which may read from this event loop.
        reader = await asyncio.to_thread(pa.RecordBatchReader.from_stream, source)
        self._check(reader.schema)
        async for batch in _pulled(reader):
            yield batch

    def _from_batches(self, batches: Iterable[Any]) -> Iterator[Entry]:
        for batch in batches:
            yield from self._of(batch)

    async def _from_async(self, batches: AsyncIterable[Any]) -> AsyncGenerator[Entry, None]:
        async for batch in batches:
            for entry in self._of(batch):
                yield entry

    def _check(self, schema: pa.Schema) -> None:
        for field in schema:
            name = field.name
            if schema.names.count(name) > 1:
                raise ValueError(f"column {name!r}: it is there twice")
            if name in _LEFT_OUT:
                continue
            if name not in _COLUMNS:
                advice = (
                    did_you_mean(name, _COLUMNS, COLUMN_SYNONYMS)
                    or "; select those, and put other values into data or headers"
                )
                raise ValueError(
                    f"column {name!r}: only the columns {', '.join((*_COLUMNS, *_LEFT_OUT))} can be stored{advice}"
                )
            fits, kind = _COLUMNS[name]
            if not fits(field.type):
                raise ValueError(f"column {name!r}: it is {field.type}, but must be {kind}; cast it")
        if "data" not in schema.names:
            raise ValueError("column 'data': it is missing; it holds the messages' payloads, binary or text")
        if "subject" in schema.names and self._subject is not None:
            raise ValueError("option subject: there is a column 'subject' as well; drop one of them")
        if "subject" not in schema.names and self._subject is None:
            raise ValueError("column 'subject': it is missing; add it, or give the option subject for all rows")
        self._schema = schema

    def _of(self, batch: Any) -> Iterator[Entry]:
        if not isinstance(batch, pa.RecordBatch):
            raise TypeError(f"an iterable source must yield pyarrow.RecordBatch, not {type(batch).__name__}")
        if batch.schema is not self._schema:
            self._check(batch.schema)
        for piece in _pieces(batch):
            yield from self._some(piece)

    def _some(self, batch: pa.RecordBatch) -> Iterator[Entry]:
        names = batch.schema.names

        def column(name: str) -> list[Any]:
            return _values(batch.column(name)) if name in names else [None] * batch.num_rows

        subjects = [self._subject] * batch.num_rows if self._subject is not None else column("subject")
        columns = subjects, column("data"), column("headers"), column("msg_id")
        for subject, data, headers, msg_id in zip(*columns, strict=True):
            if type(subject) is not str:
                subject = self._text(subject, "subject")
            if type(data) is not bytes:
                if data is None:
                    self._refuse("its data is null; an empty payload is b''")
                data = data.encode()
            if headers is None and msg_id is None:
                yield subject, data
            else:
                yield subject, data, self._headers(headers, msg_id)
            self._row += 1

    def _headers(self, entries: Any, msg_id: Any) -> dict[str, str]:
        pairs: list[tuple[str, str]] = []
        if isinstance(entries, UnicodeDecodeError):
            self._refuse(f"one of its headers is not UTF-8: {entries}")
        for entry in entries or ():
            if entry is None:
                self._refuse("one of its headers is null")
            given, values = entry.values() if isinstance(entry, dict) else entry
            name = self._text(given, "header name")
            if is_instruction(name):
                self._refuse(
                    f"its header {name!r} is an instruction to the server, which was for another message; leave it out"
                )
            if name == MSG_ID and msg_id is not None:
                continue
            several = values if isinstance(values, list) else [values]
            pairs += [(name, self._text(value, f"header {name!r}")) for value in several]
        if msg_id is not None:
            msg_id = self._text(msg_id, "msg_id")
            if not msg_id or msg_id != msg_id.strip():
                # Servers and clients leave out white space around an id.
                self._refuse("its msg_id is empty or has white space around it; null lets ingest make an id")
            pairs.append((MSG_ID, msg_id))
        return own_headers(pairs)

    def _text(self, value: Any, what: str) -> str:
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                self._refuse(f"its {what} {value[:64]!r} is not UTF-8, which nats-py cannot publish")
        if not isinstance(value, str):
            self._refuse(f"its {what} is null")
        return value

    def _refuse(self, reason: str) -> NoReturn:
        raise ConversionError(f"the row at index {self._row} cannot be a message: {reason}")


async def _pulled(reader: pa.RecordBatchReader) -> AsyncGenerator[pa.RecordBatch, None]:
    """Read in a thread: the reader may wait, perhaps for this event loop."""

    def pull() -> pa.RecordBatch | None:
        try:
            return reader.read_next_batch()
        except StopIteration:  # which a future cannot carry
            return None

    while (batch := await asyncio.to_thread(pull)) is not None:
        yield batch


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces that become Python's values one at a time."""
    rows = batch.num_rows
    if rows > _ROWS or (rows > 1 and sum(map(_size, batch.columns)) > _BYTES):
        yield from _pieces(batch.slice(0, rows // 2))
        yield from _pieces(batch.slice(rows // 2))
    else:
        yield batch


def _size(column: Array) -> int:
    """Return about how many bytes a column takes as Python's values."""
    if isinstance(column, pa.DictionaryArray):
        return column.indices.nbytes
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        # Any number of views, of 16 bytes with the length first, can be of the same text.
        views: Any = column.buffers()[1]
        lengths = memoryview(views).cast("i")[4 * column.offset : 4 * (column.offset + len(column)) : 4]
        return sum([length for length in lengths if length > 0])
    return column.nbytes


def _values(column: Array) -> list[Any]:
    """Return Python's values, with bytes for a text that is not UTF-8, and an error for headers with such a text."""
    if isinstance(column, pa.DictionaryArray):
        indices: list[Any] = column.indices.to_pylist()
        dictionary = column.dictionary
        known: dict[int | None, Any] = {None: None}
        for index in indices:
            if index not in known:
                known[index] = _value(dictionary[index])
        return [known[index] for index in indices]
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # no library needs to check texts
        return list(map(_value, column))


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object if _is_text(scalar.type) else error


def _plain(data_type: pa.DataType) -> pa.DataType:
    return data_type.value_type if isinstance(data_type, pa.DictionaryType) else data_type


def _is_text(data_type: pa.DataType) -> bool:
    kind = _plain(data_type)
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _is_optional_text(data_type: pa.DataType) -> bool:
    return _is_text(data_type) or types.is_null(data_type)


def _is_headers(data_type: Any) -> bool:
    if types.is_null(data_type) or (_is_list(data_type) and types.is_null(data_type.value_type)):
        return True  # there are none
    if isinstance(data_type, pa.MapType):
        name, values = data_type.key_type, data_type.item_type
    elif _is_list(data_type) and isinstance(entry := data_type.value_type, pa.StructType) and entry.num_fields == 2:
        if entry.field(0).name == entry.field(1).name:  # Python's value would be a dict
            return False
        name, values = entry.field(0).type, entry.field(1).type
    else:
        return False
    return _is_text(name) and _is_text(values.value_type if _is_list(values) else values)


def _is_list(data_type: Any) -> bool:
    return types.is_list(data_type) or types.is_large_list(data_type)


_COLUMNS: Final = {
    "subject": (_is_text, "text"),
    "data": (_is_text, "binary or text"),
    "headers": (_is_headers, "a map, or a list of structs of name and value, from text to text or to a list of text"),
    "msg_id": (_is_optional_text, "text"),
}
