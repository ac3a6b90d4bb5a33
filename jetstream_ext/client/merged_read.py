"""A read of several subject filters: one filtered read for each, merged in the order of the sequences."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import read_blocks
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block
from jetstream_ext.protocol.merge import FilteredRead, Merge, widest
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
    """Yield the messages with the sequences `first` to `last` that match one of `filters`, in order and each once.
    """
    merge = Merge(filters, first, max_bytes)
    readings: dict[FilteredRead, tuple[Scan, AsyncGenerator[Block, None]]] = {}

    async def go_on(read: FilteredRead) -> None:
        if read not in readings:
            plan = Scan(
                subject=read.subject, seq=read.next_seq, up_to_seq=last, max_bytes=max_bytes, group=merge.group
            )
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
