"""Calls on a bucket while the server is killed or does not answer."""

from __future__ import annotations

import asyncio

import nats
import nats.errors
import nats.js.errors
import pytest

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import Drop, ReferenceServer

TROUBLE = (
    RequestTimeoutError,
    nats.errors.ConnectionReconnectingError,
    nats.js.errors.ServiceUnavailableError,
)
KEYS = {f"k.{n}": b"%d" % n for n in range(20_000)}


async def quiet(error: Exception) -> None:
    pass


@pytest.mark.parametrize("some", [True, False], ids=["get_many", "snapshot"])
async def test_read_during_a_restart_is_complete_or_an_error(some: bool) -> None:
    with NatsServer() as server:
        nc = await nats.connect(server.url, reconnect_time_wait=0.02, max_reconnect_attempts=-1, error_cb=quiet)
        js = nc.jetstream(timeout=2)
        kv = await kvx.enable(await js.create_key_value(bucket="B"))
        await js.update_stream((await js.stream_info("KV_B")).config.evolve(allow_batched=True))
        async with jsx.FastPublisher(js, flow=500) as publisher:
            await publisher.add_many((f"$KV.B.{key}", value) for key, value in KEYS.items())
        for turns in (0, 10, 60):
            reading = asyncio.ensure_future(kvx.get_many(kv, KEYS) if some else kvx.snapshot(kv))
            for _ in range(turns):
                await asyncio.sleep(0)
            server.kill()
            await asyncio.to_thread(server.restart)
            try:
                found = await reading
            except TROUBLE:
                pass
            else:
                assert {key: entry.value for key, entry in found.items()} == KEYS
            async with asyncio.timeout(30):
                while not nc.is_connected:
                    await asyncio.sleep(0.01)
        found = await (kvx.get_many(kv, KEYS) if some else kvx.snapshot(kv))
        assert len(found) == len(KEYS)
        await nc.close()


async def test_touch_without_an_answer_raises_request_timeout() -> None:
    async with ReferenceServer() as server, await nats.connect(server.url) as nc:
        kv = await kvx.enable(await nc.jetstream().create_key_value(bucket="B"), ttl=True)
        revision = await kv.put("a", b"1")
        server.faults.add(Drop(kind="pub_ack"))
        with pytest.raises(RequestTimeoutError, match="may have been written"):
            await kvx.touch(kv, "a", 60, timeout=1)
        entry = await kv.get("a")
        assert (entry.value, entry.revision) == (b"1", revision + 1)
