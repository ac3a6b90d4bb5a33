"""The cost of publishing and reading: this library, plain nats-py, and a bare socket with the least possible work.

Every round runs every case once, in turn, so that a machine that slows down slows them all.
"""

import asyncio
import statistics
import time
from collections.abc import Callable

import bare
import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from record import Case, Clock, Group

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

SUBJECTS = [f"bench.{i}" for i in range(10)]
OUTSTANDING = 2
PUBLISHERS = 8
ATOMIC = 1000  # messages in an atomic batch: the default limit of servers
SHARE = "slowest, of the mean"

JS_PUBLISH, PUBLISH_ASYNC = "js.publish", "js.publish_async"
ADD, ADD_MANY, ADD_MANY_IDS, INGEST = "add", "add_many", "add_many, Nats-Msg-Id", "ingest"
BARE, BARE_IDS, BARE_ATOMIC = "bare socket", "bare socket, Nats-Msg-Id", "bare socket, atomic batches"
ATOMIC_ADD, PUBLISH_ATOMIC, TWO, FOUR = "AtomicBatch.add", "publish_atomic", "… 2 in flight", "… 4 in flight"
EIGHT = f"{PUBLISHERS} publishers on one connection"
GET_MSG, BY_HAND, SCAN, BARE_READ = (
    "js.get_msg(direct=True)",
    "by hand over nats-py",
    "DirectGet.scan",
    "bare socket, frames counted",
)


class Bench:
    """The cases; each returns the number of messages that it published or read."""

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
        return publisher.ack.batch_size or 0

    async def add_many(self) -> int:
        payload = self.payload
        async with self.publisher() as publisher:
            await publisher.add_many((SUBJECTS[i % 10], payload) for i in range(self.messages))
        return publisher.ack.batch_size or 0

    async def with_ids(self) -> int:
        payload, run = self.payload, f"run{time.monotonic_ns()}"
        async with self.publisher() as publisher:
            await publisher.add_many(
                (SUBJECTS[i % 10], payload, {"Nats-Msg-Id": f"{run}-{i}"}) for i in range(self.messages)
            )
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
                    await opened.add(message.subject, message.payload)
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
        """The same read with nats-py alone: a subscription, a request, messages until the end of the batch."""
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


def publishing(bench: Bench) -> dict[str, Callable[[], Case]]:
    """The cases that publish; each is prepared before the clock starts."""
    return {
        JS_PUBLISH: lambda: bench.js_publish,
        PUBLISH_ASYNC: lambda: bench.publish_async,
        ADD: lambda: bench.add,
        ADD_MANY: lambda: bench.add_many,
        EIGHT: lambda: bench.side_by_side,
        BARE: bench.prepare_bare,
        ADD_MANY_IDS: lambda: bench.with_ids,
        INGEST: lambda: bench.ingest,
        BARE_IDS: lambda: bench.prepare_bare(ids=True),
        ATOMIC_ADD: lambda: bench.atomic_add,
        PUBLISH_ATOMIC: bench.prepare_atomic,
        TWO: lambda: bench.prepare_atomic_many(2),
        FOUR: lambda: bench.prepare_atomic_many(4),
        BARE_ATOMIC: bench.prepare_bare_atomic,
    }


def reading(bench: Bench) -> dict[str, Callable[[], Case]]:
    """The cases that read."""
    return {
        GET_MSG: lambda: bench.get_msg,
        BY_HAND: lambda: bench.hand_written,
        SCAN: lambda: bench.scan,
        BARE_READ: lambda: bench.bare_read,
    }


def run(name: str, *, quick: bool) -> Group:
    """Measure `publish`, `publish_500` (with that flow) or `read`."""
    messages, size, rounds = (2_000, 128, 1) if quick else (200_000, 128, 5)
    flow = 500 if name == "publish_500" else 100
    group = Group(name, messages=messages, size=size, rounds=rounds, flow=flow, atomic=ATOMIC)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, messages, size, rounds, flow))
    return group


async def _measure(url: str, group: Group, messages: int, size: int, rounds: int, flow: int) -> None:
    nc = await nats.connect(url)
    bench = Bench(nc, url, messages, size, flow)
    await bench.setup()
    cases = reading(bench) if group.name == "read" else publishing(bench)
    for number in range(rounds + 1):  # the first warms up
        for name, prepare in cases.items():
            if group.name != "read":
                await bench.fresh()
            case = prepare()
            await asyncio.sleep(0.05)  # let the server finish the work of the last case
            clock = Clock()
            count = await case()
            if number:
                clock.note(group, name, count)
    for share in bench.shares[1:]:
        group.note(EIGHT, SHARE, share)
    await nc.close()
    bench.bare.close()
