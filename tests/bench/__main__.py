"""What this library costs and gains: one table, measured in one run.

    python tests/bench [--messages 200000] [--rounds 5] [--size 128] [--flow 100] [--only publish]
    python tests/bench --memory      how much memory a publisher takes, from 10**5 to 5 * 10**6 messages

Every round runs every case once, in turn, so that a machine that slows down slows them all; the table has medians.
The figures drift with the machine; the ratios are the result.
"""

import argparse
import asyncio
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import bare

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

SUBJECTS = [f"bench.{i}" for i in range(10)]
OUTSTANDING = 2
PUBLISHERS = 8
ATOMIC = 1000  # messages in an atomic batch: what servers allow by default
Case = Callable[[], Awaitable[int]]


class Bench:
    """The cases; each returns how many messages it moved."""

    def __init__(self, nc: Client, url: str, messages: int, size: int, flow: int) -> None:
        self.nc = nc
        self.js: JetStreamContext = nc.jetstream(publish_async_max_pending=4000)
        self.url = url
        self.messages = messages
        self.payload = b"x" * size
        self.bare = bare.Bare(url)
        raw = [subject.encode() for subject in SUBJECTS]
        self.batch = 0
        self.flow = flow
        self.shares: list[float] = []
        self.commands = lambda batch, ids: list(bare.frames(raw, self.payload, messages, batch, flow, ids=ids))

    def publisher(self) -> jsx.FastPublisher:
        return jsx.FastPublisher(self.js, flow=self.flow, max_outstanding_acks=OUTSTANDING)

    async def setup(self) -> None:
        await self.js.add_stream(name="READ", subjects=["read.>"], allow_direct=True, allow_batched=True)
        async with jsx.FastPublisher(self.js) as publisher:
            await publisher.add_many((f"read.{i % 10}", self.payload) for i in range(self.messages))
        await self.fresh()

    async def fresh(self) -> None:
        """Give every publishing case an empty stream."""
        try:
            await self.js.delete_stream("BENCH")
        except nats.js.errors.NotFoundError:
            pass
        await self.js.add_stream(name="BENCH", subjects=["bench.>"], allow_batched=True, allow_atomic=True)

    # -- publishing

    async def js_publish(self) -> int:
        count = max(1, self.messages // 50)
        for i in range(count):
            await self.js.publish(SUBJECTS[i % 10], self.payload)
        return count

    async def publish_async(self) -> int:
        count = max(1, self.messages // 10)
        for i in range(count):
            await self.js.publish_async(SUBJECTS[i % 10], self.payload)
        await self.js.publish_async_completed()
        return count

    async def add(self) -> int:
        count = self.messages // 2
        async with self.publisher() as publisher:
            for i in range(count):
                await publisher.add(SUBJECTS[i % 10], self.payload)
        assert publisher.ack is not None
        return publisher.ack.batch_size or 0

    async def add_many(self) -> int:
        payload = self.payload
        async with self.publisher() as publisher:
            await publisher.add_many((SUBJECTS[i % 10], payload) for i in range(self.messages))
        assert publisher.ack is not None
        return publisher.ack.batch_size or 0

    async def with_ids(self) -> int:
        payload, run = self.payload, f"run{time.monotonic_ns()}"
        async with self.publisher() as publisher:
            await publisher.add_many(
                (SUBJECTS[i % 10], payload, {"Nats-Msg-Id": f"{run}-{i}"}) for i in range(self.messages)
            )
        assert publisher.ack is not None
        return publisher.ack.batch_size or 0

    async def ingest(self) -> int:
        payload = self.payload
        entries = ((SUBJECTS[i % 10], payload) for i in range(self.messages))
        report = await jsx.ingest(self.js, entries, flow=self.flow, max_outstanding_acks=OUTSTANDING)
        return report.stored

    async def side_by_side(self) -> int:
        """Several publishers on one connection, all for the same time; notes the slowest one's share of the mean."""
        payload, stop = self.payload, False

        async def publish() -> int:
            async with self.publisher() as publisher:
                await publisher.add_many((SUBJECTS[0], payload) for _ in iter(lambda: stop, True))
            assert publisher.ack is not None
            return publisher.ack.batch_size or 0

        running = [asyncio.create_task(publish()) for _ in range(PUBLISHERS)]
        await asyncio.sleep(1.0)
        stop = True
        counts = await asyncio.gather(*running)
        self.shares.append(min(counts) / statistics.mean(counts))
        return sum(counts)

    def prepare_bare(self, *, ids: bool = False) -> Case:
        self.batch += 1
        first, blocks, end = bare.joined(self.commands(b"bare%d" % self.batch, ids), self.flow)

        async def run() -> int:
            return bare.publish(self.bare, first, blocks, end, self.flow, OUTSTANDING)

        return run

    # -- atomic batches

    def batches(self) -> list[list[jsx.BatchMessage]]:
        batch = [jsx.BatchMessage(SUBJECTS[i % 10], self.payload) for i in range(ATOMIC)]
        return [batch] * max(1, self.messages // ATOMIC // 4)

    async def atomic_add(self) -> int:
        count = 0
        for batch in self.batches():
            async with jsx.AtomicBatch(self.js) as opened:
                for message in batch:
                    await opened.add_message(message)
            count += opened.size
        return count

    def prepare_atomic(self) -> Case:
        batches = self.batches()

        async def run() -> int:
            return sum([(await jsx.publish_atomic(self.js, batch)).batch_size or 0 for batch in batches])

        return run

    def prepare_atomic_many(self, in_flight: int) -> Case:
        batches = self.batches()

        async def run() -> int:
            acks = await jsx.publish_atomic_many(self.js, batches, in_flight=in_flight)
            return sum(ack.batch_size or 0 for ack in acks)

        return run

    def prepare_bare_atomic(self) -> Case:
        raw = [subject.encode() for subject in SUBJECTS]
        self.batch += 1
        batches = [
            bare.atomic_frames(raw, self.payload, len(batch), b"bare%d-%d" % (self.batch, number))
            for number, batch in enumerate(self.batches())
        ]

        async def run() -> int:
            return bare.publish_atomic(self.bare, batches)

        return run

    # -- reading

    async def get_msg(self) -> int:
        count = max(1, self.messages // 50)
        for seq in range(1, count + 1):
            await self.js.get_msg("READ", seq, direct=True)
        return count

    async def hand_written(self) -> int:
        """What a nats-py user writes today: a subscription, a request, messages until the end of the batch."""
        read, seq, count = 0, 1, self.messages // 2
        inbox = self.nc.new_inbox()
        subscription = await self.nc.subscribe(inbox)
        while read < count:
            request = b'{"seq":%d,"batch":1000,"max_bytes":8388608}' % seq
            await self.nc.publish("$JS.API.DIRECT.GET.READ", request, reply=inbox)
            while True:
                message = await subscription.next_msg(timeout=5)
                headers = message.headers or {}
                if headers.get("Status") == "204":
                    break
                seq = int(headers["Nats-Sequence"]) + 1
                read += 1
        await subscription.unsubscribe()
        return read

    async def scan(self) -> int:
        count = 0
        async with jsx.DirectGet(self.js, "READ").scan() as messages:
            async for _ in messages:
                count += 1
        return count

    async def bare_read(self) -> int:
        return bare.read(self.bare, "READ", self.messages, 16_000, 8 << 20)


async def measure(server: NatsServer, options: argparse.Namespace, console: Console) -> None:
    messages, size, rounds = options.messages, options.size, options.rounds
    nc = await nats.connect(server.url)
    bench = Bench(nc, server.url, messages, size, options.flow)
    await bench.setup()
    many = "bare socket, joined frames"
    ids = "bare socket, joined frames, Nats-Msg-Id"
    publishing: dict[str, Callable[[], Case]] = {
        "js.publish": lambda: bench.js_publish,
        "js.publish_async": lambda: bench.publish_async,
        "FastPublisher.add": lambda: bench.add,
        "FastPublisher.add_many": lambda: bench.add_many,
        f"… {PUBLISHERS} of them on one connection": lambda: bench.side_by_side,
        many: bench.prepare_bare,
        "FastPublisher.add_many, Nats-Msg-Id": lambda: bench.with_ids,
        "ingest": lambda: bench.ingest,
        ids: lambda: bench.prepare_bare(ids=True),
    }
    with_ids = {"FastPublisher.add_many, Nats-Msg-Id", "ingest", ids}
    atomic: dict[str, Callable[[], Case]] = {
        "AtomicBatch.add": lambda: bench.atomic_add,
        "publish_atomic": bench.prepare_atomic,
        "publish_atomic_many, 2 in flight": lambda: bench.prepare_atomic_many(2),
        "publish_atomic_many, 4 in flight": lambda: bench.prepare_atomic_many(4),
        "bare socket, joined batches": bench.prepare_bare_atomic,
    }
    reading: dict[str, Callable[[], Case]] = {
        "js.get_msg(direct=True)": lambda: bench.get_msg,
        "batched get by hand over nats-py": lambda: bench.hand_written,
        "DirectGet.scan": lambda: bench.scan,
        "bare socket, frames counted": lambda: bench.bare_read,
    }
    groups = {"publish": publishing, "atomic": atomic, "read": reading}
    chosen = {name: case for group in groups if options.only in (group, "all") for name, case in groups[group].items()}
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    for round_number in range(rounds + 1):  # the first warms up
        for name, prepare in chosen.items():
            if name not in reading:
                await bench.fresh()
            run = prepare()
            await asyncio.sleep(0.05)  # let the server finish what the last case left it
            start = time.perf_counter()
            count = await run()
            elapsed = time.perf_counter() - start
            if round_number:
                rates[name].append(count / elapsed)
        console.print(f"round {round_number} of {rounds} done", style="dim")
    await nc.close()
    bench.bare.close()
    for title, cases, baseline, limit in (
        (f"publish, flow {options.flow}", publishing, "js.publish_async", many),
        (f"atomic batches of {ATOMIC:,}", atomic, "AtomicBatch.add", "bare socket, joined batches"),
        ("read", reading, "batched get by hand over nats-py", "bare socket, frames counted"),
    ):
        if baseline not in chosen:
            continue
        table = Table(title=f"{title}: {messages:,} messages of {size} bytes, medians of {rounds} rounds")
        table.add_column("case")
        table.add_column("messages/s", justify="right")
        table.add_column("min … max", justify="right")
        table.add_column(f"times {baseline}", justify="right")
        table.add_column("of the limit", justify="right")
        base = statistics.median(rates[baseline])
        for name in cases:
            rate = statistics.median(rates[name])
            top = rates[ids if name in with_ids else limit]
            # Each round's own ratio: a round that is slow is slow for both.
            share = statistics.median(one / other for one, other in zip(rates[name], top, strict=True))
            spread = f"{min(rates[name]):,.0f} … {max(rates[name]):,.0f}"
            table.add_row(name, f"{rate:,.0f}", spread, f"{rate / base:.1f}", f"{share:.2f}")
        console.print(table)
    if bench.shares:
        console.print(f"slowest of {PUBLISHERS} publishers: {statistics.median(bench.shares[1:]):.2f} of their mean")


async def measure_memory(server: NatsServer, options: argparse.Namespace, console: Console) -> None:
    """Print the peak of Python's memory and the process's own while ever more messages go through one publisher."""
    nc = await nats.connect(server.url)
    bench = Bench(nc, server.url, 0, options.size, options.flow)
    for name in ("add_many", "ingest"):
        for messages in (100_000, 1_000_000, 5_000_000):
            await bench.fresh()
            bench.messages = messages
            tracemalloc.start() if messages <= options.messages else None
            await getattr(bench, name)()
            peak = f"{tracemalloc.get_traced_memory()[1] / 1e6:.1f} MB" if tracemalloc.is_tracing() else "not traced"
            tracemalloc.stop()
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            console.print(f"{name}, {messages:>9,} messages: {peak} allocated at most, {resident:.1f} MB resident")
    await nc.close()
    bench.bare.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=128, help="payload bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flow", type=int, default=100, help="messages per acknowledgement")
    parser.add_argument("--only", choices=["publish", "atomic", "read", "all"], default="all")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    with NatsServer() as server:
        console = Console(width=110)
        console.print(f"nats-server {server.version}, nats-py {version('nats-py')}")
        run = measure_memory if options.memory else measure
        asyncio.run(run(server, options, console))


if __name__ == "__main__":
    main()
