"""Which keys and filters a bucket takes (ADR-8), and which keys a filter matches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nats.js.errors import InvalidKeyError

# nats-py's own rule, without its two leaks: `$` lets a trailing line feed through, and "a..b" is no subject.
_KEY: Final = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_FILTER: Final = re.compile(r"([-/_=a-zA-Z0-9]+|\*)(\.([-/_=a-zA-Z0-9]+|\*))*(\.>)?|>")

EVERYTHING: Final = ">"


def check_key(key: str) -> None:
    """Refuse a key that nats-py, nats.go and nats.js would refuse.

    Raises:
        nats.js.errors.InvalidKeyError: Characters outside ``[-/_=.a-zA-Z0-9]``, or an empty token.
        TypeError: Not a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key must be str, not {type(key).__name__}")
    if not _KEY.fullmatch(key):
        raise InvalidKeyError(f"key {key!r} is not tokens of [-/_=a-zA-Z0-9] joined by single dots")


def check_keys(keys: Iterable[str]) -> dict[str, None]:
    """Return `keys` without repetitions, in order.

    Raises:
        nats.js.errors.InvalidKeyError: See `check_key`.
        TypeError: A single string, which would be taken for its letters, or something that is no string.
    """
    if isinstance(keys, str | bytes):
        raise TypeError("keys must be a collection of keys, not a single one")
    wanted = dict.fromkeys(keys)
    for key in wanted:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            check_key(key)
    return wanted


def check_filters(filters: Sequence[str] | None) -> list[str]:
    """Return `filters` without repetitions; None is everything.

    Raises:
        nats.js.errors.InvalidKeyError: One is neither a key nor a pattern of keys (``*``: a token, ``>``: the rest).
        ValueError: There are none.
        TypeError: A single string, or something that is no string.
    """
    if filters is None:
        return [EVERYTHING]
    if isinstance(filters, str | bytes):
        raise TypeError("filters must be a collection of filters, not a single one")
    wanted = list(dict.fromkeys(filters))
    if not wanted:
        raise ValueError("no filters: leave them out for the whole bucket")
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"a filter must be str, not {type(pattern).__name__}")
        if not _FILTER.fullmatch(pattern):
            raise InvalidKeyError(f"filter {pattern!r} is neither a key nor a pattern of keys")
    return [EVERYTHING] if EVERYTHING in wanted else wanted


def is_literal(pattern: str) -> bool:
    """Return whether a checked filter is a single key."""
    return "*" not in pattern and not pattern.endswith(">")


def matcher(filters: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a key matches one of checked `filters`, as a function."""
    if EVERYTHING in filters:
        return lambda _: True
    literals = frozenset(pattern for pattern in filters if is_literal(pattern))
    patterns = [_regex(pattern) for pattern in filters if not is_literal(pattern)]
    if not patterns:
        return literals.__contains__
    search = re.compile("|".join(patterns)).fullmatch
    return lambda key: key in literals or search(key) is not None


def _regex(pattern: str) -> str:
    tokens = {"*": r"[^.]+", ">": r".+"}
    return r"\.".join(tokens.get(token) or re.escape(token) for token in pattern.split("."))
