"""What the processes of a Spark query import of the connector: each of them imports it again, one after the other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

# As Spark's own modules do it: look for formats, create the source, plan the read, read a partition.
QUERY = """
import json, sys
import pyspark.sql.worker.lookup_data_sources, pyspark.sql.worker.plan_data_source_read, pyspark.worker
from pyspark.sql.datasource import CaseInsensitiveDict

def new():
    found = sorted(set(sys.modules) - known)
    known.update(found)
    print(json.dumps(found))

known = set(sys.modules)
import pyspark_jetstream, pyspark_jetstream_kv
names = [module.DefaultSource.name() for module in (pyspark_jetstream, pyspark_jetstream_kv)]
assert names == ["jetstream", "jetstream_kv"], names
new()
source = pyspark_jetstream.DefaultSource(options=CaseInsensitiveDict(json.loads(sys.argv[1])))
schema = source.schema()
pyspark_jetstream_kv.DefaultSource(options=CaseInsensitiveDict({"servers": "nats://unused", "bucket": "b"})).schema()
new()
reader = source.reader(schema)
parts = reader.partitions()
new()
rows = sum(batch.num_rows for part in parts for batch in reader.read(part))
assert rows == 100, rows
new()
"""


@pytest.fixture(scope="module")
def imported(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """The modules that each step of a query imports: look-up, creation, plan, read."""
    import asyncio

    import nats

    async def fill() -> None:
        async with await nats.connect(server.url) as nc:
            js = nc.jetstream()
            await jsx.ensure_stream(js, name="COLD", subjects=["cold.*"], allow_direct=True)
            for n in range(100):
                await js.publish(f"cold.{n % 7}", b"%d" % n, headers={"A": "1", "B": f"{n}"} if n % 2 else None)

    asyncio.run(fill())
    options = json.dumps({"servers": server.url, "stream": "COLD"})
    done = subprocess.run(
        [sys.executable, "-c", QUERY, options], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("jetstream_ext.")}


def test_looking_for_formats_imports_none_of_the_connector(imported: list[set[str]]) -> None:
    assert imported[0] == {"pyspark_jetstream", "pyspark_jetstream_kv"}


def test_creating_a_source_imports_its_options_only(imported: list[set[str]]) -> None:
    assert "jetstream_ext.spark.options" in imported[1]
    assert not {name for name in ours(imported[1]) if name.startswith("jetstream_ext.client")}
    assert not {"pyarrow", "numpy", "pandas", "orjson"} & imported[1]


def test_planning_imports_nothing_that_reads_or_writes_rows(imported: list[set[str]]) -> None:
    assert "jetstream_ext.spark.planning" in imported[2]
    parts = {name.split(".")[1] for name in ours(imported[2])}
    assert not {"arrow", "kv", "log", "columns", "ttl"} & parts
    assert not {f"jetstream_ext.client.{name}" for name in ("atomic", "fast", "ingest", "streams")} & imported[2]
    assert not {"pyarrow", "numpy", "pandas"} & imported[2]


def test_no_process_imports_what_only_type_checkers_need(imported: list[set[str]]) -> None:
    assert not {name for modules in imported for name in modules if name.startswith("typing_extensions")}


def test_writing_imports_nothing_that_reads_rows() -> None:
    sinks = "import jetstream_ext.spark.sink, jetstream_ext.spark.ledger, jetstream_ext.spark.kv_sink"
    code = f"import sys; {sinks}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert not {"pandas", "typing_extensions", "sqlite3", "jetstream_ext.kv.table", "pyarrow.compute"} & found
    assert not {f"jetstream_ext.spark.{name}" for name in ("reading", "streaming", "feed", "kv_parts")} & found


def test_reading_imports_no_pandas(imported: list[set[str]]) -> None:
    assert "jetstream_ext.spark.reading" in imported[3]
    assert not {name.split(".")[1] for name in ours(imported[3])} & {"arrow", "kv", "log"}
    assert "pandas" not in imported[3]
