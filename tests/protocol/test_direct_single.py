"""Requests, and the replies to single gets."""

import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import orjson
import pytest
from cells import walk

from jetstream_ext import errors
from jetstream_ext.protocol import direct
from jetstream_ext.protocol.direct import Request
from jetstream_ext.protocol.frames import Frame

TIME = b"2026-11-20T21:23:31.245203696Z"


def raw(block: bytes, data: bytes = b"") -> Frame:
    return b"_INBOX.x", block + data, len(block)


# -- requests


@walk(
    "request_, body",
    [
        (Request(seq=5), {"seq": 5}),
        (Request(last_by_subj="orders.*"), {"last_by_subj": "orders.*"}),
        (Request(seq=100, next_by_subj="orders.*"), {"seq": 100, "next_by_subj": "orders.*"}),
        (Request(seq=1, batch=500, max_bytes=1000), {"seq": 1, "batch": 500, "max_bytes": 1000}),
        (
            Request(multi_last=("a.>", "b"), up_to_seq=12, seq=3, batch=2),
            {"multi_last": ["a.>", "b"], "up_to_seq": 12, "seq": 3, "batch": 2},
        ),
        (
            Request(start_time=datetime(2026, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=1))), batch=1),
            {"start_time": "2026-01-02T02:04:05.000006+00:00", "batch": 1},
        ),
        (
            Request(multi_last=("a",), up_to_time=datetime(2026, 1, 2, tzinfo=UTC)),
            {"multi_last": ["a"], "up_to_time": "2026-01-02T00:00:00+00:00"},
        ),
    ],
)
def test_requests(request_: Request, body: dict[str, Any]) -> None:
    subject, payload = request_.address("API")
    # The last message on a subject is asked for in the subject-appended form.
    last = body.get("last_by_subj")
    assert (subject, payload and orjson.loads(payload)) == (("API", body) if last is None else (f"API.{last}", b""))


def test_a_naive_time_never_reaches_a_request() -> None:
    with pytest.raises(ValueError, match="start_time"):
        Request(start_time=datetime(2026, 1, 1), batch=1).address("API")  # noqa: DTZ001 - naive on purpose


# -- single gets


def test_single() -> None:
    block = (
        b"NATS/1.0\r\nX-U: v5\r\nNats-Sequence: 77\r\nNats-Stream: D\r\nNats-Subject: d.B\r\nNats-Sequence: 5\r\n"
        b"Nats-Time-Stamp: 2026-11-20T21:23:31.295694403Z\r\n\r\n"
    )
    stored = direct.decode_single("ASKED", raw(block, b"m5"))
    assert (stored.stream, stored.subject, stored.seq, stored.data) == ("D", "d.B", 5, b"m5")
    assert (stored.headers, stored.num_pending, stored.last_seq) == ({"X-U": "v5"}, None, None)
    assert stored.time_ns % 1_000_000_000 == 295_694_403


def test_a_single_message_with_a_stored_status_is_a_message() -> None:
    block = (
        b"NATS/1.0 404 Message Not Found\r\nNats-Stream: D\r\nNats-Subject: d.B\r\nNats-Sequence: 5\r\n"
        b"Nats-Time-Stamp: 2026-11-20T21:23:31Z\r\n\r\n"
    )
    assert direct.decode_single("D", raw(block)).seq == 5


@walk(
    "block, error",
    [
        (b"NATS/1.0 404 Message Not Found\r\n\r\n", errors.MessageNotFoundError),
        (b"NATS/1.0 408 Empty Request\r\n\r\n", errors.UnsupportedFeatureError),
        (b"NATS/1.0 408 Malformed Request\r\n\r\n", errors.BadRequestError),
        (b"NATS/1.0 412 Required Api Level\r\n\r\n", errors.RequiredApiLevelError),
        (b"NATS/1.0 413 Too Many Results\r\n\r\n", errors.TooManySubjectsError),
        (b"NATS/1.0 500 broken\r\n\r\n", errors.ServerError),
        (b"NATS/1.0 503\r\n\r\n", errors.DirectGetDisabledError),
        (b"NATS/1.0 204 EOB\r\n\r\n", errors.ResponseError),
        (b"", errors.ResponseError),
        (b"NATS/1.0\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: 5\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: x\r\nNats-Stream: D\r\nNats-Subject: s\r\nNats-Time-Stamp: " + TIME + b"\r\n\r\n", errors.ResponseError),
        (b"NATS/1.0\r\nNats-Sequence: 5\r\nNats-Stream: D\r\nNats-Subject: s\r\nNats-Time-Stamp: now\r\n\r\n", errors.ResponseError),
    ],
)  # fmt: skip
def test_single_refusals(block: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        direct.decode_single("D", raw(block))
    assert type(caught.value) is error


@walk(
    "code, attributes",
    [
        (404, {"code": 404, "stream": "D"}),
        (408, {"code": 408, "description": "Some Text", "stream": "D"}),
        (412, {"code": 412, "err_code": 10185, "outcome": "not_stored"}),
        (500, {"code": 500, "description": "Some Text"}),
        (503, {"stream": "D"}),
        (299, {"frame": b"NATS/1.0 299 Some Text\r\n\r\n"}),
    ],
)
def test_refusals_name_the_stream_and_what_the_server_said(code: int, attributes: dict[str, Any]) -> None:
    error = direct.status_error("D", b"NATS/1.0 %d Some Text\r\n\r\n" % code)
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert "'D'" in str(error)


def test_header_pairs_have_every_value_in_order() -> None:
    lines = b"NATS/1.0\r\nX: 1\r\nY: \r\nX: 2\r\n"
    added = b"Nats-Stream: S\r\nNats-Subject: s\r\nNats-Sequence: 1\r\nNats-Time-Stamp: %b\r\n" % TIME
    block = lines + added + b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
    pairs = [("X", "1"), ("Y", ""), ("X", "2")]
    one = direct.decode_single("S", raw(block, b"v"))
    of_a_batch = direct.StoredMsg.from_wire("S", 1, block + b"v", len(block))
    for message in (one, of_a_batch, pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(of_a_batch))):
        assert message.header_pairs == pairs
        assert message.headers == {"X": "2", "Y": ""}
        assert list(message.headers.items()) == [("X", "2"), ("Y", "")]
    assert direct.StoredMsg(stream="S", subject="s", seq=1).header_pairs == []
    assert direct.StoredMsg(stream="S", subject="s", seq=1, headers={"X": "1"}).header_pairs == [("X", "1")]


def test_raw_headers_have_the_stored_bytes() -> None:
    lines = b"NATS/1.0\r\nX: \xff\r\nY\xe9: \xef\xbf\xbd\r\nX: caf\xe9\r\n"
    added = b"Nats-Stream: S\r\nNats-Subject: s\r\nNats-Sequence: 1\r\nNats-Time-Stamp: %b\r\n" % TIME
    block = lines + added + b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n"
    one = direct.decode_single("S", raw(block, b"v"))
    of_a_batch = direct.StoredMsg.from_wire("S", 1, block + b"v", len(block))
    from_the_leader = direct.Block.of([one], 0).message(0)
    for message in (
        one,
        of_a_batch,
        from_the_leader,
        *(pickle.loads(pickle.dumps(each)) for each in (one, of_a_batch)),
    ):
        assert message.raw_headers == [(b"X", b"\xff"), (b"Y\xe9", b"\xef\xbf\xbd"), (b"X", b"caf\xe9")]
        assert message.header_pairs == [("X", "\ufffd"), ("Y\ufffd", "\ufffd"), ("X", "caf\ufffd")]
        assert message.headers == {"X": "caf\ufffd", "Y\ufffd": "\ufffd"}
        assert message.size == len(lines) + len(b"\r\n") + len(b"sv")
