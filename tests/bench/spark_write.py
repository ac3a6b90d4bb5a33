"""How many rows per second Spark writes: rows from memory, ``local[2]``, after a warm-up, all cases in turn.

Outside Spark, ``FastPublisher.add_many`` publishes the same messages, which shows the limit of the library itself.
The last case is the CPU of a streaming query while no messages arrive.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
from nats.js import JetStreamContext
from pyspark.sql import DataFrame, SparkSession
from record import WORKERS, Group, descendants_cpu
from sessions import session
from spark_read import ROWS

import jetstream_ext as jsx
import jetstream_ext.spark
from jetstream_ext.testing import NatsServer

OUTSIDE, SEMANTICS = "outside Spark: `add_many`", ("dedupe", "transactional", "none")
IDLE, SESSION, SHARE = "an idle streaming query", "an idle Spark session without a query", "of one core"


async def connected(url: str, work: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    nc = await nats.connect(url)
    try:
        return await work(nc.jetstream(timeout=30))
    finally:
        await nc.close()


async def fresh(js: JetStreamContext) -> None:
    """Delete the stream and create it again: the server still writes the files of a full one during the next case."""
    try:
        await js.delete_stream("OUT")
    except nats.js.errors.NotFoundError:
        pass
    await js.add_stream(
        name="OUT", subjects=["out.*", "_spark.OUT.>"], allow_batched=True, allow_atomic=True, allow_direct=True
    )


def run(name: str, *, quick: bool) -> Group:
    """Measure `spark_write`."""
    messages, size, rounds, warm, idle = (5_000, 256, 1, 0, 1.0) if quick else (200_000, 256, 5, 2, 20.0)
    group = Group(name, messages=messages, size=size, rounds=rounds, idle_seconds=idle)
    with NatsServer() as server, session() as spark:
        jetstream_ext.spark.register(spark)
        _measure(spark, server.url, group, messages, size, rounds, warm)
        _idle(spark, server.url, group, idle)
    return group


def _measure(spark: SparkSession, url: str, group: Group, messages: int, size: int, rounds: int, warm: int) -> None:
    payload = os.urandom(size // 2).hex()
    frame = spark.range(0, messages, numPartitions=2).selectExpr(
        "concat('out.', id % 16) AS subject", f"CAST('{payload}' AS binary) AS data"
    )

    async def outside(js: JetStreamContext) -> None:
        data = payload.encode()
        async with jsx.FastPublisher(js, flow=500) as publisher:
            await publisher.add_many((f"out.{i % 16}", data) for i in range(messages))

    def through(semantics: str) -> Callable[[], None]:
        def write() -> None:
            writer = frame.write.format("jetstream").mode("append").options(servers=url, stream="OUT")
            writer.option("semantics", semantics).save()

        return write

    cases: dict[str, Callable[[], Any]] = {OUTSIDE: lambda: asyncio.run(connected(url, outside))}
    cases |= {f"`{semantics}`": through(semantics) for semantics in SEMANTICS}
    for number in range(rounds + warm):
        for case, work in cases.items():
            asyncio.run(connected(url, fresh))
            start, used = time.perf_counter(), descendants_cpu("python")
            work()
            if number >= warm:
                group.note(case, ROWS, messages / (time.perf_counter() - start))
                if case != OUTSIDE:
                    group.note(case, WORKERS, (descendants_cpu("python") - used) / messages * 1e6)


def _idle(spark: SparkSession, url: str, group: Group, seconds: float) -> None:
    """Note how much of one core a query without new messages takes."""
    frame: DataFrame = spark.readStream.format("jetstream").option("servers", url).load("OUT")
    with tempfile.TemporaryDirectory() as folder:
        group.note(SESSION, SHARE, _busy(seconds / 2))
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        query.processAllAvailable()
        time.sleep(seconds / 4)
        group.note(IDLE, SHARE, _busy(seconds))
        query.stop()


def _busy(seconds: float) -> float:
    """Return the CPU of this process and its descendants over `seconds`, as a share of one core."""
    before = time.process_time() + descendants_cpu()
    time.sleep(seconds)
    return (time.process_time() + descendants_cpu() - before) / seconds
