"""The values: frozen, slotted, hashable where their fields are, picklable; a stored message decodes lazily."""

import copy
import dataclasses
import pickle
from collections import UserDict
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import jetstream_ext as jsx
from jetstream_ext import types
from jetstream_ext.errors import ResponseError, ServerError
from jetstream_ext.protocol.direct import ReplyDecoder
from jetstream_ext.protocol.options import message_headers

VALUES: list[Any] = [
    jsx.BatchMessage("a.b", b"x", msg_ttl=jsx.NEVER, msg_id="m", stream="S", expected_last_seq=0),
    jsx.BatchMessage("a.b", b"x", msg_ttl=timedelta(seconds=3), expected_last_subject_seq=4, expected_last_subject="a"),
    jsx.BatchAck("S", 3, "b1", 2, "hub", "17"),
    jsx.FastPubAck(4, 2),
    jsx.BatchFlowAck(4, 2),
    jsx.BatchFlowGap(4, 6),
]


def stored(headers: bytes = b"", time: bytes = b"2026-11-20T21:23:31.295694403Z", data: bytes = b"payload") -> Any:
    """A message as bulk reads create it."""
    decoder = ReplyDecoder("S")
    block = (
        b"NATS/1.0\r\n"
        + headers
        + (
            b"Nats-Stream: S\r\nNats-Subject: a.b\r\nNats-Sequence: 5\r\nNats-Time-Stamp: " + time + b"\r\n"
            b"Nats-Num-Pending: 8\r\nNats-Last-Sequence: 0\r\n\r\n"
        )
    )
    (message,) = decoder.feed([(b"_INBOX.x", block + data, len(block))]).messages()
    return message


def test_a_value_is_frozen_and_has_slots_only() -> None:
    for value in VALUES:
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
        assert not hasattr(value, "__dict__"), value
        with pytest.raises((AttributeError, TypeError)):
            value.other = 1


def test_equal_values_have_equal_hashes() -> None:
    for value in VALUES:
        again = dataclasses.replace(value)
        assert again is not value
        assert (again == value, hash(again)) == (True, hash(value))
        first = dataclasses.fields(value)[0].name
        assert dataclasses.replace(value, **{first: "another"}) != value


def test_a_value_survives_pickling() -> None:
    for value in [*VALUES, stored(b"K: v\r\n")]:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(value, protocol)) == value, (value, protocol)
        assert copy.deepcopy(value) == value


def test_a_flow_error_is_frozen_hashable_and_picklable() -> None:
    value = jsx.BatchFlowError(3, ServerError("no", code=400, err_code=10071))
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.seq = 4  # type: ignore[misc]
    assert len({value, jsx.BatchFlowError(3, value.error)}) == 1
    again = pickle.loads(pickle.dumps(value))
    assert (again.seq, again.error.err_code, str(again.error)) == (3, 10071, str(value.error))


def test_never_is_a_singleton() -> None:
    assert pickle.loads(pickle.dumps(jsx.NEVER)) is jsx.NEVER
    assert copy.deepcopy(jsx.NEVER) is jsx.NEVER
    assert repr(jsx.NEVER) == "NEVER"


def test_a_gap_has_its_last_lost_sequence() -> None:
    for first, seq, last in (
        (3, 5, 4),
        (4, 5, 4),
        (3, 2, 3),
    ):  # the last: a sequence that went back, as 2.15.1 reports it
        assert jsx.BatchFlowGap(first, seq).last_lost == last


def test_the_enums_are_their_wire_text() -> None:
    assert [str(mode) for mode in jsx.GapMode] == ["ok", "fail"]
    assert f"{jsx.GapMode.OK}" == "ok"
    assert {reason.name for reason in jsx.EndReason} == {
        "COMMITTED", "GAP", "ERROR", "TIMEOUT", "DISCARDED", "DISCONNECTED",
    }  # fmt: skip
    assert jsx.GapMode("fail") is jsx.GapMode.FAIL


class Repeated(dict[str, str]):
    def items(self) -> Any:
        return [("A", "1"), ("A", "2")]


def test_a_batch_message_keeps_every_value_of_a_header() -> None:
    message = jsx.BatchMessage("a", b"", Repeated(A="2"))
    for each in (message, copy.deepcopy(message), pickle.loads(pickle.dumps(message)), dataclasses.replace(message)):
        assert message_headers(each) == [("A", "1"), ("A", "2")]


def test_a_batch_message_copies_its_headers_and_its_payload() -> None:
    for kind, view in ((dict, bytearray), (UserDict, memoryview)):
        headers, buffer = kind({"A": "1"}), bytearray(b"1")
        message = jsx.BatchMessage("a", view(buffer), headers)  # type: ignore[arg-type]
        headers["A"] = "2"
        buffer[:] = b"2"
        assert message == jsx.BatchMessage("a", b"1", {"A": "1"})
        assert type(message.payload) is bytes


def test_a_batch_message_takes_what_add_takes() -> None:
    options = set(types.PublishOptions.__annotations__)
    fields = {field.name for field in dataclasses.fields(jsx.BatchMessage)}
    assert fields == options | {"subject", "payload"}
    assert jsx.BatchMessage("a").payload == b""


class TestStoredMsg:
    def test_has_the_fields_of_the_reply(self) -> None:
        message = stored(b"X-U: v5\r\nY: z\r\n")
        assert (message.stream, message.subject, message.seq, message.data) == ("S", "a.b", 5, b"payload")
        assert message.headers == {"X-U": "v5", "Y": "z"}
        assert (message.num_pending, message.last_seq) == (8, 0)
        assert (type(message.num_pending), type(message.last_seq)) == (int, int)

    def test_time_has_nanoseconds(self) -> None:
        whole = int(datetime(2026, 11, 20, 21, 23, 31, tzinfo=UTC).timestamp())
        for text, ns in (
            (b"", 0),
            (b".2", 200_000_000),
            (b".29569", 295_690_000),
            (b".000000001", 1),
            (b".999999999", 999_999_999),
        ):
            message = stored(time=b"2026-11-20T21:23:31" + text + b"Z")
            assert message.time_ns == whole * 1_000_000_000 + ns, text
            assert message.time == datetime(2026, 11, 20, 21, 23, 31, ns // 1000, tzinfo=UTC)
            assert message.time.utcoffset() == timedelta(0)

    def test_time_covers_the_range_of_datetime(self) -> None:
        for year in (1, 1901, 1970, 2262, 9999):
            message = stored(time=b"%04d-01-01T00:00:00.000001Z" % year)
            assert message.time == datetime(year, 1, 1, 0, 0, 0, 1, tzinfo=UTC)

    def test_time_is_exact_to_the_nanosecond_where_a_float_is_not(self) -> None:
        message = jsx.StoredMsg(stream="S", subject="a", seq=1, time_ns=1_795_209_811_295_694_403)
        assert message.time_ns % 1000 == 403
        assert message.time.microsecond == 295_694

    def test_decodes_on_access(self) -> None:
        message = stored(b"K\xff: v\xff\r\n", time=b"not a time")
        assert message.data == b"payload"  # a bulk read that wants payloads only never sees the bad time
        assert message.headers == {"K\ufffd": "v\ufffd"}
        with pytest.raises(ResponseError, match="not RFC 3339"):
            _ = message.time_ns
        with pytest.raises(ResponseError):
            _ = message.time

    def test_time_is_always_utc(self) -> None:
        for time in (b"2026-11-20T21:23:31", b"2026-11-20T21:23:31+01:00", b"2026-11-20T21:23:31\xff"):
            for attribute in ("time", "time_ns"):
                with pytest.raises(ResponseError, match="not RFC 3339"):
                    getattr(stored(time=time), attribute)

    def test_cannot_be_changed(self) -> None:
        for message in (
            stored(b"K: v\r\n"),
            jsx.StoredMsg(stream="S", subject="a", seq=1, headers={"K": "v"}),
        ):
            for name in ("stream", "subject", "seq", "data", "headers", "time", "time_ns", "num_pending", "last_seq"):
                with pytest.raises(AttributeError):
                    setattr(message, name, None)
            with pytest.raises(AttributeError):
                message.other = 1
            assert not hasattr(message, "__dict__")
            message.headers["K"] = "changed"
            assert message.headers == {"K": "v"}

    def test_copies_its_headers(self) -> None:
        given = {"K": "v"}
        message = jsx.StoredMsg(stream="S", subject="a", seq=1, headers=given)
        given["K"] = "changed"
        assert message.headers == {"K": "v"}

    def test_lazy_and_plain_are_equal_and_hash_alike(self) -> None:
        lazy = stored(b"K: v\r\n")
        plain = jsx.StoredMsg(
            stream="S", subject="a.b", seq=5, data=b"payload", headers={"K": "v"}, time_ns=lazy.time_ns,
            num_pending=8, last_seq=0,
        )  # fmt: skip
        assert lazy == plain
        assert hash(lazy) == hash(plain)
        assert len({lazy, plain}) == 1
        assert repr(lazy) == repr(plain)

    def test_differs_when_anything_differs(self) -> None:
        fields: dict[str, Any] = {
            "stream": "S", "subject": "a.b", "seq": 5, "data": b"x", "headers": {"K": "v"}, "time_ns": 0,
            "num_pending": 8, "last_seq": 0,
        }  # fmt: skip
        other: dict[str, Any] = {
            "stream": "T", "subject": "a.c", "seq": 6, "data": b"", "headers": {"K": "w"}, "time_ns": 1,
            "num_pending": None, "last_seq": 1,
        }  # fmt: skip
        for name in fields:
            assert jsx.StoredMsg(**fields) != jsx.StoredMsg(**{**fields, name: other[name]}), name
        assert jsx.StoredMsg(**fields) != "something else"

    def test_is_final(self) -> None:
        assert getattr(jsx.StoredMsg, "__final__", False)

    def test_repr_shows_everything(self) -> None:
        assert repr(stored(b"K: v\r\n")) == (
            "StoredMsg(stream='S', subject='a.b', seq=5, data=b'payload', headers={'K': 'v'}, "
            f"time_ns={stored().time_ns}, num_pending=8, last_seq=0)"
        )


def test_an_aware_time_in_another_zone_is_the_same_instant() -> None:
    zone = timezone(timedelta(hours=-5))
    assert stored().time.astimezone(zone) == stored().time
