"""How late a message is seen: from the beginning of its publish until the reader has it, after quiet times.

    python tests/bench/latency.py [--seconds 8]

Prints a Markdown table. Publisher, readers and server are on one machine; each reader has a connection of its own, and so has
the publisher. nats-py's consumers are measured in the same run, in turn with the readers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import nats
from nats.js.api import ConsumerConfig, StreamConfig, StreamSource

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import log
from jetstream_ext.testing import NatsServer

GAPS = (0.01, 0.1, 1.0)
WARM_UP = 2  # messages that do not count

Times = AsyncGenerator[bytes, None]
"""The payloads of the messages, as they are seen: the times at which their publishes began."""


async def core(js: Any, stream: str) -> Times:
    """The wire: a subscription, which hears what is published before it is stored."""
    subscription = await js._nc.subscribe("s.>")
    async for message in subscription.messages:
        yield message.data


async def ordered(js: Any, stream: str) -> Times:
    config = ConsumerConfig(deliver_policy=nats.js.api.DeliverPolicy.NEW)
    subscription = await js.subscribe("s.>", stream=stream, ordered_consumer=True, config=config)
    while True:
        yield (await subscription.next_msg(timeout=60)).data


async def pull(js: Any, stream: str) -> Times:
    config = ConsumerConfig(deliver_policy=nats.js.api.DeliverPolicy.NEW, ack_policy=nats.js.api.AckPolicy.NONE)
    subscription = await js.pull_subscribe("s.>", stream=stream, config=config)
    while True:
        yield (await subscription.fetch(1, timeout=60))[0].data


async def reader(js: Any, stream: str) -> Times:
    async for message in log.LogReader(js, stream, start=log.New(), tail=True):
        yield message.data


async def member(js: Any, stream: str) -> Times:
    async with log.Group(js, stream, "bench", partitions=4, start=log.New()).join() as joined:
        async for message in joined:
            yield message.data


async def worker(js: Any, stream: str) -> Times:
    """The outputs of an exactly-once worker, as a subscription to them hears them."""
    heard = await js._nc.subscribe("out.x")
    source = log.LogReader(js, stream, start=log.New(), tail=True)
    working = asyncio.create_task(
        log.exactly_once(
            source, "OUT", lambda message: ("out.x", message.data), name=f"bench-{time.monotonic_ns()}", prefix="at"
        )
    )
    try:
        async for message in heard.messages:
            yield message.data
    finally:
        working.cancel()
        await asyncio.wait({working})


async def table(js: Any, stream: str) -> Times:
    """The changes of a live table of a bucket."""
    async with kvx.Table(await js.key_value("B")) as opened:
        async for change in opened.changes():
            if change.new is not None:
                yield change.new.value


async def watch(js: Any, stream: str) -> Times:
    watcher = await (await js.key_value("B")).watchall()
    async for entry in watcher:
        if entry is not None:
            yield entry.value


CASES: tuple[tuple[str, Callable[[Any, str], Times], str], ...] = (
    ("a plain subscription (the wire; nothing is stored yet)", core, "S"),
    ("nats-py's ordered consumer", ordered, "S"),
    ("nats-py's pull consumer, `fetch(1)`", pull, "S"),
    ("`LogReader(tail=True)`", reader, "S"),
    ("`LogReader(tail=True)` of a mirror", reader, "M"),
    ("nats-py's pull consumer of a sourced stream", pull, "C"),
    ("`LogReader(tail=True)` of a sourced stream", reader, "C"),
    ("`Group`, one member that iterates", member, "S"),
    ("`exactly_once`, from input to output", worker, "S"),
    ("nats-py's `kv.watchall()`", watch, "KV_B"),
    ("`kv.Table`, `changes()`", table, "KV_B"),
)


async def measure(url: str, see: Callable[[Any, str], Times], stream: str, gap: float, count: int) -> list[float]:
    """Return the milliseconds of each of `count` messages, in order; a table may skip some that newer ones replaced."""
    late: list[float] = []
    async with await nats.connect(url) as nc, await nats.connect(url) as other:
        publish = other.jetstream().publish
        subject = "$KV.B.k" if stream == "KV_B" else "s.x"
        last = b""

        async def take() -> None:
            async with contextlib.aclosing(see(nc.jetstream(timeout=30), stream)) as seen:
                async for data in seen:
                    with contextlib.suppress(ValueError):  # the value that a watcher finds
                        late.append((time.perf_counter() - float(data)) * 1e3)
                    if data == last:
                        return

        taking = asyncio.create_task(take())
        await asyncio.sleep(1.0)
        for number in range(count + WARM_UP):
            await asyncio.sleep(gap)
            began = b"%r" % time.perf_counter()
            if number == count + WARM_UP - 1:
                last = began
            await publish(subject, began)
        async with asyncio.timeout(60):
            await taking
    return sorted(late[WARM_UP:])


async def main(seconds: float) -> None:
    with NatsServer() as server:
        async with await nats.connect(server.url) as nc:
            js = nc.jetstream(timeout=30)
            await js.add_stream(StreamConfig(name="S", subjects=["s.>"], allow_direct=True))
            await js.add_stream(StreamConfig(name="M", mirror=StreamSource(name="S"), allow_direct=True))
            await js.add_stream(StreamConfig(name="C", sources=[StreamSource(name="S")], allow_direct=True))
            await jsx.ensure_stream(js, name="OUT", subjects=["out.>", "at.>"], allow_direct=True, allow_atomic=True)
            await js.create_key_value(bucket="B", direct=True)
        gaps = [f"{gap * 1e3:,.0f} ms" for gap in GAPS]
        print(f"| milliseconds: median, 99th percentile | {' | '.join(f'every {gap}' for gap in gaps)} |")
        print(f"| --- |{' ---: |' * len(GAPS)}")
        for title, see, stream in CASES:
            cells = []
            for gap in GAPS:
                late = await measure(server.url, see, stream, gap, max(20, round(seconds / gap)))
                cells.append(f"{late[len(late) // 2]:.1f}, {late[int(len(late) * 0.99)]:.1f}")
            print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each figure is measured")
    asyncio.run(main(parser.parse_args().seconds))
