"""The example of a declarative pipeline; it needs Spark Connect (`nox -s compat`, spark-connect)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nats
import pytest

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

pytest.importorskip("grpc", reason="declarative pipelines need Spark Connect")
pytest.importorskip("pyspark.pipelines", reason="declarative pipelines need Spark 4.1")

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline"


async def measure(url: str, first: int, last: int) -> None:
    async with await nats.connect(url) as nc:
        js = nc.jetstream()
        await jsx.ensure_stream(js, name="METERS", subjects=["meters.*"], allow_direct=True)
        await jsx.ensure_stream(js, name="CHARGES", subjects=["charges.>"], allow_batched=True, allow_direct=True)
        for number in range(first, last):
            await js.publish("meters.a", b"%d" % number)


async def charges(url: str) -> list[int]:
    async with await nats.connect(url) as nc:
        found = await jsx.DirectGet(nc.jetstream(), "CHARGES").scan(subject="charges.meters.a").to_list()
    return sorted(int(message.data) for message in found)


def test_each_run_goes_on_where_the_last_one_ended(own_server: NatsServer, tmp_path: Path) -> None:
    spec = shutil.copytree(EXAMPLE, tmp_path / "pipeline") / "spark-pipeline.yml"
    text = spec.read_text(encoding="utf-8")
    assert "file:///tmp/charges" in text
    spec.write_text(text.replace("file:///tmp/charges", (tmp_path / "storage").as_uri()), encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Sessions of other tests have set variables for their own Spark.
    environment = {name: value for name, value in os.environ.items() if "SPARK_" not in name}
    environment |= {"PATH": path, "PYSPARK_PYTHON": sys.executable, "NATS_URL": own_server.url}
    for first, last in ((0, 20), (20, 30)):
        asyncio.run(measure(own_server.url, first, last))
        done = subprocess.run(
            ["spark-pipelines", "run", "--spec", spec],
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert asyncio.run(charges(own_server.url)) == list(range(last))
