"""Commands are encoded as nats-py writes them; subjects and names that would break the protocol are refused."""

import string
from collections.abc import Callable

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext.errors import BadSubjectError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.subjects import SubjectCache, check_filter, check_name, check_subject

subjects = st.text(string.ascii_letters + string.digits + "-_$äß", min_size=1, max_size=12)
payloads = st.binary(max_size=60) | st.just(b"PUB a 1\r\nx\r\n")


@walk("parts, data", [
    ((b"a.b", b"", b"", b""), b"PUB a.b 0\r\n\r\n"), ((b"a.b", b"", b"", b"xyz"), b"PUB a.b 3\r\nxyz\r\n"),
    ((b"a.b", b"_INBOX.1", b"", b"xyz"), b"PUB a.b _INBOX.1 3\r\nxyz\r\n"),
    ((b"a", b"", b"NATS/1.0\r\nX: 1\r\n\r\n", b""), b"HPUB a 18 18\r\nNATS/1.0\r\nX: 1\r\n\r\n\r\n"),
    ((b"a", b"r", b"NATS/1.0\r\nX: 1\r\n\r\n", b"z"), b"HPUB a r 18 19\r\nNATS/1.0\r\nX: 1\r\n\r\nz\r\n"),
])  # fmt: skip
def test_pub(parts: tuple[bytes, bytes, bytes, bytes], data: bytes) -> None:
    assert frames.pub(*parts) == data


@given(st.lists(st.tuples(subjects, subjects | st.just(""), st.just(b"") | st.just(h.encode([("X", "1")])), payloads)))
def test_parse_pubs_reads_what_pub_writes(commands: list[tuple[str, str, bytes, bytes]]) -> None:
    data = b"".join(frames.pub(s.encode(), r.encode(), head, payload) for s, r, head, payload in commands)
    assert list(frames.parse_pubs(data)) == [frames.Command(*parts) for parts in commands]


BAD_EVERYWHERE = ["", " ", "a b", "a\tb", "a\r\nb", "a\0", "a\x7f", ".", "a.", ".a", "a..b", "\ud800"]


@walk("subject", ["a", "a.b.c", "$KV.bucket.key", "ä.ß", "a*.b", "a.b>", "_INBOX.x", "a=/b"])
def test_valid_subjects(subject: str) -> None:
    check_subject(subject)
    assert SubjectCache().encode(subject) == subject.encode()


@walk("subject", [*BAD_EVERYWHERE, "*", "a.*", "a.>", ">", "a.*.b"])
def test_invalid_subjects(subject: str) -> None:
    with pytest.raises(BadSubjectError) as caught:
        check_subject(subject)
    assert repr(subject) in str(caught.value)


@walk("subject", ["a", "*", ">", "a.*.c", "a.>", "*.*.>"])
def test_valid_filters(subject: str) -> None:
    check_filter(subject)


@walk("subject", [*BAD_EVERYWHERE, "a.>.b", ">.a"])
def test_invalid_filters(subject: str) -> None:
    with pytest.raises(BadSubjectError):
        check_filter(subject)


@walk("name", ["S", "KV_bucket", "a-b", "ä", "$x"])
def test_valid_names(name: str) -> None:
    check_name(name, "stream name")


@walk("name", ["", "a.b", "a b", "*", ">", "a/b", "a\\b", "a\r\n", "a>", "\x7f", "\ud800"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(BadSubjectError, match="stream name"):
        check_name(name, "stream name")


@walk("check", [check_subject, check_filter, lambda name: check_name(name, "x")])
@walk("value", [None, b"a", 5])
def test_only_text_is_a_subject_or_name(check: Callable[[object], None], value: object) -> None:
    with pytest.raises(TypeError, match="must be str"):
        check(value)


def test_stays_bounded_and_right() -> None:
    cache = SubjectCache()
    for i in range(20_000):
        assert cache.encode(f"s.{i}") == b"s.%d" % i
    assert len(cache) <= cache._LIMIT
    assert cache.encode("s.1") == b"s.1"
