"""A bucket as a table, as of one revision: how it is cut into parts, and how they are read, through `jetstream_ext.kv`.

The driver asks for the state of the bucket's stream and cuts the bucket into parts (`jetstream_ext.spark.kv_parts`): classes of
keys, or ranges of the log of a large bucket. It lists no keys.

If the value that a key had is no longer stored, ``consistency=latest`` reads the present one, and ``strict`` fails. A range
always fails.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from nats.js import JetStreamContext
from pyspark.sql.types import StructType

from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import KeyValueEntry
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import EVERYTHING
from jetstream_ext.kv.history import Reason, ResolvedRevision
from jetstream_ext.kv.reads import resolve_revision
from jetstream_ext.protocol.advice import enable_bucket_command
from jetstream_ext.protocol.subjects import is_literal
from jetstream_ext.spark.buckets import bucket_state, record_batches
from jetstream_ext.spark.connection import ask, connected
from jetstream_ext.spark.kv_parts import (
    Found,
    KeyClass,
    LogRange,
    can_cut_log,
    keys_at_once,
    mean_size,
    read_part,
    read_present,
    whole_log,
)
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
# A log of up to so many messages and bytes is read by each task as a whole.
_SMALL_LOG: Final = 1_000_000
_SMALL_BYTES: Final = 512 << 20
_MESSAGES_PER_RANGE: Final = 1_000_000
# So many tasks at most read the same log as a whole.
_MOST_WHOLE_READS: Final = 8
# So many revisions after that of ``asOf``, each task that reads a range keeps the keys that were written since in memory.
_MOST_CHANGES: Final = 1_000_000
# Filtering costs the server about as much as sending so many times as many messages.
_FILTER_COST: Final = 5


# -- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BucketPart:
    point: ResolvedRevision  # as of which it is read
    keys: KeyClass | LogRange


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
    return [BucketPart(point, part) for part in parts]


async def _cut(
    context: JetStreamContext, bucket: Bucket, options: KvOptions, point: ResolvedRevision
) -> Sequence[KeyClass | LogRange]:
    state, patterns = point.state, options.keys
    named = all(map(is_literal, patterns))
    matching = len(patterns) if named else await _count(context, bucket, options, point)
    least = min(options.min_partitions, matching)
    if named or matching <= _MOST_LISTED:
        by_size = -(-matching * mean_size(state) // _BYTES_PER_PARTITION)
        return _classes(max(1, least, -(-matching // _LISTED_PER_PARTITION), min(by_size, matching)))
    behind, small = state.last_seq - point.revision, state.messages <= _SMALL_LOG and state.size <= _SMALL_BYTES
    if behind > _MOST_CHANGES and not small:
        raise PlanningError(
            f"option 'asOf': bucket {options.bucket!r} has been written {behind:,} times since revision {point.revision}; a "
            f"read of so many keys can go back at most {_MOST_CHANGES} revisions; give a later one, or read fewer keys with "
            "the option 'keys'"
        )
    selective = patterns != (EVERYTHING,) and len(patterns) == 1 and matching * _FILTER_COST <= state.messages
    subject = bucket.subject(patterns[0]) if selective else None
    ranges = -(-(matching if selective else state.messages) // _MESSAGES_PER_RANGE)
    if small or not can_cut_log(state):
        count = max(1, least) if small else max(least, ranges)
        return [whole_log(point, keys, subject) for keys in _classes(min(count, _MOST_WHOLE_READS))]
    whole = whole_log(point)
    span = SequenceRange(state.name, whole.first, whole.last, () if subject is None else (subject,))
    cuts = await cut(context, await measure(context, state, span), max(options.min_partitions, ranges))
    return [LogRange(part.first, part.last, subject) for part in span.cut(cuts)]


def _classes(count: int) -> list[KeyClass]:
    return [KeyClass(number, count) for number in range(count)]


async def _count(context: JetStreamContext, bucket: Bucket, options: KvOptions, point: ResolvedRevision) -> int:
    """Return how many keys can match, or how many messages those have if the bucket has more keys than a task lists."""
    keys, patterns = point.state.num_subjects, options.keys
    if keys <= _MOST_LISTED or EVERYTHING in patterns:
        return keys

    async def probe(left: float, pattern: str) -> int:
        get = DirectGet(context, bucket.stream, timeout=left)
        first = get.batch(1, subject=bucket.subject(pattern), min_seq=point.revision)
        return len(await first.to_list()) + (first.num_pending or 0)

    counts = [await ask(bucket.timeout, partial(probe, pattern=pattern)) for pattern in patterns]
    return sum(counts)


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
    """Yield the entries of a part, some at a time (perhaps none); raise HistoryUnavailableError if some cannot be had."""
    point, keys = part.point, part.keys
    count, vanished = 0, ""
    async with aclosing(read_part(bucket, point, options.keys, keys)) as found:
        async for some in found:
            entries = [entry for entry in some.entries if options.include_deleted or entry.operation == "PUT"]
            count += len(entries)
            vanished = vanished or some.vanished
            gone: tuple[str, ...] = ()
            if isinstance(keys, LogRange) and keys.only is None:
                _check_range(options, point, some)
            elif gone := some.overwritten + some.deleted:
                _check_class(options, point, gone, count + len(gone))
            yield entries
            step = keys_at_once(mean_size(point.state))
            for start in range(0, len(gone), step):
                present = await read_present(bucket, point, gone[start : start + step])
                yield [entry for entry in present if options.include_deleted or entry.operation == "PUT"]
    if options.strict and vanished:
        record = (
            f" (`jetstream_ext.kv.enable` or '{enable_bucket_command(options.bucket)}' records that for later reads)"
        )
        raise HistoryUnavailableError(
            f"{_name(options, point)}: keys may be missing, because {vanished}{record if vanished == Reason.LIMITS else ''}; "
            "use consistency=latest for a read without this check"
        )


def _check_class(options: KvOptions, point: ResolvedRevision, gone: tuple[str, ...], count: int) -> None:
    """Raise HistoryUnavailableError for a strict read; otherwise keys have their present values."""
    if options.strict:
        raise HistoryUnavailableError(
            f"{_name(options, point)}: the history needed for {len(gone):,} of {counted(count, 'key')} (such as {gone[0]!r}) is no longer "
            "stored; keep more history, or use consistency=latest",
            keys=gone,
        )


def _check_range(options: KvOptions, point: ResolvedRevision, found: Found) -> None:
    """Raise HistoryUnavailableError if a range may lack keys: only those may be missing that have no present value.

    A range cannot have present values, because another range may have had the earlier ones.
    """
    gone = found.overwritten
    if options.strict or options.include_deleted:
        gone += found.deleted
    if gone:
        raise HistoryUnavailableError(
            f"{_name(options, point)}: rows may be missing, because the history needed for {len(gone)} of the keys that have "
            f"changed since (such as {gone[0]!r}) is no longer stored; keep more history (at least 2), read fewer keys with "
            "the option 'keys', or read while no key changes",
            keys=gone,
        )


def _name(options: KvOptions, point: ResolvedRevision) -> str:
    return f"bucket {options.bucket!r} at revision {point.revision}"
