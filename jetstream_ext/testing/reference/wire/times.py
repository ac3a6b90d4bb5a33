"""Times and durations as integer nanoseconds, and their text formats."""

import re
from datetime import UTC, datetime, timedelta, timezone

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
ZERO_TIME = "0001-01-01T00:00:00Z"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = {"ns": 1, "us": 1000, "µs": 1000, "μs": 1000, "ms": MILLISECOND, "s": SECOND, "m": MINUTE, "h": 60 * MINUTE}
_DURATION = re.compile(r"([0-9]*+)(?:\.([0-9]*+))?(ns|us|µs|μs|ms|s|m|h)")
_RFC3339 = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)


def rfc3339(now: int, *, draft: bool = False) -> str:
    """Format nanoseconds since 1970 in UTC as Go's RFC3339Nano, without trailing zeros in the fraction.

    `draft` selects the format of the first ADRs, `2022-08-06 00:29:27.5 +0000 UTC`.
    """
    seconds, nanos = divmod(now, SECOND)
    moment = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None)
    fraction = f".{nanos:09d}".rstrip("0") if nanos else ""
    if draft:
        return f"{moment.isoformat(' ')}{fraction} +0000 UTC"
    return f"{moment.isoformat()}{fraction}Z"


def parse_rfc3339(text: str) -> int:
    """Parse a time such as `2022-08-06T00:29:27.5+01:00` into nanoseconds since 1970; a zone is required.

    Raises:
        ValueError: The text has another format.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f'parsing time "{text}" as "2006-01-02T15:04:05Z07:00": cannot parse it')
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    zone = match[8]
    offset = timedelta(0)
    if zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:]))
        offset = -offset if zone[0] == "-" else offset
    if year == 0 or (year, month, day) == (1, 1, 1):
        return -62135596800 * SECOND
    moment = datetime(year, month, day, hour, minute, second, tzinfo=timezone(offset))
    whole = (moment - _EPOCH) // timedelta(seconds=1)
    return whole * SECOND + int((match[7] or "0")[:9].ljust(9, "0"))


def parse_duration(text: str) -> int | None:
    """Parse a Go duration such as `1h30m` into nanoseconds; return `None` for any other text."""
    sign = 1
    if text[:1] in ("+", "-"):
        sign = -1 if text[0] == "-" else 1
        text = text[1:]
    if text == "0":
        return 0
    total = 0
    position = 0
    while (match := _DURATION.match(text, position)) is not None:
        position = match.end()
        whole, unit = match[1].lstrip("0"), _UNITS[match[3]]
        part = (match[2] or "")[:18]
        if (not match[1] and not part) or len(whole) > 19:
            return None
        total += int(whole or "0") * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    if position != len(text) or not text or total > (1 << 63) - 1:
        return None
    return sign * total


def format_duration(nanos: int) -> str:
    """Format nanoseconds as Go prints a duration, such as `1m0s`; exact from one millisecond up."""
    seconds, rest = divmod(nanos, SECOND)
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    text = f"{seconds}{fraction}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
