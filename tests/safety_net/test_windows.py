"""The windows of writers are never exceeded, and a slow link is shared."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from link import Link
from nats.aio.client import DEFAULT_PENDING_SIZE, Client
from nats.js import JetStreamContext
from waiting import abandon

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]


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
        adding = asyncio.gather(*(batch.add("s.a", payload) for _ in range(200)))
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


async def test_a_scan_over_a_slow_link_leaves_room_for_other_calls(own_server: NatsServer, connect: Connect) -> None:
    admin = (await connect(own_server.url)).jetstream()
    await admin.add_stream(name="S", subjects=["s.>"], storage="memory", allow_direct=True)
    for _ in range(40):
        await admin.publish("s.a", bytes(500_000))
    async with Link(own_server.port, rate=3_000_000) as link:
        js = (await connect(link.url)).jetstream(timeout=30)
        scanning = asyncio.ensure_future(jsx.DirectGet(js, "S").scan().to_list())
        async with asyncio.timeout(60):
            while js._nc.stats["in_bytes"] < 1_000_000:  # from now on, replies for many seconds are in transit
                await asyncio.sleep(0.01)
        for _ in range(2):
            before = js._nc.stats["in_bytes"]
            await js.account_info()
            assert js._nc.stats["in_bytes"] - before < 5_000_000, "the answer waits for replies of many seconds"
        await abandon(scanning)
