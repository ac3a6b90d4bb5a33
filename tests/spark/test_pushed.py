"""What is made of a query's filters."""

from dataclasses import dataclass
from typing import Any

import pytest

from jetstream_ext.spark.pushed import NOTHING_PUSHED, Pushed, understand


@dataclass(frozen=True)
class EqualTo:
    attribute: tuple[str, ...]
    value: Any


class In(EqualTo):
    pass


class GreaterThan(EqualTo):
    pass


class GreaterThanOrEqual(EqualTo):
    pass


class LessThan(EqualTo):
    pass


class LessThanOrEqual(EqualTo):
    pass


class StringStartsWith(EqualTo):
    pass


class Not(EqualTo):
    pass


SEQ, SUBJECT = ("seq",), ("subject",)


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ([], NOTHING_PUSHED),
        ([EqualTo(SEQ, 5)], Pushed(5, 5)),
        ([In(SEQ, [9, 5, None])], Pushed(5, 9)),
        ([GreaterThan(SEQ, 5), LessThan(SEQ, 9)], Pushed(6, 8)),
        ([GreaterThanOrEqual(SEQ, 5), LessThanOrEqual(SEQ, 9)], Pushed(5, 9)),
        ([EqualTo(SEQ, None)], NOTHING_PUSHED),
        ([EqualTo(("data",), b"x")], NOTHING_PUSHED),
        ([Not(SEQ, 5)], NOTHING_PUSHED),
        ([EqualTo(SUBJECT, "a.b")], Pushed(subjects=("a.b",))),
        ([In(SUBJECT, ["a", "b"])], Pushed(subjects=("a", "b"))),
        ([EqualTo(SUBJECT, "a.*")], NOTHING_PUSHED),
        ([EqualTo(SUBJECT, "a b")], NOTHING_PUSHED),
        ([StringStartsWith(SUBJECT, "a.b.")], Pushed(subjects=("a.b.>",))),
        ([StringStartsWith(SUBJECT, "a.b")], Pushed(subjects=("a.>",))),
        ([StringStartsWith(SUBJECT, "ab")], NOTHING_PUSHED),
        ([StringStartsWith(SUBJECT, "a.*.")], NOTHING_PUSHED),
        ([EqualTo(SUBJECT, "a.b"), StringStartsWith(SUBJECT, "a.")], Pushed(subjects=("a.b",))),
        ([EqualTo(SUBJECT, "a.b"), EqualTo(SUBJECT, "c")], Pushed(subjects=())),
    ],
)
def test_what_filters_leave(filters: list[Any], left: Pushed) -> None:
    assert understand(filters) == left


@pytest.mark.parametrize(
    ("subjects", "own", "left"),
    [
        (None, (), ()),
        (None, ("a",), ("a",)),
        (("a.b",), (), ("a.b",)),
        (("a.b",), ("a.>",), ("a.b",)),
        (("a.>",), ("a.b", "c"), ("a.b",)),
        (("a.b",), ("c.>",), None),
        ((), (), None),
        (("a.b.>",), ("a.*.c",), ("a.*.c",)),  # no filter says exactly both: more is read, and filtered by Spark
        (("a.b",), ("a.b.>",), None),
    ],
)
def test_together_with_the_filters_of_the_read(
    subjects: tuple[str, ...] | None, own: tuple[str, ...], left: tuple[str, ...] | None
) -> None:
    assert Pushed(subjects=subjects).within(own) == left
