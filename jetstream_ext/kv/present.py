"""What is stored now of the keys of a bucket, or of the subjects of a stream.

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

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Final, TypeVar

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import RequestTimeoutError, TooManySubjectsError
from jetstream_ext.kv.entries import EVERYTHING, updates_of
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.kv.limits import limits_of
from jetstream_ext.kv.proved_read import ProvedReader
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg, stored_block
from jetstream_ext.protocol.headers import is_inside_batch
from jetstream_ext.protocol.subjects import can_be_asked_for, matcher
from jetstream_ext.protocol.table import Content, Update, each

_T = TypeVar("_T")

# With so many messages per key, reading the keys by name costs less than reading the whole log.
_DEEP: Final = 3
# Keys per request. Servers answer for 1024 subjects; if one answers for fewer, the chunk is halved.
_CHUNK: Final = 1_000
_CHUNK_BYTES: Final = 128 * 1024
_CHUNKS_IN_FLIGHT: Final = 3
# Of more keys than this, listing them costs more than reading the log: the server sorts all of them for each page.
_MOST_LISTED: Final = 100_000


class LimitsChangedError(Exception):
    """The limits by which a read judges what it does not find were changed during the read."""


async def check_end(source: KeyedStream, before: StreamState) -> StreamState:
    """Return the stream's state now; raise StreamRecreatedError or LimitsChangedError if it is no longer what it was."""
    end = await source.check_same(before)
    if limits_of(end.config) != limits_of(before.config):
        raise LimitsChangedError
    return end


@dataclass(frozen=True, slots=True)
class Present:
    """What is stored now: the content as of its revision, when that was stored, and a state of the stream from after it."""

    content: Content
    time: datetime
    state: StreamState


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


async def read_now(source: KeyedStream, patterns: list[str], state: StreamState) -> Present:
    """Return what is stored now of the keys that match `patterns`; `state` is the stream's state before."""
    reader, subjects = ProvedReader(source, state.last_seq), source.subjects(matcher(patterns))
    content, newest = empty_content(state), None

    def take(found: Block | Sequence[StoredMsg]) -> None:
        content.feed(updates_of(found, subjects))

    end, log_from = state, state.last_seq
    at_once = await _read_at_once(source, reader, patterns, state)
    if at_once is not None:
        block, up_to_seq = at_once
        take(block)
        newest = block.message(-1) if len(block) else None
        if newest is not None and newest.seq >= up_to_seq and is_inside_batch(stored_block(newest)):
            at_once, log_from = None, newest.seq  # the rest of the batch may just be being stored
    elif _by_log(source, patterns, state) or (names := await list_keys(source, patterns)) is None:
        keys = None if source.only_keys(state) else source.subject(EVERYTHING)
        async for block in reader.log(state.lowest_seq, state.last_seq, subject=keys):
            take(block)
    else:
        await read_by_name(source, reader, names, take)
    if at_once is None:
        newest = await reader.catch_up(log_from, take) or newest
        # What expired meanwhile may have been stored for the first replies and gone for the last ones.
        end = await check_end(source, state)
        content.expose(unclear := content.expire(end.now), await last_of_keys(source, reader, unclear))
        content.drop_below(reader.end.first_seq)
    else:  # the server has decided for its only answer what had expired
        known = newest is not None and (newest.seq > state.last_seq or (newest.seq, newest.time) in state.ends)
        if not known:  # nothing shows that the answer is of the stream whose last sequence and time are known
            end = await source.check_same(state)
    content.revision, time = state.last_seq, state.last_time
    if newest is not None and newest.seq > state.last_seq:
        content.revision, time = newest.seq, newest.time
    return Present(content, time, end)


def _by_log(source: KeyedStream, patterns: list[str], state: StreamState) -> bool:
    """Whether reading the whole log costs less than listing the keys and reading them by name."""
    return patterns == [EVERYTHING] and source.only_keys(state) and state.messages < _DEEP * state.num_subjects


async def last_of_keys(source: KeyedStream, reader: ProvedReader, keys: Sequence[str]) -> dict[str, Update]:
    """Return the last message of each of `keys` that has one, as `protocol.table` takes it."""
    if not keys:
        return {}
    subjects = source.subjects(set(keys).__contains__)
    found: dict[str, Update] = {}

    def take(block: Block | Sequence[StoredMsg]) -> None:
        for update in each(updates_of(block, subjects)):
            if update[0] not in found or found[update[0]][1][0] < update[1][0]:
                found[update[0]] = update

    await read_by_name(source, reader, keys, take)
    return found


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


async def list_keys(source: KeyedStream, patterns: list[str]) -> list[str] | None:
    """Return the given keys, and those that match a pattern now; None if they are many or cannot be read by name."""
    names = await source.list_keys(patterns, most=_MOST_LISTED)
    return names if len(names) <= _MOST_LISTED and all(map(can_be_asked_for, names)) else None


async def read_from_any(
    source: KeyedStream, keys: Sequence[str], need: int, take: Callable[[Block | Sequence[StoredMsg]], None]
) -> list[str]:
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
    take: Callable[[Block | Sequence[StoredMsg]], None],
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


def _chunks(source: KeyedStream, keys: Sequence[str]) -> list[Sequence[str]]:
    """Split `keys` into chunks that each fit into one request."""
    room = min(_CHUNK_BYTES, source.context.connection.max_payload // 4)
    longest = len(source.prefix) + max(map(len, keys), default=0) + 3  # with its quotes and comma
    size = max(1, min(_CHUNK, room // longest))
    return [keys[start : start + size] for start in range(0, len(keys), size)]
