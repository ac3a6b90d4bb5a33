"""Exactly-once delivery under faults, compared by content: from one stream to another, 0 missing and 0 duplicated.

Short here; ``nox -s full -- spark_faults`` runs each with 40,000 rows (``JETSTREAM_EXT_SPARK_ROWS``) and adds those that
need a cluster of several JVMs (``JETSTREAM_EXT_FULL``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

import jetstream_ext as jsx
from jetstream_ext.spark.sink import _HAS_STREAM_ARROW
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = int(os.environ.get("JETSTREAM_EXT_SPARK_ROWS", "4000"))
JOB = Path(__file__).with_name("fault_job.py")
TRANSACTION = max(50, min(999, ROWS // 80))
EXACT = ["dedupe", "transactional"]

as_they_come = pytest.mark.skipif(
    not _HAS_STREAM_ARROW, reason="Spark 4.0 hands a sink all rows of a partition at once"
)
in_cluster = pytest.mark.skipif(not os.environ.get("JETSTREAM_EXT_FULL"), reason="nox -s full -- spark_faults runs it")


def row_of(number: int) -> bytes:
    """Return a row so large that Spark's buffers hold few of them: some are stored before a task dies."""
    return b"row %d " % number + b"." * 400


class Pipeline:
    """Two streams on a server, and a checkpoint."""

    def __init__(self, server: NatsServer, run: Callable[..., Any], name: str, folder: Path) -> None:
        self.server, self._run = server, run
        self.source, self.sink = f"{name}IN", f"{name}OUT"
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "job.log"

    def make(self, **config: Any) -> None:
        async def fill(js: JetStreamContext) -> None:
            await js.add_stream(
                StreamConfig(name=self.source, subjects=[f"{self.source}.*"], allow_direct=True, allow_batched=True)
            )
            sink = StreamConfig(
                name=self.sink,
                subjects=[f"{self.sink}.*", f"_spark.{self.sink}.>"],
                allow_direct=True,
                allow_batched=True,
                allow_atomic=True,
            )
            await js.add_stream(sink.evolve(**config))

        self._run(fill, self.server.url)
        self.more(0)

    def more(self, first: int, rows: int = ROWS) -> None:
        async def publish(js: JetStreamContext) -> None:
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((f"{self.source}.a", row_of(row)) for row in range(first, first + rows))

        self._run(publish, self.server.url)

    def stored(self) -> Counter[bytes]:
        async def scan(js: JetStreamContext) -> Counter[bytes]:
            found: Counter[bytes] = Counter()
            async with jsx.DirectGet(js, self.sink).scan(subject=f"{self.sink}.out", confirm=True) as messages:
                async for message in messages:
                    found[message.data] += 1
            return found

        return self._run(scan, self.server.url)

    def count(self) -> int:
        return self._run(lambda js: _count(js, self.sink), self.server.url)

    def check(self, rows: int = ROWS) -> None:
        """Check that the sink has every row once."""
        missing, duplicated = self.compare(rows)
        assert (missing, duplicated) == (0, 0)

    def compare(self, rows: int = ROWS) -> tuple[int, int]:
        found = self.stored()
        expected = set(map(row_of, range(rows)))
        assert not set(found) - expected
        return len(expected - set(found)), sum(found.values()) - len(found)

    def query(self, spark: SparkSession, semantics: str, *, through: Any = None, limit: int | None = None) -> Any:
        """Start the query in this session."""
        source = spark.readStream.format("jetstream").options(servers=self.server.url, minPartitions="2")
        if tuple(map(int, spark.version.split(".")[:2])) >= (4, 2):
            source = source.option("maxOffsetsPerTrigger", str(limit or ROWS // 4))
        frame = source.load(self.source).selectExpr(f"'{self.sink}.out' AS subject", "data")
        if through is not None:
            frame = frame.mapInArrow(through, frame.schema)
        options = {"servers": self.server.url, "stream": self.sink, "semantics": semantics}
        if semantics == "transactional":
            options |= {"sinkPartitions": "2", "transactionRows": str(TRANSACTION)}
        writer = frame.writeStream.format("jetstream").options(**options).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.checkpoint)).start()

    def run(self, spark: SparkSession, semantics: str, **options: Any) -> None:
        self.query(spark, semantics, **options).awaitTermination()

    def forget_commit(self) -> None:
        """Remove Spark's record that the newest micro-batch is committed, as if Spark had crashed right before it."""
        commits = sorted(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdigit())
        for name in (f"{commits[-1]}", f".{commits[-1]}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def job(self, semantics: str, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Run the query in a separate process."""
        text = json.dumps(
            {
                "servers": self.server.url,
                "source": self.source,
                "sink": self.sink,
                "semantics": semantics,
                "checkpoint": str(self.checkpoint),
                "limit": ROWS // 4,
                "pause": 400 / ROWS,
                "transaction": TRANSACTION,
            }
            | given
        )
        environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(JOB), text],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # the driver's JVM and Python workers die with it
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def until(self, rows: int, *, job: subprocess.Popen[bytes] | None = None, seconds: float = 300) -> None:
        """Wait until the sink has at least `rows` rows; a failure tells when rows arrived and what `job` printed."""
        begun = time.monotonic()
        arrived: dict[int, float] = {}
        while (count := self.count()) < rows:
            passed = round(time.monotonic() - begun, 1)
            arrived.setdefault(count, passed)
            if passed > seconds or (job is not None and job.poll() is not None):
                printed = self.log.read_text()[-8000:] if job else ""
                pytest.fail(f"{count} rows of {rows} after {passed} s ({arrived}): {printed}")
            time.sleep(0.2)


async def _count(js: JetStreamContext, stream: str) -> int:
    return int((await js.stream_info(stream)).state.messages)


@pytest.fixture
def pipeline(server: NatsServer, with_js: Any, stream_name: Callable[[], str], tmp_path: Path) -> Pipeline:
    return Pipeline(server, with_js, stream_name(), tmp_path)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Rows that are passed on are stored at once, not when the partition is complete."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "100")
    yield
    spark.conf.set(name, before)


def dying(rows: int) -> Any:
    """Fail the first attempt at partition 0 of every micro-batch after `rows` rows."""

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
                    time.sleep(0.5)  # the rows passed on are stored meanwhile
                    raise RuntimeError("a task dies")

    return work


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", EXACT)
def test_a_task_dies_in_every_micro_batch(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    pipeline.make()
    pipeline.run(spark, semantics, through=dying(ROWS // 16))
    pipeline.check()


@pytest.mark.usefixtures("small_batches")
def test_without_ids_a_task_that_dies_repeats_rows(spark: SparkSession, pipeline: Pipeline) -> None:
    """This proves that the fault happens: without ids, rows are stored twice."""
    pipeline.make()
    pipeline.run(spark, "none", through=dying(ROWS // 16))
    missing, duplicated = pipeline.compare()
    assert missing == 0
    assert duplicated > 0


@pytest.mark.parametrize("semantics", EXACT)
def test_a_failure_between_the_write_and_the_commit_log(
    spark: SparkSession, pipeline: Pipeline, semantics: str
) -> None:
    pipeline.make()
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
@pytest.mark.parametrize("semantics", EXACT)
def test_a_query_that_fails_before_the_write(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    """The micro-batch is in the offset log, and the sink has none of its rows, then some of them."""
    from pyspark.errors import StreamingQueryException

    pipeline.make()

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
    with pytest.raises(StreamingQueryException, match="was first stored with 2 partitions and now has 3"):
        query.awaitTermination()
    pipeline.check()
    pipeline.run(spark, "transactional")
    pipeline.check()


@as_they_come
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", EXACT)
def test_the_server_is_killed(spark: SparkSession, with_js: Any, tmp_path: Path, semantics: str) -> None:
    with NatsServer() as server:
        pipeline = Pipeline(server, with_js, "K", tmp_path)
        pipeline.make()
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
@pytest.mark.parametrize("semantics", EXACT)
def test_the_driver_is_killed(spark: SparkSession, pipeline: Pipeline, semantics: str) -> None:
    if semantics == "dedupe" and not os.environ.get("JETSTREAM_EXT_FULL"):
        pytest.skip("nox -s full -- spark_faults runs it")
    pipeline.make()
    with pipeline.job(semantics) as job:
        pipeline.until(ROWS // 3, job=job)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert sum(pipeline.stored().values()) < ROWS
    pipeline.run(spark, semantics)  # by another driver, from the checkpoint
    pipeline.check()


CLUSTER = {"master": "local-cluster[2,1,1024]", "conf": {"spark.executor.memory": "1g", "spark.executor.cores": "1"}}


@in_cluster
@pytest.mark.parametrize("semantics", EXACT)
def test_an_executor_is_killed(pipeline: Pipeline, semantics: str) -> None:
    pipeline.make()
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
@pytest.mark.parametrize("semantics", [*EXACT, "none"])
def test_speculative_attempts(pipeline: Pipeline, two_hosts: str, tmp_path: Path, semantics: str) -> None:
    pipeline.make()
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
