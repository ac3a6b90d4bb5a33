"""Reads of many keys, and of a bucket at one revision, in as few requests as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from nats.js.kv import KeyValue

from jetstream_ext.client.api import first_since, gather_bounded, settled_state, wait_for_sequence
from jetstream_ext.errors import HistoryUnavailableError, RequestTimeoutError
from jetstream_ext.kv.bucket import LOOKUPS_IN_FLIGHT, Bucket
from jetstream_ext.kv.entries import (
    EVERYTHING,
    KeyValueEntry,
    KeyValueSnapshot,
    Row,
    Subjects,
    check_filters,
    check_keys,
    entry_of_record,
    row_of,
    rows_of,
    updates_of,
)
from jetstream_ext.kv.history import Past, Verdict
from jetstream_ext.kv.limits import drops_oldest, known_since, limits_of
from jetstream_ext.kv.present import (
    Present,
    check_end,
    is_deep,
    list_keys,
    proved_reader,
    read_by_name,
    read_from_any,
    read_now,
    read_under_the_same_limits,
)
from jetstream_ext.kv.proved_read import ProvedReader
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.loss import Gaps
from jetstream_ext.protocol.options import check_sequence, rfc3339
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher
from jetstream_ext.protocol.table import Content, Record

# A log of so many messages and bytes is read completely: that costs less than an answer with unavailable keys.
_SMALL_LOG: Final = 16_000
_SMALL_BYTES: Final = 64 << 20
# So many messages of the log cost as much as looking up the last message of one key up to some revision.
_ROWS_PER_LOOKUP: Final = 40
_MICROSECOND: Final = timedelta(microseconds=1)


async def get_many(
    kv: KeyValue,
    keys: Iterable[str],
    *,
    at: int | datetime | None = None,
    min_revision: int | None = None,
    timeout: float | None = None,
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
        min_revision: Read what your program, or another one, wrote: every entry is at least as new as this revision, the one
            that the write returned. Any replica that has it may answer; the leader is asked only if the first answer does
            not show that (also for keys that do not exist). Without it, every call asks the leader.
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
            `min_revision` is no revision, or is given together with `at`; or `timeout` is not over 0.
        RequestTimeoutError, nats.js.errors.ServiceUnavailableError: No answer, no leader, or no replica that has caught up
            with the leader, within `timeout`.
        MirrorAnswersError: Only a mirror answered within `timeout`.
        ResponseError: An answer is malformed.

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    wanted = check_keys(keys)
    if min_revision is not None:
        if at is not None:
            raise ValueError("give at or min_revision, not both")
        check_sequence(min_revision, "min_revision")
    bucket = Bucket(kv, timeout)
    with bucket.not_found():
        if at is None:
            content, left = Content(), list(wanted)

            def take(found: Block | Sequence[StoredMsg]) -> None:
                content.feed(updates_of(found, bucket.subjects(wanted.__contains__)))

            if min_revision is not None:
                left = await read_from_any(bucket, left, min_revision, take)
            if left:
                state = await bucket.readable_state()
                if min_revision is not None and state.last_seq < min_revision:
                    await wait_for_sequence(bucket.context, bucket.stream, min_revision, bucket.timeout)
                source = proved_reader(bucket, state, need=min_revision)
                await read_by_name(bucket, source, left, take)
                if source.replies > 1:
                    await bucket.check_same(state)
            held = content.values
            return {key: entry_of_record(bucket.name, key, held[key]) for key in wanted if key in held}
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
            present = await read_under_the_same_limits(
                bucket, bucket.readable_state, lambda state: read_now(bucket, patterns, state)
            )
            return _snapshot(bucket, present, include_deletes=include_deletes)
        verdict, point = await _read_past(bucket, matcher(patterns), patterns, at, strict=strict)
    entries = verdict.entries if include_deletes else _without_deleted(verdict.entries)
    return KeyValueSnapshot(
        {**entries},
        bucket=bucket.name,
        revision=point.revision,
        time=point.time,
        unavailable=verdict.unavailable,
        complete=verdict.complete,
    )


def _snapshot(bucket: Bucket, present: Present, *, include_deletes: bool) -> KeyValueSnapshot:
    content = present.content
    held: dict[str, KeyValueEntry | Record] = {**content.values, **(content.deleted if include_deletes else {})}
    return KeyValueSnapshot(held, bucket=bucket.name, revision=content.revision, time=present.time)


async def read_present(
    bucket: Bucket, point: ResolvedRevision, keys: Sequence[str], *, include_deletes: bool
) -> KeyValueSnapshot:
    """Return what the bucket of `point` holds now of `keys`, which clients may refuse."""
    patterns, wanted = list(keys) if all(map(can_be_asked_for, keys)) else [EVERYTHING], frozenset(keys).__contains__
    present = await read_under_the_same_limits(
        bucket, lambda: state_since(bucket, point), lambda state: read_now(bucket, patterns, state, wanted=wanted)
    )
    return _snapshot(bucket, present, include_deletes=include_deletes)


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


def _without_deleted(entries: dict[str, KeyValueEntry]) -> dict[str, KeyValueEntry]:
    return {key: entry for key, entry in entries.items() if entry.operation == "PUT"}


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

    verdict, point, state = await read_under_the_same_limits(bucket, bucket.readable_state, judge)
    what, keys = f"bucket {bucket.name!r} at revision {point.revision}", verdict.unavailable
    if strict and keys:
        shown = ", ".join(map(repr, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        raise HistoryUnavailableError(
            f"{what}: the history needed for {shown} is no longer stored; keep more history, or leave such keys out with "
            "snapshot(strict=False)",
            keys=keys,
        )
    if strict and verdict.lost:
        unknown = ""
        if known_since(state) is None:
            unknown = (
                ", and it is not known since when the bucket's limits hold (`await jetstream_ext.kv.enable(kv)` or "
                f"'{advice.enable_bucket_command(bucket.name)}' records that for later reads)"
            )
        raise HistoryUnavailableError(
            f"{what}: keys may be missing, because messages up to this revision may have expired or been purged"
            f"{unknown}; snapshot(strict=False) returns the rest"
        )
    return verdict, point


async def read_names(bucket: Bucket, point: ResolvedRevision, keys: Sequence[str], *, wild: bool) -> Verdict:
    """Return what is known of `keys` at a revision that was resolved earlier, perhaps by another process.

    With `wild`, the verdict says as well whether keys that are not among them may have been lost.

    Raises StreamRecreatedError, or as `snapshot` does.
    """
    subjects = bucket.subjects(frozenset(keys).__contains__)

    async def judge(state: StreamState) -> Verdict:
        return await _judge(
            bucket, proved_reader(bucket, state), subjects, state, point, named=keys, names=keys, wild=wild
        )

    return await read_under_the_same_limits(bucket, lambda: state_since(bucket, point), judge)


async def _judge_past(
    bucket: Bucket, subjects: Subjects, patterns: list[str], state: StreamState, point: ResolvedRevision
) -> Verdict:
    source = proved_reader(bucket, state)
    named = [pattern for pattern in patterns if is_literal(pattern)]
    wild = len(named) < len(patterns)
    names: list[str] | None = named
    if wild and point.revision >= state.lowest_seq:
        log = _is_small(state) or (patterns == [EVERYTHING] and not is_deep(state))
        names = None if log else await list_keys(bucket, patterns)
    return await _judge(bucket, source, subjects, state, point, named=named, names=names, wild=wild)


async def _judge(
    bucket: Bucket,
    source: ProvedReader,
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
        await check_end(bucket, state)
        return past.verdict(named=(), wild=False, missing=False, lost=False)
    missing, unexplained = 0, False
    if names is not None:
        known = await _feed_by_name(bucket, source, names, state, past)
        if known is not None:
            missing = known
        elif wild or past.uncertain(names):
            missing = point.revision if await _any_removed(bucket, source, state, point.revision) else 0
        if missing and _is_small(state):
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
    end = await check_end(bucket, state)
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
    bucket: Bucket, source: ProvedReader, names: Sequence[str], state: StreamState, past: Past
) -> int | None:
    """Feed what decides about each of `names`; return the highest sequence up to the revision that is missing, if known.

    That is the key's last message if it is old enough, else its last one up to the revision, else its oldest.
    """
    revision, first = past.revision, state.lowest_seq
    last = await read_newest(bucket, source, names, revision, past.feed)
    missing: int | None = None
    if min(revision - first, state.messages) <= _ROWS_PER_LOOKUP * len(last):
        gaps = await _read_log(source, first, revision, lambda block: past.feed(rows_of(block)))
        missing = gaps.highest
    else:
        await read_earlier(bucket, source, list(last), revision, past.feed)

    async def feed_oldest(key: str) -> None:
        if state.max_msgs_per_subject == 1:
            past.feed((last[key],))  # the key has no other message
        elif (oldest := await source.oldest_of(bucket.subject(key))) is not None:
            past.feed_oldest(row_of(oldest[0]), oldest[1])

    await gather_bounded(feed_oldest, [key for key in last if not past.knows(key)], limit=LOOKUPS_IN_FLIGHT)
    return missing


async def read_newest(
    bucket: Bucket,
    source: ProvedReader,
    keys: Sequence[str],
    revision: int,
    take: Callable[[Iterable[Row]], None],
) -> dict[str, Row]:
    """Pass the newest message of each of `keys` to `take` if it is not after `revision`; return the others by key."""
    later: dict[str, Row] = {}

    def divide(found: Block | Sequence[StoredMsg]) -> None:
        known = []
        for row in rows_of(found):
            if row[0] <= revision:
                known.append(row)
            else:
                later[row[1]] = row
        take(known)

    await read_by_name(bucket, source, keys, divide)
    return {key: row for key in keys if (row := later.get(bucket.subject(key))) is not None}


async def read_earlier(
    bucket: Bucket,
    source: ProvedReader,
    keys: Sequence[str],
    revision: int,
    take: Callable[[Iterable[Row]], None],
) -> None:
    """Pass the newest message up to `revision` of each of `keys` to `take`."""
    await read_by_name(bucket, source, keys, lambda found: take(rows_of(found)), up_to=revision)


async def _any_removed(bucket: Bucket, source: ProvedReader, state: StreamState, revision: int) -> bool:
    """Whether messages up to `revision` were, or may have been, removed."""
    if (await bucket.readable_state()).never_removed:
        return False
    if revision - state.lowest_seq >= _SMALL_LOG or state.size > _SMALL_BYTES:
        return True
    return (await _read_log(source, state.lowest_seq, revision)).highest > 0


async def _read_log(
    source: ProvedReader, first: int, last: int, take: Callable[[Block], None] = lambda _: None
) -> Gaps:
    """Hand over every stored message of ``first … last``; return the gaps between them."""
    gaps = Gaps(first, last)
    async for block in source.log(first, last):
        gaps.add(block.seqs)
        take(block)
    gaps.close()
    return gaps
