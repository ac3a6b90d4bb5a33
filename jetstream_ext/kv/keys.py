"""The keys and filters that a bucket accepts (ADR-8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from nats.js.errors import InvalidKeyError

# nats-py's rule without its two gaps: its `$` accepts a trailing line feed, and "a..b" is not a valid subject.
_KEY: Final = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_FILTER: Final = re.compile(r"([-/_=a-zA-Z0-9]+|\*)(\.([-/_=a-zA-Z0-9]+|\*))*(\.>)?|>")

EVERYTHING: Final = ">"


def check_key(key: str) -> None:
    """Raise InvalidKeyError for a key that nats-py, nats.go and nats.js refuse; TypeError if it is not a str."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be str, not {type(key).__name__}")
    if not _KEY.fullmatch(key):
        raise InvalidKeyError(f"key {key!r} must be tokens of [-/_=a-zA-Z0-9] joined by single dots")


def check_keys(keys: Iterable[str]) -> dict[str, None]:
    """Return `keys` without repetitions, in order; raise as `check_key` does, and TypeError for a single key."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys must be a collection of keys, not {type(keys).__name__}")
    wanted = dict.fromkeys(keys)
    for key in wanted:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            check_key(key)
    return wanted


def check_filters(filters: Sequence[str] | None) -> list[str]:
    """Return `filters` without repetitions; None is everything.

    Raises:
        nats.js.errors.InvalidKeyError: One is neither a key nor a pattern of keys (``*``: a token, ``>``: the rest).
        ValueError: There are no filters.
        TypeError: A single string, or a filter that is not a str.
    """
    if filters is None:
        return [EVERYTHING]
    if isinstance(filters, str | bytes):
        raise TypeError(f"filters must be a collection of filters, not {type(filters).__name__}")
    wanted = list(dict.fromkeys(filters))
    if not wanted:
        raise ValueError("filters must not be empty; leave them out to read the whole bucket")
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"a filter must be str, not {type(pattern).__name__}")
        if not _FILTER.fullmatch(pattern):
            raise InvalidKeyError(f"filter {pattern!r} is neither a key nor a key pattern (with * and >)")
    return [EVERYTHING] if EVERYTHING in wanted else wanted
