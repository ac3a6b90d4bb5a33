"""Whether a query can go on where it was: the stream may have been deleted, re-created, restored or truncated meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from nats.js import JetStreamContext

from jetstream_ext.client.api import settled_state
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.spark.offsets import Position
from jetstream_ext.spark.options import ReadOptions
from jetstream_ext.spark.planning import DataLossError, is_same, readable_state, report_data_loss
from jetstream_ext.spark.ranges import SequenceRange
from jetstream_ext.text import get_logger, numbered, plural

_log = get_logger("spark")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where to go on in a stream."""

    begin: Position
    state: StreamState
    from_head: bool = False  # at the first message that is stored, whichever that is
    changed: bool = False


async def resume(
    context: JetStreamContext, options: ReadOptions, before: Position, state: StreamState
) -> Resumed | None:
    """Return where to go on in a stream that may have been re-created or truncated; None: it was deleted meanwhile."""
    earliest = options.starting.of(state.name) == "earliest"
    if not before.created:  # it did not exist when the query started
        return Resumed(Position.at(state, 0), state, from_head=True)
    before = before.without_plan()
    if not await is_same(context, before, state):
        if go_on_in(options, state) == "keep":
            return Resumed(Position.at(state, before.seq, snapshot=before.snapshot), state, changed=True)
        return Resumed(Position.at(state, 0), state, from_head=True, changed=True)
    if state.last_seq < before.seq and not before.is_ahead and options.on_recreate != "keep":
        found = await not_behind(context, options, state, before.seq)
        if found is None:
            return None
        if recreated(state.created, found.created):
            return await resume(context, options, before, found)
        if found.last_seq < before.seq:
            return Resumed(Position.at(found, 0), found, from_head=True, changed=True)
        state = found
    return Resumed(before, state, from_head=before.seq == 0 and earliest)


_ADVICE: Final = (
    "Set the option onRecreate to 'earliest' to read all of the new stream, or to 'keep' to continue at the same sequence, as "
    "in a stream that was restored from a backup"
)


def _choice(options: ReadOptions) -> Literal["fail", "earliest", "keep"]:
    return options.on_recreate or ("fail" if options.fail_on_data_loss else "earliest")


def go_on_in(options: ReadOptions, state: StreamState) -> Literal["earliest", "keep"]:
    """Return how to go on in a stream that was re-created; raise DataLossError if the query is to fail."""
    choice = _choice(options)
    what = f"stream {state.name!r} was deleted and re-created at {state.created}"
    if choice == "fail":
        raise DataLossError(f"{what}, and the query has read the stream before it. {_ADVICE}")
    where = "at its first message" if choice == "earliest" else "at the same sequence"
    _log.warning("%s; going on %s, because of onRecreate or failOnDataLoss", what, where)
    return choice


async def not_behind(
    context: JetStreamContext, options: ReadOptions, state: StreamState, seq: int
) -> StreamState | None:
    """As `settled` for a stream that had `seq` before; report data loss if it lost its end."""
    found = await settled(context, options, state, seq)
    if found is not None and found.last_seq < seq and not recreated(state.created, found.created):
        report_data_loss(
            options,
            f"stream {state.name!r} ends at sequence {found.last_seq}, but the query has already read up to {seq}: "
            "the stream lost its last messages",
        )
    return found


async def settled(context: JetStreamContext, options: ReadOptions, state: StreamState, seq: int) -> StreamState | None:
    """Wait until the leader has `seq`: a newly elected one may lag for a moment.

    The stream may be deleted meanwhile (None, once that is reported) or re-created.
    """
    found: StreamState | None = state

    async def look() -> StreamState:
        nonlocal found
        if found is not None and not recreated(state.created, found.created):
            found = await readable_state(context, options, state.name)
        return found or state

    if state.last_seq < seq:
        await settled_state(look, seq)
    return found


async def still_there(
    context: JetStreamContext, options: ReadOptions, span: SequenceRange, at: Position, state: StreamState
) -> StreamState | None:
    """Return the state of the stream in which `at` is a position, as soon as its leader has all of `span`.

    None: it was deleted or re-created since, and that is reported.
    """
    found: StreamState | None = state
    what = f"{numbered(span.first, span.last, 'sequence')} of stream {span.stream!r}"
    are = plural(len(span), "is", "are")
    if state.last_seq < span.last and not recreated(at.created, state.created):
        found = await settled(context, options, state, span.last)
    if found is None:
        return None
    choice = _choice(options)
    if choice != "keep" and not await is_same(context, at, found):
        lost = f"{what} {are} lost: the stream was deleted and re-created at {found.created}"
        if choice == "fail":
            raise DataLossError(f"{lost}. {_ADVICE}")
        _log.warning("%s", lost)
        return None
    if found.last_seq < span.last:
        report_data_loss(options, f"{what} cannot be read: the stream ends at {found.last_seq}")
    return found
