"""Peak memory and CPU by the number of messages: one must not grow, and the other only in proportion.

Each run is a separate process with its own peak.
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import nats
from direct_get import fill, scan
from nats.js import JetStreamContext
from record import Clock, Group

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

RESIDENT = "resident at most, MB"
CASES = ("add_many", "ingest", "scan", "record_batches")
LONG = (100_000, 1_000_000, 10_000_000)


def run(name: str, *, quick: bool) -> Group:
    """Measure `memory-<case>-<messages>`."""
    _, case, count = name.split("-")
    messages = int(count) // (1_000 if quick else 1)
    group = Group(name, messages=messages, size=32)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, case, messages))
    return group


async def _measure(url: str, group: Group, case: str, messages: int) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream(timeout=30)
    await js.add_stream(name="BENCH", subjects=["bench.*"], allow_batched=True, allow_direct=True)
    work: dict[str, Callable[[], Awaitable[int]]] = {
        "add_many": partial(_add_many, js, messages),
        "ingest": partial(_ingest, js, messages),
        "scan": partial(scan, js, "READ", None),
        "record_batches": partial(_record_batches, js, "READ"),
    }
    if case == "record_batches":
        import jetstream_ext.arrow  # noqa: F401 - only here, so that the memory of the others is without pyarrow
    if case in ("scan", "record_batches"):
        await fill(js, "READ", messages, 32)
    clock = Clock()
    assert await work[case]() == messages
    clock.note(group, case, messages)
    group.note(case, RESIDENT, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    await nc.close()


def _entries(messages: int) -> Iterator[tuple[str, bytes]]:
    payload = b"x" * 32
    return ((f"bench.{n % 10}", payload) for n in range(messages))


async def _add_many(js: JetStreamContext, messages: int) -> int:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many(_entries(messages))
    return publisher.ack.batch_size or 0


async def _record_batches(js: JetStreamContext, stream: str) -> int:
    from jetstream_ext.arrow import record_batches

    async with record_batches(js, stream, timeout=30) as batches:
        return sum([batch.num_rows async for batch in batches])


async def _ingest(js: JetStreamContext, messages: int) -> int:
    return (await jsx.ingest(js, _entries(messages))).stored
