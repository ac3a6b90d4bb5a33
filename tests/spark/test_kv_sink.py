"""The `jetstream_kv` sink: what a bucket holds after batch and streaming writes, and after replays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Target:
    """A bucket that the sink can write to."""

    def __init__(self, server: NatsServer, run: Callable[..., Any], name: str, **config: Any) -> None:
        self.server, self.run, self.name = server, run, name

        async def make(js: JetStreamContext) -> None:
            kv = await js.create_key_value(KeyValueConfig(bucket=name, **config))
            await kvx.enable(kv, spark=True, ttl=True)

        run(make)

    def write(self, frame: DataFrame, **options: str) -> None:
        writer = frame.write.format("jetstream_kv").options(servers=self.server.url, bucket=self.name)
        writer.options(**options).mode("append").save()

    def stream(self, frame: DataFrame, checkpoint: Path, mode: str = "append", **options: str) -> None:
        writer = frame.writeStream.format("jetstream_kv").options(servers=self.server.url, bucket=self.name)
        writer = writer.options(**options).outputMode(mode).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    def values(self) -> dict[str, bytes]:
        async def read(js: JetStreamContext) -> dict[str, bytes]:
            snap = await kvx.snapshot(await js.key_value(self.name))
            return {key: entry.value for key, entry in snap.items()}

        found: dict[str, bytes] = self.run(read)
        return found

    def log(self) -> list[tuple[str, bytes]]:
        """Return every stored message of a key, in order (history 1 keeps the newest one of each)."""

        async def read(js: JetStreamContext) -> list[tuple[str, bytes]]:
            messages = jsx.DirectGet(js, f"KV_{self.name}").scan(subject=f"$KV.{self.name}.>")
            return [(one.subject.removeprefix(f"$KV.{self.name}."), one.data) async for one in messages]

        found: list[tuple[str, bytes]] = self.run(read)
        return found


@pytest.fixture
def target(server: NatsServer, with_js: Callable[..., Any], stream_name: Callable[[], str]) -> Target:
    return Target(server, with_js, stream_name(), history=20)


def rows_of(spark: SparkSession, first: int, last: int, keys: int, partitions: int = 2) -> DataFrame:
    """Return rows of `keys` keys, each with its number as the value."""
    frame = spark.range(first, last, 1, partitions)
    return frame.selectExpr(f"concat('k.', id % {keys}) AS key", "string(id) AS value")


def test_the_last_row_of_each_key_is_stored(spark: SparkSession, target: Target) -> None:
    target.write(rows_of(spark, 0, 1000, 10, partitions=3))
    assert target.values() == {f"k.{n}": b"%d" % (990 + n) for n in range(10)}
    assert len(target.log()) == 10


def test_a_large_partition_is_stored_by_its_task(spark: SparkSession, target: Target) -> None:
    target.write(rows_of(spark, 0, 5000, 5000))
    assert target.values() == {f"k.{n}": b"%d" % n for n in range(5000)}
    assert len(target.log()) == 5000


def test_operations_and_times_to_live(spark: SparkSession, target: Target) -> None:
    target.write(rows_of(spark, 0, 4, 4))
    rows = [
        ("k.0", "PUT", b"new", None),
        ("k.1", "DEL", None, None),
        ("k.2", "PURGE", None, None),
        ("k.4", None, b"brief", "1s"),
        ("k.5", None, b"long", "never"),
    ]
    target.write(spark.createDataFrame(rows, "key string, operation string, value binary, ttl string"))
    assert {"k.0": b"new", "k.3": b"3", "k.5": b"long"}.items() <= target.values().items()
    assert "k.1" not in target.values()
    assert "k.2" not in [key for key, data in target.log() if data]
