"""Where a read starts and ends, as the user says it: by sequence, by time, or by name.

A start is the first sequence that is read, an end the last one (both inclusive). By time, a read covers what was
stored from ``startingTime`` on and before ``endingTime``, so that ``[t0, t1)`` and ``[t1, t2)`` meet without overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any


class Named(Enum):
    """An end of the stream as it is when the read is planned."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class AtSequence:
    """A stream sequence."""

    seq: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """An aware moment."""

    when: datetime


Bound = Named | AtSequence | AtTime


def parse_offsets(text: str, streams: Sequence[str], default: Named) -> dict[str, Bound]:
    """Parse ``earliest``, ``latest`` or JSON such as ``{"ORDERS": 42, "RETURNS": "latest"}``.

    Args:
        text: What the user wrote.
        streams: The streams that are read; every one has a bound in the result.
        default: The bound of streams that the JSON leaves out.

    Raises:
        ValueError: With what is wrong, without naming the option.
    """
    named = _named(text)
    if named is not None:
        return dict.fromkeys(streams, named)

    def bound(value: Any) -> Bound:
        if isinstance(value, str) and (name := _named(value)) is not None:
            return name
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63:
            raise ValueError(f"{value!r} is no stream sequence (an integer from 1), 'earliest' or 'latest'")
        return AtSequence(value)

    if not text.lstrip().startswith("{"):
        raise ValueError(f'{text!r} is not earliest, latest, or JSON such as {{"{streams[0]}": 42}}')
    return _per_stream(text, streams, default, bound)


def parse_times(text: str, streams: Sequence[str], default: Named) -> dict[str, Bound]:
    """Parse an RFC 3339 time with its zone, or JSON with one per stream.

    Raises:
        ValueError: With what is wrong, without naming the option.
    """
    if text.lstrip().startswith("{"):
        return _per_stream(text, streams, default, _time)
    return dict.fromkeys(streams, _time(text))


def _named(text: str) -> Named | None:
    word = text.strip().lower()
    return Named(word) if word in ("earliest", "latest") else None


def _time(value: Any) -> AtTime:
    example = "2026-01-31T13:45:00Z"
    try:
        when = datetime.fromisoformat(value.strip())
    except (AttributeError, ValueError):
        raise ValueError(f"{value!r} is no RFC 3339 time such as {example}") from None
    if when.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; write it with Z or an offset, such as {example}")
    return AtTime(when)


def _per_stream(text: str, streams: Sequence[str], default: Named, bound: Callable[[Any], Bound]) -> dict[str, Bound]:
    try:
        # Of two entries for one stream the last would win, unseen.
        pairs = json.loads(text, object_pairs_hook=list)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    bounds: dict[str, Bound] = {}
    for stream, value in pairs:
        if stream not in streams:
            raise ValueError(f"it names {stream!r}, which is not among the streams that are read: {', '.join(streams)}")
        if stream in bounds:
            raise ValueError(f"it names {stream!r} twice")
        bounds[stream] = bound(value)
    return {stream: bounds.get(stream, default) for stream in streams}
