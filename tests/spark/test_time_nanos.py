"""The column ``timeNanos``: the stored time as nanoseconds since 1970, in reads whose schema names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.types import LongType, StructType

import jetstream_ext as jsx
from jetstream_ext.errors import ResponseError
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.headers import parse_time_ns
from jetstream_ext.spark.reading import columns_of
from jetstream_ext.spark.source import JetStreamDataSource, SchemaError
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DDL = "seq long, timeNanos long, data binary"


@pytest.fixture
def stream(with_js: Any, stream_name: Callable[[], str]) -> str:
    """A stream with messages whose times have any number of digits."""
    name = stream_name()

    async def fill(js: JetStreamContext) -> None:
        await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{name}.{number % 3}", b"%d" % number) for number in range(2000))

    with_js(fill)
    return name


@pytest.fixture
def times(with_js: Any, stream: str) -> dict[int, int]:
    """The stored times by sequence, as a direct get returns them."""
    messages = with_js(lambda js: jsx.DirectGet(js, stream).scan().to_list())
    return {message.seq: message.time_ns for message in messages}


def test_it_is_exact(
    spark: SparkSession, server: NatsServer, stream: str, times: dict[int, int], tmp_path: Path
) -> None:
    read = spark.read.format("jetstream").option("servers", server.url)
    rows = read.schema(DDL).load(stream).collect()
    assert {row.seq: row.timeNanos for row in rows} == times
    assert len(set(times.values())) > 1000
    filtered = read.schema("timeNanos long, seq long, time timestamp").option("subjects", f"{stream}.1").load(stream)
    found = filtered.selectExpr("seq", "timeNanos", "unix_micros(time) AS micros").collect()
    assert {row.seq: (row.timeNanos, row.micros) for row in found} == {
        seq: (time, time // 1000) for seq, time in times.items() if seq % 3 == 2
    }
    assert "timeNanos" not in spark.read.format("jetstream").option("servers", server.url).load(stream).columns
    query = spark.readStream.format("jetstream").option("servers", server.url).schema(DDL).load(stream)
    out = str(tmp_path / "out")
    writer = query.writeStream.format("parquet").option("path", out).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    stored = spark.read.schema(DDL).parquet(out).collect()
    assert {row.seq: row.timeNanos for row in stored} == times


def test_another_type_is_refused() -> None:
    source = JetStreamDataSource({"servers": "nats://n", "stream": "A"})
    schema = StructType().add("timeNanos", "timestamp")
    for make in (source.reader, source.streamReader):
        with pytest.raises(SchemaError, match="column 'timeNanos' is bigint, not timestamp"):
            make(schema)


def batch(*times: bytes) -> pa.RecordBatch:
    heads = [
        b"NATS/1.0\r\nNats-Stream: A\r\nNats-Subject: a\r\nNats-Sequence: 1\r\nNats-Time-Stamp: %b\r\n"
        b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n" % time
        for time in times
    ]
    block = Block("A", list(range(1, len(heads) + 1)), heads, [len(head) for head in heads])
    return columns_of(StructType().add("timeNanos", LongType())).batch(block)


def test_times_of_any_precision_are_exact(cell: Any) -> None:
    for others in [[], [b"2026-11-20 21:23:31.5 +0000 UTC"]]:
        with cell(others):
            times = [
                b"2026-11-20T21:23:31.123456789Z",
                b"2026-11-20T21:23:31Z",
                b"1999-12-31T23:59:59.999999999Z",
                b"1970-01-01T00:00:00.000000001Z",
                b"1969-12-31T23:59:59.9Z",
                b"2262-04-11T23:47:16.854775807Z",
                *others,
            ]
            assert batch(*times).column("timeNanos").to_pylist() == [parse_time_ns(time) for time in times]


def test_a_time_beyond_64_bits_is_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid, match="only times of the years 1678 to 2261"):
        batch(b"2300-01-01T00:00:00Z")
    with pytest.raises(ResponseError, match="is a time that is not RFC 3339"):
        batch(b"yesterday")
