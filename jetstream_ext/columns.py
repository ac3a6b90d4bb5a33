"""Messages as Arrow columns: for `jetstream_ext.arrow`, Spark and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

import pyarrow as pa

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import ROW_STORED, ROW_SUBJECT, ROW_TIME, Row

Array: TypeAlias = "pa.Array[Any]"

NANOSECONDS: Final = pa.timestamp("ns", tz="UTC")
_BYTES_HEADERS: Final = pa.map_(pa.binary(), pa.list_(pa.binary()))
_map_array: Final[Any] = pa.MapArray.from_arrays  # its stubs accept int64 offsets only

SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("seq", pa.uint64(), nullable=False),
        pa.field("subject", pa.string(), nullable=False),
        pa.field("time", NANOSECONDS, nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.list_(pa.string())), nullable=False),
    ]
)
"""The columns of a message, each with the type that holds every value exactly.

A stream can have subjects and headers that are not UTF-8; they need ``binary`` in place of ``string``.
"""


class Columns:
    """Builds record batches with the columns of a schema, which are some of those of `SCHEMA`.

    A column may have another type to which its values can be converted: ``seq`` may be ``int64``, ``time`` may have
    another unit, and texts may be ``binary``. With `replace`, U+FFFD stands for bytes of a text that are not UTF-8, and
    digits of a time that its unit does not have are left out.
    """

    def __init__(self, schema: pa.Schema, *, replace: bool = False) -> None:
        self.schema: pa.Schema = schema
        self._replace = replace
        self._needs_rows = any(name in ("subject", "time", "headers") for name in schema.names)

    def batch(self, block: Block) -> pa.RecordBatch:
        """Return a block's messages.

        Raises ResponseError if a message is malformed, and ValueError (pyarrow's ArrowInvalid is one) if a value does not
        fit its column.
        """
        rows = block.rows if self._needs_rows else []
        try:
            arrays = [_BUILD[field.name](block, rows) for field in self.schema]
            arrays = [self._fit(array, field.type) for array, field in zip(arrays, self.schema, strict=True)]
            return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        except pa.ArrowInvalid:
            block.check()  # its error names the message
            raise

    def _fit(self, array: Array, kind: pa.DataType) -> Array:
        if array.type == kind:
            return array
        if not self._replace:
            return array.cast(kind)
        try:
            return array.cast(kind, safe=not pa.types.is_timestamp(kind))
        except pa.ArrowInvalid:
            return _replaced(array, kind)


def _replaced(array: Array, kind: pa.DataType) -> Array:
    def text(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, list | tuple):
            return type(value)(map(text, value))
        return value

    return pa.array([text(value) for value in array.to_pylist()], kind)


def _times(rows: Sequence[Row]) -> Array:
    text = pa.array([row[ROW_TIME][17:] for row in rows], pa.binary()).cast(pa.string())
    return text.cast(NANOSECONDS)


def _headers(rows: Sequence[Row]) -> Array:
    """Return one map per row, with all values of a repeated name in order."""
    stored = [row[ROW_STORED] for row in rows]
    names: list[bytes] = []
    values: list[bytes] = []
    entries = [0] * (len(stored) + 1)  # where each row's names start
    counts: list[int] = []  # the number of values of each name
    if any(stored):
        for row, header in enumerate(stored, 1):
            if header:
                for name, several in _grouped(header).items():
                    names.append(name)
                    values += several
                    counts.append(len(several))
            entries[row] = len(names)
    lists = pa.ListArray.from_arrays(pa.array(accumulate(counts, initial=0), pa.int32()), pa.array(values, pa.binary()))
    maps: Array = _map_array(pa.array(entries, pa.int32()), pa.array(names, pa.binary()), lists)
    return maps


def _grouped(header: bytes) -> dict[bytes, list[bytes]]:
    grouped: dict[bytes, list[bytes]] = {}
    for line in header.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        name = name.strip()
        if colon:
            grouped.setdefault(name, []).append(value.strip())
    return grouped


_BUILD: Final[dict[str, Callable[[Block, Sequence[Row]], Array]]] = {
    "stream": lambda block, rows: pa.repeat(pa.scalar(block.stream.encode(), pa.binary()), len(block)),
    "seq": lambda block, rows: pa.array(block.seqs, pa.uint64()),
    "subject": lambda block, rows: pa.array([row[ROW_SUBJECT] for row in rows], pa.binary()),
    "time": lambda block, rows: _times(rows),
    "data": lambda block, rows: pa.array(block.datas, pa.binary()),
    "headers": lambda block, rows: _headers(rows),
}
