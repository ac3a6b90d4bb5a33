"""Read a stream into pandas, and store a data frame: ``python examples/13_pandas.py nats://localhost:4222``.

Needs ``pip install 'nats-jetstream-ext[arrow]' pandas``.
"""

import asyncio
import sys

import nats
import pandas as pd

import jetstream_ext as jsx
from jetstream_ext import arrow


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="VISITS", subjects=["visits.>"], allow_batched=True, allow_direct=True)
        await js.purge_stream("VISITS")

        pages = [f"page{n % 7}" for n in range(10_000)]
        frame = pd.DataFrame({"subject": [f"visits.{page}" for page in pages], "data": pages})
        report = await arrow.from_arrow(js, frame)
        print(f"{report.stored:,} visits stored")

        # One batch after the other, so that only the counts are in memory.
        visits = pd.Series(dtype="int64")
        async with arrow.record_batches(js, "VISITS", confirm=True) as batches:
            async for batch in batches:
                some = batch.select(["subject", "seq"]).to_pandas()
                visits = visits.add(some.groupby("subject")["seq"].count(), fill_value=0)
        for subject, count in visits.astype(int).nlargest(2).items():
            print(f"{subject}: {count:,}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
