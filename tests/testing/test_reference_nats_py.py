"""Common operations of nats-py on the reference server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamConfig
from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError

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


async def test_request_gets_a_reply_or_no_responders(nc: Client) -> None:
    async def answer(message: Any) -> None:
        await message.respond(message.data.upper())

    await nc.subscribe("shout", cb=answer)
    assert (await nc.request("shout", b"hello", timeout=30)).data == b"HELLO"
    with pytest.raises(NoRespondersError):
        await nc.request("nobody", b"", timeout=30)


async def test_drain_delivers_all_messages_first(nc: Client) -> None:
    seen = []

    async def take(message: Any) -> None:
        await asyncio.sleep(0)
        seen.append(message.data)

    await nc.subscribe("work", cb=take)
    for index in range(50):
        await nc.publish("work", str(index).encode())
    await nc.drain()
    assert len(seen) == 50
    assert nc.is_closed


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


async def test_ordered_consumer_gets_messages_in_order(js: Any) -> None:
    await js.add_stream(name="S", subjects=["s"])
    for index in range(200):
        await js.publish("s", str(index).encode())
    sub = await js.subscribe("s", ordered_consumer=True)
    for index in range(200):
        message = await sub.next_msg(timeout=30)
        assert message.data == str(index).encode()
    await js.publish("s", b"late")
    assert (await sub.next_msg(timeout=30)).data == b"late"
    await sub.unsubscribe()


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


async def test_streams_are_managed(js: Any) -> None:
    await js.add_stream(name="S", subjects=["s.>"])
    with pytest.raises(BadRequestError):
        await js.add_stream(name="S", subjects=["other"])
    await js.update_stream(StreamConfig(name="S", subjects=["s.>"], max_msgs=2))
    for _ in range(3):
        await js.publish("s.a", b"x")
    assert (await js.stream_info("S")).state.messages == 2
    assert await js.find_stream_name_by_subject("s.q") == "S"
    assert (await js.get_msg("S", 3)).data == b"x"
    assert await js.delete_msg("S", 3)
    assert await js.purge_stream("S")
    assert [info.config.name for info in await js.streams_info()] == ["S"]
    assert await js.delete_stream("S")
    with pytest.raises(NotFoundError):
        await js.stream_info("S")


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


async def test_last_per_subject_delivers_the_newest_messages(js: Any) -> None:
    await js.add_stream(name="S", subjects=["s.*"])
    for index in range(6):
        await js.publish(f"s.{index % 3}", str(index).encode())
    config = ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT)
    sub = await js.subscribe("s.*", config=config)
    assert [(await sub.next_msg(timeout=30)).data for _ in range(3)] == [b"3", b"4", b"5"]


async def test_consumer_reset_redelivers(js: Any) -> None:
    await js.add_stream(name="S", subjects=["s"])
    for _ in range(3):
        await js.publish("s", b"x")
    pull = await js.pull_subscribe("s", durable="d")
    for message in await pull.fetch(3, timeout=30):
        await message.ack_sync(timeout=30)
    reset = await js.reset_consumer("S", "d", seq=2)
    assert reset.reset_seq == 2
    assert [message.metadata.sequence.stream for message in await pull.fetch(2, timeout=30)] == [2, 3]
