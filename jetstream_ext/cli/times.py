"""Times and durations as people write them on a command line."""

from __future__ import annotations

import re
from typing import Final

import click

_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|$)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Return the seconds of a duration as the nats tool writes it: 5, 5s, 500ms, 1m30s."""
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    if not _DURATION.sub("", text) and 0 < seconds < float("inf"):
        return seconds
    raise click.BadParameter(f"{text!r} is not a duration, such as 5s or 500ms")
