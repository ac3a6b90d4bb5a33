"""JSON without loss: numbers with their digits, and an error for what Python would leave out."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Final

import orjson


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _decoder(parse_float: Callable[[str], Any], parse_int: Callable[[str], Any]) -> json.JSONDecoder:
    return json.JSONDecoder(parse_float=parse_float, parse_int=parse_int, object_pairs_hook=_unique)


_AS_WRITTEN: Final = _decoder(orjson.Fragment, orjson.Fragment)


def decode_exact(text: bytes) -> Any:
    """Return a valid JSON document whose numbers are `orjson.Fragment`, so that `orjson.dumps` writes them unchanged.

    Raises ValueError if an object has a key twice, or if the document is nested too deeply.
    """
    return _decode(_AS_WRITTEN, text)


_INTEGERS: Final = json.JSONDecoder(parse_float=lambda _: None, parse_int=str)


def large_integer(text: bytes, name: str) -> str | None:
    """Return the digits of the integer, however large, at the key `name` of a valid JSON object; None for other values."""
    found = _decode(_INTEGERS, text).get(name)
    return found if isinstance(found, str) else None


class _Pairs(list[tuple[str, Any]]):
    """An object with all its keys, also equal ones."""


_ALL_KEYS: Final = json.JSONDecoder(parse_float=str, parse_int=str, object_pairs_hook=_Pairs)


def repeated_key(text: bytes, names: Collection[str], within: str | None = None) -> str | None:
    """Return one of the `names` that a valid JSON object has more than once, or a repeated key of the object at `within`.

    Raises ValueError if the object is nested too deeply.
    """
    pairs = _decode(_ALL_KEYS, text)
    keys = [key for key, _ in pairs if key in names]
    inside = [key for at, value in pairs if at == within and isinstance(value, _Pairs) for key, _ in value]
    return next((key for each in (keys, inside) for key in each if each.count(key) > 1), None)


def _double(text: str) -> float:
    number = float(text)
    digits = text.lower().partition("e")[0].replace(".", "").strip("-0")
    # A double has up to 17 significant digits; those of `repr` are enough to tell it from others.
    too_large, too_small = number in (float("inf"), float("-inf")), digits and not number
    if too_large or too_small or (len(digits) > _DIGITS and digits != _digits_of(number)):
        raise ValueError(f"the number {text} does not fit a double")
    return number


_DIGITS: Final = 17


def _digits_of(number: float) -> str:
    return repr(number).partition("e")[0].replace(".", "").strip("-0")


_NUMBERS: Final = _decoder(_double, int)


def decode_numbers(text: bytes) -> Any:
    """Return a valid JSON document with int and float.

    Raises ValueError if an object has a key twice, if the document is nested too deeply, or if a number does not fit.
    """
    return _decode(_NUMBERS, text)


def _decode(decoder: json.JSONDecoder, text: bytes) -> Any:
    try:
        return decoder.decode(text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
