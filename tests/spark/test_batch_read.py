"""``spark.read.format("jetstream")`` against a real server."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nkeys
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructType, TimestampNTZType

import jetstream_ext as jsx
import jetstream_ext.spark
from jetstream_ext import log
from jetstream_ext.spark.source import JetStreamDataSource, SchemaError
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession

# The JVM starts once for all of them.

DDL = "stream string, seq bigint, subject string, time timestamp, data binary, headers map<string,array<string>>"


@pytest.fixture
def read(spark: SparkSession, server: NatsServer) -> Callable[..., DataFrameReader]:
    """Return the reader of a new query, with the address of the server."""

    def reader(**options: str) -> DataFrameReader:
        return spark.read.format("jetstream").options(**({"servers": server.url, "requestTimeout": "5"} | options))

    return reader


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    """Make a stream with some messages."""

    def make_stream(messages: int = 0, *, then: Any = None, **config: Any) -> str:
        name = stream_name()

        async def fill(js: JetStreamContext) -> None:
            defaults = StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_batched=True)
            await js.add_stream(defaults.evolve(**config))
            if messages:
                async with jsx.FastPublisher(js) as publisher:
                    await publisher.add_many((f"{name}.{i % 10}", b"%d" % i) for i in range(1, messages + 1))
            if then is not None:
                await then(js, name)

        with_js(fill)
        return name

    return make_stream


def failure(action: Callable[[], object]) -> str:
    """Return the text of the error that Spark raises."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


class Repeated(dict[str, str]):
    """Headers with a name that occurs twice."""

    def items(self) -> Any:
        return [*super().items(), ("B", "b"), ("A", "2")]

    def copy(self) -> Repeated:
        return Repeated(self)


def test_every_column_is_right(
    spark: SparkSession, read: Callable[..., DataFrameReader], make: Callable[..., str], with_js: Any
) -> None:
    spoofed = {"Nats-Sequence": "999", "Nats-Subject": "no", "Nats-Num-Pending": "0", "Y": "y"}

    async def publish(js: JetStreamContext, name: str) -> None:
        await js.publish(f"{name}.a", b"\x00\xff")
        await js.publish(f"{name}.b", b"", headers={"X-One": "1", "X-Two": "two words"})
        await js.publish(f"{name}.c", b"gone")
        # These headers would mislead a reader that uses the first header of a name. Republished messages store such ones.
        await js.publish(f"{name}.d", b"spoof", headers=spoofed)
        await js.publish(f"{name}.e", b"", headers=Repeated(A="1"))
        await js.delete_msg(name, 3)

    name = make(then=publish)
    frame = read().load(name)
    assert frame.schema.simpleString() == f"struct<{DDL.replace(' ', ':').replace(',:', ',')}>"
    rows = {row.seq: row for row in frame.collect()}
    assert sorted(rows) == [1, 2, 4, 5]
    assert [row.stream for row in rows.values()] == [name] * 4
    assert {seq: row.subject.removeprefix(name) for seq, row in rows.items()} == {1: ".a", 2: ".b", 4: ".d", 5: ".e"}
    assert {seq: bytes(row.data) for seq, row in rows.items()} == {1: b"\x00\xff", 2: b"", 4: b"spoof", 5: b""}
    assert rows[1].headers == {}
    assert rows[2].headers == {"X-One": ["1"], "X-Two": ["two words"]}
    assert rows[4].headers == {name: [value] for name, value in spoofed.items()}
    assert rows[5].headers == {"A": ["1", "2"], "B": ["b"]}

    async def stored(js: JetStreamContext) -> dict[int, datetime]:
        direct = jsx.DirectGet(js, name)
        return {message.seq: message.time for message in await direct.scan().to_list()}

    micros = frame.selectExpr("seq", "unix_micros(time) AS micros").collect()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert {row.seq: epoch + timedelta(microseconds=row.micros) for row in micros} == with_js(stored)


def test_the_state_of_a_worker(read: Callable[..., DataFrameReader], make: Callable[..., str], with_js: Any) -> None:
    """A key that was deleted is a row with ``KV-Operation: DEL``."""

    async def work(js: JetStreamContext, name: str) -> None:
        def toggle(msg: jsx.StoredMsg, state: log.State) -> None:
            if state.pop("odd", None) is None:
                state["odd"] = msg.data

        reader = log.LogReader(js, name, subject=f"{name}.in")
        for data in (b"1", b"2"):
            await js.publish(f"{name}.in", data)
            await log.exactly_once(reader, name, toggle, name="w", prefix=f"{name}.at", state=f"{name}.state")

    name = make(then=work, allow_atomic=True)
    rows = sorted(read(subjects=f"{name}.state.>").load(name).collect(), key=lambda row: int(row.seq))
    assert [(row.subject, bytes(row.data), row.headers.get("KV-Operation")) for row in rows] == [
        (f"{name}.state.w.odd", b"1", None),
        (f"{name}.state.w.odd", b"", ["DEL"]),
    ]


def test_a_schema_selects_the_columns(read: Callable[..., DataFrameReader], make: Callable[..., str]) -> None:
    name = make(3)
    assert sorted(map(tuple, read().schema("seq long").load(name).collect())) == [(1,), (2,), (3,)]
    rows = read().schema("data binary, stream string, seq long").load(name).collect()
    assert sorted((bytes(row[0]), row[1], row[2]) for row in rows) == [(b"%d" % i, name, i) for i in (1, 2, 3)]
    assert read().schema(DDL).load(name).count() == 3


def test_an_unsupported_schema_is_refused(cell: Any) -> None:
    source = JetStreamDataSource({"servers": "nats://n", "stream": "A"})
    for name, kind, message in [
        ("nope", BinaryType(), f"column 'nope' does not exist; the format has: {DDL}"),
        ("value", BinaryType(), "column 'value' does not exist; the format has: stream string"),
        ("sec", LongType(), "; did you mean 'seq'?"),
        ("data", StringType(), "column 'data' is binary, not string; declare that type and cast the column"),
        ("seq", IntegerType(), "column 'seq' is bigint, not int"),
        ("time", TimestampNTZType(), "column 'time' is timestamp, not timestamp_ntz"),
        ("headers", MapType(StringType(), StringType()), "is map<string,array<string>>, not map<string,string>"),
    ]:
        with cell(name, kind), pytest.raises(SchemaError, match=re.escape(message)):
            source.reader(StructType().add(name, kind))


def test_limit_stops_early(read: Callable[..., DataFrameReader], make: Callable[..., str]) -> None:
    name = make(100_000)
    for _ in range(3):
        assert len(read().load(name).limit(5).collect()) == 5
    assert read().load(name).count() == 100_000


def test_messages_larger_than_a_request_are_read(
    read: Callable[..., DataFrameReader], make: Callable[..., str]
) -> None:
    async def publish(js: JetStreamContext, name: str) -> None:
        for i in range(20):
            await js.publish(f"{name}.a", bytes([i]) * 900_000)

    frame = read().load(make(then=publish))
    assert {row.seq: (len(row.data), row.data[0]) for row in frame.collect()} == {
        i + 1: (900_000, i) for i in range(20)
    }


def test_options_are_checked_when_the_frame_is_made(read: Callable[..., DataFrameReader]) -> None:
    text = failure(lambda: read(password="hunter2").load("ANY"))
    assert "use 'passwordEnv'" in text
    assert "hunter2" not in text


def test_streams_are_checked_on_the_driver(
    read: Callable[..., DataFrameReader], make: Callable[..., str], stream_name: Callable[[], str]
) -> None:
    missing, closed = stream_name(), make(allow_direct=False)
    text = failure(lambda: read().load(missing).collect())
    assert f"stream '{missing}' does not exist" in text
    assert "PYTHON_DATA_SOURCE_ERROR" in text  # at planning: no task has failed
    text = failure(lambda: read().load(closed).collect())
    assert f"stream '{closed}': direct get is disabled" in text
    assert f"jetstream-ext enable {closed} --direct" in text


def test_sql_works_after_registering_twice(spark: SparkSession, server: NatsServer, make: Callable[..., str]) -> None:
    name = make(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Spark warns that the format is registered already
        jetstream_ext.spark.register(spark)
    spark.sql(f"CREATE TEMPORARY VIEW {name} USING jetstream OPTIONS (servers '{server.url}', stream '{name}')")
    assert spark.sql(f"SELECT sum(CAST(CAST(data AS string) AS int)) AS total FROM {name}").first().total == 28


def test_a_credentials_file_shipped_by_spark_is_found(spark: SparkSession, with_js: Any, tmp_path: Path) -> None:
    seed = tmp_path / "shipped.nk"
    seed.write_bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    public = nkeys.from_seed(bytearray(seed.read_bytes())).public_key.decode()
    spark.sparkContext.addFile(str(seed))

    async def fill(js: JetStreamContext) -> None:
        await js.add_stream(name="A", subjects=["a"], allow_direct=True)
        await js.publish("a", b"")

    with NatsServer(config=f"authorization {{users: [{{nkey: {public}}}]}}") as server:
        with_js(fill, server.url, nkeys_seed=str(seed))
        shipped = spark.read.format("jetstream").options(servers=server.url, nkeyFile="shipped.nk")
        assert shipped.load("A").count() == 1
        missing = spark.read.format("jetstream").options(servers=server.url, nkeyFile="other.nk")
        assert "'nkeyFile': the file 'other.nk' does not exist on this node" in failure(
            lambda: missing.load("A").count()
        )
