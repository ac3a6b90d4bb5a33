"""Export a stream without a consumer, and verify it: ``python examples/03_bulk_export.py nats://localhost:4222``.

The command line does the same with progress bars, and can resume: ``jetstream-ext export EVENTS events.jsonl``.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import nats

import jetstream_ext as jsx


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="EVENTS", subjects=["events.>"], allow_batched=True, allow_direct=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"events.{n % 5}", b"event %d" % n) for n in range(20_000))

        count = 0
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "events.jsonl"
            with file.open("w", encoding="utf-8") as out:
                # A replica may lag, so `confirm` verifies the end at the stream's leader.
                async with jsx.DirectGet(js, "EVENTS").scan(subject="events.3", confirm=True) as messages:
                    async for message in messages:
                        row = {"seq": message.seq, "time": message.time.isoformat(), "data": message.data.decode()}
                        out.write(json.dumps(row) + "\n")
                        count += 1
            print(f"{count:,} messages, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
