"""Exactly-once delivery where the source changes under the query: 0 rows missing and 0 duplicated, or a loss that is named.

Short here; ``nox -s full -- spark_faults`` runs each with 40,000 rows, and those that need a cluster of servers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource
from nats.js.errors import ServiceUnavailableError
from pyspark.errors import StreamingQueryException

from jetstream_ext.spark.sink import HAS_STREAM_ARROW
from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from pipeline import EXACT, ROWS, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))

as_they_come = pytest.mark.skipif(not HAS_STREAM_ARROW, reason="Spark 4.0 hands a sink all rows of a partition at once")
in_cluster = pytest.mark.skipif(not FULL, reason="nox -s full -- spark_faults runs it")
# In CI, one of the sinks is enough where the fault is the source's.
exact = pytest.mark.parametrize("semantics", EXACT if FULL else EXACT[1:])


@pytest.fixture
def make_pipeline(
    server: NatsServer, with_js: Any, stream_name: Callable[[], str], tmp_path: Path
) -> Callable[..., Pipeline]:
    return lambda **given: Pipeline(given.pop("server", server), with_js, stream_name(), tmp_path, **given)


def waiting(folder: Path, rows: int, *, then: str) -> Any:
    """Pass rows on, and after `rows` rows in the first attempt at partition 0 wait until the file ``go`` is in `folder`.

    It leaves the file ``waiting`` there. `then` is ``"die"`` or ``"go on"``.
    """

    def work(batches: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        passed, first = 0, context.partitionId() == 0 and context.attemptNumber() == 0
        for batch in batches:
            for start in range(0, batch.num_rows, 100):
                yield batch.slice(start, 100)
                passed += 100
                if first and passed >= rows and not (folder / "go").exists():
                    time.sleep(0.3)  # the rows passed on are stored meanwhile
                    (folder / "waiting").touch()
                    while not (folder / "go").exists():
                        time.sleep(0.02)
                    if then == "die":
                        raise RuntimeError("a task dies")

    return work


@contextlib.contextmanager
def meanwhile(folder: Path, action: Callable[[], None]) -> Iterator[None]:
    """Do something while a task of the query waits."""

    def act() -> None:
        while not (folder / "waiting").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        try:
            action()
            done.append(True)
        finally:
            (folder / "go").touch()

    deadline, done = time.monotonic() + 300, list[bool]()
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        deadline = 0.0
        thread.join()
    assert done, "no task waited"


COMPACTED = {"max_msgs_per_subject": 1}


@as_they_come
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", EXACT)
def test_messages_replaced_between_the_attempts_of_a_task(
    spark: SparkSession, make_pipeline: Any, tmp_path: Path, semantics: str
) -> None:
    """Each has a subject of its own, of which the stream keeps the newest message."""
    pipeline = make_pipeline(subject=lambda row: row % ROWS)
    pipeline.make(COMPACTED)
    with meanwhile(tmp_path, lambda: pipeline.more(ROWS, ROWS // 20)):
        pipeline.run(spark, semantics, through=waiting(tmp_path, ROWS // 16, then="die"))
    pipeline.run(spark, semantics)
    pipeline.check_what_is_left()


@exact
def test_messages_replaced_between_the_write_and_the_commit_log(
    spark: SparkSession, make_pipeline: Any, semantics: str
) -> None:
    pipeline = make_pipeline(subject=lambda row: row * 7 % ROWS)
    pipeline.make(COMPACTED)
    pipeline.run(spark, semantics)
    for turn in (1, 2):
        pipeline.forget_commit()
        pipeline.more(turn * ROWS, ROWS // 10)
        pipeline.run(spark, semantics)
    pipeline.check_what_is_left()


@exact
def test_the_oldest_messages_expire_while_the_query_runs(
    spark: SparkSession, make_pipeline: Any, tmp_path: Path, semantics: str
) -> None:
    pipeline = make_pipeline()
    pipeline.make({"max_msgs": ROWS})
    with meanwhile(tmp_path, lambda: pipeline.more(ROWS, ROWS * 3 // 4)):  # also most of what is not planned yet
        query = pipeline.query(
            spark, semantics, through=waiting(tmp_path, 100, then="go on"), maxRecordsPerPartition=str(ROWS)
        )
        with contextlib.suppress(StreamingQueryException):
            query.awaitTermination()
    if pipeline.limited(spark):
        assert "DataLossError" in str(query.exception())
    pipeline.run(spark, semantics, failOnDataLoss="false")
    pipeline.check_what_is_left()


@exact
def test_a_purge_under_a_running_task_is_reported(
    spark: SparkSession, make_pipeline: Any, tmp_path: Path, semantics: str
) -> None:
    pipeline = make_pipeline()
    pipeline.make()
    pipeline.run(spark, semantics)
    pipeline.more(ROWS)
    pipeline.more(2 * ROWS)
    with meanwhile(tmp_path, lambda: pipeline.purge(2 * ROWS)):
        query = pipeline.query(spark, semantics, through=waiting(tmp_path, 100, then="die"), limit=2 * ROWS)
        with pytest.raises(StreamingQueryException, match="DataLossError"):
            query.awaitTermination()
    pipeline.run(spark, semantics, failOnDataLoss="false")
    pipeline.check_what_is_left()


@exact
def test_other_partitions_between_two_attempts_at_a_micro_batch(
    spark: SparkSession, make_pipeline: Any, semantics: str
) -> None:
    pipeline = make_pipeline()
    pipeline.make()

    def fail(batches: Any) -> Any:
        for number, batch in enumerate(batches):
            yield batch.slice(0, batch.num_rows // 2)
            if number == 0:
                raise RuntimeError("every attempt fails")

    with pytest.raises(StreamingQueryException):
        pipeline.run(spark, semantics, through=fail, limit=ROWS)
    pipeline.run(spark, semantics, limit=ROWS, minPartitions="5")
    pipeline.forget_commit()
    pipeline.run(spark, semantics, limit=ROWS, maxRecordsPerPartition=str(ROWS // 9))
    pipeline.check()
    pipeline.more(ROWS)
    pipeline.run(spark, semantics, limit=ROWS, minPartitions="5", partitions=5)
    pipeline.check(2 * ROWS)


@exact
def test_a_server_2_12_8_restarts_between_two_runs_after_a_config_update(
    spark: SparkSession, server: NatsServer, make_pipeline: Any, with_js: Any, semantics: str
) -> None:
    """It changes the stream's time of creation."""
    with NatsServer(version="2.12.8") as old:
        pipeline = make_pipeline(server=old, to=server)
        pipeline.make({"allow_batched": None})
        old.restart()  # the time of creation of a stream that is in memory stays
        pipeline.run(spark, semantics)

        async def update(js: JetStreamContext) -> Any:
            info = await js.stream_info(pipeline.source)
            await js.update_stream(info.config.evolve(description="the same stream"))
            return info.created

        created = with_js(update, old.url)
        old.restart()
        assert with_js(lambda js: js.stream_info(pipeline.source), old.url).created != created
        pipeline.forget_commit()
        pipeline.more(ROWS, 100)
        pipeline.run(spark, semantics)
        pipeline.check(ROWS + 100)


@exact
def test_a_partial_mirror_answers_reads_of_the_source(
    spark: SparkSession, make_pipeline: Any, with_js: Any, semantics: str
) -> None:
    pipeline = make_pipeline(subject=lambda row: row % 2)
    pipeline.make()

    async def mirror(js: JetStreamContext) -> None:
        source = StreamSource(name=pipeline.source, filter_subject=f"{pipeline.source}.1")
        await js.add_stream(
            StreamConfig(name=f"{pipeline.source}MIRROR", mirror=source, mirror_direct=True, allow_direct=True)
        )
        while (await js.stream_info(f"{pipeline.source}MIRROR")).state.messages < ROWS // 2:
            time.sleep(0.05)

    with_js(mirror)
    pipeline.run(spark, semantics)
    pipeline.forget_commit()
    pipeline.run(spark, semantics)
    pipeline.check()


# -- the leader is killed at each call of the driver -----------------------------------------------------------------

CALLS = ("initialOffset", "latestOffset", "partitions", "streamWriter", "commit")


def pausing(folder: Path) -> Any:
    """Return a source and sink that wait before each call of the driver for which ``want-<call>`` is in `folder`."""
    import jetstream_ext.spark.sink
    import jetstream_ext.spark.source
    import jetstream_ext.spark.streaming

    def pause(call: str) -> None:
        import time

        wanted, reached = folder / f"want-{call}", folder / f"at-{call}"
        if wanted.exists():
            wanted.rename(reached)
            while reached.exists():
                time.sleep(0.01)

    class Reader(jetstream_ext.spark.streaming.JetStreamStreamReader):
        def initialOffset(self) -> Any:  # noqa: N802
            pause("initialOffset")
            return super().initialOffset()

        def latestOffset(self, *given: Any) -> Any:  # noqa: N802
            pause("latestOffset")
            return super().latestOffset(*given)

        def partitions(self, start: Any, end: Any) -> Any:
            pause("partitions")
            return super().partitions(start, end)

    class Writer(jetstream_ext.spark.sink.JetStreamStreamWriter):
        def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
            pause("commit")
            super().commit(messages, batchId)

    class Source(jetstream_ext.spark.source.JetStreamDataSource):
        @classmethod
        def name(cls) -> str:
            return "pausing"

        def streamReader(self, schema: Any) -> Any:  # noqa: N802
            reader = super().streamReader(schema)
            reader.__class__ = Reader
            return reader

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            pause("streamWriter")
            writer = super().streamWriter(schema, overwrite)
            writer.__class__ = Writer
            return writer

    return Source


@in_cluster
@as_they_come
@pytest.mark.parametrize("semantics", EXACT)
def test_the_leader_is_killed_at_each_call_of_the_driver(
    spark: SparkSession, with_js: Any, tmp_path: Path, semantics: str
) -> None:
    folder, rounds, rows = tmp_path / "calls", 3, ROWS // 40
    folder.mkdir()
    spark.dataSource.register(pausing(folder))
    with NatsCluster(3) as cluster:
        pipeline = Pipeline(cluster, with_js, "L", tmp_path)
        pipeline.make({"num_replicas": 3}, num_replicas=3)
        (folder / "want-initialOffset").touch()
        options = {"servers": ",".join(cluster.urls), "requestTimeout": "60"}
        target = options | {"stream": pipeline.sink, "semantics": semantics}
        if semantics == "transactional":
            target |= {"sinkPartitions": "2"}
        source = spark.readStream.format("pausing").options(**options, minPartitions="2")
        frame = source.load(pipeline.source).selectExpr(f"'{pipeline.sink}.out' AS subject", "data")
        writer = frame.writeStream.format("pausing").options(**target)
        query = writer.option("checkpointLocation", str(pipeline.checkpoint)).start()
        total = ROWS
        try:
            for turn in range(rounds):
                for call in CALLS if turn == 0 else CALLS[1:]:
                    if call != "initialOffset":
                        (folder / f"want-{call}").touch()
                        pipeline.more(total, rows)
                        total += rows
                    _wait_for(query, (folder / f"at-{call}").exists)
                    of = pipeline.sink if call in CALLS[3:] else pipeline.source
                    leader = with_js(partial(_leader, of), cluster.url)
                    [killed] = [one for one in cluster.servers if one.name == leader]
                    killed.kill()
                    (folder / f"at-{call}").unlink()
                    time.sleep(0.5)
                    killed.restart()
                    cluster.wait_ready()
                    _wait_for(query, partial(lambda total: pipeline.rows() == total, total))
        finally:
            shutil.rmtree(folder)  # no call waits any longer
            query.stop()
        pipeline.check(total)


async def _leader(stream: str, js: JetStreamContext) -> str:
    while True:
        with contextlib.suppress(nats.errors.TimeoutError, ServiceUnavailableError):  # an election
            info = await js.stream_info(stream)
            if info.cluster is not None and info.cluster.leader:
                return info.cluster.leader


def _wait_for(query: Any, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.05)
