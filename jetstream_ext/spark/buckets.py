"""What the reads of buckets share: the check of the bucket, and entries as record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from nats.js.errors import BadBucketError
from pyspark.sql.types import StructType

from jetstream_ext.kv import KeyValueEntry
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import key_text
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.spark.planning import PlanningError, state_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch

# Rows and bytes of a record batch. A single row may have more bytes.
_ROWS: Final = 10_000
_BATCH_BYTES: Final = 8 << 20


async def bucket_state(bucket: Bucket, *, direct: bool = True) -> StreamState:
    """Return the state of a bucket's stream; raise PlanningError if it does not exist, or as `check_bucket` does."""
    state = await state_of(bucket.js, bucket.stream)
    if state is None:
        raise PlanningError(
            f"bucket {bucket.name!r} does not exist; check 'bucket', 'servers', 'domain' and 'apiPrefix'"
        )
    check_bucket(bucket, state, direct=direct)
    return state


def check_bucket(bucket: Bucket, state: StreamState, *, direct: bool = True) -> None:
    """Raise PlanningError if a stream is no bucket, or, with `direct`, none that can be read."""
    try:
        bucket.check(state, direct=direct)
    except BadBucketError as error:
        raise PlanningError(f"option 'bucket': {error.description}") from error


def record_batches(schema: StructType, entries: Sequence[KeyValueEntry]) -> Iterator[RecordBatch]:
    """Yield entries as record batches with the columns of a schema."""
    for some in _cut_batches(entries):
        yield _batch(schema, some)


def _cut_batches(entries: Sequence[KeyValueEntry]) -> Iterator[Sequence[KeyValueEntry]]:
    start = size = 0
    for index, entry in enumerate(entries):
        size += len(entry.value)
        if index > start and (index - start >= _ROWS or size > _BATCH_BYTES):
            yield entries[start:index]
            start, size = index, len(entry.value)
    if start < len(entries):
        yield entries[start:]


def _batch(schema: StructType, entries: Sequence[KeyValueEntry]) -> RecordBatch:
    import pyarrow as pa

    types = {"value": pa.binary(), "revision": pa.int64(), "created": pa.timestamp("us", tz="UTC")}
    fields = [
        pa.field(field.name, types.get(field.name, pa.string()), nullable=field.nullable) for field in schema.fields
    ]
    columns = [pa.array(_column(entries, field.name), field.type) for field in fields]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _column(entries: Sequence[KeyValueEntry], name: str) -> list[object]:
    values = list(map(attrgetter(name), entries))
    if name == "key":
        text = "".join(values)
        if not text.isascii() or "\\" in text:
            # NATS accepts any bytes in a key; Spark's strings are UTF-8.
            return list(map(key_text, values))
    return values
