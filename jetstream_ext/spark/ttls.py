"""Durations as options and columns write them, and the time to live of a row."""

from __future__ import annotations

import re
from typing import Final

from jetstream_ext.protocol.options import ttl_value
from jetstream_ext.types import NEVER, TTL

_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``500ms``, ``90s``, ``15m``, ``1h`` or ``30``; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,9})?(ms|s|m|min|h|d)?", text.strip().lower())
    if match is None:
        return None
    return (float(match[1] + match[2]) if match[2] else int(match[1])) * _SECONDS[match[3] or ""]


def parse_ttl(value: int | str) -> TTL:
    """Return the TTL for seconds, a duration such as ``15m``, or ``never``; raise ValueError for others."""
    ttl: TTL | None = value if isinstance(value, int) else parse_duration(value)
    if isinstance(value, str) and value.strip().lower() == "never":
        ttl = NEVER
    if ttl is None:
        raise ValueError(f"{value!r} is not a whole number of seconds, a duration such as 90s, 15m or 24h, or never")
    ttl_value(ttl)  # raises ValueError
    return ttl


def ttl_text(value: int | str) -> str:
    """Return the value of ``Nats-TTL`` for what `parse_ttl` takes."""
    return ttl_value(parse_ttl(value))
