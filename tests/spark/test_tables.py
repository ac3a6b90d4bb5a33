"""Tables of Spark's catalog, to which Spark passes no options, and what works instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig

from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS = {
    "jetstream": ("stream", "SUBJECT string, Data binary", "subject"),
    "jetstream_kv": ("bucket", "KEY string, Value binary", "key"),
}


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    """The name of a table, which is dropped after the test."""
    yield "a_table"
    spark.sql("DROP TABLE IF EXISTS a_table")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_catalog_table_says_what_to_use_instead(
    spark: SparkSession, server: NatsServer, stream_name: Callable[[], str], with_js: Any, table: str, kind: str
) -> None:
    from pyspark.errors import AnalysisException

    (target, columns, text), name = FORMATS[kind], stream_name()

    async def fill(js: JetStreamContext) -> None:
        if kind == "jetstream":
            await js.add_stream(StreamConfig(name=name, subjects=[name], allow_direct=True, allow_batched=True))
            await js.publish(name, b"v")
        else:
            await (await js.create_key_value(KeyValueConfig(bucket=name, direct=True))).put(name, b"v")

    with_js(fill)
    using = f"USING {kind} OPTIONS (servers '{server.url}', {target} '{name}')"
    advice = f"CREATE TEMPORARY VIEW … USING {kind} OPTIONS"
    with pytest.raises(AnalysisException, match=advice):
        spark.sql(f"CREATE TABLE {table} {using}")
    spark.sql(f"CREATE TABLE {table} ({columns}) {using}")  # Spark asks no source
    for statement in (f"SELECT * FROM {table}", f"INSERT INTO {table} VALUES ('{name}', X'00')"):
        with pytest.raises(AnalysisException, match=advice):
            spark.sql(statement).collect()
    spark.sql(f"DROP TABLE {table}")
    with pytest.raises(AnalysisException, match=advice):
        spark.sql(f"CREATE TABLE {table} {using} AS SELECT '{name}' AS {text}, X'00' AS data")
    rows = spark.sql(f"SELECT '{name}' AS {text}, X'00' AS {columns.split()[2].lower()}")
    with pytest.raises(AnalysisException, match="saveAsTable and toTable do not pass the name of the table on"):
        rows.write.format(kind).option("servers", server.url).mode("append").saveAsTable(table)
    with pytest.raises(Exception, match="partitioning or clustering columns do not match"):
        rows.write.format(kind).options(servers=server.url, **{target: name}).mode("append").partitionBy(text).save()
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW a_view {using}")
    [found] = spark.sql(f"SELECT {text} FROM a_view").collect()
    [same] = spark.read.format(kind).option("servers", server.url).schema(columns).load(name).collect()
    assert (found[0], tuple(same.asDict())) == (
        name,
        tuple(columns.replace(" string", "").replace(" binary", "").split(", ")),
    )
    assert (same[0], same[1]) == (name, b"v")
