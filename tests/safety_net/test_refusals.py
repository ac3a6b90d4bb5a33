"""Input that a server would drop, misread or answer by closing the connection is refused before it is sent."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from link import Link

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
ISSUE = "Every wait ends, every report is true: "
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]
Publish = Callable[[JetStreamContext, BatchMessage], Awaitable[Any]]


async def add_atomic(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.AtomicBatch(js, timeout=30) as batch:
        await batch.add_message(message, ack=False)
        await batch.discard()  # reached only if the message was not refused


async def add_fast(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.FastPublisher(js, ack_timeout=1) as publisher:
        await publisher.add_message(message)


async def add_many_fast(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.FastPublisher(js, ack_timeout=1) as publisher:
        await publisher.add_many([message])


PUBLISH = pytest.mark.parametrize("publish", [add_atomic, add_fast, add_many_fast])
LOCAL = (ValueError, nats.errors.Error)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason=ISSUE + "a blank message id is sent, and servers ignore it"
)
@pytest.mark.parametrize("options", [{"msg_id": " "}, {"headers": {"Nats-Msg-Id": " "}}], ids=["msg_id", "header"])
@PUBLISH
async def test_a_blank_message_id_is_refused(
    js: JetStreamContext, make_stream: MakeStream, within: Within, publish: Publish, options: dict[str, Any]
) -> None:
    stream = await make_stream()
    outcome = await within(3, publish(js, BatchMessage(f"{stream}.a", b"1", **options)))
    assert isinstance(outcome, LOCAL)
    assert (await js.stream_info(stream)).state.last_seq == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "headers over 64 KiB are sent")
@PUBLISH
async def test_headers_that_a_server_cannot_store_are_refused(
    nc: Client, js: JetStreamContext, make_stream: MakeStream, within: Within, publish: Publish
) -> None:
    stream = await make_stream()
    await js.account_info()
    sent = nc.stats["out_bytes"]
    message = BatchMessage(f"{stream}.a", b"1", headers={"Large": "x" * (1 << 16)})
    outcome = await within(3, publish(js, message))
    assert isinstance(outcome, LOCAL)
    assert not isinstance(outcome, errors.ServerError)
    assert nc.stats["out_bytes"] - sent < 1 << 16
    assert (await js.stream_info(stream)).state.last_seq == 0


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=ISSUE + "a long subject closes the connection")
@pytest.mark.parametrize("call", ["atomic", "fast", "get_last"])
async def test_a_subject_longer_than_the_control_line_is_refused(
    server: NatsServer, connect: Connect, make_stream: MakeStream, within: Within, call: str
) -> None:
    stream = await make_stream()
    disconnected = asyncio.Event()

    async def lost() -> None:
        disconnected.set()

    nc = await connect(server.url, disconnected_cb=lost)
    js, subject = nc.jetstream(timeout=1), f"{stream}." + "a" * 5000
    if call == "get_last":
        outcome = await within(3, jsx.DirectGet(js, stream).get_last(subject))
    else:
        publish = add_atomic if call == "atomic" else add_fast
        outcome = await within(3, publish(js, BatchMessage(subject, b"1")))
    await asyncio.sleep(0.05)
    assert not disconnected.is_set()
    assert isinstance(outcome, LOCAL)


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_max_payload_of_the_connected_server_applies_after_a_reconnect(
    server: NatsServer, connect: Connect, make_stream: MakeStream, within: Within, kind: str
) -> None:
    stream = await make_stream()
    reconnected = asyncio.Event()

    async def back() -> None:
        reconnected.set()

    async with Link(server.port) as link:
        nc = await connect(link.url, reconnected_cb=back)
        js = nc.jetstream(timeout=30)
        batch = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js, gap=jsx.GapMode.OK)
        await batch.add(f"{stream}.a", b"1")
        link.greeting = lambda line: re.sub(rb'"max_payload":[0-9]+', b'"max_payload":1000', line)
        link.cut()
        async with asyncio.timeout(60):
            await reconnected.wait()
        assert nc.max_payload == 1000
        outcome = await within(20, batch.add(f"{stream}.a", bytes(2000)))
        await batch.discard()
    assert isinstance(outcome, nats.errors.MaxPayloadError)


class TestEnsureStream:
    async def test_the_stream_that_has_the_subjects_is_named(
        self, js: JetStreamContext, make_stream: MakeStream, stream_name: Callable[[], str], within: Within
    ) -> None:
        subject = stream_name()
        holder = await make_stream(subjects=[f"{subject}.>"])
        outcome = await within(3, jsx.ensure_stream(js, name=stream_name(), subjects=[f"{subject}.a"]))
        assert isinstance(outcome, nats.errors.Error)
        assert holder in str(outcome)

    async def test_making_a_source_durable_says_what_to_do(
        self, js: JetStreamContext, make_stream: MakeStream, stream_name: Callable[[], str], within: Within
    ) -> None:
        origin, reading = await make_stream(), stream_name()
        await jsx.ensure_stream(js, name=reading, sources=[StreamSource(name=origin)])
        durable = await jsx.create_source_consumer(js, origin, "copy", deliver_subject=f"copy.{origin}")
        outcome = await within(3, jsx.ensure_stream(js, name=reading, sources=[durable]))
        assert isinstance(outcome, errors.StreamConfigMismatchError)
        assert "durable" in str(outcome)

    async def test_subjects_given_as_a_string_are_refused_with_a_hint(
        self, js: JetStreamContext, stream_name: Callable[[], str], within: Within
    ) -> None:
        name = stream_name()
        outcome = await within(3, jsx.ensure_stream(js, name=name, subjects=f"{name}.>"))
        assert isinstance(outcome, TypeError | ValueError)
        assert "list" in str(outcome)
