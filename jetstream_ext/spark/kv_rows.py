"""Rows that Spark passes to the `jetstream_kv` sink: the columns, the checks, and the last row of each key.

A micro-batch stores one message for each of its keys. A task therefore has to see its whole partition before it knows what
to store. The values are in memory up to some size, and then in a temporary file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, repeat
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from nats.js.errors import InvalidKeyError
from pyspark.sql.types import StructType

from jetstream_ext.kv.commit import Staged
from jetstream_ext.kv.entries import Operation, check_key, check_keys
from jetstream_ext.spark.bad_rows import BadRow, BadRows
from jetstream_ext.spark.options import KvWriteOptions, OptionError
from jetstream_ext.spark.rows import RowSizes, find_columns, payloads, values
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
_MEMORY: Final = 64 << 20  # bytes of values
_LONGEST_KEY: Final = 3800  # a server closes the connection after a line of more than 4096 bytes


class KeyWrite(NamedTuple):
    """What a micro-batch does to a key, and the row that says so."""

    key: str
    value: bytes
    what: Staged  # without the value
    row: int  # the index in its partition
    partition: int

    def message(self, prefix: str) -> Entry:
        if self.what is _PUT or self.what == _PUT:
            return prefix + self.key, self.value  # a batch takes most time for messages with options
        return replace(self.what, value=self.value).message(prefix + self.key)


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
        self, columns: KvColumns, options: KvWriteOptions, plain: RowSizes, with_options: RowSizes, bad: BadRows
    ) -> None:
        self._columns = columns
        self._options = options
        self._bad = bad
        self._plain = plain  # the limits for values without a TTL and an expected revision
        self._with_options = with_options
        self._row = 0

    def read(self, batch: RecordBatch) -> Iterable[_Row]:
        def column(index: int | None) -> list[Any] | None:
            found: Any = None if index is None else batch.column(index)
            return None if found is None or found.null_count == batch.num_rows else values(found)

        columns, begin = self._columns, self._row
        self._row += batch.num_rows
        keys = values(batch.column(columns.key))
        given = [b""] * len(keys) if columns.value is None else payloads(batch.column(columns.value))
        what = column(columns.operation), column(columns.ttl), column(columns.expected)
        if not any(what) and self._options.ttl is None and max(map(len, given), default=0) <= self._plain.of_data:
            with suppress(InvalidKeyError, TypeError):  # `_checked` finds out which row it is
                if max(map(len, check_keys(keys)), default=0) <= _LONGEST_KEY:
                    return zip(keys, given, repeat(_PUT), count(begin), strict=False)
        return self._checked(zip(count(begin), keys, given, *(one or repeat(None) for one in what), strict=False))

    def _checked(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[_Row]:
        for row, key, value, *what in rows:
            try:
                staged = self._staged(key, value, *what)
            except (ValueError, InvalidKeyError) as error:
                reason = error.description if isinstance(error, InvalidKeyError) else str(error)
                self._bad.add(BadRow(row, reason or str(error), key, value))
            else:
                yield key, value, staged, row

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
            try:
                lives = parse_ttl(ttl)
            except ValueError as error:
                raise ValueError(f"its ttl is invalid: {error}") from None
            if operation == "DEL":
                raise ValueError("its operation is DEL, which has no TTL; set ttl to null, or use PURGE")
        elif operation == "PUT":
            lives = self._options.ttl
        plain = operation == "PUT" and lives is None and expected is None
        sizes = self._plain if plain else self._with_options
        if len(value) > sizes.of_data and (problem := sizes.problem(value, None)):
            raise ValueError(problem)
        return _PUT if plain else Staged(cast("Operation", operation), b"", lives, expected, creates=expected == 0)


class LastRows:
    """The last row of each key of a partition, in the order of these rows."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._rows: dict[str, tuple[bytes | range, Staged, int]] = {}  # the value, or where it is in the file
        self._file: IO[bytes] | None = None
        self._in_memory = 0  # bytes of values
        self.size: int = 0  # the bytes of the keys and their values

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[_Row]) -> None:
        """Take the next rows of the partition."""
        taken, size, in_memory = self._rows, self.size, self._in_memory
        for key, value, what, row in rows:
            earlier = taken.pop(key, None)
            taken[key] = value, what, row
            size += len(value)
            in_memory += len(value)
            if earlier is None:
                size += len(key)
            else:
                size -= len(earlier[0])
                in_memory -= len(earlier[0]) if isinstance(earlier[0], bytes) else 0
            if in_memory > _MEMORY:
                self._move_to_file()
                in_memory = 0
        self.size, self._in_memory = size, in_memory

    def _move_to_file(self) -> None:
        self._file = self._file or TemporaryFile()  # noqa: SIM115 - `close` closes it
        end = self._file.seek(0, 2)
        for key, (value, what, row) in self._rows.items():
            if isinstance(value, bytes):
                self._file.write(value)
                self._rows[key] = range(end, end + len(value)), what, row
                end += len(value)

    def __iter__(self) -> Iterator[KeyWrite]:
        for key, (value, what, row) in self._rows.items():
            if isinstance(value, range):
                assert self._file is not None
                self._file.seek(value.start)
                value = self._file.read(len(value))
            yield KeyWrite(key, value, what, row, self._partition)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
