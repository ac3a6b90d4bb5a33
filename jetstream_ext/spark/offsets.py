"""The position of a streaming query, and the plan of the micro-batch that ends there, as Spark keeps them in its checkpoint.

::

    {"v": 2, "partitions": 4, "streams": {"ORDERS": {
        "created": "2026-01-31T13:45:00Z", "seq": 9000,
        "ends": [[9500, "2026-02-01T08:00:00.123456Z"], [1, "2026-01-31T13:45:01.500000Z"]],
        "first": 1001, "cuts": [3001, 5001, 7001]}}}

A stream in which newer messages replace older ones has ``held`` as well, and the first offsets of a change feed ``snapshot``.

Spark calls the source with the offsets of a micro-batch whenever it runs it, so a plan that is in the offset is the same
for every attempt, whatever has happened to the stream, the options or the cluster meanwhile. Spark before 4.2 does not
say where a micro-batch starts when it asks for the end; then the offset has a ``head`` instead of a plan (see `Position`).
Spark compares offsets as text, so names are sorted and numbers are integers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypeAlias

import orjson

from jetstream_ext.protocol.api import StreamState, parse_time, recreated
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import rfc3339

VERSION: Final = 2
_LARGEST: Final = (1 << 63) - 1  # the column `seq` is a long

Ends: TypeAlias = tuple[tuple[int, datetime], ...]


class OffsetError(ValueError):
    """The checkpoint holds no offset of this source, or one of another version."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A stream when a position or a plan was made: what shows later whether it is the same, and what it has lost."""

    created: str = ""  # when the stream was created, as the server writes it; empty: it did not exist
    # Of its last and first messages (`StreamState.ends`): servers change `created` of a stream that stays the same, but never
    # the time of a message. The sequence 0 stands for a stream without messages.
    ends: Ends = ()
    # How many messages and subjects it had, if it keeps only so many messages of each subject (``max_msgs_per_subject``).
    held: tuple[int, int] | None = None

    @classmethod
    def of(cls, state: StreamState) -> Seen:
        held = (state.messages, state.num_subjects) if state.max_msgs_per_subject else None
        return cls(state.created, state.ends or ((0, state.last_time),), held)

    @property
    def last_seq(self) -> int:
        return self.ends[0][0] if self.ends else 0

    def restore(self, state: StreamState) -> StreamState:
        """Return the stream of `state` as it was then."""
        (last, last_time), (first, first_time) = (self.ends[0], self.ends[-1]) if self.ends else ((0, state.now),) * 2
        messages, subjects = self.held or (len(self.ends) - 1, 0)
        return replace(
            state,
            created=self.created,
            messages=messages,
            num_subjects=subjects,
            first_seq=first,
            first_time=first_time,
            last_seq=last,
            last_time=last_time,
            now=last_time,  # or later
        )


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a stream, and how it is reached: by the plan of the micro-batch that ends here, or without one."""

    seen: Seen
    seq: int  # the last sequence that was read (0: none)
    # The plan: the first sequence that the micro-batch reads, and where its other partitions begin.
    first: int | None = None
    cuts: tuple[int, ...] = ()
    # Instead of a plan: the first sequence of the stream. Then `first` is that of the query's first micro-batch only.
    head: int | None = None
    # Of a change feed (see `feed`): the micro-batch that ends here, and those that begin before this sequence, have only the
    # newest messages of their keys up to it (0: there is no such micro-batch).
    snapshot: int = 0

    @classmethod
    def at(cls, state: StreamState, seq: int, *, snapshot: int = 0) -> Position:
        return cls(Seen.of(state), seq, snapshot=snapshot)

    @property
    def is_ahead(self) -> bool:
        """Whether the stream had not reached `seq` when the position was made, so that the query waits for it."""
        return bool(self.seen.ends) and self.seq > self.seen.last_seq

    @property
    def snapshot_left(self) -> int:
        """The sequence up to which the next micro-batch has only the newest messages of their keys (0: it has all messages)."""
        return self.snapshot if self.seq < self.snapshot else 0

    def without_plan(self) -> Position:
        return Position(self.seen, self.seq, snapshot=self.snapshot_left)


NOWHERE: Final = Position(Seen(), 0)
"""The position in a stream that does not exist yet, or that is read from its first message whatever that is."""


@dataclass(frozen=True, slots=True)
class Offset:
    streams: Mapping[str, Position] = field(default_factory=dict)
    partitions: int | None = None  # so many the micro-batch that ends here has at least; None: only those with messages
    most: int | None = None  # sequences of a partition, where the micro-batch has no cuts


def encode(offset: Offset) -> dict[str, Any]:
    numbers = {"v": VERSION, "partitions": offset.partitions, "most": offset.most}
    encoded: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    encoded["streams"] = {name: _encode_position(at) for name, at in sorted(offset.streams.items())}
    return encoded


def _encode_position(at: Position) -> dict[str, Any]:
    seen = at.seen
    ends = [[seq, rfc3339(time, "time")] for seq, time in seen.ends]
    others = {"ends": ends, "first": at.first, "cuts": list(at.cuts), "head": at.head, "snapshot": at.snapshot}
    encoded = {"created": seen.created, "seq": at.seq} | {name: value for name, value in others.items() if value}
    return encoded if seen.held is None else encoded | {"held": list(seen.held)}


def decode(offset: Mapping[str, Any]) -> Offset:
    """Parse an offset; raise OffsetError if it is not of this source, or of another version."""
    version = offset.get("v", VERSION)
    if version != VERSION or isinstance(version, bool):
        raise OffsetError(
            f"the checkpoint has offsets of version {reprlib.repr(version)}, but this release of jetstream_ext reads version "
            f"{VERSION}; let the release that wrote it finish the pending micro-batch, then start with a new checkpoint, and "
            "with 'startingOffsets' behind the sequences of the last offset"
        )
    try:
        streams = {name: _decode_position(at) for name, at in offset["streams"].items()}
        return Offset(streams, _optional(offset, "partitions"), _optional(offset, "most"))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        shown = reprlib.repr(offset)  # that of a nested list could raise RecursionError
        raise OffsetError(f"the checkpoint holds no offset of format 'jetstream': {shown} ({error})") from None


def _decode_position(at: Mapping[str, Any]) -> Position:
    ends = tuple((_sequence(seq, "ends"), parse_time(time)) for seq, time in at.get("ends") or ())
    held: tuple[int, int] | None = None
    if at.get("held") is not None:
        messages, subjects = at["held"]
        held = _sequence(messages, "held"), _sequence(subjects, "held")
    first, skipped = _optional(at, "first"), _optional(at, "skipped")  # the second of earlier releases
    return Position(
        Seen(json_text(at["created"], "created"), ends, held),
        _sequence(at["seq"], "seq"),
        first if skipped is None else skipped + 1,
        tuple(_sequence(cut, "cuts") for cut in at.get("cuts") or ()),
        _optional(at, "head"),
        _optional(at, "snapshot") or 0,
    )


def _optional(holder: Mapping[str, Any], name: str) -> int | None:
    value = holder.get(name)
    return None if value is None else _sequence(value, name)


def _sequence(value: object, name: str) -> int:
    return json_number(value, name, high=_LARGEST)


def lag(progress: Any) -> dict[str, int]:
    """Return how many sequences each stream is ahead of a streaming query.

    Args:
        progress: ``query.lastProgress`` or a listener's ``event.progress``, or its JSON.

    Returns:
        The sequences behind for each stream of the query's `jetstream` sources; nothing where Spark reports no latest
        offset (before Spark 4.2, or before the first micro-batch). With filters and gaps there are fewer rows.
    """
    if isinstance(progress, str | bytes):
        progress = orjson.loads(progress)
    behind: dict[str, int] = {}
    for source in _get(progress, "sources") or ():
        end, latest = _positions(_get(source, "endOffset")), _positions(_get(source, "latestOffset"))
        for stream, at in latest.items():
            # No message of a re-created stream was read.
            read = end.get(stream)
            since = read.seq if read is not None and _same_stream(read.seen, at.seen) else 0
            behind[stream] = max(behind.get(stream, 0), at.seq - since, 0)
    return behind


def _same_stream(one: Seen, other: Seen) -> bool:
    return not recreated(one.created, other.created) or (not set(one.ends).isdisjoint(other.ends))


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _positions(offset: Any) -> Mapping[str, Position]:
    """Return the positions of an offset that Spark reports; none if it is another source's."""
    try:
        if isinstance(offset, str):
            offset = orjson.loads(offset)
        return decode(offset).streams if isinstance(offset, Mapping) else {}
    except ValueError:
        return {}
