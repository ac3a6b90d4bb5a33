"""A range of a stream, whole: what the answer of a replica or mirror leaves open is asked of the stream's leader.

A replica of the stream itself has its messages in order and without holes of its own; it can only be behind, so its
end has to be proved. A mirror that answers direct gets under the stream's name (``mirror_direct``) can lack any message:
it has limits of its own, perhaps a filter, perhaps a start in the middle. Where another name answered, every gap
between two messages is proved, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from jetstream_ext.client.connection import JetStream
from jetstream_ext.client.leader import LAG_PAUSE, get_at_leader
from jetstream_ext.client.replies import read_blocks
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.direct import Block, Request
from jetstream_ext.protocol.plans import Scan
from jetstream_ext.types import StoredMsg

# Questions to the leader in flight; a mirror's answer can have thousands of gaps.
_AT_ONCE: Final = 64


async def read_whole(js: JetStream, stream: str, plan: Scan, timeout: float) -> AsyncGenerator[Block, None]:
    """Drive a range read with an end; prove its end, and the gaps in what others than the stream itself answer.

    What is found to be missing is asked for again, until a responder that has it answers.

    Args:
        js: The context.
        stream: The stream.
        plan: The range; `up_to_seq` must be set.
        timeout: Seconds without progress that responders may take to have a message that the leader has.

    Raises:
        RequestTimeoutError: None of them delivered it.
    """
    end = plan.up_to_seq
    assert end is not None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        before, hole, responder = plan.position, 0, stream
        # Closed here, not when it is collected: a read that is left early leaves no subscription.
        async with contextlib.aclosing(read_blocks(js, stream, plan, timeout)) as blocks:
            async for block in blocks:
                if block.stream != stream:
                    responder = block.stream
                    hole = await _first_hole(js, stream, plan.subject, before, block.seqs, timeout)
                    if hole:
                        block.keep(0, bisect_left(block.seqs, hole))
                        plan.position = hole - 1
                if len(block):
                    before = block.seqs[-1]
                    deadline = loop.time() + timeout
                    yield block
                if hole:
                    break
        if not hole:
            if plan.position >= end:
                return
            missing = await get_at_leader(js, stream, plan.rest().body(), timeout)
            if missing is None or missing.seq > end:
                return
            hole = missing.seq
        if loop.time() >= deadline:
            of_another = f" (a mirror answers: {responder!r})" if responder != stream else ""
            raise RequestTimeoutError(
                f"stream {stream!r}: the leader has sequence {hole}, but no replica or mirror that answers direct gets "
                f"delivered it within {timeout:g} s{of_another}"
            )
        await asyncio.sleep(LAG_PAUSE)
        plan.reopen()


async def _first_hole(
    js: JetStream, stream: str, subject: str | None, before: int, seqs: Sequence[int], timeout: float
) -> int:
    """Return the first message that the leader has and that is missing between `before` and the last of `seqs`, or 0."""
    gaps: list[tuple[int, int]] = []
    expected = before + 1
    for seq in seqs:
        if seq != expected:
            gaps.append((expected, seq))
        expected = seq + 1

    async def at_leader(start: int) -> StoredMsg | None:
        request = Request(seq=start, next_by_subj=subject or ">")
        return await get_at_leader(js, stream, request.body(), timeout)

    for first in range(0, len(gaps), _AT_ONCE):
        some = gaps[first : first + _AT_ONCE]
        try:
            async with asyncio.TaskGroup() as group:
                questions = [group.create_task(at_leader(start)) for start, _ in some]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for question, (_, stop) in zip(questions, some, strict=True):
            found = question.result()
            if found is not None and found.seq < stop:
                return found.seq
    return 0
