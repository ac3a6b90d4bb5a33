"""Direct Get on a cluster: lagging and dying replicas, and partial mirrors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StreamSource

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsCluster

Make = Callable[..., Awaitable[str]]


@pytest.fixture
def js(cluster_nc: Client) -> JetStreamContext:
    return cluster_nc.jetstream(timeout=10)


@pytest.fixture
def make(make_replicated: Make) -> Make:
    return make_replicated


async def fill(js: JetStreamContext, name: str, first: int, last: int) -> None:
    for some in portions(range(first, last + 1)):
        await asyncio.gather(*(js.publish(f"{name}.{seq % 3}", b"%d" % seq) for seq in some))


def portions(seqs: range) -> list[range]:
    """Split `seqs` into portions that a busy machine handles in time."""
    return [seqs[start : start + 200] for start in range(0, len(seqs), 200)]


async def caught_up(js: JetStreamContext, mirror: str, messages: int) -> None:
    async with asyncio.timeout(60):
        while (await js.stream_info(mirror)).state.messages < messages:
            await asyncio.sleep(0.02)


async def seqs(batch: jsx.MessageBatch) -> list[int]:
    return [message.seq for message in await batch.to_list()]


async def test_min_seq_and_confirm_see_every_earlier_write(js: JetStreamContext, make: Make) -> None:
    """Replicas may lag behind an acknowledged write."""
    name = await make()
    direct = jsx.DirectGet(js, name, timeout=10)
    for turn in range(1, 16):
        ack = await js.publish(f"{name}.a", b"%d" % turn)
        assert (await direct.get_last(f"{name}.a", min_seq=ack.seq)).data == b"%d" % turn
        assert await seqs(direct.scan(confirm=True)) == list(range(1, turn + 1))
        assert (await seqs(direct.scan(seq=turn, min_seq=ack.seq)))[:1] == [turn]


async def test_a_scan_survives_the_death_of_the_leader(cluster: NatsCluster, js: JetStreamContext, make: Make) -> None:
    name = await make()
    await fill(js, name, 1, 3000)
    read: list[int] = []
    leader = (await js.stream_info(name)).cluster.leader  # type: ignore[union-attr]
    killed = next(server for server in cluster.servers if server.name == leader)
    try:
        async with jsx.DirectGet(js, name, timeout=60).scan(batch=100, confirm=True) as messages:
            async for message in messages:
                read.append(message.seq)
                if len(read) == 1050:
                    await asyncio.to_thread(killed.kill)
    finally:
        await asyncio.to_thread(killed.restart)
        await asyncio.to_thread(cluster.wait_ready)
    assert read == list(range(1, 3001))


async def test_a_proof_waits_for_the_election_of_a_leader(
    cluster: NatsCluster, make: Make, js: JetStreamContext
) -> None:
    """A new leader does not know the requests to the dead one, so they are repeated."""
    name = await make()
    await fill(js, name, 1, 50)
    direct = jsx.DirectGet(js, name, timeout=60)  # the servers may need a second vote
    leader = (await js.stream_info(name)).cluster.leader  # type: ignore[union-attr]
    killed = next(server for server in cluster.servers if server.name == leader)
    try:
        async with direct.scan(batch=50, min_seq=50) as behind, direct.scan(batch=25, confirm=True) as whole:
            assert [(await anext(behind)).seq, (await anext(whole)).seq] == [1, 1]
            await asyncio.to_thread(killed.kill)
            assert await seqs(behind) == list(range(2, 51))
            assert await seqs(whole) == list(range(2, 51))
    finally:
        await asyncio.to_thread(killed.restart)
        await asyncio.to_thread(cluster.wait_ready)


async def test_a_scan_survives_a_hanging_server(cluster: NatsCluster, js: JetStreamContext, make: Make) -> None:
    """A paused server keeps its subscription and answers nothing: each request is sent once more."""
    name = await make()
    await fill(js, name, 1, 600)
    connected = js._nc.connected_url.netloc  # type: ignore[union-attr]
    other = next(server for server in cluster.servers if connected not in server.url)
    read: list[int] = []
    try:
        async with jsx.DirectGet(js, name, timeout=4).scan(batch=50, prefetch=2) as messages:
            async for message in messages:
                read.append(message.seq)
                if len(read) == 200:
                    await asyncio.to_thread(other.pause)
    except errors.RequestTimeoutError:
        pass  # both attempts of a request went to the paused server
    finally:
        await asyncio.to_thread(other.resume)
        await asyncio.to_thread(cluster.wait_ready)
    assert read == list(range(1, len(read) + 1))
    assert len(read) >= 200


async def test_a_lagging_mirror_does_not_end_a_confirmed_read(
    cluster: NatsCluster, js: JetStreamContext, make: Make
) -> None:
    """The mirror copies messages some time after the stream has stored them."""
    name = await make(num_replicas=1)
    await fill(js, name, 1, 100)
    mirror = await make(num_replicas=1, mirror=StreamSource(name=name), mirror_direct=True)
    await caught_up(js, mirror, 100)
    direct = jsx.DirectGet(js, name, timeout=10)
    for turn in range(1, 11):
        await fill(js, name, 100 * turn + 1, 100 * turn + 100)
        last = 100 * turn + 100
        assert (await seqs(direct.scan(seq=last - 50, min_seq=last))) == list(range(last - 50, last + 1))
        assert (await seqs(direct.scan(seq=last - 50, confirm=True))) == list(range(last - 50, last + 1))
        assert (await direct.get_last(f"{name}.>", min_seq=last)).seq == last


@each(
    "source, kept",
    [({"filter_subject": "1"}, lambda seq: seq % 3 == 1), ({"opt_start_seq": 250}, lambda seq: seq >= 250)],
)
async def test_a_partial_mirror_does_not_shorten_a_confirmed_read(
    js: JetStreamContext, make: Make, source: dict[str, Any], kept: Callable[[int], bool]
) -> None:
    """Its answers look complete, but lack messages at the end or in the middle."""
    name = await make(num_replicas=1)
    await fill(js, name, 1, 300)
    gone = {7, 8, 9, 150, 300}
    for seq in gone:
        await js.delete_msg(name, seq)
    everything = [seq for seq in range(1, 301) if seq not in gone]
    if "filter_subject" in source:
        source = {"filter_subject": f"{name}.1"}
    mirror = await make(num_replicas=1, mirror=StreamSource(name=name, **source), mirror_direct=True)
    await caught_up(js, mirror, sum(map(kept, everything)))
    direct = jsx.DirectGet(js, name, timeout=10)
    async with asyncio.timeout(60):  # the server chooses at random who answers
        while await seqs(direct.scan(batch=40)) == everything:
            pass  # without proof, a partial answer looks complete, as documented
    for _ in range(4):
        assert await seqs(direct.scan(batch=40, confirm=True)) == everything
        assert await seqs(direct.scan(min_seq=299)) == everything
        assert await seqs(direct.scan(subject=f"{name}.2", confirm=True)) == [seq for seq in everything if seq % 3 == 2]
        assert (await direct.get_next(f"{name}.*", seq=7, min_seq=300)).seq == 10
        assert (await direct.get(10, min_seq=300)).seq == 10
        since = (await direct.get(100, min_seq=300)).time
        found = await direct.scan(start_time=since, confirm=True, up_to_seq=200).to_list()
        assert all(message.time >= since for message in found)
        assert [message.seq for message in found if message.seq >= 100] == [
            seq for seq in everything if 100 <= seq <= 200
        ]


async def test_a_mirror_of_a_stream_without_direct_gets_is_an_error(js: JetStreamContext, make: Make) -> None:
    name = await make(num_replicas=1)
    await fill(js, name, 1, 400)
    for seq in range(2, 400, 2):
        await js.delete_msg(name, seq)
    mirror = await make(num_replicas=1, mirror=StreamSource(name=name), mirror_direct=True)
    await caught_up(js, mirror, 201)
    config = (await js.stream_info(name)).config
    config.allow_direct = False  # the mirror still answers for the stream
    await js.update_stream(config)
    with pytest.raises(errors.MirrorAnswersError, match="confirm=False") as only:
        await seqs(jsx.DirectGet(js, name, timeout=1).scan(confirm=True))
    assert (only.value.stream, only.value.mirror) == (name, mirror)
    assert await seqs(jsx.DirectGet(js, name, timeout=30).scan()) == [*range(1, 400, 2), 400]
