"""Columns from the wire to Arrow record batches of exactly the schema that Spark declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import REPLY_HEADERS, ROW_STORED, ROW_SUBJECT, ROW_TIME, Row

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Array: TypeAlias = "pa.Array[Any]"
Rows: TypeAlias = Sequence[Row]

_TIME: Final = pa.timestamp("us", tz="UTC")
_HEADERS: Final = pa.map_(pa.string(), pa.list_(pa.string()))
_map_array: Final[Any] = pa.MapArray.from_arrays  # its stubs know int64 offsets only, and have them wrong
_SERVERS_OWN: Final = frozenset(name.encode() for name in REPLY_HEADERS)


def _stream(block: Block, rows: Rows) -> Array:
    return pa.repeat(pa.scalar(block.stream, pa.string()), len(block))


def _seq(block: Block, rows: Rows) -> Array:
    return pa.array(block.seqs, pa.int64())


def _subject(block: Block, rows: Rows) -> Array:
    return _text([row[ROW_SUBJECT] for row in rows])


def _time(block: Block, rows: Rows) -> Array:
    # By way of nanoseconds: Arrow parses as many digits of a fraction as the unit has, and no more.
    text = pa.array([row[ROW_TIME][17:] for row in rows], pa.binary()).cast(pa.string())
    return text.cast(pa.timestamp("ns", tz="UTC")).cast(_TIME, safe=False)


def _data(block: Block, rows: Rows) -> Array:
    return pa.array(block.datas, pa.binary())


def _headers(block: Block, rows: Rows) -> Array:
    """Return one map per row; the values of a name that occurs more than once are together, in order."""
    stored = [row[ROW_STORED] for row in rows]
    names: list[bytes] = []
    values: list[bytes] = []
    entries = [0] * (len(stored) + 1)  # where each row's names begin
    counts: list[int] = []  # how many values each name has
    if any(stored):
        for row, header in enumerate(stored, 1):
            if header:
                for name, several in _grouped(header).items():
                    names.append(name)
                    values += several
                    counts.append(len(several))
            entries[row] = len(names)
    lists = pa.ListArray.from_arrays(pa.array(accumulate(counts, initial=0), pa.int32()), _text(values))
    maps: Array = _map_array(pa.array(entries, pa.int32()), _text(names), lists)
    return maps


def _grouped(header: bytes) -> dict[bytes, list[bytes]]:
    grouped: dict[bytes, list[bytes]] = {}
    for line in header.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        name = name.strip()
        if colon and name not in _SERVERS_OWN:
            grouped.setdefault(name, []).append(value.strip())
    return grouped


def _text(values: Sequence[bytes]) -> Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        # NATS takes any bytes in a subject or a header; Spark's strings are UTF-8.
        return pa.array([value.decode("utf-8", "replace") for value in values], pa.string())


_COLUMNS: Final[dict[str, tuple[pa.DataType, Callable[[Block, Rows], Array]]]] = {
    "stream": (pa.string(), _stream),
    "seq": (pa.int64(), _seq),
    "subject": (pa.string(), _subject),
    "time": (_TIME, _time),
    "data": (pa.binary(), _data),
    "headers": (_HEADERS, _headers),
}
# The others do not need the header lines cut.
_FROM_ROWS: Final = frozenset({"subject", "time", "headers"})


class BatchBuilder:
    """Builds record batches with the columns of a Spark schema, and only those."""

    def __init__(self, schema: StructType) -> None:
        self._schema = pa.schema(
            [pa.field(field.name, _COLUMNS[field.name][0], nullable=field.nullable) for field in schema.fields]
        )
        self._needs_rows = any(field.name in _FROM_ROWS for field in schema.fields)
        self._build: list[Callable[[Block, Rows], Any]] = [_COLUMNS[field.name][1] for field in schema.fields]

    def build(self, block: Block) -> pa.RecordBatch:
        """Return the rows of `block`."""
        rows = block.rows if self._needs_rows else []
        return pa.RecordBatch.from_arrays([build(block, rows) for build in self._build], schema=self._schema)
