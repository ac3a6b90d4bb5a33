"""Subject filters: which subjects they match, and which other filters they cover."""

from __future__ import annotations

from collections.abc import Sequence

_REMEMBERED = 65_536


def covers(wide: str, narrow: str) -> bool:
    """Return whether every subject that the filter `narrow` matches is matched by the filter `wide`, too.

    A subject without wildcards is a filter that matches itself.
    """
    wides, narrows = wide.split("."), narrow.split(".")
    for index, part in enumerate(wides):
        if part == ">":
            return len(narrows) > index
        if index >= len(narrows) or narrows[index] == ">":
            return False
        if part not in ("*", narrows[index]):
            return False
    return len(wides) == len(narrows)


class Matcher:
    """Matches the subjects of messages against filters; streams repeat subjects, so answers are remembered."""

    def __init__(self, filters: Sequence[str]) -> None:
        self._filters = tuple(filters)
        self._known: dict[bytes, bool] = {}

    def mask(self, subjects: Sequence[bytes]) -> list[bool]:
        """Return for each subject whether one of the filters matches it."""
        known = self._known
        if len(known) > _REMEMBERED:
            known.clear()
        for subject in set(subjects).difference(known):
            text = subject.decode("utf-8", "replace")
            known[subject] = any(covers(one, text) for one in self._filters)
        return [known[subject] for subject in subjects]
