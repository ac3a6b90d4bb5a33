"""Buckets of another domain, over a leaf node: every write goes to the bucket that the context names."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable

import pytest
from clients import connected, emptied
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import kv as kvx
from jetstream_ext import log
from jetstream_ext.errors import BadSubjectError
from jetstream_ext.testing import NatsServer


async def one_key(js: JetStreamContext) -> None:
    kv = await js.key_value("B")
    async with kvx.transaction(kv) as tx:
        tx.put("one", b"1")
    async with kvx.transaction(kv) as tx:
        tx.update("one", b"2", last=tx_revision(await kvx.get_many(kv, ["one"])))
    async with kvx.transaction(kv) as tx:
        tx.delete("one")
    async with kvx.transaction(kv) as tx:
        tx.create("one", b"3")
    async with kvx.transaction(kv) as tx:
        tx.purge("one")


def tx_revision(found: dict[str, kvx.KeyValueEntry]) -> int:
    [entry] = found.values()
    return entry.revision


async def several_keys(js: JetStreamContext) -> None:
    kv = await js.key_value("B")

    async def change(tx: kvx.Transaction) -> None:
        found = await tx.get_many(["a", "b", "c"])
        tx.put("a", b"%d" % len(found))
        tx.delete("d")

    for _ in range(2):
        await kvx.retry_transaction(kv, change)
    assert (await kvx.snapshot(kv))["a"].value == b"1"


async def events(js: JetStreamContext) -> None:
    """More than a stream of the leaf, which takes the events as well, has places for batches without a commit."""
    kv, before = await js.key_value("B"), await events_of(js)
    for number in range(60):
        async with kvx.transaction(kv) as tx:
            await tx.get_many(["a", "b", "c"])
            tx.publish("orders.made", b"%d" % number)
            tx.put("e", b"%d" % number)
        assert tx.revisions == {"e": tx_revision(await kvx.get_many(kv, ["e"]))}
    assert await events_of(js) == before + 60
    tx = kvx.transaction(kv)
    tx.publish("orders.made")
    with pytest.raises(BadSubjectError, match="has to write a key"):
        await tx.commit()


async def events_of(js: JetStreamContext) -> int:
    return len([each async for each in jsx.DirectGet(js, "KV_B").scan(subject="orders.>")])


async def touch(js: JetStreamContext) -> None:
    kv = await js.key_value("B")
    async with kvx.transaction(kv) as tx:
        tx.put("touched", b"1")
    revision = await kvx.touch(kv, "touched", 60)
    assert (await kvx.get_many(kv, ["touched"]))["touched"].revision == revision


async def batches(js: JetStreamContext) -> None:
    await jsx.publish_atomic(js, [("$KV.B.x", b"1"), ("$KV.B.y", b"2")])
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many(("$KV.B.z", b"%d" % n) for n in range(5))
    assert len(await kvx.get_many(await js.key_value("B"), ["x", "y", "z"])) == 3


async def offsets(js: JetStreamContext) -> None:
    reader = log.LogReader(js, "S", start=log.Seq(1), patience=10)
    store = await log.OffsetStore(js, "P", patience=10).create()
    name = uuid.uuid4().hex
    await store.commit(reader, name=name)
    assert await store.fetch(name) is not None


async def group(js: JetStreamContext) -> None:
    async with log.Group(js, "S", uuid.uuid4().hex, partitions=1, bucket="P", patience=10).join() as member:
        assert (await anext(member)).seq == 1
        await member.commit()


async def standby(js: JetStreamContext) -> None:
    reader = log.LogReader(js, "S", offsets=await log.OffsetStore(js, "P", patience=10).create(), patience=10)
    done = await log.exactly_once(
        reader, "T", lambda message: jsx.BatchMessage("t.out", message.data), name="w", prefix="t.at", standby=True
    )
    assert done.inputs in (0, 1)  # each of the contexts goes on behind the other


WRITES: list[Callable[[JetStreamContext], Awaitable[None]]] = [
    one_key,
    several_keys,
    events,
    touch,
    batches,
    offsets,
    group,
    standby,
]


async def counts(js: JetStreamContext) -> dict[str, int]:
    return {str(info.config.name): info.state.last_seq for info in await js.streams_info()}


@pytest.mark.parametrize("twin", [False, True], ids=["alone", "beside a bucket of that name"])
async def test_every_write_goes_to_the_bucket_of_the_domain(leaf: NatsServer, twin: bool) -> None:
    async with connected(leaf.url) as nc:
        hub, near = await emptied(nc, "hub"), await emptied(nc, "leaf")
        for js in (hub, near) if twin else (hub,):
            await kvx.ensure_bucket(js, "B", events=["orders.>"])
            await kvx.ensure_bucket(js, "P")
            await jsx.ensure_stream(js, name="KV_B", allow_batched=True)
        if not twin:
            await jsx.ensure_stream(near, name="ORDERS", subjects=["orders.>"])
        await jsx.ensure_stream(hub, name="S", subjects=["s.>"], allow_direct=True)
        await jsx.ensure_stream(hub, name="T", subjects=["t.>"], allow_direct=True, allow_atomic=True)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(Exception):
                    await hub.publish("s.a", b"1", timeout=1)
                    break
        before = await counts(near)
        for context in (hub, nc.jetstream(prefix="$JS.hub.API", timeout=10)):
            for write in WRITES:
                await write(context)
        assert await counts(near) == before
        assert (await counts(hub))["KV_B"] > 20
