"""Reads of several subject filters in three ways: a table, for the page on performance.

    python tests/bench/subject_filters.py [--messages 2000000]

The ways: the library's merged reads, a read of everything that the client filters, and a pull consumer without acks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

import jetstream_ext as jsx
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct_reader import read_blocks
from jetstream_ext.client.merged_read import read_merged
from jetstream_ext.protocol.direct import DEFAULT_MAX_BYTES
from jetstream_ext.protocol.reads import Scan
from jetstream_ext.protocol.subjects import SubjectMatcher
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from record import descendants_cpu

# The number of filters, and the share of the messages that they match together.
CASES = ((2, 0.00001), (2, 0.001), (2, 0.05), (32, 0.05), (2, 0.2), (8, 0.2), (2, 0.5), (8, 0.5), (8, 1.0))
PULL = 20_000


class Reader:
    def __init__(self, nc: Any, stream: str, filters: list[str], messages: int) -> None:
        self._nc, self._stream, self._filters, self._messages = nc, stream, filters, messages
        self._context = Context(nc.jetstream(timeout=60))

    async def merged(self) -> int:
        blocks = read_merged(self._context, self._stream, self._filters, 1, self._messages, 60, confirm=True)
        return sum([len(block) async for block in blocks])

    async def everything(self) -> int:
        count, matcher = 0, SubjectMatcher(self._filters)
        plan = Scan(seq=1, up_to_seq=self._messages, max_bytes=DEFAULT_MAX_BYTES)
        async for block in read_blocks(self._context, self._stream, plan, 60, confirm=True):
            block.select(matcher.mask(block.subjects))
            count += len(block)
        return count

    async def consumer(self) -> int:
        js, inbox, done = self._nc.jetstream(timeout=60), self._nc.new_inbox(), asyncio.Event()
        config = ConsumerConfig(filter_subjects=self._filters, ack_policy=AckPolicy.NONE, mem_storage=True)
        made = await js.add_consumer(self._stream, config)
        count = left = 0

        async def take(_: Any) -> None:
            nonlocal count, left
            count, left = count + 1, left - 1
            if count == made.num_pending:
                done.set()
            elif left == PULL // 2:
                await ask()

        async def ask() -> None:
            nonlocal left
            left += PULL
            request = json.dumps({"batch": PULL, "expires": 60_000_000_000}).encode()
            await self._nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{made.name}", request, reply=inbox)

        subscription = await self._nc.subscribe(inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await ask()
        await asyncio.wait_for(done.wait(), 300)
        await subscription.unsubscribe()
        await js.delete_consumer(self._stream, made.name)
        return count


def subjects(name: str, filters: int, share: float, messages: int) -> Iterator[str]:
    """Yield the subjects of the messages: those that match are spread evenly."""
    matching = 0
    for number in range(messages):
        if int((number + 1) * share) > matching:
            yield f"{name}.m.{matching % filters}"
            matching += 1
        else:
            yield f"{name}.other.{number % 100}"


def cpu() -> float:
    return descendants_cpu() + time.process_time()


async def measure(server: NatsServer, filters: int, share: float, messages: int) -> str:
    nc = await nats.connect(server.url)
    js, name = nc.jetstream(timeout=60), f"S{filters}-{round(share * 1e6)}"
    await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True))
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((subject, b"x" * 128) for subject in subjects(name, filters, share, messages))
    reader = Reader(nc, name, [f"{name}.m.{number}" for number in range(filters)], messages)
    found = set()
    figures = []
    for way in (reader.merged, reader.everything, reader.consumer):
        began, used = time.perf_counter(), cpu()
        found.add(await way())
        figures.append(f"{time.perf_counter() - began:.2f} ({cpu() - used:.1f})")
    await js.delete_stream(name)
    await nc.close()
    [count] = found
    return f"| {filters} | {count:,} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2_000_000)
    options = parser.parse_args()
    print("| filters | messages that match | merged reads | everything | consumer |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for filters, share in CASES:
        with NatsServer() as server:
            print(asyncio.run(measure(server, filters, share, options.messages)), flush=True)


if __name__ == "__main__":
    main()
