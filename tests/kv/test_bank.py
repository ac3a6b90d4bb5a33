"""A bank: 20 workers transfer between 100 accounts while leaders are killed; every snapshot has the right total.

Every transfer also counts itself, in the same transaction: at the end each worker's count must be the number of
transfers that it was told of. A lost answer must neither lose a transfer nor let it happen twice.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
from clients import connected
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsCluster, NatsServer

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
WORKERS, ACCOUNTS, EACH = 20, 100, 1000
NAMES = [f"account.{n}" for n in range(ACCOUNTS)]
TIMEOUT = 2.0

Trouble = Callable[[JetStreamContext, float], Awaitable[int]]


async def bucket_of(nc: Client) -> KeyValue:
    """Return the bucket once it answers: `TIMEOUT` is short, for the answers that are lost with a leader."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
                return await nc.jetstream(timeout=TIMEOUT).key_value("BANK")


async def transfer(tx: kvx.Transaction, worker: int, rng: random.Random) -> None:
    a, b = rng.sample(NAMES, 2)
    balances = await tx.get_many([a, b])
    amount = min(rng.randrange(1, 50), int(balances[a].value))
    tx.put(a, b"%d" % (int(balances[a].value) - amount))
    tx.put(b, b"%d" % (int(balances[b].value) + amount))
    count = await tx.get(f"count.{worker}")
    tx.put(f"count.{worker}", b"%d" % (int(count.value) + 1 if count else 1))


async def bank(
    urls: list[str], seconds: float, replicas: int, storage: str, wait_for_interest: Any, trouble: Trouble | None = None
) -> None:
    made = dict.fromkeys(range(WORKERS), 0)
    doubtful: set[int] = set()
    snapshots = 0
    async with connected(urls) as nc:
        js, patient = nc.jetstream(timeout=TIMEOUT), nc.jetstream(timeout=30)
        made_kv = await patient.create_key_value(bucket="BANK", replicas=replicas, storage=storage)
        patient_kv = await kvx.enable(made_kv)
        await wait_for_interest(patient, f"$KV.BANK.{NAMES[0]}")
        kv = await bucket_of(nc)
        async with kvx.transaction(patient_kv) as tx:
            for name in NAMES:
                tx.create(name, b"%d" % EACH)
        end = time.monotonic() + seconds
        calm = asyncio.Event()

        def over() -> bool:
            # An election has no fixed length, so there must be snapshots before, during and after it.
            return calm.is_set() and time.monotonic() >= end and snapshots > seconds

        async def work(worker: int) -> None:
            rng = random.Random(worker)
            async with connected(urls) as own:
                mine = await bucket_of(own)
                while not over():  # `trouble` waits for messages written meanwhile
                    try:
                        await kvx.retry_transaction(mine, lambda tx: transfer(tx, worker, rng), patience=300)
                    except jsx.errors.BatchOutcomeUnknownError:
                        doubtful.add(worker)
                    else:
                        made[worker] += 1

        async def audit() -> None:
            nonlocal snapshots
            rng = random.Random(0)
            while not over():
                try:
                    snap = await kvx.snapshot(kv, rng.choice([["account.*"], NAMES]))
                except (jsx.errors.RequestTimeoutError, nats.js.errors.ServiceUnavailableError):
                    continue  # an election
                assert sum(int(entry.value) for entry in snap.values()) == ACCOUNTS * EACH
                assert len(snap) == ACCOUNTS
                snapshots += 1
                await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(work(worker))
            group.create_task(audit())
            troubles = await trouble(js, end) if trouble else 0
            calm.set()
        counts = {
            int(key[6:]): int(entry.value) for key, entry in (await kvx.snapshot(patient_kv, ["count.*"])).items()
        }
        final = await kvx.snapshot(patient_kv, NAMES)
    print(f"{sum(made.values())} transfers, {snapshots} snapshots, {troubles} leaders killed, {len(doubtful)} in doubt")
    assert sum(int(entry.value) for entry in final.values()) == ACCOUNTS * EACH
    for worker, count in made.items():
        if worker not in doubtful:
            assert counts.get(worker, 0) == count


async def test_transfers_on_one_server_keep_the_total(wait_for_interest: Any) -> None:
    with NatsServer() as server:
        await bank([server.url], 30 if FULL else 2, 1, "memory", wait_for_interest)


async def test_transfers_keep_the_total_while_leaders_are_killed(wait_for_interest: Any) -> None:
    async with NatsCluster() as cluster:

        async def kill_leaders(js: JetStreamContext, end: float) -> int:
            killed = 0
            while not killed or (FULL and time.monotonic() < end - 5):
                await more(js, 100)
                leader = (await settled(js)).leader
                server = next(server for server in cluster.servers if server.name == leader)
                await asyncio.to_thread(server.kill)
                killed += 1
                await asyncio.sleep(1)  # the others notice its absence, and have not elected a leader yet
                await asyncio.to_thread(server.restart)
                await asyncio.to_thread(cluster.wait_ready)
                await settled(js)
            return killed

        await bank(cluster.urls, 30 if FULL else 6, 3, "file", wait_for_interest, kill_leaders)


async def more(js: JetStreamContext, messages: int) -> None:
    """Wait until the bucket has stored so many more messages, so that the next step happens under load."""
    begin = last = -1
    async with asyncio.timeout(120):
        while begin < 0 or last < begin + messages:
            with contextlib.suppress(nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
                last = (await js.stream_info("KV_BANK")).state.last_seq
                begin = last if begin < 0 else begin
            await asyncio.sleep(0.05)


async def settled(js: JetStreamContext) -> nats.js.api.ClusterInfo:
    """Wait until the bucket has a leader that all others follow."""
    async with asyncio.timeout(120):
        while True:
            try:
                cluster = (await js.stream_info("KV_BANK")).cluster
            except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
                cluster = None
            if cluster is not None and cluster.leader and all(peer.current for peer in cluster.replicas or ()):
                return cluster
            await asyncio.sleep(0.1)
