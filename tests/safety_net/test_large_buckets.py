"""A bucket of many keys is read completely and in bounded time, whatever else is stored or written."""

import asyncio
from collections.abc import Callable

import nats
from frame_proxy import Frame, FrameProxy
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.testing import NatsServer


async def test_get_many_reads_many_keys_beside_a_message_with_a_wildcard_in_its_subject(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await js.publish(f"$KV.{name}.*", b"anybody can store this")
    keys = [f"k{n}" for n in range(1100)]
    for some in (keys[:550], keys[550:]):
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"$KV.{name}.{key}", b"1") for key in some])
    assert list(await kvx.get_many(kv, keys)) == keys


async def test_snapshot_ends_when_a_writer_is_faster(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, keys, most = stream_name(), 100, 20
    await kvx.enable(await js.create_key_value(bucket=name, storage="memory"))
    rounds = 0

    async def put_all_again() -> None:
        for n in range(1, keys):
            await js._nc.publish(f"$KV.{name}.k{n}", bytes(120_000))
        await js.publish(f"$KV.{name}.k0", bytes(120_000))

    async def write_first(frame: Frame) -> Frame:
        nonlocal rounds
        if ".DIRECT.GET." in frame.subject and rounds < most:
            rounds += 1
            # More than one reply can hold, so that there is always more to read. It takes a tenth of the timeout or more.
            await asyncio.gather(put_all_again(), asyncio.sleep(0.3))
        return frame

    await put_all_again()
    async with FrameProxy(server.port, write_first) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        try:
            await kvx.snapshot(await nc.jetstream().key_value(name), timeout=3)
        except RequestTimeoutError:
            pass  # a timeout is also correct
        finally:
            await nc.close()
    assert rounds < most, "the snapshot ended only because the writer stopped"
