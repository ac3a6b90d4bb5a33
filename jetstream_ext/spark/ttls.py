"""The time to live of a row, as the option and the column write it."""

from __future__ import annotations

import re
from typing import Final

from jetstream_ext.protocol.options import ttl_value
from jetstream_ext.types import NEVER, TTL

_SECONDS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_ttl(value: int | str) -> TTL:
    """Return the TTL for seconds, a duration such as ``15m``, or ``never``; raise ValueError for others."""
    ttl: TTL = _parse(value) if isinstance(value, str) else value
    ttl_value(ttl)  # raises ValueError
    return ttl


def ttl_text(value: int | str) -> str:
    """Return the value of ``Nats-TTL`` for what `parse_ttl` takes."""
    return ttl_value(parse_ttl(value))


def _parse(text: str) -> TTL:
    word = text.strip().lower()
    if word == "never":
        return NEVER
    match = re.fullmatch(r"([0-9]{1,18})(s|m|min|h|d)?", word)
    if match is None:
        raise ValueError(f"{text!r} is not a whole number of seconds, a duration such as 90s, 15m or 24h, or never")
    return int(match[1]) * _SECONDS[match[2] or ""]
