"""A streaming query of the `jetstream` source: where it starts, where a micro-batch ends, which partitions it has.

Spark keeps the offsets; no state here has to survive the process. Two rules:

* Spark asks for the initial offset again if a query stops before its first micro-batch is committed, and does not record
  the first answer. So a start that depends on the moment (``latest``, or a time after the last message) is *pinned*: the
  first micro-batch ends where it starts. It is empty, and puts the start into the checkpoint.
* A replay of a micro-batch must have the same rows in the same partitions. So its end holds its plan (see `offsets`), and
  `Follower.plan` only carries that out::

    latest(start)      what is stored now ─► is it the same stream? ─► how many rows? ─► limits ─► cuts ─► the end, with its plan
    plan(start, end)   the plan in the end ─► is it still the same stream, and is everything still there? ─► partitions
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from nats.js import JetStreamContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.spark.connection import run_on_driver
from jetstream_ext.spark.offsets import Offset, Position, decode, encode, held_by
from jetstream_ext.spark.options import MOST_PARTITIONS, Bound, OptionError, ReadOptions
from jetstream_ext.spark.planning import (
    STREAMS_AT_ONCE,
    Measured,
    PlanningError,
    counts_from,
    cut,
    first_from,
    is_same,
    known_of,
    measure,
    readable_state,
    report_data_loss,
    report_lost_head,
    run_search,
    stored_since,
    streams_of,
)
from jetstream_ext.spark.ranges import SequenceRange, end_of_rows, even_cuts, shares
from jetstream_ext.spark.resume import go_on_in, not_behind, resume, still_there
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
        self._ends = False  # when everything stored by now is read (``trigger(availableNow=True)``)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return run_on_driver(self._options.connection, self._follower.initial)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._ends = True
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
        rows, size = None, None
        if limit is not None and not isinstance(limit, ReadAllAvailable):
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.max_rows
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

        return read_range(self._options, self._schema, getattr(partition, "value", None))

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark's checkpoint is the only record of the query."""

    def stop(self) -> None:
        """Do nothing: the connection belongs to the process."""


# Spark asks for the latest offset every 10 ms. While there is no new message, the server is asked less and less often: the
# pause in seconds after the first answer without news, and the longest one.
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 1.0
# So many ends of a stream are noted: of the micro-batch that is planned, and of those before it.
_ENDS_KEPT: Final = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of one stream when the next micro-batch is planned."""

    begin: Position  # where the micro-batch starts in it
    # `begin` is not what Spark passed: the offset must be written even if there is nothing to read.
    changed: bool = False
    backlog: tuple[StreamState, Measured] | None = None  # what there is to read


@dataclass(frozen=True, slots=True)
class _ToRead:
    """The range of one stream in a micro-batch, and where to cut it."""

    span: SequenceRange  # as it was planned, so that its partitions stay the same
    cuts: tuple[int, ...] | None  # None: evenly, in as many ranges as there are partitions left
    reported: int = 0  # what is missing below this sequence is no loss, or was reported already
    last: int = 0  # the last sequence that is still there


class Follower:
    """The position of one query in its streams, on the driver.

    With `snapshot`, the micro-batches up to the sequence that is the last one when the query starts have only the newest
    messages of their subjects up to it. That sequence stays in the offsets until they are read.
    """

    def __init__(self, options: ReadOptions, *, snapshot: bool = False) -> None:
        self._options = options
        self._snapshot = snapshot
        self._initial: Offset | None = None
        self._fresh = False
        self._pinned: set[str] = set()  # streams whose start depends on the moment
        self._target: Mapping[str, Position] | None = None
        self._latest: dict[str, Position] = {}
        # The end that was planned last, and of which states and ranges.
        self._returned: dict[str, Any] = {}
        self._planned: dict[str, tuple[StreamState, SequenceRange]] = {}
        self._ends: dict[tuple[str, str], dict[int, StreamState]] = {}  # see `_note_end`
        self._answering: set[str] = set()  # streams whose direct gets are known to work
        self._pause = 0.0
        self._next_ask = 0.0
        self._waiting_since: float | None = None  # for `minRowsPerTrigger`

    async def initial(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the offset before the first micro-batch; always the same one in this process."""
        return encode(await self._initial_offset(context))

    async def freeze(self, context: JetStreamContext) -> None:
        """End the query when the messages stored by now are read (``trigger(availableNow=True)``)."""
        streams = await streams_of(context, self._options)
        states = await gather_bounded(
            lambda name: readable_state(context, self._options, name), streams, limit=STREAMS_AT_ONCE
        )
        self._target = {state.name: Position.at(state, state.last_seq) for state in states if state}
        log_state(_log, "query", "end found", end=self._target)

    async def latest(
        self,
        context: JetStreamContext,
        start: Mapping[str, Any] | None,
        *,
        rows: int | None = None,
        size: int | None = None,
    ) -> dict[str, Any]:
        """Return the offset at the end of the next micro-batch; `start` itself if there is no new message.

        Spark before 4.2 passes no `start`. The micro-batch has at most `rows` rows and about `size` bytes.
        """
        if start is None:
            return await self._latest_of_all(context)
        if self._initial is not None and self._fresh:
            self._fresh = False
            if self._pinned and start == encode(self._initial):
                return dict(start)
        if self._target is None:
            await self._pause_if_idle()
        begun = decode(start)
        found = await self._look(context, begun)
        if self._must_wait(found):
            return dict(start)
        if begun.streams.keys() == found.keys() and not any(one.backlog or one.changed for one in found.values()):
            self._note_idle()
            return dict(start)
        # Not in `plan`: Spark writes this offset down before, and then a stream that was left out could not be added again.
        self._report_removed(begun, found)
        self._pause, self._next_ask, self._waiting_since = 0.0, 0.0, None
        end = await self._end_of(context, found, rows, size)
        self._returned = encode(end)
        log_state(_log, "query", "end of micro-batch", end=end.streams)
        return dict(self._returned)

    def reported(self) -> dict[str, Any] | None:
        return encode(Offset(self._latest)) if self._latest else None

    async def plan(
        self, context: JetStreamContext, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[SequenceRange]:
        """Return the partitions of the micro-batch from `start` to `end`."""
        begun, ended = decode(start), decode(end)
        if ended.version == 1 or any(at.head is not None for at in ended.streams.values()):
            self._report_removed(begun, ended.streams)  # `latest` did not know where the micro-batch starts
        known = self._planned if dict(end) == self._returned else {}

        async def look(stream: str) -> _ToRead | None:
            return await self._to_read(context, stream, begun, ended, known.get(stream))

        found = await gather_bounded(look, ended.streams, limit=STREAMS_AT_ONCE)
        least = ended.partitions or max(self._options.min_partitions, len(ended.streams))
        parts = _partitions([one for one in found if one is not None], least, ended.most)
        log_state(_log, "query", "planned", partitions=len(parts), start=begun.streams, end=ended.streams)
        return parts

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

    # -- where it starts ----------------------------------------------------------------------------------------

    async def _initial_offset(self, context: JetStreamContext) -> Offset:
        if self._initial is None:
            streams = await streams_of(context, self._options)
            starts = await gather_bounded(lambda name: self._start(context, name), streams, limit=STREAMS_AT_ONCE)
            found = dict(zip(streams, starts, strict=True))
            if self._options.stream_pattern is not None:  # some may be gone by now
                found = {stream: at for stream, at in found.items() if at.created}
            self._initial = Offset(found)
            self._fresh = True
            log_state(_log, "query", "start found", start=self._initial.streams, pinned=", ".join(sorted(self._pinned)))
        return self._initial

    def _start_if_added(self, stream: str) -> Bound:
        """Return where a query starts in a stream that is not in its checkpoint."""
        # What a pattern finds after the query has started is new: all of it is to be read.
        return "earliest" if self._options.stream_pattern is not None else self._options.starting.of(stream)

    async def _start(self, context: JetStreamContext, stream: str) -> Position:
        state = await readable_state(context, self._options, stream)
        if state is None:
            return Position("", 0)
        start = self._options.starting.of(stream)
        if start == "earliest":
            # The stream may start later by the time it is read.
            return Position.at(state, 0, snapshot=state.last_seq if self._snapshot else 0)
        if isinstance(start, datetime) and start > state.now:
            # The next message may be stored before this time.
            wait = (start - state.now).total_seconds()
            if wait > self._options.connection.timeout:
                raise PlanningError(
                    f"startingTime {start.isoformat()} is in the future: the server's time is {state.now.isoformat()}; start the "
                    "query later, or use startingOffsets=latest"
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

    # -- when the server is asked -------------------------------------------------------------------------------

    async def _pause_if_idle(self) -> None:
        if self._next_ask:
            await asyncio.sleep(max(0.0, self._next_ask - asyncio.get_running_loop().time()))

    def _note_idle(self, until: float | None = None) -> None:
        """Note that there was nothing to read, or not enough; the next answer may be wanted at the time `until`."""
        self._pause = min(max(_FIRST_PAUSE, self._pause * 1.5), _LONGEST_PAUSE)
        at = asyncio.get_running_loop().time() + self._pause
        self._next_ask = at if until is None else min(at, until)

    def _must_wait(self, found: Mapping[str, _Found]) -> bool:
        """Whether there are fewer rows than `minRowsPerTrigger`, and `maxTriggerDelay` has not passed."""
        wanted = self._options.min_rows
        if wanted is None or self._target is not None:
            return False
        now = asyncio.get_running_loop().time()
        if self._waiting_since is None:
            self._waiting_since = now
        until = self._waiting_since + self._options.max_delay
        rows = sum(one.backlog[1].rows for one in found.values() if one.backlog)
        waiting = any(one.backlog for one in found.values()) and not any(one.changed for one in found.values())
        if not waiting or rows >= wanted or now >= until:
            return False
        self._note_idle(until)
        return True

    # -- where a micro-batch ends -------------------------------------------------------------------------------

    async def _look(self, context: JetStreamContext, begun: Offset) -> dict[str, _Found]:
        streams = await streams_of(context, self._options, begun.streams)
        self._latest = {}
        found = await gather_bounded(
            lambda stream: self._look_at(context, stream, begun.streams.get(stream)),
            streams,
            limit=STREAMS_AT_ONCE,
        )
        return {stream: one for stream, one in zip(streams, found, strict=True) if one is not None}

    async def _look_at(self, context: JetStreamContext, stream: str, before: Position | None) -> _Found | None:
        """Return what there is to read of a stream; None: it matched the pattern and is gone."""
        options = self._options
        if added := before is None:
            start = self._start_if_added(stream)
            before = Position("", 0) if start == "earliest" else await self._start(context, stream)
            if not (start == "earliest" or isinstance(start, int)):
                return _Found(before, changed=True)  # pinned: this micro-batch reads none of it
        state = await readable_state(context, options, stream)
        if state is not None:
            self._latest[stream] = Position.at(state, state.last_seq)
            self._note_end(state)
            resumed = await resume(context, options, before, state)
        if state is None or resumed is None:
            gone = options.stream_pattern is not None
            return None if gone else _Found(before.without_plan(), changed=added)
        begin, state, changed = resumed.begin, resumed.state, resumed.changed or added
        last = state.last_seq
        if self._target is not None:
            target = self._target.get(stream)
            last = min(last, target.seq) if target is not None else 0
        if last <= begin.seq:
            return _Found(begin, changed)
        if begin.snapshot_left:
            last = min(last, begin.snapshot)
        elif not resumed.from_head:
            known, since = self._known(state, begin, begin), self._stored_since(state, begin, begin.seq + 1)
            await report_lost_head(context, options, state, begin.seq + 1, last, before=known, since=since)
        span = SequenceRange(stream, max(begin.seq + 1, state.first_seq), last, options.subjects)
        if not len(span):  # everything has expired
            return _Found(Position.at(state, last, snapshot=begin.snapshot), changed=True)
        limits = options.max_rows, options.min_rows, options.max_records_per_partition
        exact = any(limit is not None for limit in limits)
        return _Found(begin, changed, (state, await measure(context, state, span, exact=exact)))

    def _note_end(self, state: StreamState) -> None:
        """Note that nothing was stored yet after the last message of `state`.

        What expires in a quiet time was read before, and what is stored after it was not there to expire.
        """
        if not state.max_msgs_per_subject:
            return  # there, whatever is missing at the beginning is lost
        states = self._ends.setdefault((state.name, state.created), {})
        states[state.last_seq] = state
        if len(states) > _ENDS_KEPT:
            del states[min(states)]

    def _known(self, state: StreamState, before: Position | None, where: Position | None) -> StreamState | None:
        """Return the stream of `state` when the query was at its end at the position `before`, or else when `where` was made."""
        ends = self._ends.get((state.name, state.created), {})
        found = None if before is None else ends.get(before.seq)
        return found or known_of(where, state)

    def _stored_since(self, state: StreamState, before: Position | None, seq: int) -> datetime | None:
        """Return a time before which the message `seq` was not stored, or None; `before`: a position in the stream."""
        known = [*state.ends, *(before.ends if before else ())]
        if not state.origin:  # a mirror stores messages with the times of its origin
            ends = self._ends.get((state.name, state.created), {})
            known += [(last + 1, end.now) for last, end in ends.items()]
        return stored_since(known, seq)

    async def _end_of(
        self, context: JetStreamContext, found: Mapping[str, _Found], rows: int | None, size: int | None
    ) -> Offset:
        """Return the end of a micro-batch, which each stream shares by its backlog, with its plan."""
        backlogs = [one.backlog for one in found.values() if one.backlog is not None]
        total = max(1, sum(backlog.rows for _, backlog in backlogs))

        async def limited(each: tuple[StreamState, Measured]) -> Measured:
            backlog = each[1]
            takes, share = backlog.rows, backlog.rows / total
            if rows is not None:
                takes = min(takes, max(1, int(rows * share)))
            if size is not None:
                takes = min(takes, max(1, int(size * share * backlog.rows / max(1, backlog.size))))
            if takes >= backlog.rows:
                return backlog
            span = backlog.span
            if backlog.rows == len(span):
                last = span.first + takes - 1
            else:
                divisions = 8 if len(span.filters) < 4 else 2  # each filter is a question of its own
                search = end_of_rows(span.first, span.last, takes, divisions=divisions)
                last = await run_search(context, span, search)
            return replace(backlog, span=replace(span, last=last), rows=takes)

        taken = await gather_bounded(limited, backlogs, limit=STREAMS_AT_ONCE)
        least = max(self._options.min_partitions, len(found))
        lengths = [len(one.span) for one in taken]
        counts = shares([one.rows for one in taken], lengths, [1] * len(taken), least)
        cuts = await gather_bounded(
            lambda each: cut(context, each[0], each[1], self._options.max_records_per_partition),
            list(zip(taken, counts, strict=True)),
            limit=STREAMS_AT_ONCE,
        )
        streams = {stream: one.begin for stream, one in found.items()}
        self._planned = {}
        for (state, _), one, where in zip(backlogs, taken, cuts, strict=True):
            span = one.span
            snapshot = streams[span.stream].snapshot_left
            end = Position.at(state, span.last, snapshot=snapshot)
            streams[span.stream] = replace(end, first=span.first, cuts=where)
            self._planned[span.stream] = state, span
        return Offset(streams, least)

    async def _latest_of_all(self, context: JetStreamContext) -> dict[str, Any]:
        """Return the newest offset, where Spark does not pass the start of the micro-batch."""
        new = self._initial is None
        initial = await self._initial_offset(context)
        waiting = self._pinned if new else frozenset[str]()
        if not waiting:
            await self._pause_if_idle()
        before = dict(self._latest)
        by_pattern = self._options.stream_pattern is not None

        async def look(stream: str) -> Position | None:
            start = initial.streams.get(stream, Position("", 0))  # a pattern may have found it since
            state = await readable_state(context, self._options, stream)
            known = before.get(stream)
            waits = known is not None and (known.is_ahead or self._options.on_recreate == "keep")
            if state is not None and known is not None and not waits and not recreated(known.created, state.created):
                state = await not_behind(context, self._options, state, known.seq)  # a new stream is reported by `plan`
            if state is None:
                return None if by_pattern else known or start
            self._note_end(state)
            last = state.last_seq
            if known is not None and waits:
                last = max(last, known.seq)
            # The first micro-batch of a query is the snapshot; a restarted query has read it, and `plan` ignores it.
            snapshot = 0 if self._returned else start.snapshot
            if snapshot:
                last = min(last, snapshot)
            at = Position.at(state, start.seq if stream in waiting else last, snapshot=snapshot)
            from_head = not start.created or (not start.seq and self._options.starting.of(stream) == "earliest")
            return replace(at, head=state.first_seq, skipped=None if from_head else start.seq)

        streams = await streams_of(context, self._options, before)
        found = await gather_bounded(look, streams, limit=STREAMS_AT_ONCE)
        ends = {stream: at for stream, at in zip(streams, found, strict=True) if at is not None}
        self._latest = ends
        places = {name: (at.created, at.seq) for name, at in ends.items()}
        if self._returned and places == {name: (at.created, at.seq) for name, at in before.items()}:
            self._note_idle()
        else:
            self._pause, self._next_ask = 0.0, 0.0
            least = max(self._options.min_partitions, len(ends))
            self._returned = encode(Offset(ends, least, self._options.max_records_per_partition))
        return dict(self._returned)

    # -- what to read -------------------------------------------------------------------------------------------

    async def _to_read(
        self,
        context: JetStreamContext,
        stream: str,
        begun: Offset,
        ended: Offset,
        planned: tuple[StreamState, SequenceRange] | None,
    ) -> _ToRead | None:
        """Return what a micro-batch reads of a stream; `planned`: this process has just planned it."""
        options, at, before = self._options, ended.streams[stream], begun.streams.get(stream)
        exact = ended.version > 1 and at.head is None
        if at == before or (exact and at.first is None):
            return None
        cuts = at.cuts if exact else None
        state = planned[0] if planned is not None else await readable_state(context, options, stream)
        if exact:
            first = at.first or 1
            from_head = self._from_head(stream, before) or (before is not None and first != before.seq + 1)
        else:
            first, from_head = await self._first_after(context, stream, begun, at, state)
        span = SequenceRange(stream, first, at.seq, options.subjects, from_head=from_head)
        if not len(span):
            return None
        if planned is not None:
            span = replace(planned[1], from_head=from_head)
        elif state is not None:
            state = await still_there(context, options, span, at, state)
        snapshot = at.snapshot if exact or begun == self._initial else 0
        if state is not None and not from_head and not snapshot:
            known, since = (
                self._known(state, before, at if exact else before),
                self._stored_since(state, before, span.first),
            )
            await report_lost_head(context, options, state, span.first, span.last, before=known, since=since)
        if not exact:
            lowest = at.head or (1 if from_head or state is None else state.first_seq)
            span = replace(span, first=max(span.first, lowest))
        if not len(span):
            return None
        if state is None:
            return _ToRead(span, cuts)
        reported = max(state.first_seq, span.first + 1) if from_head else state.first_seq
        span = replace(
            span,
            created=state.created,
            ends=state.ends,
            held=held_by(state),
            since=self._stored_since(state, before, span.first),
            snapshot=snapshot,
        )
        if stream not in self._answering:
            await counts_from(context, replace(span, filters=()), [span.first])  # direct gets work
            self._answering.add(stream)
        if planned is None and options.subjects:
            span = (await measure(context, state, span)).span
        return _ToRead(span, cuts, reported, state.last_seq)

    def _from_head(self, stream: str, before: Position | None) -> bool:
        """Return whether a micro-batch that begins at `before` reads from the first message that is stored."""
        if before is None:
            return not isinstance(self._start_if_added(stream), int)
        return not before.created or (before.seq == 0 and self._options.starting.of(stream) == "earliest")

    async def _first_after(
        self, context: JetStreamContext, stream: str, begun: Offset, at: Position, state: StreamState | None
    ) -> tuple[int, bool]:
        """Return the first sequence of a micro-batch whose end has no plan, and whether that is the stream's head.

        `state` is None if the stream is gone.
        """
        before, head = begun.streams.get(stream), at.head or 1
        # A restart resolves the start again, and the first micro-batch keeps the one that it was planned with.
        if before is None or (at.head is not None and begun == self._initial):
            start = self._start_if_added(stream)
            if at.head is None:  # version 1
                skipped = start - 1 if isinstance(start, int) else None if start == "earliest" else at.seq
            else:
                skipped = at.skipped if before is not None or self._options.stream_pattern is None else None
            return (head, True) if skipped is None else (skipped + 1, False)
        other = state is None or state.volatile or recreated(before.created, at.created)
        if other and state is not None and not await is_same(context, before, state):
            if go_on_in(self._options, state) == "earliest":
                return head, True
        # A start that was resolved again, later, may be behind the end that the micro-batch keeps: then it has no rows.
        elif before.seq > at.seq and (self._initial is None or before != self._initial.streams.get(stream)):
            if self._options.on_recreate == "keep":
                return before.seq + 1, False
            report_data_loss(
                self._options,
                f"stream {stream!r} ended at sequence {at.seq} when this micro-batch was planned, but the query had already "
                f"read up to {before.seq}: the stream lost its last messages",
            )
            return head, True
        return before.seq + 1, self._from_head(stream, before)


def _partitions(found: list[_ToRead], least: int, most: int | None) -> list[SequenceRange]:
    """Return the partitions of a micro-batch, or none if there is nothing to read.

    There are at least `least`, some of them empty. Those of streams without cuts have at most `most` sequences.
    """
    uncut = [one for one in found if one.cuts is None]
    rest = least - sum(len(one.cuts) + 1 for one in found if one.cuts is not None)
    lengths = [len(one.span) for one in uncut]
    fewest = [1 if most is None else -(-length // max(1, most)) for length in lengths]
    if (needed := sum(fewest)) > MOST_PARTITIONS:
        raise PlanningError(
            f"the micro-batch would have {needed} partitions, and a read has {MOST_PARTITIONS} at most; raise "
            "maxRecordsPerPartition (before Spark 4.2 it counts sequences)"
        )
    counts = iter(shares(lengths, lengths, fewest, rest))
    parts: list[SequenceRange] = []
    for one in found:
        span = one.span
        cuts = one.cuts if one.cuts is not None else even_cuts(span.first, span.last, next(counts))
        parts += [
            replace(part, last=min(part.last, one.last), from_head=part.first < one.reported) for part in span.cut(cuts)
        ]
    if not any(map(len, parts)):
        return []
    last = parts[-1]
    return parts + [replace(last, first=last.last + 1, from_head=False)] * (least - len(parts))
