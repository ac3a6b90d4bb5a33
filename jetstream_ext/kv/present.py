"""What is stored now of the keys of a bucket, or of the subjects of a stream, by replicas that show that they have it.

A bucket of any size cannot be read in one atomic request, and keys are overwritten during the read. So a
snapshot consists of some messages, each stored when it was read, and then of the log from before the first of them up
to an end S that no earlier reply had passed. Of each key the newest revision counts. The result is the bucket at S:
assume that y, the newest message of a key up to S, was not read. y was stored until a newer message of the key replaced
it. That one has a revision above S, because y is the newest up to S, so it was stored after the last reply. Then y was
stored during the whole read, and was read.

Some removals have no revision: a message expires and leaves no marker. Those are decided by the leader's clock after the
last reply. A message that has expired by then is not in the snapshot, whether or not a reply had it. Every other one was
stored during the whole read. Where the bucket leaves markers, only the markers themselves go without a revision. A limit
of the whole stream, or a purge up to a sequence, removes the lowest sequences. The leader's lowest sequence from before
the last reply decides. S is not below the leader's last one of that moment, so a message that is lower than its lowest one
was removed, and no newer one replaced it up to S. (Its state after the last reply could not tell the two apart.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Final, TypeAlias, TypeVar

from jetstream_ext.client.api import gather_bounded, get_at_leader, newest_up_to, stream_state
from jetstream_ext.client.direct_reader import link_of, read_blocks
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError, TooManySubjectsError
from jetstream_ext.kv.bucket import KeyedStream
from jetstream_ext.kv.entries import EVERYTHING, update_of, updates_of
from jetstream_ext.kv.history import limits_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES, Block, EndOfBatch, Request, StoredMsg, stored_block
from jetstream_ext.protocol.headers import BATCH_ID, decode_stored, is_inside_batch
from jetstream_ext.protocol.reads import MultiLast, OneReply, Plan, Scan
from jetstream_ext.protocol.subjects import can_be_asked_for, covering, matcher
from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import Record, Update
from jetstream_ext.text import counted

_T = TypeVar("_T")
Take: TypeAlias = Callable[[Block | Sequence[StoredMsg]], None]
"""Takes what a read returns, a reply at a time."""

# With so many messages per key, reading the keys by name costs less than reading the whole log.
_DEEP: Final = 3
# Keys per request. Servers answer for 1024 subjects; if one answers for fewer, the chunk is halved.
_CHUNK: Final = 1_000
_CHUNK_BYTES: Final = 128 * 1024
_CHUNKS_IN_FLIGHT: Final = 3
# Of more keys than this, listing them costs more than reading the log: the server sorts all of them for each page.
_MOST_LISTED: Final = 100_000
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

    def __len__(self) -> int:
        return len(self.found)

    @property
    def last(self) -> StoredMsg:
        return self.found[-1] if isinstance(self.found, list) else self.found.message(-1)

    @property
    def whole(self) -> bool:
        """Whether the last message is not inside an atomic batch, as far as its headers say."""
        return not is_inside_batch(stored_block(self.last))


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

    async def count(self, subject: str) -> int:
        """Return how many messages match a filter, by the first responder."""
        plan = OneReply(Request(seq=1, next_by_subj=subject, batch=1, max_bytes=1))
        found = await self._joined(plan)
        return len(found) + (0 if plan.end is None else plan.end.num_pending)

    async def catch_up(self, position: int, take: Take) -> StoredMsg | None:
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
            if found:
                piece = Piece(found)
                position = piece.last.seq
                if more or (not piece.whole and await self._is_followed(piece.last, subject)):
                    yield piece
                    continue
            yield Piece(found, exact=True)
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
        found = await gather_bounded(find, seqs, limit=_FEW)
        by_seq = {message.seq: message for message in found if message is not None}
        return [by_seq[seq] for seq in sorted(by_seq)]

    def _room(self, in_flight: int) -> int:
        return min(DEFAULT_MAX_BYTES, link_of(self._context.connection).room(in_flight))


class LimitsChangedError(Exception):
    """The limits by which a read judges what it does not find were changed during the read."""


async def check_end(source: KeyedStream, before: StreamState) -> StreamState:
    """Return the stream's state now; raise StreamRecreatedError or LimitsChangedError if it is no longer what it was."""
    end = await source.check_same(before)
    if limits_of(end.config) != limits_of(before.config):
        raise LimitsChangedError
    return end


async def read_under_the_same_limits(
    source: KeyedStream, look: Callable[[], Awaitable[StreamState]], read: Callable[[StreamState], Awaitable[_T]]
) -> _T:
    """Return what `read` returns, from a state that `look` returns; repeat both if it raises LimitsChangedError."""
    retry = Retry(source.timeout)
    while True:
        try:
            return await read(await look())
        except LimitsChangedError:
            what = f"{source.what}: its limits were changed during each read"
            await retry.pause_until_deadline(RequestTimeoutError(f"{what} (tried for {source.timeout:.4g} s)"))


def empty_content(state: StreamState) -> Content:
    """Return a content without keys, for a stream with the limits of a state."""
    return Content(
        max_age=state.max_age,
        own_ttls=bool(state.config.get("allow_msg_ttl")),
        markers=state.marker_ttl is not None,
        deep=state.max_msgs_per_subject != 1,
    )


async def read_now(source: KeyedStream, patterns: list[str], state: StreamState) -> tuple[Content, datetime]:
    """Return what is stored now of the keys that match `patterns`, and when the content's revision was stored.

    `state` is the stream's state before.
    """
    reader, subjects = ProvedReader(source, state.last_seq), source.subjects(matcher(patterns))
    content, newest = empty_content(state), None

    def take(found: Block | Sequence[StoredMsg]) -> None:
        content.feed(updates_of(found, subjects))

    log_from = state.last_seq
    at_once = await _read_each(source, reader, patterns, state, take)
    if at_once is not None:
        block, up_to_seq = at_once
        newest = block.message(-1) if len(block) else None
        if newest is not None and newest.seq >= up_to_seq and is_inside_batch(stored_block(newest)):
            at_once, log_from = None, newest.seq  # the rest of the batch may just be being stored
    if at_once is None:
        newest = await reader.catch_up(log_from, take) or newest
        # What expired meanwhile may have been stored for the first replies and gone for the last ones.
        end = await check_end(source, state)
        content.expose(unclear := content.expire(end.now), await stored_of(source, reader, unclear))
        content.drop_below(reader.end.first_seq)
    else:  # the server has decided for its only answer what had expired
        known = newest is not None and (newest.seq > state.last_seq or (newest.seq, newest.time) in state.ends)
        if not known:  # nothing shows that the answer is of the stream whose last sequence and time are known
            await source.check_same(state)
    content.revision, time = state.last_seq, state.last_time
    if newest is not None and newest.seq > state.last_seq:
        content.revision, time = newest.seq, newest.time
    return content, time


async def read_unchanged(source: KeyedStream, state: StreamState, report: Callable[[int], None]) -> Content:
    """Return what is stored of all keys, which no program changes since before the stream's `state`; keys may expire.

    `report` is called with the number of keys after each reply.
    """
    content, subjects = empty_content(state), source.subjects()

    def take(found: Block | Sequence[StoredMsg]) -> None:
        content.feed(updates_of(found, subjects))
        report(len(content))

    await _read_each(source, ProvedReader(source, state.last_seq), [EVERYTHING], state, take)
    return content


async def _read_each(
    source: KeyedStream, reader: ProvedReader, patterns: list[str], state: StreamState, take: Take
) -> tuple[Block, int] | None:
    """Pass the newest message of each key to `take`, in as few requests as possible; return as `_read_at_once`."""
    at_once = await _read_at_once(source, reader, patterns, state)
    if at_once is not None:
        take(at_once[0])
    elif await _by_log(source, reader, patterns, state) or (names := await _list_keys(source, patterns)) is None:
        all_keys = source.only_keys(state) and patterns == [EVERYTHING]
        subject = None if all_keys else covering(list(map(source.subject, patterns)))
        async for block in reader.log(state.lowest_seq, state.last_seq, subject=subject):
            take(block)
    else:
        await read_by_name(source, reader, names, take)
    return at_once


async def _by_log(source: KeyedStream, reader: ProvedReader, patterns: list[str], state: StreamState) -> bool:
    """Whether reading the log costs less than listing the keys and reading them by name."""
    if len(patterns) > 1:
        return False
    if patterns == [EVERYTHING] and source.only_keys(state):
        return state.messages < _DEEP * state.num_subjects
    _, keys = await source.count_keys(patterns[0])
    return await reader.count(source.subject(patterns[0])) < _DEEP * keys


async def _read_at_once(
    source: KeyedStream, reader: ProvedReader, patterns: list[str], state: StreamState
) -> tuple[Block, int] | None:
    """Return the answer to one request for everything and what its responder had; None if one answer has no room for it."""
    if len(_chunks(source, patterns)) > 1 or (patterns == [EVERYTHING] and state.num_subjects > _CHUNK):
        return None
    try:
        block, end = await reader.last_of([source.subject(pattern) for pattern in patterns])
    except TooManySubjectsError:
        return None
    return None if end.num_pending else (block, end.up_to_seq or 0)


async def _list_keys(source: KeyedStream, patterns: list[str]) -> list[str] | None:
    """Return the given keys, and those that match a pattern now; None if they are many or cannot be read by name."""
    names = await source.list_keys(patterns, most=_MOST_LISTED)
    return names if len(names) <= _MOST_LISTED and all(map(can_be_asked_for, names)) else None


async def read_from_any(source: KeyedStream, keys: Sequence[str], need: int, take: Take) -> list[str]:
    """Read the last message of each of `keys` from replicas that show to have the sequence `need`; return the other keys."""
    reader = ProvedReader(source, need)

    async def read(chunk: Sequence[str]) -> Sequence[str]:
        try:
            block, end = await reader.last_of([source.subject(key) for key in chunk], proved=False)
        except TooManySubjectsError:
            return chunk
        if block.stream != source.stream or (end.up_to_seq or 0) < need or end.num_pending:
            return chunk  # answers without messages name no stream
        take(block)
        return ()

    return list(chain.from_iterable(await gather_bounded(read, _chunks(source, keys), limit=_CHUNKS_IN_FLIGHT)))


async def read_by_name(
    source: KeyedStream,
    reader: ProvedReader,
    keys: Sequence[str],
    take: Take,
    *,
    up_to: int | None = None,
) -> int:
    """Read the last message of each of `keys` (up to the revision `up_to`); return in how many replies.

    Each reply is of one moment. Messages of other keys may be among them.
    """

    async def read(chunk: Sequence[str]) -> int:
        alone = len(chunk) == 1
        subjects = [source.subject(key) for key in chunk]
        try:
            block, end = await reader.last_of(subjects, up_to=up_to, in_flight=None if alone else _CHUNKS_IN_FLIGHT)
        except TooManySubjectsError:
            if alone:
                raise
        else:
            take(block)
            if not end.num_pending or up_to is not None:
                return 1
            found = set(block.subjects)
            chunk = [key for key in chunk if source.subject(key).encode() not in found]
        half = len(chunk) // 2
        return 1 + sum([await read(part) for part in (chunk[:half], chunk[half:]) if part])

    return sum(await gather_bounded(read, _chunks(source, keys), limit=_CHUNKS_IN_FLIGHT))


async def last_records(
    source: KeyedStream, reader: ProvedReader, keys: Sequence[str], *, up_to: int | None = None
) -> dict[str, Record]:
    """Return the last message of each of `keys` that has one, up to the revision `up_to`; delete markers included."""
    found: dict[str, Record] = {}
    await read_by_name(source, reader, keys, taking_last(source, keys, found), up_to=up_to)
    return found


async def stored_of(source: KeyedStream, reader: ProvedReader, keys: Sequence[str]) -> dict[str, Update]:
    """Return the same for `Content.expose`."""
    records, subjects = await last_records(source, reader, keys), source.subjects()
    return {key: update_of(subjects, key, record) for key, record in records.items()}


def taking_last(source: KeyedStream, keys: Sequence[str], found: dict[str, Record]) -> Take:
    """Return what puts the records of `keys` into `found`; each key comes once."""
    wanted = frozenset(keys).__contains__

    def take(messages: Block | Sequence[StoredMsg]) -> None:
        updates = updates_of(messages, source.subjects(wanted))  # a mirror's prefix is known once its state is
        found.update(updates if isinstance(updates, dict) else {key: record for key, record, _, _ in updates})

    return take


def _chunks(source: KeyedStream, keys: Sequence[str]) -> list[Sequence[str]]:
    """Split `keys` into chunks that each fit into one request."""
    room = min(_CHUNK_BYTES, source.context.connection.max_payload // 4)
    longest = len(source.prefix) + max(map(len, keys), default=0) + 3  # with its quotes and comma
    size = max(1, min(_CHUNK, room // longest))
    return [keys[start : start + size] for start in range(0, len(keys), size)]
