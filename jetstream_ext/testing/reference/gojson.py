"""JSON as a Go server writes and reads it: HTML-safe output, typed and case-insensitive input.

Only what shows on the wire is modelled. The texts of syntax errors are Python's own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import times

__all__ = [
    "BOOL",
    "DURATION",
    "DURATIONS",
    "INT",
    "STRING",
    "STRINGS",
    "STRING_MAP",
    "TIME",
    "UINT",
    "Enum",
    "JsonError",
    "ListOf",
    "Struct",
    "decode",
    "dumps",
    "quote",
]

_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class JsonError(ValueError):
    """Say why a request does not decode, in the server's words."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A JSON value of one Go type; `check` returns the Python value or raises `TypeError`."""

    go_type: str
    check: Callable[[Any], Any]


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    # Half a surrogate pair is no character: Go puts the replacement character in its place.
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


def _time(value: Any) -> int:
    return times.parse_rfc3339(_string(value))


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError
    return [_string(item) if item is not None else "" for item in value]


def _durations(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise TypeError
    return [_integer(-(1 << 63), (1 << 63) - 1)(item) for item in value]


def _string_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError
    return {key: _string(item) for key, item in value.items()}


STRING = Scalar("string", _string)
BOOL = Scalar("bool", _bool)
INT = Scalar("int", _integer(-(1 << 63), (1 << 63) - 1))
UINT = Scalar("uint64", _integer(0, (1 << 64) - 1))
DURATION = Scalar("time.Duration", _integer(-(1 << 63), (1 << 63) - 1))
TIME = Scalar("time.Time", _time)
STRINGS = Scalar("[]string", _strings)
DURATIONS = Scalar("[]time.Duration", _durations)
STRING_MAP = Scalar("map[string]string", _string_map)


@dataclass(frozen=True, slots=True)
class Enum:
    """A string out of a fixed set; Go decodes these with code of their own, hence the other error text."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Struct:
    """A JSON object with named fields."""

    name: str
    fields: Mapping[str, "Scalar | Enum | Struct | ListOf"]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A JSON array of objects."""

    item: Struct


def dumps(value: Any) -> bytes:
    """Encode as Go's `json.Marshal` does: compact, in the order given, with `<`, `>` and `&` escaped."""
    return (
        json.dumps(value, separators=(",", ":"), ensure_ascii=False).translate(_HTML).encode("utf-8", "surrogateescape")
    )


def quote(text: str) -> str:
    r"""Quote like Go's `%q`: control bytes become `\\x01`, which is not JSON."""
    out = []
    for char in text:
        if char in '"\\':
            out.append("\\" + char)
        elif char in "\a\b\f\n\r\t\v":
            out.append(
                {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}[char]
            )
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\x{ord(char):02x}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def decode(data: bytes, schema: Struct, *, strict: bool) -> dict[str, Any]:
    """Decode a request into a dict of the fields that were given.

    Args:
        data: The request.
        schema: What it may hold. Names match whatever their case, as in Go.
        strict: Whether an unknown field is an error.

    Raises:
        JsonError: It is no JSON, has a value of the wrong type, or has an unknown field while `strict`.
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


def _value(item: Any, kind: "Scalar | Enum | Struct | ListOf", path: str, strict: bool) -> Any:
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
