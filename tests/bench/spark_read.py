"""How many rows per second Spark reads: ``local[2]``, after a warm-up, into Spark's noop sink, all cases in turn.

The synthetic source makes the same columns without reading: the upper limit of Spark's Python interface.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import nats
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from record import WORKERS, Group, descendants_cpu
from sessions import session

import jetstream_ext as jsx
import jetstream_ext.spark
from jetstream_ext.testing import NatsServer

ROWS = "rows/s"
ALL, TWO_COLUMNS, HEADERS = "all columns", "`seq` and `data` only", "all columns, messages with 2 headers"
SYNTHETIC, PLAIN = (
    "a synthetic source with the same columns (upper limit of Spark's Python interface)",
    "the same reader over nats-py's message objects",
)

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


def run(name: str, *, quick: bool) -> Group:
    """Measure `spark_read`."""
    messages, size, rounds, warm = (20_000, 256, 1, 0) if quick else (200_000, 256, 7, 2)
    group = Group(name, messages=messages, size=size, rounds=rounds)
    with NatsServer() as server:
        for headers in (False, True):
            asyncio.run(fill(server.url, messages, size, headers=headers))
        with session() as spark:
            _measure(spark, server.url, group, messages, size, rounds, warm)
    return group


def _measure(spark: SparkSession, url: str, group: Group, messages: int, size: int, rounds: int, warm: int) -> None:
    jetstream_ext.spark.register(spark)
    spark.dataSource.register(Synthetic)
    spark.dataSource.register(Plain)
    source = spark.read.format("jetstream").option("servers", url)
    cases: dict[str, DataFrame] = {
        ALL: source.load("BENCH"),
        TWO_COLUMNS: source.schema("seq long, data binary").load("BENCH"),
        HEADERS: spark.read.format("jetstream").option("servers", url).load("HEADERS"),
        SYNTHETIC: spark.read.format("synthetic").options(rows=messages, size=size).load(),
        PLAIN: spark.read.format("plain").options(servers=url, rows=messages).load(),
    }
    for number in range(rounds + warm):
        for case, frame in cases.items():
            start, used = time.perf_counter(), descendants_cpu("python")
            frame.write.format("noop").mode("overwrite").save()
            if number >= warm:
                group.note(case, ROWS, messages / (time.perf_counter() - start))
                group.note(case, WORKERS, (descendants_cpu("python") - used) / messages * 1e6)
