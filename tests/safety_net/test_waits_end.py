"""Every wait ends: within its timeout, and when its connection is closed, drained or lost for good."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
import jetstream_ext.log as log
from jetstream_ext import errors
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from waiting import abandon

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
TIMEOUT = 0.2
SLACK = 9.0  # for a busy machine; less than the ten seconds after which nats-py's own flush times out
HANGS = 1.0  # a call that has not ended by then counts as hanging
DOCUMENTED = (errors.JetStreamExtError, nats.errors.Error)


Connect = Callable[..., Awaitable[Client]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]
MakeStream = Callable[..., Awaitable[str]]
Clog = Callable[[Client, NatsServer], Awaitable[None]]


def large(count: int) -> Iterator[tuple[str, bytes]]:
    return (("s.a", bytes(500_000)) for _ in range(count))


class Calls:
    """Calls of every kind; everything that they need is opened before the connection breaks."""

    def __init__(self, js: JetStreamContext) -> None:
        self.js = js

    async def open(self) -> None:
        js = self.js._nc.jetstream(timeout=30)  # the short timeout is only for the calls under test
        flags = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        await js.add_stream(name="S", subjects=["s.>"], **flags)
        await js.publish("s.a", b"first")
        await js.add_consumer("S", durable_name="c")
        self.kv = await js.create_key_value(bucket="B", direct=True)
        await self.kv.put("a", b"1")
        await js.create_key_value(bucket="offsets")
        self.readers = [log.LogReader(js, "S", patience=TIMEOUT) for _ in range(3)]
        for reader in self.readers:
            await reader.open()
            reader._timeout = reader._direct._timeout = TIMEOUT
        self.publishers = [jsx.FastPublisher(js, flow=10) for _ in range(4)]
        for publisher in self.publishers[:3]:
            await publisher.add("s.a", b"1")
        self.batches = [jsx.AtomicBatch(js) for _ in range(3)]
        for batch in self.batches[:2]:
            await batch.add("s.a", b"1")
        for publisher in self.publishers:
            publisher._batch.ack_timeout = TIMEOUT
        for batch in self.batches:
            batch._session._timeout = TIMEOUT

    async def close(self) -> None:
        for ended in (*self.publishers, *self.batches):
            await ended.discard()

    def of(self, *kinds: str) -> dict[str, asyncio.Future[Any]]:
        """Start the calls of these kinds concurrently."""
        return {
            f"{kind}: {name}": asyncio.ensure_future(call)
            for kind in kinds
            for name, call in getattr(self, kind)().items()
        }

    def fast(self) -> dict[str, Awaitable[Any]]:
        return {
            "add": self.publishers[0].add("s.a", bytes(500_000)),
            "add_many": self.publishers[1].add_many(large(20)),
            "commit": self.publishers[2].commit("s.a", bytes(500_000)),
            "the first add": self.publishers[3].add("s.a", b"1"),
        }

    def ingesting(self) -> dict[str, Awaitable[Any]]:
        return {"ingest": jsx.ingest(self.js, large(20), timeout=TIMEOUT, ack_timeout=TIMEOUT)}

    def atomic(self) -> dict[str, Awaitable[Any]]:
        return {
            "add": self.batches[0].add("s.a", bytes(500_000), ack=False),
            "commit": self.batches[1].commit("s.a", bytes(500_000)),
            "the first add": self.batches[2].add("s.a", b"1"),
            "publish_atomic": jsx.publish_atomic(self.js, large(20), timeout=TIMEOUT),
        }

    def direct(self) -> dict[str, Awaitable[Any]]:
        once = jsx.DirectGet(self.js, "S", timeout=TIMEOUT)
        twice = jsx.DirectGet(self.js, "S", timeout=TIMEOUT / 2)  # a read of many messages may ask twice
        return {
            "get": once.get(1),
            "get_last": once.get_last("s.a"),
            "batch": twice.batch(10).to_list(),
            "multi_last": twice.multi_last(["s.>"]).to_list(),
            "scan": twice.scan().to_list(),
        }

    def managing(self) -> dict[str, Awaitable[Any]]:
        js = self.js
        return {
            "reset_consumer": jsx.reset_consumer(js, "S", "c", timeout=TIMEOUT),
            "ensure_stream": jsx.ensure_stream(js, name="S2", subjects=["s2.>"], timeout=TIMEOUT),
            "source_health": jsx.source_health(js, "S", timeout=TIMEOUT),
            "create_source_consumer": jsx.create_source_consumer(js, "S", "d", deliver_subject="d.d", timeout=TIMEOUT),
            "watch_abandoned": jsx.watch_abandoned(js, "S").__aenter__(),
        }

    def key_value(self) -> dict[str, Awaitable[Any]]:
        return {
            "get_many": kvx.get_many(self.kv, ["a"], timeout=TIMEOUT / 2),
            "snapshot": kvx.snapshot(self.kv, timeout=TIMEOUT / 2),
            "touch": kvx.touch(self.kv, "a", jsx.NEVER, timeout=TIMEOUT / 2),
            "enable": kvx.enable(self.kv, atomic=True, timeout=TIMEOUT / 2),
            "transaction": self.commit(),
            "retry_transaction": kvx.retry_transaction(self.kv, self.count, give_up_after=TIMEOUT, timeout=TIMEOUT),
        }

    async def commit(self) -> None:
        async with kvx.transaction(self.kv, timeout=TIMEOUT) as tx:
            tx.put("a", b"2")

    async def count(self, tx: kvx.Transaction) -> None:
        await tx.get("a")
        tx.put("a", b"2")

    def logs(self) -> dict[str, Awaitable[Any]]:
        return {
            "read": self.readers[0].read(),
            "fetch": self.offsets().fetch("r"),
            "create": self.offsets("new").create(),
            "commit": self.offsets().commit(self.readers[1], name="r"),
            "exactly_once": log.exactly_once(
                self.readers[2], "S", lambda _: None, name="w", prefix="s.at", timeout=TIMEOUT, patience=TIMEOUT
            ),
        }

    def offsets(self, bucket: str = "offsets") -> log.OffsetStore:
        return log.OffsetStore(self.js, bucket, timeout=TIMEOUT, patience=TIMEOUT)


KINDS = ("fast", "ingesting", "atomic", "direct", "managing", "key_value", "logs")


@pytest.fixture
async def open_calls(own_server: NatsServer, connect: Connect) -> AsyncIterator[Callable[..., Awaitable[Calls]]]:
    """Connect to the test's own server, and prepare the calls."""
    made: list[Calls] = []

    async def open_calls(**options: Any) -> Calls:
        nc = await connect(own_server.url, **options)
        made.append(Calls(nc.jetstream(timeout=TIMEOUT)))
        await made[-1].open()
        return made[-1]

    yield open_calls
    for calls in made:
        await calls.close()
    own_server.kill()


async def unended(seconds: float, running: dict[str, asyncio.Future[Any]]) -> dict[str, str]:
    """Return the calls that have not ended within `seconds`, or that ended with an undocumented error."""
    await asyncio.wait(running.values(), timeout=seconds)
    wrong = {name: "still waits" for name, task in running.items() if not task.done()}
    for name, task in running.items():
        await abandon(task)
        if name not in wrong and (task.cancelled() or not isinstance(task.exception(), (*DOCUMENTED, NoneType))):
            wrong[name] = f"ended as {task!r}"
    return wrong


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_behind_pending_bytes_ends_in_time(
    own_server: NatsServer, open_calls: Callable[..., Awaitable[Calls]], clog: Clog, kind: str
) -> None:
    calls = await open_calls()
    await clog(calls.js._nc, own_server)
    running = calls.of(kind)
    assert await unended(TIMEOUT + SLACK, running) == {}


@pytest.mark.parametrize("end", ["close", "kill", "stay away"])
async def test_a_call_behind_pending_bytes_ends_with_its_connection(
    own_server: NatsServer, open_calls: Callable[..., Awaitable[Calls]], clog: Clog, end: str
) -> None:
    calls = await open_calls(allow_reconnect=end != "kill")
    nc = calls.js._nc
    await clog(nc, own_server)
    running = calls.of(*KINDS)
    await asyncio.sleep(TIMEOUT / 4)
    if end == "close":
        closing = asyncio.ensure_future(nc.close())
    else:
        own_server.kill()
    try:
        assert await unended(TIMEOUT + SLACK, running) == {}
    finally:
        if end == "close":
            own_server.resume()
            await abandon(closing)


async def test_a_write_behind_pending_bytes_ends_in_time(
    own_server: NatsServer,
    open_calls: Callable[..., Awaitable[Calls]],
    clog: Clog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = await open_calls()
    read = Bucket.get_at_leader

    async def read_and_clog(bucket: Bucket, **request: object) -> Any:
        found = await read(bucket, **request)
        await clog(calls.js._nc, own_server)
        return found

    monkeypatch.setattr(Bucket, "get_at_leader", read_and_clog)
    touching = asyncio.ensure_future(kvx.touch(calls.kv, "a", jsx.NEVER, timeout=1))
    assert await unended(1 + SLACK, {"touch": touching}) == {}


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_adding_large_messages_ends_when_the_server_stops_reading(
    own_server: NatsServer, connect: Connect, within: Within, kind: str
) -> None:
    js = (await connect(own_server.url)).jetstream(timeout=30)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    options = {"ack": False} if kind == "atomic" else {}
    await batch.add("s.a", b"1")
    if kind == "atomic":
        batch._session._timeout = TIMEOUT
    else:
        batch._batch.ack_timeout = TIMEOUT

    async def add() -> None:
        while True:
            await batch.add("s.a", bytes(1_000_000), **options)

    own_server.pause()
    try:
        assert isinstance(await within(TIMEOUT + SLACK + 0.5, add()), DOCUMENTED)
    finally:
        own_server.kill()
        await batch.discard()


async def test_adding_large_messages_ends_when_the_connection_is_closed(
    own_server: NatsServer, connect: Connect, within: Within
) -> None:
    admin = (await connect(own_server.url)).jetstream()
    await admin.add_stream(name="S", subjects=["s.>"], storage="memory", max_msgs=10, allow_atomic=True)

    async def add(batch: jsx.AtomicBatch) -> None:
        while True:
            await batch.add("s.a", bytes(250_000), ack=False)

    for _ in range(20):  # the result depends on the write that is in progress
        nc = await connect(own_server.url)
        batch = jsx.AtomicBatch(nc.jetstream(timeout=30), ack_every=10_000)
        adding = asyncio.ensure_future(add(batch))
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(nc.close())
        await asyncio.wait([closing], timeout=1)
        await abandon(closing)
        assert isinstance(await within(SLACK, adding), DOCUMENTED)
        await batch.discard()


async def test_watching_for_abandoned_batches_ends_when_the_connection_is_drained(
    server: NatsServer, connect: Connect, make_stream: MakeStream, within: Within
) -> None:
    stream = await make_stream()
    nc = await connect(server.url)
    async with jsx.watch_abandoned(nc.jetstream(), stream) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        await nc.drain()
        assert isinstance(await within(SLACK, waiting), nats.errors.ConnectionClosedError)


async def test_waiting_for_the_end_of_an_unused_publisher_ends_with_the_connection(
    server: NatsServer, connect: Connect, within: Within
) -> None:
    nc = await connect(server.url)
    waiting = asyncio.ensure_future(jsx.FastPublisher(nc.jetstream()).wait_closed())
    await asyncio.sleep(0.01)
    await nc.close()
    await within(HANGS, waiting)


async def test_a_commit_on_a_draining_connection_is_refused_before_it_is_sent(
    server: NatsServer, js: JetStreamContext, connect: Connect, make_stream: MakeStream, within: Within
) -> None:
    stream = await make_stream()
    nc = await connect(server.url)
    batch = jsx.AtomicBatch(nc.jetstream(timeout=30))
    await batch.add(f"{stream}.a", b"1")
    batch._session._timeout = 1.0
    busy, handled = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        busy.set()
        await handled.wait()

    await nc.subscribe(f"slow.{stream}", cb=slow)
    await nc.publish(f"slow.{stream}", b"")
    await busy.wait()
    draining = asyncio.ensure_future(nc.drain())
    await asyncio.sleep(0.05)
    assert nc.is_draining
    try:
        outcome = await within(1 + SLACK, batch.commit_eob())
        stored = (await js.stream_info(stream)).state.messages
    finally:
        handled.set()
        await draining
    assert isinstance(outcome, DOCUMENTED)
    assert (getattr(outcome, "outcome", "not_stored"), stored) == ("not_stored", 0)


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_a_write_that_waits_for_room_ends_with_its_batch(
    own_server: NatsServer, connect: Connect, clog: Clog, within: Within, kind: str
) -> None:
    js = (await connect(own_server.url)).jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    await batch.add("s.a", b"1")
    await clog(js._nc, own_server)

    async def add() -> None:
        while True:  # nats-py may still write some of it
            await batch.add("s.a", bytes(100_000), **({"ack": False} if kind == "atomic" else {}))

    adding = asyncio.ensure_future(add())
    try:
        sent = -1
        while sent < (sent := batch._batch.sent if kind == "fast" else batch.size):
            await asyncio.sleep(0.3)
        assert not adding.done()
        await batch.discard()
        assert isinstance(await within(SLACK, adding), errors.BatchClosedError)
    finally:
        own_server.kill()


@pytest.mark.parametrize("call", ["flush", "wait_closed", "watch_abandoned", "scan"])
@pytest.mark.parametrize("while_it", ["reconnects", "waits for a server that reads nothing"])
async def test_a_close_ends_a_wait(
    own_server: NatsServer, connect: Connect, within: Within, call: str, while_it: str
) -> None:
    nc = await connect(own_server.url, reconnect_time_wait=30)
    js = nc.jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True, allow_direct=True)
    publisher = jsx.FastPublisher(js, gap=jsx.GapMode.OK)
    await publisher.add("s.a", b"1")
    async with jsx.watch_abandoned(js, "S") as watch:
        if while_it == "reconnects":
            own_server.kill()
            while not nc.is_reconnecting:
                await asyncio.sleep(0.01)
        else:
            own_server.pause()
        waits: dict[str, Callable[[], Awaitable[Any]]] = {
            "flush": publisher.flush,
            "wait_closed": publisher.wait_closed,
            "watch_abandoned": lambda: anext(watch),
            "scan": jsx.DirectGet(js, "S").scan().to_list,
        }
        waiting = asyncio.ensure_future(waits[call]())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        closing = asyncio.ensure_future(nc.close())
        try:
            assert isinstance(await within(SLACK, waiting), (*DOCUMENTED, jsx.EndReason))
        finally:
            own_server.kill()
            await abandon(closing)
            await publisher.discard()


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_what_waits_ends_when_a_drain_ends(
    own_server: NatsServer, connect: Connect, within: Within, kind: str
) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True, no_ack=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    adding = asyncio.ensure_future(batch.add("s.a", b"1"))  # never answered
    await asyncio.sleep(0.2)
    assert not adding.done()
    await nc.drain()
    assert isinstance(await within(SLACK, adding), DOCUMENTED)
    await batch.discard()
