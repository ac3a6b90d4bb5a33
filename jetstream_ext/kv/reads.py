"""Reads of many keys, and of a bucket at one revision, in as few requests as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from nats.js.kv import KeyValue

from jetstream_ext.client.api import first_since, wait_for_sequence
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import (
    EVERYTHING,
    KeyValueEntry,
    KeyValueSnapshot,
    check_filters,
    check_keys,
    entry_of_record,
)
from jetstream_ext.kv.history import Past, PastContent, Reason, ResolvedRevision, deletes
from jetstream_ext.kv.present import (
    ProvedReader,
    check_end,
    last_records,
    read_by_name,
    read_from_any,
    read_now,
    read_under_the_same_limits,
    taking_last,
)
from jetstream_ext.protocol import advice
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.loss import Gaps
from jetstream_ext.protocol.options import check_sequence, rfc3339
from jetstream_ext.protocol.subjects import covering, is_literal, matcher
from jetstream_ext.protocol.updates import Record

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
    wanted = list(check_keys(keys))
    if min_revision is not None:
        if at is not None:
            raise ValueError("give at or min_revision, not both")
        check_sequence(min_revision, "min_revision")
    bucket = Bucket(kv, timeout)
    with bucket.not_found():
        if at is None:
            found = await _read_keys(bucket, wanted, min_revision)
        else:
            known, point = await _read_past(bucket, wanted, at)
            _check(bucket, point, known)
            found = known.records
    entries = (entry_of_record(bucket.name, key, found[key]) for key in wanted if key in found)
    return {entry.key: entry for entry in entries if entry.operation == "PUT"}


async def _read_keys(bucket: Bucket, keys: list[str], min_revision: int | None) -> dict[str, Record]:
    """Return the messages of `keys` now, from replicas that have what the leader has, or `min_revision`."""
    found: dict[str, Record] = {}
    take = taking_last(bucket, keys, found)
    if min_revision is not None and not (keys := await read_from_any(bucket, keys, min_revision, take)):
        return found
    state = await bucket.readable_state()
    if min_revision is not None and state.last_seq < min_revision:
        await wait_for_sequence(bucket.context, bucket.stream, min_revision, bucket.timeout)
    replies = await read_by_name(bucket, ProvedReader(bucket, min_revision or state.last_seq), keys, take)
    if replies > 1:
        await bucket.check_same(state)
    return found


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
            content, time = await read_under_the_same_limits(
                bucket, bucket.readable_state, lambda state: read_now(bucket, patterns, state)
            )
            return KeyValueSnapshot(
                {**content.values, **(content.deleted if include_deletes else {})},
                bucket=bucket.name,
                revision=content.revision,
                time=time,
            )
        known, point = await _read_past(bucket, patterns, at)
    if strict:
        _check(bucket, point, known)
    records = known.records
    return KeyValueSnapshot(
        {key: record for key, record in records.items() if include_deletes or not deletes(record)},
        bucket=bucket.name,
        revision=point.revision,
        time=point.time,
        unavailable=tuple(sorted(known.unavailable)),
        complete=known.complete,
    )


# -- the past ---------------------------------------------------------------------------------------------------------


async def resolve_revision(bucket: Bucket, state: StreamState, at: int | datetime) -> ResolvedRevision:
    """Return what `at` means, from the bucket's state now; raises as `get_many` does."""
    if isinstance(at, datetime):
        rfc3339(at, "at")
        when = at.astimezone(UTC)
        return ResolvedRevision(await _revision_at(bucket, state, when), when, when, state)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TypeError(f"at must be a revision or a datetime, not {type(at).__name__}")
    if check_sequence(at, "at") > state.last_seq:
        raise ValueError(f"bucket {bucket.name!r} has no revision {at} yet; its last is {state.last_seq}")
    if at == state.last_seq:
        return ResolvedRevision(at, state.last_time, state.now, state)
    message = await bucket.get_at_leader(seq=at, next_by_subj=">")
    time = state.last_time if message is None else message.time
    exact = message is not None and message.seq == at
    return ResolvedRevision(at, time, time if exact else state.created_at, state)


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


async def _read_past(bucket: Bucket, patterns: list[str], at: int | datetime) -> tuple[PastContent, ResolvedRevision]:
    """Return what is known of the keys that match `patterns` at `at`."""

    async def read(state: StreamState) -> tuple[PastContent, ResolvedRevision]:
        point = await resolve_revision(bucket, state, at)
        if point.revision > state.last_seq:
            state = await bucket.readable_state()  # `_revision_at` has waited for that time
        known = PastContent({}, {}) if point.revision < state.lowest_seq else None
        if known is None and point.is_newest:
            known = await _read_newest(bucket, patterns, state, point)
        if known is None and all(map(is_literal, patterns)):
            known = await _read_named(bucket, patterns, state, point)
        return known or await _read_log(bucket, patterns, state, point), point

    return await read_under_the_same_limits(bucket, bucket.readable_state, read)


async def _read_newest(
    bucket: Bucket, patterns: list[str], state: StreamState, point: ResolvedRevision
) -> PastContent | None:
    """Return what the bucket holds now, or None if something was stored since the revision was the newest one."""
    content, _ = await read_now(bucket, patterns, state)
    return PastContent({**content.values, **content.deleted}, {}) if content.revision == point.revision else None


async def _read_named(
    bucket: Bucket, keys: list[str], state: StreamState, point: ResolvedRevision
) -> PastContent | None:
    """Return what is known of `keys`; None if they do not all have a value that is still stored, and messages were removed."""
    reader = ProvedReader(bucket, state.last_seq)
    newest = await last_records(bucket, reader, keys)
    records = {key: record for key, record in newest.items() if record[0] <= point.revision}
    later = [key for key in newest if key not in records]
    if len(later) * _ROWS_PER_LOOKUP > state.messages:
        return None  # the log costs less
    records |= await last_records(bucket, reader, later, up_to=point.revision)
    end = await check_end(bucket, state)
    settled = end.never_removed or (len(records) == len(keys) and not any(map(deletes, records.values())))
    return PastContent(records, {}) if settled else None


async def _read_log(bucket: Bucket, patterns: list[str], state: StreamState, point: ResolvedRevision) -> PastContent:
    """Return what is known of the keys that match `patterns`, from the whole log.

    If nothing of it was ever removed, it decides nothing about other keys, and only the messages that match are read.
    """
    gaps = None if state.never_removed else Gaps(state.lowest_seq, state.last_seq)
    whole = gaps is not None or patterns == [EVERYTHING]
    subject = None if whole else covering(list(map(bucket.subject, patterns)))
    reader, past = ProvedReader(bucket, state.last_seq), Past(bucket.subjects(matcher(patterns)), point, gaps)
    async for block in reader.log(state.lowest_seq, state.last_seq, subject=subject):
        if gaps is not None:
            gaps.add(block.seqs)
        past.feed(block)
    if gaps is not None:
        gaps.close()
    await reader.catch_up(state.last_seq, past.feed)
    end = await check_end(bucket, state)
    if gaps is None and not end.never_removed:
        return await _read_log(bucket, patterns, end, point)
    named = [pattern for pattern in patterns if is_literal(pattern)]
    return past.judge(end, named=named, wild=len(named) < len(patterns))


def _check(bucket: Bucket, point: ResolvedRevision, known: PastContent) -> None:
    """Raise HistoryUnavailableError unless everything is known."""
    what, keys, reason = f"bucket {bucket.name!r} at revision {point.revision}", known.unavailable, known.reason
    advise = ""
    if Reason.LIMITS in (reason, *keys.values()):
        advise = (
            f" (`await jetstream_ext.kv.enable(kv)` or '{advice.enable_bucket_command(bucket.name)}' records that for later "
            "reads)"
        )
    if keys:
        names = sorted(keys)
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        raise HistoryUnavailableError(
            f"{what}: the value of {shown} is not known, because {keys[names[0]]}{advise}; keep more history, or leave "
            "such keys out with snapshot(strict=False)",
            keys=tuple(names),
        )
    if reason is not None:
        raise HistoryUnavailableError(
            f"{what}: keys may be missing, because {reason}{advise}; snapshot(strict=False) returns the rest"
        )
