"""How long a message takes from its publication to the end of the micro-batch that has it, on an idle query: a table.

    python tests/bench/spark_latency.py [--messages 20] [--streams 200]

The first row is Spark's own share: a Python source without any I/O that gets a row at the same kind of moment. With
``--streams``, the last row is the duration of a micro-batch over so many streams of which one has a new row.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from sessions import session

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer


class Bare(DataSource):
    """One row for each byte of a file."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return "seq long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return BareReader(self.options["file"])


class BareReader(DataSourceStreamReader):
    def __init__(self, file: str) -> None:
        self.file = file

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"seq": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802
        return {"seq": Path(self.file).stat().st_size}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["seq"], end["seq"]))] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        for seq in range(*partition.value):
            yield (seq,)


def run(frame: DataFrame, publish: Any, messages: int, pause: float) -> tuple[list[float], list[float]]:
    """Return, for each message, the seconds until its micro-batch was finished, and those of the micro-batch."""
    latencies, durations = [], []
    with tempfile.TemporaryDirectory() as folder:
        query = frame.writeStream.format("noop").option("checkpointLocation", folder).start()
        try:
            query.processAllAvailable()
            for number in range(messages + 2):  # the first ones start Spark's workers
                time.sleep(pause + random.random() / 2)
                batches = len(_batches(query))
                published = time.time()
                publish()
                while len(done := _batches(query)) == batches:
                    assert query.isActive, query.exception()
                    time.sleep(0.02)
                began = datetime.fromisoformat(done[-1]["timestamp"]).timestamp()
                took = done[-1]["durationMs"]["triggerExecution"] / 1000
                if number > 1:
                    latencies.append(began + took - published)
                    durations.append(took)
        finally:
            query.stop()
    return latencies, durations


def _batches(query: Any) -> list[Any]:
    return [one for one in query.recentProgress if one["numInputRows"]]


def bare(spark: SparkSession, file: Path) -> tuple[DataFrame, Any]:
    file.touch()
    spark.dataSource.register(Bare)

    def publish() -> None:
        with file.open("ab") as out:
            out.write(b".")

    return spark.readStream.format("bare").option("file", str(file)).load(), publish


def jetstream(spark: SparkSession, url: str, streams: int, runner: asyncio.Runner) -> tuple[DataFrame, Any]:
    names = [f"BENCH{streams}-{number}" for number in range(streams)]

    async def begin() -> Any:
        nc = await nats.connect(url)
        for name in names:
            await jsx.ensure_stream(nc.jetstream(), name=name, subjects=[f"{name}.*"], allow_direct=True)
        return nc.jetstream()

    js = runner.run(begin())
    frame = spark.readStream.format("jetstream").option("servers", url).load(",".join(names))
    return frame, lambda: runner.run(js.publish(f"{names[-1]}.a", b"x" * 256))


def show(case: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    print(
        f"| {case} | {statistics.median(ordered) * 1000:.0f} | {p90 * 1000:.0f} | {ordered[-1] * 1000:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20)
    parser.add_argument("--streams", type=int, default=0)
    given = parser.parse_args()
    with (
        NatsServer() as server,
        session() as spark,
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner() as runner,
    ):
        print("| publish to the end of the micro-batch, ms | p50 | p90 | max |\n| --- | ---: | ---: | ---: |")
        frame, publish = bare(spark, Path(folder) / "rows")
        show("a Python source without I/O", run(frame, publish, given.messages, 1.5)[0])
        frame, publish = jetstream(spark, server.url, 1, runner)
        show("`jetstream`", run(frame, publish, given.messages, 1.5)[0])
        if given.streams:
            frame, publish = jetstream(spark, server.url, given.streams, runner)
            show(f"the micro-batch over {given.streams} streams", run(frame, publish, 3, 1.5)[1])


if __name__ == "__main__":
    main()
