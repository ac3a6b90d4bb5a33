"""Live tables while the servers of a cluster are killed, restarted and paused."""

import asyncio
import itertools
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent.parent / "kv"))

from table_checker import TableChecker

Connect = Callable[..., Awaitable[Client]]


async def disturb(cluster: NatsCluster, dice: random.Random, stop: asyncio.Event) -> None:
    for number in itertools.count():
        if stop.is_set():
            return
        server = dice.choice(cluster.servers)
        if number % 2 == 0:
            await asyncio.to_thread(server.pause)
            await asyncio.sleep(dice.uniform(0.2, 2.0))
            await asyncio.to_thread(server.resume)
        else:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(dice.uniform(0.0, 1.0))
            await asyncio.to_thread(server.restart)
        await asyncio.sleep(dice.uniform(0.2, 1.0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("history", [1, 64])
async def test_tables_are_right_while_servers_are_killed_and_paused(
    cluster: NatsCluster, connect: Connect, full: bool, history: int
) -> None:
    """What was acknowledged is read, nothing goes backwards, and every state is one that the bucket had."""
    seconds, dice = 90 if full else 4, random.Random(7)
    clients = [await connect(dice.sample(cluster.urls, 3)) for _ in range(4)]
    kv = await clients[0].jetstream(timeout=20).create_key_value(bucket="B", history=history, replicas=3)
    await kvx.enable(kv)
    buckets = [await nc.jetstream(timeout=2).key_value("B") for nc in clients]
    checker, stop = TableChecker(), asyncio.Event()
    async with AsyncExitStack() as stack:
        tables = [await stack.enter_async_context(kvx.Table(bucket)) for bucket in buckets]
        async with asyncio.TaskGroup() as group:
            for number, bucket in enumerate(buckets[:2]):
                keys = 2_000 if full else 200  # no key is written more often than the bucket's history
                group.create_task(checker.write(bucket, number, keys, stop, tables=tables))
            for number, table in enumerate(tables):
                group.create_task(checker.read(f"table {number}", table, number, stop, reads=1_000 if full else 50))
            disturbing = group.create_task(disturb(cluster, dice, stop))
            await asyncio.sleep(seconds)
            stop.set()
            await disturbing
        async with asyncio.timeout(120):
            while True:
                try:
                    end = await kvx.snapshot(kv)
                    break
                except (nats.errors.Error, nats.js.errors.Error):
                    await asyncio.sleep(0.2)
        for table in tables:
            await table.wait_for(end.revision, timeout=120)
            assert dict(table) == dict(end)
    if history == 1:
        checker.check()
    else:
        scan = jsx.DirectGet(kv._js, kv._stream, timeout=30).scan(confirm=True)
        log = [(it.seq, it.subject.removeprefix(kv._pre), "KV-Operation" in it.headers) async for it in scan]
        assert len(log) == log[-1][0], "the whole history"
        checker.check(log)
    assert (await kv._js.stream_info(kv._stream)).state.consumer_count == 0
    if full:
        assert checker.reads >= 1_000_000


@pytest.mark.timeout(900)
async def test_reconnecting_processes_make_no_consumer(victim: NatsServer, connect: Connect, full: bool) -> None:
    processes, times = (100, 100) if full else (3, 5)
    nc = await connect(victim.url)
    js = nc.jetstream(timeout=20)
    kv = await js.create_key_value(bucket="B", direct=True)
    program = str(Path(__file__).with_name("table_process.py"))
    started = [
        await asyncio.create_subprocess_exec(sys.executable, program, victim.url, f"p{number}", str(times))
        for number in range(processes)
    ]
    running, most = asyncio.gather(*(process.wait() for process in started)), 0
    while not running.done():
        most = max(most, (await js.account_info()).consumers)
        await asyncio.wait([running], timeout=0.05)
    assert set(await running) == {0}
    assert most == 0
    assert {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()} == {
        f"p{number}": b"%d" % (times - 1) for number in range(processes)
    }
