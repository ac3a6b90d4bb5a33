"""Parts of a bucket at one revision R, each read by a task that knows nothing of the others.

Together the parts have every key once. The description of a part does not grow with the number of its keys.

**Classes of keys.** The hash of a key decides its class, so a key stays in its class whatever is written meanwhile. A task
lists the keys and reads those of its class by name, as `snapshot` does, or it reads the whole log as one range.

**Ranges of the log.** A key at R is its newest message up to R, which is in one of the ranges. With history 1, every
message of a range is the newest of its key. Otherwise a task asks for the newest message of each key in a block, and keeps
the rows that it has. It does so for a replicated stream as well, because a replica that lags still has messages that
others have replaced. Only one block is in memory.

That needs messages that are removed oldest first. If a newer message goes before an older one of its key, one range may
return the newer, and later another range the older. This happens if single messages have TTLs or are deleted by sequence.
A bucket with a history that allows either is not cut into ranges (`can_cut_log`): each task reads the whole log for a class
of keys.

If a key is written again after R, the bucket may remove its message before a task reads that, and no task knows whose range
had it. So every task reads at the end what was written after R. This shows every key that the task may have missed: assume
that a newer message of the key had replaced it. That one was stored after R and before the task came to the end of its
range. When the task reads what was written after R, it is stored, or a still newer one has replaced it and is read. So a
task may report a key that another task has read, but no key is missing without a report, and none is read twice. A task
that reads the whole log for a class remembers which keys it has read (as hashes), and reports no other key.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, Row, entry_of, operation, rows_of
from jetstream_ext.kv.history import Past, shows_expiry
from jetstream_ext.kv.proved_read import ProvedReader
from jetstream_ext.kv.reads import (
    ResolvedRevision,
    may_expire,
    may_have_vanished,
    read_earlier,
    read_names,
    read_newest,
    state_since,
)
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher

_KEYS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class KeyClass:
    """The keys whose hash is `number` modulo `of`."""

    number: int
    of: int

    def __contains__(self, key: str) -> bool:
        return zlib.crc32(key.encode("utf-8", "surrogateescape")) % self.of == self.number


@dataclass(frozen=True, slots=True)
class LogRange:
    """The keys whose newest message up to the revision has a sequence of ``first … last``.

    With `only`, those of one class; then it is the whole log (`whole_log`).
    """

    first: int
    last: int
    subject: str | None = None  # a filter for the server, which costs less than one here if few messages match
    only: KeyClass | None = None


def whole_log(point: ResolvedRevision, only: KeyClass | None = None, subject: str | None = None) -> LogRange:
    """Return the range that has every key of a revision."""
    return LogRange(min(point.state.first_seq, point.revision), point.revision, subject, only)


def can_cut_log(state: StreamState) -> bool:
    """Whether ranges of the log return each key once: older messages of a key never outlive newer ones."""
    oldest_first = state.config.get("deny_delete") and not state.config.get("allow_msg_ttl")
    return state.max_msgs_per_subject == 1 or bool(oldest_first)


def mean_size(state: StreamState) -> int:
    """Return the mean size of a stored message, at least 1."""
    return max(1, state.size // max(1, state.messages))


def keys_at_once(size: int) -> int:
    """Return how many keys a task asks for at once if a message has `size` bytes."""
    return max(1, min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // size))


@dataclass(frozen=True, slots=True)
class Found:
    """Some entries of a part, delete markers included, or what is not known of it.

    Attributes:
        entries: Entries.
        overwritten: Keys whose entries are not known, because the history that they need is no longer stored.
        deleted: The same; these are keys that are deleted now.
        vanished: Whether other keys may have expired or been purged without a trace.
    """

    entries: Sequence[KeyValueEntry] = ()
    overwritten: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    vanished: bool = False


async def read_class(
    bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str], part: KeyClass
) -> AsyncGenerator[Found, None]:
    """Yield the matching keys of a class, which the task lists and reads by name; raises what `snapshot` raises."""
    matches, wild = matcher(patterns), not all(map(is_literal, patterns))
    listed = await bucket.list_keys(patterns)
    named = list(filter(can_be_asked_for, listed))
    keys = [key for key in named if key in part]
    start, size = 0, mean_size(point.state)
    while names := keys[start : start + keys_at_once(size)]:
        verdict = await read_names(bucket, point, names, wild=False)
        entries = list(verdict.entries.values())
        yield Found(entries, verdict.unavailable)
        start += len(names)
        # These keys may have larger values than the rest of the bucket.
        size = max(size, sum(len(entry.value) for entry in entries) // len(names))
    # Also for a class without keys: they may have vanished, and the bucket may have been created again.
    verdict = await read_names(bucket, point, (), wild=wild)
    yield Found(vanished=verdict.lost)
    if len(named) < len(listed) and part.number == 0:
        # Any publisher can store keys that no request can name. One task reads the whole log for them.
        reader = _RangeReader(bucket, point, lambda key: not can_be_asked_for(key) and matches(key), remember=True)
        async with aclosing(reader.read(whole_log(point))) as found:
            async for some in found:
                yield some


async def read_range(
    bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str], part: LogRange
) -> AsyncGenerator[Found, None]:
    """Yield the matching keys of a range; raises what `snapshot` raises, and StreamConfigMismatchError for new replicas."""
    matches, only = matcher(patterns), part.only
    if only is None:
        reader = _RangeReader(bucket, point, matches)
        if point.state.max_msgs_per_subject == 1:
            yield await reader.missed()  # before the range is read in vain
    else:
        reader = _RangeReader(bucket, point, lambda key: key in only and matches(key), remember=True)
    async with aclosing(reader.read(part)) as found:
        async for some in found:
            yield some


def has_no_older_values(state: StreamState) -> bool:
    """Whether every message is the only one of its key, for each responder; a replica that lags still has older ones."""
    return state.max_msgs_per_subject == 1 and not state.replicated


async def newest_by_name(
    bucket: Bucket, source: ProvedReader, rows: Mapping[str, Row], state: StreamState, revision: int
) -> dict[str, Row]:
    """Return those of `rows` that are the newest of their keys up to a revision, if requests can name the keys."""
    found: dict[str, int] = {}  # by subject

    def take(messages: Iterable[Row]) -> None:
        for seq, subject, *_ in messages:
            found[subject] = max(seq, found.get(subject, 0))

    keys = [key for key in rows if can_be_asked_for(key)]
    later = await read_newest(bucket, source, keys, revision, take)
    await read_earlier(bucket, source, list(later), revision, take)
    return {key: row for key, row in rows.items() if found.get(row[1]) == row[0]}


async def newest_by_log(
    bucket: Bucket, source: ProvedReader, rows: Mapping[str, Row], last: int, revision: int
) -> dict[str, Row]:
    """Return those of `rows`, which are the newest of their keys up to `last`, that are the newest up to a revision."""
    newest = dict(rows)
    async for block in source.log(last + 1, revision):
        for _, subject, *_ in rows_of(block):
            newest.pop(subject.removeprefix(bucket.prefix), None)
    return newest


class _RangeReader:
    """Reads a range for one task; with `remember`, it reports only keys that it has not read."""

    def __init__(
        self, bucket: Bucket, point: ResolvedRevision, wanted: Callable[[str], bool], *, remember: bool = False
    ) -> None:
        self._bucket = bucket
        self._point = point
        self._subjects = bucket.subjects(wanted)
        self._source = bucket.reader(point.revision)
        self._read: array[int] | None = array("q") if remember else None  # the hashes of the keys
        self._expires = False  # whether a message showed that messages have TTLs of their own

    async def read(self, part: LogRange) -> AsyncGenerator[Found, None]:
        """Yield the entries, a block at a time, and at the end what may be missing."""
        name, remembered = self._bucket.name, self._read
        async with aclosing(self._rows(part)) as blocks:
            async for rows in blocks:
                if remembered is not None:
                    remembered.extend(map(hash, rows))
                yield Found([entry_of(name, key, row) for key, row in rows.items()])
        yield await self.missed()

    async def _rows(self, part: LogRange) -> AsyncGenerator[dict[str, Row], None]:
        """Yield the messages that decide their keys, by key."""
        state, key_of = self._point.state, self._subjects.key_of
        every_message_decides = has_no_older_values(state)
        unnamed: dict[str, Row] = {}  # the newest rows of keys that no request can name
        async with aclosing(self._source.log(part.first, part.last, subject=part.subject)) as blocks:
            async for block in blocks:
                rows: dict[str, Row] = {}
                for row in rows_of(block):
                    key = key_of(row[1])
                    if key is not None:
                        rows[key] = row
                        if row[3] and shows_expiry(row[3]):
                            self._expires = True
                if not every_message_decides:
                    unnamed |= {key: row for key, row in rows.items() if not can_be_asked_for(key)}
                    rows = await newest_by_name(self._bucket, self._source, rows, state, self._point.revision)
                yield rows
        if unnamed:
            yield await newest_by_log(self._bucket, self._source, unnamed, part.last, self._point.revision)

    async def missed(self) -> Found:
        """Return which keys have changed since the revision, so that what was read until now may lack them."""
        point, source, before = self._point, self._source, self._point.state
        state = await state_since(self._bucket, point)
        if state.replicated and not before.replicated:
            raise StreamConfigMismatchError(
                f"bucket {self._bucket.name!r}: replicas were added during the read, and they may have answered before they "
                "had all messages; repeat the read",
                diff={"num_replicas": (before.config.get("num_replicas"), state.config.get("num_replicas"))},
            )
        if state.last_seq == point.revision or state.never_removed:
            return Found()
        # If the limit was changed since, both may have removed messages.
        history = min(before.max_msgs_per_subject, state.max_msgs_per_subject)
        past, count = Past(self._subjects, revision=point.revision, history=history), 0
        deleted: set[str] = set()  # by subject

        def take(found: Block | list[StoredMsg]) -> None:
            nonlocal count
            count += len(found)
            rows = list(rows_of(found))
            past.feed(rows)
            for _, subject, _, headers, _ in rows:
                if headers and operation(headers)[0] != "PUT":
                    deleted.add(subject)
                else:
                    deleted.discard(subject)

        async for block in source.log(point.revision + 1, state.last_seq):
            take(block)
        newest = await source.catch_up(state.last_seq, take)
        end = await state_since(self._bucket, point)
        unread = end.last_seq - (state.last_seq if newest is None else newest.seq)
        if end.never_removed or (point.is_newest and end.messages - count - unread >= before.messages):
            return Found()  # as many messages up to the revision are stored as when it was the newest one
        past.expires |= self._expires
        expire = may_expire(end, past)
        # Keys whose values may have expired are reported only if it is known that this task has not read them.
        verdict = past.verdict(named=(), wild=True, missing=True, lost=False, expire=expire and self._read is not None)
        gone = await self._not_read(verdict.unavailable, stored_is_read=history > 1)
        return Found(
            overwritten=tuple(key for key in gone if self._bucket.subject(key) not in deleted),
            deleted=tuple(key for key in gone if self._bucket.subject(key) in deleted),
            vanished=past.emptied or may_have_vanished(end, past, point, expire=expire),
        )

    async def _not_read(self, keys: Sequence[str], *, stored_is_read: bool) -> Sequence[str]:
        """Return those of `keys` that this task may not have read: the others are remembered, or their values are stored."""
        if self._read is not None:
            wanted = set(map(hash, keys))
            read = set(filter(wanted.__contains__, self._read))
            return [key for key in keys if hash(key) not in read]
        if not stored_is_read:
            return keys
        bucket, stored = self._bucket, set[str]()  # by subject

        def take(messages: Iterable[Row]) -> None:
            stored.update(row[1] for row in messages)

        named = list(filter(can_be_asked_for, keys))
        await read_earlier(bucket, self._source, named, self._point.revision, take)
        return [key for key in keys if bucket.subject(key) not in stored]
