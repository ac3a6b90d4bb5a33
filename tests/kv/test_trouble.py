"""Calls on a bucket while the server is killed or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from clients import quiet
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.errors import BatchOutcomeUnknownError, RequestTimeoutError
from jetstream_ext.testing import NatsServer
from jetstream_ext.testing.reference import Drop, ReferenceServer

Read = Callable[[KeyValue], Awaitable[Mapping[str, Any]]]

TROUBLE = (
    RequestTimeoutError,
    nats.errors.ConnectionReconnectingError,
    nats.js.errors.ServiceUnavailableError,
)
KEYS = {f"k.{n}": b"%d" % n for n in range(10_000)}
READS: list[Read] = [kvx.snapshot, lambda kv: kvx.get_many(kv, KEYS)]


async def test_read_during_a_restart_is_complete_or_an_error() -> None:
    options = {"reconnect_time_wait": 0.02, "max_reconnect_attempts": -1, "error_cb": quiet, "connect_timeout": 10}
    with NatsServer() as server:
        async with await nats.connect(server.url, **options) as nc:
            js = nc.jetstream(timeout=30)
            kv = await kvx.enable(await js.create_key_value(bucket="B"))
            await js.update_stream((await js.stream_info("KV_B")).config.evolve(allow_batched=True))
            async with jsx.FastPublisher(js, flow=500) as publisher:
                await publisher.add_many((f"$KV.B.{key}", value) for key, value in KEYS.items())
            impatient = await nc.jetstream(timeout=2).key_value("B")
            for read in READS:
                for turns in (0, 10, 60):
                    reading = asyncio.ensure_future(read(impatient))
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
                assert len(await read(kv)) == len(KEYS)


async def test_touch_without_an_answer_raises_request_timeout() -> None:
    async with ReferenceServer() as server, await nats.connect(server.url, connect_timeout=10) as nc:
        kv = await kvx.enable(await nc.jetstream().create_key_value(bucket="B"), ttl=True)
        revision = await kv.put("a", b"1")
        server.faults.add(Drop(kind="pub_ack"))
        with pytest.raises(RequestTimeoutError, match="may have been written"):
            await kvx.touch(kv, "a", 60, timeout=3)
        entry = await kv.get("a")
        assert (entry.value, entry.revision) == (b"1", revision + 1)


async def delete(js: JetStreamContext) -> None:
    await js.delete_key_value("B")


async def close(js: JetStreamContext) -> None:
    await js._nc.close()


async def test_lost_commit_stays_unknown_whatever_fails_next() -> None:
    async def fn(tx: kvx.Transaction) -> None:
        tx.put("a", b"1")

    async def lose_commit(end: Callable[[JetStreamContext], Awaitable[None]], cause: str) -> None:
        async with ReferenceServer() as server, await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream()
            kv = await kvx.enable(await js.create_key_value(bucket="B"))
            server.faults.add(Drop(kind="pub_ack"))
            running = asyncio.ensure_future(kvx.retry_transaction(kv, fn, timeout=2))
            async with asyncio.timeout(30):
                while not (await js.stream_info("KV_B")).state.messages:
                    await asyncio.sleep(0.01)
            await end(js)
            with pytest.raises(BatchOutcomeUnknownError) as caught:
                await running
            assert caught.value.outcome == "unknown"
            assert cause in repr(caught.value.__cause__)

    await asyncio.gather(
        lose_commit(delete, "the stream was deleted"),
        lose_commit(close, "ConnectionClosedError"),
    )


async def test_a_read_waits_while_no_replica_answers(
    nc: Client, stream_name: Callable[[], str], make_bucket: Callable[..., Awaitable[KeyValue]]
) -> None:
    kv = await make_bucket()
    await kv.put("a", b"1")

    async def read_without_replicas(call: Read) -> None:
        prefix = stream_name()

        async def relay(msg: Msg) -> None:
            await nc.publish(f"$JS.API{msg.subject.removeprefix(prefix)}", msg.data, reply=msg.reply)

        await nc.subscribe(f"{prefix}.STREAM.>", cb=relay)
        with pytest.raises(RequestTimeoutError, match="no replica answers"):
            await call(open_bucket(nc.jetstream(prefix=prefix, timeout=4), kv._name))
        reading = asyncio.ensure_future(call(open_bucket(nc.jetstream(prefix=prefix, timeout=20), kv._name)))
        await asyncio.sleep(0.1)
        await nc.subscribe(f"{prefix}.DIRECT.>", cb=relay)
        assert {key: entry.value for key, entry in (await reading).items()} == {"a": b"1"}

    await asyncio.gather(
        read_without_replicas(kvx.snapshot), read_without_replicas(lambda kv: kvx.get_many(kv, ["a", "b"]))
    )
