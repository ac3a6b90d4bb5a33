"""Logs: replaced messages are not lost, a standby worker waits, and a mirror answers without its origin."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ExternalStream, StreamSource
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import BatchMessage, errors
from jetstream_ext.log import LogReader, Seq, exactly_once
from jetstream_ext.testing import NatsServer, ReferenceServer, Unavailable
from jetstream_ext.testing.process import HeldPort

sys.path.insert(0, str(Path(__file__).parent))

from waiting import abandon

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]
COMPACTED = pytest.mark.parametrize("how", ["max_msgs_per_subject", "rollup"])


@pytest.fixture
async def compacted(js: JetStreamContext, make_stream: MakeStream, how: str) -> Callable[[str, bytes], Awaitable[None]]:
    """Publish into a stream that keeps only the newest message of each subject."""
    config = {"max_msgs_per_subject": 1} if how == "max_msgs_per_subject" else {"allow_rollup_hdrs": True}
    stream = await make_stream(**config)
    headers = None if how == "max_msgs_per_subject" else {"Nats-Rollup": "sub"}

    async def publish(subject: str, data: bytes) -> None:
        await js.publish(f"{stream}.{subject}", data, headers=headers)

    publish.stream = stream
    return publish


@COMPACTED
async def test_messages_replaced_before_they_are_read_are_not_lost(js: JetStreamContext, compacted: Any) -> None:
    for subject in ("a", "b", "a", "c", "a"):
        await compacted(subject, subject.encode())
    read = await LogReader(js, compacted.stream, start=Seq(1)).read()
    assert [message.seq for message in read] == [2, 4, 5]


@COMPACTED
async def test_messages_replaced_while_they_are_read_are_not_lost(js: JetStreamContext, compacted: Any) -> None:
    await compacted("a", b"1")
    reader = LogReader(js, compacted.stream)
    assert [message.seq for message in await reader.read()] == [1]
    for subject in ("b", "b", "b", "a"):
        await compacted(subject, b"2")
    assert [message.seq for message in await reader.read()] == [4, 5]


def numbers(stream: str) -> Callable[[jsx.StoredMsg], BatchMessage]:
    return lambda message: BatchMessage(f"{stream}.out", message.data)


async def replica(js: JetStreamContext, source: str, target: str, **options: Any) -> None:
    """Run a worker that follows its input until an error ends it."""
    reader = LogReader(js, source, tail=True, poll=0.01)
    await exactly_once(reader, target, numbers(target), name="w", prefix=f"{target}.at", **options)


async def test_a_standby_waits_while_another_worker_is_alive(js: JetStreamContext, make_stream: MakeStream) -> None:
    source, target = await make_stream(), await make_stream()
    workers = [asyncio.ensure_future(replica(js, source, target, standby=True)) for _ in range(2)]
    for n in range(5):
        await js.publish(f"{source}.a", b"%d" % n)
        await asyncio.sleep(0.1)
    ended = [worker for worker in workers if worker.done()]
    for worker in workers:
        await abandon(worker)
    for worker in ended:
        worker.result()
    outputs = await LogReader(js, target, subject=f"{target}.out").read()
    assert [message.data for message in outputs] == [b"%d" % n for n in range(5)]


async def test_replicas_that_fence_each_other_back_off(js: JetStreamContext, make_stream: MakeStream) -> None:
    source, target = await make_stream(), await make_stream()
    taken_over = 0

    async def supervise() -> None:
        nonlocal taken_over
        while True:
            try:
                await replica(js, source, target)
            except errors.FencedError:
                taken_over += 1

    tasks = [asyncio.ensure_future(supervise()) for _ in range(2)]
    for n in range(12):
        before = taken_over
        await js.publish(f"{source}.a", b"%d" % n)
        for _ in range(200):
            if taken_over > min(before, 5):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the fenced worker starts again
    for task in tasks:
        await abandon(task)
    assert taken_over <= 5


async def test_an_unconfirmed_reader_asks_no_leader(connect: Connect) -> None:
    async with ReferenceServer() as server:
        js = (await connect(server.url)).jetstream(timeout=30)
        await js.add_stream(name="S", subjects=["s.>"], allow_direct=True)
        for n in range(3):
            await js.publish("s.a", b"%d" % n)
        for request in ("$JS.API.STREAM.INFO.S", "$JS.API.STREAM.MSG.GET.S"):
            server.faults.add(Unavailable(request, times=None))
        reader = LogReader(js, "S", confirm=False, patience=0.5)
        assert [message.data for message in await reader.read()] == [b"0", b"1", b"2"]


@pytest.fixture
async def mirror(connect: Connect) -> AsyncIterator[tuple[NatsServer, KeyValue]]:
    """A bucket on a hub, and its mirror on a leaf node."""
    with ExitStack() as stack:
        held = stack.enter_context(closing(HeldPort()))
        hub_config = f"jetstream {{ domain: hub }}\nleafnodes {{ host: 127.0.0.1, port: {held.port} }}"
        remote = f"{{ url: 'nats://127.0.0.1:{held.port}' }}"
        leaf_config = f"jetstream {{ domain: leaf }}\nleafnodes {{ reconnect: 1, remotes: [ {remote} ] }}"
        held.make_way()
        hub = stack.enter_context(NatsServer(name="hub", config=hub_config))
        leaf = stack.enter_context(NatsServer(name="leaf", config=leaf_config))
        origin = await (await connect(hub.url)).jetstream().create_key_value(bucket="B", direct=True)
        await origin.put("a", b"1")
        js = (await connect(leaf.url)).jetstream(timeout=30)
        source = StreamSource(name="KV_B", external=ExternalStream(api="$JS.hub.API"))
        await js.add_stream(
            name="KV_B", mirror=source, max_msgs_per_subject=1, allow_direct=True, mirror_direct=True, deny_delete=True
        )
        async with asyncio.timeout(60):
            while (await js.stream_info("KV_B")).state.messages < 1:
                await asyncio.sleep(0.02)
        yield hub, await js.key_value("B")


@pytest.mark.parametrize("call", ["get_many", "snapshot"])
async def test_a_mirror_is_read_while_its_origin_is_away(mirror: tuple[NatsServer, KeyValue], call: str) -> None:
    hub, kv = mirror
    hub.kill()
    found = await (kvx.get_many(kv, ["a"], timeout=10) if call == "get_many" else kvx.snapshot(kv, timeout=10))
    assert found["a"].value == b"1"


async def test_an_unconfirmed_reader_reads_a_mirror_while_its_origin_is_away(
    mirror: tuple[NatsServer, KeyValue],
) -> None:
    hub, kv = mirror
    reader = LogReader(kv._js, kv._stream, confirm=False, timeout=10)
    hub.kill()
    assert [message.data for message in await reader.read()] == [b"1"]
    assert await reader.read(timeout=0.1) == []
