"""Direct Get on a cluster: lagging and dying replicas, and partial mirrors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from client_cells import seqs
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsCluster, NatsServer

Make = Callable[..., Awaitable[str]]


@pytest.fixture
def js(cluster_nc: Client) -> JetStreamContext:
    return cluster_nc.jetstream(timeout=10)


@pytest.fixture
def make(make_replicated: Make) -> Make:
    return make_replicated


async def fill(js: JetStreamContext, name: str, first: int, last: int) -> None:
    for start in range(first, last + 1, 200):  # what a busy machine handles in time
        some = range(start, min(start + 200, last + 1))
        await asyncio.gather(*(js.publish(f"{name}.{seq % 3}", b"%d" % seq) for seq in some))


async def test_min_seq_and_confirm_see_every_earlier_write(js: JetStreamContext, make: Make) -> None:
    """Replicas may lag behind an acknowledged write."""
    name = await make()
    direct = jsx.DirectGet(js, name, timeout=10)
    for turn in range(1, 16):
        ack = await js.publish(f"{name}.a", b"%d" % turn)
        assert (await direct.get_last(f"{name}.a", min_seq=ack.seq)).data == b"%d" % turn
        assert await seqs(direct.scan(confirm=True)) == list(range(1, turn + 1))
        assert (await seqs(direct.scan(seq=turn, min_seq=ack.seq)))[:1] == [turn]


@asynccontextmanager
async def repaired(cluster: NatsCluster, repair: Callable[[], object]) -> AsyncIterator[None]:
    """Let the server run again that the block kills or pauses."""
    try:
        yield
    finally:
        await asyncio.to_thread(repair)
        await asyncio.to_thread(cluster.wait_ready)


async def leader_of(cluster: NatsCluster, js: JetStreamContext, name: str) -> NatsServer:
    leader = (await js.stream_info(name)).cluster.leader  # type: ignore[union-attr]
    return next(server for server in cluster.servers if server.name == leader)


async def test_a_scan_survives_the_death_of_the_leader(cluster: NatsCluster, js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 1, 3000)
    read: list[int] = []
    killed, scan = await leader_of(cluster, js, name), jsx.DirectGet(js, name, timeout=60).scan(batch=100, confirm=True)
    async with repaired(cluster, killed.restart), scan as messages:
        async for message in messages:
            read.append(message.seq)
            if len(read) == 1050:
                await asyncio.to_thread(killed.kill)
    assert read == list(range(1, 3001))


async def test_a_proof_waits_for_the_election_of_a_leader(
    cluster: NatsCluster, make: Make, js: JetStreamContext
) -> None:
    """A new leader does not know the requests to the dead one, so they are repeated."""
    name = await make()
    await fill(js, name, 1, 50)
    direct = jsx.DirectGet(js, name, timeout=60)  # the servers may need a second vote
    killed = await leader_of(cluster, js, name)
    behind, whole = direct.scan(batch=50, min_seq=50), direct.scan(batch=25, confirm=True)
    async with repaired(cluster, killed.restart), behind, whole:
        assert [(await anext(behind)).seq, (await anext(whole)).seq] == [1, 1]
        await asyncio.to_thread(killed.kill)
        assert await seqs(behind) == list(range(2, 51))
        assert await seqs(whole) == list(range(2, 51))


async def test_a_scan_survives_a_hanging_server(cluster: NatsCluster, js: JetStreamContext, make: Make) -> None:
    """A paused server keeps its subscription and answers nothing: each request is sent once more."""
    name = await make()
    await fill(js, name, 1, 600)
    connected = js._nc.connected_url.netloc  # type: ignore[union-attr]
    other = next(server for server in cluster.servers if connected not in server.url)
    read: list[int] = []
    with suppress(errors.RequestTimeoutError):  # both attempts of a request went to the paused server
        scan = jsx.DirectGet(js, name, timeout=4).scan(batch=50, prefetch=2)
        async with repaired(cluster, other.resume), scan as messages:
            async for message in messages:
                read.append(message.seq)
                if len(read) == 200:
                    await asyncio.to_thread(other.pause)
    assert read == list(range(1, len(read) + 1))
    assert len(read) >= 200
