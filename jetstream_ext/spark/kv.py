"""A bucket as a table, as of one revision R: how the driver cuts it into parts, and how a task reads one of them.

A task knows nothing of the others, and together they return every key once. The description of a part does not grow with the
number of its keys, and the driver lists none.

**Classes of keys.** The hash of a key decides its class, so a key stays in its class whatever is written meanwhile. A task
lists the keys and reads those of its class by name, or, of more keys than it should list, reads the whole log. It knows which
keys it has returned, so it can return the present value of a key whose value at R is gone.

**Ranges of the log**, for large buckets. A key at R is its newest message up to R, which is in one of the ranges (see
`buckets.newest_rows`). If a key is written again after R, the bucket may remove its message before a task reads that, and no
task knows whose range had it. That is an error of every task, because each reads at the end what was written after R: the
message was replaced by one that is stored then, or by a still newer one. Only one block is in memory.

Ranges need messages that are removed oldest first. If a newer message goes before an older one of its key (a TTL of its own, a
message that is deleted by sequence), one task may have returned the newer, and later another task the older. So a bucket with
a history that allows either is read by classes of keys, however large it is.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from nats.js import JetStreamContext
from pyspark.sql.types import StructType

from jetstream_ext.client.api import wait_for_sequence
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import HistoryUnavailableError, StreamConfigMismatchError
from jetstream_ext.kv import KeyValueEntry
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import EVERYTHING, Subjects
from jetstream_ext.kv.history import Past, PastContent, Reason, ResolvedRevision, shows_expiry
from jetstream_ext.kv.present import ProvedReader
from jetstream_ext.kv.reads import resolve_revision
from jetstream_ext.protocol.advice import enable_bucket_command
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.headers import decode_stored
from jetstream_ext.protocol.subjects import can_be_asked_for, is_literal, matcher
from jetstream_ext.protocol.updates import Record
from jetstream_ext.spark.buckets import bucket_state, entries_of, newest_rows, record_batches, records_up_to
from jetstream_ext.spark.connection import ask, connected
from jetstream_ext.spark.options import KvOptions
from jetstream_ext.spark.planning import PlanningError, cut, measure
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.text import counted, get_logger, log_state

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_log = get_logger("spark")

# Up to so many keys, each task lists all of them. The server sends so many at a time, and sorts them for each request.
_MOST_LISTED: Final = 100_000
_LISTED_PER_PARTITION: Final = 50_000
_BYTES_PER_PARTITION: Final = 256 << 20
# A log of up to so many messages and bytes is read by each task as a whole, but by so many tasks at most.
_SMALL_LOG: Final = 1_000_000
_SMALL_BYTES: Final = 512 << 20
_MOST_WHOLE_READS: Final = 8
_KEYS_OF_A_CLASS: Final = 500_000  # a task that reads the whole log holds the names of its keys
_MESSAGES_PER_RANGE: Final = 1_000_000
# So many revisions after that of ``asOf``, each task that reads a range keeps the keys that were written since in memory.
_MOST_CHANGES: Final = 1_000_000
# A task asks for so many keys and bytes at once.
_KEYS_AT_ONCE: Final = 10_000
_BYTES_AT_ONCE: Final = 8 << 20
_NOW: Final = 1 << 63  # above every revision


# -- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyClass:
    """The keys whose hash is `number` modulo `of`."""

    number: int
    of: int

    def __contains__(self, key: str) -> bool:
        return zlib.crc32(key.encode("utf-8", "surrogateescape")) % self.of == self.number


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A class of keys, or all keys whose newest messages up to a revision are in a range of the log."""

    point: ResolvedRevision
    keys: KeyClass | None = None
    span: SequenceRange | None = None  # the whole log, for a class; None: its keys are read by name


async def plan_kv(context: JetStreamContext, options: KvOptions) -> list[BucketPart]:
    kv = open_bucket(context, options.bucket)
    bucket = Bucket(kv)
    state = await bucket_state(bucket)
    at = options.as_of or state.last_seq
    if not at:
        return []
    try:
        point = await ask(bucket.timeout, lambda left: resolve_revision(Bucket(kv, left), state, at))
    except ValueError as error:
        raise PlanningError(f"option 'asOf': {error}") from error
    if not point.revision:
        return []
    parts = await _cut(context, bucket, options, point)
    log_state(
        _log, f"bucket {options.bucket!r}", "read planned",
        partitions=len(parts), revision=point.revision, messages=state.messages, keys=state.num_subjects,
    )  # fmt: skip
    return parts


async def _cut(
    context: JetStreamContext, bucket: Bucket, options: KvOptions, point: ResolvedRevision
) -> list[BucketPart]:
    state, patterns = point.state, options.keys

    def classes(count: int, span: SequenceRange | None = None) -> list[BucketPart]:
        return [BucketPart(point, KeyClass(number, count), span) for number in range(count)]

    matching, named = state.num_subjects, all(map(is_literal, patterns))
    every = EVERYTHING in patterns and bucket.only_keys(state)
    if named:
        matching = len(patterns)
    elif matching > _MOST_LISTED and not every:  # as many keys match as there are messages, or fewer
        source = ProvedReader(bucket, point.revision)
        matching = min(matching, sum([await source.count(bucket.subject(pattern)) for pattern in patterns]))
    least = min(options.min_partitions, matching)
    if named or matching <= _MOST_LISTED:
        by_size = -(-matching * _mean_size(state) // _BYTES_PER_PARTITION)
        return classes(max(1, least, -(-matching // _LISTED_PER_PARTITION), min(by_size, matching)))
    filters = () if every or len(patterns) > 1 else (bucket.subject(patterns[0]),)
    found = await measure(context, state, replace(_whole_log(point), filters=filters))
    small = state.messages <= _SMALL_LOG and state.size <= _SMALL_BYTES
    # A value of a key never outlives a newer one if a limit of the history alone can remove it.
    oldest_first = state.config.get("deny_delete") and not state.config.get("allow_msg_ttl")
    if small or (state.max_msgs_per_subject > 1 and not oldest_first):
        return classes(min(max(least, -(-matching // _KEYS_OF_A_CLASS)), _MOST_WHOLE_READS), found.span)
    behind = state.last_seq - point.revision
    if behind > _MOST_CHANGES:
        raise PlanningError(
            f"option 'asOf': bucket {options.bucket!r} has been written {behind:,} times since revision {point.revision}; a "
            f"read of so many keys can go back at most {_MOST_CHANGES} revisions; give a later one, or read fewer keys with "
            "the option 'keys'"
        )
    cuts = await cut(context, found, max(options.min_partitions, -(-found.rows // _MESSAGES_PER_RANGE)))
    return [BucketPart(point, span=span) for span in found.span.cut(cuts)]


def _whole_log(point: ResolvedRevision) -> SequenceRange:
    first = min(point.state.first_seq, point.revision)
    return SequenceRange(point.state.name, first, point.revision, snapshot=point.revision)


def _mean_size(state: StreamState) -> int:
    """Return the mean size of a stored message, at least 1."""
    return max(1, state.size // max(1, state.messages))


# -- the parts, on the executors -----------------------------------------------------------------------------------


def read_keys(options: KvOptions, schema: StructType, part: BucketPart | None) -> Iterator[RecordBatch]:
    """Read the keys of `part` as record batches; `part` is None if Spark reads an empty plan."""
    if part is None:
        return
    with connected(options.connection, "executor") as (lease, context):
        bucket = Bucket(open_bucket(context, options.bucket))
        for entries in lease.iterate(_read(bucket, options, part)):
            yield from record_batches(schema, entries)


async def _read(bucket: Bucket, options: KvOptions, part: BucketPart) -> AsyncGenerator[list[KeyValueEntry], None]:
    """Yield the entries of a part, some at a time (perhaps none).

    Raises HistoryUnavailableError if some cannot be had, what `snapshot` raises, and StreamConfigMismatchError for new
    replicas.
    """
    point, keys, size = part.point, part.keys, _mean_size(part.point.state)
    matches, source = matcher(options.keys), ProvedReader(bucket, point.revision)
    subjects = bucket.subjects(matches if keys is None else lambda key: key in keys and matches(key))
    reads = []
    if part.span is not None:
        reads = [_logged(bucket, source, point, part.span, subjects)]
    else:
        listed = await bucket.list_keys(options.keys)
        named = list(filter(can_be_asked_for, listed))
        reads = [_by_name(bucket, source, list(filter(subjects.wanted, named)), point.revision, size)]
        if len(named) < len(listed):
            # Any publisher can store keys that no request can name: the task reads the whole log for them.
            others = bucket.subjects(lambda key: not can_be_asked_for(key) and subjects.wanted(key))
            reads.append(_logged(bucket, source, point, _whole_log(point), others))
    past, read = Past(subjects, point), set[str]()
    for records in reads:
        async with aclosing(records):
            async for some in records:
                if keys is not None:
                    read.update(some)
                past.expires |= any(record[3] and shows_expiry(decode_stored(record[3])) for record in some.values())
                yield entries_of(bucket, some, deleted=options.include_deleted)
    given = [key for key in options.keys if keys is not None and is_literal(key) and key in keys]
    content = await _judge(bucket, source, past, point, given)
    gone = [key for key in content.unavailable if key not in read]
    if keys is None:
        known = list(filter(can_be_asked_for, gone))
        if point.state.max_msgs_per_subject > 1:
            # What is still stored was returned, by this task or another one.
            stored = await records_up_to(bucket, source, known, point.revision)
            gone = [key for key in gone if key not in stored]
        if not (options.strict or options.include_deleted):  # a key that is deleted now needs no row
            now = await records_up_to(bucket, ProvedReader(bucket, source.end.last_seq), known, _NOW)
            entries = {entry.key for entry in entries_of(bucket, now, deleted=False)}
            gone = [key for key in gone if key in entries or not can_be_asked_for(key)]
    _check(options, point, content, gone, present=keys is not None and all(map(can_be_asked_for, gone)))
    async with aclosing(_by_name(bucket, ProvedReader(bucket, source.end.last_seq), gone, _NOW, size)) as records:
        async for some in records:
            yield entries_of(bucket, some, deleted=options.include_deleted)
    if gone:
        await bucket.check_same(point.state)


def _check(
    options: KvOptions, point: ResolvedRevision, content: PastContent, gone: list[str], *, present: bool
) -> None:
    """Raise HistoryUnavailableError if rows may be missing; with `present`, keys that are gone can have their present values."""
    what = f"bucket {options.bucket!r} at revision {point.revision}"
    if gone and (options.strict or not present):
        advice = "use consistency=latest"
        if not present:  # another task may have returned the earlier values
            advice = "read fewer keys with the option 'keys', or read while no key changes"
        raise HistoryUnavailableError(
            f"{what}: rows may be missing, because the history needed for {counted(len(gone), 'key')} (such as {gone[0]!r}) is "
            f"no longer stored; keep more history (at least 2), or {advice}",
            keys=tuple(gone),
        )
    if options.strict and content.reason is not None:
        record = (
            f" (`jetstream_ext.kv.enable` or '{enable_bucket_command(options.bucket)}' records that for later reads)"
        )
        raise HistoryUnavailableError(
            f"{what}: keys may be missing, because {content.reason}{record if content.reason == Reason.LIMITS else ''}; "
            "use consistency=latest for a read without this check"
        )


async def _by_name(
    bucket: Bucket, source: ProvedReader, keys: Sequence[str], revision: int, size: int
) -> AsyncGenerator[dict[str, Record], None]:
    """Yield the newest records of `keys` up to a revision; their messages have about `size` bytes."""
    start = 0
    while names := keys[start : start + max(1, min(_KEYS_AT_ONCE, _BYTES_AT_ONCE // size))]:
        records = await records_up_to(bucket, source, names, revision)
        yield records
        start += len(names)
        # These keys may have larger values than the rest of the bucket.
        size = max(size, sum(len(record[1]) for record in records.values()) // len(names))


def _logged(
    bucket: Bucket, source: ProvedReader, point: ResolvedRevision, span: SequenceRange, subjects: Subjects
) -> AsyncGenerator[dict[str, Record], None]:
    """Yield the records of the keys that are wanted and decided in a range of the log, a block at a time."""
    blocks = source.log(span.first, span.last, subject=span.filters[0] if span.on_server else None)
    return newest_rows(bucket, source, blocks, point.state, span, subjects)


async def _judge(
    bucket: Bucket, source: ProvedReader, past: Past, point: ResolvedRevision, given: Sequence[str]
) -> PastContent:
    """Return what is no longer known of the revision, from the changes since; `given` are the task's keys that an option names."""
    before, state = point.state, await _state_since(bucket, point)
    if state.replicated and not before.replicated:
        raise StreamConfigMismatchError(
            f"bucket {bucket.name!r}: replicas were added during the read, and they may have answered before they had all "
            "messages; repeat the read",
            diff={"num_replicas": (before.config.get("num_replicas"), state.config.get("num_replicas"))},
        )
    if state.last_seq == point.revision or state.never_removed:
        return PastContent({}, {})
    await source.catch_up(point.revision, past.feed)
    end = await _state_since(bucket, point)
    if point.is_newest and end.removed == before.removed:
        return PastContent({}, {})
    # If the limit was changed since, both may have removed messages.
    history = min(before.max_msgs_per_subject, end.max_msgs_per_subject)
    return past.judge(end, history=history, named=given, wild=True)


async def _state_since(bucket: Bucket, point: ResolvedRevision) -> StreamState:
    """Return the state of the bucket in which `point` was resolved, once its leader has the revision."""
    with bucket.not_found():
        state = await bucket.check_same(point.state)
        if state.last_seq < point.revision:  # a new leader may still have to catch up
            state = await wait_for_sequence(bucket.context, bucket.stream, point.revision, bucket.timeout)
    return state
