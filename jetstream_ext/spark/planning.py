"""The plan of a batch read, made on the driver: check the streams, resolve the ends, cut the ranges into partitions.

Streaming queries use the same checks of a stream's state and the same rules of data loss.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api, first_since, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import BadSubjectError, ErrorCode, JetStreamExtError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.subjects import check_subject, covers, overlap
from jetstream_ext.spark.connection import ask
from jetstream_ext.spark.options import Bound, ReadOptions
from jetstream_ext.text import get_logger

_log = get_logger("spark")

# Filtering costs the server about as much as sending five times as many messages. Where more than this share of the
# messages matches, the executor reads all of them and filters.
_SELECTIVE: Final = 0.2
# Where more than this share of the sequences has a message, cuts by sequence are even enough.
_DENSE: Final = 0.9
_PROBES_PER_PARTITION: Final = 4
_MAX_PROBES: Final = 256


class PlanningError(JetStreamExtError):
    """The query cannot work; the text says what to change."""


class DataLossError(JetStreamExtError):
    """Messages that should be read are gone (with ``failOnDataLoss``)."""


# -- sequence ranges ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences `first` to `last` of one stream, both inclusive; empty where `last` is smaller."""

    stream: str
    first: int
    last: int
    size: int = 0  # of the messages, approximately, in bytes
    subject: str | None = None  # a filter for the server
    filters: tuple[str, ...] = ()  # for the executor, any of which may match; none: all messages
    from_head: bool = False  # it starts where the stream starts (``earliest``): an expired head is no loss
    gapless: bool = False  # the stream held every sequence of the range when it was planned
    created: str = ""  # when the stream was created, as the server writes it; empty if that is unknown
    # Pairs of a sequence and the number of messages from there on, ascending, from `first` to ``last + 1``; none where
    # messages are spread evenly over the sequences.
    points: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def split(self, parts: int) -> list[SequenceRange]:
        """Return `parts` consecutive ranges of about equal size (fewer if there are fewer sequences)."""
        count = len(self)
        parts = min(parts, count)
        if self.points and parts:
            cuts = sorted({self.first, self.last + 1, *(self._quantile(part / parts) for part in range(1, parts))})
        else:
            cuts = [self.first + count * part // parts for part in range(parts + 1)] if parts else []
        part = replace(self, size=self.size // max(1, parts), points=())
        return [
            replace(part, first=start, last=stop - 1, from_head=self.from_head and start == self.first)
            for start, stop in pairwise(cuts)
        ]

    def _quantile(self, share: float) -> int:
        """Return the sequence below which about `share` of the messages are."""
        seqs = [seq for seq, _ in self.points]
        before = [self.points[0][1] - following for _, following in self.points]
        wanted = before[-1] * share
        cell = min(max(0, bisect_right(before, wanted) - 1), len(seqs) - 2)
        inside = max(1, before[cell + 1] - before[cell])
        return seqs[cell] + int(min(1.0, (wanted - before[cell]) / inside) * (seqs[cell + 1] - seqs[cell]))


def partition(ranges: Sequence[SequenceRange], *, min_partitions: int, max_bytes: int) -> list[SequenceRange]:
    """Cut `ranges` into partitions of about `max_bytes`, in proportion to the bytes of each range.

    There are at least `min_partitions`, or one for each sequence if there are fewer.
    """
    ranges = [span for span in ranges if len(span)]
    shares = [min(len(span), max(1, -(-span.size // max_bytes))) for span in ranges]
    while sum(shares) < min_partitions:
        divisible = [index for index, span in enumerate(ranges) if shares[index] < len(span)]
        if not divisible:
            break
        largest = max(divisible, key=lambda index: ranges[index].size / shares[index])
        shares[largest] += 1
    return [part for span, share in zip(ranges, shares, strict=True) for part in span.split(share)]


def partition_evenly(ranges: Sequence[SequenceRange], count: int) -> list[SequenceRange]:
    """Cut `ranges` into `count` partitions by their sequences alone, so that a replay has the same partitions.

    A sink recognises replayed rows by partition and index, whatever the streams hold by then. There are `count`
    partitions even if some of them are empty; none for no ranges.
    """
    parts = partition([replace(span, size=len(span)) for span in ranges], min_partitions=count, max_bytes=1 << 80)
    if parts:
        last = parts[-1]
        parts += [replace(last, first=last.last + 1, size=0, from_head=False)] * (count - len(parts))
    return parts


# -- pushed filters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The part of a read that the query's own filters need; `subjects` are filters, any of which may match (None: all)."""

    first: int = 1
    last: int = (1 << 63) - 1
    subjects: tuple[str, ...] | None = None

    def intersect(self, other: PushedFilters) -> PushedFilters:
        if self.subjects is None or other.subjects is None:
            subjects = self.subjects if other.subjects is None else other.subjects
        else:
            subjects = _intersect(self.subjects, other.subjects)
        return PushedFilters(max(self.first, other.first), min(self.last, other.last), subjects)

    def within(self, filters: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the filters of a read that has `filters` of its own (none: all messages); None: nothing matches."""
        if self.subjects is None:
            return filters
        return (_intersect(filters, self.subjects) if filters else self.subjects) or None


_ALL: Final = PushedFilters()


def _intersect(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Return filters for what matches one of `some` and one of `others`, or for more where no filter is exact."""
    both: dict[str, None] = {}
    for left in some:
        for right in others:
            if covers(left, right):
                both[right] = None
            elif covers(right, left):
                both[left] = None
            elif overlap(left, right):
                return some
    return tuple(both)


def parse_pushed_filters(filters: Iterable[Any]) -> PushedFilters:
    """Return what Spark's `filters`, all of which hold, let through.

    Spark applies every one of them again, so a filter is used as far as it can be expressed, and ignored otherwise.
    Times are ignored: they need not grow with the sequences (clocks are set back, sources keep the times of their
    origin). ``startingTime`` is the option for them.
    """
    result = PushedFilters()
    parsers: dict[Any, Callable[[str, Any], PushedFilters]] = {("seq",): _sequences, ("subject",): _subjects}
    for each in filters:
        if parse := parsers.get(getattr(each, "attribute", None)):
            result = result.intersect(parse(type(each).__name__, getattr(each, "value", None)))
    return result


def _sequences(kind: str, value: Any) -> PushedFilters:
    values = [value]
    if kind == "In":
        values = [each for each in value if each is not None] or [0]  # nothing equals null
    if any(isinstance(each, bool) or not isinstance(each, int) for each in values):
        return PushedFilters()
    low, high = min(values), max(values)
    match kind:
        case "EqualTo" | "EqualNullSafe" | "In":
            return PushedFilters(low, high)
        case "GreaterThan":
            return PushedFilters(first=low + 1)
        case "GreaterThanOrEqual":
            return PushedFilters(first=low)
        case "LessThan":
            return PushedFilters(last=high - 1)
        case "LessThanOrEqual":
            return PushedFilters(last=high)
    return PushedFilters()


def _subjects(kind: str, value: Any) -> PushedFilters:
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        values = value if kind == "In" else [value]
        if values and all(_is_subject(each) for each in values):
            return PushedFilters(subjects=tuple(dict.fromkeys(values)))
    elif kind == "StringStartsWith" and isinstance(value, str):
        # Whole tokens only: "a.bc" starts with "a.b" as well.
        prefix = value.rpartition(".")[0]
        if _is_subject(prefix):
            return PushedFilters(subjects=(f"{prefix}.>",))
    return PushedFilters()


def _is_subject(value: Any) -> bool:
    """Return whether `value` is a literal subject, which as a filter matches only itself."""
    try:
        check_subject(value)
    except (BadSubjectError, TypeError):
        return False
    return "\ufffd" not in value  # in a column, that stands for bytes that are not UTF-8


# -- the state of a stream ----------------------------------------------------------------------------------------


def report_data_loss(options: ReadOptions, what: str) -> None:
    """Raise `DataLossError`, or log a warning where the user chose to continue."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what} (to read the remaining messages, set failOnDataLoss to false)")
    _log.warning("%s; reading the remaining messages, because failOnDataLoss is false", what)


def report_lost_head(options: ReadOptions, state: StreamState, first: int, last: int) -> None:
    """Report the sequences of ``first … last`` that are before the first one of the stream as lost."""
    if first < state.first_seq:
        missing = f"sequences {first} to {min(last, state.first_seq - 1)} of stream {state.name!r}"
        report_data_loss(
            options, f"{missing} are gone (expired, purged or deleted); the stream now starts at {state.first_seq}"
        )


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


async def first_from(context: JetStreamContext, state: StreamState, bound: Bound) -> int:
    """Return the sequence that `bound` stands for; the one after the last if no message is stored there yet."""
    if isinstance(bound, int):
        return bound
    if isinstance(bound, datetime):
        js = Context(context)
        return await ask(js.timeout, lambda left: first_since(Api(js, left), state, bound))
    return state.first_seq if bound == "earliest" else state.last_seq + 1


async def _count(context: JetStreamContext, stream: str, subject: str | None, seq: int) -> int:
    """Return how many messages match `subject` from `seq` on; approximate, because a replica may answer."""

    async def probe(left: float) -> int:
        batch = DirectGet(context, stream, timeout=left).batch(1, subject=subject, seq=seq)
        return len(await batch.to_list()) + (batch.num_pending or 0)

    return await ask(Context(context).timeout, probe)


async def place_filter(
    context: JetStreamContext, filters: tuple[str, ...], state: StreamState, span: SequenceRange
) -> SequenceRange:
    """Decide whether the server or the executor filters.

    The request for the number of messages also proves, before any task runs, that batched direct gets are answered.
    """
    # A filter equal to the stream's subjects is kept: its sources or an earlier configuration may have stored others.
    filters = () if ">" in filters else filters
    subject = filters[0] if len(filters) == 1 else None
    count = await _count(context, state.name, subject, max(1, span.first))
    if subject is None:
        return replace(span, filters=filters)
    matching = count / max(1, min(state.messages, state.last_seq - span.first + 1))
    if matching > _SELECTIVE:
        return replace(span, filters=filters)
    return replace(span, subject=subject, size=int(span.size * matching))


async def measure(context: JetStreamContext, span: SequenceRange, parts: int) -> SequenceRange:
    """Return the range with its `points`, if cuts by sequence alone could be uneven.

    Where a filter matches few messages, or most messages were deleted, the messages are spread unevenly over the
    sequences. A probe at a sequence returns how many messages follow. Each probe halves the span with the most messages.
    """
    if parts < 2 or len(span) <= parts or (span.gapless and span.subject is None):
        return span
    ends = (span.first, span.last + 1)
    points = {seq: await _count(context, span.stream, span.subject, seq) for seq in ends}
    total = points[span.first] - points[span.last + 1]
    if total <= parts or (span.subject is None and total > _DENSE * len(span)):
        return span
    spans = [(-total, *ends)]
    for _ in range(min(_MAX_PROBES, max(16, _PROBES_PER_PARTITION * parts))):
        most, first, stop = heapq.heappop(spans)
        middle = (first + stop) // 2
        if middle == first or -most * 2 * _PROBES_PER_PARTITION * parts < total:
            break
        points[middle] = await _count(context, span.stream, span.subject, middle)
        for start, end in ((first, middle), (middle, stop)):
            heapq.heappush(spans, (points[end] - points[start], start, end))
    return replace(span, points=tuple(sorted(points.items())))


# -- the plan -----------------------------------------------------------------------------------------------------


async def plan_read(
    context: JetStreamContext, options: ReadOptions, pushed: PushedFilters = _ALL
) -> list[SequenceRange]:
    """Return the partitions of a batch read, of which the query's own filters need the part `pushed`."""
    parts, max_bytes = options.min_partitions, options.max_bytes_per_partition
    ranges: list[SequenceRange] = []
    for stream in options.streams:
        state = await readable_state(context, options, stream)
        if state is None:
            continue
        span = await _resolve(context, options, state)
        # Narrowed only now, so that a loss is reported even where the query filters it out.
        span = replace(span, first=max(span.first, pushed.first), last=min(span.last, pushed.last))
        filters = pushed.within(options.subjects)
        if not len(span) or filters is None:
            continue
        share = len(span) / max(1, state.last_seq - state.first_seq + 1)
        span = await place_filter(context, filters, state, replace(span, size=max(0, int(state.size * share))))
        ranges.append(await measure(context, span, max(parts, -(-span.size // max_bytes))))
    planned = partition(ranges, min_partitions=parts, max_bytes=max_bytes)
    _log.debug("planned %d partitions of %s", len(planned), ", ".join(options.streams))
    return planned


async def _resolve(context: JetStreamContext, options: ReadOptions, state: StreamState) -> SequenceRange:
    stream, start, end = state.name, options.starting[state.name], options.ending[state.name]
    first = await first_from(context, state, start)
    last = end if isinstance(end, int) else await first_from(context, state, end) - 1
    report_lost_head(options, state, first, state.last_seq)
    what = f"stream {stream!r} ends at sequence {state.last_seq}"
    if first > state.last_seq + 1:
        report_data_loss(options, f"{what}, before the start at {first}; the stream may have been re-created")
    if last > state.last_seq:
        report_data_loss(options, f"{what}, before the end of the read at {last}")
    return SequenceRange(
        stream,
        max(first, state.first_seq),
        min(last, state.last_seq),
        from_head=start == "earliest",
        gapless=state.has_every_sequence,
        created=state.created,
    )
