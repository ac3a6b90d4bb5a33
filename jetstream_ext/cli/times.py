"""Times and durations as people write them on a command line, and a time as a command shows it."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

import click

MOMENT: Final = "a time such as 2026-03-01T12:00:00Z, '2026-03-01 14:30', 14:30, 'yesterday 14:30' or '10 minutes ago'"
"""What `moment` reads, for the text of an error."""

_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|$)", re.ASCII)
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_UNIT: Final = r"ms|s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:(?:ou)?rs?)?|d(?:ays?)?|w(?:eeks?)?"
_PART: Final = re.compile(rf"(\d+(?:\.\d+)?|an?\b)\s*({_UNIT})(?![a-z])(?:\s*,)?\s*(?:and\s+)?", re.ASCII)
_CLOCK: Final = re.compile(r"\d\d?:\d\d\b", re.ASCII)
_UTC: Final = re.compile(r" ?(?:utc|z)$")
_ZONE: Final = re.compile(r" (?=[+-]\d\d:?\d\d$)", re.ASCII)  # the space before an offset
_DAYS: Final = {"today": 0, "yesterday": 1}


class _NoSuchTimeError(ValueError):
    """The clocks were put forward over a local time."""


def duration(text: str) -> float:
    """Return the seconds of a duration as the nats tool writes it: 5, 5s, 500ms, 1m30s."""
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    if not _DURATION.sub("", text) and 0 < seconds < float("inf"):
        return seconds
    raise click.BadParameter(f"{text!r} is not a duration, such as 5s or 500ms")


def moment(text: str, now: datetime | None = None) -> datetime:
    """Return the instant that a text names, with its zone or else this machine's; raise ValueError if it names none.

    Args:
        text: RFC 3339, a date, a local time of a date or of today, ``yesterday 14:30``, ``now`` or ``10 minutes ago``.
        now: What the text is relative to; None is the present.
    """
    now = now or datetime.now().astimezone()
    words = _UTC.sub("+00:00", " ".join(text.lower().split()))
    try:
        if words == "now":
            return now
        if words.endswith(" ago"):
            return (now.astimezone(UTC) - _ago(words.removesuffix(" ago"))).astimezone()
        day, _, clock = words.partition(" ")
        if day in _DAYS:
            return _at(now.date() - timedelta(days=_DAYS[day]), clock.removeprefix("at ") or "00:00")
        if _CLOCK.match(words):
            return _at(now.date(), words)
        return _zoned(datetime.fromisoformat(_ZONE.sub("", words).upper()))
    except _NoSuchTimeError:
        raise ValueError(f"{text!r} does not exist in this time zone: the clocks were put forward") from None
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is not {MOMENT}") from None


def shown(when: datetime) -> str:
    """Return an instant with its zone, for people."""
    text = when.replace(tzinfo=None).isoformat(" ", "milliseconds" if when.microsecond else "seconds")
    offset, name = when.strftime("%z"), when.tzname() or ""
    if not when.utcoffset():
        return f"{text} UTC"
    zone = f"UTC{offset[:3]}:{offset[3:5]}"
    return f"{text} {zone}" if name.startswith("UTC") or name[:1] in "+-" else f"{text} {name} ({zone})"


def _ago(text: str) -> timedelta:
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text):
        raise ValueError
    units = (_SECONDS["ms" if unit == "ms" else unit[0]] for _, unit in parts)
    return timedelta(
        seconds=sum((1 if n[0] == "a" else float(n)) * unit for (n, _), unit in zip(parts, units, strict=True))
    )


def _at(day: date, clock: str) -> datetime:
    if not _CLOCK.match(clock):
        raise ValueError
    clock = _ZONE.sub("", clock)
    return _zoned(datetime.combine(day, time.fromisoformat(f"0{clock}" if clock[1] == ":" else clock)))


def _zoned(when: datetime) -> datetime:
    """Return a time in this machine's zone if it has none; of a time that occurs twice, the first."""
    if when.tzinfo is not None:
        return when
    local = when.astimezone()
    if local.replace(tzinfo=None) != when:
        raise _NoSuchTimeError
    return local
