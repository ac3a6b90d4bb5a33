"""Filters that Spark pushes down."""

from dataclasses import dataclass
from typing import Any

from jetstream_ext.spark.pushed import PushedFilters, parse_pushed_filters


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


def test_filters_narrow_the_read(cell: Any) -> None:
    for filters, left in [
        ([], PushedFilters()),
        ([EqualTo(SEQ, 5)], PushedFilters(5, 5)),
        ([In(SEQ, [9, 5, None])], PushedFilters(5, 9)),
        ([GreaterThan(SEQ, 5), LessThan(SEQ, 9)], PushedFilters(6, 8)),
        ([GreaterThanOrEqual(SEQ, 5), LessThanOrEqual(SEQ, 9)], PushedFilters(5, 9)),
        ([EqualTo(SEQ, None)], PushedFilters()),
        ([EqualTo(("data",), b"x")], PushedFilters()),
        ([Not(SEQ, 5)], PushedFilters()),
        ([EqualTo(SUBJECT, "a.b")], PushedFilters(subjects=("a.b",))),
        ([In(SUBJECT, ["a", "b"])], PushedFilters(subjects=("a", "b"))),
        ([EqualTo(SUBJECT, "a.\ufffd")], PushedFilters()),
        ([EqualTo(SUBJECT, "a.*")], PushedFilters()),
        ([EqualTo(SUBJECT, "a b")], PushedFilters()),
        ([StringStartsWith(SUBJECT, "a.b.")], PushedFilters(subjects=("a.b.>",))),
        ([StringStartsWith(SUBJECT, "a.b")], PushedFilters(subjects=("a.>",))),
        ([StringStartsWith(SUBJECT, "ab")], PushedFilters()),
        ([StringStartsWith(SUBJECT, "a.*.")], PushedFilters()),
        ([EqualTo(SUBJECT, "a.b"), StringStartsWith(SUBJECT, "a.")], PushedFilters(subjects=("a.b",))),
        ([EqualTo(SUBJECT, "a.b"), EqualTo(SUBJECT, "c")], PushedFilters(subjects=())),
    ]:
        with cell(filters, left):
            assert parse_pushed_filters(filters) == left


def test_pushed_filters_combine_with_those_of_the_read(cell: Any) -> None:
    for subjects, own, left in [
        (None, (), ()),
        (None, ("a",), ("a",)),
        (("a.b",), (), ("a.b",)),
        (("a.b",), ("a.>",), ("a.b",)),
        (("a.>",), ("a.b", "c"), ("a.b",)),
        (("a.b",), ("c.>",), None),
        ((), (), None),
        (("a.b.>",), ("a.*.c",), ("a.*.c",)),  # no single filter expresses both: more is read, and Spark filters it
        (("a.b",), ("a.b.>",), None),
    ]:
        with cell(subjects, own, left):
            assert PushedFilters(subjects=subjects).within(own) == left
