"""What needs no leader is read without one: by an unconfirmed reader, and from a mirror whose origin is away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, closing

import pytest
from nats.aio.client import Client
from nats.js.api import ExternalStream, StreamSource
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.log import LogReader
from jetstream_ext.testing import NatsServer, ReferenceServer, Unavailable
from jetstream_ext.testing.process import HeldPort

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Client]]
MakeStream = Callable[..., Awaitable[str]]


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


async def test_a_mirror_is_read_while_its_origin_is_away(mirror: tuple[NatsServer, KeyValue]) -> None:
    hub, kv = mirror
    reader = LogReader(kv._js, kv._stream, confirm=False, timeout=10)
    hub.kill()
    assert (await kvx.get_many(kv, ["a"], timeout=10))["a"].value == b"1"
    assert (await kvx.snapshot(kv, timeout=10))["a"].value == b"1"
    assert [message.data for message in await reader.read()] == [b"1"]
    assert await reader.read(timeout=0.1) == []
