"""The change feed of a bucket: ``spark.readStream.format("jetstream_kv")``.

A bucket's stream is the log of its changes, so the feed is that stream, read by `streaming.Follower` in ranges of sequences,
as rows of keys. Every revision that is still stored when its range is read is one row. The plan of a micro-batch is in its
offset, so a replay has the same rows, without those that were replaced meanwhile.

**Snapshot.** With ``startingOffsets=snapshot``, S is the last revision when the query starts. The micro-batches up to S have
the newest value that each key had at S; those after S have every change. S is in the offsets until the snapshot is read, so
a restart keeps it. A key that is written again before its row is read may have no row in the snapshot: the history of the
bucket has removed that row, and the later change follows. What a task needs to know is in the log, so neither the driver nor
a partition holds a list of keys: with history 1, every message up to S is the newest of its key; otherwise the task asks for
the newest message of each key in a block, as the batch reads of `kv` do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from nats.js import JetStreamContext
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import StreamRecreatedError
from jetstream_ext.kv import KeyValueEntry
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import entry_of_record, records_of
from jetstream_ext.kv.present import ProvedReader
from jetstream_ext.spark.buckets import bucket_state, check_bucket, entries_of, newest_rows, record_batches
from jetstream_ext.spark.connection import connected, run_on_driver
from jetstream_ext.spark.options import FeedOptions
from jetstream_ext.spark.planning import state_of
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.spark.reading import matching_messages, same_stream
from jetstream_ext.spark.streaming import JetStreamStreamReader

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class JetStreamKvStreamReader(JetStreamStreamReader):
    """Follows a bucket."""

    def __init__(self, options: FeedOptions, schema: StructType) -> None:
        super().__init__(options.read, schema, snapshot=options.starting == "snapshot")
        self._feed = options
        self._checked = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        self._check()
        return super().initialOffset()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        self._check()
        return super().latestOffset(start, limit)

    def _check(self) -> None:
        """Check, once, that it is a bucket; what happens to it later is a matter of ``failOnDataLoss`` and ``onRecreate``."""
        if not self._checked:
            run_on_driver(self._feed.read.connection, lambda context: check_feed(context, self._feed))
            self._checked = True

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return read_changes(self._feed, self._schema, getattr(partition, "value", None))


async def check_feed(context: JetStreamContext, options: FeedOptions) -> None:
    """Raise PlanningError if the bucket cannot be read; without ``failOnDataLoss`` it may be missing."""
    bucket = Bucket(open_bucket(context, options.bucket))
    if options.read.fail_on_data_loss:
        await bucket_state(bucket)
    elif (state := await state_of(context, bucket.stream)) is not None:
        check_bucket(bucket, state)


def read_changes(options: FeedOptions, schema: StructType, part: SequenceRange | None) -> Iterator[RecordBatch]:
    """Read the range `part` as record batches; `part` is None if Spark reads an empty plan."""
    if not part:
        return
    with connected(options.read.connection, "executor") as (lease, context):
        bucket = Bucket(open_bucket(context, options.bucket))
        entries = _snapshot(bucket, options, part) if part.snapshot else _changes(bucket, options, part)
        for some in lease.iterate(entries):
            yield from record_batches(schema, some)


async def _changes(
    bucket: Bucket, options: FeedOptions, part: SequenceRange
) -> AsyncGenerator[list[KeyValueEntry], None]:
    """Yield every change in a range, a block at a time."""
    async with aclosing(matching_messages(bucket.js, options.read, part)) as blocks:
        async for block in blocks:
            yield [entry_of_record(bucket.name, bucket.key(name), record) for name, record in records_of(block)]


async def _snapshot(
    bucket: Bucket, options: FeedOptions, part: SequenceRange
) -> AsyncGenerator[list[KeyValueEntry], None]:
    """Yield the keys whose newest messages up to the revision of the snapshot are in a range, a block at a time."""
    state = await same_stream(bucket.js, options.read, part)
    if state is None:
        return
    source, blocks = ProvedReader(bucket, part.snapshot), matching_messages(bucket.js, options.read, part)
    try:
        async with aclosing(newest_rows(bucket, source, blocks, state, part, bucket.subjects())) as rows:
            async for some in rows:
                yield entries_of(bucket, some, deleted=options.include_deleted)
    except StreamRecreatedError:
        if await same_stream(bucket.js, options.read, part) is not None:
            raise
