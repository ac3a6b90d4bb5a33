"""``df.write.format("jetstream")`` and ``df.writeStream`` against a real server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    def make_stream(**config: Any) -> str:
        name = stream_name()
        defaults = StreamConfig(
            name=name,
            subjects=[f"{name}.*", f"_spark.{name}.>"],
            allow_direct=True,
            allow_batched=True,
            allow_atomic=True,
        )
        with_js(lambda js: js.add_stream(defaults.evolve(**config)))
        return name

    return make_stream


@pytest.fixture
def stored(with_js: Any) -> Callable[[str], list[jsx.StoredMsg]]:
    return lambda name: with_js(lambda js: jsx.DirectGet(js, name).scan(subject=f"{name}.*").to_list())


@pytest.fixture
def write(server: NatsServer) -> Callable[..., DataFrameWriter]:
    def writer(frame: DataFrame, name: str, **options: str) -> DataFrameWriter:
        given = {"servers": server.url, "stream": name, "requestTimeout": "5"} | options
        return frame.write.format("jetstream").mode("append").options(**given)

    return writer


def failure(action: Callable[[], object]) -> str:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def rows(spark: SparkSession, name: str, count: int, parts: int = 2) -> DataFrame:
    expressions = [f"concat('{name}.', id % 3) AS subject", "CAST(id AS string) AS data"]
    return spark.range(0, count, numPartitions=parts).selectExpr(*expressions)


def test_a_frame_is_stored(cell: Any, spark: SparkSession, make: Any, write: Any, stored: Any) -> None:
    for semantics in ["dedupe", "transactional", "none"]:
        with cell(semantics):
            name = make()
            write(rows(spark, name, 3000), name, semantics=semantics).save()
            found = stored(name)
            assert Counter(message.data for message in found) == Counter(b"%d" % row for row in range(3000))
            assert all(message.subject == f"{name}.{int(message.data) % 3}" for message in found)


def test_every_kind_of_column_is_stored(cell: Any, spark: SparkSession, make: Any, write: Any, stored: Any) -> None:
    for semantics in ["dedupe", "transactional"]:
        with cell(semantics):
            name = make()
            one = "map('A', '1', 'B', 'two words') AS headers"
            frame = spark.range(1).selectExpr("CAST('x' AS binary) AS data", one)
            write(frame, name, subject=f"{name}.s", semantics=semantics).save()
            frame = spark.range(1).selectExpr(
                f"'{name}.t' AS SUBJECT", "CAST(null AS binary) AS data", "map('C', array('1')) AS Headers"
            )
            write(frame, name, semantics=semantics).save()
            frame = spark.range(1).selectExpr(
                f"'{name}.u' AS subject", "'ü' AS data", "CAST(null AS map<string,string>) AS headers"
            )
            write(frame, name, semantics=semantics).save()
            ours = [
                {key: value for key, value in m.headers.items() if not key.startswith("Nats-")} for m in stored(name)
            ]
            assert ours == [{"A": "1", "B": "two words"}, {"C": "1"}, {}]
            assert [message.data for message in stored(name)] == [b"x", b"", "ü".encode()]


def test_ids_of_the_user_deduplicate(spark: SparkSession, make: Any, write: Any, stored: Any) -> None:
    name = make()
    frame = spark.range(10).selectExpr(
        f"'{name}.a' AS subject", "CAST(id AS string) AS data", "CASE WHEN id < 5 THEN concat('id-', id) END AS msgId"
    )
    for _ in range(2):
        write(frame, name).save()
    # Rows without an id get one of this write.
    assert Counter(int(message.data) for message in stored(name)) == {row: 1 if row < 5 else 2 for row in range(10)}


def test_a_write_with_a_write_id_can_be_repeated(
    cell: Any, spark: SparkSession, make: Any, write: Any, stored: Any
) -> None:
    for semantics in ["dedupe", "transactional"]:
        with cell(semantics):
            name = make()
            options = {"writeId": "run-7", "semantics": semantics}
            if semantics == "transactional":
                options["sinkPartitions"] = "2"
            for _ in range(2):
                write(rows(spark, name, 3000), name, **options).save()
            assert len(stored(name)) == 3000


def test_a_copy_of_a_stream_is_complete(
    spark: SparkSession, make: Any, write: Any, stored: Any, with_js: Any, server: NatsServer
) -> None:
    one, other = make(), make(subjects=["copy.>", "_spark.copy.>"])

    async def publish(js: JetStreamContext) -> None:
        for i in range(10):
            await js.publish(
                f"{one}.a", b"%d" % i, headers={"Nats-Msg-Id": f"{i}", "Nats-Expected-Stream": one, "K": f"{i}"}
            )

    with_js(publish)
    frame = spark.read.format("jetstream").option("servers", server.url).load(one)
    copy = frame.selectExpr(
        "concat('copy.', subject) AS subject", "data", "headers", "concat(stream, ':', seq) AS msgId"
    )
    for _ in range(2):
        write(copy, other).save()
    found = with_js(lambda js: jsx.DirectGet(js, other).scan().to_list())
    # Each partition keeps its order; either of the two may be stored first.
    assert sorted(((m.headers["K"], m.headers) for m in found), key=lambda pair: pair[0]) == [
        (f"{i}", {"Nats-Msg-Id": f"{one}:{i + 1}", "K": f"{i}"}) for i in range(10)
    ]


class TestRefusals:
    def test_only_append_is_accepted(self, cell: Any, spark: SparkSession, make: Any, write: Any, stored: Any) -> None:
        def check(mode: str) -> None:
            name = make()
            text = failure(lambda: write(rows(spark, name, 5), name).mode(mode).save())
            # Spark itself refuses the modes that no Python source can have.
            assert "append" in text.lower() or f"{mode} is not supported" in text
            assert stored(name) == []

        for mode in ["overwrite", "ignore", "errorifexists"]:
            with cell(mode):
                check(mode)

    def test_a_row_that_cannot_be_a_message_fails_the_write(
        self, spark: SparkSession, make: Any, write: Any, stored: Any
    ) -> None:
        name = make()
        frame = spark.sql(f"SELECT '{name}.a' AS subject, 'x' AS data, map('Nats-Rollup', 'all') AS headers")
        text = "partition 0 of micro-batch 0: row 0 cannot be stored: its header 'Nats-Rollup' is an instruction to the server"
        assert text in failure(lambda: write(frame, name).save())
        assert stored(name) == []


def test_a_write_with_a_number_of_partitions_that_was_too_small_can_be_completed(
    spark: SparkSession, make: Any, write: Any, stored: Any
) -> None:
    name = make()
    options = {"semantics": "transactional", "writeId": "w"}
    text = failure(lambda: write(rows(spark, name, 2000, 3), name, sinkPartitions="2", **options).save())
    assert "sinkPartitions is 2. Nothing of this partition was stored. Set sinkPartitions to the number of" in text
    for _ in range(2):
        write(rows(spark, name, 2000, 3), name, sinkPartitions="3", **options).save()
        assert len(stored(name)) == 2000


def test_a_query_stores_each_row_once(
    spark: SparkSession, make: Any, stored: Any, with_js: Any, server: NatsServer, tmp_path: Path
) -> None:
    source, sink = make(), make()

    async def publish(js: JetStreamContext) -> None:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{source}.a", b"%d" % i) for i in range(3000))

    def run() -> Any:
        frame = spark.readStream.format("jetstream").option("servers", server.url)
        if hasattr(spark, "version") and tuple(map(int, spark.version.split(".")[:2])) >= (4, 2):
            frame = frame.option("maxOffsetsPerTrigger", "1300")
        out = frame.load(source).selectExpr(f"'{sink}.b' AS subject", "data")
        options = {"servers": server.url, "stream": sink, "semantics": "transactional", "sinkPartitions": "2"}
        query = (
            out.writeStream.format("jetstream")
            .options(**options)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    for round_ in (1, 2):
        with_js(publish)
        query = run()
        assert query.lastProgress["sources"][0]["endOffset"]
        expected = {b"%d" % i: round_ for i in range(3000)}
        assert Counter(message.data for message in stored(sink)) == expected
    found = with_js(lambda js: jsx.DirectGet(js, sink).scan(subject="_spark.>").to_list())
    assert {json.loads(message.data).get("partitions") for message in found} == {2}


def test_versions_in_foreach_batch_store_each_row_once(
    spark: SparkSession, make: Any, stored: Any, with_js: Any, server: NatsServer, tmp_path: Path
) -> None:
    source, sink = make(), make(allow_rollup_hdrs=True)
    options = {"servers": server.url, "stream": sink, "subject": f"{sink}.b", "txnAppId": "app"}
    options |= {"semantics": "transactional", "sinkPartitions": "2"}

    async def publish(js: JetStreamContext) -> None:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many((f"{source}.a", b"%d" % i) for i in range(3000))

    # With Spark Connect, Spark pickles it.
    def save(frame: DataFrame, batch: int) -> None:
        for _ in range(2):
            writer = frame.select("data").write.format("jetstream").mode("append")
            writer.options(**options, txnVersion=f"{batch}").save()

    def run() -> None:
        frame = spark.readStream.format("jetstream").option("servers", server.url).load(source)
        writer = frame.writeStream.foreachBatch(save).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    for round_ in (1, 2):
        with_js(publish)
        run()
        assert Counter(message.data for message in stored(sink)) == {b"%d" % i: round_ for i in range(3000)}
    # More than the buffers between Spark and its workers hold; the tasks do not read it.
    save(spark.range(0, 200_000, numPartitions=2).selectExpr("repeat('x', 100) AS data"), 0)
    assert len(stored(sink)) == 6000
