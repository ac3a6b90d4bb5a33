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
from jetstream_ext.protocol.loss import find_gaps
from jetstream_ext.protocol.reads import Scan
from jetstream_ext.protocol.subjects import SubjectMatcher
from jetstream_ext.spark.connection import connected
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, is_same, report_data_loss, report_lost, state_of
from jetstream_ext.spark.ranges import SequenceRange

# The size of a record batch: large enough to hide Spark's cost per batch, small enough for limit() to stop early.
_ROWS: Final = 10_000
_BYTES: Final = 8 << 20
_LATEST: Final = datetime.max.replace(tzinfo=UTC)
_SECONDS: Final = 1.0  # between two questions for the first sequence of the stream


def read_range(options: ReadOptions, schema: StructType, part: SequenceRange | None) -> Iterator[pa.RecordBatch]:
    """Read the range `part` as record batches; `part` is None if Spark reads an empty plan."""
    if not part:
        return
    columns = columns_of(schema)
    with connected(options.connection, "executor") as (lease, context):
        for block in lease.iterate(pieces_of(matching_messages(context, options, part), _ROWS, _BYTES)):
            yield columns.batch(block).rename_columns(schema.names)


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


class _Gaps:
    """The lowest gap of a range that is read in order of which it is not known yet whether it is a loss.

    A missing message leaves no trace of why it is gone. Deletes, limits per subject, rollups and TTLs remove single messages,
    which is no loss; `max_age`, `max_msgs`, `max_bytes` and purges remove everything up to some sequence and so move the first
    sequence of the stream. So a gap is a loss if the stream's first sequence has passed it *before it was read*. The first
    sequence never goes back: if it is still at or below a gap after the gap was read, the gap is no loss. The reader therefore
    asks for it soon after each gap, at most once a second, and rarely: a reader is usually far ahead of the first sequence.
    """

    def __init__(self, part: SequenceRange) -> None:
        self.lowest: range | None = None
        self.since: datetime | None = part.since
        """A time before which the first message of the gap was not stored."""
        self._last = part.last
        self._previous = part.first - 1
        self._time = part.since  # of the message before
        self._at_head = part.from_head  # what has expired while the first messages arrived counts as expired before

    def add(self, seqs: Sequence[int], time: datetime | None = None) -> None:
        """Take the next messages, of which the last one was stored at `time`, or the end of the range, one behind it."""
        if self.lowest is None and not self._at_head:
            self.lowest, self.since = next(find_gaps(self._previous, seqs, self._last), None), self._time
        self._previous, self._time, self._at_head = seqs[-1], time, False


async def _rows(context: JetStreamContext, options: ReadOptions, part: SequenceRange) -> AsyncGenerator[Block, None]:
    """Yield the messages of a range, and report data loss: messages that expired before they were read, or another stream.

    What is missing in the range of a snapshot is no loss: those keys had no value any more before the query read them.
    """
    js, clock = Context(context), asyncio.get_running_loop().time
    gaps, next_check = _Gaps(part), 0.0

    async def check() -> bool:
        """Report what was lost; return whether it is still the stream of the plan."""
        state = await same_stream(context, options, part)
        if state is not None and gaps.lowest is not None and not part.snapshot:
            await report_lost(context, options, state, gaps.lowest, part.seen, gaps.since)
        gaps.lowest = None
        return state is not None

    newest = part.seen.ends[0][1] if part.seen is not None and part.seen.ends else _LATEST
    timeout = options.connection.timeout
    async with aclosing(_blocks(js, part, timeout, confirm=options.tail_check)) as blocks:
        try:
            async for block in blocks:
                time = _time(block.message(-1))
                gaps.add(block.seqs, time)
                # What was stored after the range was planned may be of another stream.
                doubtful = time > newest or (gaps.lowest is not None and not part.snapshot and clock() >= next_check)
                if doubtful:
                    newest, next_check = max(time, newest), clock() + _SECONDS
                    if not await check():
                        return
                yield block
        except (DirectGetDisabledError, NotFoundError):
            if await same_stream(context, options, part) is not None:
                raise
            return
    gaps.add([part.last + 1])
    if gaps.lowest is not None or part.snapshot:
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
    if state is not None and (part.seen is None or await is_same(context, part.seen, state)):
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
    """Return what builds record batches with exactly the columns of a Spark schema, whose names may have any case.

    NATS accepts any bytes in a subject or a header, and Spark's strings are UTF-8.
    """
    names = {name.lower(): name for name in _TYPES}
    columns = [(names[field.name.lower()], field.nullable) for field in schema.fields]
    fields = [pa.field(name, _TYPES[name], nullable=nullable) for name, nullable in columns]
    return Columns(pa.schema(fields), replace=True)
