"""Payloads as columns: JSON objects, Arrow IPC streams, or what a function makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final, Literal, Protocol, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute
import pyarrow.json
from pyarrow import types

from jetstream_ext.arrow.ipc import expanded_size
from jetstream_ext.arrow.schemas import Array, Field, first_bad
from jetstream_ext.errors import ConversionError
from jetstream_ext.protocol.options import check_function
from jetstream_ext.text import counted, plural

pc: Final[Any] = pyarrow.compute

_BYTES: Final = 8 << 20  # of the tables that are joined
_LARGEST: Final = 64 << 20  # bytes or rows of a table; servers store no larger payload

Payload: TypeAlias = pa.Schema | Literal["ipc"] | Callable[[Any], Any]
"""How payloads become columns:

* a ``pyarrow.Schema``: each payload is a JSON object with these fields. A field that an object lacks is null, other
  fields of the object are ignored. Texts become times, in UTC if they name no zone, and decimals. Only floating-point
  columns round numbers;
* ``"ipc"``: each payload is an Arrow IPC stream, all with the same schema. A message becomes as many rows as its stream
  has, so that its other columns repeat, or none at all. An empty stream has no such columns. A small payload can be a
  large table, which is in memory as a whole: one of more than 64 MiB or 67,108,864 rows is refused before it is
  decompressed;
* a function: it is called with a ``pyarrow.BinaryArray`` of payloads, and returns as many values: an ``Array`` for the
  column ``data``, a ``StructArray`` or a ``RecordBatch`` for several columns. To learn the type of an empty stream, it is
  called with no payloads.

Payloads are decoded in a thread of the read, one batch at a time, so that the event loop goes on meanwhile.
"""


class Decoder(Protocol):
    """Turns payloads into columns."""

    @property
    def schema(self) -> pa.Schema | None:
        """The columns, once they are known."""

    def decode(self, payloads: Array, place: Callable[[int], str]) -> Iterator[tuple[pa.Table, Iterator[int] | None]]:
        """Yield columns, and to which payload each row belongs (None: one row each); `place` names a payload.

        Raises ConversionError if a payload cannot be decoded.
        """

    def finish(self) -> pa.Schema:
        """Return the columns of a stream that has no more messages."""


def decoder_of(payload: Payload) -> Decoder:
    """Return the decoder that the caller asks for; raise ValueError or TypeError for any other `payload`."""
    if isinstance(payload, pa.Schema):
        return _Json(payload)
    if payload == "ipc":
        return _Ipc()
    if callable(payload):
        check_function(payload, "payload", awaited=False)
        return _Function(payload)
    raise TypeError(f"payload must be a pyarrow.Schema (for JSON), 'ipc' or a function, not {payload!r}")


class _Json:
    def __init__(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise ValueError("payload: the schema has no fields")
        self.schema: pa.Schema = schema
        _check_names(schema)
        try:
            _parse([b"{}"], pa.schema(map(_optional, schema)))
        except pa.ArrowNotImplementedError as error:
            raise ValueError(f"payload: {error}") from error

    def decode(self, payloads: Array, place: Callable[[int], str]) -> Iterator[tuple[pa.Table, None]]:
        texts: list[Any] = payloads.to_pylist()
        for index, text in enumerate(texts):
            # pyarrow looks for any number of objects anywhere, so each payload must be known to be exactly one.
            try:
                document = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise ConversionError(f"the payload of {place(index)} is not JSON: {error}") from None
            if type(document) is not dict:
                raise ConversionError(f"the payload of {place(index)} is not a JSON object")
        try:
            table = _parse(texts, self.schema)
        except pa.ArrowInvalid:
            index, cause = first_bad(lambda start, stop: _parse(texts[start:stop], self.schema), len(texts))
            raise ConversionError(f"the payload of {place(index)} does not fit the schema: {cause}") from cause
        yield table, None

    def finish(self) -> pa.Schema:
        return self.schema


def _check_names(fields: Iterable[Field]) -> None:
    """Raise ValueError if objects, or objects in them, would have a field twice."""
    known: set[str] = set()
    for field in fields:
        if field.name in known:
            raise ValueError(f"payload: the schema has the field {field.name!r} twice")
        known.add(field.name)
        kind = field.type
        while isinstance(kind, pa.ListType):
            kind = kind.value_type
        if isinstance(kind, pa.StructType):
            _check_names(kind)


def _optional(field: Field) -> Field:
    """Return a field that may be null, as may the fields of its objects: pyarrow requires those of a null, too."""
    if isinstance(field.type, pa.StructType):
        field = field.with_type(pa.struct(list(map(_optional, field.type))))
    return field.with_nullable(True)


def _parse(texts: list[Any], schema: pa.Schema) -> pa.Table:
    joined = b"\n".join(texts)
    table = pyarrow.json.read_json(
        io.BytesIO(joined),
        # In one block: pyarrow would look for the ends of objects to cut the text.
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(joined) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="ignore"
        ),
    )
    table.validate(full=True)  # pyarrow does not look whether decimals in texts and times of day are in their range
    if table.num_rows != len(texts):
        raise pa.ArrowInvalid(f"pyarrow found {counted(table.num_rows, 'object')} in {counted(len(texts), 'payload')}")
    if any(_has_infinity(chunk) for column in table.columns for chunk in column.chunks):
        raise pa.ArrowInvalid("a number is beyond the range of its type float")
    return pa.Table.from_arrays([table.column(name) for name in schema.names], schema=schema)


def _has_infinity(values: Any) -> bool:
    """Return whether a number became infinite; `orjson` refuses those that are beyond the range of a double."""
    if types.is_float32(values.type):
        return bool(pc.any(pc.is_inf(values)).as_py())
    if types.is_struct(values.type):
        return any(map(_has_infinity, values.flatten()))
    return types.is_list(values.type) and _has_infinity(values.flatten())


class _Ipc:
    def __init__(self) -> None:
        self.schema: pa.Schema | None = None

    def decode(self, payloads: Array, place: Callable[[int], str]) -> Iterator[tuple[pa.Table, Iterator[int]]]:
        some: list[tuple[int, pa.Table]] = []
        size = 0
        for index, payload in enumerate(payloads):
            table, expanded = self._read(payload, index, place)
            some.append((index, table))
            size += expanded
            if size >= _BYTES:
                yield from _joined(some)
                some, size = [], 0
        if some:
            yield from _joined(some)

    def _read(self, payload: Any, index: int, place: Callable[[int], str]) -> tuple[pa.Table, int]:
        """Return a payload's table and its size."""
        try:
            content = payload.as_buffer()
            size = expanded_size(content, _LARGEST)
            table = _table(content) if size <= _LARGEST else None
        except (pa.ArrowException, OSError, ValueError) as error:  # such as a name that is not UTF-8
            raise ConversionError(f"the payload of {place(index)} is not an Arrow IPC stream: {error}") from error
        if table is None or table.num_rows > _LARGEST:  # of columns that take no memory, such as nulls
            raise ConversionError(
                f"the payload of {place(index)} becomes too large a table: an Arrow IPC stream may have at most "
                f"{_LARGEST >> 20} MiB and {_LARGEST:,} rows; read this message without payload, and decode its data yourself"
            )
        self.schema = _same(self.schema, table.schema, f"the payload of {place(index)}")
        return table, size

    def finish(self) -> pa.Schema:
        return self.schema or pa.schema([])


def _joined(parts: list[tuple[int, pa.Table]]) -> Iterator[tuple[pa.Table, Iterator[int]]]:
    """Yield tables as one, or as they are if they have no columns, without which pyarrow forgets the number of rows."""
    if parts[0][1].schema.names:
        try:
            table = pa.concat_tables([table for _, table in parts]).unify_dictionaries().combine_chunks()
        except pa.ArrowException:  # such as more values than a dictionary's indices can count
            pass
        else:
            yield table, chain.from_iterable(repeat(index, part.num_rows) for index, part in parts)
            return
    for index, table in parts:
        yield table, repeat(index, table.num_rows)


def _table(content: pa.Buffer) -> pa.Table:
    source = pa.BufferReader(content)
    with pa.ipc.open_stream(source) as stream:
        table = stream.read_all()
    if left := source.size() - source.tell():
        raise pa.ArrowInvalid(f"{counted(left, 'byte')} {plural(left, 'follows', 'follow')} its end")
    table.validate(full=True)  # anyone may have written it
    return table


class _Function:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.schema: pa.Schema | None = None
        self._function = function

    def decode(self, payloads: Array, place: Callable[[int], str]) -> Iterator[tuple[pa.Table, None]]:
        yield self._call(payloads, place), None

    def _call(self, payloads: Array, place: Callable[[int], str]) -> pa.Table:
        try:
            given = self._function(payloads)
        except StopIteration as error:  # which a future cannot carry
            raise RuntimeError("the payload function raised StopIteration") from error
        if isinstance(given, pa.StructArray):
            given = pa.RecordBatch.from_struct_array(given)
        elif isinstance(given, pa.ChunkedArray | pa.Array):
            given = pa.table({"data": given})
        if isinstance(given, pa.RecordBatch):
            given = pa.Table.from_batches([given])
        if not isinstance(given, pa.Table):
            what = type(given).__name__
            raise TypeError(f"the payload function must return an Array, a StructArray or a RecordBatch, not {what}")
        if given.num_rows != len(payloads):
            counts = f"{counted(given.num_rows, 'value')} for {counted(len(payloads), 'payload')}"
            raise ConversionError(f"the payload function returned {counts}, at {place(0)}")
        self.schema = _same(self.schema, given.schema, f"what the payload function returned at {place(0)}")
        return given

    def finish(self) -> pa.Schema:
        if self.schema is None:
            self._call(pa.array([], pa.binary()), lambda _: "the end of an empty stream")
            assert self.schema is not None
        return self.schema


def _same(known: pa.Schema | None, found: pa.Schema, what: str) -> pa.Schema:
    if known is not None and not found.equals(known):
        raise ConversionError(f"{what} has other columns than before: {_shown(found)}, before {_shown(known)}")
    return found if known is None else known


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
