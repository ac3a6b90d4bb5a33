"""The log on a cluster: lagging replicas, partial mirrors, and leaders that die."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from clients import connected
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import Group, LogReader, OffsetStore, Stored, exactly_once
from jetstream_ext.testing import NatsCluster, NatsServer

Make = Callable[..., Awaitable[str]]


@pytest.fixture
def js(cluster_nc: Client) -> JetStreamContext:
    return cluster_nc.jetstream(timeout=5)


async def until_answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call until the cluster has recovered from the test's faults and answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except (
                nats.js.errors.ServiceUnavailableError,
                nats.errors.TimeoutError,
                nats.errors.NoRespondersError,
                nats.errors.ConnectionReconnectingError,
                nats.errors.StaleConnectionError,
                errors.NoStreamError,
                errors.BatchAbandonedError,
                errors.BatchOutcomeUnknownError,
            ):
                await asyncio.sleep(0.2)


async def fill(js: JetStreamContext, name: str, first: int, last: int) -> None:
    """Store numbers exactly once, even if the leader changes."""
    messages = [BatchMessage(f"{name}.{n % 3}", b"%d" % n) for n in range(first, last + 1)]
    messages[0] = dataclasses.replace(messages[0], expected_last_seq=first - 1)
    with contextlib.suppress(errors.WrongLastSequenceError):  # stored by an earlier call whose answer was lost
        await until_answered(lambda: jsx.publish_atomic(js, messages))


async def leader_of(cluster: NatsCluster, js: JetStreamContext, name: str) -> NatsServer:
    async with asyncio.timeout(60):
        while True:
            info = await until_answered(lambda: js.stream_info(name))
            for server in cluster.servers:
                if server.name == info.cluster.leader:
                    return server
            await asyncio.sleep(0.1)


async def wait_for_new_leader(cluster: NatsCluster, victim: NatsServer, name: str) -> None:
    """Wait until the other servers report another leader of a stream."""
    async with connected([server.url for server in cluster.servers if server is not victim]) as nc:
        async with asyncio.timeout(60):
            while (await until_answered(lambda: nc.jetstream().stream_info(name))).cluster.leader in (
                None,
                "",
                victim.name,
            ):
                await asyncio.sleep(0.1)


async def restart(cluster: NatsCluster, server: NatsServer) -> None:
    await asyncio.to_thread(server.restart)
    await asyncio.to_thread(cluster.wait_ready)


async def test_a_reader_returns_every_acknowledged_message(js: JetStreamContext, make_replicated: Make) -> None:
    """A replica may lag behind the acknowledgement; the reader must not end before it."""
    name = await make_replicated()
    reader = LogReader(js, name)
    for n in range(1, 61):
        await js.publish(f"{name}.{n % 3}", b"%d" % n)
        assert [int(msg.data) for msg in await reader.read()] == [n]


async def test_a_partial_mirror_does_not_hide_messages(js: JetStreamContext, make_replicated: Make) -> None:
    """The mirror answers for the stream, and holds one of its three subjects."""
    name = await make_replicated(num_replicas=1)
    await fill(js, name, 1, 300)
    mirror = await make_replicated(
        num_replicas=1,
        mirror=StreamSource(name=name, filter_subject=f"{name}.1"),
        mirror_direct=True,
    )
    async with asyncio.timeout(60):
        while (await js.stream_info(mirror)).state.messages < 100:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(60):  # the server chooses at random who answers
        while len(await jsx.DirectGet(js, name).scan(seq=270).to_list()) == 31:
            pass  # not only the mirror's part
    for turn in range(10):
        end = 300 + 20 * turn
        assert [msg.seq async for msg in LogReader(js, name)] == list(range(1, end + 1))
        of_two = LogReader(js, name, subject=f"{name}.2")
        assert [msg.seq async for msg in of_two] == list(range(2, end + 1, 3))
        assert of_two.position == end + 1
        await fill(js, name, end + 1, end + 20)


async def test_a_tailing_reader_continues_at_the_next_leader(
    cluster: NatsCluster, js: JetStreamContext, make_replicated: Make
) -> None:
    name, seen = await make_replicated(), list[int]()
    await fill(js, name, 1, 500)

    async def follow() -> None:
        async for msg in LogReader(js, name, tail=True, patience=90):
            seen.append(int(msg.data))
            if len(seen) == 1500:
                return

    task = asyncio.create_task(follow())
    try:
        for begin in (501, 1001):
            victim = await leader_of(cluster, js, name)
            await asyncio.to_thread(victim.kill)
            try:
                await fill(js, name, begin, begin + 499)
            finally:
                await restart(cluster, victim)
        await asyncio.wait_for(task, 90)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert seen == list(range(1, 1501))


async def test_commits_continue_at_the_next_leader(
    cluster: NatsCluster, js: JetStreamContext, make_replicated: Make, stream_name: Callable[[], str]
) -> None:
    name = await make_replicated()
    await fill(js, name, 1, 200)
    store = OffsetStore(js, stream_name(), patience=90)
    await until_answered(lambda: store.create(replicas=3))
    reader = LogReader(js, name, start=Stored("r"), offsets=store, patience=90)
    seen = []
    async with store.committing(reader, every=10) as messages:
        async for msg in messages:
            seen.append(msg.seq)
            if msg.seq == 95:
                victim = await leader_of(cluster, js, f"KV_{store.bucket}")
                await asyncio.to_thread(victim.kill)
    await restart(cluster, victim)
    assert seen == list(range(1, 201))
    found = await store.fetch("r")
    assert found is not None
    assert found.seq == 201


@pytest.mark.parametrize("which", ["output", "input"])
async def test_a_worker_stores_each_output_once_when_leaders_die(
    cluster: NatsCluster, js: JetStreamContext, make_replicated: Make, which: str
) -> None:
    """Leaders die between commits. Every second one is paused instead, so that two servers believe that they lead."""
    source, target = await make_replicated(), await make_replicated()
    await fill(js, source, 1, 900)
    rng = random.Random(which)
    at = set(rng.sample(range(50, 850), 2))
    broken_leaders: list[Awaitable[None]] = []

    async def handler(msg: StoredMsg) -> list[BatchMessage]:
        if msg.seq in at:
            at.discard(msg.seq)
            victim = await leader_of(cluster, js, target if which == "output" else source)
            broken_leaders.append(asyncio.create_task(break_leader(victim, freeze=len(broken_leaders) % 2 == 1)))
        return [BatchMessage(f"{target}.out", msg.data)] * (msg.seq % 3)

    async def break_leader(victim: NatsServer, *, freeze: bool) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))
        if freeze:
            victim.pause()
            await wait_for_new_leader(cluster, victim, target if which == "output" else source)
            victim.resume()  # it still believes that it leads
        else:
            await asyncio.to_thread(victim.kill)
            await restart(cluster, victim)

    done = await exactly_once(
        LogReader(js, source, patience=90),
        target,
        handler,
        name="w",
        prefix=f"{target}.at",
        max_messages=5,
        patience=90,
    )
    await asyncio.gather(*broken_leaders)
    await asyncio.to_thread(cluster.wait_ready)
    assert (done.inputs, done.position, len(broken_leaders)) == (900, 901, 2)
    out = LogReader(js, target, subject=f"{target}.out", patience=90)
    assert [int(msg.data) async for msg in out] == [n for n in range(1, 901) for _ in range(n % 3)]


async def test_a_bucket_of_positions_has_as_many_replicas_as_the_stream_that_is_read(
    cluster_nc: Client, make_replicated: Callable[..., Awaitable[str]], stream_name: Callable[[], str]
) -> None:
    js = cluster_nc.jetstream(timeout=30)
    name = await make_replicated()

    async def replicas(store: OffsetStore) -> int | None:
        return (await js.stream_info(f"KV_{store.bucket}")).config.num_replicas

    alone, mine, fewer = (OffsetStore(js, stream_name()) for _ in range(3))
    assert await replicas(await alone.create()) == 1
    assert await replicas(await alone.create(name)) == 1, "a bucket that exists is left as it is"
    assert await replicas(await mine.create(name)) == 3
    assert await replicas(await fewer.create(name, replicas=2)) == 2
    with pytest.raises(nats.js.errors.NotFoundError, match="'NOT_THERE' does not exist"):
        await OffsetStore(js, stream_name()).create("NOT_THERE")


@pytest.mark.parametrize("kind", ["standby", "group"])
async def test_buckets_of_keys_that_show_who_is_alive_have_as_many_replicas_as_the_stream(
    cluster_nc: Client, make_replicated: Callable[..., Awaitable[str]], stream_name: Callable[[], str], kind: str
) -> None:
    js = cluster_nc.jetstream(timeout=30)
    name, bucket = await make_replicated(allow_atomic=True), stream_name()
    if kind == "standby":
        reader = LogReader(js, name, subject=f"{name}.in", offsets=OffsetStore(js, bucket))
        await exactly_once(reader, name, lambda _: None, name="w", prefix=f"{name}.at", standby=True)
    else:
        async with Group(js, name, "g", partitions=1, bucket=bucket).join():
            pass
    assert (await js.stream_info(f"KV_{bucket}")).config.num_replicas == 3
