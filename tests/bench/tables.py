"""The cost of live tables, compared with nats-py's `watchall`: to load a bucket, to follow it, and to see a write."""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import nats
from kv import bucket, watchall
from nats.js.kv import KeyValue
from record import CLIENT, Case, Group

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

WATCHALL, SNAPSHOT, SCAN, TABLE = "kv.watchall()", "snapshot", "scan", "kvx.Table"
LOAD, FOLLOW, SEEN, SLOWEST = "µs per key", "changes/s", "ms until it is seen", "99th percentile, ms"
SIZES = (100_000, 1_000_000)
CHANGES, WRITES = 500_000, 500

# Another process: it shares no loop with what is measured.
WRITER = """
import asyncio, sys, nats, jetstream_ext as jsx

async def main(url, bucket, keys, count):
    async with await nats.connect(url) as nc:
        async with jsx.FastPublisher(nc.jetstream(timeout=30), flow=500) as publisher:
            await publisher.add_many((f"$KV.{bucket}.user.{n % keys}", b"y" * 100) for n in range(count))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def case(what: str, keys: int) -> str:
    return f"{what}, {keys:,} keys"


def table(kv: KeyValue, kept: list[object]) -> Case:
    async def run() -> int:
        opened = await kvx.Table(kv).__aenter__()
        kept.append(opened)
        return len(opened)

    return run


def scan(kv: KeyValue, _: list[object]) -> Case:
    async def run() -> int:
        count = 0
        async for _ in jsx.DirectGet(kv._js, kv._stream).scan():
            count += 1
        return count

    return run


def snapshot(kv: KeyValue, kept: list[object]) -> Case:
    async def run() -> int:
        found = await kvx.snapshot(kv)
        kept.append(found)
        return len(found)

    return run


async def follow_table(kv: KeyValue, write: Callable[[], Awaitable[object]], changes: int) -> float:
    """Return the seconds from the first change that is seen to the last one."""
    async with kvx.Table(kv) as opened:
        before, started = opened.revision, 0.0
        writing = asyncio.ensure_future(write())
        while opened.revision < before + changes:
            await opened.wait_for(min(opened.revision + 1, before + changes), timeout=60)
            started = started or time.perf_counter()
        elapsed = time.perf_counter() - started
        await writing
    return elapsed


async def follow_watchall(kv: KeyValue, write: Callable[[], Awaitable[object]], changes: int) -> float:
    watcher, seen = await kv.watchall(), 0
    async for entry in watcher:
        if entry is None:
            break
        seen = entry.revision or 0
    last, started = seen + changes, 0.0
    writing = asyncio.ensure_future(write())
    while seen < last:
        entry = await watcher.updates(timeout=60)
        seen = entry.revision if entry is not None else seen
        started = started or time.perf_counter()
    elapsed = time.perf_counter() - started
    await writing
    await watcher.stop()
    return elapsed


async def see_in_table(kv: KeyValue, writer: KeyValue, writes: int) -> list[float]:
    waits = []
    async with kvx.Table(kv) as opened:
        for n in range(writes):
            revision = await writer.put(f"user.{n}", b"z")
            start = time.perf_counter()
            await opened.wait_for(revision)
            waits.append(time.perf_counter() - start)
    return waits


async def see_in_watchall(kv: KeyValue, writer: KeyValue, writes: int) -> list[float]:
    waits = []
    watcher = await kv.watchall()
    async for entry in watcher:
        if entry is None:
            break
    for n in range(writes):
        revision = await writer.put(f"user.{n}", b"z")
        start = time.perf_counter()
        while (entry := await watcher.updates(timeout=10)) is None or (entry.revision or 0) < revision:
            pass
        waits.append(time.perf_counter() - start)
    await watcher.stop()
    return waits


def run(name: str, *, quick: bool) -> Group:
    """Measure `tables`."""
    less = 1_000 if quick else 1
    sizes, rounds = [keys // less for keys in SIZES], 1 if quick else 5
    changes, writes = CHANGES // less, WRITES // (50 if quick else 1)
    group = Group(name, size=100, rounds=rounds, sizes=sizes, changes=changes, writes=writes)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, sizes, rounds, changes, writes))
    return group


async def _measure(url: str, group: Group, sizes: list[int], rounds: int, changes: int, writes: int) -> None:
    nc, other = await nats.connect(url), await nats.connect(url)
    js = nc.jetstream(timeout=30)
    buckets = {keys: await bucket(js, keys, 100) for keys in sizes}
    loads: dict[str, tuple[Case, int]] = {}
    kept: list[object] = []  # so that the time to free what is loaded does not count
    for keys, kv in buckets.items():
        for what, make in ((SCAN, scan), (SNAPSHOT, snapshot), (TABLE, table)):
            loads[case(what, keys)] = make(kv, kept), keys
    loads[case(WATCHALL, sizes[0])] = watchall(buckets[sizes[0]]), sizes[0]
    for number in range(rounds + 1):  # the first warms up
        for name, (load, keys) in loads.items():
            gc.collect()
            await asyncio.sleep(0.05)  # let the server finish the work of the last case
            start, used = time.perf_counter(), time.process_time()
            assert await load() == keys, name
            elapsed, used = time.perf_counter() - start, time.process_time() - used
            if number:
                group.note(name, LOAD, elapsed / keys * 1e6)
                group.note(name, CLIENT, used / keys * 1e6)
            for each in kept:
                if isinstance(each, kvx.Table):
                    await each.__aexit__(None, None, None)
            kept.clear()
    kv = buckets[sizes[0]]
    writer = await other.jetstream(timeout=30).key_value(kv._name)

    async def write() -> None:
        command = [sys.executable, "-c", WRITER, url, kv._name, str(sizes[0]), str(changes)]
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() == 0

    for number in range(rounds + 1):
        for name, follow in ((WATCHALL, follow_watchall), (TABLE, follow_table)):
            used = time.process_time()
            elapsed = await follow(kv, write, changes)
            used = time.process_time() - used
            if number:
                group.note(name, FOLLOW, changes / elapsed)
                group.note(name, CLIENT, used / changes * 1e6)
        for name, see in ((WATCHALL, see_in_watchall), (TABLE, see_in_table)):
            waits = sorted(await see(kv, writer, writes))
            if number:
                group.note(name, SEEN, statistics.median(waits) * 1e3)
                group.note(name, SLOWEST, waits[len(waits) * 99 // 100] * 1e3)
    for client in (nc, other):
        await client.close()
