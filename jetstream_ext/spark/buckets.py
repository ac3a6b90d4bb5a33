"""What the reads of buckets share: the check of the bucket, the newest rows of its keys, and entries as record batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from nats.js.errors import BadBucketError
from pyspark.sql.types import StructType

from jetstream_ext.kv import KeyValueEntry
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import Subjects, entry_of_record, key_text, records_of
from jetstream_ext.kv.present import ProvedReader, last_records
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.subjects import can_be_asked_for
from jetstream_ext.protocol.updates import Record
from jetstream_ext.spark.planning import PlanningError, state_of
from jetstream_ext.spark.ranges import SequenceRange

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


async def newest_rows(
    bucket: Bucket,
    source: ProvedReader,
    blocks: AsyncGenerator[Block, None],
    state: StreamState,
    part: SequenceRange,
    subjects: Subjects,
) -> AsyncGenerator[dict[str, Record], None]:
    """Yield, for each of the `blocks` of a range, the messages that are the newest of their keys up to its snapshot.

    Keys that no request can name come last.
    """
    # With history 1, every message is the newest of its key; but a replica that lags still has older ones.
    every_message_decides = state.max_msgs_per_subject == 1 and not state.replicated
    unnamed: dict[str, Record] = {}
    async with aclosing(blocks):
        async for block in blocks:
            rows: dict[str, Record] = {}
            for name, record in records_of(block):
                if (key := subjects.key_of(name)) is not None:
                    rows.pop(key, None)  # in the order of the revisions
                    rows[key] = record
            if not every_message_decides:
                named = list(filter(can_be_asked_for, rows))
                unnamed |= {key: record for key, record in rows.items() if not can_be_asked_for(key)}
                newest = await records_up_to(bucket, source, named, part.snapshot)
                rows = {key: rows[key] for key in named if key in newest and newest[key][0] == rows[key][0]}
            yield rows
    if unnamed:
        async for block in source.log(part.last + 1, part.snapshot):
            for name, _ in records_of(block):
                unnamed.pop(bucket.key(name), None)
        yield unnamed


async def records_up_to(bucket: Bucket, source: ProvedReader, keys: Sequence[str], revision: int) -> dict[str, Record]:
    """Return the newest message up to a revision of each of `keys` that has one."""
    newest = await last_records(bucket, source, keys)
    found = {key: record for key, record in newest.items() if record[0] <= revision}
    later = [key for key in newest if key not in found]
    return found | await last_records(bucket, source, later, up_to=revision)


def entries_of(bucket: Bucket, records: dict[str, Record], *, deleted: bool) -> list[KeyValueEntry]:
    """Return records as entries, those of deleted keys only with `deleted`."""
    entries = [entry_of_record(bucket.name, key, record) for key, record in records.items()]
    return [entry for entry in entries if deleted or entry.operation == "PUT"]


def record_batches(schema: StructType, entries: Sequence[KeyValueEntry]) -> Iterator[RecordBatch]:
    """Yield entries as record batches with the columns of a schema."""
    start = size = 0
    for index, entry in enumerate(entries):
        size += len(entry.value)
        if index > start and (index - start >= _ROWS or size > _BATCH_BYTES):
            yield _batch(schema, entries[start:index])
            start, size = index, len(entry.value)
    if start < len(entries):
        yield _batch(schema, entries[start:])


def _batch(schema: StructType, entries: Sequence[KeyValueEntry]) -> RecordBatch:
    import pyarrow as pa

    from jetstream_ext.columns import BUCKET_SCHEMA, entry_column

    columns, fields = [], []
    for field in schema.fields:
        name = field.name.lower()
        kind = pa.int64() if name == "revision" else BUCKET_SCHEMA.field(name).type
        values = entry_column(name, entries)
        if name == "key" and any(not entry.key.isascii() or "\\" in entry.key for entry in entries):
            # NATS accepts any bytes in a key; Spark's strings are UTF-8.
            values = pa.array([key_text(entry.key) for entry in entries], kind)
        columns.append(values.cast(kind))
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
