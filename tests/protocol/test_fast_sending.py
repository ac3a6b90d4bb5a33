"""The commands of a fast batch, and the messages that it refuses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cells import walk
from fast_batches import ack, batch, commands, message, opened
from hypothesis import given
from hypothesis import strategies as st

from jetstream_ext import errors
from jetstream_ext.protocol.fast import FastBatch
from jetstream_ext.protocol.headers import EncodedHeaders, encode
from jetstream_ext.protocol.options import as_message
from jetstream_ext.types import NEVER, BatchMessage, GapMode


def test_the_commands_on_the_wire() -> None:
    machine = batch(gap=GapMode.OK)
    data = machine.add(message(payload=b"one"), 0.0)
    assert data == b"PUB f.1 _INBOX.x.b1.10.ok.1.0.$FI 3\r\none\r\n"
    machine.receive([ack(0, 500, op=0)], 0.0)
    # The reply subject keeps the flow that was asked for, whatever the server sets.
    assert machine.add_plain("f.2", b"two", 0.0) == b"PUB f.2 _INBOX.x.b1.10.ok.2.1.$FI 3\r\ntwo\r\n"
    (third,) = commands(machine.add(message(payload=b"", headers={"K": "v"}, msg_id="m", msg_ttl=NEVER), 0.0))
    assert third.reply == "_INBOX.x.b1.10.ok.3.1.$FI"
    assert third.header == b"NATS/1.0\r\nK: v\r\nNats-Msg-Id: m\r\nNats-TTL: never\r\n\r\n"
    # Pings and the end go to a subject of the stream, and take no sequence of a message.
    assert machine.ping(0.0) == b"PUB f.1 _INBOX.x.b1.10.ok.3.4.$FI 0\r\n\r\n"
    assert machine.commit(0.0) == b"PUB f.1 _INBOX.x.b1.10.ok.4.3.$FI 0\r\n\r\n"
    assert machine.sent == 3


@walk("made", [batch, opened])
def test_encoded_headers_are_the_same_bytes(made: Callable[..., FastBatch]) -> None:
    one, other = made(max_payload=100), made(max_payload=100)
    headers = {"K": "v", "Nats-Msg-Id": "1"}
    encoded = EncodedHeaders(encode(headers.items()))
    for payload in (b"abc", b"", bytes(100)):
        found = [
            each.add_many(iter([("f.1", payload, given)]), 1.0) for each, given in ((one, encoded), (other, headers))
        ]
        assert found[0][:3] == found[1][:3]
        assert str(found[0][3]) == str(found[1][3])


def test_the_headers_of_a_block_count_as_well() -> None:
    machine = opened(max_payload=1 << 20)
    headers = {"K": "x" * 60_000}
    for large in (("f.1", b"", headers), message(headers=headers)):
        machine.receive([ack(machine.sent, 500)], 1.0)
        data, count, _, stopped = machine.add_many(iter([large] * 30), 1.0)
        assert (count, stopped) == (18, None)
        assert len(data) < 1_200_000


REFUSED: list[tuple[Any, type[Exception]]] = [
    (message(subject="a b"), errors.BadSubjectError),
    (message(subject="a.*"), errors.BadSubjectError),
    (message(subject=""), errors.BadSubjectError),
    (message(payload="text"), TypeError),  # type: ignore[arg-type]
    (message(payload=bytes(2000)), errors.MaxPayloadError),
    (message(headers={"K": "x" * 990}), errors.MaxPayloadError),
    (message(headers={"K": "a\r\nb"}), errors.BadHeaderError),
    (message(headers={"K": 1}), TypeError),
    (message(msg_ttl=0.5), ValueError),
    (message(headers={"Nats-Msg-Id": "1"}, msg_id="2"), errors.BadHeaderError),
    (message(expected_last_seq=-1), ValueError),
]


@walk("bad, error", REFUSED)
@walk("made", [batch, opened])
def test_a_refused_message_changes_nothing(
    made: Callable[..., FastBatch], bad: BatchMessage, error: type[Exception]
) -> None:
    machine, other = made(max_payload=1000), made(max_payload=1000)
    with pytest.raises(error):
        machine.add(bad, 5.0)
    assert (machine.sent, machine.state, machine.room, machine.next_timer()) == (
        other.sent, other.state, other.room, other.next_timer(),
    )  # fmt: skip
    assert machine.add(message(), 6.0) == other.add(message(), 6.0)


@walk("option", [{"flow": 0}, {"flow": 65536}, {"flow": True}, {"flow": 1.5}, {"flow": "1"}])
def test_flow_is_checked(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="flow"):
        FastBatch(batch_id="b", **option)


@walk("value", [0, 4, True, 1.0, -1])
def test_outstanding_acks_are_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="max_outstanding_acks"):
        batch(max_outstanding_acks=value)


class TestAddMany:
    def test_a_block_is_not_larger_than_what_the_server_acknowledges_at_once(self) -> None:
        machine = opened(max_outstanding_acks=2)
        machine.receive([ack(5, 3)], 0.0)
        entries = iter([("f.1", b"x")] * 10)
        assert [machine.add_many(entries, 0.0)[1] for _ in range(3)] == [3, 3, 0]
        assert len(list(entries)) == 4

    def test_a_closed_batch_takes_nothing_from_the_source(self) -> None:
        machine, entries = opened(), iter([("f.1", b"x")])
        machine.discard()
        with pytest.raises(errors.BatchClosedError):
            machine.add_many(entries, 0.0)
        assert next(entries)


class _Text(str):
    __slots__ = ()


_NAMES = st.sampled_from(["f.1", "f.1", "f.2", _Text("f.3"), "a b", "a.*", "", "s\ud800", None, [], 5, b"f.1"])
_VALUES = st.sampled_from(
    ["v", "v", "other", "", " padded ", "\ttab\t", "ä→ß", "a\u2028b", _Text("own"), "a\nb", "\ud800", None, 1, [], b"v"]
) | st.text(max_size=4)  # fmt: skip
_HEADERS = st.dictionaries(
    st.sampled_from(["K", "K", "L", "Nats-Msg-Id", "k y", "", _Text("T")]), _VALUES, max_size=3
) | st.sampled_from([{1: "v"}, {"K": "x" * 300}, {"K": "x" * 66_000}, None, [("K", "v")]])
_PAYLOADS = st.binary(max_size=4) | st.sampled_from(
    [b"x" * 300, b"x" * 301, bytearray(b"own"), memoryview(b"view"), "text", None, 3]
)
_ENTRIES = (
    st.tuples(_NAMES, _PAYLOADS)
    | st.tuples(_NAMES, _PAYLOADS, _HEADERS)
    | st.builds(BatchMessage, st.just("f.1"), st.binary(max_size=3), st.none() | st.just({"K": "v"}))
    | st.sampled_from([(), ("f.1",), ("f.1", b"x", {}, 4), None, 7, ["f.1", b"x"]])
)


class _Source:
    """An iterator that counts what is taken from it, and raises an error at its end."""

    def __init__(self, entries: list[Any], error: BaseException) -> None:
        self._entries, self._error = entries, error
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.taken == len(self._entries):
            raise self._error
        self.taken += 1
        return self._entries[self.taken - 1]


@given(
    st.lists(_ENTRIES, max_size=12),
    st.sampled_from([StopIteration(), ValueError("source"), KeyboardInterrupt()]),
    st.integers(1, 10),
    st.sampled_from([1, 98, 997]),
)
def test_a_bulk_is_the_same_as_its_messages_one_by_one(
    entries: list[Any], error: BaseException, flow: int, sent: int
) -> None:
    one, other = opened(sent, max_payload=300), opened(sent, max_payload=300)
    for machine in (one, other):
        machine.receive([ack(sent, flow)], 0.0)
    source, expected = _Source(entries, error), _Source(entries, error)
    data, count, size, stopped = b"", 0, 0, None
    while stopped is None and one.room > 0:
        block, messages, payload_bytes, stopped = one.add_many(source, 1.0)
        data, count, size = data + block, count + messages, size + payload_bytes

    singles, sizes, refusal = [], 0, None
    while other.room > 0:
        try:
            entry = as_message(next(expected))
            singles.append(other.add(entry, 1.0))
            sizes += len(entry.payload)
        except BaseException as failure:
            refusal = failure
            break
    assert (data, count, size, source.taken) == (b"".join(singles), len(singles), sizes, expected.taken)
    assert (type(stopped), str(stopped)) == (type(refusal), str(refusal))
    assert (one.sent, one.room, one.next_timer()) == (other.sent, other.room, other.next_timer())
