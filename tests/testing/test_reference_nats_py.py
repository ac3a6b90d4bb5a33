"""Common operations of nats-py on the reference server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import ConsumerConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from jetstream_ext.testing import ReferenceServer, VirtualClock
from jetstream_ext.testing.reference import Drop, Faults


@pytest.fixture
async def nc() -> AsyncIterator[Client]:
    async with ReferenceServer() as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        yield nc
        await nc.close()


@pytest.fixture
def js(nc: Client) -> Any:
    return nc.jetstream(timeout=30)


async def test_published_messages_can_be_fetched(js: Any) -> None:
    await js.add_stream(name="ORDERS", subjects=["orders.>"])
    for index in range(10):
        assert (await js.publish(f"orders.{index}", b"x")).seq == index + 1
    pull = await js.pull_subscribe("orders.>", durable="worker")
    messages = await pull.fetch(10, timeout=30)
    assert [message.metadata.sequence.stream for message in messages] == list(range(1, 11))
    for message in messages:
        await message.ack_sync(timeout=30)
    info = await pull.consumer_info()
    assert (info.num_pending, info.num_ack_pending, info.ack_floor.stream_seq) == (0, 0, 10)
    with pytest.raises(NatsTimeoutError):
        await pull.fetch(1, timeout=0.1)


async def test_unacknowledged_messages_are_redelivered() -> None:
    clock = VirtualClock()
    async with ReferenceServer(clock=clock) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["s"])
        await js.publish("s", b"x")
        pull = await js.pull_subscribe("s", durable="d", config=ConsumerConfig(ack_wait=20))
        (message,) = await pull.fetch(1, timeout=30)
        await message.nak()
        (message,) = await pull.fetch(1, timeout=30)
        assert message.metadata.num_delivered == 2
        clock.advance(20)
        (message,) = await pull.fetch(1, timeout=30)
        assert message.metadata.num_delivered == 3
        await message.term()
        await nc.flush()
        clock.advance(20)
        with pytest.raises(NatsTimeoutError):
            await pull.fetch(1, timeout=0.4)
        await nc.close()


async def test_push_and_queue_subscriptions_get_each_message(js: Any) -> None:
    await js.add_stream(name="S", subjects=["s.>"])
    sub = await js.subscribe("s.*", durable="push")
    for index in range(5):
        await js.publish("s.a", str(index).encode())
    for index in range(5):
        message = await sub.next_msg(timeout=30)
        assert message.data == str(index).encode()
        await message.ack()
    members = [await js.subscribe("s.*", queue="q") for _ in range(2)]
    for _ in range(10):
        await js.publish("s.b", b"x")
    async with asyncio.timeout(60):
        while sum(member.pending_msgs for member in members) < 15:
            await asyncio.sleep(0.001)
    await js.account_info()  # the answer follows every surplus delivery
    assert sum(member.pending_msgs for member in members) == 15


async def test_ordered_consumer_recovers_missed_messages() -> None:
    """nats-py creates another consumer, and that one delivers the missed messages."""
    faults = Faults(Drop("_INBOX.>", when=lambda reply: reply.shown == "s", nth=20, times=3))
    async with ReferenceServer(faults=faults) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["s"])
        for index in range(60):
            await js.publish("s", str(index).encode())
        sub = await js.subscribe("s", ordered_consumer=True, idle_heartbeat=0.5)
        found = [(await sub.next_msg(timeout=30)).data for _ in range(60)]
        assert found == [str(index).encode() for index in range(60)]
        assert faults.seen[id(faults.rules[0])] >= 60 + 38, "nothing was missed"
        await nc.close()


async def test_key_value_bucket_works(js: Any, found: Any) -> None:
    kv = await js.create_key_value(bucket="B", history=5)
    watcher = await kv.watchall()
    assert await watcher.updates(timeout=30) is None
    first = await kv.put("a", b"1")
    assert (await watcher.updates(timeout=30)).value == b"1"
    assert await kv.update("a", b"2", last=first) == first + 1
    with pytest.raises(KeyWrongLastSequenceError):
        await kv.update("a", b"3", last=first)
    with pytest.raises(KeyWrongLastSequenceError):
        await kv.create("a", b"x")
    await kv.create("b", b"x")
    assert (await kv.get("a")).value == b"2"
    assert sorted(await found(kv.keys)) == ["a", "b"]
    assert [entry.value for entry in await found(kv.history, "a")] == [b"1", b"2"]
    await kv.delete("a")
    with pytest.raises(KeyNotFoundError):
        await kv.get("a")
    await kv.purge("b")
    assert (await kv.status()).values == 4
    await watcher.stop()
    await js.delete_key_value("B")


async def test_object_store_works(js: Any) -> None:
    store = await js.create_object_store("O")
    data = bytes(range(256)) * 2048
    info = await store.put("file", data)
    assert info.size == len(data)
    assert (await store.get("file")).data == data
    await store.put("file", b"short")
    assert (await store.get("file")).data == b"short"
    assert [entry.name for entry in await store.list()] == ["file"]
    await store.delete("file")
    assert await js.delete_object_store("O")
