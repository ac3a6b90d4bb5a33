"""What a read does, decided on the driver: look at the streams, refuse what cannot work, resolve where it ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.connection import JetStream
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.leader import get_at_leader
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol.direct import Request
from jetstream_ext.spark.bounds import AtSequence, AtTime, Bound, Named
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.ranges import SequenceRange, partition

_log = logging.getLogger("jetstream_ext")

_STREAM_NOT_FOUND = 10059

# Looking for matches costs the server about as much as sending five times as many messages: where more of them match,
# everything is read and filtered here.
_SELECTIVE = 0.2


class PlanningError(JetStreamExtError):
    """A read that cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the leader says about a stream.

    Attributes:
        name: Its name.
        first: The first sequence it holds; one more than `last` when it is empty.
        last: The last sequence it ever stored.
        messages: How many it holds.
        size: Their bytes.
    """

    name: str
    first: int
    last: int
    messages: int
    size: int


async def plan_read(context: JetStreamContext, options: ReadOptions) -> list[SequenceRange]:
    """Return the partitions of a batch read.

    Raises:
        PlanningError: A stream is missing, or cannot be read this way.
        DataLossError: A stream does not hold what was asked for.
        UnsupportedFeatureError: The server is older than 2.11.
        TimeoutError: A server gave no answer.
    """
    ranges: list[SequenceRange] = []
    for stream in options.streams:
        state = await _describe(context, stream)
        if state is None:
            lose(options, f"stream {stream!r} does not exist; check 'stream', 'servers', 'domain' and 'apiPrefix'")
            continue
        found = await _resolve(context, options, state)
        if len(found):
            ranges.append(await _place_filter(context, options, state, found))
    return partition(ranges, min_partitions=options.min_partitions, max_bytes=options.max_bytes_per_partition)


def lose(options: ReadOptions, what: str) -> None:
    """Fail, or warn if the user said that a loss is no failure."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what} (to read what there is, set failOnDataLoss to false)")
    _log.warning("%s; reading what there is, because failOnDataLoss is false", what)


async def _describe(context: JetStreamContext, stream: str) -> StreamState | None:
    try:
        info = await context.stream_info(stream)
    except NotFoundError as error:
        if error.err_code == _STREAM_NOT_FOUND:
            return None
        raise
    except ServiceUnavailableError as error:
        raise PlanningError(
            f"nobody answers {JetStream(context).prefix}.STREAM.INFO.{stream}: JetStream is not enabled there, or the option 'domain' or "
            "'apiPrefix' is wrong"
        ) from error
    if not info.config.allow_direct:
        raise PlanningError(
            f"stream {stream!r} has no allow_direct, which reading it without a consumer needs; turn it on "
            f"(nats stream edit {stream} --allow-direct, or allow_direct=True in its configuration)"
        )
    state = info.state
    return StreamState(
        name=stream,
        first=state.first_seq if state.messages else state.last_seq + 1,
        last=state.last_seq,
        messages=state.messages,
        size=state.bytes,
    )


async def _resolve(context: JetStreamContext, options: ReadOptions, state: StreamState) -> SequenceRange:
    stream, start, end = state.name, options.starting[state.name], options.ending[state.name]
    first = await _first_from(context, state, start)
    last = state.last
    if isinstance(end, AtSequence):
        last = end.seq
    elif isinstance(end, AtTime):
        last = await _first_from(context, state, end) - 1
    if first < state.first:
        missing = f"sequences {first} to {state.first - 1} of stream {stream!r} are gone (expired, purged or deleted)"
        lose(options, f"{missing}; it starts at {state.first} now")
    if first > state.last + 1:
        lose(
            options, f"stream {stream!r} ends at sequence {state.last}, before the start at {first}; was it re-created?"
        )
    if last > state.last:
        lose(options, f"stream {stream!r} ends at sequence {state.last}, and not at {last} or later")
    first, last = max(first, state.first), min(last, state.last)
    share = (last - first + 1) / max(1, state.last - state.first + 1)
    return SequenceRange(
        stream,
        first,
        last,
        size=max(0, int(state.size * share)),
        from_head=start is Named.EARLIEST,
        gapless=state.messages == state.last - state.first + 1,
    )


async def _first_from(context: JetStreamContext, state: StreamState, bound: Bound) -> int:
    """Return the sequence that `bound` names; after the last one where there is none yet."""
    if isinstance(bound, AtSequence):
        return bound.seq
    if isinstance(bound, AtTime):
        # At the leader: another replica may not have it yet.
        js = JetStream(context)
        found = await get_at_leader(js, state.name, Request(start_time=bound.when).body(), js.timeout)
        return state.last + 1 if found is None else found.seq
    return state.first if bound is Named.EARLIEST else state.last + 1


async def _place_filter(
    context: JetStreamContext, options: ReadOptions, state: StreamState, found: SequenceRange
) -> SequenceRange:
    """Decide who filters, the server or the reader.

    On the way it shows, before any task runs, that this server answers batched direct gets at all.
    """
    # A filter like the stream's own subjects is not without effect: sources, and earlier configurations, store others.
    filters = () if ">" in options.subjects else options.subjects
    subject = filters[0] if len(filters) == 1 else None
    probe = DirectGet(context, state.name).batch(1, subject=subject, seq=found.first)
    rows = len(await probe.to_list())
    if subject is None:
        return replace(found, filters=filters)
    matching = (rows + (probe.num_pending or 0)) / max(1, min(state.messages, state.last - found.first + 1))
    if matching > _SELECTIVE:
        return replace(found, filters=filters)
    return replace(found, subject=subject, size=int(found.size * matching))
