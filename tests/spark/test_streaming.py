"""``spark.readStream.format("jetstream")`` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.spark import lag
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Query:
    """A streaming query from a stream into Parquet."""

    def __init__(self, spark: SparkSession, server: NatsServer, folder: Path) -> None:
        self._spark, self._server = spark, server
        self.out, self.checkpoint = folder / "out", folder / "checkpoint"

    @property
    def limited(self) -> bool:
        """Whether this Spark limits micro-batches."""
        return tuple(map(int, self._spark.version.split(".")[:2])) >= (4, 2)

    def start(self, stream: str, now: bool = True, failing: str = "", **options: str) -> Any:
        source = self._spark.readStream.format("jetstream").options(**({"servers": self._server.url} | options))
        frame = source.load(stream).select("stream", "seq", "data")
        if failing:
            frame = frame.where(f"raise_error('{failing}') IS NULL")
        writer = frame.writeStream.format("parquet")
        writer = writer.options(path=str(self.out), checkpointLocation=str(self.checkpoint))
        return (writer.trigger(availableNow=True) if now else writer).start()

    def run(self, stream: str, **options: str) -> Any:
        query = self.start(stream, **options)
        query.awaitTermination()
        return query

    def seqs(self) -> list[int]:
        rows = self._spark.read.schema("stream string, seq long, data binary").parquet(str(self.out)).collect()
        assert all(bytes(row.data) == b"%d" % row.seq for row in rows)
        return sorted(row.seq for row in rows)

    def offsets(self) -> list[dict[str, Any]]:
        """The offsets in Spark's write-ahead log."""
        paths = sorted((self.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        return [json.loads(path.read_text().splitlines()[2]) for path in paths]

    def forget(self, folder: str) -> None:
        """Remove the newest entry of a log of the checkpoint."""
        newest = max((path for path in (self.checkpoint / folder).glob("[0-9]*")), key=lambda path: int(path.name))
        (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
        newest.unlink()


@pytest.fixture
def query(spark: SparkSession, server: NatsServer, tmp_path: Path) -> Query:
    return Query(spark, server, tmp_path)


@pytest.fixture
def more(with_js: Any) -> Callable[[str, int], None]:
    """Publish messages whose payloads are their sequences."""

    def publish(stream: str, count: int) -> None:
        async def many(js: JetStreamContext) -> None:
            last = (await js.stream_info(stream)).state.last_seq
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((f"{stream}.a", b"%d" % (last + i)) for i in range(1, count + 1))

        with_js(many)

    return publish


@pytest.fixture
def make(with_js: Any, more: Any, stream_name: Callable[[], str]) -> Callable[[int], str]:
    def stream(count: int) -> str:
        name = stream_name()
        config = StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True)
        with_js(lambda js: js.add_stream(config))
        if count:
            more(name, count)
        return name

    return stream


def test_a_restart_continues_at_the_offset(query: Query, make: Any, more: Any) -> None:
    name = make(100)
    query.run(name)
    more(name, 50)
    query.run(name)
    query.run(name)
    assert query.seqs() == list(range(1, 151))
    assert [offset["streams"][name]["seq"] for offset in query.offsets()][-1] == 150
    assert all(list(offset) == ["v", "streams"] and offset["v"] == 2 for offset in query.offsets())


def test_limits_bound_micro_batches_and_lag_counts_the_rest(query: Query, make: Any) -> None:
    if not query.limited:
        pytest.skip("Spark 4.2 has limits")
    name = make(100)
    done = query.run(name, maxOffsetsPerTrigger="30")
    assert [offset["streams"][name]["seq"] for offset in query.offsets()] == [30, 60, 90, 100]
    # The sum over its sources, because a progress has no total with Spark Connect.
    batches = [one for one in done.recentProgress if sum(source["numInputRows"] for source in one["sources"])]
    assert [lag(progress) for progress in batches] == [
        {name: 70},
        {name: 40},
        {name: 10},
        {name: 0},
    ]
    assert query.seqs() == list(range(1, 101))


def test_limits_are_refused_before_spark_4_2(query: Query, make: Any) -> None:
    from pyspark.errors import PySparkException

    if query.limited:
        pytest.skip("before Spark 4.2")
    with pytest.raises(PySparkException, match=r"'maxOffsetsPerTrigger'\): .*need Spark 4\.2"):
        query.run(make(10), maxOffsetsPerTrigger="30")


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_restart_at_any_point_of_a_micro_batch_reads_every_row_once(
    query: Query, make: Any, more: Any, start: str
) -> None:
    name, options = make(20), {"startingOffsets": start}
    query.run(name, **options)
    # A start that depends on the moment is pinned by a first micro-batch without rows.
    assert query.offsets()[0]["streams"][name]["seq"] == 20
    # After the write, before the commit log (more rows arrived meanwhile).
    query.forget("commits")
    more(name, 20)
    query.run(name, **options)
    # After the offset log, before the write: every attempt at the micro-batch fails, then the query is restarted.
    more(name, 5)
    with pytest.raises(Exception, match="no_such"):
        query.run(name, failing="no_such", **options)
    more(name, 5)
    query.run(name, **options)
    # After the commit log, before the next offset (and before Spark 4.2 a run after a failure only ends the open batch).
    query.run(name, **options)
    assert query.seqs() == list(range(1 if start == "earliest" else 21, 51))


def test_a_running_query_reads_new_messages(query: Query, make: Any, more: Any) -> None:
    name = make(10)
    running = query.start(name, now=False)
    try:
        running.processAllAvailable()
        for _ in range(3):
            more(name, 10)
            running.processAllAvailable()
    finally:
        running.stop()
    assert query.seqs() == list(range(1, 41))


def test_invalid_options_fail_the_query(query: Query, make: Any) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="'endingOffsets': it applies only to batch reads"):
        query.run(make(1), endingOffsets="latest")


def test_a_frame_used_several_times_has_all_its_rows(spark: SparkSession, server: NatsServer, make: Any) -> None:
    """Spark reuses the partitions planned with one filter for other queries of the frame, so they must lack no rows."""
    frame = spark.read.format("jetstream").option("servers", server.url).load(make(100))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")  # since Spark 4.1
    try:
        assert frame.where("seq <= 10").count() == 10
        assert frame.count() == 100
        assert frame.where("seq <= 10").union(frame.where("seq > 90")).count() == 20
        assert frame.where("seq = 1 OR seq = 99").count() == 2
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
