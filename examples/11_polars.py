"""Analyse a stream with Polars and store the result: ``python examples/11_polars.py nats://localhost:4222``.

Needs ``pip install 'nats-jetstream-ext[arrow]' polars``.
"""

import asyncio
import json
import sys

import nats
import polars as pl
import pyarrow as pa

import jetstream_ext as jsx
from jetstream_ext import arrow

PURCHASE = pa.schema([("customer", pa.string()), ("price", pa.float64())])


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        for name in ("RECEIPTS", "TOTALS"):
            await jsx.ensure_stream(
                js, name=name, subjects=[f"{name.lower()}.>"], allow_batched=True, allow_direct=True
            )
            await js.purge_stream(name)
        rows = ({"customer": f"c{n % 3}", "price": n / 4} for n in range(10_000))
        await jsx.ingest(js, ((f"receipts.{row['customer']}", json.dumps(row).encode()) for row in rows))

        table = await arrow.to_arrow(js, "RECEIPTS", payload=PURCHASE, confirm=True)
        totals = pl.from_arrow(table).group_by("customer").agg(pl.col("price").sum(), pl.len()).sort("customer")
        for customer, price, count in totals.iter_rows():
            print(f"{customer}: {count:,} purchases for {price:,.2f}")

        # Each row becomes a message.
        report = await arrow.from_arrow(
            js, totals.select(subject="totals." + pl.col("customer"), data=pl.col("price").cast(pl.String))
        )
        print(f"{report.stored} totals stored")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
