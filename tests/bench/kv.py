"""What key-value reads cost, next to what nats-py's own do: one run, in turn, medians.

    python tests/bench/kv.py [--rounds 5] [--largest 1000000] [--size 100]

Three tables: many keys by name, a whole bucket, and the cost per key from 10³ keys to the largest bucket.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import nats
from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from rich.console import Console
from rich.table import Table

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

BY_NAME, WHOLE = 10_000, 100_000
LEAST = 100_000  # keys per measurement: a small bucket is read as often as that takes
Case = Callable[[], Awaitable[int]]


async def bucket(js: JetStreamContext, keys: int, size: int) -> KeyValue:
    """A bucket of so many keys with values of so many bytes."""
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


async def measure(cases: dict[str, tuple[Case, int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per key of each case in each round; the first round warms up."""
    costs: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (run, keys) in cases.items():
            times = max(1, LEAST // keys) if name.startswith("10") else 1
            await asyncio.sleep(0.05)  # let the server finish what the last case left it
            start = time.perf_counter()
            for _ in range(times):
                assert await run() == keys, name
            elapsed = time.perf_counter() - start
            if number:
                costs[name].append(elapsed / (times * keys) * 1e6)
    return costs


def show(console: Console, title: str, costs: dict[str, list[float]], base: str) -> None:
    table = Table(title=title)
    for column in ("case", "µs per key", "min … max", f"against {base}"):
        table.add_column(column, justify="left" if column == "case" else "right")
    against = statistics.median(costs[base])
    for name, cost in costs.items():
        median = statistics.median(cost)
        table.add_row(name, f"{median:.2f}", f"{min(cost):.2f} … {max(cost):.2f}", f"{against / median:.2f}")
    console.print(table)


async def main(url: str, rounds: int, largest: int, size: int, console: Console) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream()
    sizes = [keys for keys in (1_000, 10_000, 100_000, 1_000_000) if keys <= largest]
    buckets = {keys: await bucket(js, keys, size) for keys in {*sizes, BY_NAME, WHOLE}}
    many = names(BY_NAME)
    by_name = {
        "asyncio.gather(kv.get)": (gather(buckets[BY_NAME], many), BY_NAME),
        "get_many": (get_many(buckets[BY_NAME], many), BY_NAME),
    }
    show(console, f"{BY_NAME:,} keys by name", await measure(by_name, rounds), "asyncio.gather(kv.get)")
    whole = {
        "nats-py watchall": (watchall(buckets[WHOLE]), WHOLE),
        "snapshot": (snapshot(buckets[WHOLE]), WHOLE),
    }
    show(console, f"a bucket of {WHOLE:,} keys", await measure(whole, rounds), "nats-py watchall")
    for what, make in (("snapshot", snapshot), ("get_many", lambda kv: get_many(kv, names(int(kv._name[1:]))))):
        cases = {f"{keys:,}".replace(",", " "): (make(buckets[keys]), keys) for keys in sizes}
        costs = await measure({f"10^{len(name.replace(' ', '')) - 1}": case for name, case in cases.items()}, rounds)
        show(console, f"{what}: cost per key by number of keys", costs, "10^3")
    await nc.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1_000_000, help="keys in the largest bucket")
    parser.add_argument("--size", type=int, default=100, help="bytes per value")
    options = parser.parse_args()
    out = Console(width=100)
    with NatsServer() as server:
        out.print(f"nats-server {server.version}, nats-py {version('nats-py')}")
        asyncio.run(main(server.url, options.rounds, options.largest, options.size, out))
