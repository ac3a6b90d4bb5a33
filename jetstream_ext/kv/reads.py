"""Many keys at once, and a bucket at one point in time, in as few requests as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from nats.js.kv import KeyValue

from jetstream_ext.client.concurrency import gather_bounded
from jetstream_ext.client.verified_read import VerifiedReader
from jetstream_ext.errors import HistoryUnavailableError, TooManySubjectsError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, KeyValueSnapshot, Record, Records, Subjects, record, records_of
from jetstream_ext.kv.history import Instant, Past, Verdict, find_instant
from jetstream_ext.kv.keys import EVERYTHING, check_filters, check_keys, is_literal, matcher
from jetstream_ext.kv.latest import Latest
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.gaps import Gaps
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState

_DEEP: Final = 3
"""From so many messages per key on, asking for the keys by name is cheaper than reading the whole log."""


async def get_many(
    kv: KeyValue,
    keys: Iterable[str],
    *,
    at: int | datetime | None = None,
    timeout: float | None = None,
) -> dict[str, KeyValueEntry]:
    """Return the entries of many keys; those that do not exist are left out.

    Without `at`, every entry is at least as new as what the bucket's leader had when the call began, so what this
    program wrote before is there; but two entries may be of two moments. With `at`, all are of that one. For a
    consistent read of now, take a `snapshot`.

    Args:
        kv: nats-py's bucket.
        keys: Any number of keys.
        at: A revision, or an aware datetime; None is now.
        timeout: Seconds to wait for each answer; None is the context's own.

    Returns:
        Key to entry, in the order of `keys`.

    Raises:
        nats.js.errors.InvalidKeyError: A key that no client would take; nothing was asked.
        DirectGetDisabledError: The bucket does not allow direct gets; `enable` turns them on.
        nats.js.errors.BadBucketError: The bucket is a mirror of another; read that one.
        HistoryUnavailableError: With `at`: what some keys were then is no longer stored. It names them.
        ValueError: `at` lies in the future, or is naive.
        RequestTimeoutError: No answer, or no responder that is up to date, within `timeout`.

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    wanted = check_keys(keys)
    bucket = Bucket(kv, timeout)
    subjects = Subjects(bucket.name, bucket.prefix, wanted.__contains__)
    state = await bucket.state()
    if at is None:
        latest = Latest(subjects)
        await by_name(bucket, bucket.reader(state.last_seq), list(wanted), latest.feed)
        found = latest.entries()
    else:
        instant = await find_instant(bucket, state, at)
        verdict = await _past(bucket, subjects, list(wanted), state, instant)
        _insist(bucket, verdict, instant)
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
    """Return a bucket, or the part of it that matches `filters`, as it was at one point in time.

    A snapshot of now is exact at its `revision`, however many keys there are and whoever writes meanwhile, and that
    revision is at least the one that the leader had when the call began. No consumer is created.

    A snapshot of the past is exact, or there is an error: see "Reads of the past" in the documentation for what is
    still known of a key whose history is short, was purged, or expired.

    Args:
        kv: nats-py's bucket.
        filters: Keys and patterns of keys (``*`` for a token, ``>`` for the rest); None is the whole bucket.
        at: A revision, or an aware datetime (that microsecond included); None is now.
        strict: Raise when the past cannot be told; False leaves those keys out and lists them in `unavailable`.
        include_deletes: Include the markers of deleted, purged and expired keys, where they are still stored.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.InvalidKeyError: A filter that is no pattern of keys; nothing was asked.
        DirectGetDisabledError: The bucket does not allow direct gets; `enable` turns them on.
        nats.js.errors.BadBucketError: The bucket is a mirror of another; read that one.
        HistoryUnavailableError: With `at`: what some keys were then is no longer stored. It names those that can be
            named.
        ValueError: `at` lies in the future, or is naive; or there are no filters.
        RequestTimeoutError: No answer, or no responder that is up to date, within `timeout`.

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    patterns = check_filters(filters)
    bucket = Bucket(kv, timeout)
    subjects = Subjects(bucket.name, bucket.prefix, matcher(patterns))
    state = await bucket.state()
    if at is None:
        return await _now(bucket, subjects, patterns, state, include_deletes=include_deletes)
    instant = await find_instant(bucket, state, at)
    verdict = await _past(bucket, subjects, patterns, state, instant)
    if strict:
        _insist(bucket, verdict, instant)
    return KeyValueSnapshot(
        verdict.entries if include_deletes else _without_deleted(verdict.entries),
        revision=instant.revision,
        time=instant.time,
        unavailable=verdict.unavailable,
        complete=verdict.complete and not verdict.lost,
    )


async def _now(
    bucket: Bucket, subjects: Subjects, patterns: list[str], state: StreamState, *, include_deletes: bool
) -> KeyValueSnapshot:
    source = bucket.reader(state.last_seq)
    latest = Latest(subjects, max_age=state.max_age)
    answer = await at_once(bucket, source, patterns, state)
    if answer is not None:
        latest.feed(records_of(answer))
        newest = answer.message(-1) if len(answer) else None
    else:
        names = None
        if patterns != [EVERYTHING] or state.messages >= _DEEP * state.num_subjects:
            names = await names_of(bucket, patterns)
        if names is None:
            async for block in source.log(state.lowest_seq, state.last_seq):
                latest.feed(records_of(block))
        else:
            await by_name(bucket, source, names, latest.feed)
        newest = await source.catch_up(state.last_seq, lambda block: latest.feed(records_of(block)))
    revision, time = state.last_seq, state.last_time
    if newest is not None and newest.seq > revision:
        revision, time = newest.seq, newest.time
    # In one answer the server has judged by itself what had expired.
    entries = latest.entries(None if answer is not None else time, include_deletes=include_deletes)
    return KeyValueSnapshot(entries, revision=revision, time=time)


async def _past(
    bucket: Bucket, subjects: Subjects, patterns: list[str], state: StreamState, instant: Instant
) -> Verdict:
    past = Past(subjects, revision=instant.revision, history=state.max_msgs_per_subject)
    if instant.revision < state.lowest_seq:
        return past.verdict(named=(), wild=False, missing=False, lost=False)
    if instant.revision > state.last_seq:
        state = await bucket.state()  # that moment was waited for
    source = bucket.reader(state.last_seq)
    named = [pattern for pattern in patterns if is_literal(pattern)]
    wild = len(named) < len(patterns)
    small = state.messages <= SMALL_LOG
    names: list[str] | None = named
    if wild:
        log = small or (patterns == [EVERYTHING] and state.messages < _DEEP * state.num_subjects)
        names = None if log else await names_of(bucket, patterns)
    missing = lost = False
    if names is not None:
        known = await past_by_name(bucket, source, names, state, past)
        if known is not False and (wild or past.uncertain(names)):
            missing = known or await any_missing(bucket, source, state, instant.revision)
        if missing and small:
            past = Past(subjects, revision=instant.revision, history=state.max_msgs_per_subject)
            names = None  # only the whole log tells whether the other keys' histories account for what is missing
        else:
            lost = _expiring(state, past, instant)
    if names is None:
        gaps = await whole_log(source, state, past)
        missing = 0 < gaps.lowest <= instant.revision
        # One that is newer than the revision may be the delete marker of a key that was there (`purge_deletes`).
        lost = gaps.highest > past.accounts_for() or _expiring(state, past, instant)
    if instant.present:
        # While a revision is the newest one, what expires in silence has been in its time and has not.
        return past.verdict(named=(), wild=wild, missing=missing, lost=False)
    return past.verdict(named=named, listed=names or (), wild=wild, missing=missing, lost=lost)


def _without_deleted(entries: dict[str, KeyValueEntry]) -> dict[str, KeyValueEntry]:
    return {key: entry for key, entry in entries.items() if entry.operation == "PUT"}


def _insist(bucket: Bucket, verdict: Verdict, instant: Instant) -> None:
    keys = verdict.unavailable
    what = f"bucket {bucket.name!r} at revision {instant.revision}"
    if keys:
        shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        raise HistoryUnavailableError(f"{what}: what is stored no longer tells the value of {shown}", keys=keys)
    if verdict.lost:
        raise HistoryUnavailableError(
            f"{what}: messages up to it were removed since (expired, or purged from the stream), "
            "and a key of which nothing is left could be missing"
        )


def _expiring(state: StreamState, past: Past, instant: Instant) -> bool:
    """Return whether keys may have expired since and left nothing behind."""
    markers_stay = min(state.marker_ttl or timedelta(0), state.max_age or timedelta.max)
    if state.now - instant.since < markers_stay:
        return False  # those of all that expired since are still there
    return past.expires or (state.max_age is not None and state.created_at + state.max_age < state.now)


_CHUNK: Final = 1_000
"""Keys per request. Servers answer for 1024 subjects; where one answers for fewer, a chunk is halved."""
_CHUNK_BYTES: Final = 128 * 1024
_CHUNKS_IN_FLIGHT: Final = 3
_LOOKS_IN_FLIGHT: Final = 64
_ROWS_PER_LOOK: Final = 40
"""So many rows of the log cost as much as looking for the last message of one key up to some revision."""
SMALL_LOG: Final = 16_000
"""So many messages are read at once: knowing is cheaper than working around not knowing."""

Take = Callable[[Records], None]


async def at_once(bucket: Bucket, source: VerifiedReader, patterns: list[str], state: StreamState) -> Block | None:
    """Return the one answer that has everything, or None: it would not fit."""
    if len(_cut_up(bucket, patterns)) > 1 or (patterns == [EVERYTHING] and state.num_subjects > _CHUNK):
        return None
    try:
        answer = await source.last_of([bucket.subject(pattern) for pattern in patterns])
    except TooManySubjectsError:
        return None
    return None if answer.pending else answer.block


async def names_of(bucket: Bucket, patterns: list[str]) -> list[str] | None:
    """Return the keys that match `patterns` now, and those that are keys; None: there are too many to list."""
    names = {pattern: None for pattern in patterns if is_literal(pattern)}
    cut = len(bucket.prefix)
    for pattern in patterns:
        if not is_literal(pattern):
            info = await bucket.info(subjects_filter=bucket.subject(pattern))
            listed = info["state"].get("subjects") or {}
            if int(info.get("total") or 0) > len(listed):
                return None
            if not all(map(is_literal, listed)):
                return None  # servers store a subject with a wildcard in it, but asking for it asks for what it matches
            names.update((subject[cut:], None) for subject in listed)
    return list(names)


async def by_name(
    bucket: Bucket, source: VerifiedReader, keys: Sequence[str], take: Take, *, up_to: StoredMsg | None = None
) -> None:
    """Hand over the last message of each of `keys`, in chunks of one moment each.

    Args:
        bucket: The bucket.
        source: The verified reader to ask.
        keys: The keys.
        take: Takes the messages, among which may be one of another key.
        up_to: Look no further than this message; see `VerifiedReader.last_of`.

    Raises:
        LookupError: `up_to` is not stored any more.
    """

    async def read(chunk: Sequence[str]) -> None:
        alone = len(chunk) == 1
        try:
            answer = await source.last_of([bucket.subject(key) for key in chunk], up_to=up_to, limited=not alone)
        except TooManySubjectsError:
            if alone:
                raise
        else:
            if not answer.pending:
                take(records_of(answer.block))
                return
        half = len(chunk) // 2
        await read(chunk[:half])
        await read(chunk[half:])

    await gather_bounded(read, _cut_up(bucket, keys), limit=_CHUNKS_IN_FLIGHT)


def _cut_up(bucket: Bucket, keys: Sequence[str]) -> list[Sequence[str]]:
    """Return `keys` in chunks that one request has room for."""
    room = min(_CHUNK_BYTES, bucket.js.connection.max_payload // 4)
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


async def past_by_name(
    bucket: Bucket, source: VerifiedReader, names: Sequence[str], state: StreamState, past: Past
) -> bool | None:
    """Feed what decides about each of `names` at the revision of `past`.

    Its last message, where that is old enough; else the last one up to the revision; else its oldest.

    Returns:
        Whether messages up to the revision are missing; None: it did not turn out.
    """
    revision, cut = past.revision, len(bucket.prefix)
    last: dict[str, Record] = {}

    def take(records: Records) -> None:
        for row in records:
            found = Record(*row)
            if found.seq <= revision:
                past.feed((found,))
            else:
                last[found.subject[cut:]] = found

    await by_name(bucket, source, names, take)
    moved = [key for key in names if key in last]
    missing: bool | None = None
    if min(revision - state.lowest_seq, state.messages) <= _ROWS_PER_LOOK * len(moved):
        missing = await _read_log(source, state, past)
    else:
        await _look_back(bucket, source, moved, state, past)

    async def look(key: str) -> None:
        if state.max_msgs_per_subject == 1:
            past.feed((last[key],))  # it is the only one
        elif (oldest := await source.oldest_of(bucket.subject(key), revision)) is not None:
            past.feed_oldest(record(oldest[0]), oldest[1])

    await gather_bounded(look, [key for key in moved if not past.knows(key)], limit=_LOOKS_IN_FLIGHT)
    return missing


async def _read_log(source: VerifiedReader, state: StreamState, past: Past) -> bool:
    """Feed the whole log up to the revision; return whether messages of it are missing."""
    gaps = Gaps(state.lowest_seq, past.revision)
    async for block in source.log(state.lowest_seq, past.revision):
        gaps.add(block.seqs)
        past.feed(records_of(block))
    gaps.close()
    return gaps.highest > 0


async def _look_back(
    bucket: Bucket, source: VerifiedReader, keys: Sequence[str], state: StreamState, past: Past
) -> None:
    """Feed the last message up to the revision of each of `keys`."""
    while keys and (newest := await source.newest_up_to(past.revision, state.lowest_seq)) is not None:
        try:
            await by_name(bucket, source, keys, past.feed, up_to=newest)
            return
        except LookupError:
            pass  # removed just now; as nothing is ever added there, this comes to an end


async def whole_log(source: VerifiedReader, state: StreamState, past: Past) -> Gaps:
    """Feed every message that there is; return what is missing of those that there were when the read began."""
    gaps = Gaps(state.lowest_seq, state.last_seq)

    def take(block: Block) -> None:
        gaps.add(block.seqs)
        past.feed(records_of(block), log=True)

    async for block in source.log(state.lowest_seq, state.last_seq):
        take(block)
    await source.catch_up(state.last_seq, take)
    gaps.close()
    return gaps


async def any_missing(bucket: Bucket, source: VerifiedReader, state: StreamState, revision: int) -> bool:
    """Return whether messages up to `revision` were removed, or may have been."""
    if (await bucket.state()).never_removed:
        return False
    if revision - state.lowest_seq >= SMALL_LOG:
        return True
    gaps = Gaps(state.lowest_seq, revision)
    async for block in source.log(state.lowest_seq, revision):
        gaps.add(block.seqs)
    gaps.close()
    return gaps.highest > 0
