"""Numbers that another program wrote: a server, or a publisher of what is stored. The one place that reads them.

Python's ``int`` takes more than any server writes: signs, blanks, underscores, the digits of other scripts.
"""

from __future__ import annotations

from typing import Final

LARGEST: Final = (1 << 64) - 1
"""The largest sequence or count of a stream."""
_MOST_DIGITS: Final = len(str(LARGEST))


def parse_number(text: bytes | str, high: int = LARGEST) -> int | None:
    """Return the number from 0 to `high` that `text` has in decimal ASCII digits; None if it has anything else."""
    if len(text) > _MOST_DIGITS or not text.isdigit() or not text.isascii():
        return None
    number = int(text)
    return number if number <= high else None


def json_number(value: object, name: str, *, low: int = 0, high: int = LARGEST) -> int:
    """Return `value` if it is an integer from `low` to `high`; raise ValueError for any other value of a JSON document."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name!r} is not an integer from {low} to {high}")
    return value


def json_int64(value: object, name: str) -> int:
    """As `json_number`, for a setting or a duration in nanoseconds: servers write -1 for none, and keep 64 bits."""
    return json_number(value, name, low=-(1 << 63), high=(1 << 63) - 1)


def json_text(value: object, name: str) -> str:
    """Return `value` if it is a string; raise ValueError for any other value of a JSON document.

    ``str`` of every value would raise RecursionError for a list that is nested a thousand deep.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a string")  # noqa: TRY004 - the callers' documented error
    return value
