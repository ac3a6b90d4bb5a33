"""The same results on every released line of servers, or an error that names the required server."""

# ruff: noqa: PT012 - the exit of the block raises

import asyncio
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError, KeyConflictError, UnsupportedFeatureError
from jetstream_ext.testing import NatsServer

READING = ["2.11.0", "2.12.0", "2.14.6"]
WRITING = ["2.12.1", "2.14.6"]


@pytest.fixture
async def kv(request: pytest.FixtureRequest) -> AsyncIterator[KeyValue]:
    """A bucket with history 2 on a server of the version that the test is parametrized with."""
    with NatsServer(version=request.param) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            kv = await nc.jetstream(timeout=30).create_key_value(bucket="B", history=2)  # for a busy machine
            yield await kvx.enable(kv, atomic=not request.param.startswith("2.11"))
        finally:
            await nc.close()


@pytest.mark.parametrize("kv", READING, indirect=True)
async def test_reads_work_on_every_release_line(kv: KeyValue) -> None:
    keys = [f"k.{n}" for n in range(1_500)]
    for value in (b"1", b"2"):
        await asyncio.gather(*(kv.put(key, value) for key in keys))
    await kv.delete("k.7")
    now = await kvx.snapshot(kv)
    assert (len(now), now.revision, {entry.value for entry in now.values()}) == (1_499, 3_001, {b"2"})
    assert len(await kvx.snapshot(kv, ["k.1", "k.2", "k.7"])) == 2
    then = await kvx.snapshot(kv, at=1_500, strict=False)
    assert ({entry.value for entry in then.values()}, then.unavailable) == ({b"1"}, ("k.7",))
    assert len(then) == 1_499
    with pytest.raises(HistoryUnavailableError):
        await kvx.get_many(kv, keys, at=1_500)
    last_of_the_first = max(entry.created for entry in then.values())
    by_time = await kvx.snapshot(kv, at=last_of_the_first, strict=False)
    assert (by_time.revision, dict(by_time)) == (1_500, dict(then))
    assert len(await kvx.get_many(kv, keys[8:], at=now.time)) == 1_492
    assert len(await kvx.get_many(kv, keys)) == 1_499
    values = {f"large.{n}": bytes(900_000) for n in range(12)}
    await asyncio.gather(*(kv.put(key, value) for key, value in values.items()))
    assert len(await kvx.get_many(kv, values)) == 12
    assert len(await kvx.snapshot(kv, ["large.*"])) == 12


@pytest.mark.parametrize("kv", WRITING, indirect=True)
async def test_transactions_work_on_every_release_line(kv: KeyValue) -> None:
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1")
        tx.create("b", b"2")
        tx.purge("c")
    assert tx.revisions == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(KeyConflictError) as caught:
        async with kvx.transaction(kv) as tx:
            await tx.get("a")
            await kv.put("a", b"3")
            tx.put("d", b"4")
            tx.create("c", b"5")
    assert caught.value.keys == ("a",)

    async def add(tx: kvx.Transaction) -> None:
        entry = await tx.get("count")
        tx.put("count", b"%d" % (int(entry.value) + 1 if entry else 1))

    await asyncio.gather(*(kvx.retry_transaction(kv, add) for _ in range(10)))
    assert (await kv.get("count")).value == b"10"
    await kvx.touch(kv, "a", ttl=60)
    assert set(await kvx.snapshot(kv)) == {"a", "b", "count"}


@pytest.mark.parametrize("kv", ["2.11.11", "2.12.0"], indirect=True)
async def test_unsafe_server_writes_nothing(kv: KeyValue) -> None:
    await kv.put("a", b"0")
    for call in (kvx.retry_transaction(kv, lambda tx: create(tx)), kvx.transaction(kv).__aenter__()):
        with pytest.raises(UnsupportedFeatureError, match=r"2\.12"):
            tx = await call
            await create(tx)
            await tx.commit()
    assert (await kvx.snapshot(kv)).revision == 1


async def test_ttl_that_the_server_would_ignore_is_refused() -> None:
    with NatsServer(version="2.10.26") as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            kv = await nc.jetstream().create_key_value(bucket="B")
            revision = await kv.put("a", b"1")
            with pytest.raises(UnsupportedFeatureError, match=r"2\.11.*nothing was written"):
                await kvx.touch(kv, "a", 60)
            assert (await kv.get("a")).revision == revision
        finally:
            await nc.close()


async def create(tx: kvx.Transaction) -> None:
    tx.create("a", b"1")
    tx.put("b", b"1")
