"""The log on a cluster: replicas and mirrors that lag or lack a part, leaders that die."""

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
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext as jsx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import LogReader, OffsetStore, Stored, exactly_once
from jetstream_ext.testing import NatsCluster, NatsServer

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., Awaitable[str]]


@pytest.fixture
def js(cluster_nc: Client) -> JetStreamContext:
    return cluster_nc.jetstream(timeout=5)


@pytest.fixture
def make(make_replicated: Make) -> Make:
    return make_replicated


async def settled(call: Callable[[], Awaitable[Any]]) -> Any:
    """Call until the cluster, still recovering from what a test did to it, answers."""
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
    """Store numbers, once, whatever happens to the leader meanwhile."""
    messages = [BatchMessage(f"{name}.{n % 3}", b"%d" % n) for n in range(first, last + 1)]
    messages[0] = dataclasses.replace(messages[0], expected_last_seq=first - 1)
    with contextlib.suppress(errors.WrongLastSequenceError):  # stored, and the answer was lost
        await settled(lambda: jsx.publish_atomic(js, messages))


async def leader_of(cluster: NatsCluster, js: JetStreamContext, name: str) -> NatsServer:
    async with asyncio.timeout(60):
        while True:
            info = await settled(lambda: js.stream_info(name))
            for server in cluster.servers:
                if server.name == info.cluster.leader:
                    return server
            await asyncio.sleep(0.1)


async def replaced(cluster: NatsCluster, victim: NatsServer, name: str) -> None:
    """Wait until the others have another leader for a stream, as they say themselves."""
    nc = await nats.connect([server.url for server in cluster.servers if server is not victim], error_cb=quiet)
    try:
        async with asyncio.timeout(60):
            while (await settled(lambda: nc.jetstream().stream_info(name))).cluster.leader in (None, "", victim.name):
                await asyncio.sleep(0.1)
    finally:
        await nc.close()


async def quiet(error: Exception) -> None:
    pass


async def back(cluster: NatsCluster, server: NatsServer) -> None:
    await asyncio.to_thread(server.restart)
    await asyncio.to_thread(cluster.wait_ready)


async def test_what_was_just_stored_is_read(js: JetStreamContext, make: Make) -> None:
    """Replicas lag behind the acknowledgement now and then; a reader never ends before what was acknowledged."""
    name = await make()
    reader = LogReader(js, name)
    for n in range(1, 61):
        await js.publish(f"{name}.{n % 3}", b"%d" % n)
        assert [int(msg.data) for msg in await reader.read()] == [n]


async def test_a_mirror_that_lags_and_lacks(js: JetStreamContext, make: Make) -> None:
    """It answers for the stream, and has one subject of three."""
    name = await make(num_replicas=1)
    await fill(js, name, 1, 300)
    mirror = await make(
        num_replicas=1,
        mirror=StreamSource(name=name, filter_subject=f"{name}.1"),
        mirror_direct=True,
    )
    async with asyncio.timeout(30):
        while (await js.stream_info(mirror)).state.messages < 100:
            await asyncio.sleep(0.02)
    short = 0
    for turn in range(10):
        end = 300 + 20 * turn
        short += len(await jsx.DirectGet(js, name).scan(seq=end - 30).to_list()) < 31
        assert [msg.seq async for msg in LogReader(js, name)] == list(range(1, end + 1))
        of_two = LogReader(js, name, subject=f"{name}.2")
        assert [msg.seq async for msg in of_two] == list(range(2, end + 1, 3))
        assert of_two.position == end + 1
        await fill(js, name, end + 1, end + 20)
    assert short, "without proof the mirror's part passes for the whole"


async def test_a_leader_that_dies_under_a_reader(cluster: NatsCluster, js: JetStreamContext, make: Make) -> None:
    """At the tail, which goes on where the next leader does."""
    name = await make()
    await fill(js, name, 1, 500)
    reader = LogReader(js, name, tail=True, patience=90)
    seen: list[int] = []
    all_of_them = asyncio.Event()

    async def follow() -> None:
        async for msg in reader:
            seen.append(int(msg.data))
            if len(seen) == 1500:
                all_of_them.set()

    task = asyncio.create_task(follow())
    try:
        for begin in (501, 1001):
            victim = await leader_of(cluster, js, name)
            await asyncio.to_thread(victim.kill)
            try:
                await fill(js, name, begin, begin + 499)
            finally:
                await back(cluster, victim)
        await asyncio.wait_for(all_of_them.wait(), 90)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert seen == list(range(1, 1501))


async def test_a_leader_that_dies_under_committed_positions(
    cluster: NatsCluster, js: JetStreamContext, make: Make, stream_name: Callable[[], str]
) -> None:
    name = await make()
    await fill(js, name, 1, 200)
    store = OffsetStore(js, stream_name(), patience=90)
    await settled(lambda: store.create(replicas=3))
    reader = LogReader(js, name, start=Stored("r"), offsets=store, patience=90)
    seen = []
    async with store.committing(reader, every=10) as messages:
        async for msg in messages:
            seen.append(msg.seq)
            if msg.seq == 95:
                victim = await leader_of(cluster, js, f"KV_{store.bucket}")
                await asyncio.to_thread(victim.kill)
    await back(cluster, victim)
    assert seen == list(range(1, 201))
    found = await store.fetch("r")
    assert found is not None
    assert found.seq == 201


@pytest.mark.parametrize("which", ["output", "input"])
async def test_a_leader_that_dies_under_a_worker(
    cluster: NatsCluster, js: JetStreamContext, make: Make, which: str
) -> None:
    """In the middle of commits, each other time frozen instead: then there are two that believe to be the leader."""
    source, target = await make(), await make()
    await fill(js, source, 1, 900)
    rng = random.Random(which)
    at = set(rng.sample(range(50, 850), 2))
    broken: list[Awaitable[None]] = []

    async def handler(msg: StoredMsg) -> list[BatchMessage]:
        if msg.seq in at:
            at.discard(msg.seq)
            victim = await leader_of(cluster, js, target if which == "output" else source)
            broken.append(asyncio.create_task(hurt(victim, freeze=len(broken) % 2 == 1)))
        return [BatchMessage(f"{target}.out", msg.data)] * (msg.seq % 3)

    async def hurt(victim: NatsServer, *, freeze: bool) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))
        if freeze:
            victim.pause()
            await replaced(cluster, victim, target if which == "output" else source)
            victim.resume()  # it does not know yet
        else:
            await asyncio.to_thread(victim.kill)
            await back(cluster, victim)

    done = await exactly_once(
        LogReader(js, source, patience=90),
        target,
        handler,
        name="w",
        prefix=f"{target}.at",
        max_messages=5,
        patience=90,
    )
    await asyncio.gather(*broken)
    await asyncio.to_thread(cluster.wait_ready)
    assert (done.inputs, done.position, len(broken)) == (900, 901, 2)
    out = LogReader(js, target, subject=f"{target}.out", patience=90)
    assert [int(msg.data) async for msg in out] == [n for n in range(1, 901) for _ in range(n % 3)]
