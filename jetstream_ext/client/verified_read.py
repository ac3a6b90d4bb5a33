"""A range of a stream, whole: what the answer of a replica or mirror leaves open is asked of the stream's leader.

A replica of the stream itself has its messages in order and without holes of its own; it can only be behind, so its
end has to be proved. A mirror that answers direct gets under the stream's name (``mirror_direct``) can lack any message:
it has limits of its own, perhaps a filter, perhaps a start in the middle. Where another name answered, every gap
between two messages is proved, too. That is one question for each gap, so an answer of another name with many gaps is
not proved but thrown away and asked for again, as long as the stream itself answers now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Final

from jetstream_ext.client.api import LAG_PAUSE, get_at_leader, stream_state, wait_for_sequence
from jetstream_ext.client.context import Context
from jetstream_ext.client.replies import read_blocks
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.direct import Block, Request
from jetstream_ext.protocol.scan import Scan
from jetstream_ext.types import StoredMsg

# Questions to the leader in flight. More gaps than these at once take longer to prove than to ask for the rows again.
_AT_ONCE: Final = 64

# Answers in a row that are thrown away: where only a mirror is near, nobody else ever answers.
_THROWN_AWAY: Final = 8


async def read_verified(
    js: Context, stream: str, plan: Scan, timeout: float, *, confirm: bool, min_seq: int | None
) -> AsyncGenerator[Block, None]:
    """Drive a range read and prove it, as far as is asked for.

    Args:
        js: The context.
        stream: The stream.
        plan: The range; with `confirm` and without an end it gets the one that the leader has now.
        timeout: As for `read_whole`, and the seconds until the leader must have `min_seq`.
        confirm: Prove the whole range.
        min_seq: Prove it up to this sequence, at least.

    Raises:
        RequestTimeoutError: The leader does not reach `min_seq`, or no responder has what it has.
    """
    if min_seq is not None:
        await wait_for_sequence(js, stream, min_seq, timeout)
    if confirm and plan.up_to_seq is None:
        plan.up_to_seq = (await stream_state(js, stream, timeout)).last_seq
    async with contextlib.aclosing(read_whole(js, stream, plan, timeout, to=None if confirm else min_seq)) as blocks:
        async for block in blocks:
            yield block


async def read_whole(
    js: Context, stream: str, plan: Scan, timeout: float, *, to: int | None = None
) -> AsyncGenerator[Block, None]:
    """Drive a range read; prove its end, and the gaps in what others than the stream itself answer.

    What is found to be missing is asked for again, until a responder that has it answers.

    Args:
        js: The context.
        stream: The stream.
        plan: The range; it must have `up_to_seq`, or `to` must be given.
        timeout: Seconds without progress that responders may take to have a message that the leader has.
        to: Prove it only up to this sequence.

    Raises:
        RequestTimeoutError: None of them delivered it.
    """
    ends = [end for end in (plan.up_to_seq, to) if end is not None]
    end = min(ends)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    thrown_away = 0
    while True:
        begun, since = plan.position, plan.start_time
        before, hole, responder, again = begun, 0, stream, False
        # Closed here, not when it is collected: a read that is left early leaves no subscription.
        async with contextlib.aclosing(read_blocks(js, stream, plan, timeout)) as blocks:
            async for block in blocks:
                if block.stream == stream:
                    thrown_away = 0
                elif gaps := _gaps(before, block.seqs, end):
                    responder = block.stream
                    if again := len(gaps) > _AT_ONCE and thrown_away < _THROWN_AWAY:
                        thrown_away += 1
                        hole = gaps[0][1]
                    else:
                        hole = await _first_hole(js, stream, plan.subject, since, gaps, timeout)
                    if hole:
                        block.keep(0, bisect_left(block.seqs, hole))
                        plan.position = block.seqs[-1] if len(block) else before
                        plan.start_time = since if plan.position == begun else None
                if len(block):
                    before = block.seqs[-1]
                    yield block
                    deadline = loop.time() + timeout
                if hole:
                    break
        if not again:
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
                    f"stream {stream!r}: the leader has sequence {hole}, but no replica or mirror that answers direct "
                    f"gets delivered it within {timeout:g} s{of_another}"
                )
            await asyncio.sleep(LAG_PAUSE)
        plan.reopen()


def _gaps(before: int, seqs: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Return the gaps among `seqs`, and in front of them behind `before`: where each begins and what follows it."""
    if seqs[-1] - before == len(seqs):
        return []
    gaps: list[tuple[int, int]] = []
    expected = before + 1
    for seq in seqs:
        if expected > end:
            break
        if seq != expected:
            gaps.append((expected, seq))
        expected = seq + 1
    return gaps


async def _first_hole(
    js: Context,
    stream: str,
    subject: str | None,
    since: datetime | None,
    gaps: Sequence[tuple[int, int]],
    timeout: float,
) -> int:
    """Return the first message that the leader has and that is missing in one of `gaps`, or 0.

    A read that starts by time has its first gap in front of its first row, and what counts there is the time.
    """

    async def at_leader(start: int) -> StoredMsg | None:
        if since is not None and start == 1:
            request = Request(start_time=since, next_by_subj=subject)
        else:
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
