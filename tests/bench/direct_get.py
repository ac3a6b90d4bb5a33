"""What a scan costs, against a bare socket that only counts frames; and what a long one takes of memory.

    python tests/bench/direct_get.py [--messages 200000] [--rounds 7] [--size 128]
    python tests/bench/direct_get.py --memory [--messages 5000000]

Every round runs every case once, in turn. CPU is this process's; the server has its own.
"""

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
from nats.js import JetStreamContext
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import bare

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

HEADERS = {"Trace-Id": "0af7651916cd43dd8448eb211c80319c", "Content-Type": "application/json"}
Case = Callable[[], Awaitable[int]]


async def fill(
    js: JetStreamContext, name: str, messages: int, size: int, headers: dict[str, str] | None = None
) -> None:
    payload = b"x" * size
    await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True)
    async with jsx.FastPublisher(js, flow=500) as publisher:
        await publisher.add_many((f"{name}.{i % 10}", payload, headers) for i in range(messages))


async def scan(js: JetStreamContext, name: str, batch: int | None) -> int:
    count = 0
    async with jsx.DirectGet(js, name, timeout=30).scan(batch=batch) as messages:
        async for _ in messages:
            count += 1
    return count


async def by_hand(js: JetStreamContext, name: str, count: int) -> int:
    """What a nats-py user writes today."""
    nc, read, seq = js._nc, 0, 1
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    while read < count:
        await nc.publish(f"$JS.API.DIRECT.GET.{name}", b'{"seq":%d,"batch":1000}' % seq, reply=inbox)
        while (headers := (await subscription.next_msg(timeout=5)).headers or {}).get("Status") != "204":
            seq = int(headers["Nats-Sequence"]) + 1
            read += 1
    await subscription.unsubscribe()
    return read


async def rates(options: argparse.Namespace, console: Console) -> None:
    with NatsServer() as server:
        nc = await nats.connect(server.url)
        js, socket = nc.jetstream(), bare.Bare(server.url)
        cases: dict[str, Case] = {}
        limits: dict[str, str] = {}

        def add(stream: str, what: str, batch: int) -> None:
            async def bare_read() -> int:
                return bare.read(socket, stream, options.messages, batch, 8 << 20)

            limit, name = f"bare socket, {what}, requests of {batch:,}", f"scan, {what}, requests of {batch:,}"
            cases[limit] = bare_read
            cases[name] = lambda: scan(js, stream, batch)
            limits[name] = limit

        for stream, what, headers in (("PLAIN", "no headers", None), ("OWN", "two headers", HEADERS)):
            await fill(js, stream, options.messages, options.size, headers)
            for batch in (1_000, 10_000):
                add(stream, what, batch)
        cases["scan, no headers, as it comes"] = lambda: scan(js, "PLAIN", None)
        cases["by hand over nats-py"] = lambda: by_hand(js, "PLAIN", options.messages // 4)
        wall: dict[str, list[float]] = {name: [] for name in cases}
        cpu: dict[str, list[float]] = {name: [] for name in cases}
        for round_number in range(options.rounds + 1):  # the first warms up
            for name, run in cases.items():
                await asyncio.sleep(0.05)
                start, start_cpu = time.perf_counter(), time.process_time()
                count = await run()
                if round_number:
                    wall[name].append((time.perf_counter() - start) / count * 1e6)
                    cpu[name].append((time.process_time() - start_cpu) / count * 1e6)
        await nc.close()
        socket.close()
    table = Table(title=f"{options.messages:,} messages of {options.size} bytes, medians of {options.rounds} rounds")
    for column in ("case", "messages/s", "CPU µs each", "of the bare socket (best)", "times by hand"):
        table.add_column(column, justify="left" if column == "case" else "right")
    hand = statistics.median(wall["by hand over nats-py"])
    for name in cases:
        middle, limit = statistics.median(wall[name]), limits.get(name)
        of = (
            ""
            if limit is None
            else f"{statistics.median(wall[limit]) / middle:.2f} ({min(wall[limit]) / min(wall[name]):.2f})"
        )
        table.add_row(name, f"{1e6 / middle:,.0f}", f"{statistics.median(cpu[name]):.2f}", of, f"{hand / middle:.1f}")
    console.print(table)


def rss() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


async def memory(options: argparse.Namespace, console: Console) -> None:
    sizes = [100_000, options.messages]
    with NatsServer() as server:
        nc = await nats.connect(server.url)
        js = nc.jetstream()
        for messages in sizes:
            await fill(js, f"M{messages}", messages, options.size)
        await scan(js, f"M{sizes[0]}", None)
        for messages in sizes:
            costs, walls, before = [], [], rss()
            for _ in range(5 if messages < 1_000_000 else 2):
                start, start_cpu = time.perf_counter(), time.process_time()
                assert await scan(js, f"M{messages}", None) == messages
                walls.append((time.perf_counter() - start) / messages * 1e6)
                costs.append((time.process_time() - start_cpu) / messages * 1e6)
            console.print(
                f"{messages:>9,} messages: CPU {statistics.median(costs):.2f} µs each ({min(costs):.2f} at best), "
                f"{1e6 / statistics.median(walls):,.0f}/s, RSS {before:.0f} → {rss():.0f} MB, "
                f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000:.0f} MB"
            )
        await nc.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="compare 100,000 messages with --messages (5,000,000)")
    parser.add_argument("--messages", type=int)
    parser.add_argument("--size", type=int, default=128, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.messages = options.messages or (5_000_000 if options.memory else 200_000)
    asyncio.run((memory if options.memory else rates)(options, Console(width=120)))


if __name__ == "__main__":
    main()
