"""Parts of a bucket at one revision R, each read by a task that knows nothing of the others.

Together the parts have every key once. The description of a part does not grow with the number of its keys.

**Classes of keys.** The hash of a key decides its class, so a key stays in its class whatever is written meanwhile. A task
lists the keys itself and reads those of its class by name, or it reads the whole log. What is known of R is decided as for
`snapshot`. If the value of a key is gone, the task can read the present one.

**Ranges of the log.** A key at R is its newest message up to R, which is in one of the ranges. With history 1, every
message of a range is the newest of its key. Otherwise a task asks for the newest message of each key in a block, and keeps
the rows that it has. It does so for a replicated stream as well, because a replica that lags still has messages that
others have replaced. Only one block is in memory.

If a key is written again after R, the bucket may remove its message before a task reads that, and no task knows whose range
had it. So every task reads at the end what was written after R (`RangeReader.changes`). This shows every key that the task
may have missed: assume that a newer message of the key had replaced it. That one was stored after R and before the task
came to the end of its range. When the task reads what was written after R, it is stored, or a still newer one has replaced
it and is read. So a task may report a key that another task has read, but no key is missing without a report, and none is
read twice.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, Row, entry_of, operation, rows_of
from jetstream_ext.kv.history import Past, Verdict, shows_expiry
from jetstream_ext.kv.reads import (
    ResolvedRevision,
    may_expire,
    may_have_vanished,
    read_earlier,
    read_newest,
    read_part,
    state_since,
)
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher

_KEYS_AT_ONCE: Final = 10_000


@dataclass(frozen=True, slots=True)
class KeyClass:
    """The keys whose hash is `number` modulo `of`; the task lists them and reads them by name, or reads the whole log."""

    number: int
    of: int
    by_name: bool

    def __contains__(self, key: str) -> bool:
        return zlib.crc32(key.encode("utf-8", "surrogateescape")) % self.of == self.number


@dataclass(frozen=True, slots=True)
class LogRange:
    """The keys whose newest message up to the revision has a sequence of ``first … last``."""

    first: int
    last: int
    subject: str | None = None  # a filter for the server, which costs less than one here if few messages match


async def read_class(
    bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str], part: KeyClass
) -> AsyncGenerator[Verdict, None]:
    """Yield what is known of the keys of a class that match; if they are read by name, some at a time."""
    matches = matcher(patterns)
    wild = not all(map(is_literal, patterns))
    if not part.by_name:
        yield await read_part(bucket, point, lambda key: key in part and matches(key), None, wild=wild)
        return
    listed = await bucket.list_keys(patterns)
    named = list(filter(can_be_asked_for, listed))
    keys = [key for key in named if key in part]
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        yield await read_part(bucket, point, frozenset(some).__contains__, some, wild=wild)
    if len(named) < len(listed) and part.number == 0:
        # Any publisher can store keys that no request can name. One task reads the whole log for them.
        yield await read_part(bucket, point, lambda key: not can_be_asked_for(key) and matches(key), None, wild=wild)


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since the revision of a range, so that the range may lack keys.

    Attributes:
        overwritten: Keys that have another value now, and of which the history then is no longer stored.
        deleted: The same of keys that are deleted now.
        vanished: Whether keys may have vanished and left no message: they expired, or were purged.
    """

    overwritten: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    vanished: bool = False


class RangeReader:
    """Reads a range of a bucket's log, for one task; raises what `snapshot` raises."""

    def __init__(self, bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str]) -> None:
        self._bucket = bucket
        self._point = point
        self._subjects = bucket.subjects(matcher(patterns))
        self._source = bucket.reader(point.revision)
        self._source.before = point.state
        self._expires = False  # whether a message showed that messages have TTLs of their own

    async def entries(self, part: LogRange) -> AsyncGenerator[list[KeyValueEntry], None]:
        """Yield the entries of the range, delete markers included, some at a time (perhaps none)."""
        state, name, key_of = self._point.state, self._bucket.name, self._subjects.key_of
        every_message_counts = state.max_msgs_per_subject == 1 and not state.replicated
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
                if not every_message_counts:
                    unnamed |= {key: row for key, row in rows.items() if not can_be_asked_for(key)}
                    rows = await self._newest(rows)
                yield [entry_of(name, key, row) for key, row in rows.items()]
        if unnamed:
            async for block in self._source.log(part.last + 1, self._point.revision):
                for _, subject, *_ in rows_of(block):
                    unnamed.pop(subject.removeprefix(self._bucket.prefix), None)
            yield [entry_of(name, key, row) for key, row in unnamed.items()]

    async def _newest(self, rows: dict[str, Row]) -> dict[str, Row]:
        """Return those of `rows` that are the newest of their keys up to the revision, if requests can name the keys."""
        found: dict[str, int] = {}  # by subject

        def take(messages: Iterable[Row]) -> None:
            for seq, subject, *_ in messages:
                found[subject] = max(seq, found.get(subject, 0))

        bucket, source, revision = self._bucket, self._source, self._point.revision
        keys = [key for key in rows if can_be_asked_for(key)]
        later = await read_newest(bucket, source, keys, revision, take)
        await read_earlier(bucket, source, list(later), self._point.state.lowest_seq, revision, take)
        return {key: row for key, row in rows.items() if found.get(row[1]) == row[0]}

    async def changes(self) -> Changes:
        """Return what has changed since the revision, so that what was read may lack keys.

        Raises StreamConfigMismatchError if replicas were added, which may not have had everything.
        """
        point, source, before = self._point, self._source, self._point.state
        state = await state_since(self._bucket, point)
        if state.replicated and not before.replicated:
            raise StreamConfigMismatchError(
                f"bucket {self._bucket.name!r}: replicas were added during the read, and they may have answered before they "
                "had all messages; repeat the read",
                diff={"num_replicas": (before.config.get("num_replicas"), state.config.get("num_replicas"))},
            )
        if state.last_seq == point.revision or state.never_removed:
            return Changes()
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
            return Changes()  # as many messages up to the revision are stored as when it was the newest one
        past.expires |= self._expires
        vanished = past.emptied or may_have_vanished(end, past, point, expire=may_expire(end, past))
        # A value that expired counts as vanished, whether or not its key was written again.
        gone = past.verdict(named=(), wild=True, missing=True, lost=False).unavailable
        if gone and history > 1:
            gone = await self._not_stored(gone)
        overwritten = tuple(key for key in gone if self._bucket.subject(key) not in deleted)
        return Changes(overwritten, tuple(key for key in gone if self._bucket.subject(key) in deleted), vanished)

    async def _not_stored(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Return those of `keys` of which no message up to the revision is stored, or no request can name them."""
        bucket, stored = self._bucket, set[str]()  # by subject

        def take(messages: Iterable[Row]) -> None:
            stored.update(row[1] for row in messages)

        named = list(filter(can_be_asked_for, keys))
        first, revision = self._point.state.lowest_seq, self._point.revision
        await read_earlier(bucket, self._source, named, first, revision, take)
        return tuple(key for key in keys if bucket.subject(key) not in stored)
