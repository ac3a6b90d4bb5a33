"""The `jetstream_kv` sink through a leaf node writes to the bucket of the domain that its options name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clients import connected, emptied

import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


async def prepare(url: str, twin: bool) -> None:
    async with connected(url) as nc:
        for domain in ("hub", "leaf"):
            js = await emptied(nc, domain)
            if twin or domain == "hub":
                await kvx.ensure_bucket(js, "B", spark=True)


async def keys(url: str, domain: str) -> set[str]:
    async with connected(url) as nc:
        return set(await kvx.snapshot(await nc.jetstream(domain=domain, timeout=10).key_value("B")))


@pytest.mark.parametrize("twin", [False, True], ids=["alone", "beside a bucket of that name"])
def test_rows_are_written_to_the_bucket_of_the_domain(
    leaf: NatsServer, spark: SparkSession, tmp_path: Path, twin: bool
) -> None:
    asyncio.run(prepare(leaf.url, twin))
    options = {"servers": leaf.url, "bucket": "B", "domain": "hub"}
    rows = spark.range(20).selectExpr("concat('k', id) AS key", "cast(cast(id AS string) AS binary) AS value")
    rows.write.format("jetstream_kv").options(**options).mode("append").save()
    rows.write.mode("overwrite").parquet(str(tmp_path / "rows"))
    stream = (
        spark.readStream.schema(rows.schema)
        .parquet(str(tmp_path / "rows"))
        .selectExpr("concat('s', key) AS key", "value")
    )
    writer = stream.writeStream.format("jetstream_kv").options(**options).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    found = asyncio.run(keys(leaf.url, "hub"))
    assert found == {f"k{n}" for n in range(20)} | {f"sk{n}" for n in range(20)}
    if twin:
        assert asyncio.run(keys(leaf.url, "leaf")) == set()
