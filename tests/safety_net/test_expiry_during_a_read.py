"""A snapshot is one state of the bucket, even if keys expire while it is read."""

import asyncio
from collections.abc import Callable

from clients import connected
from frame_proxy import FrameProxy, before_request
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.testing import NatsServer


async def test_snapshot_never_has_a_key_without_one_that_outlived_it(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await kvx.enable(await js.create_key_value(bucket=name), ttl=True)
    # The keys expire in order, so while one is stored, every later one is, too.
    for begin in (0, 1000, 2000):
        await jsx.publish_atomic(
            js, [jsx.BatchMessage(f"$KV.{name}.k{n}", b"1", msg_ttl=3) for n in range(begin, begin + 1000)]
        )
    await js.publish(f"$KV.{name}.k3000", b"1")

    async def wait_for_expiry() -> None:
        while (await js.stream_info(f"KV_{name}")).state.messages > 1:
            await asyncio.sleep(0.02)

    expire = before_request(2, r"\.DIRECT\.GET\.", wait_for_expiry)
    async with FrameProxy(server.port, expire) as proxy, connected(proxy.url) as nc:
        try:
            snapshot = await kvx.snapshot(await nc.jetstream(timeout=60).key_value(name))
        except JetStreamExtError:
            return  # an error is also correct
    there = [n for n in range(3001) if f"k{n}" in snapshot]
    assert there == list(range(there[0], 3001))
