"""Exactly-once delivery under faults, compared by content: from one stream to another, 0 missing and 0 duplicated.

Short here; ``nox -s full -- spark_faults`` runs each with 40,000 rows (``JETSTREAM_EXT_SPARK_ROWS``) and adds those that
need a cluster of several JVMs (``JETSTREAM_EXT_FULL``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jetstream_ext.spark.sink import HAS_STREAM_ARROW
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from pipeline import BUCKET, EXACT, ROWS, SINKS, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

as_they_come = pytest.mark.skipif(not HAS_STREAM_ARROW, reason="Spark 4.0 hands a sink all rows of a partition at once")
in_cluster = pytest.mark.skipif(not os.environ.get("JETSTREAM_EXT_FULL"), reason="nox -s full -- spark_faults runs it")


@pytest.fixture
def pipeline(server: NatsServer, with_js: Any, stream_name: Callable[[], str], tmp_path: Path) -> Pipeline:
    return Pipeline(server, with_js, stream_name(), tmp_path)


def dying(rows: int, pause: float = 0.5) -> Any:
    """Fail the first attempt at partition 0 of every micro-batch after `rows` rows, and `pause` seconds."""

    def work(batches: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        passed = 0
        for batch in batches:
            for first in range(0, batch.num_rows, 100):
                yield batch.slice(first, 100)
                passed += 100
                if passed >= rows and context.partitionId() == 0 and context.attemptNumber() == 0:
                    time.sleep(pause)  # the rows passed on are stored meanwhile
                    raise RuntimeError("a task dies")

    return work


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", SINKS)
def test_a_task_dies_in_every_micro_batch(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    pipeline.make_for(semantics)
    pipeline.run(spark, semantics, through=dying(ROWS // 16))
    pipeline.check()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", EXACT)
def test_bad_rows_of_tasks_that_die_and_of_replays_are_stored_aside_once(
    spark: SparkSession, pipeline: Pipeline, semantics: str
) -> None:
    pipeline.make()
    for _ in range(2):
        pipeline.run(spark, semantics, through=dying(ROWS // 16), **pipeline.bad)
        pipeline.forget_commit()
    pipeline.check_bad()


@pytest.mark.usefixtures("small_batches")
def test_without_ids_a_task_that_dies_repeats_rows(spark: SparkSession, pipeline: Pipeline) -> None:
    """This proves that the fault happens: without ids, rows are stored twice."""
    pipeline.make()
    pipeline.run(spark, "none", through=dying(ROWS // 16, pause=2))
    missing, duplicated = pipeline.compare()
    assert missing == 0
    assert duplicated > 0


@pytest.mark.parametrize("semantics", SINKS)
def test_a_failure_between_the_write_and_the_commit_log(
    spark: SparkSession, pipeline: Pipeline, semantics: str
) -> None:
    pipeline.make_for(semantics)
    pipeline.run(spark, semantics)
    for _ in range(2):
        pipeline.forget_commit()
        pipeline.run(spark, semantics)
    pipeline.check()
    pipeline.more(ROWS, 100)
    pipeline.run(spark, semantics)
    pipeline.check(ROWS + 100)


def test_a_replay_after_the_duplicate_window_is_recognised_by_its_markers(
    spark: SparkSession, pipeline: Pipeline
) -> None:
    pipeline.make(duplicate_window=1)
    pipeline.run(spark, "transactional")
    pipeline.forget_commit()
    time.sleep(2)
    pipeline.run(spark, "transactional")
    pipeline.check()


def test_a_replay_after_the_duplicate_window_repeats_rows_with_dedupe(spark: SparkSession, pipeline: Pipeline) -> None:
    """Outside of the window, ids do not prevent duplicates, as documented, but no row is lost."""
    pipeline.make(duplicate_window=1)
    pipeline.run(spark, "dedupe")
    pipeline.forget_commit()
    time.sleep(2)
    pipeline.run(spark, "dedupe")
    missing, duplicated = pipeline.compare()
    assert missing == 0
    assert duplicated > 0


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", SINKS)
def test_a_query_that_fails_before_the_write(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    """The micro-batch is in the offset log, and the sink has none of its rows, then some of them."""
    from pyspark.errors import StreamingQueryException

    pipeline.make_for(semantics)

    def failing(rows: int) -> Any:
        def work(batches: Any) -> Any:
            passed = 0
            for batch in batches:
                for first in range(0, batch.num_rows, 100):
                    if passed >= rows:
                        raise RuntimeError("every attempt fails")
                    yield batch.slice(first, 100)
                    passed += 100

        return work

    for rows in (0, ROWS // 20):
        with pytest.raises(StreamingQueryException):
            pipeline.run(spark, semantics, through=failing(rows))
    assert sum(pipeline.stored().values()) < ROWS
    pipeline.run(spark, semantics)
    pipeline.check()


def test_a_replay_in_other_partitions_is_refused(spark: SparkSession, pipeline: Pipeline) -> None:
    from pyspark.errors import StreamingQueryException

    pipeline.make()
    pipeline.run(spark, "transactional")
    pipeline.forget_commit()
    source = spark.readStream.format("jetstream").options(servers=pipeline.server.url, minPartitions="3")
    frame = source.load(pipeline.source).selectExpr(f"'{pipeline.sink}.out' AS subject", "data")
    options = {"servers": pipeline.server.url, "stream": pipeline.sink, "semantics": "transactional"}
    writer = frame.writeStream.format("jetstream").options(**options, sinkPartitions="3").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(pipeline.checkpoint)).start()
    with pytest.raises(StreamingQueryException, match="first stored with sinkPartitions=2, and it is 3 now"):
        query.awaitTermination()
    pipeline.check()
    pipeline.run(spark, "transactional")
    pipeline.check()


@as_they_come
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", SINKS)
def test_the_server_is_killed(spark: SparkSession, with_js: Any, tmp_path: Path, semantics: str) -> None:
    if semantics == BUCKET and not os.environ.get("JETSTREAM_EXT_FULL"):
        pytest.skip("nox -s full -- spark_faults runs it")
    with NatsServer() as server:
        pipeline = Pipeline(server, with_js, "K", tmp_path)
        pipeline.make_for(semantics)
        pause = 1200 / ROWS

        def slow(batches: Any) -> Any:
            import time

            for batch in batches:
                for first in range(0, batch.num_rows, 100):
                    time.sleep(pause)
                    yield batch.slice(first, 100)

        query = pipeline.query(spark, semantics, through=slow)
        for part in (ROWS // 8, ROWS // 3):
            pipeline.until(part)
            assert pipeline.count() < ROWS
            assert query.isActive
            server.kill()
            time.sleep(0.5)
            server.restart()
        for _ in range(3):
            try:
                query.awaitTermination()
                break
            except Exception:  # the driver sent a request while the server was down: the user restarts the query
                query = pipeline.query(spark, semantics)
        pipeline.check()


@as_they_come
@pytest.mark.parametrize("semantics", SINKS)
def test_the_driver_is_killed(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    if semantics != "transactional" and not os.environ.get("JETSTREAM_EXT_FULL"):
        pytest.skip("nox -s full -- spark_faults runs it")
    pipeline.make_for(semantics)
    with pipeline.job(semantics, **pipeline.bad) as job:
        pipeline.until(ROWS // 3, job=job)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert sum(pipeline.stored().values()) < ROWS * 39 // 40
    pipeline.run(spark, semantics, **pipeline.bad)  # by another driver, from the checkpoint
    pipeline.check_bad()


CLUSTER = {"master": "local-cluster[2,1,1024]", "conf": {"spark.executor.memory": "1g", "spark.executor.cores": "1"}}


@in_cluster
@pytest.mark.parametrize("semantics", SINKS)
def test_an_executor_is_killed(pipeline: Pipeline, semantics: str) -> None:
    pipeline.make_for(semantics)
    with pipeline.job(semantics, **CLUSTER) as job:
        pipeline.until(ROWS // 3, job=job)
        executors = _executors(job.pid)
        assert executors
        assert pipeline.count() < ROWS
        os.kill(executors[0], signal.SIGKILL)
        assert job.wait(timeout=500) == 0
    pipeline.check()


def _executors(session: int) -> list[int]:
    """Return the JVMs of the executors among the processes of one session."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            command = (path / "cmdline").read_bytes()
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and b"CoarseGrainedExecutorBackend" in command:
                found.append(int(path.name))
    return found


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone cluster with two hosts: Spark never starts a second attempt on the host of the first.

    So there is no speculation in a `local-cluster`, all of which is one host. (Linux has all of 127.0.0.0/8.)
    """
    import pyspark

    folder = tmp_path_factory.mktemp("cluster")
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = f"{free.getsockname()[1]}"
    master = ["master.Master", "--host", "127.0.0.1", "--port", port, "--webui-port", "0"]
    commands = [master]
    for host in ("127.0.0.2", "127.0.0.3"):
        size = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(folder)]
        commands.append(["worker.Worker", "--host", host, *size, f"spark://127.0.0.1:{port}"])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for kind, *arguments in commands:
            with (folder / f"{len(processes)}.log").open("wb") as log:
                command = [str(program), f"org.apache.spark.deploy.{kind}", *arguments]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@in_cluster
@pytest.mark.parametrize("semantics", [*SINKS, "none"])
def test_speculative_attempts(pipeline: Pipeline, two_hosts: str, tmp_path: Path, semantics: str) -> None:
    pipeline.make_for(semantics)
    conf = {
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "100ms",
    }
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    # It pauses when some of its rows are stored, so that the second attempt repeats them.
    given = {"master": two_hosts, "conf": conf, "straggling": ROWS // 20, "pause": 40 / ROWS, "attempts": str(attempts)}
    with pipeline.job(semantics, **given) as job:
        assert job.wait(timeout=500) == 0
    assert any(path.name.endswith("-0-1") for path in attempts.iterdir())
    missing, duplicated = pipeline.compare()
    assert missing == 0
    # Without ids, this shows that both attempts stored rows.
    assert (duplicated > 0) is (semantics == "none")
