"""Reads of many keys, and of a bucket at one revision, in as few requests as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from nats.js.kv import KeyValue

from jetstream_ext.client.api import first_since, gather_bounded, settled_state
from jetstream_ext.client.retry import Retry
from jetstream_ext.client.verified_read import AskLeaderError, VerifiedReader
from jetstream_ext.errors import HistoryUnavailableError, RequestTimeoutError, TooManySubjectsError
from jetstream_ext.kv.bucket import LOOKUPS_IN_FLIGHT, Bucket
from jetstream_ext.kv.entries import (
    EVERYTHING,
    KeyValueEntry,
    KeyValueSnapshot,
    Row,
    Subjects,
    check_filters,
    check_keys,
    row_of,
    rows_of,
)
from jetstream_ext.kv.history import Latest, Past, Verdict
from jetstream_ext.kv.limits import drops_oldest, known_since, limits_of
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.gaps import Gaps
from jetstream_ext.protocol.options import check_sequence, rfc3339
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher

_T = TypeVar("_T")

# With so many messages per key or more, asking for the keys by name costs less than reading the whole log.
_DEEP: Final = 3
# A log of so many messages and bytes is read completely: that costs less than an answer with unavailable keys.
_SMALL_LOG: Final = 16_000
_SMALL_BYTES: Final = 64 << 20
# So many messages of the log cost as much as looking up the last message of one key up to some revision.
_ROWS_PER_LOOKUP: Final = 40
# Keys per request. Servers answer for 1024 subjects; if one answers for fewer, the chunk is halved.
_CHUNK: Final = 1_000
_CHUNK_BYTES: Final = 128 * 1024
_CHUNKS_IN_FLIGHT: Final = 3
# Of more keys than this, listing them costs more than reading the log: the server sorts all of them for each page.
_MOST_LISTED: Final = 100_000
_MICROSECOND: Final = timedelta(microseconds=1)
_LIMITS_UNKNOWN: Final = (
    ", and it is not known since when the bucket's limits hold (`await jetstream_ext.kv.enable(kv)` records that for later "
    "reads)"
)


async def get_many(
    kv: KeyValue, keys: Iterable[str], *, at: int | datetime | None = None, timeout: float | None = None
) -> dict[str, KeyValueEntry]:
    """Return the entries of many keys, without those that do not exist.

    Without `at`, every entry is at least as new as the leader's when the call began, so you can read what your program
    wrote before; but two entries may be from different points in time. With `at`, all are from that one. For a
    consistent read of now, take a `snapshot`.

    The bucket may be a mirror of another bucket. Then only the mirror and its own leader are asked, also while the origin
    is away, and "now" is what that leader has.

    Args:
        kv: nats-py's bucket.
        keys: Any number of keys.
        at: A revision, or a timezone-aware datetime (that microsecond included); None is now.
        timeout: Seconds to wait for each answer; None is the context's own.

    Returns:
        Key to entry, in the order of `keys`.

    Raises:
        nats.js.errors.InvalidKeyError: No client accepts one of the keys; nothing was sent.
        nats.js.errors.BucketNotFoundError: There is no such bucket.
        nats.js.errors.BadBucketError: The stream is no bucket, or mirrors one with other subjects.
        DirectGetDisabledError: The bucket does not allow direct gets; `enable` turns them on.
        UnsupportedFeatureError: The server is older than 2.11.
        HistoryUnavailableError: With `at`: the value of some keys is no longer stored. The error names these keys, as
            far as they are known.
        ValueError, TypeError: `at` is not a revision of the bucket, or lies in the future, or is not timezone-aware; or
            `timeout` is not over 0.
        RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer, no leader, or no replica that has caught up
            with the leader, within `timeout`.
        ResponseError: An answer is malformed. Or only mirrors answer direct gets, and the leader has a message whose key is
            not UTF-8, which its answer does not show ("Keys that clients refuse" in the documentation).

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    wanted = check_keys(keys)
    bucket = Bucket(kv, timeout)
    with bucket.not_found():
        if at is None:
            state = await bucket.readable_state()
            latest, source = Latest(bucket.subjects(wanted.__contains__)), _reader(bucket, state)
            await _read_by_name(bucket, source, list(wanted), latest.feed)
            if source.replies > 1:
                await bucket.check_same(state)
            found = latest.entries()
        else:
            verdict, _ = await _read_past(bucket, wanted.__contains__, list(wanted), at, strict=True)
            found = _without_deleted(verdict.entries)
    return {key: entry for key in wanted if (entry := found.get(key)) is not None}


async def snapshot(
    kv: KeyValue,
    filters: Sequence[str] | None = None,
    *,
    at: int | datetime | None = None,
    strict: bool = True,
    include_deletes: bool = False,
    timeout: float | None = None,
) -> KeyValueSnapshot:
    """Return a bucket, or the part of it that matches `filters`, as it was at one revision.

    A snapshot of now is exact at its `revision`, for any number of keys and under concurrent writes, and that revision
    is at least the leader's newest when the call began. The read creates no consumer.

    A snapshot of the past is exact, or the call raises an error. "Reads of the past" in the documentation says what is
    still known of a key whose history is short, was purged, or expired.

    A mirror of a bucket is read as by `get_many`.

    Args:
        kv: nats-py's bucket.
        filters: Keys and patterns of keys (``*`` for a token, ``>`` for the rest); None is the whole bucket.
        at: As for `get_many`.
        strict: Raise an error if the value of a key is no longer stored; False leaves those keys out and lists them in
            `unavailable`.
        include_deletes: Include the markers of deleted, purged and expired keys that are still stored.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.InvalidKeyError: A filter is not a pattern of keys; nothing was sent.
        ValueError, TypeError: There are no filters; or as for `get_many`.
        Exception: As for `get_many`.

    Cancellation: Safe; nothing is left behind.

    Requires: As for `get_many`.
    """
    patterns = check_filters(filters)
    bucket = Bucket(kv, timeout)
    with bucket.not_found():
        if at is None:
            return await _under_the_same_limits(
                bucket, lambda state: _read_now(bucket, patterns, state, include_deletes=include_deletes)
            )
        verdict, point = await _read_past(bucket, matcher(patterns), patterns, at, strict=strict)
    return KeyValueSnapshot(
        verdict.entries if include_deletes else _without_deleted(verdict.entries),
        revision=point.revision,
        time=point.time,
        unavailable=verdict.unavailable,
        complete=verdict.complete,
    )


def _reader(bucket: Bucket, state: StreamState) -> VerifiedReader:
    source = bucket.reader(state.last_seq)
    source.before = state
    return source


class _LimitsChangedError(Exception):
    """The limits by which a read judges what it does not find were changed during the read."""


async def _under_the_same_limits(
    bucket: Bucket, read: Callable[[StreamState], Awaitable[_T]], point: ResolvedRevision | None = None
) -> _T:
    """Return what `read` returns; repeat it if it raises _LimitsChangedError.

    With a `point`, the bucket must be the one in which that was resolved.
    """
    retry = Retry(bucket.timeout)
    while True:
        try:
            return await read(await bucket.readable_state() if point is None else await state_since(bucket, point))
        except _LimitsChangedError:
            what = f"bucket {bucket.name!r}: its limits were changed during each read"
            await retry.pause_until_deadline(RequestTimeoutError(f"{what} (tried for {bucket.timeout:.4g} s)"))


async def state_since(bucket: Bucket, point: ResolvedRevision) -> StreamState:
    """Return the state of the bucket in which `point` was resolved.

    Raises StreamRecreatedError if it is another one now, and RequestTimeoutError if its leader does not have the revision.
    """

    async def look() -> StreamState:
        return await bucket.check_same(point.state, await bucket.readable_state())

    state = await settled_state(look, point.revision, bucket.timeout)
    if state.last_seq < point.revision:
        raise RequestTimeoutError(
            f"bucket {bucket.name!r}: its leader ends at revision {state.last_seq} and did not reach {point.revision} within "
            f"{bucket.timeout:.4g} s, so it has lost its last messages or still has to catch up; repeat the read"
        )
    return state


async def _check_end(bucket: Bucket, before: StreamState) -> StreamState:
    """Return the bucket's state now; raise StreamRecreatedError or _LimitsChangedError if it is no longer what it was."""
    end = await bucket.check_same(before)
    if limits_of(end.config) != limits_of(before.config):
        raise _LimitsChangedError
    return end


def _without_deleted(entries: dict[str, KeyValueEntry]) -> dict[str, KeyValueEntry]:
    return {key: entry for key, entry in entries.items() if entry.operation == "PUT"}


# -- now --------------------------------------------------------------------------------------------------------------


async def read_present(
    bucket: Bucket, point: ResolvedRevision, keys: Sequence[str], *, include_deletes: bool
) -> KeyValueSnapshot:
    """Return what the bucket of `point` holds now of `keys`, which clients may refuse."""
    patterns = list(keys) if all(map(can_be_asked_for, keys)) else [EVERYTHING]

    async def read(state: StreamState) -> KeyValueSnapshot:
        return await _read_now(
            bucket, patterns, state, wanted=frozenset(keys).__contains__, include_deletes=include_deletes
        )

    return await _under_the_same_limits(bucket, read, point)


async def _read_now(
    bucket: Bucket,
    patterns: list[str],
    state: StreamState,
    *,
    wanted: Callable[[str], bool] | None = None,
    include_deletes: bool,
) -> KeyValueSnapshot:
    source, subjects = _reader(bucket, state), bucket.subjects(wanted or matcher(patterns))
    latest = Latest(subjects, max_age=state.max_age, own_ttls=bool(state.config.get("allow_msg_ttl")))
    answer = await _read_at_once(bucket, source, patterns, state)
    expired_by: datetime | None = None  # None: the server has decided for its only answer what had expired
    markers = False
    if answer is not None:
        latest.feed(rows_of(answer))
        newest = answer.message(-1) if len(answer) else None
        known = newest is not None and (newest.seq > state.last_seq or (newest.seq, newest.time) in state.ends)
        if not known:  # nothing shows that the answer is of the stream whose last sequence and time are known
            await bucket.check_same(state)
    else:
        names = None
        if (
            patterns != [EVERYTHING]
            or state.messages >= _DEEP * state.num_subjects
            or not await source.replicas_answer()
        ):
            names = await _list_keys(bucket, patterns)
        if names is None:
            async for block in source.log(state.lowest_seq, state.last_seq):
                latest.feed(rows_of(block))
        else:
            await _read_by_name(bucket, source, names, latest.feed)
        newest = await source.catch_up(state.last_seq, lambda found: latest.feed(rows_of(found)))
        # What expired meanwhile may have been stored for the first replies and gone for the last ones.
        end = await _check_end(bucket, state)
        expired_by, markers = end.now, end.marker_ttl is not None
    revision, time = state.last_seq, state.last_time
    if newest is not None and newest.seq > revision:
        revision, time = newest.seq, newest.time
    entries = latest.entries(expired_by, first_seq=source.first_seq, markers=markers, include_deletes=include_deletes)
    return KeyValueSnapshot(entries, revision=revision, time=time)


async def _read_at_once(
    bucket: Bucket, source: VerifiedReader, patterns: list[str], state: StreamState
) -> Block | None:
    """Return the answer to one request for everything, or None if one answer does not have room for it."""
    if len(_chunks(bucket, patterns)) > 1 or (patterns == [EVERYTHING] and state.num_subjects > _CHUNK):
        return None
    try:
        answer = await source.last_of([bucket.subject(pattern) for pattern in patterns])
    except (TooManySubjectsError, AskLeaderError):
        return None
    return None if answer.pending else answer.block


async def _list_keys(bucket: Bucket, patterns: list[str]) -> list[str] | None:
    """Return the given keys, and those that match a pattern now; None if they are many or cannot be read by name."""
    names = await bucket.list_keys(patterns, most=_MOST_LISTED)
    return names if len(names) <= _MOST_LISTED and all(map(can_be_asked_for, names)) else None


async def _read_by_name(
    bucket: Bucket,
    source: VerifiedReader,
    keys: Sequence[str],
    take: Callable[[Iterable[Row]], None],
    *,
    up_to: StoredMsg | None = None,
) -> None:
    """Read the last message of each of `keys` (up to the message `up_to`), in parts that are each of one moment if possible.

    Messages of other keys may be among them. Raises LookupError if `up_to` is no longer stored.
    """

    async def read(chunk: Sequence[str]) -> None:
        alone = len(chunk) == 1
        in_flight = None if alone else _CHUNKS_IN_FLIGHT
        subjects = [bucket.subject(key) for key in chunk]
        try:
            answer = await source.last_of(subjects, up_to=up_to, in_flight=in_flight)
        except AskLeaderError:
            take(rows_of(await source.last_at_leader(subjects, up_to=None if up_to is None else up_to.seq)))
            return
        except TooManySubjectsError:
            if alone:
                raise
        else:
            # Only a complete answer shows that it is of the moment of `up_to`.
            if up_to is None or not answer.pending:
                rows = list(rows_of(answer.block))
                take(rows)
                if not answer.pending:
                    return
                found = {row[1] for row in rows}
                chunk = [key for key in chunk if bucket.subject(key) not in found]
        half = len(chunk) // 2
        for part in (chunk[:half], chunk[half:]):
            if part:
                await read(part)

    await gather_bounded(read, _chunks(bucket, keys), limit=_CHUNKS_IN_FLIGHT)


def _chunks(bucket: Bucket, keys: Sequence[str]) -> list[Sequence[str]]:
    """Split `keys` into chunks that each fit into one request."""
    room = min(_CHUNK_BYTES, bucket.context.connection.max_payload // 4)
    each = len(bucket.prefix) + 3  # with its quotes and comma
    chunks: list[Sequence[str]] = []
    start = size = 0
    for index, key in enumerate(keys):
        size += len(key) + each
        if index - start >= _CHUNK or (size > room and index > start):
            chunks.append(keys[start:index])
            start, size = index, len(key) + each
    if start < len(keys):
        chunks.append(keys[start:])
    return chunks


# -- the past ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResolvedRevision:
    """What the `at` of a caller means."""

    revision: int
    time: datetime
    since: datetime  # a time at which it was the newest revision, or an earlier one
    is_newest: bool  # the caller asked for the newest revision of `state`
    state: StreamState  # of the bucket, when the leader was asked


async def resolve_revision(bucket: Bucket, state: StreamState, at: int | datetime) -> ResolvedRevision:
    """Return what `at` means, from the bucket's state now; raises as `get_many` does."""
    if isinstance(at, datetime):
        rfc3339(at, "at")
        when = at.astimezone(UTC)
        return ResolvedRevision(await _revision_at(bucket, state, when), when, when, is_newest=False, state=state)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TypeError(f"at must be a revision or a datetime, not {type(at).__name__}")
    if check_sequence(at, "at") > state.last_seq:
        raise ValueError(f"bucket {bucket.name!r} has no revision {at} yet; its last is {state.last_seq}")
    if at == state.last_seq:
        return ResolvedRevision(at, state.last_time, state.now, is_newest=True, state=state)
    message = await bucket.get_at_leader(seq=at, next_by_subj=">")
    time = state.last_time if message is None else message.time
    exact = message is not None and message.seq == at
    return ResolvedRevision(at, time, time if exact else state.created_at, is_newest=False, state=state)


async def _revision_at(bucket: Bucket, state: StreamState, when: datetime) -> int:
    """Return the last revision stored up to `when`, that microsecond included."""
    ahead = (when - state.now).total_seconds()
    if 0 <= ahead <= bucket.timeout:
        # Clocks differ a little. What is stored up to then is known only after the server's clock has passed it.
        await asyncio.sleep(ahead + 0.001)
        state = await bucket.readable_state()
    if state.now <= when:
        raise ValueError(
            f"bucket {bucket.name!r}: the time {when.isoformat()} is in the future; the server's clock shows "
            f"{state.now.isoformat()}"
        )
    return await first_since(bucket.context, state, when + _MICROSECOND, bucket.timeout) - 1


async def _read_past(
    bucket: Bucket, wanted: Callable[[str], bool], patterns: list[str], at: int | datetime, *, strict: bool
) -> tuple[Verdict, ResolvedRevision]:
    """Return what is known of `at`; with `strict`, raise HistoryUnavailableError unless that is everything."""

    async def judge(state: StreamState) -> tuple[Verdict, ResolvedRevision, StreamState]:
        point = await resolve_revision(bucket, state, at)
        if point.revision > state.last_seq:
            state = await bucket.readable_state()  # `_revision_at` has waited for that time
        return await _judge_past(bucket, bucket.subjects(wanted), patterns, state, point), point, state

    verdict, point, state = await _under_the_same_limits(bucket, judge)
    what, keys = f"bucket {bucket.name!r} at revision {point.revision}", verdict.unavailable
    if strict and keys:
        shown = ", ".join(map(repr, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        raise HistoryUnavailableError(
            f"{what}: the history needed for {shown} is no longer stored; keep more history, or leave such keys out with "
            "snapshot(strict=False)",
            keys=keys,
        )
    if strict and verdict.lost:
        raise HistoryUnavailableError(
            f"{what}: keys may be missing, because messages up to this revision may have expired or been purged"
            f"{_LIMITS_UNKNOWN if known_since(state) is None else ''}; snapshot(strict=False) returns the rest"
        )
    return verdict, point


async def read_names(bucket: Bucket, point: ResolvedRevision, keys: Sequence[str], *, wild: bool) -> Verdict:
    """Return what is known of `keys` at a revision that was resolved earlier, perhaps by another process.

    With `wild`, the verdict says as well whether keys that are not among them may have been lost.

    Raises StreamRecreatedError, or as `snapshot` does.
    """
    subjects = bucket.subjects(frozenset(keys).__contains__)

    async def judge(state: StreamState) -> Verdict:
        return await _judge(bucket, _reader(bucket, state), subjects, state, point, named=keys, names=keys, wild=wild)

    return await _under_the_same_limits(bucket, judge, point)


async def _judge_past(
    bucket: Bucket, subjects: Subjects, patterns: list[str], state: StreamState, point: ResolvedRevision
) -> Verdict:
    source = _reader(bucket, state)
    named = [pattern for pattern in patterns if is_literal(pattern)]
    wild = len(named) < len(patterns)
    names: list[str] | None = named
    if wild and point.revision >= state.lowest_seq:
        log = _is_small(state) and await source.replicas_answer()
        log = log or (patterns == [EVERYTHING] and state.messages < _DEEP * state.num_subjects)
        names = None if log and await source.replicas_answer() else await _list_keys(bucket, patterns)
    return await _judge(bucket, source, subjects, state, point, named=named, names=names, wild=wild)


async def _judge(
    bucket: Bucket,
    source: VerifiedReader,
    subjects: Subjects,
    state: StreamState,
    point: ResolvedRevision,
    *,
    named: Sequence[str],
    names: Sequence[str] | None,
    wild: bool,
) -> Verdict:
    """Return what is known of a revision, by the `names` of keys (None: from the whole log).

    `named` are the keys that the caller named, and with `wild` there are patterns as well.
    """
    past = Past(subjects, revision=point.revision, history=state.max_msgs_per_subject)
    if point.revision < state.lowest_seq:
        await _check_end(bucket, state)
        return past.verdict(named=(), wild=False, missing=False, lost=False)
    missing, unexplained = 0, False
    if names is not None:
        known = await _feed_by_name(bucket, source, names, state, past)
        if known is not None:
            missing = known
        elif wild or past.uncertain(names):
            missing = point.revision if await _any_removed(bucket, source, state, point.revision) else 0
        if missing and _is_small(state) and await source.replicas_answer():
            # Only the whole log shows whether the histories of other keys account for what is missing.
            past = Past(subjects, revision=point.revision, history=state.max_msgs_per_subject)
            names = None
    if names is None:

        def take(found: Block | list[StoredMsg]) -> None:
            past.feed(rows_of(found), log=True)

        up_to_revision = Gaps(state.lowest_seq, point.revision)

        def note(block: Block) -> None:
            up_to_revision.add(block.seqs)
            take(block)

        gaps = await _read_log(source, state.lowest_seq, state.last_seq, note)
        await source.catch_up(state.last_seq, take)
        up_to_revision.close()
        missing = up_to_revision.highest
        if point.is_newest and past.held >= point.state.num_subjects:
            missing = 0  # what is missing was missing when the revision was the newest one
        # A gap above the revision may be the delete marker of a key that existed (`purge_deletes`).
        unexplained = gaps.highest > past.accounts_for()
    end = await _check_end(bucket, state)
    if point.is_newest and end.last_seq == point.revision:
        # A key that expires without a marker while the revision is the newest one both existed at it and did not.
        return past.verdict(named=(), wild=wild, missing=missing > 0, lost=False)
    expire = may_expire(end, past)
    return past.verdict(
        named=named,
        listed=names or (),
        wild=wild,
        missing=missing > 0,
        lost=unexplained or past.emptied or may_have_vanished(end, past, point, expire=expire),
        expire=expire,
    )


def _is_small(state: StreamState) -> bool:
    return state.messages <= _SMALL_LOG and state.size <= _SMALL_BYTES


def may_expire(end: StreamState, past: Past) -> bool:
    """Whether messages may have expired, as far as the bucket's limits and messages show."""
    if past.expires or end.marker_ttl is not None:
        return True
    since = known_since(end) or end.created_at
    return end.max_age is not None and min(end.created_at, since) + end.max_age < end.now


def may_have_vanished(end: StreamState, past: Past, point: ResolvedRevision, *, expire: bool) -> bool:
    """Whether a limit may have removed all messages of a key since, and the key left no marker."""
    since, stored = known_since(end), max(point.since, past.since or point.since)
    if point.is_newest and limits_of(end.config) == limits_of(point.state.config):
        since = min(since or point.since, point.since)
    if since is None or stored < since or drops_oldest(end):
        return True
    markers_stay = min(end.marker_ttl or timedelta(0), end.max_age or timedelta.max)
    return expire and end.now - stored >= markers_stay  # else the markers of all that expired since are still stored


async def _feed_by_name(
    bucket: Bucket, source: VerifiedReader, names: Sequence[str], state: StreamState, past: Past
) -> int | None:
    """Feed what decides about each of `names`; return the highest sequence up to the revision that is missing, if known.

    That is the key's last message if it is old enough, else its last one up to the revision, else its oldest.
    """
    revision, first = past.revision, state.lowest_seq
    last = await read_newest(bucket, source, names, revision, past.feed)
    missing: int | None = None
    short = min(revision - first, state.messages) <= _ROWS_PER_LOOKUP * len(last)
    if short and await source.replicas_answer():
        gaps = await _read_log(source, first, revision, lambda block: past.feed(rows_of(block)))
        missing = gaps.highest
    else:
        await read_earlier(bucket, source, list(last), first, revision, past.feed)

    async def feed_oldest(key: str) -> None:
        if state.max_msgs_per_subject == 1:
            past.feed((last[key],))  # the key has no other message
        elif (oldest := await source.oldest_of(bucket.subject(key), revision)) is not None:
            past.feed_oldest(row_of(oldest[0]), oldest[1])

    await gather_bounded(feed_oldest, [key for key in last if not past.knows(key)], limit=LOOKUPS_IN_FLIGHT)
    return missing


async def read_newest(
    bucket: Bucket,
    source: VerifiedReader,
    keys: Sequence[str],
    revision: int,
    take: Callable[[Iterable[Row]], None],
) -> dict[str, Row]:
    """Pass the newest message of each of `keys` to `take` if it is not after `revision`; return the others by key."""
    later: dict[str, Row] = {}

    def divide(rows: Iterable[Row]) -> None:
        known = []
        for row in rows:
            if row[0] <= revision:
                known.append(row)
            else:
                later[row[1]] = row
        take(known)

    await _read_by_name(bucket, source, keys, divide)
    return {key: row for key in keys if (row := later.get(bucket.subject(key))) is not None}


async def read_earlier(
    bucket: Bucket,
    source: VerifiedReader,
    keys: Sequence[str],
    first: int,
    revision: int,
    take: Callable[[Iterable[Row]], None],
) -> None:
    """Pass the newest message up to `revision` of each of `keys` to `take`; `first` is the log's lowest sequence."""
    try:
        while keys and (newest := await source.newest_to_ask_for(revision, first)) is not None:
            try:
                await _read_by_name(bucket, source, keys, take, up_to=newest)
                break
            except LookupError:
                pass  # `newest` was removed meanwhile. The loop ends: nothing is ever added up to the revision.
    except AskLeaderError:
        take(rows_of(await source.last_at_leader([bucket.subject(key) for key in keys], up_to=revision)))


async def _any_removed(bucket: Bucket, source: VerifiedReader, state: StreamState, revision: int) -> bool:
    """Whether messages up to `revision` were, or may have been, removed."""
    if (await bucket.readable_state()).never_removed:
        return False
    if revision - state.lowest_seq >= _SMALL_LOG or state.size > _SMALL_BYTES or not await source.replicas_answer():
        return True
    return (await _read_log(source, state.lowest_seq, revision)).highest > 0


async def _read_log(
    source: VerifiedReader, first: int, last: int, take: Callable[[Block], None] = lambda _: None
) -> Gaps:
    """Hand over every stored message of ``first … last``; return the gaps between them."""
    gaps = Gaps(first, last)
    async for block in source.log(first, last):
        gaps.add(block.seqs)
        take(block)
    gaps.close()
    return gaps
