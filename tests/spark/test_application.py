"""The names of connections, and how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.spark.connection import application_id, connection_name
from jetstream_ext.spark.options import ConnectionOptions, OptionError, ReadOptions
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLES = ("SPARK_APPLICATION_ID", "CONTAINER_ID")


def test_a_process_of_the_driver_knows_its_application_from_kubernetes_and_yarn(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environment, found in [
        ({}, None),
        ({"SPARK_APPLICATION_ID": "spark-4f1c"}, "spark-4f1c"),
        ({"CONTAINER_ID": "container_1410901929433_0001_01_000005"}, "application_1410901929433_0001"),
        ({"CONTAINER_ID": "container_e17_1410901929433_0001_01_000005"}, "application_1410901929433_0001"),
        ({"SPARK_APPLICATION_ID": "two words"}, None),
        ({"CONTAINER_ID": "d94f1c"}, None),
    ]:
        with cell(environment, found):
            for name in VARIABLES:
                monkeypatch.delenv(name, raising=False)
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            assert application_id() == found
            assert connection_name("driver") == (f"spark-{found}-driver" if found else "spark-driver")
            assert connection_name("driver", "given") == "spark-given-driver"


def test_a_wrong_application_id_is_refused() -> None:
    given = {"servers": "nats://unused", "stream": "A", "applicationId": "two words"}
    with pytest.raises(OptionError, match="'applicationId': 'two words' is not 1 to 128 characters"):
        ReadOptions.parse(given)
    assert "app-1" not in repr(ConnectionOptions(servers=("nats://unused",), application_id="app-1"))


@pytest.fixture
def watched() -> Iterator[NatsServer]:
    """A server that lists the connections of this test only, over HTTP."""
    with NatsServer(config='http: "127.0.0.1:-1"') as server:
        yield server


def test_few_connections_with_the_id_of_the_application(spark: SparkSession, watched: NatsServer, with_js: Any) -> None:
    async def fill(js: JetStreamContext) -> None:
        for name in ("S", "T"):
            await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"S.{row}", b"") for row in range(160))

    with_js(fill, watched.url)
    application = spark.conf.get("spark.app.id")
    assert application
    options = {"servers": watched.url, "applicationId": application}
    for _ in range(4):  # with 16 tasks each, all of which read and write
        rows = spark.read.format("jetstream").options(**options, minPartitions="16").load("S")
        rows = rows.selectExpr("concat('T.', seq) AS subject", "data")
        rows.write.format("jetstream").options(**options, stream="T").mode("append").save()
    assert with_js(lambda js: js.stream_info("T"), watched.url).state.messages == 640
    with urllib.request.urlopen(f"{watched.endpoints['monitoring'][0]}/connz?state=all") as answer:
        names = Counter(one.get("name", "") for one in json.load(answer)["connections"])
    driver = f"spark-{application}-driver"
    names = +Counter({name: count for name, count in names.items() if name.startswith("spark")})
    assert set(names) == {f"spark-{application}-executor", driver}
    # A slot has a worker that reads and one that writes. Spark sometimes replaces one.
    assert 4 <= names[f"spark-{application}-executor"] <= 8, names
    assert names[driver] <= 6, names


WITHOUT_PYSPARK = """
import sys
sys.modules[{missing!r}] = None  # as if it was not installed
import jetstream_ext.spark
assert jetstream_ext.spark.lag(None) == {{}}
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == {missing!r} else find(name, *more)
try:
    jetstream_ext.spark.register(None)
except ModuleNotFoundError as error:
    print(error.name, "|", error)
"""


def test_what_is_not_installed_is_named_with_its_extra(cell: Any) -> None:
    for missing, advice in [
        ("pyspark", "pip install 'nats-jetstream-ext[spark]'; on a platform that brings its own PySpark, run"),
        ("pyarrow", "pip install 'nats-jetstream-ext[spark-runtime]', here and on every executor"),
    ]:
        with cell(missing, advice):
            code = WITHOUT_PYSPARK.format(missing=missing)
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
            )
            assert done.stdout.startswith(f"{missing} | ")
            assert advice in done.stdout
            assert sys.executable in done.stdout


def test_the_runtime_extra_is_the_spark_extra_without_pyspark() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["spark-runtime"] == [one for one in extras["spark"] if not one.startswith("pyspark")]


def test_unknown_names_of_the_package() -> None:
    from jetstream_ext import spark

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        spark.nothing  # noqa: B018
