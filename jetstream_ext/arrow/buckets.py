"""The entries of a bucket as a table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import pyarrow as pa

from jetstream_ext.arrow.schemas import Array, Field, check_schema, first_bad, misfit

_FIELDS: Final[list[Field]] = [
    pa.field("bucket", pa.string(), nullable=False),
    pa.field("key", pa.string(), nullable=False),
    pa.field("value", pa.binary(), nullable=False),
    pa.field("revision", pa.uint64(), nullable=False),
    pa.field("created", pa.timestamp("us", tz="UTC"), nullable=False),
    pa.field("operation", pa.string(), nullable=False),
]
BUCKET_SCHEMA: Final = pa.schema(_FIELDS)
"""The columns of a bucket's entries. Keys that are not UTF-8 need ``binary`` in place of ``string``."""

# An entry is a `kv.KeyValueEntry`, which this layer does not know.
_BUILD: Final[dict[str, Callable[[Collection[Any]], Array]]] = {
    "bucket": lambda entries: pa.array([entry.bucket.encode() for entry in entries], pa.binary()),
    "key": lambda entries: pa.array([entry.key.encode("utf-8", "surrogateescape") for entry in entries], pa.binary()),
    "value": lambda entries: pa.array([entry.value for entry in entries], pa.binary()),
    "revision": lambda entries: pa.array([entry.revision for entry in entries], pa.uint64()),
    "created": lambda entries: pa.array([entry.created for entry in entries], pa.timestamp("us", tz="UTC")),
    "operation": lambda entries: pa.array([entry.operation.encode() for entry in entries], pa.binary()),
}


def entries_table(entries: Collection[Any], schema: pa.Schema | None) -> pa.Table:
    """Return key-value entries as a table; raise errors as `kv.KeyValueSnapshot.to_arrow` does."""
    schema = BUCKET_SCHEMA if schema is None else check_schema(schema, BUCKET_SCHEMA)

    def column(field: Field) -> Array:
        values = _BUILD[field.name](entries)
        try:
            return values.cast(field.type)
        except pa.ArrowInvalid:
            index, error = first_bad(lambda start, stop: values[start:stop].cast(field.type), len(values))
            entry = list(entries)[index]
            raise misfit(field, f"bucket {entry.bucket!r}: the entry of key {entry.key!r}", error) from error

    return pa.Table.from_arrays([column(field) for field in schema], schema=schema)
