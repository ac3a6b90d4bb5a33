"""Streams and buckets as Arrow tables, and tables as streams, for Polars, DuckDB, pandas and any other user of Arrow.

Needs ``nats-jetstream-ext[arrow]``.
"""

try:
    import pyarrow as _pyarrow
except ImportError as _error:
    raise ImportError(
        "jetstream_ext.arrow needs pyarrow: pip install 'nats-jetstream-ext[arrow]'", name="pyarrow"
    ) from _error

from jetstream_ext.arrow.payloads import Payload
from jetstream_ext.arrow.reading import RecordBatches, RecordBatchReader, record_batches, to_arrow
from jetstream_ext.arrow.writing import from_arrow
from jetstream_ext.columns import BUCKET_SCHEMA, SCHEMA
from jetstream_ext.errors import ConversionError

del _pyarrow  # not a name of this package

__all__ = [
    "BUCKET_SCHEMA",
    "SCHEMA",
    "ConversionError",
    "Payload",
    "RecordBatchReader",
    "RecordBatches",
    "from_arrow",
    "record_batches",
    "to_arrow",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
