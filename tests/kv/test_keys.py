"""Keys and filters: which are valid, and which keys a filter matches."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.errors import InvalidKeyError
from nats.js.kv import VALID_KEY_RE

from jetstream_ext.kv.entries import check_filters, check_key, check_keys
from jetstream_ext.protocol.subjects import matcher

GOOD = ["a", "A.b", "1234.address", "-", "_", "=", "/", "a/b=c-d_e", "a.b.c.d", "0"]
BAD = ["", ".", "a.", ".a", "a..b", "a b", "a\n", "a\t", "a*", "*", ">", "a.>", "é", "a\0", "$a", "a,b", "a\r\nPUB x"]
FILTERS = [">", "*", "a", "a.*", "*.b", "*.*", "a.>", "*.>", "a.*.>", "a.b.c"]
BAD_FILTERS = ["", ".", "a.", ".>", "a>", "a*", "*a", ">.a", "a.>.b", "a..>", "a.b>", "a b", "> ", "a\n"]

keys = st.lists(st.sampled_from(["a", "b", "c1", "-"]), min_size=1, max_size=4).map(".".join)
filters = st.lists(st.sampled_from(["a", "b", "c1", "*"]), min_size=1, max_size=4).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens, ">"]), ">"])
)


def test_keys_and_filters_are_those_of_nats_py() -> None:
    for key in GOOD:
        check_key(key)
        assert VALID_KEY_RE.match(key), key
        assert check_filters([key]) == [key]
    for pattern in FILTERS:
        assert check_filters([pattern, "x"]) == ([">"] if pattern == ">" else [pattern, "x"]), pattern
    for key in BAD:
        with pytest.raises(InvalidKeyError):
            check_key(key)
    for pattern in BAD_FILTERS:
        with pytest.raises(InvalidKeyError):
            check_filters([pattern])


def test_collections_are_deduplicated_and_checked() -> None:
    assert list(check_keys(iter(["b", "a", "b"]))) == ["b", "a"]
    assert list(check_keys([])) == []
    assert check_filters(None) == [">"]
    for wrong, shown in (("abc", "'abc'; give"), (b"abc", "bytes")):
        with pytest.raises(TypeError, match=f"keys must be a list of keys, not {shown}"):
            check_keys(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"filters must be a list of keys or key patterns, not {shown}"):
            check_filters(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        check_keys([b"a"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        check_filters([1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="filters must not be empty"):
        check_filters([])


def by_tokens(pattern: str, key: str) -> bool:
    """Whether a key matches, token by token, as NATS defines it."""
    wanted, tokens = pattern.split("."), key.split(".")
    for i, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > i
        if i >= len(tokens) or token not in ("*", tokens[i]):
            return False
    return len(tokens) == len(wanted)


@given(patterns=st.lists(filters, min_size=1, max_size=4), key=keys)
def test_matcher_agrees_with_matching_by_tokens(patterns: list[str], key: str) -> None:
    assert matcher(check_filters(patterns))(key) == any(by_tokens(pattern, key) for pattern in patterns)


@given(st.text(max_size=12))
def test_key_rule_is_that_of_nats_py_without_its_gaps(text: str) -> None:
    try:
        check_key(text)
    except InvalidKeyError:
        gaps = text.endswith("\n") or ".." in text
        assert gaps or text[:1] in ("", ".") or text[-1:] == "." or not VALID_KEY_RE.match(text)
    else:
        assert VALID_KEY_RE.match(text)
        assert not re.search(r"\s", text)
