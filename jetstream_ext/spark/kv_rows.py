"""Rows that Spark passes to the `jetstream_kv` sink: the columns, the checks, and the last row of each key.

A micro-batch stores one message for each of its keys. A task therefore has to see its whole partition before it knows what
to store. The values are in memory up to some size, and then in a temporary file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import repeat
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from nats.js.errors import InvalidKeyError
from pyspark.sql.types import StructType

from jetstream_ext.kv.commit import Staged
from jetstream_ext.kv.entries import Operation, check_key
from jetstream_ext.spark.bad_rows import BadRow, BadRows
from jetstream_ext.spark.options import KvWriteOptions, OptionError
from jetstream_ext.spark.row_sizes import RowSizes
from jetstream_ext.spark.rows import find_columns
from jetstream_ext.spark.ttls import parse_ttl
from jetstream_ext.text import did_you_mean
from jetstream_ext.types import TTL, Entry

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
_TYPES: Final = {
    "key": ("string",),
    "value": ("binary", "string"),
    "operation": ("string",),
    "ttl": (*_INTEGERS, "string"),
    "expectedRevision": _INTEGERS,
}
_SYNONYMS: Final = {
    "data": "value",
    "op": "operation",
    "payload": "value",
    "revision": "expectedRevision",
    "subject": "key",
}
_OPERATIONS: Final = ("PUT", "DEL", "PURGE")
_OTHER_WORDS: Final = {"delete": "DEL", "remove": "DEL", "update": "PUT", "upsert": "PUT"}
_MEMORY: Final = 64 << 20  # bytes of values, the replaced ones included
_LONGEST_KEY: Final = 3800  # a server closes the connection after a line of more than 4096 bytes
DIGEST_SIZE: Final = 12
"""The number of bytes of a key's digest."""


def digest_of(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=DIGEST_SIZE).digest()


@dataclass(frozen=True, slots=True)
class KeyWrite:
    """What a micro-batch does to a key, and the row that says so."""

    key: str
    value: bytes = field(repr=False)
    what: Staged = field(repr=False)  # without the value
    row: int  # the index in its partition
    partition: int

    @property
    def size(self) -> int:
        return len(self.key) + len(self.value)

    def message(self, prefix: str) -> Entry:
        what = self.what
        if what.operation == "PUT" and what.ttl is None and what.expected is None:
            return prefix + self.key, self.value  # a batch takes most time for messages with options
        return replace(what, value=self.value).message(prefix + self.key)


_PUT: Final = Staged("PUT")  # what most rows do
_Row: TypeAlias = tuple[str, bytes, Staged, int]


@dataclass(frozen=True, slots=True)
class KvColumns:
    """The indexes of the sink's columns."""

    key: int
    value: int | None
    operation: int | None
    ttl: int | None
    expected: int | None

    @classmethod
    def of(cls, schema: StructType, options: KvWriteOptions) -> KvColumns:
        """Find the columns; raise OptionError if one is missing, unknown, of another type or in conflict with an option."""
        advice = "select those (df.select('key', 'value')), and put other values into value, for example with to_json(struct(...))"
        where = find_columns(schema, _TYPES, advice, _SYNONYMS)
        if "key" not in where:
            raise OptionError("column 'key': it is missing; it names the key that a row writes")
        if "value" not in where and "operation" not in where:
            raise OptionError("column 'value': it is missing; it holds the values, binary or string")
        if "ttl" in where and options.ttl is not None:
            raise OptionError("option 'ttl': there is a column 'ttl' as well; drop one of them")
        return cls(
            where["key"], where.get("value"), where.get("operation"), where.get("ttl"), where.get("expectedRevision")
        )


class KvRowReader:
    """Turns the rows of a partition into writes of keys, in order; `bad` decides about rows that cannot be one."""

    def __init__(
        self, columns: KvColumns, options: KvWriteOptions, values: RowSizes, with_options: RowSizes, bad: BadRows
    ) -> None:
        self._columns = columns
        self._options = options
        self._bad = bad
        self._values = values  # the limits for values without a TTL and an expected revision
        self._with_options = with_options
        self._row = 0

    def from_arrow(self, batch: RecordBatch) -> Iterator[_Row]:
        def values(index: int | None) -> Iterable[Any]:
            return repeat(None, batch.num_rows) if index is None else batch.column(index).to_pylist()

        columns = self._columns
        return self._writes(
            zip(
                values(columns.key),
                values(columns.value),
                values(columns.operation),
                values(columns.ttl),
                values(columns.expected),
                strict=True,
            )
        )

    def from_rows(self, rows: Iterable[Any]) -> Iterator[_Row]:
        """As `from_arrow`, for rows that Spark passes one by one."""
        columns = self._columns
        places = (columns.key, columns.value, columns.operation, columns.ttl, columns.expected)
        return self._writes(tuple(None if place is None else row[place] for place in places) for row in rows)

    def _writes(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[_Row]:
        for key, given, operation, ttl, expected in rows:
            value = b""
            try:
                value = _bytes_of(given)
                what = self._staged(key, value, operation, ttl, expected)
            except (ValueError, InvalidKeyError) as error:
                reason = error.description if isinstance(error, InvalidKeyError) else str(error)
                self._bad.add(BadRow(self._row, reason or str(error), key, value))
            else:
                yield key, value, what, self._row
            self._row += 1

    def _staged(self, key: Any, value: bytes, operation: Any, ttl: Any, expected: Any) -> Staged:
        """Return what a row does to its key; raise ValueError or InvalidKeyError if it is bad."""
        if key is None:
            raise ValueError("its key is null")
        check_key(key)
        if operation is None:
            operation = "PUT"
        elif operation not in _OPERATIONS:
            raise ValueError(
                f"its operation {operation!r} is not one of {', '.join(_OPERATIONS)}{did_you_mean(operation, _OPERATIONS, _OTHER_WORDS)}"
            )
        if operation != "PUT" and value:
            raise ValueError(f"its operation is {operation}, which has no value; set the value to null")
        if len(key) > _LONGEST_KEY:
            raise ValueError(f"its key has {len(key)} bytes; servers accept about {_LONGEST_KEY}")
        if expected is not None and expected < 0:
            raise ValueError(f"its expectedRevision {expected} is negative")
        lives: TTL | None = None
        if ttl is not None:
            lives = parse_ttl(ttl)
            if operation == "DEL":
                raise ValueError("its operation is DEL, which has no TTL; set ttl to null, or use PURGE")
        elif operation == "PUT":
            lives = self._options.ttl
        plain = operation == "PUT" and lives is None and expected is None
        sizes = self._values if plain else self._with_options
        if len(value) > sizes.of_data:
            raise ValueError(sizes.problem(value, None, None))
        if plain:
            return _PUT
        return Staged(cast("Operation", operation), b"", lives, expected, creates=expected == 0)


def _bytes_of(given: Any) -> bytes:
    if given is None:
        return b""
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError:
            raise ValueError("its value has half of a surrogate pair, which UTF-8 cannot encode") from None
    return bytes(given)


class LastRows:
    """The last row of each key of a partition, in the order of these rows."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._values = SpooledTemporaryFile(max_size=_MEMORY)  # noqa: SIM115 - `close` closes it
        self._end = 0  # of the values
        self._rows: dict[str, tuple[int, int, Staged, int]] = {}  # where the value is, its size, and the rest
        self.size: int = 0  # the bytes of the keys and their values

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: str, value: bytes, what: Staged, row: int) -> None:
        """Take the next row of the partition."""
        earlier = self._rows.pop(key, None)
        self.size += len(value) + (len(key) if earlier is None else -earlier[1])
        self._rows[key] = self._end, len(value), what, row
        self._values.write(value)
        self._end += len(value)
        if self._end > max(_MEMORY, 2 * self.size):
            self._remove_replaced()

    def _remove_replaced(self) -> None:
        """Copy the values that are still needed, so that the file of a few keys with many rows stays small."""
        before, self._values, self._end = self._values, SpooledTemporaryFile(max_size=_MEMORY), 0  # noqa: SIM115
        with before:
            for key, (start, size, what, row) in self._rows.items():
                before.seek(start)
                self._values.write(before.read(size))
                self._rows[key] = self._end, size, what, row
                self._end += size

    def __iter__(self) -> Iterator[KeyWrite]:
        at = -1
        for key, (start, size, what, row) in self._rows.items():
            if start != at:
                self._values.seek(start)
            yield KeyWrite(key, self._values.read(size), what, row, self._partition)
            at = start + size

    def close(self) -> None:
        self._values.close()
