"""How many rows a second Spark reads: ``python tests/bench/spark_read.py``.

200,000 messages of 256 bytes, ``local[2]``, everything warm, Spark's noop sink; the runs of all cases are interleaved.
The synthetic source makes the same columns out of nothing: what Spark itself can take from Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import nats
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import jetstream_ext as jsx
import jetstream_ext.spark
from jetstream_ext.testing import NatsServer

DDL = "stream string, seq long, subject string, time timestamp, data binary, headers map<string,array<string>>"

DDL_NAMES = ["stream", "seq", "subject", "time", "data", "headers"]


class Synthetic(DataSource):
    """The same columns, from memory."""

    @classmethod
    def name(cls) -> str:
        return "synthetic"

    def schema(self) -> str:
        return DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return SyntheticReader(int(self.options["rows"]), int(self.options["size"]))


class Plain(DataSource):
    """The same reader over nats-py's own message objects."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def schema(self) -> str:
        return DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return PlainReader(self.options["servers"], int(self.options["rows"]))


class PlainReader(DataSourceReader):
    """Batched direct gets of 1000 messages by ``nc.request`` semantics: a subscription and its messages."""

    def __init__(self, url: str, rows: int) -> None:
        self.url, self.rows = url, rows

    def partitions(self) -> list[InputPartition]:
        half = self.rows // 2
        return [InputPartition((1, half)), InputPartition((half + 1, self.rows))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return iter(asyncio.run(self._read(*partition.value)))

    async def _read(self, first: int, last: int) -> list[Any]:
        import json

        import pyarrow as pa

        types = [pa.string(), pa.int64(), pa.string(), pa.timestamp("us", tz="UTC"), pa.binary()]
        types.append(pa.map_(pa.string(), pa.list_(pa.string())))
        batches = []
        nc = await nats.connect(self.url)
        rows: list[Any] = []

        def flush() -> None:
            columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
            batches.append(pa.RecordBatch.from_arrays(columns, names=DDL_NAMES))
            rows.clear()

        while first <= last:
            inbox = nc.new_inbox()
            subscription = await nc.subscribe(inbox, pending_msgs_limit=-1, pending_bytes_limit=-1)
            request = {"seq": first, "batch": min(1000, last - first + 1)}
            await nc.publish("$JS.API.DIRECT.GET.BENCH", json.dumps(request).encode(), reply=inbox)
            while True:
                msg = await subscription.next_msg(timeout=10)
                headers = msg.headers or {}
                if headers.get("Status") == "204":
                    break
                first = int(headers["Nats-Sequence"]) + 1
                when = datetime.fromisoformat(headers["Nats-Time-Stamp"])
                rows.append((headers["Nats-Stream"], first - 1, headers["Nats-Subject"], when, msg.data, []))
            await subscription.unsubscribe()
            if len(rows) >= 10_000:
                flush()
        if rows:
            flush()
        await nc.close()
        return batches


class SyntheticReader(DataSourceReader):
    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in range(2)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa

        count = 10_000
        columns = [
            pa.array(["BENCH"] * count),
            pa.array(range(count), pa.int64()),
            pa.array(["bench.1"] * count),
            pa.array([datetime.now(UTC)] * count, pa.timestamp("us", tz="UTC")),
            pa.array([bytes(self.size)] * count, pa.binary()),
            pa.array([{}] * count, pa.map_(pa.string(), pa.list_(pa.string()))),
        ]
        names = ["stream", "seq", "subject", "time", "data", "headers"]
        for _ in range(self.rows // 2 // count):
            yield pa.RecordBatch.from_arrays(columns, names=names)


async def fill(url: str, messages: int, size: int, *, headers: bool) -> None:
    nc = await nats.connect(url)
    js = nc.jetstream()
    stream = "HEADERS" if headers else "BENCH"
    await js.add_stream(name=stream, subjects=[f"{stream}.*"], allow_direct=True, allow_batched=True)
    payload = os.urandom(size)
    async with jsx.FastPublisher(js) as publisher:
        if headers:
            entries = ((f"{stream}.{i % 16}", payload, {"A": f"{i}", "B": "b"}) for i in range(messages))
            await publisher.add_many(entries)
        else:
            await publisher.add_many((f"{stream}.{i % 16}", payload) for i in range(messages))
    await nc.close()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--size", type=int, default=256)
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--only", help="run one case")
    options = arguments.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # not the first python3 on PATH
    with NatsServer() as server:
        for headers in (False, True):
            asyncio.run(fill(server.url, options.messages, options.size, headers=headers))
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            return measure(spark, server.url, options)
        finally:
            spark.stop()


def measure(spark: SparkSession, url: str, options: argparse.Namespace) -> int:
    jetstream_ext.spark.register(spark)
    spark.dataSource.register(Synthetic)
    spark.dataSource.register(Plain)
    source = spark.read.format("jetstream").option("servers", url)
    synthetic = spark.read.format("synthetic").option("rows", options.messages).option("size", options.size)
    cases: dict[str, DataFrame] = {
        "all columns": source.load("BENCH"),
        "seq, data": source.schema("seq long, data binary").load("BENCH"),
        "all columns, messages with 2 headers": spark.read.format("jetstream").option("servers", url).load("HEADERS"),
        "synthetic Arrow source": synthetic.load(),
        "the same over nats-py's objects": spark.read.format("plain")
        .options(servers=url, rows=options.messages)
        .load(),
    }
    if options.only:
        cases = {options.only: cases[options.only]}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(options.runs + 2):
        for name, frame in cases.items():
            start = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            if run >= 2:  # two to warm up
                rates[name].append(options.messages / (time.perf_counter() - start))
    print(f"{options.messages} messages of {options.size} bytes, rows/s: min / median / max of {options.runs} runs")
    for name, runs in rates.items():
        print(f"  {name:38} {min(runs):9,.0f} / {statistics.median(runs):9,.0f} / {max(runs):9,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
