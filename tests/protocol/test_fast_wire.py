"""Replies to fast ingest: frames of released servers and of the ADR's draft, decoded."""

from typing import Any

import orjson
import pytest
from cells import walk
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol import fast_wire as replies
from jetstream_ext.protocol.fast_wire import BatchFlowError, OrdinaryAck, UnrecognisedReply
from jetstream_ext.types import BatchAck, BatchFlowAck, BatchFlowGap

SUBJECT = b"_INBOX.X.raw.10.ok.7.1.$FI"


def decode(subject: bytes, header: bytes, payload: bytes) -> replies.Reply:
    return replies.decode((subject, header + payload, len(header)))


SAID: list[tuple[bytes, Any]] = [
    (b'{"type":"ack","seq":0,"msgs":10}', BatchFlowAck(0, 10)),
    (b'{"type":"ack","seq":10,"msgs":500}', BatchFlowAck(10, 500)),
    (b'{"type":"ack","seq":1,"msgs":2,"new":"field"}', BatchFlowAck(1, 2)),
    (b'{"type":"gap","last_seq":3,"seq":5}', BatchFlowGap(3, 5)),
    (b'{"type":"gap","last_seq":3,"seq":2}', BatchFlowGap(3, 2)),
    (b'{"stream":"F","seq":26,"batch":"u1","count":26}', BatchAck("F", 26, "u1", 26)),
    (b'{"stream":"F","domain":"hub","seq":26,"batch":"u1","count":26,"val":"9"}', BatchAck("F", 26, "u1", 26, "hub", "9")),
    (b'{"stream":"F","seq":0,"batch":"h7","count":0}', BatchAck("F", 0, "h7", 0)),
    (b'{"stream":"F","seq":85,"duplicate": true,"batch":"d4","count":1}', BatchAck("F", 85, "d4", 1)),
    (b'{"stream":"Y","seq":1}', OrdinaryAck()),
    (b'{"stream":"Y", "seq":1}', OrdinaryAck()),
    (b'{"stream":"Y","seq":1,"duplicate":true}', OrdinaryAck()),
    (b'{"type":"weather","seq":1}', UnrecognisedReply(b'{"type":"weather","seq":1}')),
    # The draft has one untyped frame for all three.
    (b'{"last_seq":0,"seq":0,"ack_msgs":10}', BatchFlowAck(0, 10)),
    (b'{"seq":7,"ack_msgs":10}', BatchFlowAck(7, 10)),
    (b'{"last_seq":7,"ack_msgs":10}', BatchFlowAck(7, 10)),
    (b'{"last_seq":3,"seq":6}', BatchFlowGap(4, 6)),
]  # fmt: skip


@walk("payload, said", SAID)
def test_replies(payload: bytes, said: Any) -> None:
    assert decode(SUBJECT, b"", payload) == replies.Reply(7, b"1", said)


@walk(
    "header, payload, code, err_code",
    [
        (b"", b'{"error":{"code":400,"err_code":10208,"description":"batch publish ID unknown"},"stream":"F","seq":0}', 400, 10208),
        (
            b"NATS/1.0 429 Too Many Requests\r\n\r\n",
            b'{"error":{"code":429,"err_code":10167,"description":"too many requests"},"stream":"Q","seq":0}',
            429,
            10167,
        ),
        (b"NATS/1.0 503\r\nNats-Subject: zz.q\r\n\r\n", b"", 503, None),
        (b"NATS/1.0 503\r\n\r\n", b"", 503, None),
        (b"NATS/1.0 412 Required Api Level\r\n\r\n", b"", 412, None),
        (b"", b'{"error":{"code":500,"description":"no code of its own"}}', 500, None),
        (b"", b'{"error":{},"batch":"u1"}', None, None),
    ],
)  # fmt: skip
def test_refusals(header: bytes, payload: bytes, code: int | None, err_code: int | None) -> None:
    said = decode(SUBJECT, header, payload).said
    assert isinstance(said, errors.ServerError)
    assert (said.code, said.err_code) == (code, err_code)
    assert str(said)


@walk("subject", [b"", b"a.b", b"_INBOX.x", b"a.x.1.$FI", b"a.-1.1.$FI", b"a..1.$FI", b"2.3.$FI"])
def test_another_subject_is_a_response_error(subject: bytes) -> None:
    with pytest.raises(errors.ResponseError, match="subject"):
        decode(subject, b"", SAID[0][0])


@walk("payload", [
    b"", b"\xff", b"nonsense", b"[]", b"1", b'"text"', b"null", b"{}", b'{"seq":1}', b'{"stream":"S"}',
    b'{"type":"ack"}', b'{"type":"ack","seq":1}', b'{"type":"ack","seq":-1,"msgs":1}',
    b'{"type":"ack","seq":"1","msgs":1}', b'{"type":"ack","seq":true,"msgs":1}',
    b'{"type":"ack","seq":1.5,"msgs":1}', b'{"type":"ack","seq":1,"msgs":null}', b'{"type":"gap","seq":1}',
    b'{"type":"gap","last_seq":1}', b'{"type":"err","seq":1}', b'{"type":"err","seq":1,"error":"no"}',
    b'{"type":"err","error":{}}', b'{"error":"no"}', b'{"error":[]}', b'{"batch":"u1"}',
    b'{"batch":"u1","stream":"F","seq":-1,"count":1}', b'{"batch":"u1","stream":"F","seq":1,"count":"1"}',
    b'{"batch":1,"stream":"F","seq":1,"count":1}', b'{"batch":"a\x01b","stream":"F","seq":1,"count":1}',
    b'{"last_seq":-1,"ack_msgs":1}', b'{"seq":123456789012345678901234567890,"type":"ack","msgs":1}',
    b'{"type":"ack","seq":1,"msgs":65536}', b'{"type":"ack","seq":1,"msgs":9223372036854775808}',
    b'{"type":"ack","seq":1,"msgs":1.0}', b'{"seq":1,"ack_msgs":65536}',
])  # fmt: skip
def test_malformed_replies_are_response_errors(payload: bytes) -> None:
    with pytest.raises(errors.ResponseError):
        decode(SUBJECT, b"", payload)


@walk("depth", [100, 300, 1000])
@walk("payload, said", [
    (b'{"type":"ack","seq":%b,"msgs":1}', None), (b'{"type":"ack","seq":"x","msgs":1,"more":%b}', None),
    (b'{"error":{"err_code":10208,"description":%b}}', errors.FastPublishUnknownBatchError),
    (b'{"type":"err","seq":1,"error":{"description":%b}}', BatchFlowError),
    (b'{"stream":"F","seq":1,"batch":"u1","count":1,"domain":%b,"val":%b}', BatchAck),
    (b'{"type":%b}', UnrecognisedReply),
])  # fmt: skip
def test_deeply_nested_replies_are_decoded_or_refused(payload: bytes, said: type[object] | None, depth: int) -> None:
    # JSON libraries and Python limit the nesting, each with an error of its own.
    payload = payload.replace(b"%b", b"[" * depth + b"]" * depth)
    if said is None:
        with pytest.raises(errors.ResponseError):
            decode(SUBJECT, b"", payload)
    else:
        assert type(decode(SUBJECT, b"", payload).said) is said


@given(
    st.one_of(st.integers(0, 200), st.integers(10**18 - 2, 10**18 + 2), st.integers(2**64 - 2, 2**64 + 2)),
    st.one_of(st.integers(0, 200), st.integers(9998, 10_001), st.integers(65_534, 65_537)),
    st.sampled_from(["", "0", "-"]),
)
def test_an_ack_is_the_same_with_and_without_blanks(seq: int, flow: int, before: str) -> None:
    def said(text: str) -> Any:
        try:
            return decode(SUBJECT, b"", text.encode()).said
        except errors.ResponseError:
            return None

    compact = f'{{"type":"ack","seq":{before}{seq},"msgs":{before}{flow}}}'
    assert said(compact) == said(compact.replace(",", ", "))


keys = st.sampled_from(
    ["type", "seq", "msgs", "last_seq", "ack_msgs", "error", "batch", "count", "stream", "code", "err_code", "domain"]
)
json = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=6,
)
bodies = st.binary(max_size=30) | st.dictionaries(keys, json | st.sampled_from(["ack", "gap", "err"])).map(orjson.dumps)


@given(
    st.sampled_from([SUBJECT, b"x.y"]) | st.binary(max_size=20),
    st.sampled_from([b"", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\n\r\n"]) | st.binary(max_size=20),
    bodies,
)
def test_anything_at_all_decodes_or_is_a_response_error(subject: bytes, header: bytes, payload: bytes) -> None:
    # It runs inside nats-py's read loop, where any other exception would end the user's connection.
    try:
        decode(subject, header, payload)
    except errors.ResponseError:
        pass
