"""How long Spark's start and its first query take, and how much of that is the connector's: tables for the page on performance.

    python tests/bench/spark_start.py [--rounds 5] [--messages 336776] [--before FOLDER]

Each run is a new session in a new process; the cases run in turn. The constant source yields the same rows from memory,
so the difference to it is the connector's. The second table has the CPU time of the connector's imports, in each kind of
process that Spark starts. FOLDER is a checkout of an earlier version to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from record import descendants_cpu
from sessions import session

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

ROOT = Path(__file__).parents[2]
OPTIONS = "CaseInsensitiveDict({'servers': 'nats://localhost', 'stream': 'S'})"
# The processes of a query, in their order, and what they import of the connector besides Spark's own modules.
PROCESSES = {
    "look for formats": "import pyspark_jetstream, pyspark_jetstream_kv",
    "create the source": f"import pyspark_jetstream; pyspark_jetstream.DefaultSource({OPTIONS}).schema()",
    "plan": "import jetstream_ext.spark.source, jetstream_ext.spark.planning",
    "read (each worker)": "import jetstream_ext.spark.source, jetstream_ext.spark.reading",
    "write (each worker)": "import jetstream_ext.spark.source, jetstream_ext.spark.sink",
    # What of these is not the connector's.
    "nats-py alone": "import nats",
    "pyarrow.compute alone": "import pyarrow.compute",
}
IMPORT = """
import time, pyarrow, pyspark.sql.worker.plan_data_source_read, pyspark.worker
from pyspark.sql.datasource import CaseInsensitiveDict
began = time.process_time()
{code}
print(time.process_time() - began)
"""
IMPORT_ROUNDS = 15
RANGE, CONSTANT, NOW, BEFORE = "`spark.range`", "a constant Python source", "`jetstream`", "`jetstream`, before"
MEASURES = (
    "session, s",
    "`load()`, s",
    "first query, s",
    "second query, s",
    "CPU of Python processes in `load()` and first query, s",
    "CPU of the JVM, s",
)
ROWS = 10_000
DDL = "stream string, seq long, subject string, time timestamp, data binary, headers map<string,array<string>>"


def payload(number: int) -> bytes:
    """Return a payload as large as a flight's in examples/flights.py."""
    return b'{"carrier":"C%02d","arr_delay":%d.0,"tailnum":"%s"}' % (number % 15, number % 97, b"N" * 250)


class Constant(DataSource):
    """The same columns, from memory."""

    @classmethod
    def name(cls) -> str:
        return "constant"

    def schema(self) -> str:
        return DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return ConstantReader(int(self.options["rows"]), self.options["file"])


class ConstantReader(DataSourceReader):
    def __init__(self, rows: int, file: str) -> None:
        self.rows, self.file = rows, file

    def partitions(self) -> list[InputPartition]:
        half = self.rows // 2
        return [InputPartition(half), InputPartition(self.rows - half)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa

        # `pa.array` would import pandas.
        batch = pa.ipc.open_stream(pa.memory_map(self.file)).read_next_batch()
        for start in range(0, partition.value, ROWS):
            yield batch.slice(0, min(ROWS, partition.value - start))


def write_batch(file: Path) -> None:
    """Write the record batch that the constant source repeats."""
    columns: list[Any] = [
        pa.array(["BENCH"] * ROWS),
        pa.array(range(ROWS), pa.int64()),
        pa.array(["bench.1"] * ROWS),
        pa.array([0] * ROWS, pa.timestamp("us", tz="UTC")),
        pa.array(map(payload, range(ROWS)), pa.binary()),
        pa.array([{}] * ROWS, pa.map_(pa.string(), pa.list_(pa.string()))),
    ]
    batch = pa.RecordBatch.from_arrays(columns, ["stream", "seq", "subject", "time", "data", "headers"])
    with pa.ipc.new_stream(str(file), batch.schema) as writer:
        writer.write_batch(batch)


async def fill(url: str, messages: int) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="BENCH", subjects=["bench.*"], allow_direct=True, allow_batched=True)
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"bench.{number % 16}", payload(number)) for number in range(messages))


def load(spark: SparkSession, case: str, url: str, messages: int, file: str) -> DataFrame:
    if case == RANGE:
        text = f"""'{{"carrier":"C', id % 15, '","arr_delay":', id % 97, ',"tailnum":"{"N" * 250}"}}'"""
        return spark.range(messages).selectExpr(f"encode(concat({text}), 'utf-8') AS data")
    if case == CONSTANT:
        spark.dataSource.register(Constant)
        return spark.read.format("constant").options(rows=messages, file=file).load()
    return spark.read.format("jetstream").option("servers", url).load("BENCH")


def run(case: str, url: str, messages: int, file: str) -> list[float]:
    """Measure one session in this process."""
    began = time.perf_counter()
    with session() as spark:
        started = time.perf_counter()
        jvm = descendants_cpu("java")
        frame = load(spark, case, url, messages, file)
        loaded = time.perf_counter()
        seconds, python = [], 0.0
        for number in range(2):
            if number:
                frame = load(spark, case, url, messages, file)
            flight = sf.from_json(frame.data.cast("string"), "carrier string, arr_delay double")
            start = time.perf_counter()
            groups = frame.select(flight.alias("flight")).groupBy("flight.carrier")
            rows = groups.agg(sf.count("*").alias("n"), sf.avg("flight.arr_delay")).collect()
            seconds.append(time.perf_counter() - start)
            assert sum(row.n for row in rows) == messages
            if not number:
                python, jvm = descendants_cpu("python"), descendants_cpu("java") - jvm
        return [started - began, loaded - started, *seconds, python, jvm]


def measure(case: str, package: Path, url: str, messages: int, file: Path) -> list[float]:
    """Measure one session in a new process that imports the connector from `package`."""
    command = [sys.executable, __file__, "--messages", str(messages), "--child", case, url, str(file)]
    # Spark's processes import the connector from there as well.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(Path(__file__).parent)])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def copy(package: Path, folder: Path) -> Path:
    """Copy the connector of a checkout, and compile it, as pip does."""
    shutil.copytree(package / "jetstream_ext", folder / "jetstream_ext")
    for module in package.glob("pyspark_*.py"):
        shutil.copy(module, folder)
    compileall.compile_dir(folder, quiet=1, force=True)
    return folder


def import_seconds(code: str, package: Path) -> float:
    """Return the CPU time of some imports in a new process that has imported Spark's modules."""
    command = [sys.executable, "-c", IMPORT.format(code=code)]
    environment = os.environ | {"PYTHONPATH": str(package)}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def show_imports(packages: dict[str, Path]) -> None:
    """Print the table of imports, in milliseconds."""
    print(f"\n| CPU of imports, ms | {' | '.join(PROCESSES)} |\n| --- |{' ---: |' * len(PROCESSES)}")
    runs: dict[tuple[str, str], list[float]] = {}
    for _ in range(IMPORT_ROUNDS):
        for process, code in PROCESSES.items():
            for case, package in packages.items():
                runs.setdefault((case, process), []).append(import_seconds(code, package) * 1000)
    for case in packages:
        figures = (f"{statistics.median(runs[case, process]):.0f}" for process in PROCESSES)
        print(f"| {case} | {' | '.join(figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=336_776)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("CASE", "URL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case, url, file = options.child
        print(json.dumps(run(case, url, options.messages, file)))
        return
    with NatsServer() as server, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch"
        write_batch(file)
        asyncio.run(fill(server.url, options.messages))
        packages = {NOW: copy(ROOT, Path(folder) / "now")}
        if options.before:
            packages[BEFORE] = copy(options.before, Path(folder) / "before")
        cases = {RANGE: packages[NOW], CONSTANT: packages[NOW]} | packages
        runs: dict[str, list[list[float]]] = {case: [] for case in cases}
        for number in range(options.rounds):
            for case, package in cases.items():
                runs[case].append(measure(case, package, server.url, options.messages, file))
                print(f"round {number + 1}: {case}: {[round(one, 2) for one in runs[case][-1]]}", file=sys.stderr)
        show(runs)
        show_imports(packages)


def show(runs: dict[str, list[list[float]]]) -> None:
    """Print the table of sessions."""
    print(f"| | {' | '.join(MEASURES)} |\n| --- |{' ---: |' * len(MEASURES)}")
    for case, found in runs.items():
        figures = (f"{statistics.median(values):.1f}" for values in zip(*found, strict=True))
        print(f"| {case} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
