"""The cost of key-value reads per key, compared with nats-py: keys by name, a whole bucket, and by its size."""

import asyncio
import time

import nats
from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from record import Case, Group

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

COST = "µs per key"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
GATHER, GET_MANY, WATCHALL, SNAPSHOT = "asyncio.gather(kv.get)", "get_many", "kv.watchall()", "snapshot"
LEAST = 100_000  # keys per measurement: a small bucket is read repeatedly


async def bucket(js: JetStreamContext, keys: int, size: int) -> KeyValue:
    """A bucket of `keys` keys with values of `size` bytes."""
    kv = await kvx.enable(await js.create_key_value(bucket=f"K{keys}"))
    await js.update_stream((await js.stream_info(f"KV_K{keys}")).config.evolve(allow_batched=True))
    value = b"x" * size
    async with jsx.FastPublisher(js, flow=500) as publisher:
        await publisher.add_many((f"$KV.K{keys}.user.{n}", value) for n in range(keys))
    return kv


def names(keys: int) -> list[str]:
    return [f"user.{n}" for n in range(keys)]


def get_many(kv: KeyValue, keys: list[str]) -> Case:
    async def run() -> int:
        return len(await kvx.get_many(kv, keys))

    return run


def gather(kv: KeyValue, keys: list[str]) -> Case:
    async def run() -> int:
        return len({entry.key: entry for entry in await asyncio.gather(*(kv.get(key) for key in keys))})

    return run


def snapshot(kv: KeyValue) -> Case:
    async def run() -> int:
        return len(await kvx.snapshot(kv))

    return run


def watchall(kv: KeyValue) -> Case:
    async def run() -> int:
        found = {}
        watcher = await kv.watchall()
        async for entry in watcher:
            if entry is None:
                break
            found[entry.key] = entry
        await watcher.stop()
        return len(found)

    return run


def sized(what: str, keys: int) -> str:
    return f"{what}, {keys:,} keys"


def run(name: str, *, quick: bool) -> Group:
    """Measure `kv`."""
    sizes = [keys // (1_000 if quick else 1) or 1 for keys in SIZES]
    rounds = 1 if quick else 5
    group = Group(name, size=100, rounds=rounds, by_name=sizes[1], whole=sizes[2], sizes=sizes)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, sizes, rounds, LEAST // (1_000 if quick else 1)))
    return group


async def _measure(url: str, group: Group, sizes: list[int], rounds: int, least: int) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream()
    buckets = {keys: await bucket(js, keys, 100) for keys in sizes}
    by_name, whole = sizes[1], sizes[2]
    comparison: dict[str, tuple[Case, int, int]] = {
        GATHER: (gather(buckets[by_name], names(by_name)), by_name, 1),
        GET_MANY: (get_many(buckets[by_name], names(by_name)), by_name, 1),
        WATCHALL: (watchall(buckets[whole]), whole, 1),
        SNAPSHOT: (snapshot(buckets[whole]), whole, 1),
    }
    growth = {
        sized(what, keys): (make(keys), keys, max(1, least // keys))
        for what, make in (
            (SNAPSHOT, lambda keys: snapshot(buckets[keys])),
            (GET_MANY, lambda keys: get_many(buckets[keys], names(keys))),
        )
        for keys in sizes
    }
    for cases in (comparison, growth):
        for number in range(rounds + 1):  # the first warms up
            for case, (read, keys, times) in cases.items():
                await asyncio.sleep(0.05)  # let the server finish the work of the last case
                start = time.perf_counter()
                for _ in range(times):
                    assert await read() == keys, case
                elapsed = time.perf_counter() - start
                if number:
                    group.note(case, COST, elapsed / (times * keys) * 1e6)
    await nc.close()
