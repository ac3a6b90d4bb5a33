"""Many keys at once, and a bucket at one point in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from nats.js.kv import KeyValue

from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv.bucket import Bucket, Facts
from jetstream_ext.kv.gathering import SMALL_LOG, any_missing, at_once, by_name, names_of, past_by_name, whole_log
from jetstream_ext.kv.instants import Instant, find_instant
from jetstream_ext.kv.keys import EVERYTHING, check_filters, check_keys, is_literal, matcher
from jetstream_ext.kv.latest import Latest
from jetstream_ext.kv.messages import Subjects
from jetstream_ext.kv.past import Past, Verdict
from jetstream_ext.kv.source import Source
from jetstream_ext.kv.values import KeyValueEntry, KeyValueSnapshot

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
        RequestTimeoutError: No answer, or nobody who is up to date, within `timeout`.

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    wanted = check_keys(keys)
    bucket = Bucket(kv, timeout)
    subjects = Subjects(bucket.name, bucket.prefix, wanted.__contains__)
    facts = await bucket.facts()
    if at is None:
        latest = Latest(subjects)
        await by_name(bucket, Source(bucket, facts.last), list(wanted), latest.feed)
        found = latest.entries()
    else:
        instant = await find_instant(bucket, facts, at)
        verdict = await _past(bucket, subjects, list(wanted), facts, instant)
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
        RequestTimeoutError: No answer, or nobody who is up to date, within `timeout`.

    Cancellation: Safe; nothing is left behind.

    Requires: nats-server 2.11, ``allow_direct``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
    """
    patterns = check_filters(filters)
    bucket = Bucket(kv, timeout)
    subjects = Subjects(bucket.name, bucket.prefix, matcher(patterns))
    facts = await bucket.facts()
    if at is None:
        return await _now(bucket, subjects, patterns, facts, include_deletes=include_deletes)
    instant = await find_instant(bucket, facts, at)
    verdict = await _past(bucket, subjects, patterns, facts, instant)
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
    bucket: Bucket, subjects: Subjects, patterns: list[str], facts: Facts, *, include_deletes: bool
) -> KeyValueSnapshot:
    source = Source(bucket, facts.last)
    latest = Latest(subjects, max_age=facts.max_age)
    answer = await at_once(bucket, source, patterns, facts)
    if answer is not None:
        latest.feed(answer.records)
        newest = answer.records[-1] if len(answer.records) else None
    else:
        names = None
        if patterns != [EVERYTHING] or facts.messages >= _DEEP * facts.keys:
            names = await names_of(bucket, patterns)
        if names is None:
            async for records in source.log(facts.first, facts.last):
                latest.feed(records)
        else:
            await by_name(bucket, source, names, latest.feed)
        newest = await source.catch_up(facts.last, latest.feed)
    revision, time = facts.last, facts.last_time
    if newest is not None and newest.seq > revision:
        revision, time = newest.seq, newest.time
    # In one answer the server has judged by itself what had expired.
    entries = latest.entries(None if answer is not None else time, include_deletes=include_deletes)
    return KeyValueSnapshot(entries, revision=revision, time=time)


async def _past(bucket: Bucket, subjects: Subjects, patterns: list[str], facts: Facts, instant: Instant) -> Verdict:
    past = Past(subjects, revision=instant.revision, history=facts.history)
    if instant.revision < facts.first:
        return past.verdict(named=(), wild=False, missing=False, lost=False)
    if instant.revision > facts.last:
        facts = await bucket.facts()  # that moment was waited for
    source = Source(bucket, facts.last)
    named = [pattern for pattern in patterns if is_literal(pattern)]
    wild = len(named) < len(patterns)
    small = facts.messages <= SMALL_LOG
    names: list[str] | None = named
    if wild:
        log = small or (patterns == [EVERYTHING] and facts.messages < _DEEP * facts.keys)
        names = None if log else await names_of(bucket, patterns)
    missing = lost = False
    if names is not None:
        known = await past_by_name(bucket, source, names, facts, past)
        if known is not False and (wild or past.uncertain(names)):
            missing = known or await any_missing(bucket, source, facts, instant.revision)
        if missing and small:
            past = Past(subjects, revision=instant.revision, history=facts.history)
            names = None  # only the whole log tells whether the other keys' histories account for what is missing
        else:
            lost = _expiring(facts, past, instant)
    if names is None:
        holes = await whole_log(source, facts, past)
        missing = 0 < holes.lowest <= instant.revision
        # One that is newer than the revision may be the delete marker of a key that was there (`purge_deletes`).
        lost = holes.highest > past.accounts_for() or _expiring(facts, past, instant)
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


def _expiring(facts: Facts, past: Past, instant: Instant) -> bool:
    """Return whether keys may have expired since and left nothing behind."""
    markers_stay = min(facts.marker_ttl or timedelta(0), facts.max_age or timedelta.max)
    if facts.now - instant.since < markers_stay:
        return False  # those of all that expired since are still there
    return past.expires or (facts.max_age is not None and facts.created + facts.max_age < facts.now)
