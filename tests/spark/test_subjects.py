"""Subject filters match the same subjects as on the server."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.protocol.subjects import SubjectMatcher, covers

TOKEN = st.sampled_from(["a", "b", "*"])
FILTERS = st.builds(
    lambda tokens, tail: ".".join([*tokens, ">"] if tail else tokens),
    st.lists(TOKEN, min_size=1, max_size=4),
    st.booleans(),
)
SUBJECTS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5).map(".".join)


def matches(filter_: str, subject: str) -> bool:
    pattern = re.escape(filter_).replace(r"\*", "[^.]+")
    return re.fullmatch(re.sub(r">$", ".+", pattern), subject) is not None


@given(FILTERS, SUBJECTS)
def test_filters_match_as_on_the_server(filter_: str, subject: str) -> None:
    assert covers(filter_, subject) == matches(filter_, subject)
    assert SubjectMatcher([filter_]).mask([subject.encode()]) == [matches(filter_, subject)]


@given(FILTERS, FILTERS, SUBJECTS)
def test_a_wider_filter_matches_whatever_the_narrower_one_does(wide: str, narrow: str, subject: str) -> None:
    if covers(wide, narrow) and matches(narrow, subject):
        assert matches(wide, subject)


def test_any_of_several_filters_may_match() -> None:
    matcher = SubjectMatcher(["a.*", "b"])
    subjects = [b"a.1", b"b", b"c", b"a.1", b"a.\xff"]
    assert matcher.mask(subjects) == [True, True, False, True, True]
    assert matcher.mask(subjects) == [True, True, False, True, True]
    assert SubjectMatcher(["x"]).mask([]) == []
