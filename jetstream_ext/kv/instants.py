"""Which revision a point in time is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from jetstream_ext.kv.bucket import Bucket, Facts
from jetstream_ext.protocol.options import rfc3339

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of a bucket's history."""

    revision: int
    time: datetime
    since: datetime
    """A time that is certainly not later."""
    present: bool
    """Nothing had been written since when the leader was asked."""


async def find_instant(bucket: Bucket, facts: Facts, at: int | datetime) -> Instant:
    """Return the point in time that a caller's `at` means.

    Raises:
        ValueError: It lies in the future, or is no revision, or a naive datetime.
        TypeError: It is neither a revision nor a datetime.
    """
    if isinstance(at, datetime):
        rfc3339(at, "at")
        when = at.astimezone(UTC)
        return Instant(await _revision_at(bucket, facts, when), when, since=when, present=False)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TypeError(f"at must be a revision or a datetime, not {type(at).__name__}")
    if at < 1:
        raise ValueError(f"a revision is an integer from 1 up, not {at}")
    if at > facts.last:
        raise ValueError(f"bucket {bucket.name!r} has no revision {at} yet; its last is {facts.last}")
    if at == facts.last:
        return Instant(at, facts.last_time, since=facts.last_time, present=True)
    message = await bucket.at_leader(seq=at, next_by_subj=">")
    time = facts.last_time if message is None else message.time
    exact = message is not None and message.seq == at
    return Instant(at, time, since=time if exact else facts.created, present=False)


async def _revision_at(bucket: Bucket, facts: Facts, when: datetime) -> int:
    """Return the last revision stored up to `when`, that microsecond included."""
    ahead = (when - facts.now).total_seconds()
    if ahead > bucket.timeout:
        raise ValueError(f"at lies in the future: the server's clock is {facts.now.isoformat()}")
    if ahead >= 0:
        # Clocks differ a little. What is stored up to then is known only once the server is past it.
        await asyncio.sleep(ahead + 0.001)
        facts = await bucket.facts()
        if facts.now <= when:
            raise ValueError(f"at lies in the future: the server's clock is {facts.now.isoformat()}")
    after = when + _MICROSECOND
    if facts.last_time < after:
        return facts.last
    found = await bucket.at_leader(start_time=after.isoformat())
    # A time beyond the last message makes some servers answer with an earlier one.
    if found is None or found.time < after:
        return facts.last
    return found.seq - 1
