"""How many rows a second Spark writes: ``python tests/bench/spark_write.py``.

200,000 messages of 256 bytes from memory, ``local[2]``, everything warm; the runs of all cases are interleaved. Outside
Spark, ``FastPublisher.add_many`` publishes the same messages: what the library itself can do. At the end: what a
streaming query costs while nothing comes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from nats.js import JetStreamContext
from pyspark.sql import DataFrame, SparkSession

import jetstream_ext as jsx
import jetstream_ext.spark
from jetstream_ext.testing import NatsServer


async def connected(url: str, work: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    nc = await nats.connect(url)
    try:
        return await work(nc.jetstream(timeout=30))
    finally:
        await nc.close()


async def fresh(js: JetStreamContext) -> None:
    """Make the stream anew: an old one with much in it is no slower, but its files are written meanwhile."""
    try:
        await js.delete_stream("OUT")
    except nats.js.errors.NotFoundError:
        pass
    await js.add_stream(
        name="OUT", subjects=["out.*", "_spark.OUT.>"], allow_batched=True, allow_atomic=True, allow_direct=True
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--messages", type=int, default=200_000)
    arguments.add_argument("--size", type=int, default=256)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--idle", type=float, default=20.0, help="seconds to watch an idle query")
    options = arguments.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # not the first python3 on PATH
    with NatsServer() as server:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        jetstream_ext.spark.register(spark)
        try:
            measure(spark, server.url, options)
            idle(spark, server.url, options.idle)
        finally:
            spark.stop()
    return 0


def measure(spark: SparkSession, url: str, options: argparse.Namespace) -> None:
    payload = os.urandom(options.size // 2).hex()
    frame = spark.range(0, options.messages, numPartitions=2).selectExpr(
        "concat('out.', id % 16) AS subject", f"CAST('{payload}' AS binary) AS data"
    )

    async def outside(js: JetStreamContext) -> None:
        data = payload.encode()
        async with jsx.FastPublisher(js, flow=500) as publisher:
            await publisher.add_many((f"out.{i % 16}", data) for i in range(options.messages))

    def through(semantics: str) -> Callable[[], None]:
        def write() -> None:
            writer = frame.write.format("jetstream").mode("append").options(servers=url, stream="OUT")
            writer.option("semantics", semantics).save()

        return write

    cases: dict[str, Callable[[], Any]] = {
        "outside Spark: add_many": lambda: asyncio.run(connected(url, outside)),
        "dedupe": through("dedupe"),
        "transactional": through("transactional"),
        "none": through("none"),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(options.runs + 2):
        for name, work in cases.items():
            asyncio.run(connected(url, fresh))
            start = time.perf_counter()
            work()
            if run >= 2:  # two to warm up
                rates[name].append(options.messages / (time.perf_counter() - start))
    print(f"{options.messages} messages of {options.size} bytes, rows/s: min / median / max of {options.runs} runs")
    base = statistics.median(rates["outside Spark: add_many"])
    for name, runs in rates.items():
        middle = statistics.median(runs)
        print(f"  {name:26} {min(runs):9,.0f} / {middle:9,.0f} / {max(runs):9,.0f}   {middle / base:5.2f} x")


def idle(spark: SparkSession, url: str, seconds: float) -> None:
    """Print what a query that finds nothing costs, of one core."""
    frame: DataFrame = spark.readStream.format("jetstream").option("servers", url).load("OUT")
    with tempfile.TemporaryDirectory() as folder:
        before_start = cpu_seconds()
        time.sleep(seconds / 2)
        session = (cpu_seconds() - before_start) / (seconds / 2)
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        query.processAllAvailable()
        time.sleep(5)
        before = cpu_seconds()
        time.sleep(seconds)
        used = (cpu_seconds() - before) / seconds
        query.stop()
    print(f"  an idle streaming query: {used:.1%} of a core (the session alone: {session:.1%})")


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it started, the server included."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / ticks
    total = 0.0
    for pid, seconds in used.items():
        ancestor = pid
        while ancestor > 1 and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor == os.getpid() else 0.0
    return total


if __name__ == "__main__":
    sys.exit(main())
