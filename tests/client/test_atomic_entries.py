"""The messages of an atomic batch as tuples and `BatchMessage`, from every kind of iterable."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from client_cells import each
from nats.js import JetStreamContext

import jetstream_ext as jsx

KINDS = ["list", "iterator", "asynchronous"]


def entries(stream: str, count: int) -> list[Any]:
    """Messages of every form: slices of it have each form first, in the middle and last."""
    made: list[Any] = []
    for i in range(count):
        subject, payload = f"{stream}.{i}", b"%d" % i
        made.append(
            (
                (subject, payload),
                (subject, payload, {"K": str(i)}),
                jsx.BatchMessage(subject, payload, headers={"K": str(i)}),
                jsx.BatchMessage(subject, payload),
                (subject, bytearray(payload)),
            )[i % 5]
        )
    return made


def own(message: jsx.StoredMsg) -> dict[str, str]:
    return {name: value for name, value in message.headers.items() if not name.startswith("Nats-Batch-")}


def given(messages: list[Any], kind: str) -> Any:
    async def asynchronous() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return {"list": messages, "iterator": iter(messages), "asynchronous": asynchronous()}[kind]


@each("kind", KINDS)
@each("first", range(5))
async def test_every_form_of_message_is_stored(js: JetStreamContext, make_stream: Any, kind: str, first: int) -> None:
    stream = await make_stream()
    ack = await jsx.publish_atomic(js, given(entries(stream, 12)[first:], kind))
    assert ack.batch_size == 12 - first
    stored = await jsx.DirectGet(js, stream).scan().to_list()
    assert [(m.subject, m.data, own(m)) for m in stored] == [
        (f"{stream}.{i}", b"%d" % i, {"K": str(i)} if i % 5 in (1, 2) else {}) for i in range(first, 12)
    ]


async def test_add_many_and_publish_atomic_many_take_every_form(js: JetStreamContext, make_stream: Any) -> None:
    stream = await make_stream()
    async with jsx.AtomicBatch(js) as batch:
        await batch.add_many(entries(stream, 5))
        assert batch.size == 5
    acks = await jsx.publish_atomic_many(js, [entries(stream, 3), entries(stream, 1)])
    assert [ack.batch_size for ack in acks] == [3, 1]


@each("kind", KINDS)
@each("place", [0, 1, 2])
@each(
    "bad, error, text",
    [
        (("only.a.subject",), TypeError, "a tuple of 1"),
        (("a", b"", None, None), TypeError, "a tuple of 4"),
        (["a", b""], TypeError, "not list"),
        (None, TypeError, "not NoneType"),
        (("a b", b""), ValueError, "subject"),
        (("a", "text"), TypeError, "str"),
        (("a", b"", {"K": "1\r\nL: 2"}), ValueError, "line break"),
        (("a", b"", {"Nats-Batch-Id": "x"}), ValueError, "is set by the batch itself"),
        (("a", bytes(2 << 20)), Exception, "more than the server's max_payload"),
    ],
)
async def test_any_other_entry_is_refused_and_stores_nothing(
    js: JetStreamContext, make_stream: Any, kind: str, place: int, bad: Any, error: type[Exception], text: str
) -> None:
    stream = await make_stream()
    if isinstance(bad, tuple) and bad[0] == "a":
        bad = (f"{stream}.a", *bad[1:])

    def messages() -> Iterator[Any]:
        good = [(f"{stream}.1", b"")] * 2
        yield from good[:place]
        yield bad
        yield from good[place:]

    with pytest.raises(error, match=text):
        await jsx.publish_atomic(js, given(list(messages()), kind))
    assert (await js.stream_info(stream)).state.messages == 0
