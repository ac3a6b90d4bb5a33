"""A streaming query of the `jetstream` source: where it starts, where a micro-batch ends, which partitions it has.

Spark keeps the offsets; no state here has to survive the process. Two rules:

* Spark asks for the initial offset again if a query stops before its first micro-batch is committed, and does not record
  the first answer. So a start that depends on the moment (``latest``, or a time after the last message) is *pinned*: the
  first micro-batch ends where it starts. It is empty, and puts the start into the checkpoint.
* A replay of a micro-batch must have the same rows in the same partitions. So its end holds its plan (see `offsets`), and
  `Follower.plan` only carries that out::

    latest(start)      what is stored now ─► is it the same stream? ─► how many rows? ─► limits ─► cuts ─► the end, with its plan
    plan(start, end)   the plan in the end ─► is it still the same stream, and is everything still there? ─► partitions

A stream without new messages has no partition and costs no request of the plan. While there is nothing to read, Spark gets
the last answer again, without a request, until the wait for new messages ends (see `waiting`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from nats.js import JetStreamContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.client.api import gather_bounded, settled_state
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.spark.connection import run_on_driver
from jetstream_ext.spark.offsets import NOWHERE, Offset, Position, Seen, decode, encode
from jetstream_ext.spark.options import MOST_PARTITIONS, OptionError, ReadOptions
from jetstream_ext.spark.planning import (
    PARTITIONS,
    STREAMS_AT_ONCE,
    DataLossError,
    Measured,
    PlanningError,
    counts_from,
    cut_all,
    end_of_rows,
    first_from,
    is_same,
    measure,
    readable_state,
    report_data_loss,
    report_lost,
    state_of,
    stored_since,
    streams_of,
)
from jetstream_ext.spark.ranges import SequenceRange, even_cuts, shares
from jetstream_ext.spark.waiting import Waiting
from jetstream_ext.text import get_logger, log_state

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

_T = TypeVar("_T")


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows streams: one instance lives on the driver as long as the query; `read` runs on copies of it."""

    def __init__(self, options: ReadOptions, schema: StructType, *, snapshot: bool = False) -> None:
        limits = {
            "maxRowsPerTrigger": options.max_rows,
            "maxBytesPerTrigger": options.max_bytes,
            "minRowsPerTrigger": options.min_rows,
        }
        name = next((name for name, limit in limits.items() if limit is not None), None)
        if name is not None and not HAS_LIMITS:
            from pyspark import __version__

            also = " (or 'maxOffsetsPerTrigger')" if name == "maxRowsPerTrigger" else ""
            raise OptionError(
                f"option {name!r}{also}: limits on micro-batches of a Python source need Spark 4.2, but this is Spark "
                f"{__version__}; leave the option out, or upgrade Spark"
            )
        self._options = options
        self._schema = schema
        self._follower = Follower(options, snapshot=snapshot)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return run_on_driver(self._options.connection, self._follower.initial)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        run_on_driver(self._options.connection, self._follower.freeze)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch. Spark accepts one; `latestOffset` applies both."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch (Spark before 4.2 passes neither its start nor a limit)."""
        limited = limit is not None and not isinstance(limit, ReadAllAvailable)
        return run_on_driver(
            self._options.connection, lambda context: self._follower.latest(context, start, limited=limited)
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._follower.reported()  # for ``progress.sources[].latestOffset``

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        parts = run_on_driver(self._options.connection, lambda context: self._follower.plan(context, start, end))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        from jetstream_ext.spark.reading import read_range  # only executors need it

        return read_range(self._options, self._schema, getattr(partition, "value", None))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint is the only record of the query."""

    def stop(self) -> None:
        self._follower.stop()  # the connection belongs to the process


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of one stream when the next micro-batch is planned."""

    begin: Position  # where the micro-batch starts in it
    state: StreamState | None = None  # None: it does not exist
    changed: bool = False  # `begin` is not what Spark passed, so it must be written even if there is nothing to read
    from_head: bool = False  # it starts at the first message that is stored, whichever that is
    backlog: Measured | None = None  # what there is to read


class Follower:
    """The position of one query in its streams, on the driver.

    With `snapshot`, the micro-batches up to the sequence that is the last one when the query starts have only the newest
    messages of their subjects up to it. That sequence stays in the offsets until they are read.
    """

    def __init__(self, options: ReadOptions, *, snapshot: bool = False) -> None:
        self._options = options
        self._snapshot = snapshot
        self._waiting = Waiting(options.subjects[0] if len(options.subjects) == 1 else None)
        self._waiting_since: float | None = None  # for `minRowsPerTrigger`
        self._initial: Offset | None = None
        self._pinned: set[str] = set()  # streams whose start depends on the moment, until it is in an offset
        self._target: Mapping[str, int] | None = None
        self._states: Mapping[str, StreamState] = {}  # as they were when the server was asked last
        # The answer to the last question, and, if that is the end of a micro-batch, of which states and ranges.
        self._answer: dict[str, Any] = {}
        self._planned: dict[str, tuple[StreamState, SequenceRange]] = {}
        # The streams when the query was at their ends last, and when that was: what has expired by then was read before.
        self._at_end: dict[str, tuple[Seen, datetime]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Follower, snapshot=self._snapshot), (self._options,)  # a copy has no connection

    def stop(self) -> None:
        self._waiting.end()

    def reported(self) -> dict[str, Any] | None:
        latest = {name: Position.at(state, state.last_seq) for name, state in self._states.items()}
        return encode(Offset(latest)) if latest else None

    async def freeze(self, context: JetStreamContext) -> None:
        """End the query when the messages stored by now are read (``trigger(availableNow=True)``)."""
        states = await self._of_each(lambda name: readable_state(context, self._options, name), context)
        self._target = {name: state.last_seq for name, state in states.items() if state}
        log_state(_log, "query", "end found", end=self._target)

    async def _of_each(
        self, look: Callable[[str], Awaitable[_T]], context: JetStreamContext, known: Iterable[str] = ()
    ) -> dict[str, _T]:
        """Return what there is to say about each stream, and each of the `known` ones."""
        streams = await streams_of(context, self._options, known)
        return dict(zip(streams, await gather_bounded(look, streams, limit=STREAMS_AT_ONCE), strict=True))

    # -- where it starts ----------------------------------------------------------------------------------------

    async def initial(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the offset before the first micro-batch; always the same one in this process."""
        return encode(await self._initial_offset(context))

    async def _initial_offset(self, context: JetStreamContext) -> Offset:
        if self._initial is None:
            found = await self._of_each(lambda name: self._start(context, name), context)
            if self._options.stream_pattern is not None:  # some may be gone by now
                found = {stream: at for stream, at in found.items() if at.seen.created}
            self._initial = Offset(found)
            log_state(_log, "query", "start found", start=self._initial.streams, pinned=", ".join(sorted(self._pinned)))
        return self._initial

    async def _start(self, context: JetStreamContext, stream: str) -> Position:
        state = await readable_state(context, self._options, stream)
        if state is None:
            return NOWHERE
        if state.messages:
            await counts_from(context, SequenceRange(stream, 1, 1), [state.last_seq])  # direct gets work
        start = self._options.starting.of(stream)
        if start == "earliest":
            # The stream may start later by the time it is read.
            return Position.at(state, 0, snapshot=state.last_seq if self._snapshot else 0)
        if isinstance(start, datetime) and start > state.now:
            # The next message may be stored before this time.
            wait = (start - state.now).total_seconds()
            if wait > self._options.connection.timeout:
                raise PlanningError(
                    f"{self._options.starting.option} ({start.isoformat()}) is in the future: the server's time is "
                    f"{state.now.isoformat()}; start the query later, or use startingOffsets=latest"
                )
            await asyncio.sleep(wait)
            return await self._start(context, stream)
        first = await first_from(context, state, start)
        if isinstance(start, int) and first > state.last_seq + 1:
            report_data_loss(
                self._options, f"stream {stream!r} ends at sequence {state.last_seq}, before the start at {first}"
            )
        if start == "latest" or first > state.last_seq:
            self._pinned.add(stream)
        return Position.at(state, first - 1)

    # -- where a micro-batch ends -------------------------------------------------------------------------------

    async def latest(
        self, context: JetStreamContext, start: Mapping[str, Any] | None, *, limited: bool = True
    ) -> dict[str, Any]:
        """Return the offset at the end of the next micro-batch; `start` itself if there is no new message.

        Spark before 4.2 passes no `start`. Then the end has no plan, and the start is taken to be the last end, if this
        process has returned one. With `limited`, the limits of the options apply.
        """
        if self._pinned and self._initial is not None and start == encode(self._initial):
            self._pinned.clear()  # the first micro-batch is empty, and its end is the start
            return encode(self._initial)
        await self._waiting.until_due()
        planned, before = start is not None, dict(start or self._answer)
        begun, now = (
            decode(before) if before else await self._initial_offset(context),
            asyncio.get_running_loop().time(),
        )
        looked = await self._of_each(
            lambda name: self._look_at(context, name, begun.streams.get(name), planned=planned), context, begun.streams
        )
        found = {name: one for name, one in looked.items() if one is not None}
        self._states = {name: one.state for name, one in found.items() if one.state is not None}
        changed = begun.streams.keys() != found.keys() or any(one.changed for one in found.values())
        if before and not changed and self._must_wait(context, found, now):
            self._answer = before
            return dict(before)
        if planned:
            # Not in `plan`: Spark writes this offset down before, and then a stream that was left out could not be added again.
            self._report_removed(begun, found)
        self._waiting.found([name for name, one in found.items() if one.backlog])
        self._waiting_since = None
        end = await self._end_of(context, found, limited=limited) if planned else self._end_without_plan(found)
        self._answer = encode(end)
        log_state(_log, "query", "end of micro-batch", end=end.streams)
        return dict(self._answer)

    def _must_wait(self, context: JetStreamContext, found: Mapping[str, _Found], now: float) -> bool:
        """Whether there is nothing to read, or less than `minRowsPerTrigger` before `maxTriggerDelay`; wait for more then."""
        backlogs = [one.backlog for one in found.values() if one.backlog]
        wanted = self._options.min_rows
        if self._target is not None or (backlogs and wanted is None):
            return not backlogs
        if self._waiting_since is None:
            self._waiting_since = now
        left = self._waiting_since + self._options.max_delay - now
        if backlogs and (left <= 0 or sum(each.rows for each in backlogs) >= (wanted or 0)):
            return False
        # Doorbells tell neither of streams that come, nor of the end of the delay.
        silent = bool(backlogs) or self._options.stream_pattern is not None or len(self._states) < len(found)
        states = [] if silent else [*self._states.values()]
        self._waiting.begin(context, states, left if backlogs else math.inf, now)
        return True

    def _report_removed(self, begun: Offset, streams: Iterable[str]) -> None:
        where, again = "in the option 'stream'", "add it again"
        if self._options.stream_pattern is not None:
            where, again = "among the streams that match 'streamPattern'", "create it again"
        for stream in sorted(begun.streams.keys() - set(streams)):
            report_data_loss(
                self._options,
                f"stream {stream!r} is in the checkpoint of this query but not {where}; {again}, or start with a new "
                "checkpoint",
            )

    async def _look_at(
        self, context: JetStreamContext, stream: str, before: Position | None, *, planned: bool, end: int | None = None
    ) -> _Found | None:
        """Return what there is to read of a stream, up to the sequence `end`; None: it matched the pattern and is gone."""
        options, added = self._options, before is None
        if before is None:
            # What a pattern finds after the query has started is new: all of it is to be read.
            whole = options.stream_pattern is not None or options.starting.of(stream) == "earliest"
            before = NOWHERE if whole else await self._start(context, stream)
            if not (whole or isinstance(options.starting.of(stream), int)):
                return _Found(before, changed=True)  # pinned: this micro-batch reads none of it
        state = await readable_state(context, options, stream)
        if state is None:
            gone = options.stream_pattern is not None
            return None if gone else _Found(before.without_plan(), changed=added)
        begin, state, from_head = await self._resume(context, before, state, end)
        found = _Found(begin, state, added or begin != before.without_plan(), from_head)
        last = state.last_seq if end is None else min(state.last_seq, end)
        if last == begin.seq:
            self._at_end[stream] = Seen.of(state), state.now
        if self._target is not None:
            last = min(last, self._target.get(stream, 0))
        if last <= begin.seq:
            return found
        if begin.snapshot_left:
            last = min(last, begin.snapshot)
        elif planned and not from_head:
            seen, since = self._past(state, begin)
            await report_lost(context, options, state, range(begin.seq + 1, last + 1), seen, since)
        span = SequenceRange(stream, max(begin.seq + 1, state.first_seq), last, options.subjects)
        limits = options.max_rows, options.min_rows, options.max_records_per_partition
        exact = any(limit is not None for limit in limits)
        measured = Measured(span, len(span), 0, even=True)
        return replace(found, backlog=await measure(context, state, span, exact=exact) if planned else measured)

    def _past(self, state: StreamState, at: Position) -> tuple[Seen, datetime | None]:
        """Return a stream when the query was seen at a position last, and a time before which nothing behind it was stored."""
        (seen, when), next_seq = self._at_end.get(state.name, (at.seen, None)), at.seq + 1
        if when is None or (seen.created, seen.last_seq) != (state.created, at.seq):
            return at.seen, stored_since([*at.seen.ends, *state.ends], next_seq)
        # A mirror has the times of its origin.
        return seen, stored_since(seen.ends, next_seq) if state.origin else when

    async def _end_of(self, context: JetStreamContext, found: Mapping[str, _Found], *, limited: bool) -> Offset:
        """Return the end of a micro-batch, which each stream shares by its backlog, with its plan."""
        backlogs = [one.backlog for one in found.values() if one.backlog is not None]
        total = max(1, sum(backlog.rows for backlog in backlogs))
        rows, size = (self._options.max_rows, self._options.max_bytes) if limited else (None, None)

        async def shared(backlog: Measured) -> Measured:
            takes, share = backlog.rows, backlog.rows / total
            if rows is not None:
                takes = min(takes, max(1, int(rows * share)))
            if size is not None:
                takes = min(takes, max(1, int(size * share * backlog.rows / max(1, backlog.size))))
            return await end_of_rows(context, backlog, takes)

        taken = await gather_bounded(shared, backlogs, limit=STREAMS_AT_ONCE)
        cuts = await cut_all(context, self._options, taken)
        streams = {stream: one.begin for stream, one in found.items()}
        self._planned = {}
        for span, where in zip([one.span for one in taken], cuts, strict=True):
            state = found[span.stream].state
            assert state is not None
            end = Position.at(state, span.last, snapshot=streams[span.stream].snapshot_left)
            streams[span.stream] = replace(end, first=span.first, cuts=where)
            self._planned[span.stream] = state, span
        return Offset(streams, self._options.min_partitions)

    def _end_without_plan(self, found: Mapping[str, _Found]) -> Offset:
        """Return the newest offset, where Spark does not pass the start of the micro-batch."""
        streams: dict[str, Position] = {}
        for stream, one in found.items():
            last = one.begin.seq if one.backlog is None or stream in self._pinned else one.backlog.span.last
            # The first micro-batch of a query is the snapshot; a restarted query has read it, and `plan` ignores it.
            snapshot = 0 if self._answer else one.begin.snapshot
            streams[stream] = one.begin
            if one.state is not None:
                end = Position.at(one.state, last, snapshot=snapshot)
                first = None if self._answer else one.begin.seq + 1  # if it is the first one of the query
                streams[stream] = replace(end, first=first, head=one.state.first_seq)
        self._pinned.clear()
        return Offset(streams, self._options.min_partitions, self._options.max_records_per_partition)

    # -- whether it can go on where it was ----------------------------------------------------------------------

    async def _resume(
        self, context: JetStreamContext, before: Position, state: StreamState, end: int | None
    ) -> tuple[Position, StreamState, bool]:
        """Return where to go on in a stream behind a position, its state, and whether that is at its first message.

        `end` is where the stream ended when the micro-batch was planned, if that was before.
        """
        if not before.seen.created:  # it did not exist when the query started
            return Position.at(state, 0), state, True
        before, options = before.without_plan(), self._options
        outcome, state = await self._check(context, before, state, end)
        if outcome == "same":
            return before, state, before.seq == 0 and options.starting.of(state.name) == "earliest"
        if outcome == "other" and options.on_recreate == "keep":
            return Position.at(state, before.seq, snapshot=before.snapshot), state, False
        return Position.at(state, 0), state, True

    async def _check(
        self, context: JetStreamContext, at: Position, state: StreamState, end: int | None = None
    ) -> tuple[Literal["same", "other", "short"], StreamState]:
        """Return whether a stream is that of a position and has it, is another one, or has lost its end; and its state.

        Everything but the first is reported. A newly elected leader may lag for a moment, so this waits for the position.
        """
        options, ahead = self._options, at.is_ahead or self._options.on_recreate == "keep"
        same = await is_same(context, at.seen, state)
        if same and state.last_seq < at.seq and not ahead:
            before = state

            async def look() -> StreamState:
                return await state_of(context, before.name) or before

            state = await settled_state(look, at.seq)
            same = not recreated(before.created, state.created) or await is_same(context, at.seen, state)
        last, what = state.last_seq if end is None else min(state.last_seq, end), f"stream {state.name!r}"
        if not same:
            what += f" was deleted and re-created at {state.created}, and the query has read the stream before it, or was to read it"
            choice = options.on_recreate or ("fail" if options.fail_on_data_loss else "earliest")
            if choice == "fail":
                raise DataLossError(
                    f"{what}. Set the option onRecreate to 'earliest' to read all of the new stream, or to 'keep' to continue at "
                    "the same sequence, as in a stream that was restored from a backup"
                )
            where = "at its first message" if choice == "earliest" else "at the same sequence"
            _log.warning("%s; going on %s, because of onRecreate or failOnDataLoss", what, where)
            return "other", state
        if last < at.seq and not ahead:
            what += f" ends at sequence {last}, but the query has already read up to {at.seq}, or was to"
            report_data_loss(options, f"{what}: the stream lost its last messages")
            return "short", state
        return "same", state

    # -- what to read -------------------------------------------------------------------------------------------

    async def plan(
        self, context: JetStreamContext, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[SequenceRange]:
        """Return the partitions of the micro-batch from `start` to `end`."""
        begun, ended = decode(start), decode(end)
        if any(at.head is not None for at in ended.streams.values()):
            self._report_removed(begun, ended.streams)  # `latest` did not know where the micro-batch starts
        planned = self._planned if dict(end) == self._answer else {}

        async def look(stream: str) -> _ToRead | None:
            return await self._to_read(context, stream, begun, ended.streams[stream], planned.get(stream))

        # Streams without new messages cost nothing.
        new = [name for name, at in ended.streams.items() if _has_new(at, begun.streams.get(name))]
        found = [one for one in await gather_bounded(look, new, limit=STREAMS_AT_ONCE) if one is not None]
        parts = _partitions(found, ended)
        log_state(_log, "query", "planned", partitions=len(parts), start=begun.streams, end=ended.streams)
        return parts

    async def _to_read(
        self,
        context: JetStreamContext,
        stream: str,
        begun: Offset,
        at: Position,
        planned: tuple[StreamState, SequenceRange] | None,
    ) -> _ToRead | None:
        """Return what a micro-batch reads of a stream; `planned`: this process has just planned it."""
        options, before, state = self._options, begun.streams.get(stream), planned[0] if planned else None
        start, first, snapshot = options.starting.of(stream), at.first or 1, at.snapshot
        if at.head is not None:  # it has no plan: see where it begins
            starts = begun == self._initial
            # A start that was resolved again, later, may be behind the end that the micro-batch keeps: then it has no rows.
            end = max(at.seq, before.seq) if starts and before is not None else at.seq
            found = await self._look_at(context, stream, before, planned=False, end=end)
            if found is None:
                return None
            before, state, from_head = found.begin, found.state, found.from_head
            first = at.first if starts and at.first is not None else before.seq + 1
            snapshot = at.snapshot if starts else 0
        else:
            state = state or await readable_state(context, options, stream)
            if before is None:
                from_head = options.stream_pattern is not None or not isinstance(start, int)
            else:  # or it was re-created
                at_start = not before.seen.created or (before.seq == 0 and start == "earliest")
                from_head = at_start or first != before.seq + 1
            from_head = from_head and planned is not None  # a repeated micro-batch begins where it began
        span = SequenceRange(stream, first, at.seq, options.subjects, from_head=from_head, snapshot=snapshot)
        if state is not None and planned is None and span:
            outcome, state = await self._check(context, at, state)
            if outcome == "other" and options.on_recreate != "keep":
                state = None
        if state is not None:
            seen, since = self._past(state, before) if before is not None and first > before.seq else (at.seen, None)
            if planned is not None:
                span = replace(planned[1], from_head=from_head, snapshot=snapshot)
            else:
                if not from_head and not snapshot:
                    known = at.seen if at.head is None else seen
                    await report_lost(context, options, state, range(first, at.seq + 1), known, since)
                if options.subjects:
                    span = (await measure(context, state, span)).span
            span = replace(span, seen=Seen.of(state), since=since)
        span = replace(span, first=max(span.first, at.head or 1))
        return _ToRead(span, at.cuts if at.head is None else None, state) if span else None


class _ToRead(NamedTuple):
    """What a micro-batch reads of one stream, and where to cut it."""

    span: SequenceRange  # as it was planned, so that its partitions stay the same
    cuts: tuple[int, ...] | None  # None: evenly, in as many ranges as there are partitions left
    state: StreamState | None  # None: it is gone


def _has_new(at: Position, before: Position | None) -> bool:
    """Whether a micro-batch that begins at `before` and ends at `at` may have messages."""
    if at.head is None:
        return at.first is not None and at != before
    return before is None or (at.seen.created, at.seq) != (before.seen.created, before.seq)


def _partitions(found: list[_ToRead], ended: Offset) -> list[SequenceRange]:
    """Return the partitions of a micro-batch: of the ranges that are `found`, and empty ones up to the number of its offset.

    Without anything to read, it has no partition.
    """
    uncut = [one.span for one in found if one.cuts is None]
    rest = (ended.partitions or PARTITIONS) - sum(len(one.cuts) + 1 for one in found if one.cuts is not None)
    lengths = [len(span) for span in uncut]
    fewest = [1 if ended.most is None else -(-length // max(1, ended.most)) for length in lengths]
    if (needed := sum(fewest)) > MOST_PARTITIONS:
        raise PlanningError(
            f"the micro-batch would have {needed} partitions, and a read has {MOST_PARTITIONS} at most; raise "
            "maxRecordsPerPartition (before Spark 4.2 it counts sequences)"
        )
    counts = iter(shares(lengths, lengths, fewest, rest))
    parts: list[SequenceRange] = []
    for span, cuts, state in found:
        # What is missing below the first sequence was reported, unless the range begins wherever that is.
        reported = max(state.first_seq if state else 0, span.first + 1 if span.from_head else 0)
        stored = state.last_seq if state else 0
        cuts = even_cuts(span.first, span.last, next(counts)) if cuts is None else cuts
        parts += [
            replace(part, last=min(part.last, stored), from_head=part.first < reported) for part in span.cut(cuts)
        ]
    if not any(map(len, parts)):
        return []
    last = parts[-1]
    return parts + [replace(last, first=last.last + 1, from_head=False)] * ((ended.partitions or 0) - len(parts))
