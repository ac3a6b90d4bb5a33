"""Times, durations and JSON as a Go server writes and reads them: HTML-safe output, typed and case-insensitive input.

The texts of syntax errors are Python's; all other differences that a client can see are modelled.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

# -- times and durations, in integer nanoseconds ----------------------------------------------------------------------

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


# -- JSON -------------------------------------------------------------------------------------------------------------

_QUOTED = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)},
    **str.maketrans({'"': r"\"", "\\": r"\\"}),
    **str.maketrans({"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"}),
}
_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class JsonError(ValueError):
    """A request that does not decode; the text is the server's."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A JSON value of one Go type; `check` returns the Python value or raises a `TypeError`."""

    go_type: str
    check: Callable[[Any], Any]


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    # Go replaces an unpaired surrogate with the replacement character.
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise TypeError
        return value

    return check


_INT64 = _integer(-(1 << 63), (1 << 63) - 1)


def _time(value: Any) -> int:
    return parse_rfc3339(_string(value))


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError
    return [_string(item) if item is not None else "" for item in value]


def _durations(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise TypeError
    return [_INT64(item) for item in value]


def _string_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError
    return {key: _string(item) for key, item in value.items()}


STRING = Scalar("string", _string)
BOOL = Scalar("bool", _bool)
INT = Scalar("int", _INT64)
UINT = Scalar("uint64", _integer(0, (1 << 64) - 1))
DURATION = Scalar("time.Duration", _INT64)
TIME = Scalar("time.Time", _time)
STRINGS = Scalar("[]string", _strings)
DURATIONS = Scalar("[]time.Duration", _durations)
STRING_MAP = Scalar("map[string]string", _string_map)


@dataclass(frozen=True, slots=True)
class Enum:
    """A string out of a fixed set; the server decodes these with their own code, so the error text differs."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Struct:
    name: str
    fields: Mapping[str, "Kind"]


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Struct


Kind = Scalar | Enum | Struct | ListOf
"""The type of a field."""


def dumps(value: Any) -> bytes:
    """Encode as Go's `json.Marshal` does: compact, in the given order, with `<`, `>` and `&` escaped."""
    return (
        json.dumps(value, separators=(",", ":"), ensure_ascii=False).translate(_HTML).encode("utf-8", "surrogateescape")
    )


def quote(text: str) -> str:
    r"""Quote as Go's `%q` does: control characters become `\x01` and the like, which is not JSON."""
    return '"' + text.translate(_QUOTED) + '"'


def decode(data: bytes, schema: Struct, *, strict: bool) -> dict[str, Any]:
    """Decode a request into a dict of the fields it has. As in Go, the case of a name does not matter.

    Raises:
        JsonError: The request is not JSON, a value has the wrong type, or a field is unknown and `strict` is set.
    """
    try:
        value = json.loads(data.decode("utf-8", "replace"), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise JsonError("unexpected end of JSON input" if error.pos >= len(error.doc) else str(error)) from error
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error
    if value is None:
        return {}
    return _struct(value, schema, strict)


def _no_constant(name: str) -> None:
    raise ValueError(f"invalid character {name[0]!r} looking for beginning of value")


def _struct(value: Any, schema: Struct, strict: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise JsonError(f"json: cannot unmarshal {_go_kind(value)} into Go value of type server.{schema.name}")
    result: dict[str, Any] = {}
    folded = {name.lower(): name for name in schema.fields}
    for key, item in value.items():
        name = key if key in schema.fields else folded.get(key.lower())
        if name is None:
            if strict:
                raise JsonError(f'json: unknown field "{key}"')
            continue
        if item is not None:
            result[name] = _value(item, schema.fields[name], f"{schema.name}.{name}", strict)
    return result


def _value(item: Any, kind: Kind, path: str, strict: bool) -> Any:
    match kind:
        case Struct():
            return _struct(item, kind, strict)
        case ListOf():
            if not isinstance(item, list):
                raise JsonError(
                    f"json: cannot unmarshal {_go_kind(item)} into Go struct field {path} of type []server.{kind.item.name}"
                )
            return [_struct(element, kind.item, strict) for element in item]
        case Enum():
            if item not in kind.values:
                raise JsonError(f"can not unmarshal {json.dumps(item)}")
            return item
        case Scalar():
            try:
                return kind.check(item)
            except TypeError:
                text = f"json: cannot unmarshal {_go_kind(item)} into Go struct field {path} of type {kind.go_type}"
                raise JsonError(text) from None
            except ValueError as error:
                raise JsonError(str(error)) from None


def _go_kind(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int() | float():
            return f"number {value}" if isinstance(value, float) or value < 0 else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
