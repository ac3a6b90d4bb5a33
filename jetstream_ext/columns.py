"""Messages and the entries of buckets as Arrow columns: for `jetstream_ext.arrow`, Spark and files.

Arrow cuts the header blocks of many messages at once. A block that a server did not write in the usual form goes through
Python instead, row by row, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute

from jetstream_ext.errors import ConversionError, ResponseError
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import (
    ROW_STORED,
    ROW_SUBJECT,
    ROW_TIME,
    VERSION,
    is_instruction,
    line_without_header,
    parse_time_ns,
)

Array: TypeAlias = Any  # pyarrow's stubs have an overload for each type

pc: Final[Any] = pyarrow.compute

NANOSECONDS: Final = pa.timestamp("ns", tz="UTC")
_FIELDS: Final[list[Any]] = [
    pa.field("stream", pa.string(), nullable=False),
    pa.field("seq", pa.uint64(), nullable=False),
    pa.field("subject", pa.string(), nullable=False),
    pa.field("time", NANOSECONDS, nullable=False),
    pa.field("data", pa.binary(), nullable=False),
    pa.field("headers", pa.map_(pa.string(), pa.list_(pa.string())), nullable=False),
]
SCHEMA: Final = pa.schema(_FIELDS)
"""The columns of a message, each with the type that holds every value exactly.

A stream can have subjects and headers that are not UTF-8; they need ``binary`` in place of ``string``.
"""


_ENTRY_FIELDS: Final[list[Any]] = [
    pa.field("bucket", pa.string(), nullable=False),
    pa.field("key", pa.string(), nullable=False),
    pa.field("value", pa.binary(), nullable=False),
    pa.field("revision", pa.uint64(), nullable=False),
    pa.field("created", pa.timestamp("us", tz="UTC"), nullable=False),
    pa.field("operation", pa.string(), nullable=False),
]
BUCKET_SCHEMA: Final = pa.schema(_ENTRY_FIELDS)
"""The columns of a bucket's entries. Keys that are not UTF-8 need ``binary`` in place of ``string``."""

# An entry is a `kv.KeyValueEntry`, which this layer does not know.
_ENTRY_COLUMNS: Final[dict[str, Callable[[Collection[Any]], Array]]] = {
    "bucket": lambda entries: pa.array([entry.bucket.encode() for entry in entries], pa.binary()),
    "key": lambda entries: pa.array([entry.key.encode("utf-8", "surrogateescape") for entry in entries], pa.binary()),
    "value": lambda entries: pa.array([entry.value for entry in entries], pa.binary()),
    "revision": lambda entries: pa.array([entry.revision for entry in entries], pa.uint64()),
    "created": lambda entries: pa.array([entry.created for entry in entries], pa.timestamp("us", tz="UTC")),
    "operation": lambda entries: pa.array([entry.operation.encode() for entry in entries], pa.binary()),
}


def entry_column(name: str, entries: Collection[Any]) -> Array:
    """Return a column of key-value entries; texts are ``binary``, which holds every key."""
    return _ENTRY_COLUMNS[name](entries)


_LINES: Final = 9  # into which a usual header block is cut: what is stored, six lines, and the empty line as two
_STORED, _STREAM, _SUBJECT, _SEQUENCE, _TIME, _PENDING, _LAST = range(7)  # their places among them
_VERSION: Final = VERSION.decode()
_STREAM_NAME: Final = b"Nats-Stream: "
_NAMES: Final = {
    _SUBJECT: b"Nats-Subject: ",
    _SEQUENCE: b"Nats-Sequence: ",
    _TIME: b"Nats-Time-Stamp: ",
    _PENDING: b"Nats-Num-Pending: ",
    _LAST: b"Nats-Last-Sequence: ",
}
_OUT_OF_RANGE: Final = "nanoseconds can express only times of the years 1678 to 2261"
_TO_THE_END: Final = 1 << 20  # `binary_slice` needs an end; no line is that long
_HEADERS: Final = pa.map_(pa.binary(), pa.list_(pa.binary()))
_map_array: Final[Any] = pa.MapArray.from_arrays  # its stubs accept int64 offsets only
_list_array: Final[Any] = pa.ListArray.from_arrays
_NUMBERS: Final = {"i": pa.int32(), "q": pa.int64(), "Q": pa.uint64()}  # by the type codes of the module `array`


# `pa.array` and `pa.scalar` import pandas if it is installed, which takes longer than all other imports of a read. So the
# usual blocks become arrays by their buffers.


def _numbers(code: Literal["i", "q", "Q"], values: Iterable[int]) -> Array:
    numbers = array(code, values)
    return pa.Array.from_buffers(_NUMBERS[code], len(numbers), [None, pa.py_buffer(numbers)])


def _binary(values: bytes, offsets: Sequence[int]) -> Array:
    buffers = [None, pa.py_buffer(array("i", offsets)), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


_SHORTEST_TIME: Final = _numbers("i", [len("2026-01-01T00:00:00Z")])[0]


class Columns:
    """Builds record batches with the columns of a schema, which are some of those of `SCHEMA`, and ``timeNanos``.

    ``timeNanos`` is the time as nanoseconds since 1970 (``int64``). A column may have another type to which its values can be converted: ``seq`` may be ``int64``, ``time`` may have
    another unit, and texts may be ``binary``. With `replace`, U+FFFD stands for bytes of a text that are not UTF-8, and
    digits of a time that its unit does not have are left out. With `all_lines`, lines among stored headers that are not headers, such
    as a status, are refused instead of left out.
    """

    def __init__(self, schema: pa.Schema, *, replace: bool = False, all_lines: bool = False) -> None:
        self.schema: pa.Schema = schema
        self._replace = replace
        self._all_lines = all_lines

    def batch(self, block: Block) -> pa.RecordBatch:
        """Return a block's messages.

        Raises ResponseError if a message is malformed, and ValueError (pyarrow's ArrowInvalid and ConversionError are such)
        if a value does not fit its column.
        """
        columns = _BlockColumns(block)
        try:
            arrays = [self._fit(getattr(columns, field.name), field.type) for field in self.schema]
            if self._all_lines:
                columns.check_lines()
            return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        except (pa.ArrowInvalid, ResponseError):
            block.check()  # its error names the message
            raise

    def _fit(self, values: Array, kind: pa.DataType) -> Array:
        if values.type == kind:
            return values
        if not self._replace:
            return values.cast(kind)
        try:
            return values.cast(kind, safe=not pa.types.is_timestamp(kind))
        except pa.ArrowInvalid:
            return pa.array([_text(value) for value in values.to_pylist()], kind)


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return type(value)(map(_text, value)) if isinstance(value, list | tuple) else value


class _BlockColumns:
    """The columns of a block; each is made when it is asked for."""

    def __init__(self, block: Block) -> None:
        self._block = block

    @cached_property
    def _halves(self) -> Array:
        """The header block and the payload of each message, in turn."""
        bodies, sizes = self._block.bodies, self._block.header_sizes
        starts = list(accumulate(map(len, bodies), initial=0))
        offsets = [0] * (2 * len(bodies) + 1)
        offsets[::2] = starts
        offsets[1::2] = map(add, starts, sizes)
        return _binary(b"".join(bodies), offsets)

    @cached_property
    def _lines(self) -> Array | None:
        """The lines of all header blocks, `_LINES` each; None unless all have the usual form (see `reply_row`)."""
        block = self._block
        heads = _each(self._halves, 2, 0)
        split = pc.split_pattern(heads, "\r\n", max_splits=_LINES - 1, reverse=True)
        lines = split.flatten()
        if len(lines) != _LINES * len(heads) or split.value_lengths().unique().to_pylist() != [_LINES]:
            return None
        if _each(lines, _LINES, _STREAM).unique().to_pylist() != [_STREAM_NAME + block.stream.encode()]:
            return None
        usual = (_all(pc.starts_with(_each(lines, _LINES, place), name)) for place, name in _NAMES.items())
        return lines if all(usual) else None

    def _values(self, place: int, row_place: int) -> Array:
        """What the server's line at a place says."""
        if self._lines is None:
            rows = self._block.rows
            return pa.array([row[row_place].removeprefix(_NAMES[place]) for row in rows], pa.binary())
        return pc.binary_slice(_each(self._lines, _LINES, place), len(_NAMES[place]), _TO_THE_END)

    @property
    def stream(self) -> Array:
        return pa.repeat(_binary(name := self._block.stream.encode(), [0, len(name)])[0], len(self._block))

    @property
    def seq(self) -> Array:
        return _numbers("Q", self._block.seqs)

    @property
    def data(self) -> Array:
        return _each(self._halves, 2, 1)

    @property
    def subject(self) -> Array:
        return self._values(_SUBJECT, ROW_SUBJECT)

    @cached_property
    def time(self) -> Array:
        texts = self._values(_TIME, ROW_TIME).cast(pa.string())
        # Arrow reads offsets, and times without seconds, too.
        if _all(pc.and_(pc.ends_with(texts, "Z"), pc.greater_equal(pc.binary_length(texts), _SHORTEST_TIME))):
            try:
                return texts.cast(NANOSECONDS)
            except pa.ArrowInvalid:
                pass
        times = [parse_time_ns(text.encode()) for text in texts.to_pylist()]
        try:
            return pa.array(times, pa.int64()).cast(NANOSECONDS)
        except OverflowError:
            if any(time % 1000 for time in times):
                raise pa.ArrowInvalid(_OUT_OF_RANGE) from None
            return pa.array([time // 1000 for time in times], pa.int64()).cast(pa.timestamp("us", tz="UTC"))

    @property
    def timeNanos(self) -> Array:  # noqa: N802 - the name of the column
        if self.time.type != NANOSECONDS:
            raise pa.ArrowInvalid(_OUT_OF_RANGE)
        return self.time.view(pa.int64())

    @property
    def headers(self) -> Array:
        """One map per row, as `StoredMsg.headers`: each name once, with all of its values in order."""
        if self._maps is None:
            return pa.array([_grouped(row[ROW_STORED]) for row in self._block.rows], _HEADERS)
        return self._maps

    @cached_property
    def _stored(self) -> Array | None:
        return None if self._lines is None else _each(self._lines, _LINES, _STORED)

    @cached_property
    def _maps(self) -> Array | None:
        return None if self._stored is None else _maps(self._stored)

    def check_lines(self) -> None:
        """Raise ConversionError if a line among stored headers is not a header."""
        if self._maps is not None and _all(
            pc.or_(pc.starts_with(self._stored, f"{_VERSION}\r\n"), pc.equal(self._stored, _VERSION.encode()))
        ):
            return
        for seq, row in zip(self._block.seqs, self._block.rows, strict=True):
            if row[ROW_STORED] and (line := line_without_header(row[ROW_STORED])) is not None:
                raise ConversionError(
                    f"message {seq} of stream {self._block.stream!r}: column 'headers' would lose the line {line!r}, which is "
                    "no header"
                )


def _all(values: Any) -> bool:
    return bool(pc.all(values).as_py())


def _is_instruction(name: bytes) -> bool:
    return is_instruction(name.decode("utf-8", "replace"))


def _grouped(stored: bytes) -> list[tuple[bytes, list[bytes]]]:
    values: dict[bytes, list[bytes]] = {}
    for line in stored.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon and not _is_instruction(name.strip()):
            values.setdefault(name.strip(), []).append(value.strip())
    return list(values.items())


def _maps(stored: Array) -> Array | None:
    """Return the headers of stored blocks as maps; None if a line is no header, or a name comes twice in a block."""
    split = pc.split_pattern(stored, "\r\n")
    lines, owners = split.flatten(), pc.list_parent_indices(split)
    # The first line of a block is the version.
    is_header = pc.equal(owners[1:], owners[:-1])
    lines, owners = lines[1:].filter(is_header), owners[1:].filter(is_header)
    halves = pc.split_pattern(lines, ":", max_splits=1).flatten()
    if len(halves) != 2 * len(lines):
        return None
    names, values = _trimmed(_each(halves, 2, 0)), _trimmed(_each(halves, 2, 1))
    encoded = names.dictionary_encode()
    places = pc.add(pc.multiply(owners, _numbers("q", [len(encoded.dictionary)])[0]), encoded.indices)
    if pc.count_distinct(places).as_py() != len(places):
        return None
    starts = pc.subtract(split.offsets, _every(1, 0, len(stored) + 1))
    kinds = _numbers("i", (not _is_instruction(name) for name in encoded.dictionary.to_pylist())).cast(pa.bool_())
    if not _all(kinds):
        kept = kinds.take(encoded.indices)
        counts = pc.cumulative_sum(kept.cast(pa.int32()))
        starts = pa.concat_arrays([_numbers("i", [0]), counts]).take(starts)
        names, values = names.filter(kept), values.filter(kept)
    return _map_array(starts, names, _list_array(_every(1, 0, len(values) + 1), values))


def _trimmed(values: Array) -> Array:
    # Arrow trims only strings; it does not look whether they are UTF-8.
    return pc.ascii_trim_whitespace(values.view(pa.string())).view(pa.binary())


_indices: dict[tuple[int, int], Array] = {}


def _every(step: int, start: int, count: int) -> Array:
    """Return `count` indices from `start` on."""
    known = _indices.get((step, start))
    if known is None or len(known) < count:
        most = max(count, 1024)
        known = _indices[step, start] = _numbers("i", range(start, start + step * most, step))
    return known[:count]


def _each(values: Array, step: int, start: int) -> Array:
    """Return every `step`-th value, from `start` on."""
    return values.take(_every(step, start, len(values) // step))
