"""What a batch refuses at once: a typed error, nothing stored, nothing left open."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import nats.js.errors
import pytest
from client_cells import each
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors

MakeStream = Callable[..., Awaitable[str]]
KINDS = [jsx.AtomicBatch, jsx.FastPublisher]


@each("kind", KINDS)
@each("how", ["add", "add_many", "commit", "block", "publish_atomic"])
@each("missing", ["option", "stream"])
async def test_a_missing_stream_or_option_is_an_error(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any, kind: Any, how: str, missing: str
) -> None:
    atomic = kind is jsx.AtomicBatch
    option = "allow_atomic" if atomic else "allow_batched"
    disabled = errors.AtomicPublishDisabledError if atomic else errors.FastPublishDisabledError
    subject = "no.such.stream" if missing == "stream" else f"{await make_stream(**{option: False})}.a"
    batch = kind(js)

    async def block() -> None:
        async with batch:
            await batch.add(subject, b"x")

    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "add": lambda: batch.add(subject, b"x"),
        "commit": lambda: batch.commit(subject, b"x"),
        "block": block,
    }
    if atomic:
        calls["publish_atomic"] = lambda: jsx.publish_atomic(js, [jsx.BatchMessage(subject)] * 3)
    else:
        calls["add_many"] = lambda: batch.add_many([(subject, b"x")] * 9)
    if how not in calls:
        return
    async with asyncio.timeout(20):  # less than the timeout of a request
        with pytest.raises(errors.NoStreamError if missing == "stream" else disabled) as caught:
            await calls[how]()
    assert isinstance(caught.value, errors.BatchError)
    assert caught.value.outcome == "not_stored"
    if atomic:
        assert batch.state == ("open" if how == "publish_atomic" else "failed")
    else:
        assert (batch.end_reason, batch.batch_seq) == (jsx.EndReason.ERROR, 1)
    if missing == "stream":
        assert isinstance(caught.value, nats.js.errors.NoStreamResponseError)
    else:
        assert option in str(caught.value)
        assert (await js.stream_info(subject.partition(".")[0])).state.messages == 0
    await leak_check.assert_clean()


MESSAGES: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"subject": "a b"}, errors.BadSubjectError),
    ({"subject": "a.*"}, errors.BadSubjectError),
    ({"subject": "a.>"}, errors.BadSubjectError),
    ({"subject": "a\r\nPUB x 0"}, errors.BadSubjectError),
    ({"headers": {"K": "a\r\nb"}}, errors.BadHeaderError),
    ({"headers": {"K\n": "v"}}, errors.BadHeaderError),
    ({"payload": "text"}, TypeError),
    ({"payload": bytes((1 << 20) + 1)}, errors.MaxPayloadError),
    ({"payload": bytes(1 << 20), "headers": {"K": "v"}}, errors.MaxPayloadError),
    ({"msg_ttl": 0}, ValueError),
    ({"msg_ttl": 0.5}, ValueError),
    ({"expected_last_seq": -1}, ValueError),
    ({"expected_last_subject": "a"}, ValueError),
    ({"stream": "A B"}, errors.BadSubjectError),
]
OF_ATOMIC_BATCHES: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"headers": {name: "1"}}, errors.BadHeaderError) for name in ("Nats-Batch-Commit", "Nats-Expected-Last-Msg-Id")
]


@each(
    "kind, message, error",
    [(kind, *row) for kind in KINDS for row in MESSAGES] + [(jsx.AtomicBatch, *row) for row in OF_ATOMIC_BATCHES],
)
async def test_an_invalid_message_is_refused_and_the_batch_stays_usable(
    js: JetStreamContext, stream: str, leak_check: Any, kind: Any, message: dict[str, Any], error: type[Exception]
) -> None:
    message = {"subject": f"{stream}.a", "payload": b"x", **message}
    sent = js._nc.stats["out_msgs"]
    batch = kind(js)
    for call in (batch.add(**message), batch.add_many([jsx.BatchMessage(**message)]), batch.commit(**message)):
        with pytest.raises(error):
            await call
    assert js._nc.stats["out_msgs"] == sent
    await leak_check.assert_clean()
    await batch.add(f"{stream}.a", b"1")
    for call in (batch.add(**message), batch.commit(**message)):
        with pytest.raises(error):
            await call
    assert (await batch.commit_eob()).batch_size == 1
    await leak_check.assert_clean()


OPTIONS: list[tuple[Any, dict[str, Any], type[Exception]]] = [
    *((jsx.AtomicBatch, {"timeout": value}, ValueError) for value in (0, -1, float("nan"))),
    *((jsx.AtomicBatch, {"timeout": value}, TypeError) for value in ("1", True, [1])),
    *((jsx.FastPublisher, {"flow": value}, ValueError) for value in (0, 65536)),
    *((jsx.FastPublisher, {"max_outstanding_acks": value}, ValueError) for value in (0, 4)),
    *((jsx.FastPublisher, {"timeout": value}, ValueError) for value in (0, float("nan"))),
    *((jsx.FastPublisher, {"keepalive": value}, ValueError) for value in (-1, float("nan"))),
    (jsx.FastPublisher, {"gap": "maybe"}, ValueError),
]


@each("kind, options, error", OPTIONS)
def test_an_invalid_option_is_refused(
    js: JetStreamContext, kind: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    (name,) = options
    with pytest.raises(error, match=name.replace("_id", " id")):
        kind(js, **options)


async def test_add_many_sends_what_is_before_an_invalid_message(js: JetStreamContext, stream: str) -> None:
    async with jsx.FastPublisher(js) as publisher:
        with pytest.raises(errors.BadSubjectError):
            await publisher.add_many(
                [(f"{stream}.a", b"1"), (f"{stream}.a", b"2"), ("a b", b""), (f"{stream}.a", b"3")]
            )
        assert publisher.batch_seq == 2
        await publisher.add(f"{stream}.a", b"4")
    stored = await jsx.DirectGet(js, stream).scan().to_list()
    assert [message.data for message in stored] == [b"1", b"2", b"4"]


async def test_add_many_sends_what_is_before_an_error_of_the_source(js: JetStreamContext, stream: str) -> None:
    def source() -> Iterator[Any]:
        for i in range(250):
            yield f"{stream}.a", b"%d" % i
        raise ZeroDivisionError

    publisher = jsx.FastPublisher(js, flow=10)
    with pytest.raises(ZeroDivisionError):
        await publisher.add_many(source())
    assert (publisher.batch_seq, publisher.end_reason) == (250, None)
    assert (await publisher.commit_eob()).batch_size == 250
