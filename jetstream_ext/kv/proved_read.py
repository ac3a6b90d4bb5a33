"""Reads of what the stream of a bucket has, by replicas that show it; `RangeRead` proves them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jetstream_ext.client.api import gather_bounded, get_at_leader, newest_up_to, stream_state
from jetstream_ext.client.direct_reader import link_of, read_blocks
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, EndOfBatch, Request, StoredMsg, stored_block
from jetstream_ext.protocol.headers import BATCH_ID, decode_stored, is_inside_batch
from jetstream_ext.protocol.reads import MultiLast, OneReply, Plan, Scan
from jetstream_ext.text import counted

MAX_LEADER_REQUESTS: Final = 64
"""Requests to the leader at once."""
_CATCH_UP_BATCH: Final = 16_000
# So few messages are read one by one: the server counts what follows a batch, which takes it milliseconds in large streams.
_FEW: Final = 8
_NO_LIMIT: Final = 1 << 31
_FIRST_PAUSE: Final = 0.001
_LONGEST_COMMIT: Final = 0.3  # after so many seconds, the rest of an atomic batch is taken for removed
# A read catches up with the writers only if it is faster than they are, by so much that it will end.
_SLOWER: Final = 0.9


def _batch_id(message: StoredMsg) -> str | None:
    return decode_stored(stored_block(message)).get(BATCH_ID)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive messages of the log; there may be none."""

    found: Block | list[StoredMsg]
    exact: bool = False
    """No reply has passed the last message, and it is the last one."""
    whole: bool = True
    """The last message is not inside an atomic batch, as far as its headers say."""

    def __len__(self) -> int:
        return len(self.found)

    @property
    def last(self) -> StoredMsg:
        return self.found[-1] if isinstance(self.found, list) else self.found.message(-1)


class ProvedReader:
    """The proved reads of one call; see `DirectGet.scan` for their errors.

    A responder must have the sequence `need`: the leader's last one when the read began, or the reader's own write.
    """

    def __init__(self, source: KeyedStream, need: int) -> None:
        self._source = source
        self._context = source.context
        self._stream = source.stream
        self._timeout = source.timeout
        self._need = need
        self.end: StreamState = StreamState(source.stream, "", {})
        """What the leader said when `follow` or `catch_up` asked it last."""

    async def last_of(
        self, subjects: Sequence[str], *, up_to: int | None = None, in_flight: int | None = 1, proved: bool = True
    ) -> tuple[Block, EndOfBatch]:
        """Return the last message of every subject that matches one of `subjects`, all of one moment.

        With `up_to`, it is the moment when the stream reached this sequence. Otherwise the answer is no longer than the
        connection carries with so many `in_flight` (None: no limit), and its end counts the rest. Without `proved`, it is of
        the first responder, and its `EndOfBatch.up_to_seq` says what that has.

        Raises:
            TooManySubjectsError: The subjects match too many.
        """
        max_bytes = _NO_LIMIT if in_flight is None else self._room(in_flight)
        request = Request(multi_last=tuple(subjects), up_to_seq=up_to, max_bytes=max_bytes)
        plan = MultiLast(request, need=self._need if proved else None, paged=up_to is not None)
        block = await self._joined(plan)
        assert plan.end is not None
        return block, plan.end

    async def newest_up_to(self, seq: int, first: int) -> StoredMsg | None:
        """Return the newest message up to `seq` that the leader still has, or None; `first` is the lowest sequence."""
        return await newest_up_to(self._at_leader, seq, first)

    async def log(self, first: int, last: int, *, subject: str | None = None) -> AsyncGenerator[Block, None]:
        """Yield the messages from sequence `first` to `last` in order; the leader proves that they are complete.

        `subject` is a filter for the server.
        """
        if first > last:
            return
        plan = Scan(subject=subject, seq=first, up_to_seq=last, max_bytes=DEFAULT_MAX_BYTES)
        plan.prove(last)
        async with self._blocks(plan) as blocks:
            async for block in blocks:
                yield block

    async def catch_up(self, position: int, take: Callable[[Block | list[StoredMsg]], None]) -> StoredMsg | None:
        """Pass the messages after `position` to `take`, up to an end that no reply of this read has passed.

        Return the last message, or None. Raise RequestTimeoutError if messages are stored faster than they are read for
        half of `timeout`.
        """
        loop = asyncio.get_running_loop()
        newest: StoredMsg | None = None
        start: tuple[int, int] | None = None  # where this read and the leader were
        until = 0.0
        async with contextlib.aclosing(self.follow(position)) as pieces:
            async for piece in pieces:
                if len(piece):
                    take(piece.found)
                    newest = piece.last
                    position = newest.seq
                if piece.exact or loop.time() < until:
                    continue
                leader = self.end.last_seq
                if start is not None and (position - start[0]) * _SLOWER < leader - start[1]:
                    raise RequestTimeoutError(
                        f"{self._source.what}: {counted(leader - position, 'message')} still unread, because messages are stored "
                        f"faster than this read returns them (for {self._timeout / 2:g} s); repeat the call when fewer are stored, or read "
                        "fewer keys with get_many"
                    )
                start, until = (position, leader), loop.time() + self._timeout / 2
        if newest is None and position:
            last = await self._at_leader(Request(seq=position))
            if last is not None and is_inside_batch(stored_block(last)) and await self._is_followed(last):
                return await self.catch_up(position, take)
        return newest

    async def follow(self, position: int, *, subject: str | None = None) -> AsyncGenerator[Piece, None]:
        """Yield the messages after `position` in pieces.

        The last piece is exact: no reply of this read, or of earlier ones that ended where it begins, has passed it. It goes
        up to `end.last_seq` or farther: `end` is what the leader said last, before the last reply. It does not end inside an
        atomic batch, unless the rest of the batch was removed. `subject` is a filter for the server; other messages may be
        among them.
        """
        while True:
            # Every responder so far had at most what the leader has now; the next reply must reach that.
            self.end = state = await stream_state(self._context, self._stream, self._timeout)
            if state.last_seq == position:
                yield Piece([], exact=True)
                return
            found, more = await self._next_piece(position, state.last_seq, subject)
            piece = Piece(found)
            if len(piece):
                last = piece.last
                position = last.seq
                piece = Piece(found, whole=not is_inside_batch(stored_block(last)))
                if more or (not piece.whole and await self._is_followed(last, subject)):
                    yield piece
                    continue
            yield replace(piece, exact=True)
            return

    async def _next_piece(
        self, position: int, leader: int, subject: str | None
    ) -> tuple[Block | list[StoredMsg], bool]:
        """Return messages after `position`, and whether there are more or they have passed the sequence `leader`."""
        found = await self._next_at_leader(position, leader - position) if 0 < leader - position <= _FEW else None
        if found is not None and not any("\ufffd" in message.subject for message in found):  # otherwise see `Block`
            due = [message for message in found if message.seq <= leader]
            if not found or len(due) == leader - position:  # no reply has passed the last one
                return due, False
            return found, True
        plan = OneReply(
            Request(
                seq=position + 1,
                next_by_subj=subject or ">",  # without one, 2.11.0 answers 404 if the first message was deleted
                batch=_CATCH_UP_BATCH,
                max_bytes=self._room(1),
            )
        )
        plan.prove(leader)
        return await self._joined(plan), plan.more

    async def _is_followed(self, last: StoredMsg, subject: str | None = None) -> bool:
        """Return whether more messages, which match `subject`, follow one that is inside an atomic batch.

        Servers show the messages of a batch while they store it. The last message of the stream tells whether that is over.
        If none follows then, the others of the batch do not match or were removed.
        """
        batch, pause = _batch_id(last), _FIRST_PAUSE
        while pause < _LONGEST_COMMIT:
            state = await stream_state(self._context, self._stream, self._timeout)
            if state.last_seq >= last.seq:  # otherwise the leader has yet to learn of the message
                newest = await self._at_leader(Request(seq=state.last_seq))
                after = Request(seq=last.seq + 1, next_by_subj=subject or ">")
                if await self._at_leader(after) is not None:
                    return True
                if newest is not None and not (is_inside_batch(stored_block(newest)) and _batch_id(newest) == batch):
                    return False
            await asyncio.sleep(pause)
            pause *= 2
        return False

    async def _joined(self, plan: Plan) -> Block:
        joined = Block()
        async with self._blocks(plan) as blocks:
            async for block in blocks:
                joined.stream = block.stream
                joined.extend(block)
        return joined

    def _blocks(self, plan: Plan) -> contextlib.aclosing[AsyncGenerator[Block, None]]:
        # A stream that does not allow direct gets is refused before.
        return contextlib.aclosing(read_blocks(self._context, self._stream, plan, self._timeout, allowed=True))

    async def _at_leader(self, request: Request) -> StoredMsg | None:
        return await get_at_leader(self._context, self._stream, request.body(), self._timeout)

    async def _next_at_leader(self, position: int, count: int) -> list[StoredMsg]:
        """Return up to `count` messages after `position`, with every one that is stored up to the last of them."""

        async def find(seq: int) -> StoredMsg | None:
            return await self._at_leader(Request(seq=seq, next_by_subj=">"))

        seqs = range(position + 1, position + 1 + count)
        found = await gather_bounded(find, seqs, limit=MAX_LEADER_REQUESTS)
        by_seq = {message.seq: message for message in found if message is not None}
        return [by_seq[seq] for seq in sorted(by_seq)]

    def _room(self, in_flight: int) -> int:
        return min(DEFAULT_MAX_BYTES, link_of(self._context.connection).room(in_flight))
