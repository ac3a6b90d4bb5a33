"""Process each word exactly once, despite cancelled workers: ``python examples/09_exactly_once_worker.py URL``."""

import asyncio
import random
import sys

import nats

import jetstream_ext as jsx
from jetstream_ext import log

WORDS = ["and", "so", "on"]
MESSAGES = 3_000


def shout(msg: jsx.StoredMsg) -> jsx.BatchMessage | None:
    """Return the output for one input, or None to skip it."""
    return None if msg.data == b"so" else jsx.BatchMessage("loud." + msg.data.decode(), msg.data.upper())


async def work(js: nats.js.JetStreamContext, *, to_the_end: bool) -> int:
    """Continue after the last commit of this worker name."""
    reader = log.LogReader(js, "WORDS", tail=not to_the_end)
    done = await log.exactly_once(reader, "LOUD", shout, name="shouter", prefix="loud-at", max_messages=20)
    return done.inputs


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="WORDS", subjects=["words"], allow_direct=True, allow_batched=True)
        # The worker stores its position in the output stream, next to its outputs.
        subjects = ["loud.*", "loud-at.*"]
        await jsx.ensure_stream(js, name="LOUD", subjects=subjects, allow_direct=True, allow_atomic=True)
        await jsx.ingest(js, (("words", WORDS[n % 3].encode()) for n in range(MESSAGES)))

        cancelled = 0
        for _ in range(5):  # cancel each worker at a random moment
            worker = asyncio.create_task(work(js, to_the_end=False))
            await asyncio.sleep(random.uniform(0.005, 0.1))
            cancelled += worker.cancel()
            await asyncio.wait([worker])
        print(f"{cancelled} workers cancelled; the last one handled {await work(js, to_the_end=True)} words")

        found = [msg.subject async for msg in log.LogReader(js, "LOUD", subject="loud.*")]
        print({subject: found.count(subject) for subject in sorted(set(found))})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
