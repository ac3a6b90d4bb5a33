"""Query a stream with SQL, in bounded memory: ``python examples/12_duckdb.py nats://localhost:4222``.

Needs ``pip install 'nats-jetstream-ext[arrow]' duckdb``.
"""

import asyncio
import json
import sys

import duckdb
import nats
import pyarrow as pa

import jetstream_ext as jsx
from jetstream_ext import arrow

READING = pa.schema([("celsius", pa.float64())])


def query(readings: pa.RecordBatchReader) -> list[tuple[str, int, float]]:
    # DuckDB finds the argument by its name, and pulls one batch after the other from it.
    return duckdb.sql(
        "SELECT split_part(subject, '.', 2) AS sensor, count(*), max(celsius) FROM readings GROUP BY sensor ORDER BY sensor"
    ).fetchall()


async def main(url: str) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="READINGS", subjects=["readings.>"], allow_batched=True, allow_direct=True)
        await js.purge_stream("READINGS")
        payloads = (json.dumps({"celsius": n % 50 / 2}).encode() for n in range(20_000))
        await jsx.ingest(js, ((f"readings.s{n % 4}", payload) for n, payload in enumerate(payloads)))

        async with arrow.RecordBatchReader(js, "READINGS", payload=READING, confirm=True) as reader:
            # In another thread, because the event loop receives the messages.
            for sensor, count, hottest in await asyncio.to_thread(query, reader):
                print(f"{sensor}: {count:,} readings, at most {hottest} °C")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
