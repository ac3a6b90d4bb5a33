"""Input that a server would drop, misread or answer by closing the connection is refused before it is sent."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from link import Link
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.testing import NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]
Publish = Callable[[JetStreamContext, BatchMessage], Awaitable[Any]]


async def add_atomic(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.AtomicBatch(js) as batch:
        await batch.add_many([message])


async def add_fast(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many([message])


async def commit_atomic(js: JetStreamContext, message: BatchMessage) -> None:
    await jsx.AtomicBatch(js).commit(**_arguments(message))


async def add_many_atomic(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.AtomicBatch(js) as batch:
        await batch.add_many([message])


async def add_many_fast(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many([message])


async def commit_fast(js: JetStreamContext, message: BatchMessage) -> None:
    await jsx.FastPublisher(js).commit(**_arguments(message))


async def add_many_fast_behind_another(js: JetStreamContext, message: BatchMessage) -> None:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many(
            [(message.subject.partition(".")[0] + ".a", b"0"), (message.subject, b"1", dict(message.headers or {}))]
        )


async def ingest_one(js: JetStreamContext, message: BatchMessage) -> None:
    try:
        await jsx.ingest(js, [message])
    except errors.IngestError as error:
        raise error.__cause__ or error from None


def _arguments(message: BatchMessage) -> dict[str, Any]:
    return {"subject": message.subject, "payload": message.payload, "headers": message.headers}


STORE: dict[str, Publish] = {
    "AtomicBatch.add": add_atomic,
    "AtomicBatch.commit": commit_atomic,
    "AtomicBatch.add_many": add_many_atomic,
    "publish_atomic": lambda js, message: jsx.publish_atomic(js, [message]),
    "publish_atomic_many": lambda js, message: jsx.publish_atomic_many(js, [[message]]).to_list(),
    "FastPublisher.add": add_fast,
    "FastPublisher.commit": commit_fast,
    "FastPublisher.add_many": add_many_fast,
    "FastPublisher.add_many later": add_many_fast_behind_another,
    "ingest": ingest_one,
}


class TestLimits:
    """What the library accepts, a server takes; what it refuses, is refused before anything is sent."""

    @pytest.fixture
    async def lost(self) -> asyncio.Event:
        return asyncio.Event()

    @pytest.fixture
    async def js(self, server: NatsServer, connect: Connect, lost: asyncio.Event) -> JetStreamContext:
        async def disconnected() -> None:
            lost.set()

        nc = await connect(server.url, disconnected_cb=disconnected)
        return nc.jetstream(timeout=30)

    async def longest(self, call: Callable[[int], Awaitable[Any]], start: int, refusal: type[Exception]) -> int:
        """Return the largest size that the library does not refuse, from `start` down."""
        for size in range(start, 0, -1):
            try:
                await call(size)
            except refusal:
                continue
            return size
        raise AssertionError("everything is refused")

    async def test_the_longest_subject_that_is_accepted_can_be_stored(
        self, js: JetStreamContext, make_stream: MakeStream, lost: asyncio.Event
    ) -> None:
        for name, call in STORE.items():
            stream = await make_stream()

            async def store(size: int, call: Publish = call, stream: str = stream) -> None:
                await call(js, BatchMessage(f"{stream}." + "a" * (size - len(stream) - 1), b"1"))

            size = await self.longest(store, 4100, errors.BadSubjectError)
            assert size > 3900, name
            last = await js.get_last_msg(stream, ">")
            assert last.subject is not None
            assert len(last.subject) == size, name
            assert not lost.is_set(), name

    async def test_the_largest_headers_that_are_accepted_can_be_stored(
        self, js: JetStreamContext, make_stream: MakeStream
    ) -> None:
        for name, call in STORE.items():
            stream = await make_stream()
            await js.account_info()
            sent = js._nc.stats["out_bytes"]
            with pytest.raises(errors.BadHeaderError):
                await call(js, BatchMessage(f"{stream}.a", b"1", headers={"Large": "x" * (1 << 16)}))
            assert js._nc.stats["out_bytes"] - sent < 1 << 16, f"{name} has sent what it refuses"

            async def store(size: int, call: Publish = call, stream: str = stream) -> None:
                await call(js, BatchMessage(f"{stream}.a", b"1", headers={"Large": "x" * size}))

            size = await self.longest(store, 65_536, errors.BadHeaderError)
            assert size > 65_000, name
            last = await js.get_last_msg(stream, f"{stream}.a")
            assert last.headers is not None
            assert len(last.headers["Large"]) == size, name

    async def test_no_name_or_subject_of_a_request_closes_the_connection(
        self, js: JetStreamContext, make_stream: MakeStream, lost: asyncio.Event
    ) -> None:
        stream, long = await make_stream(), "a" * 5000

        async def watch() -> None:
            async with jsx.watch_abandoned(js, long):
                pass

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "get_last": lambda: jsx.DirectGet(js, stream).get_last(f"{stream}.{long}"),
            "reset_consumer": lambda: jsx.reset_consumer(js, stream, long),
            "source_health": lambda: jsx.source_health(js, long),
            "watch_abandoned": watch,
            "features": lambda: jsx.features(js._nc.jetstream(prefix=long)),
        }
        for name, call in calls.items():
            with pytest.raises(errors.BadSubjectError):
                await call()
            await js._nc.flush()
            assert not lost.is_set(), name

    async def test_no_call_sends_a_blank_message_id(self, js: JetStreamContext, make_stream: MakeStream) -> None:
        stream = await make_stream()
        for call in STORE.values():
            for blank in (" ", "\t", "\N{NO-BREAK SPACE}"):
                with pytest.raises(errors.BadHeaderError, match="blank"):
                    await call(js, BatchMessage(f"{stream}.a", b"1", headers={"Nats-Msg-Id": blank}))
        for call in (add_atomic, add_fast, add_many_fast):
            with pytest.raises(errors.BadHeaderError, match="blank"):
                await call(js, BatchMessage(f"{stream}.a", b"1", msg_id=" "))
        stored = [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]
        assert set(stored) <= {b"0"}, "only what was before the message that was refused"


class TestMaxPayload:
    """After a reconnect the limit of the new server counts."""

    @pytest.fixture
    async def reconnect(
        self, server: NatsServer, connect: Connect
    ) -> AsyncIterator[tuple[JetStreamContext, Callable[[], Awaitable[None]]]]:
        """A JetStream context, and a function that connects it to a server with a ``max_payload`` of 1000."""
        reconnected = asyncio.Event()

        async def back() -> None:
            reconnected.set()

        async with Link(server.port) as link:
            nc = await connect(link.url, reconnected_cb=back)

            async def reconnect() -> None:
                link.greeting = lambda line: re.sub(rb'"max_payload":[0-9]+', b'"max_payload":1000', line)
                link.cut()
                async with asyncio.timeout(60):
                    await reconnected.wait()
                assert nc.max_payload == 1000

            yield nc.jetstream(timeout=30), reconnect

    async def test_an_open_batch_takes_the_limit_of_a_new_server(
        self, reconnect: Any, make_stream: MakeStream, within: Within
    ) -> None:
        js, lower = reconnect
        stream = await make_stream()
        large = f"{stream}.a", bytes(2000)
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "add": lambda batch: batch.add(*large),
            "add_many": lambda batch: batch.add_many([large]),
            "commit": lambda batch: batch.commit(*large),
        }
        opened = []
        for name, call in calls.items():
            for batch in (jsx.AtomicBatch(js), jsx.FastPublisher(js, gap=jsx.GapMode.OK)):
                await batch.add(f"{stream}.a", b"1")
                opened.append((name, call, batch))
        await lower()
        for name, call, batch in opened:
            outcome = await within(60, call(batch))
            await batch.discard()
            assert isinstance(outcome, nats.errors.MaxPayloadError), f"{type(batch).__name__}.{name}: {outcome!r}"

    async def test_a_new_message_takes_the_limit_of_a_new_server(
        self, reconnect: Any, make_stream: MakeStream, within: Within
    ) -> None:
        js, lower = reconnect
        stream = await make_stream()
        await jsx.publish_atomic(js, [(f"{stream}.a", b"1")])
        await lower()
        for call in ("publish_atomic", "publish_atomic_many", "ingest"):
            outcome = await within(60, STORE[call](js, BatchMessage(f"{stream}.a", bytes(2000))))
            assert isinstance(outcome, nats.errors.MaxPayloadError), call
        assert (await js.stream_info(stream)).state.messages == 1
