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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from jetstream_ext.client.api import settled_state
from jetstream_ext.errors import RequestTimeoutError, StreamConfigMismatchError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import (
    EVERYTHING,
    KeyValueEntry,
    Subjects,
    entry_of_record,
    records_of,
)
from jetstream_ext.kv.history import Past, ResolvedRevision, deletes, shows_expiry
from jetstream_ext.kv.present import ProvedReader, last_records, read_now, read_under_the_same_limits
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.headers import decode_stored
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher
from jetstream_ext.protocol.updates import Record

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
        vanished: Why other keys may have disappeared without a trace; "" if they cannot.
    """

    entries: Sequence[KeyValueEntry] = ()
    overwritten: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    vanished: str = ""


async def read_part(
    bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str], part: KeyClass | LogRange
) -> AsyncGenerator[Found, None]:
    """Yield the matching keys of a part; raises what `snapshot` raises, and StreamConfigMismatchError for new replicas."""
    if isinstance(part, KeyClass):
        reader = _PartReader(bucket, point, patterns, part)
        found = reader.read_class(part)
    else:
        reader = _PartReader(bucket, point, patterns, part.only)
        if part.only is None and point.state.max_msgs_per_subject == 1:
            yield await reader.missed()  # before the range is read in vain
        found = reader.read_range(part)
    async with aclosing(found) as pieces:
        async for records in pieces:
            yield Found([entry_of_record(bucket.name, key, record) for key, record in records.items()])
    yield await reader.missed()


async def read_present(bucket: Bucket, point: ResolvedRevision, keys: Sequence[str]) -> list[KeyValueEntry]:
    """Return what the bucket of `point` holds now of `keys`, delete markers included."""
    patterns = list(keys) if all(map(can_be_asked_for, keys)) else [EVERYTHING]
    content, _ = await read_under_the_same_limits(
        bucket, lambda: _state_since(bucket, point), lambda state: read_now(bucket, patterns, state)
    )
    records = content.values | content.deleted
    return [entry_of_record(bucket.name, key, records[key]) for key in keys if key in records]


async def _state_since(bucket: Bucket, point: ResolvedRevision) -> StreamState:
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


def has_no_older_values(state: StreamState) -> bool:
    """Whether every message is the only one of its key, for each responder; a replica that lags still has older ones."""
    return state.max_msgs_per_subject == 1 and not state.replicated


async def newest_rows(
    bucket: Bucket,
    source: ProvedReader,
    blocks: AsyncGenerator[Block, None],
    state: StreamState,
    *,
    last: int,
    revision: int,
    key_of: Callable[[str], str | None],
) -> AsyncGenerator[dict[str, Record], None]:
    """Yield, for each of `blocks` up to the sequence `last`, the messages that are the newest of their keys up to a revision.

    Keys that no request can name come last.
    """
    every_message_decides = has_no_older_values(state)
    unnamed: dict[str, Record] = {}
    async with aclosing(blocks):
        async for block in blocks:
            rows: dict[str, Record] = {}
            for name, record in records_of(block):
                if (key := key_of(name)) is not None:
                    rows.pop(key, None)  # in the order of the revisions
                    rows[key] = record
            if not every_message_decides:
                unnamed |= {key: record for key, record in rows.items() if not can_be_asked_for(key)}
                newest = await _up_to(bucket, source, list(filter(can_be_asked_for, rows)), revision)
                rows = {key: record for key, record in rows.items() if key in newest and newest[key][0] == record[0]}
            yield rows
    if unnamed:
        async for block in source.log(last + 1, revision):
            for name, _ in records_of(block):
                unnamed.pop(bucket.key(name), None)
        yield unnamed


async def _up_to(bucket: Bucket, source: ProvedReader, keys: Sequence[str], revision: int) -> dict[str, Record]:
    """Return the newest message up to a revision of each of `keys` that has one."""
    newest = await last_records(bucket, source, keys)
    found = {key: record for key, record in newest.items() if record[0] <= revision}
    later = [key for key in newest if key not in found]
    return found | await last_records(bucket, source, later, up_to=revision)


class _PartReader:
    """Reads a part for one task.

    With `only`, the class of keys that the task has for itself, it reports only keys that it has not read.
    """

    def __init__(self, bucket: Bucket, point: ResolvedRevision, patterns: Sequence[str], only: KeyClass | None) -> None:
        self._bucket = bucket
        self._point = point
        self._patterns = patterns
        matches = matcher(patterns)
        self._subjects = bucket.subjects(matches if only is None else lambda key: key in only and matches(key))
        self._named = [] if only is None else [key for key in patterns if is_literal(key) and key in only]
        self._source = ProvedReader(bucket, point.revision)
        self._read: array[int] | None = None if only is None else array("q")  # the hashes of the keys
        self._expires = False  # whether a message showed that messages have TTLs of their own

    async def read_class(self, part: KeyClass) -> AsyncGenerator[dict[str, Record], None]:
        """Yield the records of the keys of a class, which the task lists and reads by name."""
        bucket, point = self._bucket, self._point
        listed = await bucket.list_keys(self._patterns)
        named = list(filter(can_be_asked_for, listed))
        keys = [key for key in named if key in part]
        start, size = 0, mean_size(point.state)
        while names := keys[start : start + keys_at_once(size)]:
            records = await _up_to(bucket, self._source, names, point.revision)
            yield self._note(records)
            start += len(names)
            # These keys may have larger values than the rest of the bucket.
            size = max(size, sum(len(record[1]) for record in records.values()) // len(names))
        if len(named) < len(listed):
            # Any publisher can store keys that no request can name: the task reads the whole log for them.
            unnamed = bucket.subjects(lambda key: not can_be_asked_for(key) and self._subjects.wanted(key))
            async with aclosing(self.read_range(whole_log(point), unnamed)) as pieces:
                async for records in pieces:
                    yield records

    async def read_range(
        self, part: LogRange, subjects: Subjects | None = None
    ) -> AsyncGenerator[dict[str, Record], None]:
        """Yield the records that decide their keys, a block at a time."""
        rows = newest_rows(
            self._bucket, self._source, self._source.log(part.first, part.last, subject=part.subject),
            self._point.state, last=part.last, revision=self._point.revision, key_of=(subjects or self._subjects).key_of,
        )  # fmt: skip
        async with aclosing(rows):
            async for records in rows:
                yield self._note(records)

    def _note(self, records: Mapping[str, Record]) -> dict[str, Record]:
        if self._read is not None:
            self._read.extend(map(hash, records))
        self._expires = self._expires or any(
            record[3] and shows_expiry(decode_stored(record[3])) for record in records.values()
        )
        return dict(records)

    async def missed(self) -> Found:
        """Return which keys have changed since the revision, so that what was read until now may lack them."""
        point, before = self._point, self._point.state
        state = await _state_since(self._bucket, point)
        if state.replicated and not before.replicated:
            raise StreamConfigMismatchError(
                f"bucket {self._bucket.name!r}: replicas were added during the read, and they may have answered before they "
                "had all messages; repeat the read",
                diff={"num_replicas": (before.config.get("num_replicas"), state.config.get("num_replicas"))},
            )
        if state.last_seq == point.revision or state.never_removed:
            return Found()
        past, now = Past(self._subjects, point), dict[str, bool]()  # whether a key is deleted

        def take(found: Block | Sequence[StoredMsg]) -> None:
            past.feed(found)
            for name, record in records_of(found):
                if (key := self._subjects.key_of(name)) is not None:
                    now[key] = deletes(record)

        async for block in self._source.log(point.revision + 1, state.last_seq):
            take(block)
        await self._source.catch_up(state.last_seq, take)
        end = await _state_since(self._bucket, point)
        if point.is_newest and end.removed == before.removed:
            return Found()
        past.expires |= self._expires
        # If the limit was changed since, both may have removed messages.
        history = min(before.max_msgs_per_subject, end.max_msgs_per_subject)
        content = past.judge(end, history=history, named=self._named, wild=True)
        gone = await self._not_read(list(content.unavailable))
        return Found(
            overwritten=tuple(key for key in gone if not now.get(key)),
            deleted=tuple(key for key in gone if now.get(key)),
            vanished=content.reason or "",
        )

    async def _not_read(self, keys: Sequence[str]) -> Sequence[str]:
        """Return those of `keys` that no task can have read: the others are remembered, or their values are stored."""
        if self._read is not None:
            wanted = set(map(hash, keys))
            read = set(filter(wanted.__contains__, self._read))
            return [key for key in keys if hash(key) not in read]
        if self._point.state.max_msgs_per_subject == 1:
            return keys
        stored = await _up_to(self._bucket, self._source, list(filter(can_be_asked_for, keys)), self._point.revision)
        return [key for key in keys if key not in stored]
