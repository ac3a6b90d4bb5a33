"""The plan of a read, made on the driver: check the streams, resolve the ends, count messages, cut ranges into partitions.

The batch reader uses all of it; streaming queries use the checks, the counts and the rules of data loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api, check_same_stream, first_since, gather_bounded, stream_names, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.replaced import were_replaced_by_newer
from jetstream_ext.errors import ErrorCode, JetStreamExtError, StreamRecreatedError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.merge import filtering_pays, widest
from jetstream_ext.spark.connection import ask
from jetstream_ext.spark.offsets import Seen
from jetstream_ext.spark.options import MOST_PARTITIONS, Bound, ReadOptions
from jetstream_ext.spark.ranges import Search, SequenceRange, even_cuts, find_ranks, shares
from jetstream_ext.text import get_logger, log_state, numbered, plural

_log = get_logger("spark")

# How many streams are asked about, and how many counts are asked for, at a time.
STREAMS_AT_ONCE: Final = 64
_COUNTS_AT_ONCE: Final = 16
# Balance alone is worth so many counts, or two for each partition.
_MOST_COUNTS: Final = 512

# Where more than this share of the sequences has a message, cuts by sequence are even enough.
_DENSE: Final = 0.9
# A range of fewer sequences is read and cut without being counted, unless a limit needs its count.
_FEW: Final = 1_000

# The partitions of a read, if nothing else asks for more.
PARTITIONS: Final = 2


class PlanningError(JetStreamExtError):
    """The query cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


# -- the state of a stream ----------------------------------------------------------------------------------------


def report_data_loss(options: ReadOptions, what: str) -> None:
    """Raise `DataLossError`, or log a warning where the user chose to continue."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what} (to read the remaining messages, set failOnDataLoss to false)")
    _log.warning("%s; reading the remaining messages, because failOnDataLoss is false", what)


async def report_lost(
    context: JetStreamContext,
    options: ReadOptions,
    state: StreamState,
    missing: range,
    seen: Seen | None = None,
    since: datetime | None = None,
) -> None:
    """Report those of the `missing` sequences that are before the first one of a stream as lost, unless they were replaced.

    Newer messages replaced them if the stream has a limit per subject, and nothing shows another cause (`protocol.loss`).
    (Rollups can replace messages without that limit, but so rarely that a purge is more likely.) The stream was `seen` when it
    still had the messages, or had not stored them yet, and `since` is a time before which the first one was not stored.
    """
    lost = range(missing.start, min(missing.stop, state.first_seq))
    if not lost:
        return
    before = seen.restore(state) if seen is not None and seen.held is not None else None
    if before is not None and state.max_age is not None and before.first_time + state.max_age <= state.now:
        before = None  # messages that it had then may have expired since, because the query has read those
    if state.max_msgs_per_subject:
        js = Context(context)
        if await ask(js.timeout, lambda left: were_replaced_by_newer(js, state, before, since, left)):
            return
    what = f"{numbered(lost.start, lost.stop - 1, 'sequence')} of stream {state.name!r}"
    gone = plural(len(lost), "is gone", "are gone")
    report_data_loss(options, f"{what} {gone} (expired, purged or deleted); the stream now starts at {state.first_seq}")


def stored_since(known: Iterable[tuple[int, datetime]], seq: int) -> datetime | None:
    """Return a time before which the message `seq` was not stored, or None.

    `known` are sequences, and times before which their messages were not stored.
    """
    return max((time for other, time in known if other <= seq), default=None)


async def state_of(context: JetStreamContext, stream: str) -> StreamState | None:
    """Return the state of a stream at its leader, or None if the stream does not exist."""
    js = Context(context)
    try:
        return await ask(js.timeout, lambda left: stream_state(js, stream, left))
    except NotFoundError as error:
        if error.err_code == ErrorCode.STREAM_NOT_FOUND:
            return None
        raise
    except ServiceUnavailableError as error:
        raise PlanningError(
            f"no server answers on {js.prefix}.STREAM.INFO.{stream}: JetStream is not enabled there, or the option "
            "'domain' or 'apiPrefix' is wrong"
        ) from error


async def readable_state(context: JetStreamContext, options: ReadOptions, stream: str) -> StreamState | None:
    """Return the state of a stream that can be read; None: it does not exist, and that is not an error."""
    state = await state_of(context, stream)
    if state is None:
        if options.stream_pattern is None:  # otherwise it existed a moment ago
            report_data_loss(
                options, f"stream {stream!r} does not exist; check 'stream', 'servers', 'domain' and 'apiPrefix'"
            )
        return None
    state.check_direct_reads(Context(context).connection.server_version)
    if state.retention != "limits" and not options.allow_unstable_retention:
        raise PlanningError(
            f"stream {stream!r} has {state.retention} retention: acknowledgements of its consumers delete messages, so a "
            "retried task could read other rows. Read a mirror or another copy of it with limits retention, or set "
            "allowUnstableRetention to true to read the messages that are left"
        )
    return state


async def is_same(context: JetStreamContext, before: Seen, state: StreamState) -> bool:
    """Return whether `state` is of the stream that was seen."""
    if not before.last_seq:
        return True  # that stream had no message, so none can have been read or lost
    js = Context(context)
    try:
        await ask(js.timeout, lambda left: check_same_stream(Api(js, left), before.restore(state), state))
    except StreamRecreatedError:
        return False
    except NotFoundError as error:
        if error.err_code != ErrorCode.STREAM_NOT_FOUND:  # deleted meanwhile: the next question will tell
            raise
    return True


async def first_from(context: JetStreamContext, state: StreamState, bound: Bound) -> int:
    """Return the sequence that `bound` stands for; the one after the last if no message is stored there yet."""
    if isinstance(bound, int):
        return bound
    if isinstance(bound, datetime):
        js = Context(context)
        return await ask(js.timeout, lambda left: first_since(Api(js, left), state, bound))
    return state.first_seq if bound == "earliest" else state.last_seq + 1


# -- how many messages there are, and where -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A range and what is known of its messages."""

    span: SequenceRange
    rows: int  # how many match; an estimate that may be too high, unless they were counted
    size: int  # their bytes, approximately
    even: bool  # they are spread evenly over the sequences


async def counts_from(context: JetStreamContext, span: SequenceRange, seqs: list[int]) -> list[list[int]]:
    """Return how many messages match each of the filters of `span` from each of `seqs` on.

    The counts are approximate, because replicas answer. That they answer also proves, before any task runs, that they answer
    batched direct gets of the stream.
    """
    filters = span.filters or (None,)

    async def count(where: tuple[int, str | None]) -> int:
        seq, subject = where

        async def probe(left: float) -> int:
            batch = DirectGet(context, span.stream, timeout=left).batch(1, subject=subject, seq=max(1, seq))
            return len(await batch.to_list()) + (batch.num_pending or 0)

        return await ask(Context(context).timeout, probe)

    counts = await gather_bounded(count, [(seq, one) for seq in seqs for one in filters], limit=_COUNTS_AT_ONCE)
    return [counts[at : at + len(filters)] for at in range(0, len(counts), len(filters))]


async def run_search(context: JetStreamContext, span: SequenceRange, search: Search) -> list[int]:
    """Return the result of a search, whose questions about `span` the stream answers."""
    try:
        seqs = next(search)
        while True:
            seqs = search.send([sum(each) for each in await counts_from(context, span, seqs)])
    except StopIteration as end:
        result: list[int] = end.value
        return result


async def end_of_rows(context: JetStreamContext, found: Measured, rows: int) -> Measured:
    """Return the beginning of a range that has so many rows."""
    span = found.span
    if rows >= found.rows:
        return found
    last = span.first + rows - 1
    if found.rows != len(span):
        divisions = 8 if len(span.filters) < 4 else 2  # each filter is a question of its own
        [end] = await run_search(context, span, find_ranks(span.first, span.last, [rows], 0, divisions=divisions))
        last = max(span.first, end - 1)
    return replace(found, span=replace(span, last=last), rows=rows, size=found.size * rows // found.rows)


async def measure(
    context: JetStreamContext, state: StreamState, span: SequenceRange, *, exact: bool = False
) -> Measured:
    """Measure a range, and decide who filters; `exact`: a limit on rows needs their number."""
    filters = widest(span.filters)
    span = replace(span, filters=() if ">" in filters else tuple(filters))
    each = state.size / max(1, state.messages)

    def measured(rows: int, *, even: bool) -> Measured:
        return Measured(span, rows, int(rows * each), even)

    if not span.filters:
        if state.has_every_sequence:
            return measured(len(span), even=True)
        if span.first <= state.first_seq and span.last >= state.last_seq:
            return measured(state.messages, even=state.messages > _DENSE * len(span))
    if len(span) <= _FEW and not exact:
        return measured(len(span), even=True)
    ends = [span.first] if span.last >= state.last_seq else [span.first, span.last + 1]
    following, *behind = await counts_from(context, span, ends)
    matching = [max(0, a - b) for a, b in zip(following, *behind, strict=True)] if behind else following
    rows = sum(matching)
    if span.filters:
        # A filter equal to the stream's subjects is kept: its sources or an earlier configuration may have stored others.
        messages = min(state.messages, len(span))
        on_server = filtering_pays(dict(zip(span.filters, matching, strict=True)), messages, int(messages * each))
        span = replace(span, on_server=on_server)
    return measured(rows, even=rows > _DENSE * len(span))


async def cut(
    context: JetStreamContext, found: Measured, parts: int, max_records: int | None = None
) -> tuple[int, ...]:
    """Return where to cut a range into about `parts` partitions, none of which has more than `max_records` rows."""
    span = found.span
    needed = parts if max_records is None else max(parts, -(-found.rows // max_records))
    if needed > MOST_PARTITIONS:
        raise PlanningError(
            f"stream {span.stream!r}: its {found.rows:,} messages would make {needed:,} partitions, and a read has {MOST_PARTITIONS:,} at "
            "most; raise maxRecordsPerPartition or maxBytesPerPartition, or read less at once (maxRowsPerTrigger, endingOffsets)"
        )
    if found.even or len(span) <= parts or (max_records is None and parts < 2):
        return even_cuts(span.first, span.last, max(parts, -(-len(span) // (max_records or len(span) or 1))))
    probes: float = max(_MOST_COUNTS, 2 * parts) // max(1, len(span.filters))
    if max_records is not None:
        # With a quarter less than a partition may have, the cuts need not be exact.
        needed, probes = max(parts, -(-4 * found.rows // (3 * max_records))), math.inf
    slack = min(found.rows // (4 * needed), (max_records or found.rows) - -(-found.rows // needed))
    ranks = sorted({found.rows * part // needed for part in range(1, needed)} - {0})
    cuts = await run_search(context, span, find_ranks(span.first, span.last, ranks, slack, probes=probes))
    return tuple(sorted({*cuts} - {span.first, span.last + 1}))


async def cut_all(
    context: JetStreamContext, options: ReadOptions, found: Sequence[Measured], *, part_size: int | None = None
) -> list[tuple[int, ...]]:
    """Return where to cut ranges of several streams, into partitions of about `part_size` bytes at most, if it is given."""
    counts = shares(
        weights=[one.size for one in found],
        most=[len(one.span) for one in found],
        least=[-(-one.size // (part_size or max(1, one.size))) for one in found],
        total=options.min_partitions or PARTITIONS,
    )
    return await gather_bounded(
        lambda each: cut(context, each[0], each[1], options.max_records_per_partition),
        list(zip(found, counts, strict=True)),
        limit=STREAMS_AT_ONCE,
    )


# -- the plan of a batch read -------------------------------------------------------------------------------------


async def streams_of(context: JetStreamContext, options: ReadOptions, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the streams to read: those that the options name, or those that match their pattern now.

    The server lists names in pages; a deletion between two of them hides a stream. So the `known` streams that match are
    returned as well, and whoever looks at them finds out which ones are gone.
    """
    if (pattern := options.stream_pattern) is None:
        return options.streams
    js = Context(context)
    names = await ask(js.timeout, lambda left: stream_names(Api(js, left)))
    return tuple(sorted(name for name in {*names, *known} if pattern.fullmatch(name)))


async def plan_read(context: JetStreamContext, options: ReadOptions) -> list[SequenceRange]:
    """Return the partitions of a batch read."""
    max_records = options.max_records_per_partition

    async def look(stream: str) -> Measured | None:
        state = await readable_state(context, options, stream)
        span = None if state is None else await _resolve(context, options, state)
        if state is None or not span:
            return None
        await counts_from(context, replace(span, filters=()), [span.first])  # direct gets work
        return await measure(context, state, span, exact=max_records is not None)

    streams = await streams_of(context, options)
    ranges = [one for one in await gather_bounded(look, streams, limit=STREAMS_AT_ONCE) if one is not None]
    cuts = await cut_all(context, options, ranges, part_size=options.max_bytes_per_partition)
    planned = [part for one, where in zip(ranges, cuts, strict=True) for part in one.span.cut(where)]
    log_state(_log, "read", "planned", partitions=len(planned), streams=", ".join(streams))
    return planned


async def _resolve(context: JetStreamContext, options: ReadOptions, state: StreamState) -> SequenceRange:
    stream, start, end = state.name, options.starting.of(state.name), options.ending.of(state.name)
    first = await first_from(context, state, start)
    last = end if isinstance(end, int) else await first_from(context, state, end) - 1
    await report_lost(context, options, state, range(first, state.last_seq + 1))
    what = f"stream {stream!r} ends at sequence {state.last_seq}"
    if first > state.last_seq + 1:
        report_data_loss(options, f"{what}, before the start at {first}; the stream may have been re-created")
    if last > state.last_seq:
        report_data_loss(options, f"{what}, before the end of the read at {last}")
    first_read = max(first, state.first_seq)
    return SequenceRange(
        stream,
        first_read,
        min(last, state.last_seq),
        options.subjects,
        from_head=start == "earliest",
        seen=Seen.of(state),
        since=stored_since(state.ends, first_read),
    )
