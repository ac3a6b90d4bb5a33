"""The position of a streaming query, as Spark keeps it in its checkpoint: ``{"v":1,"streams":{"S":{"created":…,"seq":…}}}``.

Spark compares offsets as text, so names are sorted and numbers are integers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from jetstream_ext.protocol.api import recreated
from jetstream_ext.protocol.numbers import json_number, json_text

VERSION: Final = 1


class OffsetError(ValueError):
    """The checkpoint holds no offset of this source, or one of a later version."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a stream, which `created` tells from a later stream of the same name."""

    created: str  # when the stream was created, as the server writes it; empty: it did not exist
    seq: int  # the last sequence that was read (0: none)


Positions = dict[str, Position]


def encode(positions: Mapping[str, Position]) -> dict[str, Any]:
    streams = {name: {"created": at.created, "seq": at.seq} for name, at in sorted(positions.items())}
    return {"v": VERSION, "streams": streams}


def decode(offset: Mapping[str, Any]) -> Positions:
    """Return the positions of an offset; raise OffsetError if it is not of this source, or of a later version."""
    version = offset.get("v", VERSION)
    if version != VERSION:
        raise OffsetError(
            f"the checkpoint has offsets of version {reprlib.repr(version)}, but this release of jetstream_ext reads version "
            f"{VERSION}; use the release that wrote it, or start with a new checkpoint"
        )
    try:
        return {
            name: Position(json_text(at["created"], "created"), json_number(at["seq"], "seq"))
            for name, at in offset["streams"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        shown = reprlib.repr(offset)  # that of a nested list could raise RecursionError
        raise OffsetError(f"the checkpoint holds no offset of format 'jetstream': {shown} ({error})") from None


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
            since = 0 if read is None or recreated(read.created, at.created) else read.seq
            behind[stream] = max(behind.get(stream, 0), at.seq - since, 0)
    return behind


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _positions(offset: Any) -> Positions:
    """Return the positions of an offset that Spark reports; none if it is another source's."""
    try:
        if isinstance(offset, str):
            offset = orjson.loads(offset)
        return decode(offset) if isinstance(offset, Mapping) else {}
    except ValueError:
        return {}
