"""A streaming query of the `jetstream` source: where it starts, where a micro-batch ends, which partitions it has.

Spark keeps the offsets; no state here has to survive the process. Two rules:

* Spark asks for the initial offset again if a query stops before its first micro-batch is committed, and does not record
  the first answer. So a start that depends on the moment (``latest``, or a time after the last message) is *pinned*: the
  first micro-batch ends where it starts. It is empty, and puts the start into the checkpoint.
* A replay of a micro-batch must have the same partitions, or a sink would not recognise its rows. So the partitions
  depend only on the offsets and the options.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from nats.js import JetStreamContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.client.api import settled_state
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.spark.connection import run_on_driver
from jetstream_ext.spark.offsets import Position, Positions, decode, encode
from jetstream_ext.spark.options import OptionError, ReadOptions
from jetstream_ext.spark.planning import (
    SequenceRange,
    first_from,
    partition_evenly,
    place_filter,
    readable_state,
    report_data_loss,
    report_lost_head,
)
from jetstream_ext.text import get_logger

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before Spark 4.2
    HAS_LIMITS = False

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stand in for the class that this Spark lacks."""
else:
    HAS_LIMITS = True

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_log = get_logger("spark")

# Spark asks for the latest offset every 10 ms. While there is no new message, the server is asked this often.
_IDLE_PAUSE: Final = 0.1


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows streams: one instance lives on the driver as long as the query; `read` runs on copies of it."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if not HAS_LIMITS and (options.max_offsets is not None or options.max_bytes is not None):
            from pyspark import __version__

            name = "maxBytesPerTrigger" if options.max_offsets is None else "maxOffsetsPerTrigger"
            raise OptionError(
                f"option {name!r}: limits on micro-batches of a Python source need Spark 4.2, but this is Spark "
                f"{__version__}; leave the option out, or upgrade Spark"
            )
        self._options = options
        self._schema = schema
        self._follower = Follower(options)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return run_on_driver(self._options.connection, self._follower.initial)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        run_on_driver(self._options.connection, self._follower.freeze)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch. Spark accepts one; `latestOffset` applies both."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch (Spark before 4.2 passes neither its start nor a limit)."""
        rows, size = None, None
        if limit is not None and not isinstance(limit, ReadAllAvailable):
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_offsets
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        return run_on_driver(
            self._options.connection, lambda context: self._follower.latest(context, start, rows=rows, size=size)
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._follower.reported()  # for ``progress.sources[].latestOffset``

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        parts = run_on_driver(self._options.connection, lambda context: self._follower.plan(context, start, end))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        from jetstream_ext.spark.reading import read_range  # only executors need it

        return read_range(self._options, self._schema, partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint is the only record of the query."""

    def stop(self) -> None:
        """Do nothing: the connection belongs to the process."""


class Follower:
    """The position of one query in its streams, on the driver."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._initial: Positions | None = None
        self._fresh = False
        self._pinned = False
        self._target: Positions | None = None
        self._latest: Positions = {}
        self._idle_since: float | None = None

    async def initial(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the offset before the first micro-batch; always the same one in this process."""
        if self._initial is None:
            self._initial = {name: await self._start(context, name) for name in self._options.streams}
            self._fresh = True
            _log.debug("the query starts at %s%s", self._initial, " (pinned)" if self._pinned else "")
        return encode(self._initial)

    async def freeze(self, context: JetStreamContext) -> None:
        """End the query when the messages stored by now are read (``trigger(availableNow=True)``)."""
        states = {name: await readable_state(context, self._options, name) for name in self._options.streams}
        self._target = {name: Position(state.created, state.last_seq) for name, state in states.items() if state}
        _log.debug("the query ends at %s", self._target)

    async def latest(
        self,
        context: JetStreamContext,
        start: Mapping[str, Any] | None,
        *,
        rows: int | None = None,
        size: int | None = None,
    ) -> dict[str, Any]:
        """Return the offset at the end of the next micro-batch; `start` itself if there is no new message.

        Spark before 4.2 passes no `start`. The micro-batch has at most `rows` sequences and about `size` bytes.
        """
        if start is None:
            return await self._latest_of_all(context)
        if self._initial is not None and self._fresh:
            self._fresh = False
            if self._pinned and start == encode(self._initial):
                return dict(start)
        if self._target is None:
            await self._pause_if_idle()
        ends = await self._ends(context, decode(start), rows, size)
        result = encode(ends)
        if result == start:
            self._idle_since = asyncio.get_running_loop().time()
            return dict(start)
        self._idle_since = None
        _log.debug("the next micro-batch ends at %s", ends)
        return result

    def reported(self) -> dict[str, Any] | None:
        return encode(self._latest) if self._latest else None

    async def plan(
        self, context: JetStreamContext, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[SequenceRange]:
        """Return the partitions of the micro-batch from `start` to `end`."""
        begun, ended = decode(start), decode(end)
        for stream in sorted(begun.keys() - ended.keys()):
            report_data_loss(
                self._options,
                f"stream {stream!r} is in the checkpoint of this query but not in the option 'stream'; add it again, or "
                "start with a new checkpoint",
            )
        ranges: list[SequenceRange] = []
        heads: dict[str, int] = {}
        for stream, stop in ended.items():
            span = self._span(stream, begun.get(stream), stop)
            if len(span) and (planned := await self._plan_stream(context, span)) is not None:
                found, heads[stream] = planned
                ranges.append(found)
        parts = partition_evenly(ranges, max(self._options.min_partitions, len(ended)))
        _log.debug("planned %d partitions from %s to %s", len(parts), begun, ended)
        # A head that is missing by now was reported above; the task whose range covers it does not report it again.
        return [replace(part, from_head=part.first < heads[part.stream]) for part in parts]

    # -- where it starts and ends -------------------------------------------------------------------------------

    async def _start(self, context: JetStreamContext, stream: str) -> Position:
        state = await readable_state(context, self._options, stream)
        if state is None:
            return Position("", 0)
        start = self._options.starting[stream]
        if start == "earliest":
            return Position(state.created, 0)  # the stream may start later by the time it is read
        first = await first_from(context, state, start)
        if isinstance(start, int) and first > state.last_seq + 1:
            report_data_loss(
                self._options, f"stream {stream!r} ends at sequence {state.last_seq}, before the start at {first}"
            )
        if start == "latest" or first > state.last_seq:
            self._pinned = True
        return Position(state.created, first - 1)

    async def _latest_of_all(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the newest offset, where Spark does not pass the start of the micro-batch."""
        new = self._initial is None
        initial = await self.initial(context)
        if new and self._pinned:
            return initial
        await self._pause_if_idle()
        before = dict(self._latest)
        ends: Positions = {}
        for stream in self._options.streams:
            state = await readable_state(context, self._options, stream)
            known = before.get(stream)
            if state is not None and known is not None and not recreated(known.created, state.created):
                state = await self._not_behind(context, state, known.seq)  # a new stream is reported by `plan`
            ends[stream] = decode(initial)[stream] if state is None else Position(state.created, state.last_seq)
        self._latest = dict(ends)
        self._idle_since = asyncio.get_running_loop().time() if ends == before else None
        return encode(ends)

    async def _pause_if_idle(self) -> None:
        if self._idle_since is not None:
            await asyncio.sleep(max(0.0, self._idle_since + _IDLE_PAUSE - asyncio.get_running_loop().time()))

    async def _ends(self, context: JetStreamContext, begun: Positions, rows: int | None, size: int | None) -> Positions:
        ends: Positions = {}
        backlogs: dict[str, tuple[Position, StreamState, int]] = {}
        for stream in self._options.streams:
            before = begun.get(stream)
            if before is None:  # the stream was added since the last run
                before, start = await self._start(context, stream), self._options.starting[stream]
                if start == "latest" or isinstance(start, datetime):
                    ends[stream] = before  # pinned: this micro-batch reads none of it
                    continue
            state = await readable_state(context, self._options, stream)
            if state is None:
                ends[stream] = before
                continue
            self._latest[stream] = Position(state.created, state.last_seq)
            before, state = await self._continue(context, before, state, begun)
            last = state.last_seq
            if self._target is not None:
                target = self._target.get(stream)
                last = 0 if target is None or recreated(target.created, state.created) else min(last, target.seq)
            begin = max(before.seq, state.first_seq - 1)
            if last > begin:
                backlogs[stream] = Position(before.created, begin), state, last - begin
            else:
                ends[stream] = Position(before.created, max(before.seq, last))
        total = sum(backlog for _, _, backlog in backlogs.values())
        for stream, (begun_at, state, backlog) in backlogs.items():
            # Each stream gets its share of the limits, and at least one sequence.
            takes, share = backlog, backlog / total
            if rows is not None:
                takes = min(takes, max(1, math.floor(rows * share)))
            if size is not None:
                each = state.size / max(1, state.last_seq - state.first_seq + 1)  # gaps count as 0 bytes
                takes = min(takes, max(1, math.floor(size * share / max(each, 1e-9))))
            ends[stream] = Position(begun_at.created, begun_at.seq + takes)
        return ends

    async def _continue(
        self, context: JetStreamContext, before: Position, state: StreamState, begun: Positions
    ) -> tuple[Position, StreamState]:
        """Return where to continue in a stream that may have been re-created or truncated."""
        stream = state.name
        if not before.created:
            return Position(state.created, 0), state  # the stream did not exist when the query started
        if recreated(before.created, state.created):
            report_data_loss(self._options, f"stream {stream!r} was deleted and re-created at {state.created}")
            return Position(state.created, 0), state
        if state.last_seq >= before.seq or begun == self._initial:
            return before, state
        settled = await self._not_behind(context, state, before.seq)
        if settled is None:
            return before, state
        if recreated(before.created, settled.created):
            return await self._continue(context, before, settled, begun)
        return (before if settled.last_seq >= before.seq else Position(state.created, 0)), settled

    async def _not_behind(self, context: JetStreamContext, state: StreamState, seq: int) -> StreamState | None:
        """As `_settled` for a stream that had `seq` before; report data loss if it lost its end."""
        settled = await self._settled(context, state, seq, state.created)
        if settled is not None and settled.last_seq < seq and not recreated(state.created, settled.created):
            report_data_loss(
                self._options,
                f"stream {state.name!r} ends at sequence {settled.last_seq}, but the query has already read up to {seq}: "
                "the stream lost its last messages",
            )
        return settled

    async def _settled(
        self, context: JetStreamContext, state: StreamState, seq: int, created: str
    ) -> StreamState | None:
        """Wait until the leader has `seq`: a newly elected one may lag for a moment.

        The stream that was created at `created` may be deleted meanwhile (None, once that is reported) or re-created.
        """
        found: StreamState | None = state

        async def look() -> StreamState:
            nonlocal found
            if found is not None and not recreated(created, found.created):
                found = await readable_state(context, self._options, state.name)
            return found or state

        if state.last_seq < seq and not recreated(created, state.created):
            await settled_state(look, seq)
        return found

    # -- what to read -------------------------------------------------------------------------------------------

    def _span(self, stream: str, begin: Position | None, stop: Position) -> SequenceRange:
        start = self._options.starting.get(stream)
        if begin is None:  # the first micro-batch with this stream
            if isinstance(start, int):
                begin = Position(stop.created, start - 1)
            else:
                begin = Position(stop.created, 0 if start == "earliest" else stop.seq)
        from_head = not begin.created or (begin.seq == 0 and start == "earliest")
        if recreated(begin.created, stop.created):
            report_data_loss(self._options, f"stream {stream!r} was deleted and re-created at {stop.created}")
            begin, from_head = Position(stop.created, 0), True
        # A start that was resolved again, later, may be behind the end that the micro-batch keeps: then it has no rows.
        elif begin.seq > stop.seq and begin != (self._initial or {}).get(stream):
            report_data_loss(
                self._options,
                f"stream {stream!r} ended at sequence {stop.seq} when this micro-batch was planned, but the query had already "
                f"read up to {begin.seq}: the stream lost its last messages",
            )
            begin, from_head = Position(stop.created, 0), True
        return SequenceRange(stream, begin.seq + 1, stop.seq, from_head=from_head, created=stop.created)

    async def _plan_stream(self, context: JetStreamContext, span: SequenceRange) -> tuple[SequenceRange, int] | None:
        """Return the range to read, and the sequence below which a missing head is no loss."""
        stream, options = span.stream, self._options
        state = await readable_state(context, options, stream)
        if state is not None:
            state = await self._settled(context, state, span.last, span.created)
        if state is None:
            return None
        what = f"sequences {span.first} to {span.last} of stream {stream!r}"
        if recreated(span.created, state.created):
            report_data_loss(options, f"{what} are lost: the stream was deleted and re-created at {state.created}")
            return None
        if state.last_seq < span.last:
            report_data_loss(options, f"{what} cannot be read: the stream ends at {state.last_seq}")
        first = span.first
        if not span.from_head:
            report_lost_head(options, state, first, span.last)
            first = max(first, state.first_seq)
        found = replace(span, first=first, last=min(span.last, state.last_seq), gapless=state.has_every_sequence)
        if not len(found):
            return None
        head = max(state.first_seq, first + 1) if span.from_head else 0
        return await place_filter(context, options.subjects, state, found), head
