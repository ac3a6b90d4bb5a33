"""The requests of a reader: where a start is, and groups of messages, proved by the stream's leader or not."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from functools import partial
from typing import Final

from jetstream_ext.client.api import bisect_time, first_since, gather_bounded, get_at_leader, newest_up_to
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import MessageBatch, link_of, read_blocks, read_one
from jetstream_ext.client.looks import Look
from jetstream_ext.errors import MessageNotFoundError, RequestTimeoutError
from jetstream_ext.log.observed import observed_receiving
from jetstream_ext.log.offsets import First, Last, Seq, Start, StoredOffset, Time
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Request, StoredMsg
from jetstream_ext.protocol.feature_table import START_TIME_LEVEL
from jetstream_ext.protocol.numbers import LARGEST
from jetstream_ext.protocol.reads import MultiLast, OneReply, Scan
from jetstream_ext.protocol.subjects import can_be_asked_for

# Messages and bytes of a group, about. A group costs two requests, which should be few compared with its messages.
_GROUP: Final = 4096
_GROUP_BYTES: Final = 4 << 20
_REQUEST_BYTES: Final = 1 << 20
# So few messages are read one by one from the leader: one round trip, and no replica or mirror has to catch up. The answers
# have a third more bytes, and together they must not be too much for the connection.
_FEW: Final = 8
_FEW_BYTES: Final = 16 << 20
# The most sequences of a group: a filter can leave few messages among many sequences.
_WIDEST: Final = 1 << 40


class Fetcher:
    """Sends the requests of a reader of the messages that match a filter (None: all).

    An observer is told the name `consumer`.
    """

    def __init__(self, context: Context, stream: str, subject: str | None, timeout: float) -> None:
        self._context = context
        self._stream = stream
        self._filter = subject or ">"
        self._all = subject in (None, ">")
        self._timeout = timeout
        self.most: int = _GROUP
        """How many messages a group has, about."""
        self._span = _GROUP  # how many sequences the next group has

    async def _find_at_leader(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._context, self._stream, request.body(), self._timeout)

    async def _find(self, request: Request) -> StoredMsg | None:
        try:
            return await read_one(self._context, self._stream, request, self._timeout)
        except MessageNotFoundError:
            return None

    async def find(self, start: Start | StoredOffset, state: StreamState) -> int:
        """Return the sequence of a start, as the stream's leader says; `state` is from just before the call."""
        if isinstance(start, Seq | StoredOffset):
            return start.seq
        if isinstance(start, First):
            return state.first_seq
        if isinstance(start, Time):
            return await first_since(self._context, state, start.when, self._timeout, subject=self._filter)
        found: StoredMsg | None = None
        if isinstance(start, Last):
            found = await self._find_at_leader(Request(last_by_subj=self._filter))
            if found is None and self._all:  # for ``>``, servers look only at the last sequence
                found = await newest_up_to(self._find_at_leader, state.last_seq, state.first_seq)
        return state.last_seq + 1 if found is None else found.seq

    async def find_unproved(self, start: Start | StoredOffset) -> int:
        """Return the sequence of a start, as the responders have it; they may lag, and each request may reach another one.

        Raises RequestTimeoutError if they differ too much, and as direct gets do.
        """
        if isinstance(start, Seq | StoredOffset):
            return start.seq
        oldest = None if isinstance(start, First) else await self._find(Request(seq=1, next_by_subj=">"))
        if oldest is None:
            return 1
        disagree = RequestTimeoutError(f"stream {self._stream!r}: the responders to direct gets differ; try again")
        # The oldest message names a subject, whose last message shows how far the responder is.
        if can_be_asked_for(oldest.subject):
            plan = MultiLast(Request(multi_last=(oldest.subject,), max_bytes=DEFAULT_MAX_BYTES))
            await MessageBatch(plan, read_blocks(self._context, self._stream, plan, self._timeout)).to_list()
            last = plan.point
        else:
            newest = await newest_up_to(self._find, LARGEST, oldest.seq)
            last = None if newest is None else newest.seq
        if last is None:
            raise disagree  # this responder lacks the subject
        if not isinstance(start, Last | Time):
            return last + 1
        newest = await newest_up_to(self._find, last, oldest.seq, subject=self._filter)
        if newest is None:
            return last + 1
        if isinstance(start, Last):
            return newest.seq
        if newest.time < start.when:
            return newest.seq + 1
        if (self._context.connection.api_level or 0) >= START_TIME_LEVEL:
            found = await self._find(Request(start_time=start.when, next_by_subj=self._filter))
            seq = last + 1 if found is None else found.seq
        else:

            def next_from(seq: int) -> Awaitable[StoredMsg | None]:
                return self._find(Request(seq=seq, next_by_subj=self._filter))

            seq = await bisect_time(next_from, oldest.seq, last + 1, start.when)
        if seq > last:
            raise disagree
        return seq

    async def fetch(
        self, first: int, position: int, last: int, *, look: Look | None, consumer: str | None
    ) -> tuple[list[StoredMsg], int]:
        """Return a group of messages from the sequence `first` on, and the sequence where it ends.

        From a position on, which is not below `first`, the group is complete. The stream has messages up to the sequence
        `last`; with what a `look` has just shown, they are read from its leader if they are few.
        """
        count = last - position + 1
        if look is not None and count <= _FEW and self.may_ask_for(count):
            rows = await self._fetch_at_leader(look, [first, *range(max(position, first + 1), last + 1)], consumer)
            if not any("\ufffd" in row.subject for row in rows):  # the leader cannot show such a subject
                return rows, last
        most, end = min(self.most, _GROUP), min(last, position + self._span - 1)
        plan = Scan(subject=None if self._all else self._filter, seq=first, up_to_seq=end, max_bytes=_REQUEST_BYTES)
        reading = read_blocks(self._context, self._stream, plan, self._timeout, confirm=True, consumer=consumer)
        rows, size = [], 0
        async with contextlib.aclosing(reading) as blocks:
            async for block in blocks:
                rows += block.messages()
                size += block.size
                if rows[-1].seq >= position and (size >= _GROUP_BYTES or len(rows) >= 2 * most):
                    end = rows[-1].seq
                    self._span = end - position + 1
                    return rows, end
        if 2 * len(rows) < most and 2 * size < _GROUP_BYTES:
            self._span = min(self._span * 4, _WIDEST)
        return rows, end

    def may_ask_for(self, count: int) -> bool:
        """Whether the connection carries the answers if so many messages are asked for at the same time."""
        return count * self._context.connection.max_payload <= _FEW_BYTES

    async def _fetch_at_leader(self, look: Look, seqs: list[int], consumer: str | None) -> list[StoredMsg]:
        """Return the first message that matches from each of these sequences on, up to the last one."""
        with observed_receiving(self._context.connection, self._stream, consumer) as count:
            find = partial(look.message, timeout=self._timeout)
            found = await gather_bounded(find, seqs, limit=len(seqs))
            count(len(found) - found.count(None))
        by_seq = {message.seq: message for message in found if message is not None and message.seq <= seqs[-1]}
        return [by_seq[seq] for seq in sorted(by_seq)]

    async def fetch_unproved(
        self, position: int, *, consumer: str | None, count: int | None = None
    ) -> tuple[list[StoredMsg], int]:
        """Return some messages as one responder has them, up to `count`, and how many it has after those.

        One request at a time: only the rows show how far the responder is.
        """
        size = min(_REQUEST_BYTES, link_of(self._context.connection).room(1))
        request = Request(seq=position, next_by_subj=self._filter, batch=count or _GROUP, max_bytes=size)
        plan = OneReply(request)
        batch = MessageBatch(plan, read_blocks(self._context, self._stream, plan, self._timeout, consumer=consumer))
        return await batch.to_list(), batch.num_pending or 0
