"""A streaming query's place in its streams, on the driver: where it starts, how far a batch goes, what to read for it.

Spark keeps the offsets; nothing here has to survive. Two things are special:

* Spark asks for the initial offset again if a query stops before its first batch is committed, and keeps no record of
  the first answer. So a start that depends on the moment (``latest``, a time that nothing was stored after yet) is
  *pinned*: the first batch ends where it starts, is empty, and puts the start into the checkpoint.
* A replay of a batch must give the same partitions, or a sink would not recognize its rows. So the cuts come from the
  offsets and the options alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from nats.js import JetStreamContext

from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.spark.bounds import AtSequence, AtTime, Named
from jetstream_ext.spark.offsets import Position, Positions, decode, encode
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import describe, first_from, place_filter
from jetstream_ext.spark.ranges import SequenceRange, partition_evenly
from jetstream_ext.spark.states import lose

# Spark asks every 10 ms whether there is news; while there is none, look this often.
IDLE_PAUSE: Final = 0.1
# How long a new leader may be behind what the last one said.
_SETTLE: Final = 3.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a batch may have: sequences, or bytes (about), or both; none is everything."""

    rows: int | None = None
    size: int | None = None


class Follower:
    """The place of one query in one process.

    Args:
        options: The read.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._initial: Positions | None = None
        self._fresh = False
        self._pinned = False
        self._target: Positions | None = None
        self._latest: Positions = {}
        self._idle_since: float | None = None

    async def initial(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the offset before the first batch; always the same one in this process.

        Raises:
            PlanningError, DataLossError, TimeoutError: As for `plan_read`.
        """
        if self._initial is None:
            self._initial = {name: await self._start(context, name) for name in self._options.streams}
            self._fresh = True
        return encode(self._initial)

    async def freeze(self, context: JetStreamContext) -> None:
        """Read nothing that is stored after this moment (``trigger(availableNow=True)``)."""
        states = {name: await describe(context, self._options, name) for name in self._options.streams}
        self._target = {name: Position(state.created, state.last_seq) for name, state in states.items() if state}

    async def latest(
        self, context: JetStreamContext, start: Mapping[str, Any] | None, limit: Limit | None
    ) -> dict[str, Any]:
        """Return the offset at the end of the next batch; `start` itself if there is nothing new.

        Args:
            context: The context.
            start: Where the batch starts; None: this Spark (before 4.2) does not say.
            limit: How far it may go.

        Raises:
            PlanningError, DataLossError, TimeoutError: As for `plan_read`.
        """
        if start is None:
            return await self._latest_of_all(context)
        if self._initial is not None and self._fresh:
            self._fresh = False
            if self._pinned and start == encode(self._initial):
                return dict(start)
        if self._idle_since is not None and self._target is None:
            left = self._idle_since + IDLE_PAUSE - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, left))
        begun = decode(start)
        ends = await self._ends(context, begun, limit or Limit())
        result = encode(ends)
        self._idle_since = asyncio.get_running_loop().time() if result == start else None
        return dict(start) if result == start else result

    def reported(self) -> dict[str, Any] | None:
        """Return the newest offset that was seen, for the query's progress."""
        return encode(self._latest) if self._latest else None

    async def plan(
        self, context: JetStreamContext, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[SequenceRange]:
        """Return what to read for the batch from `start` to `end`.

        Raises:
            PlanningError, DataLossError, TimeoutError: As for `plan_read`.
        """
        begun, ended = decode(start), decode(end)
        for stream in sorted(begun.keys() - ended.keys()):
            lose(self._options, f"stream {stream!r} was read by this query and is no longer among its streams")
        ranges: list[SequenceRange] = []
        heads: dict[str, int] = {}
        for stream, stop in ended.items():
            span = self._span(stream, begun.get(stream), stop)
            if span is not None and len(span):
                planned = await self._plan_stream(context, span)
                if planned is not None:
                    found, heads[stream] = planned
                    ranges.append(found)
        parts = partition_evenly(ranges, max(self._options.min_partitions, len(ended)))
        # A head that was gone when the batch was planned is not the loss of a task that happens to cover it.
        return [replace(one, from_head=one.first < heads[one.stream]) for one in parts]

    # -- where it starts and ends -------------------------------------------------------------------------------

    def _moves(self, stream: str) -> bool:
        """Return whether the start in `stream` depends on the moment."""
        start = self._options.starting[stream]
        return start is Named.LATEST or isinstance(start, AtTime)

    async def _start(self, context: JetStreamContext, stream: str) -> Position:
        state = await describe(context, self._options, stream)
        if state is None:
            return Position("", 0)
        start = self._options.starting[stream]
        if start is Named.EARLIEST:
            return Position(state.created, 0)  # wherever the stream starts when it is read
        first = await first_from(context, state, start)
        if isinstance(start, AtSequence) and first > state.last_seq + 1:
            lose(self._options, f"stream {stream!r} ends at sequence {state.last_seq}, before the start at {first}")
        if start is Named.LATEST or first > state.last_seq:
            self._pinned = True
        return Position(state.created, first - 1)

    async def _latest_of_all(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the newest offset, without knowing where the batch starts."""
        new = self._initial is None
        initial = await self.initial(context)
        if new and self._pinned:
            return initial
        if self._idle_since is not None:
            await asyncio.sleep(max(0.0, self._idle_since + IDLE_PAUSE - asyncio.get_running_loop().time()))
        before = dict(self._latest)
        ends: Positions = {}
        for stream in self._options.streams:
            state = await describe(context, self._options, stream)
            known = before.get(stream)
            if state is not None and known is not None and known.created == state.created:
                state = await self._not_behind(context, state, known.seq)
            ends[stream] = self._initial_of(stream) if state is None else Position(state.created, state.last_seq)
        self._latest = dict(ends)
        self._idle_since = asyncio.get_running_loop().time() if ends == before else None
        return encode(ends)

    def _initial_of(self, stream: str) -> Position:
        return Position("", 0) if self._initial is None else self._initial[stream]

    async def _ends(self, context: JetStreamContext, begun: Positions, limit: Limit) -> Positions:
        ends: Positions = {}
        backlogs: dict[str, tuple[Position, StreamState, int]] = {}
        for stream in self._options.streams:
            before = begun.get(stream)
            if before is None:  # added since the query ran last
                before = await self._start(context, stream)
                if self._moves(stream):
                    ends[stream] = before  # pinned: this batch has nothing of it
                    continue
            state = await describe(context, self._options, stream)
            if state is None:
                ends[stream] = before
                continue
            self._latest[stream] = Position(state.created, state.last_seq)
            before, state = await self._continue(context, before, state, begun)
            last = state.last_seq
            if self._target is not None:
                target = self._target.get(stream)
                last = min(last, target.seq) if target is not None and target.created == state.created else 0
            from_seq = max(before.seq, state.first_seq - 1) if last > before.seq else before.seq
            ends[stream] = before
            if last > from_seq:
                backlogs[stream] = before, state, last - from_seq
            elif last > before.seq:
                ends[stream] = Position(before.created, last)
        total = sum(backlog for _, _, backlog in backlogs.values())
        for stream, (before, state, backlog) in backlogs.items():
            takes = _takes(limit, state, backlog, total)
            ends[stream] = Position(before.created, max(before.seq, state.first_seq - 1) + takes)
        return ends

    async def _continue(
        self, context: JetStreamContext, before: Position, state: StreamState, begun: Positions
    ) -> tuple[Position, StreamState]:
        """Return where to go on in a stream that may have been made anew or cut off."""
        stream = state.name
        if not before.created:
            return Position(state.created, 0), state  # there was none when the query started
        if before.created != state.created:
            lose(self._options, f"stream {stream!r} was deleted and created anew at {state.created}")
            return Position(state.created, 0), state
        if state.last_seq >= before.seq or begun == self._initial:
            return before, state
        settled = await self._not_behind(context, state, before.seq)
        return (before if settled.last_seq >= before.seq else Position(state.created, 0)), settled

    async def _not_behind(self, context: JetStreamContext, state: StreamState, seq: int) -> StreamState:
        """Return the state of a stream that has `seq`, as it had before; fail, or warn, if it lost its end."""
        settled = await self._settled(context, state, seq)
        if settled.last_seq < seq:
            lose(
                self._options,
                f"stream {state.name!r} ends at sequence {settled.last_seq}; the query has read up to {seq} already, so "
                "the stream lost its end",
            )
        return settled

    async def _settled(self, context: JetStreamContext, state: StreamState, seq: int) -> StreamState:
        """Look again for a while until the leader has `seq`: one that was just elected may not yet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE
        while state.last_seq < seq and loop.time() < deadline:
            await asyncio.sleep(IDLE_PAUSE)
            state = await describe(context, self._options, state.name) or state
        return state

    # -- what to read -------------------------------------------------------------------------------------------

    def _span(self, stream: str, begin: Position | None, stop: Position) -> SequenceRange | None:
        """Return the range between two positions, or None: nothing."""
        start = self._options.starting.get(stream)
        if begin is None:  # the first batch that has this stream
            if isinstance(start, AtSequence):
                begin = Position(stop.created, start.seq - 1)
            else:
                begin = Position(stop.created, 0 if start is Named.EARLIEST else stop.seq)
        anew = False
        if begin.created != stop.created:
            if begin.created:
                lose(self._options, f"stream {stream!r} was deleted and created anew at {stop.created}")
            begin, anew = Position(stop.created, 0), True
        elif begin.seq > stop.seq:
            if (self._initial or {}).get(stream) == begin:
                return None  # a start that was resolved again, later; nothing is lost: the batch ends where it did
            lose(
                self._options,
                f"stream {stream!r} ended at sequence {stop.seq} when this batch was planned; the query had read up to "
                f"{begin.seq} already, so the stream lost its end",
            )
            begin, anew = Position(stop.created, 0), True
        from_head = anew or (begin.seq == 0 and start is Named.EARLIEST)
        return SequenceRange(stream, begin.seq + 1, stop.seq, from_head=from_head, created=stop.created)

    async def _plan_stream(self, context: JetStreamContext, span: SequenceRange) -> tuple[SequenceRange, int] | None:
        """Return the range as it is to be read, and below which sequence nothing is missed."""
        stream, options = span.stream, self._options
        state = await describe(context, options, stream)
        if state is None:
            return None
        what = f"sequences {span.first} to {span.last} of stream {stream!r}"
        if state.created != span.created:
            lose(options, f"{what} are gone: it was deleted and created anew at {state.created}")
            return None
        if state.last_seq < span.last:
            state = await self._settled(context, state, span.last)
        if state.last_seq < span.last:
            lose(options, f"{what} should be read, but the stream ends at {state.last_seq}")
        first = span.first
        if state.first_seq > first and not span.from_head:
            missing = f"sequences {first} to {min(span.last, state.first_seq - 1)} of stream {stream!r}"
            lose(options, f"{missing} are gone (expired, purged or deleted); it starts at {state.first_seq} now")
            first = state.first_seq
        head = state.first_seq if span.from_head else 0
        found = replace(span, first=first, last=min(span.last, state.last_seq), gapless=state.has_every_sequence)
        if not len(found):
            return None
        return await place_filter(context, options.subjects, state, found), max(
            head, first + 1 if span.from_head else 0
        )


def _takes(limit: Limit, state: StreamState, backlog: int, total: int) -> int:
    """Return how many sequences of a stream's backlog are its part of a batch: in proportion, and one at least."""
    takes = backlog
    share = backlog / total
    if limit.rows is not None:
        takes = min(takes, max(1, math.floor(limit.rows * share)))
    if limit.size is not None:
        each = state.size / max(1, state.last_seq - state.first_seq + 1)  # gaps count as nothing
        takes = min(takes, max(1, math.floor(limit.size * share / max(each, 1e-9))))
    return takes
