"""The plan of a read, made on the driver: check the streams, resolve the ends, count messages, cut ranges into partitions.

The batch reader uses all of it; streaming queries use the checks, the counts and the rules of data loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

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
from jetstream_ext.spark.offsets import Position, held_by, identity
from jetstream_ext.spark.options import MOST_PARTITIONS, Bound, ReadOptions
from jetstream_ext.spark.pushed import PushedFilters
from jetstream_ext.spark.ranges import Search, SequenceRange, balanced_cuts, even_cuts, shares
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

_EVERYTHING: Final = PushedFilters()

_Result = TypeVar("_Result")


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


async def report_lost_head(
    context: JetStreamContext,
    options: ReadOptions,
    state: StreamState,
    first: int,
    last: int,
    *,
    before: StreamState | None = None,
    since: datetime | None = None,
) -> None:
    """Report the sequences of ``first … last`` that are before the first one of the stream as lost.

    Those that newer messages replaced are not: `before` and `since` are as for `were_replaced`.
    """
    if first < state.first_seq and not await were_replaced(context, state, before, since):
        until = min(last, state.first_seq - 1)
        missing = f"{numbered(first, until, 'sequence')} of stream {state.name!r}"
        gone = plural(until - first + 1, "is gone", "are gone")
        report_data_loss(
            options, f"{missing} {gone} (expired, purged or deleted); the stream now starts at {state.first_seq}"
        )


def stored_since(known: Iterable[tuple[int, datetime]], seq: int) -> datetime | None:
    """Return a time before which the message `seq` was not stored, or None.

    `known` are sequences, and times before which their messages were not stored.
    """
    return max((time for other, time in known if other <= seq), default=None)


def known_of(where: Position | SequenceRange | None, state: StreamState) -> StreamState | None:
    """Return what is known of the stream of `state` from when `where` was made, for `were_replaced`."""
    if where is None or where.held is None:
        return None
    (last, last_time), (first, first_time) = where.ends[0], where.ends[-1]
    messages, subjects = where.held
    return replace(
        state,
        messages=messages,
        num_subjects=subjects,
        first_seq=first,
        first_time=first_time,
        last_seq=last,
        last_time=last_time,
        now=last_time,  # or later
    )


async def were_replaced(
    context: JetStreamContext, state: StreamState, before: StreamState | None, since: datetime | None
) -> bool:
    """Return whether newer messages replaced what is missing at the beginning of a stream; else it is lost.

    In a stream without a limit per subject it is lost. Rollups can replace messages there, but so rarely that a purge is more
    likely.

    Args:
        context: The JetStream context.
        state: The stream now.
        before: The stream when it still had what is missing, or had not stored it yet. If it has lost subjects or messages
            since, something else has removed them; except if messages that it had then may have expired since, because
            the query has read those.
        since: A time before which the first missing message was not stored.
    """
    if not state.max_msgs_per_subject:
        return False
    if before is not None and state.max_age is not None and before.first_time + state.max_age <= state.now:
        before = None
    js = Context(context)
    return await ask(js.timeout, lambda left: were_replaced_by_newer(js, state, before, since, left))


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


async def is_same(context: JetStreamContext, before: Position | SequenceRange, state: StreamState) -> bool:
    """Return whether `state` is that of the stream of a position or a range."""
    if before.ends and before.ends[0][0] == 0:
        return True  # that stream had no message, so none can have been read or lost
    js = Context(context)
    known = identity(state.name, before.created, before.ends)
    try:
        await ask(js.timeout, lambda left: check_same_stream(Api(js, left), known, state))
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


async def run_search(context: JetStreamContext, span: SequenceRange, search: Search[_Result]) -> _Result:
    """Return the result of a search, whose questions about `span` the stream answers."""
    try:
        seqs = next(search)
        while True:
            seqs = search.send([sum(each) for each in await counts_from(context, span, seqs)])
    except StopIteration as end:
        result: _Result = end.value
        return result


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
    if found.even:
        if max_records is not None:
            parts = max(parts, -(-len(span) // max_records))
        return even_cuts(span.first, span.last, parts)
    if max_records is None and (parts < 2 or len(span) <= parts):
        return even_cuts(span.first, span.last, parts)
    probes = max(_MOST_COUNTS, 2 * parts) // max(1, len(span.filters))
    cuts = await run_search(context, span, balanced_cuts(span.first, span.last, parts, max_records, probes=probes))
    return cuts or even_cuts(span.first, span.last, parts)


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


async def plan_read(
    context: JetStreamContext, options: ReadOptions, pushed: PushedFilters = _EVERYTHING
) -> list[SequenceRange]:
    """Return the partitions of a batch read, of which the query's own filters need the part `pushed`."""
    max_records = options.max_records_per_partition

    async def look(stream: str) -> Measured | None:
        state = await readable_state(context, options, stream)
        if state is None:
            return None
        span = await _resolve(context, options, state)
        # Narrowed only now, so that a loss is reported even where the query filters it out.
        span = replace(span, first=max(span.first, pushed.first), last=min(span.last, pushed.last))
        filters = pushed.within(options.subjects)
        if not len(span) or filters is None:
            return None
        await counts_from(context, replace(span, filters=()), [span.first])  # direct gets work
        return await measure(context, state, replace(span, filters=filters), exact=max_records is not None)

    streams = await streams_of(context, options)
    ranges = [one for one in await gather_bounded(look, streams, limit=STREAMS_AT_ONCE) if one is not None]
    counts = shares(
        weights=[one.size for one in ranges],
        most=[len(one.span) for one in ranges],
        least=[-(-one.size // options.max_bytes_per_partition) for one in ranges],
        total=options.min_partitions,
    )
    cuts = await gather_bounded(
        lambda each: cut(context, each[0], each[1], max_records),
        list(zip(ranges, counts, strict=True)),
        limit=STREAMS_AT_ONCE,
    )
    planned = [part for one, where in zip(ranges, cuts, strict=True) for part in one.span.cut(where)]
    log_state(_log, "read", "planned", partitions=len(planned), streams=", ".join(streams))
    return planned


async def _resolve(context: JetStreamContext, options: ReadOptions, state: StreamState) -> SequenceRange:
    stream, start, end = state.name, options.starting.of(state.name), options.ending.of(state.name)
    first = await first_from(context, state, start)
    last = end if isinstance(end, int) else await first_from(context, state, end) - 1
    await report_lost_head(context, options, state, first, state.last_seq)
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
        from_head=start == "earliest",
        created=state.created,
        ends=state.ends,
        held=held_by(state),
        since=stored_since(state.ends, first_read),
    )
