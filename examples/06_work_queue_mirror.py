"""Collect a work queue's messages in another stream, losing none: ``python examples/06_work_queue_mirror.py URL``.

The durable consumer acknowledges what the reading stream has stored, so that the queue keeps the rest while the two
are apart, for instance on the two sides of a leaf node: then `js` is ``nc.jetstream(domain="edge")`` for the first two
calls.
"""

import asyncio
import sys

import nats
from nats.js.api import RetentionPolicy

import jetstream_ext as jsx

COUNT = 2_000


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        queue = RetentionPolicy.WORK_QUEUE
        await jsx.ensure_stream(js, name="JOBS", subjects=["jobs.>"], retention=queue, allow_batched=True)
        entry = await jsx.create_source_consumer(js, "JOBS", "to-archive", deliver_subject="deliver.to-archive")
        await jsx.ensure_stream(js, name="ARCHIVE", sources=[entry], allow_direct=True)

        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"jobs.{n % 4}", b"%d" % n) for n in range(COUNT))

        async with asyncio.timeout(30):
            while (await js.stream_info("ARCHIVE")).state.messages < COUNT:
                await asyncio.sleep(0.05)
            while (left := (await js.stream_info("JOBS")).state.messages) > 0:
                await asyncio.sleep(0.05)
        async with jsx.DirectGet(js, "ARCHIVE").scan(confirm=True) as messages:
            numbers = [int(message.data) async for message in messages]
        (health,) = await jsx.source_health(js, "ARCHIVE")
        print(f"{len(numbers):,} in the archive, each once: {numbers == list(range(COUNT))}; {left} in the queue")
        print(f"the source is {health.state}, {health.lag} behind")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
