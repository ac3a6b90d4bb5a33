"""The `jetstream_kv` sink: what a bucket holds after batch and streaming writes, and after replays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, StreamConfig
from pyspark.errors import PySparkException

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.spark import upsert
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

IS_REMOTE = "JETSTREAM_EXT_SPARK_REMOTE" in os.environ  # Spark Connect, where a write does not know its query


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

    def revisions(self) -> dict[str, int]:
        async def read(js: JetStreamContext) -> dict[str, int]:
            snap = await kvx.snapshot(await js.key_value(self.name))
            return {key: entry.revision for key, entry in snap.items()}

        found: dict[str, int] = self.run(read)
        return found

    def markers(self) -> set[str]:
        """Return the subjects of the stored markers."""
        stream, subjects = f"KV_{self.name}", f"_spark.KV_{self.name}.>"
        info = self.run(lambda js: js.stream_info(stream, subjects_filter=subjects))
        return set(info.state.subjects or ())

    def log(self) -> list[tuple[str, bytes]]:
        """Return every stored message of a key, in order (history 1 keeps the newest one of each)."""

        async def read(js: JetStreamContext) -> list[tuple[str, bytes]]:
            messages = jsx.DirectGet(js, f"KV_{self.name}").scan(subject=f"$KV.{self.name}.>")
            return [(one.subject.removeprefix(f"$KV.{self.name}."), one.data) async for one in messages]

        found: list[tuple[str, bytes]] = self.run(read)
        return found


class Source:
    """A stream whose messages the tests read one micro-batch after the other."""

    def __init__(self, server: NatsServer, run: Callable[..., Any], name: str) -> None:
        self._server, self._run, self._name = server, run, name
        run(lambda js: js.add_stream(StreamConfig(name=name, subjects=[name], allow_direct=True)))

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.format("jetstream").options(servers=self._server.url).load(self._name)

    def publish(self, payloads: list[str]) -> None:
        async def publish(js: JetStreamContext) -> None:
            for payload in payloads:
                await js.publish(self._name, payload.encode())

        self._run(publish)


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


def test_a_later_partition_has_the_last_row(spark: SparkSession, target: Target) -> None:
    target.write(rows_of(spark, 0, 100, 1, partitions=4))
    assert target.log() == [("k.0", b"99")]


def test_the_keys_of_a_large_partition_must_not_be_in_another(spark: SparkSession, target: Target) -> None:
    frame = rows_of(spark, 0, 3000, 1500).unionAll(rows_of(spark, 0, 1, 1, partitions=1))
    with pytest.raises(PySparkException, match="1,501 keys of micro-batch 0 are in several of its partitions"):
        target.write(frame)
    target.write(frame.repartition(2, "key"))
    assert len(target.values()) == 1500


def test_a_batch_write_leaves_no_marker(spark: SparkSession, target: Target) -> None:
    target.write(rows_of(spark, 0, 10, 10))
    assert target.markers() == set()


def test_a_batch_write_that_fails_leaves_no_marker(spark: SparkSession, target: Target) -> None:
    frame = rows_of(spark, 0, 3000, 3000, partitions=1).selectExpr(
        "*", "if(value = '2999', 1L, null) AS expectedRevision"
    )
    with pytest.raises(PySparkException, match="its key is at revision 0, but its expectedRevision is 1"):
        target.write(frame)
    assert len(target.log()) == 2994  # the transactions before that of the bad row
    assert target.markers() == set()


def test_a_repeated_batch_write_with_an_id_stores_nothing(spark: SparkSession, target: Target) -> None:
    for _ in range(2):
        target.write(rows_of(spark, 0, 2500, 2500), writeId="run-1")
    assert len(target.log()) == 2500
    for version in (1, 1, 0):
        target.write(rows_of(spark, 0, 10, 10), txnAppId="app", txnVersion=str(version))
    assert len(target.log()) == 2510


def test_an_aggregation_is_upserted(spark: SparkSession, target: Target, server: NatsServer, tmp_path: Path) -> None:
    """Each micro-batch stores the keys that it has changed, and a replay stores none of them again."""
    source = Source(server, target.run, f"{target.name}IN")
    counts = source.frame(spark).selectExpr("string(data) AS key").groupBy("key").count()
    rows = counts.selectExpr("key", "string(count) AS value")
    options = {"txnAppId": "totals"} if IS_REMOTE else {}
    query = upsert(servers=server.url, bucket=target.name, **options)

    def run() -> None:
        writer = rows.writeStream.outputMode("update").foreachBatch(query).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination()

    source.publish(["a", "b", "a"])
    run()
    source.publish(["b", "c"])
    run()
    assert sorted(target.log()) == [("a", b"2"), ("b", b"1"), ("b", b"2"), ("c", b"1")]
    for name in ("1", ".1.crc"):
        (tmp_path / "commits" / name).unlink()
    run()
    assert target.values() == {"a": b"2", "b": b"2", "c": b"1"}
    assert len(target.log()) == 4


def test_several_upserts_of_a_query_into_one_bucket_need_names(
    spark: SparkSession, target: Target, server: NatsServer, tmp_path: Path
) -> None:
    """Without names, the second one would look like a repetition of the first, and its rows would be lost."""
    id_option = "txnAppId" if IS_REMOTE else "writeId"
    source = Source(server, target.run, f"{target.name}IN")
    source.publish(["x"])

    def run(checkpoint: str, **names: str) -> None:
        upserts = [
            upsert(servers=server.url, bucket=target.name, **({id_option: name} if name else {}))
            for name in names.values()
        ]

        def write(frame: DataFrame, batch: int) -> None:
            for name, store in zip(names, upserts, strict=True):
                store(frame.selectExpr(f"'{name}' AS key", "string(seq) AS value"), batch)

        writer = source.frame(spark).writeStream.foreachBatch(write).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination()

    refusal = "give jetstream_ext.spark.upsert a txnAppId" if IS_REMOTE else "a writeId of its own"
    with pytest.raises(PySparkException, match=refusal):
        run("unnamed", a="", b="")
    stored = [] if IS_REMOTE else [("a", b"1")]
    assert target.log() == stored
    run("named", b="first", c="second")
    for name in ("0", ".0.crc"):
        (tmp_path / "named" / "commits" / name).unlink()
    run("named", b="first", c="second")
    assert target.log() == [*stored, ("b", b"1"), ("c", b"1")]


def test_complete_mode_stores_what_has_changed(
    spark: SparkSession, target: Target, server: NatsServer, tmp_path: Path
) -> None:
    source = Source(server, target.run, f"{target.name}IN")
    counts = source.frame(spark).selectExpr("string(data) AS key").groupBy("key").count()
    rows = counts.selectExpr("key", "string(count) AS value")
    source.publish(["a", "b", "a"])
    target.stream(rows, tmp_path, "complete")
    source.publish(["b", "c"])
    target.stream(rows, tmp_path, "complete")
    assert sorted(target.log()) == [("a", b"2"), ("b", b"1"), ("b", b"2"), ("c", b"1")]


def test_update_mode_without_upsert_is_refused_by_spark(
    spark: SparkSession, target: Target, server: NatsServer, tmp_path: Path
) -> None:
    """If this fails, Spark has learned it: say so in the documentation, and let the examples use it."""
    source = Source(server, target.run, f"{target.name}IN")
    rows = source.frame(spark).selectExpr("string(data) AS key").groupBy("key").count().selectExpr("key", "'' AS value")
    with pytest.raises(PySparkException, match="does not support Update mode"):
        target.stream(rows, tmp_path, "update")


# -- what readers see ---------------------------------------------------------------------------------------------


def test_a_small_micro_batch_is_one_atomic_batch(spark: SparkSession, target: Target) -> None:
    """Every state that a reader can see has all of a micro-batch."""
    target.write(rows_of(spark, 0, 998, 998, partitions=4), writeId="first")
    target.write(rows_of(spark, 998, 1996, 998, partitions=4), writeId="second")

    async def batches(js: JetStreamContext) -> list[set[bytes]]:
        """Return the ids of the batches that the messages of each write were stored in."""
        found: list[set[bytes]] = [set(), set()]
        async for one in jsx.DirectGet(js, f"KV_{target.name}").scan(subject=f"$KV.{target.name}.>"):
            found[int(one.data) // 998].add(dict(one.raw_headers).get(b"Nats-Batch-Id", b""))
        return found

    first, second = target.run(batches)
    assert len(first) == len(second) == 1
    assert b"" not in first | second


def test_clients_do_not_see_the_records_of_the_sink(spark: SparkSession, target: Target, found: Any) -> None:
    target.write(rows_of(spark, 0, 3, 3), writeId="w")
    target.write(rows_of(spark, 0, 3000, 3000), txnAppId="a", txnVersion="1")
    assert target.markers()

    async def read(js: JetStreamContext) -> None:
        kv = await js.key_value(target.name)
        assert len(await found(kv.keys)) == 3000
        watcher = await kv.watchall()
        watched: set[str] = set()
        entry = None
        while len(watched) < 3000 or entry is not None:  # None: all that is stored, or nothing has arrived yet
            entry = await watcher.updates(timeout=10)
            watched |= {entry.key} if entry else set()
        await watcher.stop()
        assert watched == {f"k.{n}" for n in range(3000)}
        snap = await kvx.snapshot(kv)
        assert len(snap) == 3000
        assert set(await kvx.get_many(kv, ["k.1", "k.2"])) == {"k.1", "k.2"}
        async with kvx.Table(kv) as table:
            assert set(table) == set(snap)

    target.run(read)
    rows = spark.read.format("jetstream_kv").options(servers=target.server.url, includeDeleted="true").load(target.name)
    assert rows.count() == 3000


def test_a_bucket_that_lost_the_place_for_markers_goes_on_when_it_has_it_again(
    spark: SparkSession, target: Target, server: NatsServer, tmp_path: Path
) -> None:
    source = Source(server, target.run, f"{target.name}IN")
    rows = source.frame(spark).selectExpr("string(data) AS key", "string(seq) AS value")
    source.publish(["a", "b"])
    target.stream(rows, tmp_path)

    async def edit(js: JetStreamContext) -> None:
        config = (await js.stream_info(f"KV_{target.name}")).config
        await js.update_stream(config.evolve(subjects=[f"$KV.{target.name}.>"]))

    target.run(edit)
    source.publish(["a", "c"])
    with pytest.raises(PySparkException, match=r"does not store '_spark\.KV_.*>', where the sink keeps its markers"):
        target.stream(rows, tmp_path)

    async def enable(js: JetStreamContext) -> None:
        await kvx.enable(await js.key_value(target.name), spark=True)

    target.run(enable)
    target.stream(rows, tmp_path)
    assert sorted(target.log()) == [("a", b"1"), ("a", b"3"), ("b", b"2"), ("c", b"4")]


# -- rows that cannot be stored -----------------------------------------------------------------------------------


def test_bad_rows_are_dropped_or_diverted(spark: SparkSession, target: Target, stream_name: Callable[[], str]) -> None:
    """`test_kv_rows` has every kind of bad row."""
    rows = [("good", "PUT", b"1"), ("bad", "PATCH", b"2"), (None, "PUT", b"3"), ("bad", "DEL", b"4")]
    frame = spark.createDataFrame(rows, "key string, operation string, value binary").coalesce(1)
    target.write(frame, onBadRow="drop")
    assert target.values() == {"good": b"1"}
    letters = stream_name()
    target.run(lambda js: js.add_stream(name=letters, subjects=[f"bad.{letters}"]))
    for _ in range(2):
        target.write(frame, onBadRow=f"bad.{letters}", writeId="w")

    async def read(js: JetStreamContext) -> list[tuple[bytes | None, str | None]]:
        count = (await js.stream_info(letters)).state.messages
        found = [await js.get_msg(letters, seq) for seq in range(1, count + 1)]
        return [(one.data, (one.headers or {}).get("Dead-Letter-Key")) for one in found]

    assert sorted(target.run(read)) == [(b"2", "bad"), (b"3", None), (b"4", "bad")]


def test_the_sink_needs_little_of_the_size_of_a_value(
    spark: SparkSession, server: NatsServer, with_js: Callable[..., Any], stream_name: Callable[[], str]
) -> None:
    target = Target(server, with_js, stream_name(), max_value_size=1024)
    rows = spark.range(0, 1500, 1, 1).selectExpr("concat('k.', id) AS key", "repeat('x', 850) AS value")
    target.write(rows.limit(10))
    target.write(rows)
    assert set(target.values().values()) == {b"x" * 850}
    with pytest.raises(PySparkException, match=r"more than the stream's max_msg_size \(1024\)"):
        target.write(rows.selectExpr("key", "repeat('x', 1000) AS value"))


def test_a_full_bucket_is_named(
    spark: SparkSession, server: NatsServer, with_js: Callable[..., Any], stream_name: Callable[[], str]
) -> None:
    target = Target(server, with_js, stream_name(), max_bytes=10_000)
    rows = spark.range(0, 100, 1, 1).selectExpr("concat('k.', id) AS key", "repeat('x', 850) AS value")
    with pytest.raises(PySparkException, match=rf"bucket '{target.name}', micro-batch 0: .*: maximum bytes exceeded"):
        target.write(rows)
    assert target.values() == {}


# -- expected revisions -------------------------------------------------------------------------------------------


def test_a_row_is_stored_only_at_its_expected_revision(spark: SparkSession, target: Target) -> None:
    target.write(spark.createDataFrame([("a", "1"), ("b", "1"), ("gone", "1")], "key string, value string").coalesce(1))
    revisions = target.revisions()
    target.write(spark.createDataFrame([("gone", "DEL")], "key string, operation string"))
    rows = [
        ("a", "2", revisions["a"]),
        ("b", "2", revisions["b"] + 100),
        ("new", "2", 0),
        ("gone", "2", 0),
        ("other", "2", None),
    ]
    frame = spark.createDataFrame(rows, "key string, value string, expectedRevision long")
    with pytest.raises(PySparkException, match=r"its key is at revision \d+, but its expectedRevision is \d+"):
        target.write(frame)
    assert target.values() == {"a": b"1", "b": b"1"}
    target.write(frame, onBadRow="drop")
    assert target.values() == {"a": b"2", "b": b"1", "new": b"2", "gone": b"2", "other": b"2"}


def test_expected_revisions_in_a_large_partition(spark: SparkSession, target: Target) -> None:
    """Every row has an expectation, so a message of the sink's own carries the fence."""
    frame = rows_of(spark, 0, 3000, 3000, partitions=1).selectExpr("*", "0L AS expectedRevision")
    target.write(rows_of(spark, 0, 3, 3))
    target.write(frame, onBadRow="drop")
    assert len(target.values()) == 3000
    assert len(target.log()) == 3000


# -- checks on the driver -----------------------------------------------------------------------------------------


def test_a_bucket_without_a_place_for_markers_is_refused(
    spark: SparkSession, server: NatsServer, with_js: Callable[..., Any], stream_name: Callable[[], str]
) -> None:
    bucket = stream_name()
    with_js(lambda js: js.create_key_value(KeyValueConfig(bucket=bucket)))
    writer = rows_of(spark, 0, 1, 1).write.format("jetstream_kv").options(servers=server.url, bucket=bucket)
    with pytest.raises(PySparkException, match=r"enable it with `await jetstream_ext.kv.enable\(kv, spark=True\)`"):
        writer.mode("append").save()


def test_a_bucket_that_drops_its_oldest_messages_is_refused(
    spark: SparkSession, server: NatsServer, with_js: Callable[..., Any], stream_name: Callable[[], str]
) -> None:
    target = Target(server, with_js, stream_name(), max_bytes=10_000)

    async def edit(js: JetStreamContext) -> None:
        config = (await js.stream_info(f"KV_{target.name}")).config
        await js.update_stream(config.evolve(discard=DiscardPolicy.OLD))

    with_js(edit)
    with pytest.raises(PySparkException, match="drops its oldest messages when it is full"):
        target.write(rows_of(spark, 0, 1, 1))
