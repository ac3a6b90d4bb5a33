"""One partition, read in an executor: a sequence range as blocks of columns, proved complete."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final

import pyarrow as pa
from nats.js import JetStreamContext
from pyspark.sql.types import StructType

from jetstream_ext.client.context import Context
from jetstream_ext.client.direct_reader import read_blocks
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block
from jetstream_ext.protocol.gaps import first_gap
from jetstream_ext.protocol.headers import ROW_SUBJECT
from jetstream_ext.protocol.reads import Scan
from jetstream_ext.protocol.subjects import SubjectMatcher
from jetstream_ext.spark.arrow import BatchBuilder
from jetstream_ext.spark.connections import connections
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.spark.states import look, lose

# What Spark takes at a time: large enough for its cost per batch to vanish, small enough for limit() to stop early.
_ROWS: Final = 10_000
_BYTES: Final = 8 << 20


def read_range(options: ReadOptions, schema: StructType, part: SequenceRange) -> Iterator[pa.RecordBatch]:
    """Read a partition as record batches.

    Raises:
        DataLossError: Messages of the range expired after the read was planned.
        JetStreamExtError: The read failed; Spark tries the task again.
    """
    builder = BatchBuilder(schema)
    with connections().lend(options.connection, "jetstream-ext spark executor") as lease:
        context = lease.connection.context(options)
        for block in lease.iterate(_chunks(_rows(context, options, part), part)):
            yield builder.build(block)


async def _chunks(blocks: AsyncGenerator[Block, None], part: SequenceRange) -> AsyncGenerator[Block, None]:
    """Join blocks as they come from the socket into those that Spark takes."""
    matcher = SubjectMatcher(part.filters) if part.filters else None
    chunk, size = Block(part.stream), 0
    async for block in blocks:
        if matcher is not None:
            block.select(matcher.mask([row[ROW_SUBJECT] for row in block.rows]))
        chunk.extend(block)
        size += block.size
        if len(chunk) >= _ROWS or size >= _BYTES:
            yield chunk
            chunk, size = Block(part.stream), 0
    if len(chunk):
        yield chunk


async def _rows(context: JetStreamContext, options: ReadOptions, part: SequenceRange) -> AsyncGenerator[Block, None]:
    """Yield the messages of a range, and make sure at its end that none expired before it was read."""
    js = Context(context)
    timeout = options.connection.timeout
    plan = Scan(subject=part.subject, seq=part.first, up_to_seq=part.last, max_bytes=DEFAULT_MAX_BYTES)
    blocks = read_blocks(js, part.stream, plan, timeout, confirm=options.tail_check)
    expected, gap = part.first, 0
    async with aclosing(blocks):
        async for block in blocks:
            gap = gap or first_gap(block.seqs, expected, block.seqs[-1]) or 0
            expected = block.seqs[-1] + 1
            yield block
    if not gap and expected <= part.last:
        gap = expected
    # Elsewhere a gap is nothing special: a stream that has them already cannot tell which of them are new.
    suspicious = gap and not part.from_head and (gap == part.first or (part.gapless and part.subject is None))
    if not suspicious and not part.created:
        return
    state = await look(context, part.stream)
    if state is None or (part.created and state.created != part.created):
        lose(options, f"stream {part.stream!r} was deleted or created anew while it was read")
    elif suspicious and state.first_seq > gap:
        lose(
            options, f"sequences {gap} to {state.first_seq - 1} of stream {part.stream!r} expired before they were read"
        )
