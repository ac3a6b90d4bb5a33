"""Whether newer messages replaced what is missing at the beginning of a stream, or whether it was lost."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Final

from nats.js.api import Header

from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import read_blocks
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg, stored_block
from jetstream_ext.protocol.headers import decode_stored
from jetstream_ext.protocol.loss import only_a_rollup, were_replaced
from jetstream_ext.protocol.reads import Scan

# Messages and bytes that are looked through for a rollup, about.
_MOST_MESSAGES: Final = 4096
_MOST_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 1 << 20
# By then a server has removed what a rollup replaces.
_ROLLUP_TAKES: Final = timedelta(seconds=5)
_SHORTEST_TTL: Final = timedelta(seconds=1)


async def were_replaced_by_newer(
    context: Context, state: StreamState, before: StreamState | None, since: datetime | None, timeout: float
) -> bool:
    """As `protocol.loss.were_replaced`; if only a rollup can have replaced the messages, look for one.

    Each request waits up to `timeout` seconds.
    """
    if not were_replaced(state, before, since):
        return False
    if before is None or not only_a_rollup(state, before):
        return True
    return await _has_rollup(context, before, state, timeout)


async def _has_rollup(context: Context, before: StreamState, state: StreamState, timeout: float) -> bool:
    """Return whether a rollup may have been stored from `before` to `state`.

    One is there, or may have expired, or there are more messages than are looked through.
    """
    messages = size = 0
    last, stored = before.last_seq, before.now  # the next message has a higher sequence, and was stored later
    expires = any(it.config.get("allow_msg_ttl") for it in (before, state))

    def may_have_expired(seq: int) -> bool:
        # A mirror keeps the times of its origin, and can remove a message as soon as it has it.
        return expires and seq > last + 1 and (bool(before.origin) or state.now - stored >= _SHORTEST_TTL)

    def is_rollup(message: StoredMsg) -> bool:
        if message.seq == before.last_seq and not before.origin and before.now - message.time > _ROLLUP_TAKES:
            return False  # what it replaces had been removed before
        return Header.ROLLUP.value in decode_stored(stored_block(message))

    plan = Scan(seq=before.last_seq, max_bytes=_REQUEST_BYTES)
    async with contextlib.aclosing(read_blocks(context, state.name, plan, timeout, confirm=True)) as blocks:
        async for block in blocks:
            for row in block.messages():
                if is_rollup(row) or may_have_expired(min(row.seq, state.last_seq + 1)):
                    return True
                last, stored = row.seq, max(stored, row.time)
            messages, size = messages + len(block), size + block.size
            if messages > _MOST_MESSAGES or size > _MOST_BYTES:
                return True
    return may_have_expired(state.last_seq + 1)
