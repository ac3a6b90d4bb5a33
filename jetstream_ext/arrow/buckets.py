"""The entries of a bucket as a table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

from jetstream_ext.arrow.schemas import Array, Field, check_schema, first_bad, misfit
from jetstream_ext.columns import BUCKET_SCHEMA, entry_column


def entries_table(entries: Collection[Any], schema: pa.Schema | None) -> pa.Table:
    """Return key-value entries as a table; raise errors as `kv.KeyValueSnapshot.to_arrow` does."""
    schema = BUCKET_SCHEMA if schema is None else check_schema(schema, BUCKET_SCHEMA)

    def column(field: Field) -> Array:
        values: Array = entry_column(field.name, entries)
        try:
            return values.cast(field.type)
        except pa.ArrowInvalid:
            index, error = first_bad(lambda start, stop: values[start:stop].cast(field.type), len(values))
            entry = list(entries)[index]
            raise misfit(field, f"bucket {entry.bucket!r}: the entry of key {entry.key!r}", error) from error

    return pa.Table.from_arrays([column(field) for field in schema], schema=schema)
