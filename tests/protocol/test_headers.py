"""Header blocks: encoding, decoding, and the refusal of values that could end their line."""

import string
from datetime import UTC, datetime, timedelta

import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.js.api import Header

from jetstream_ext.errors import BadHeaderError, ResponseError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_message

TOKEN = "!#$%&'*+-.^_`|~" + string.digits + string.ascii_letters
names = st.text(TOKEN, min_size=1, max_size=20).filter(lambda name: name != h.MSG_ID)  # it must not be blank
values = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=40)


@given(st.dictionaries(names, values, min_size=1))
def test_encoded_headers_are_decoded_again(headers: dict[str, str]) -> None:
    block = h.encode(headers.items())
    # White space around a value is not part of it, for nats-py and for servers.
    assert h.parse_lines(block) == [(name, value.strip()) for name, value in headers.items()]
    assert block.count(b"\r\n") == len(headers) + 2
    assert h.parse_status(block) is None


def test_a_name_of_nats_py_s_enum_is_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    block = b"NATS/1.0\r\nNats-Rollup: sub\r\nNats-Msg-Id: 1\r\n\r\n"
    names: list[dict[str, str]] = [
        {Header.ROLLUP: "sub", Header.MSG_ID: "1"},
        {"Nats-Rollup": "sub", "Nats-Msg-Id": "1"},
    ]
    for first, second in (names, reversed(names)):
        monkeypatch.setattr(h, "_known_names", {})
        assert h.encode(first.items()) == h.encode(second.items()) == block
        assert h.HeaderCache().encode(first) == block


@given(st.dictionaries(names, values, min_size=1))
def test_nats_py_reads_the_same(headers: dict[str, str]) -> None:
    block = h.encode(headers.items())
    assert Client._parse_header_lines(block[len(b"NATS/1.0\r\n") :]) == dict(h.parse_lines(block))


@walk("name, value", [
    ("", "v"), ("a b", "v"), ("a:", "v"), ("a\r\nNats-Msg-Id", "v"), ("ä", "v"), ("a\0", "v"),
    ("K", "v\r\nNats-Msg-Id: 1"), ("K", "v\n"), ("K", "\r"), ("K", "a\0b"),
])  # fmt: skip
def test_headers_that_could_end_their_line_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadHeaderError) as caught:
        h.check_header(name, value)
    assert repr(name) in str(caught.value)
    with pytest.raises(BadHeaderError):
        h.encode([("fine", "fine"), (name, value)])


@walk("value", ["\ud800", "a\udfffb", "\ud800" * 3])
def test_value_that_utf_8_cannot_encode_is_refused_with_the_headers_name(value: str) -> None:
    h.encode([("Culprit", "known by now"), ("Other", "1")])
    with pytest.raises(BadHeaderError, match="the value of header 'Culprit' has half of a surrogate pair"):
        h.encode([("Other", "Culprit: 2"), ("Culprit", value), ("Other", value)])
    with pytest.raises(BadHeaderError, match="'New-Name'"):
        h.encode([("New-Name", value)])
    with pytest.raises(BadHeaderError, match="'Culprit'"):
        h.check_header("Culprit", value)


@walk("name, value", [(b"K", "v"), ("K", b"v"), ("K", 1), ("K", None), (None, "v"), ("K", ["v"])])
def test_headers_must_be_text(name: object, value: object) -> None:
    with pytest.raises(TypeError, match="must be str"):
        h.check_header(name, value)  # type: ignore[arg-type]


@walk(
    "block, status",
    [
        (b"NATS/1.0\r\n\r\n", None),
        (b"NATS/1.0\r\nStatus: 204\r\n\r\n", None),
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 503\r\nNats-Subject: $JS.API.DIRECT.GET.ND\r\n\r\n", (503, "")),
        (b"NATS/1.0 404 Message Not Found\r\n\r\n", (404, "Message Not Found")),
        (b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 7\r\n\r\n", (204, "EOB")),
        (b"NATS/1.0 503", (503, "")),  # cut short, but the code is complete
        (b"NATS/1.0 408 \xff\r\n\r\n", (408, "\ufffd")),
    ],
)
def test_status(block: bytes, status: tuple[int, str] | None) -> None:
    assert h.parse_status(block) == status


@walk("block", [b"", b"HTTP/1.1 200\r\n\r\n", b"NATS/1.0 abc\r\n\r\n", b"NATS/1.0 -1\r\n\r\n"])
def test_an_invalid_status_is_a_response_error_with_its_bytes(block: bytes) -> None:
    with pytest.raises(ResponseError) as caught:
        h.parse_status(block)
    assert caught.value.frame == block


def test_stored_headers_exclude_the_servers_headers() -> None:
    lines = "".join(f"{name}: 1\r\n" for name in h.REPLY_HEADERS)
    block = f"NATS/1.0\r\nX: 1\r\n{lines}Nats-Msg-Id: 2\r\nNats-Batch-Id: 3\r\n\r\n".encode()
    assert h.decode_stored(block) == {"X": "1", "Nats-Msg-Id": "2", "Nats-Batch-Id": "3"}
    assert h.decode_stored(b"\r\n") == {}
    assert h.decode_stored(b"") == {}


def test_lines_without_a_colon_are_skipped_and_values_may_have_colons() -> None:
    assert h.parse_lines(b"NATS/1.0\r\nnonsense\r\nTime: 12:30:00\r\nNo:space\r\n\r\n") == [
        ("Time", "12:30:00"),
        ("No", "space"),
    ]


@walk("line", [b"X: a", b"X: ", b"X"])
def test_a_line_without_a_number_is_a_response_error(line: bytes) -> None:
    with pytest.raises(ResponseError):
        h.line_number(line)


@given(st.integers(-62_135_596_800, 253_402_300_799), st.integers(0, 999_999_999), st.integers(0, 9))
def test_times_are_exact(second: int, ns: int, digits: int) -> None:
    fraction = f"{ns:09d}"[:digits]
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
    text = whole.isoformat()[:-6] + (f".{fraction}" if fraction else "") + "Z"
    assert h.parse_time_ns(text.encode()) == second * 1_000_000_000 + int(fraction.ljust(9, "0"))


@walk("text", [
    b"", b"Z", b"2026-11-20T21:23:31", b"2026-11-20T21:23:31+01:00", b"2026-11-20T21:23:31+01:00Z", b"2026-11-20Z",
    b"2026-11-20T21:23:31.Z1", b"2026-11-20T21:23:31.1234567890Z", b"2026-13-20T21:23:31Z",
    b"2026-11-20T21:23:31.12aZ", b"2022-08-06 00:29:27 +0100 UTC", b" +0000 UTC", b"\xff", b"20261120T212331Z",
])  # fmt: skip
def test_invalid_times_are_refused(text: bytes) -> None:
    with pytest.raises(ResponseError, match="not RFC 3339") as caught:
        h.parse_time_ns(text)
    assert caught.value.frame == text


@walk(
    "text, ns",
    [(b"2022-08-06 00:29:27.587861324 +0000 UTC", 587861324), (b"2022-08-06 00:29:27 +0000 UTC", 0)],
)
def test_times_in_the_form_of_the_adr_are_accepted(text: bytes, ns: int) -> None:
    assert h.parse_time_ns(text) == 1_659_745_767 * 1_000_000_000 + ns


@walk("text, utc", [
    ("2026-11-20T21:23:31Z", b"2026-11-20T21:23:31Z"),
    ("2026-11-20T21:23:31.000000001Z", b"2026-11-20T21:23:31.000000001Z"),
    ("2026-11-20T22:23:31.123456789+01:00", b"2026-11-20T21:23:31.123456789Z"),
    ("2026-11-20T16:23:31-05:00", b"2026-11-20T21:23:31Z"),
    ("2027-01-01T00:30:00.5+05:30", b"2026-12-31T19:00:00.5Z"),
])  # fmt: skip
def test_a_leader_s_time_in_its_own_zone_becomes_utc(text: str, utc: bytes) -> None:
    found = parse_message("S", {"message": {"subject": "a", "seq": 1, "time": text}})
    assert found.time_ns == h.parse_time_ns(utc)


def test_rebuilt_block_ends_with_the_lines_of_the_server_in_their_order() -> None:
    # nats-py keeps a repeated name at its first place, with its last value.
    parsed = {
        "Nats-Last-Sequence": "1",
        "Nats-Sequence": "2",
        "A": "b",
        "Nats-Stream": "S",
        "Nats-Subject": "s",
        "Nats-Time-Stamp": "T",
        "Nats-Num-Pending": "0",
    }
    assert h.rebuild(parsed) == (
        b"NATS/1.0\r\nA: b\r\nNats-Stream: S\r\nNats-Subject: s\r\nNats-Sequence: 2\r\nNats-Time-Stamp: T\r\n"
        b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 1\r\n\r\n"
    )


class TestHeaderCache:
    def test_a_block_that_repeats_is_encoded_once(self) -> None:
        cache, headers = h.HeaderCache(), {"K": " v ", "L": "ä"}
        block = cache.encode(headers)
        assert block == h.encode(headers.items())
        assert cache.encode(dict(headers)) is block
        assert cache.encode({"L": "ä", "K": " v "}) == h.encode([("L", "ä"), ("K", " v ")]), "the order counts"
        headers["K"] = "w"
        assert cache.encode(headers) == h.encode(headers.items())

    def test_its_memory_is_bounded(self) -> None:
        cache = h.HeaderCache()
        for i in range(2000):
            cache.encode({"K": str(i)})
            cache.encode({"K": "x" * 5000 + str(i)})
            cache.encode({"Nats-Msg-Id": str(i)})
        assert len(cache._blocks) <= 256
        assert max(map(len, cache._blocks.values())) <= 1024
