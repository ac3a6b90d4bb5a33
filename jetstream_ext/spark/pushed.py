"""What the filters of a batch query, which Spark pushes down, leave to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import check_subject, covers, overlap


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The part of a read that the query's own filters need; `subjects` are filters, any of which may match (None: all)."""

    first: int = 1
    last: int = (1 << 63) - 1
    subjects: tuple[str, ...] | None = None

    def intersect(self, other: PushedFilters) -> PushedFilters:
        if self.subjects is None or other.subjects is None:
            subjects = self.subjects if other.subjects is None else other.subjects
        else:
            subjects = _intersect(self.subjects, other.subjects)
        return PushedFilters(max(self.first, other.first), min(self.last, other.last), subjects)

    def within(self, filters: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the filters of a read that has `filters` of its own (none: all messages); None: nothing matches."""
        if self.subjects is None:
            return filters
        return (_intersect(filters, self.subjects) if filters else self.subjects) or None


def _intersect(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Return filters for what matches one of `some` and one of `others`, or for more where no filter is exact."""
    both: dict[str, None] = {}
    for left in some:
        for right in others:
            if covers(left, right):
                both[right] = None
            elif covers(right, left):
                both[left] = None
            elif overlap(left, right):
                return some
    return tuple(both)


def parse_pushed_filters(filters: Iterable[Any]) -> PushedFilters:
    """Return what Spark's `filters`, all of which hold, let through.

    Spark applies every one of them again, so a filter is used as far as it can be expressed, and ignored otherwise.
    Times are ignored: they need not grow with the sequences (clocks are set back, sources keep the times of their
    origin). ``startingTime`` is the option for them.
    """
    result = PushedFilters()
    parsers: dict[Any, Callable[[str, Any], PushedFilters]] = {("seq",): _sequences, ("subject",): _subjects}
    for each in filters:
        if parse := parsers.get(getattr(each, "attribute", None)):
            result = result.intersect(parse(type(each).__name__, getattr(each, "value", None)))
    return result


def _sequences(kind: str, value: Any) -> PushedFilters:
    values = [value]
    if kind == "In":
        values = [each for each in value if each is not None] or [0]  # nothing equals null
    if any(isinstance(each, bool) or not isinstance(each, int) for each in values):
        return PushedFilters()
    low, high = min(values), max(values)
    match kind:
        case "EqualTo" | "EqualNullSafe" | "In":
            return PushedFilters(low, high)
        case "GreaterThan":
            return PushedFilters(first=low + 1)
        case "GreaterThanOrEqual":
            return PushedFilters(first=low)
        case "LessThan":
            return PushedFilters(last=high - 1)
        case "LessThanOrEqual":
            return PushedFilters(last=high)
    return PushedFilters()


def _subjects(kind: str, value: Any) -> PushedFilters:
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        values = value if kind == "In" else [value]
        if values and all(_is_subject(each) for each in values):
            return PushedFilters(subjects=tuple(dict.fromkeys(values)))
    elif kind == "StringStartsWith" and isinstance(value, str):
        # Whole tokens only: "a.bc" starts with "a.b" as well.
        prefix = value.rpartition(".")[0]
        if _is_subject(prefix):
            return PushedFilters(subjects=(f"{prefix}.>",))
    return PushedFilters()


def _is_subject(value: Any) -> bool:
    """Return whether `value` is a literal subject, which as a filter matches only itself."""
    try:
        check_subject(value)
    except (BadSubjectError, TypeError):
        return False
    return "\ufffd" not in value  # in a column, that stands for bytes that are not UTF-8
