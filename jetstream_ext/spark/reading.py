"""A partition of a stream, read in an executor: a sequence range, proved complete, as Arrow record batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from pyspark.sql.types import StructType

from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import read_blocks, skip_malformed
from jetstream_ext.client.merged_read import read_merged
from jetstream_ext.client.pieces import pieces_of
from jetstream_ext.columns import Columns
from jetstream_ext.errors import DirectGetDisabledError, ResponseError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, StoredMsg
from jetstream_ext.protocol.reads import Scan
from jetstream_ext.protocol.subjects import SubjectMatcher
from jetstream_ext.spark.connection import connected
from jetstream_ext.spark.loss import HeadWatch
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, is_same, known_of, report_data_loss, state_of, were_replaced
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.text import numbered, plural

# The size of a record batch: large enough to hide Spark's cost per batch, small enough for limit() to stop early.
_ROWS: Final = 10_000
_BYTES: Final = 8 << 20
_LATEST: Final = datetime.max.replace(tzinfo=UTC)


def read_range(options: ReadOptions, schema: StructType, part: SequenceRange | None) -> Iterator[pa.RecordBatch]:
    """Read the range `part` as record batches; `part` is None if Spark reads an empty plan."""
    if not part:
        return
    columns = columns_of(schema)
    with connected(options.connection, "executor") as (lease, context):
        for block in lease.iterate(pieces_of(matching_messages(context, options, part), _ROWS, _BYTES)):
            yield columns.batch(block)


def matching_messages(
    context: JetStreamContext, options: ReadOptions, part: SequenceRange
) -> AsyncGenerator[Block, None]:
    """Yield the messages of a range that match its filters; raise DataLossError as the options say."""
    rows = _rows(context, options, part)
    if options.skip_bad:
        rows = skip_malformed(rows)
    if part.filters and not part.on_server:
        rows = _filtered(rows, part.filters)
    return rows


async def _filtered(blocks: AsyncGenerator[Block, None], filters: Sequence[str]) -> AsyncGenerator[Block, None]:
    matcher = SubjectMatcher(filters)
    async with aclosing(blocks):
        async for block in blocks:
            block.select(matcher.mask(block.subjects))
            yield block


async def _rows(context: JetStreamContext, options: ReadOptions, part: SequenceRange) -> AsyncGenerator[Block, None]:
    """Yield the messages of a range, and report data loss: messages that expired before they were read, or another stream.

    What is missing in the range of a snapshot is no loss: those keys had no value any more before the query read them.
    """
    js, loop = Context(context), asyncio.get_running_loop()
    timeout = options.connection.timeout
    watch = HeadWatch(part.first, part.last, from_head=part.from_head, now=loop.time())
    since = time = part.since  # a time before which no message of the lowest gap in doubt was stored

    async def check() -> bool:
        """Report what was lost; return whether it is still the stream of the plan."""
        state = await same_stream(context, options, part)
        if state is None:
            return False
        lost = None if part.snapshot else watch.answered(state.first_seq, loop.time())
        if lost and not await were_replaced(context, state, known_of(part, state), since):
            what = f"{numbered(lost.start, lost.stop - 1, 'sequence')} of stream {part.stream!r}"
            report_data_loss(options, f"{what} expired before {plural(len(lost), 'it was', 'they were')} read")
        return True

    newest = part.ends[0][1] if part.ends else None
    async with aclosing(_blocks(js, part, timeout, confirm=options.tail_check)) as blocks:
        try:
            async for block in blocks:
                if not watch.in_doubt:
                    since = time
                doubtful = watch.add(block.seqs, loop.time()) and not part.snapshot
                time = _time(block.message(-1))
                if newest is not None and time > newest:
                    # It was stored after the range was planned, so it may be of another stream.
                    doubtful, newest = True, time
                if doubtful and not await check():
                    return
                yield block
        except (DirectGetDisabledError, NotFoundError):
            if await same_stream(context, options, part) is not None:
                raise
            return
    if not watch.in_doubt:
        since = time
    if watch.close() or part.snapshot:
        await check()


def _blocks(js: Context, part: SequenceRange, timeout: float, *, confirm: bool) -> AsyncGenerator[Block, None]:
    if part.on_server:
        ends, size = (part.first, part.last), DEFAULT_MAX_BYTES
        return read_merged(js, part.stream, part.filters, *ends, timeout, confirm=confirm, max_bytes=size)
    plan = Scan(seq=part.first, up_to_seq=part.last, max_bytes=DEFAULT_MAX_BYTES)
    return read_blocks(js, part.stream, plan, timeout, confirm=confirm)


def _time(message: StoredMsg) -> datetime:
    try:
        return message.time
    except ResponseError:  # `onBad` decides about it
        return _LATEST


async def same_stream(context: JetStreamContext, options: ReadOptions, part: SequenceRange) -> StreamState | None:
    """Return the state of the stream; None once it is reported that it is no longer the one of the plan."""
    state = await state_of(context, part.stream)
    if state is not None and (not part.created or await is_same(context, part, state)):
        return state
    what = f"stream {part.stream!r} was deleted or re-created while it was read"
    if state is not None and options.on_recreate == "fail":
        raise DataLossError(what)
    report_data_loss(options, what)
    return None


# -- Arrow --------------------------------------------------------------------------------------------------------

_TYPES: Final = {
    "stream": pa.string(),
    "seq": pa.int64(),
    "subject": pa.string(),
    "time": pa.timestamp("us", tz="UTC"),
    "data": pa.binary(),
    "headers": pa.map_(pa.string(), pa.list_(pa.string())),
    "timeNanos": pa.int64(),
}


def columns_of(schema: StructType) -> Columns:
    """Return what builds record batches with exactly the columns of a Spark schema.

    NATS accepts any bytes in a subject or a header, and Spark's strings are UTF-8.
    """
    fields = [pa.field(field.name, _TYPES[field.name], nullable=field.nullable) for field in schema.fields]
    return Columns(pa.schema(fields), replace=True)
