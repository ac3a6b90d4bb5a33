"""Times, durations and JSON as a Go server writes and reads them. The texts of errors about invalid JSON are Python's."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

from .errors import not_modelled

# -- times and durations, in integer nanoseconds ----------------------------------------------------------------------

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
ZERO_TIME = "0001-01-01T00:00:00Z"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = {"ns": 1, "us": 1000, "µs": 1000, "μs": 1000, "ms": MILLISECOND, "s": SECOND, "m": MINUTE, "h": 60 * MINUTE}
_PART = re.compile(r"([0-9]++(?:\.[0-9]++)?)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:{_PART.pattern})++")
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)


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
    whole = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    return (whole - _EPOCH) // timedelta(seconds=1) * SECOND + int((match[2] or "0")[:9].ljust(9, "0"))


def parse_duration(text: str) -> int | None:
    """Parse a Go duration such as `1h30m` into nanoseconds; return `None` for any other text."""
    if not _DURATION.fullmatch(text):
        return None
    total = sum(Decimal(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return int(total) * (-1 if text[0] == "-" else 1) if total < 1 << 63 else None


def format_duration(nanos: int) -> str:
    """Format nanoseconds as Go prints a duration, such as `1m0s`; exact from one millisecond up."""
    seconds, rest = divmod(nanos, SECOND)
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    text = f"{seconds}{fraction}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


# -- JSON -------------------------------------------------------------------------------------------------------------


class JsonError(ValueError):
    """A request that does not decode."""


class _Marker(Enum):
    NOT_MODELLED = "not modelled"


NOT_MODELLED: Literal[_Marker.NOT_MODELLED] = _Marker.NOT_MODELLED
"""The kind of a field whose effect the reference server does not have: only its default is accepted."""

Check = Callable[[Any], Any]
"""Returns the Python value of a JSON value, or raises a `TypeError` or `ValueError`."""
Kind = Check | Mapping[str, "Kind"] | tuple[Mapping[str, "Kind"]] | Literal[_Marker.NOT_MODELLED]
"""The type of a field: a value, an object with these fields, or in a tuple a list of such objects."""
Schema = Mapping[str, Kind]


def _of_type(wanted: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not wanted:
            raise TypeError(f"cannot unmarshal {value!r} into Go value of type {wanted.__name__}")
        return value

    return check


_text, _number, _list, _object = _of_type(str), _of_type(int), _of_type(list), _of_type(dict)


def _string(value: Any) -> str:
    text = str(_text(value))
    # Go replaces an unpaired surrogate with the replacement character.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        number = int(_number(value))
        if not low <= number <= high:
            raise ValueError(f"cannot unmarshal number {number}: out of range")
        return number

    return check


def _time(value: Any) -> int:
    return parse_rfc3339(_string(value))


def _string_map(value: Any) -> dict[str, str]:
    return {_string(key): _string(item) for key, item in _object(value).items()}


def _list_of(check: Check) -> Check:
    return lambda value: [check(item) for item in _list(value)]


def one_of(*values: str) -> Check:
    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"can not unmarshal {value!r}")
        return value

    return check


BOOL: Check = _of_type(bool)
INT: Check = _integer(-(1 << 63), (1 << 63) - 1)
UINT: Check = _integer(0, (1 << 64) - 1)
STRING: Check = _string
STRINGS: Check = _list_of(_string)
STRING_MAP: Check = _string_map
TIME: Check = _time
DURATION: Check = INT
DURATIONS: Check = _list_of(INT)


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")


def decode(data: bytes, schema: Schema, *, strict: bool) -> dict[str, Any]:
    """Decode a request into a dict of the fields it has.

    Raises:
        JsonError: The request is not JSON, a value has the wrong type, or a field is unknown and `strict` is set.
        ApiError: A field is not modelled.
    """
    try:
        value = json.loads(data.decode("utf-8", "replace"), parse_constant=_no_constant)
        return {} if value is None else _fields(value, schema, strict)
    except (ValueError, TypeError, RecursionError) as error:
        raise JsonError(str(error)) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"invalid character {name[0]!r} looking for beginning of value")


def _fields(value: Any, schema: Schema, strict: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, item in _object(value).items():
        kind = schema.get(name)
        if kind is None:
            if strict:
                raise JsonError(f'json: unknown field "{name}"')
        elif kind is NOT_MODELLED:
            if not _is_default(item):
                raise not_modelled(f"field {name}")
        elif item is None:
            pass
        elif isinstance(kind, tuple):
            result[name] = [_fields(each, kind[0], strict) for each in _list(item)]
        elif isinstance(kind, Mapping):
            result[name] = _fields(item, kind, strict)
        else:
            result[name] = kind(item)
    return result


def _is_default(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_default, value.values()))
    return not value or value in ("default", "none", "instant")
