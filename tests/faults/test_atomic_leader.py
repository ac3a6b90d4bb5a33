"""Atomic batches while the leader of their stream dies: between add and commit, and between commit and its answer.

Each round kills (or freezes) the server that leads most of the streams, while each of these streams has an open batch.
When all servers are back, the test checks that every batch is stored as a whole or not at all, that the outcome which
its client got is true or "unknown", and that `resolve` returns the truth. ``JETSTREAM_EXT_ATOMIC_BATCHES`` is the number
of batches and ``JETSTREAM_EXT_ATOMIC_SEED`` the first seed; ``python -m nox -s full -- atomic_faults`` tries 200.
"""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import nats
import nats.errors
import nats.js.errors
import pytest
from clients import quiet
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsCluster, NatsServer

BATCHES = int(os.environ.get("JETSTREAM_EXT_ATOMIC_BATCHES", "4"))
SEED = int(os.environ.get("JETSTREAM_EXT_ATOMIC_SEED", "1"))
STREAMS = 9


async def connect(servers: list[NatsServer]) -> Client:

    return await nats.connect(
        [server.url for server in servers],
        connect_timeout=10,
        reconnect_time_wait=0.05,
        max_reconnect_attempts=-1,
        dont_randomize=True,
        error_cb=quiet,
    )


async def leader(js: JetStreamContext, stream: str) -> str | None:
    try:
        info = await js.stream_info(stream)
    except (nats.errors.Error, nats.js.errors.APIError):
        return None
    return info.cluster.leader if info.cluster else None


async def healthy(js: JetStreamContext, stream: str) -> None:
    """Wait until all replicas of a stream are up to date."""
    async with asyncio.timeout(120):
        while True:
            try:
                cluster = (await js.stream_info(stream)).cluster
                peers = (cluster and cluster.leader and cluster.replicas) or []
                if len(peers) == 2 and all(peer.current and not peer.lag for peer in peers):
                    return
            except (nats.errors.Error, nats.js.errors.APIError):
                pass
            await asyncio.sleep(0.1)


@dataclass
class Told:
    """The outcome of one batch, as its client learned it."""

    stream: str
    batch_id: str
    size: int
    stage: str
    outcome: str = ""
    resolved: str = ""
    error: Exception | None = None


class Round:
    """One batch in each stream that a server leads, and a fault of that server."""

    def __init__(self, seed: int, cluster: NatsCluster, victim: NatsServer, streams: list[str]) -> None:
        self.random = random.Random(seed)
        self.cluster = cluster
        self.victim = victim
        self.streams = streams
        self.ready = 0
        self.begin = asyncio.Event()

    async def batch(self, stream: str, seed: int) -> Told:
        rng = random.Random(seed)
        others = [server for server in self.cluster.servers if server is not self.victim]
        rng.shuffle(others)
        # In most batches the client keeps its connection; in the others it is connected to the victim.
        nc = await connect([self.victim, *others] if rng.random() < 0.3 else others)
        js = nc.jetstream(timeout=60)
        batch = jsx.AtomicBatch(js)
        told = Told(stream, batch.batch_id, rng.randint(1, 12), rng.choice(["add", "commit", "answer"]))
        entries = [jsx.BatchMessage(f"{stream}.{i}", b"x" * rng.randint(0, 200)) for i in range(told.size)]
        last = entries.pop() if rng.random() < 0.5 else None
        try:
            head = 0 if told.stage == "add" else len(entries)
            for message in entries[:head]:
                await batch.add_many([message])
            self.ready += 1
            await self.begin.wait()
            batch._session._timeout = 2.0  # set only now, so that every batch is open when the leader dies
            if told.stage == "add":
                await asyncio.sleep(rng.uniform(0, 0.05))
                for message in entries:
                    await batch.add_many([message])
            if told.stage == "answer":
                await asyncio.sleep(rng.uniform(0, 0.01))
            else:
                await asyncio.sleep(rng.choice([rng.uniform(0, 0.05), rng.uniform(0, 8)]))
            if last is not None:
                await batch.commit(last.subject, last.payload)
            else:
                await batch.commit_eob()
            told.outcome = "stored"
        except errors.BatchOutcomeUnknownError as error:
            told.outcome, told.error = "unknown", error
            try:
                told.resolved = await batch.resolve(timeout=40)
            except errors.BatchOutcomeUnknownError as unresolved:
                told.resolved, told.error = "unknown", unresolved
        except errors.BatchError as error:
            told.outcome, told.error = error.outcome, error
        except (nats.errors.Error, nats.js.errors.APIError) as error:
            # The connection is lost, so the call was refused before anything was sent.
            told.outcome, told.error = "not_stored", error
            await batch.discard()
        finally:
            with contextlib.suppress(OSError):  # the connection may be breaking
                await nc.close()
        return told

    async def run(self, first_seed: int) -> list[Told]:
        tasks = [asyncio.ensure_future(self.batch(name, first_seed + i)) for i, name in enumerate(self.streams)]
        async with asyncio.timeout(120):
            while self.ready < len(tasks):
                await asyncio.sleep(0.01)
        freeze = self.random.random() < 0.3
        self.begin.set()
        await asyncio.sleep(self.random.uniform(0, 0.012))
        if freeze:
            self.victim.pause()
            await asyncio.sleep(
                self.random.uniform(5, 9)
            )  # the others elect a leader, which this server does not notice
            self.victim.resume()
        else:
            await asyncio.to_thread(self.victim.kill)
            await asyncio.sleep(self.random.uniform(0, 8))
            await asyncio.to_thread(self.victim.restart)
        return await asyncio.gather(*tasks)


@pytest.fixture
async def cluster() -> AsyncIterator[NatsCluster]:
    async with NatsCluster() as cluster:
        yield cluster


async def verify(js: JetStreamContext, told: Told) -> None:
    await healthy(js, told.stream)
    stored = [
        message
        async for message in jsx.DirectGet(js, told.stream, timeout=10).scan(confirm=True)
        if (b"Nats-Batch-Id", told.batch_id.encode()) in message.raw_headers
    ]
    truth = {0: "not_stored", told.size: "stored"}.get(len(stored), f"{len(stored)} of {told.size}")
    claims = {told.outcome, told.resolved} - {"unknown", ""}
    assert truth in ("stored", "not_stored"), told
    assert claims <= {truth}, (truth, told)


@pytest.mark.timeout(120 + 8 * BATCHES)
async def test_outcome_that_a_client_gets_is_true(cluster: NatsCluster) -> None:
    nc = await connect(list(cluster.servers))
    js = nc.jetstream(timeout=1.5)
    names = [f"S{i}" for i in range(STREAMS)]
    for name in names:
        await nc.jetstream(timeout=10).add_stream(
            name=name, subjects=[f"{name}.>"], num_replicas=3, allow_atomic=True, allow_direct=True
        )
    tried: list[Told] = []
    while len(tried) < BATCHES:
        leads: dict[str, list[str]] = {}
        for name in names:
            await healthy(js, name)
            leads.setdefault(await leader(js, name) or "", []).append(name)
        victim = max((server for server in cluster.servers), key=lambda server: len(leads.get(server.name or "", ())))
        seed = SEED + len(tried)
        told = await Round(seed, cluster, victim, leads[victim.name or ""]).run(seed)
        await asyncio.to_thread(cluster.wait_ready)
        for each in told:
            await verify(js, each)
        tried += told
        summary = Counter(f"{each.stage}: {each.outcome} {each.resolved}".strip() for each in tried)
        print(len(tried), dict(sorted(summary.items())), flush=True)
        for each in told:
            if each.resolved == "unknown":
                print(each, repr(each.error), flush=True)
    await nc.close()
