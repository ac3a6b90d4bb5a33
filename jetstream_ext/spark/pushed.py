"""Filters of a query that Spark hands down: what they leave of a read.

They only narrow what is read; Spark applies every one of them again. So a filter that is understood halfway is used
halfway, and one that is not understood costs nothing. Times are left alone: a stream's times need not grow with its
sequences (clocks are set back, sources keep their origin's times), and a query's filter must not depend on that;
``startingTime`` says it where it is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol.subjects import check_filter, covers


@dataclass(frozen=True, slots=True)
class Pushed:
    """What filters leave.

    Attributes:
        first: The first sequence.
        last: The last sequence.
        subjects: Filters, any of which a subject must match; None is all.
    """

    first: int = 1
    last: int = (1 << 63) - 1
    subjects: tuple[str, ...] | None = None

    def and_(self, other: Pushed) -> Pushed:
        """Return what both leave."""
        both = replace(self, first=max(self.first, other.first), last=min(self.last, other.last))
        if other.subjects is None:
            return both
        if self.subjects is None:
            return replace(both, subjects=other.subjects)
        return replace(both, subjects=_intersect(self.subjects, other.subjects))

    def within(self, filters: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the filters of a read that has `filters` of its own (none is all); None: nothing is left."""
        if self.subjects is None:
            return filters
        return (_intersect(filters, self.subjects) if filters else self.subjects) or None


NOTHING_PUSHED = Pushed()


def _intersect(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Return filters for what matches one of `some` and one of `others`, or for more where no filter says just that."""
    both: dict[str, None] = {}
    for one in some:
        for other in others:
            if covers(one, other):
                both[other] = None
            elif covers(other, one):
                both[one] = None
            elif _overlap(one, other):
                return some
    return tuple(both)


def _overlap(one: str, other: str) -> bool:
    """Return whether some subject matches both filters."""
    ones, others = one.split("."), other.split(".")
    for left, right in zip(ones, others, strict=False):
        if ">" in (left, right):
            return True
        if "*" not in (left, right) and left != right:
            return False
    return len(ones) == len(others)  # the longer one, even if it ends in ">", needs a token more


def understand(filters: Iterable[Any]) -> Pushed:
    """Return what Spark's `filters` (all of which hold) leave."""
    left = NOTHING_PUSHED
    for one in filters:
        column = getattr(one, "attribute", ())
        if column == ("seq",):
            left = left.and_(_sequences(type(one).__name__, one))
        elif column == ("subject",):
            left = left.and_(_subjects(type(one).__name__, one))
    return left


def _sequences(kind: str, one: Any) -> Pushed:
    values = one.value if kind == "In" else [getattr(one, "value", None)]
    if kind == "In":
        values = [value for value in values if value is not None] or [0]  # nothing equals null
    if not values or any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        return NOTHING_PUSHED
    low, high = min(values), max(values)
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        return Pushed(first=low, last=high)
    if kind == "GreaterThan":
        return Pushed(first=low + 1)
    if kind == "GreaterThanOrEqual":
        return Pushed(first=low)
    if kind == "LessThan":
        return Pushed(last=high - 1)
    if kind == "LessThanOrEqual":
        return Pushed(last=high)
    return NOTHING_PUSHED


def _subjects(kind: str, one: Any) -> Pushed:
    if kind in ("EqualTo", "EqualNullSafe", "In"):
        values = one.value if kind == "In" else [one.value]
        if not values or not all(isinstance(value, str) and _is_subject(value) for value in values):
            return NOTHING_PUSHED
        return Pushed(subjects=tuple(dict.fromkeys(values)))
    if kind == "StringStartsWith" and isinstance(one.value, str):
        # Whole tokens only: "a.b" begins "a.bc", too.
        prefix = one.value.rpartition(".")[0]
        if prefix and _is_subject(prefix):
            return Pushed(subjects=(f"{prefix}.>",))
    return NOTHING_PUSHED


def _is_subject(text: str) -> bool:
    """Return whether a subject can be that: then, as a filter, it matches itself only."""
    try:
        check_filter(text)
    except BadSubjectError:
        return False
    return not any(token in ("*", ">") for token in text.split("."))
