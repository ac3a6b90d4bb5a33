"""The window is never exceeded, a lost ack is recovered, and a slow link is shared."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from link import Link
from nats.aio.client import DEFAULT_PENDING_SIZE, Client
from nats.js import JetStreamContext
from waiting import abandon

import jetstream_ext as jsx
from jetstream_ext import errors, log
from jetstream_ext import kv as kvx
from jetstream_ext.protocol.reads import Link as Carried
from jetstream_ext.testing import NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]


async def test_concurrent_adds_stay_within_the_window(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    in_flight = 0
    async with jsx.FastPublisher(js, flow=5, max_outstanding_acks=2) as publisher:
        await publisher.add(f"{stream}.a", b"first")
        adding = asyncio.gather(*(publisher.add(f"{stream}.a", b"%d" % n) for n in range(500)))
        while not adding.done():
            in_flight = max(in_flight, publisher.batch_seq - publisher.ack_seq)
            await asyncio.sleep(0)
        await adding
    assert in_flight <= 10


async def test_concurrent_adds_to_a_batch_wait_for_room(own_server: NatsServer, connect: Connect) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True)
    payload = bytes(100_000)
    async with jsx.AtomicBatch(js) as batch:
        await batch.add("s.a", b"first")
        own_server.pause()
        adding = asyncio.gather(*(batch.add("s.a", payload, ack=False) for _ in range(200)))
        sent = -1
        while sent < (sent := batch.size):  # the system takes some megabytes
            await asyncio.sleep(0.3)
        assert sent < 200
        assert nc._pending_data_size <= nc._max_pending_size + 2 * len(payload)
        own_server.resume()
        await adding
    assert batch.ack.batch_size == 201


@pytest.mark.parametrize("gap", list(jsx.GapMode))
async def test_concurrent_adds_stay_within_the_write_buffer(
    js: JetStreamContext, make_stream: MakeStream, gap: jsx.GapMode
) -> None:
    stream, payload, peak = await make_stream(), bytes(200_000), 0
    async with jsx.FastPublisher(js, flow=500, max_outstanding_acks=3, gap=gap) as publisher:
        await publisher.add(f"{stream}.a", b"first")
        adding = asyncio.gather(*(publisher.add(f"{stream}.a", payload) for _ in range(100)))
        while not adding.done():
            peak = max(peak, js._nc.pending_data_size)
            await asyncio.sleep(0)
        acks = await adding
    assert [ack.batch_seq for ack in acks] == list(range(2, 102)), "in the order of the calls"
    assert peak < DEFAULT_PENDING_SIZE + 2 * len(payload)


@pytest.mark.internals("the fallback waits for nats-py's subscribe, so that its error says so")
async def test_a_first_message_behind_a_full_buffer_is_not_sent(own_server: NatsServer, connect: Connect) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=4)
    await nc.jetstream(timeout=30).add_stream(name="S", subjects=["s.>"], allow_batched=True)
    publisher = jsx.FastPublisher(js)
    own_server.pause()
    try:
        while nc.pending_data_size <= DEFAULT_PENDING_SIZE:  # full behind what the sockets take
            nc._pending.append(command := b"PUB x 1000000\r\n%b\r\n" % bytes(1_000_000))
            nc._pending_data_size += len(command)
            await nc._flush_pending()
            await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(errors.RequestTimeoutError, match="room in the write buffer"):
                await publisher.add("s.a", bytes(900_000))
        assert (publisher.batch_seq, publisher.end_reason) == (0, None)
    finally:
        own_server.resume()
    await publisher.discard()


async def test_a_scan_over_a_slow_link_leaves_room_for_other_calls(own_server: NatsServer, connect: Connect) -> None:
    admin = (await connect(own_server.url)).jetstream()
    await admin.add_stream(name="S", subjects=["s.>"], storage="memory", allow_direct=True)
    for _ in range(40):
        await admin.publish("s.a", bytes(500_000))
    async with Link(own_server.port, rate=3_000_000) as link:
        js = (await connect(link.url)).jetstream(timeout=10)
        scanning = asyncio.ensure_future(jsx.DirectGet(js, "S").scan().to_list())
        async with asyncio.timeout(60):
            while js._nc.stats["in_bytes"] < 1_000_000:  # from now on, replies for many seconds are in transit
                await asyncio.sleep(0.01)
        unanswered = 0
        other = js._nc.jetstream(timeout=1)
        for _ in range(2):
            try:
                await other.account_info()
            except nats.errors.TimeoutError:
                unanswered += 1
        await abandon(scanning)
        assert unanswered == 0


async def test_every_read_asks_for_no_more_than_the_link_carries(
    own_server: NatsServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = await connect(own_server.url)
    bucket = await admin.jetstream().create_key_value(bucket="B", history=2, storage="memory", direct=True)
    values = {f"k{n}": bytes([n]) * 20_000 for n in range(100)}
    for key, value in values.items():
        await bucket.put(key, value)
    monkeypatch.setattr(Carried, "adapt", lambda *_, **__: None)
    asked: list[dict[str, Any]] = []

    async def note(request: Any) -> None:
        asked.append(json.loads(request.data))

    await admin.subscribe("$JS.API.DIRECT.GET.KV_B", cb=note)
    await admin.flush()
    js = (await connect(own_server.url)).jetstream(timeout=30)
    kv = await js.key_value("B")

    async def contents(read: Awaitable[Any]) -> dict[str, bytes]:
        return {key: entry.value for key, entry in (await read).items()}

    async def read_log() -> dict[str, bytes]:
        reader = log.LogReader(js, "KV_B", confirm=False)
        return {message.subject.rpartition(".")[2]: message.data async for message in reader}

    reads: dict[str, tuple[int, Callable[[], Awaitable[dict[str, bytes]]]]] = {
        "get_many": (3, lambda: contents(kvx.get_many(kv, values))),
        "snapshot": (1, lambda: contents(kvx.snapshot(kv))),
        "unconfirmed reader": (1, read_log),
        "get_many of the past": (3, lambda: contents(kvx.get_many(kv, values, at=100))),
    }
    room = Carried().room(1)
    for name, (in_flight, read) in reads.items():
        if name == "get_many of the past":
            await bucket.put("k0", b"new")
        asked.clear()
        assert await read() == values, name
        await admin.flush()
        assert len(asked) >= 2_000_000 // room, name
        for body in asked:
            # A single key is asked for with one message beside it; a scan knows how many messages it asks for.
            if len(body.get("multi_last", range(3))) > 2:
                most = room / 0.75 if "batch" in body and name == "snapshot" else room / in_flight
                assert body["max_bytes"] <= most, f"{name}: {body}"
