"""What a batch read does, decided on the driver: look at the streams, refuse what cannot work, resolve where it ends."""

from __future__ import annotations

from dataclasses import replace

from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.direct import Request
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.spark.balance import measure
from jetstream_ext.spark.bounds import AtSequence, AtTime, Bound, Named
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.pushed import NOTHING_PUSHED, Pushed
from jetstream_ext.spark.ranges import SequenceRange, partition
from jetstream_ext.spark.states import DataLossError, PlanningError, check_readable, look, lose

# Looking for matches costs the server about as much as sending five times as many messages: where more of them match,
# everything is read and filtered here.
_SELECTIVE = 0.2

__all__ = ["DataLossError", "PlanningError", "describe", "first_from", "lose", "place_filter", "plan_read"]


async def plan_read(
    context: JetStreamContext, options: ReadOptions, pushed: Pushed = NOTHING_PUSHED
) -> list[SequenceRange]:
    """Return the partitions of a batch read.

    Args:
        context: The context.
        options: The read.
        pushed: What the query's own filters leave of it.

    Raises:
        PlanningError: A stream is missing, or cannot be read this way.
        DataLossError: A stream does not hold what was asked for.
        UnsupportedFeatureError: The server is older than 2.11.
        TimeoutError: A server gave no answer.
    """
    ranges: list[SequenceRange] = []
    for stream in options.streams:
        state = await describe(context, options, stream)
        if state is None:
            continue
        found = await _resolve(context, options, state)
        # What the query filters out was asked for all the same: a loss is told above, whatever is pushed.
        found = replace(found, first=max(found.first, pushed.first), last=min(found.last, pushed.last))
        filters = pushed.within(options.subjects)
        if not len(found) or filters is None:
            continue
        found = replace(found, size=_share(state, found))
        ranges.append(await place_filter(context, filters, state, found))
    parts = options.min_partitions
    measured = [
        await measure(context, one, max(parts, -(-one.size // options.max_bytes_per_partition))) for one in ranges
    ]
    return partition(measured, min_partitions=parts, max_bytes=options.max_bytes_per_partition)


async def describe(context: JetStreamContext, options: ReadOptions, stream: str) -> StreamState | None:
    """Return the state of a stream that can be read; None: there is none, and that is no failure.

    Raises:
        PlanningError, DataLossError, TimeoutError: As for `plan_read`.
    """
    state = await look(context, stream)
    if state is None:
        lose(options, f"stream {stream!r} does not exist; check 'stream', 'servers', 'domain' and 'apiPrefix'")
        return None
    check_readable(state, allow_unstable_retention=options.allow_unstable_retention)
    return state


async def _resolve(context: JetStreamContext, options: ReadOptions, state: StreamState) -> SequenceRange:
    stream, start, end = state.name, options.starting[state.name], options.ending[state.name]
    first = await first_from(context, state, start)
    last = state.last_seq
    if isinstance(end, AtSequence):
        last = end.seq
    elif isinstance(end, AtTime):
        last = await first_from(context, state, end) - 1
    if first < state.first_seq:
        missing = (
            f"sequences {first} to {state.first_seq - 1} of stream {stream!r} are gone (expired, purged or deleted)"
        )
        lose(options, f"{missing}; it starts at {state.first_seq} now")
    if first > state.last_seq + 1:
        lose(
            options,
            f"stream {stream!r} ends at sequence {state.last_seq}, before the start at {first}; was it re-created?",
        )
    if last > state.last_seq:
        lose(options, f"stream {stream!r} ends at sequence {state.last_seq}, and not at {last} or later")
    return SequenceRange(
        stream,
        max(first, state.first_seq),
        min(last, state.last_seq),
        from_head=start is Named.EARLIEST,
        gapless=state.has_every_sequence,
        created=state.created,
    )


def _share(state: StreamState, found: SequenceRange) -> int:
    return max(0, int(state.size * len(found) / max(1, state.last_seq - state.first_seq + 1)))


async def first_from(context: JetStreamContext, state: StreamState, bound: Bound) -> int:
    """Return the sequence that `bound` names; after the last one where there is none yet."""
    if isinstance(bound, AtSequence):
        return bound.seq
    if isinstance(bound, AtTime):
        # At the leader: another replica may not have it yet.
        js = Context(context)
        found = await get_at_leader(js, state.name, Request(start_time=bound.when).body(), js.timeout)
        return state.last_seq + 1 if found is None else found.seq
    return state.first_seq if bound is Named.EARLIEST else state.last_seq + 1


async def place_filter(
    context: JetStreamContext, filters: tuple[str, ...], state: StreamState, found: SequenceRange
) -> SequenceRange:
    """Decide who filters, the server or the reader.

    On the way it shows, before any task runs, that this server answers batched direct gets at all.
    """
    # A filter like the stream's own subjects is not without effect: sources, and earlier configurations, store others.
    filters = () if ">" in filters else filters
    subject = filters[0] if len(filters) == 1 else None
    probe = DirectGet(context, state.name).batch(1, subject=subject, seq=max(1, found.first))
    rows = len(await probe.to_list())
    if subject is None:
        return replace(found, filters=filters)
    matching = (rows + (probe.num_pending or 0)) / max(1, min(state.messages, state.last_seq - found.first + 1))
    if matching > _SELECTIVE:
        return replace(found, filters=filters)
    return replace(found, subject=subject, size=int(found.size * matching))
