"""Several publishers or scans at once: on one connection, and on one each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats
from direct_get import fill, scan
from nats.js import JetStreamContext
from record import Clock, Group

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

COUNTS = (1, 2, 4)
PUBLISH, SCAN = "add_many", "scan"


def case_name(what: str, count: int, *, shared: bool) -> str:
    where = "one connection" if shared else "one connection each"
    return f"{count} x {what}, {where}"


def run(name: str, *, quick: bool) -> Group:
    """Measure `sharing`."""
    messages, size, rounds = (2_000, 128, 1) if quick else (200_000, 128, 5)
    group = Group(name, messages=messages, size=size, rounds=rounds, flow=500)
    with NatsServer() as server:
        asyncio.run(_measure(server.url, group, messages, size, rounds))
    return group


async def _measure(url: str, group: Group, messages: int, size: int, rounds: int) -> None:
    connections = [await nats.connect(url) for _ in range(max(COUNTS))]
    contexts = [nc.jetstream(timeout=30) for nc in connections]
    payload = b"x" * size
    for number in range(max(COUNTS)):
        await fill(contexts[0], f"READ{number}", messages // max(COUNTS), size)

    async def publish(js: JetStreamContext, number: int, count: int) -> int:
        async with jsx.FastPublisher(js, flow=500) as publisher:
            await publisher.add_many((f"bench{number}.{n % 10}", payload) for n in range(messages // count))
        return publisher.ack.batch_size or 0

    async def read(js: JetStreamContext, number: int, count: int) -> int:
        return await scan(js, f"READ{number}", None)

    work: dict[str, Callable[[JetStreamContext, int, int], Awaitable[int]]] = {PUBLISH: publish, SCAN: read}
    for number in range(rounds + 1):  # the first warms up
        for what, one in work.items():
            for count in COUNTS:
                for shared in (True, False) if count > 1 else (True,):
                    for stream in range(count if what == PUBLISH else 0):
                        await _fresh(contexts[0], stream)
                    used = contexts[:1] * count if shared else contexts[:count]
                    await asyncio.sleep(0.05)
                    clock = Clock()
                    done = await asyncio.gather(*(one(js, index, count) for index, js in enumerate(used)))
                    if number:
                        clock.note(group, case_name(what, count, shared=shared), sum(done))
    for nc in connections:
        await nc.close()


async def _fresh(js: JetStreamContext, number: int) -> None:
    try:
        await js.delete_stream(f"BENCH{number}")
    except nats.js.errors.NotFoundError:
        pass
    await js.add_stream(name=f"BENCH{number}", subjects=[f"bench{number}.>"], allow_batched=True)
