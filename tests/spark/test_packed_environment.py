"""Separate executors whose Python comes from an archive without PySpark, as docs/how-to/spark-on-a-cluster.md says.

``nox -s packed`` builds the archive and names it in ``JETSTREAM_EXT_PACKED``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

ARCHIVE = os.environ.get("JETSTREAM_EXT_PACKED", "")
pytestmark = pytest.mark.skipif(not ARCHIVE, reason="`nox -s packed` builds the environment")

JOB = """
import sys
from pyspark.sql import SparkSession

def prefix(_):
    import sys
    return [sys.prefix]

url, checkpoint, registers = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
if registers == "registers":
    import jetstream_ext.spark
    jetstream_ext.spark.register(spark)
options = {"servers": url, "minPartitions": "4"}
print("rows", spark.read.format("jetstream").options(**options).load("S").count())
frame = spark.readStream.format("jetstream").options(**options).load("S").selectExpr("'T.a' AS subject", "data")
writer = frame.writeStream.format("jetstream").option("servers", url).option("stream", "T")
query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
query.awaitTermination()
print("prefixes", set(spark.sparkContext.parallelize(range(8), 8).mapPartitions(prefix).collect()))
spark.stop()
"""


@pytest.mark.parametrize("registers", ["found", "registers"])
def test_executors_use_the_packed_environment(tmp_path: Path, with_js: Any, registers: str) -> None:
    import pyspark

    shutil.unpack_archive(ARCHIVE, tmp_path / "environment", format="gztar", filter="tar")  # it has links to Python
    (tmp_path / "job.py").write_text(JOB)
    home = str(Path(pyspark.__file__).parent)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    given |= {"SPARK_HOME": home, "PYSPARK_PYTHON": "./environment/bin/python"}
    if registers == "registers":
        given["PYSPARK_DRIVER_PYTHON"] = sys.executable
    submit = [str(Path(home) / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
    submit += ["--archives", f"{ARCHIVE}#environment", "--conf", "spark.ui.enabled=false"]
    submit += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"]

    async def fill(js: JetStreamContext) -> None:
        for name in ("S", "T"):
            await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many(("S.a", b"%d" % row) for row in range(1000))

    with NatsServer() as server:
        with_js(fill, server.url)
        done = subprocess.run(
            [*submit, "job.py", server.url, str(tmp_path / "checkpoint"), registers],
            cwd=tmp_path,
            env=given,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        assert "rows 1000" in done.stdout
        # Each executor unpacked the archive into its own working directory.
        [prefixes] = [line for line in done.stdout.splitlines() if line.startswith("prefixes")]
        assert prefixes.count("/app-") == 2, prefixes  # as Spark names these folders
        assert prefixes.count("/environment'") == 2, prefixes
        assert with_js(lambda js: js.stream_info("T"), server.url).state.messages == 1000
