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
Version 1 had only ``created`` and ``seq``. Spark compares offsets as text, so names are sorted and numbers are integers.
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
Held: TypeAlias = tuple[int, int]
"""How many messages and subjects a stream had, if it keeps only so many messages of each subject (``max_msgs_per_subject``)."""


class OffsetError(ValueError):
    """The checkpoint holds no offset of this source, or one of a later version."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a stream, which `created` and `ends` tell from a later stream of the same name."""

    created: str  # when the stream was created, as the server writes it; empty: it did not exist
    seq: int  # the last sequence that was read (0: none)
    # Of the stream's last and first messages when the position was made (`StreamState.ends`): servers change `created` of a
    # stream that stays the same, but never the time of a message. Empty: unknown (version 1), or there was no stream.
    ends: Ends = ()
    # The plan of the micro-batch that ends here: the first sequence that it reads, and where its other partitions begin.
    first: int | None = None
    cuts: tuple[int, ...] = ()
    # Instead of a plan: the first sequence of the stream, and the last sequence that is left out where the micro-batch is
    # the first one with this stream (None: the query starts at `head`).
    head: int | None = None
    skipped: int | None = None
    held: Held | None = None
    # Of a change feed (see `feed`): the micro-batch that ends here, and those that begin before this sequence, have only the
    # newest messages of their keys up to it (0: there is no such micro-batch).
    snapshot: int = 0

    @classmethod
    def at(cls, state: StreamState, seq: int, *, snapshot: int = 0) -> Position:
        ends = state.ends or ((0, state.last_time),)
        return cls(state.created, seq, ends, held=held_by(state), snapshot=snapshot)

    @property
    def is_ahead(self) -> bool:
        """Whether the stream had not reached `seq` when the position was made, so that the query waits for it."""
        return bool(self.ends) and self.seq > self.ends[0][0]

    @property
    def snapshot_left(self) -> int:
        """The sequence up to which the next micro-batch has only the newest messages of their keys (0: it has all messages)."""
        return self.snapshot if self.seq < self.snapshot else 0

    def without_plan(self) -> Position:
        return replace(self, first=None, cuts=(), head=None, skipped=None, snapshot=self.snapshot_left)


def held_by(state: StreamState) -> Held | None:
    return (state.messages, state.num_subjects) if state.max_msgs_per_subject else None


def identity(stream: str, created: str, ends: Ends) -> StreamState:
    """Return what is remembered of a stream, for `client.api.check_same_stream`."""
    known = StreamState(stream, created, config={})
    if ends:
        (last, last_time), (first, first_time) = ends[0], ends[-1]
        known = replace(known, last_seq=last, last_time=last_time, first_seq=first, first_time=first_time)
        known = replace(known, messages=len(ends) - 1)  # with none, only the last sequence is known
    return known


@dataclass(frozen=True, slots=True)
class Offset:
    streams: Mapping[str, Position] = field(default_factory=dict)
    partitions: int | None = (
        None  # of the micro-batch that ends here, at least; None in an initial offset, and in version 1
    )
    most: int | None = None  # sequences of a partition, where the micro-batch has no cuts
    version: int = VERSION


def encode(offset: Offset) -> dict[str, Any]:
    encoded: dict[str, Any] = {"v": VERSION}
    if offset.partitions is not None:
        encoded["partitions"] = offset.partitions
    if offset.most is not None:
        encoded["most"] = offset.most
    encoded["streams"] = {name: _encode_position(at) for name, at in sorted(offset.streams.items())}
    return encoded


def _encode_position(at: Position) -> dict[str, Any]:
    encoded: dict[str, Any] = {"created": at.created, "seq": at.seq}
    if at.ends:
        encoded["ends"] = [[seq, rfc3339(time, "time")] for seq, time in at.ends]
    for name in ("first", "head", "skipped"):
        if (value := getattr(at, name)) is not None:
            encoded[name] = value
    if at.cuts:
        encoded["cuts"] = list(at.cuts)
    if at.held is not None:
        encoded["held"] = list(at.held)
    if at.snapshot:
        encoded["snapshot"] = at.snapshot
    return encoded


def decode(offset: Mapping[str, Any]) -> Offset:
    """Parse an offset; raise OffsetError if it is not of this source, or of a later version."""
    version = offset.get("v", VERSION)
    if version not in (1, VERSION) or isinstance(version, bool):
        raise OffsetError(
            f"the checkpoint has offsets of version {reprlib.repr(version)}, but this release of jetstream_ext reads versions "
            f"1 and {VERSION}; use the release that wrote it, or start with a new checkpoint"
        )
    try:
        streams = {name: _decode_position(at) for name, at in offset["streams"].items()}
        return Offset(streams, _optional(offset, "partitions"), _optional(offset, "most"), version)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        shown = reprlib.repr(offset)  # that of a nested list could raise RecursionError
        raise OffsetError(f"the checkpoint holds no offset of format 'jetstream': {shown} ({error})") from None


def _decode_position(at: Mapping[str, Any]) -> Position:
    ends = tuple((_sequence(seq, "ends"), parse_time(time)) for seq, time in at.get("ends") or ())
    return Position(
        json_text(at["created"], "created"),
        _sequence(at["seq"], "seq"),
        ends,
        _optional(at, "first"),
        tuple(_sequence(cut, "cuts") for cut in at.get("cuts") or ()),
        _optional(at, "head"),
        _optional(at, "skipped"),
        _decode_held(at.get("held")),
        _optional(at, "snapshot") or 0,
    )


def _decode_held(value: Any) -> Held | None:
    if value is None:
        return None
    messages, subjects = value
    return _sequence(messages, "held"), _sequence(subjects, "held")


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
            since = read.seq if read is not None and _same_stream(read, at) else 0
            behind[stream] = max(behind.get(stream, 0), at.seq - since, 0)
    return behind


def _same_stream(one: Position, other: Position) -> bool:
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
