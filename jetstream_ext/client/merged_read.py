"""A read of several subject filters: one filtered read for each, merged in the order of the sequences."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import read_blocks
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block
from jetstream_ext.protocol.merge import FilteredRead, Merge
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT, Scan


async def read_merged(
    context: Context,
    stream: str,
    filters: Sequence[str],
    first: int,
    last: int,
    timeout: float,
    *,
    confirm: bool,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> AsyncGenerator[Block, None]:
    """Yield the messages with the sequences `first` to `last` that match one of `filters`, in order and each of them once.

    There is one filtered read for each filter, so that the server sends nothing else. `merge.filtering_pays` says when that
    costs less than to read everything. Each message counts what follows it (`StoredMsg.num_pending`) in its filter's read.

    Args:
        context: The context.
        stream: The stream's name.
        filters: At least one subject or filter; they may overlap.
        first: The first sequence, inclusive.
        last: The last sequence, inclusive.
        timeout: Seconds, as for `read_blocks`. A read does not time out while the server answers the others.
        confirm: As for `read_blocks`: the leader proves the range of each filter. Otherwise a block is of one responder.
        max_bytes: Bytes of all requests in flight together, plus one message each; at most `MAX_IN_FLIGHT` of them wait for
            their first message. About twice as many bytes are held, whatever the number of filters.

    Raises:
        ValueError: No filters.
        BadSubjectError: A filter is not valid.
        JetStreamExtError, nats.errors.Error: As for `read_blocks`. The messages before the error are valid.
    """
    merge = Merge(filters, first, max_bytes)
    readings: dict[FilteredRead, tuple[Scan, AsyncGenerator[Block, None]]] = {}

    async def go_on(read: FilteredRead) -> None:
        if read not in readings:
            plan = Scan(subject=read.subject, seq=read.next_seq, up_to_seq=last, max_bytes=max_bytes, group=merge.group)
            readings[read] = plan, read_blocks(context, stream, plan, timeout, confirm=confirm)
        plan, blocks = readings[read]
        while (block := await anext(blocks, None)) is not None:
            merge.add(read, block)
            if not plan.done:
                return
        merge.end(read)

    try:
        while merge.reads:
            await gather_bounded(go_on, merge.needed(), limit=MAX_IN_FLIGHT)
            for read in merge.forget():
                await readings.pop(read)[1].aclose()
            for block in merge.take():
                yield block
    finally:
        for _, blocks in readings.values():
            await blocks.aclose()
