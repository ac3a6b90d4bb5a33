"""A streaming query from one stream to another, whose rows are compared by content."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsCluster, NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = int(os.environ.get("JETSTREAM_EXT_SPARK_ROWS", "4000"))
JOB = Path(__file__).with_name("fault_job.py")
TRANSACTION = max(50, min(998, ROWS // 80))
EXACT = ["dedupe", "transactional"]
BUCKET = "bucket"
SINKS = [*EXACT, BUCKET]


def row_of(number: int) -> bytes:
    """Return a row so large that Spark's buffers hold few of them: some are stored before a task dies."""
    return b"row %d " % number + b"." * 400


class Pipeline:
    """Two streams, of one server unless `to` has the sink, and a checkpoint.

    `subject` returns the last token of the subject of a row. With the semantics `BUCKET`, the sink is a bucket with a key
    for each row, which keeps several values of a key, so that a repeated row shows.
    """

    def __init__(
        self,
        server: NatsServer | NatsCluster,
        run: Callable[..., Any],
        name: str,
        folder: Path,
        *,
        to: NatsServer | NatsCluster | None = None,
        subject: Callable[[int], object] = lambda _: "a",
    ) -> None:
        self.server, self.to, self._run, self._subject = server, to or server, run, subject
        self.source, self.sink = f"{name}IN", f"{name}OUT"
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "job.log"
        self._written = self.sink, f"{self.sink}.out"

    def make(self, source: Mapping[str, Any] | None = None, **config: Any) -> None:
        """Make both streams, with configurations that differ from the usual ones as given, and fill the source."""
        read = StreamConfig(name=self.source, subjects=[f"{self.source}.*"], allow_direct=True, allow_batched=True)
        written = StreamConfig(
            name=self.sink,
            subjects=[f"{self.sink}.*", f"_spark.{self.sink}.>"],
            allow_direct=True,
            allow_batched=True,
            allow_atomic=True,
        )
        read = read.evolve(**(source or {}))
        self._batched = read.allow_batched
        self._run(lambda js: js.add_stream(read), self.server.url)
        self._run(lambda js: js.add_stream(written.evolve(**config)), self.to.url)
        self.more(0)

    def make_bucket(self, source: Mapping[str, Any] | None = None, **config: Any) -> None:
        """Make the source as `make` does, and a bucket; `config` is that of the bucket."""
        self.make(source)

        async def make(js: JetStreamContext) -> None:
            bucket = KeyValueConfig(bucket=self.sink, history=5, **config)
            await kvx.enable(await js.create_key_value(bucket), spark=True)

        self._run(make, self.to.url)
        self._written = f"KV_{self.sink}", f"$KV.{self.sink}.>"

    def make_for(self, semantics: str, **config: Any) -> None:
        """Make the source, and the sink that a query with these semantics writes to."""
        (self.make_bucket if semantics == BUCKET else self.make)(**config)

    def more(self, first: int, rows: int = ROWS) -> None:
        messages = ((f"{self.source}.{self._subject(row)}", row_of(row)) for row in range(first, first + rows))

        async def publish(js: JetStreamContext) -> None:
            if self._batched:
                await jsx.ingest(js, messages)
            else:
                while some := list(islice(messages, 500)):
                    await asyncio.gather(*(js.publish(subject, data) for subject, data in some))

        self._run(publish, self.server.url)

    def purge(self, first: int) -> None:
        """Remove the messages before the sequence `first` from the source."""
        self._run(lambda js: js.purge_stream(self.source, seq=first), self.server.url)

    def stored(self, token: str = "out") -> Counter[bytes]:
        """Return the rows that were written, and how often."""
        where = self._written if token == "out" else (self.sink, f"{self.sink}.{token}")
        return self._run(lambda js: _scan(js, *where), self.to.url)

    def left(self) -> Counter[bytes]:
        """Return the rows that the source has."""
        return self._run(lambda js: _scan(js, self.source, ">"), self.server.url)

    def count(self) -> int:
        return self._run(lambda js: _count(js, self._written[0]), self.to.url)

    def rows(self) -> int:
        """Return how many rows were written, without the markers of transactions."""
        return sum(self.stored().values())

    @staticmethod
    def limited(spark: SparkSession) -> bool:
        """Whether this Spark limits micro-batches."""
        return tuple(map(int, spark.version.split(".")[:2])) >= (4, 2)

    def check(self, rows: int = ROWS) -> None:
        """Check that the sink has every row once."""
        missing, duplicated = self.compare(rows)
        assert (missing, duplicated) == (0, 0), (missing, duplicated)

    def check_what_is_left(self) -> None:
        """Check that no row is there twice, and that every row that the source still has is there."""
        found = self.stored()
        missing, twice = set(self.left()) - set(found), [row for row, count in found.items() if count > 1]
        assert (len(missing), len(twice)) == (0, 0), (len(missing), len(twice))

    @property
    def bad(self) -> dict[str, str]:
        """The options of a query with bad rows, which go to the sink's stream as well."""
        return {
            "bad": "CAST(split_part(CAST(data AS STRING), ' ', 2) AS INT) % 40 = 3",
            "on_bad_row": f"{self.sink}.dead",
        }

    def check_bad(self) -> None:
        """Check that the bad rows are dead letters, all others are rows, and each is stored once."""
        letters = Counter(map(row_of, range(3, ROWS, 40)))
        assert self.stored("dead") == letters
        assert self.stored() == Counter(map(row_of, range(ROWS))) - letters

    def compare(self, rows: int = ROWS) -> tuple[int, int]:
        found = self.stored()
        expected = set(map(row_of, range(rows)))
        assert not set(found) - expected
        return len(expected - set(found)), sum(found.values()) - len(found)

    def query(
        self,
        spark: SparkSession,
        semantics: str,
        *,
        through: Any = None,
        limit: int | None = None,
        partitions: int = 2,
        on_bad_row: str = "fail",
        bad: str = "false",
        **options: str,
    ) -> Any:
        """Start the query in this session; `options` are those of the source, and the rows where `bad` is true have no subject."""
        source = spark.readStream.format("jetstream").options(servers=_servers(self.server), minPartitions="2")
        if self.limited(spark):
            source = source.option("maxOffsetsPerTrigger", str(limit or ROWS // 4))
        source = source.options(**options)
        frame = source.load(self.source).selectExpr(*rows_for(semantics, self.sink, bad))
        if through is not None:
            frame = frame.mapInArrow(through, frame.schema)
        form, target = target_of(semantics, self.sink, partitions, TRANSACTION)
        target |= {"servers": _servers(self.to), "onBadRow": on_bad_row}
        writer = frame.writeStream.format(form).options(**target).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.checkpoint)).start()

    def run(self, spark: SparkSession, semantics: str, **options: Any) -> None:
        # Before Spark 4.2, `availableNow` runs one micro-batch: the pending one if there is one.
        for _ in range(1 if self.limited(spark) else 2):
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


def rows_for(semantics: str, sink: str, bad: str = "false") -> list[str]:
    """Return the columns that a query writes, as expressions of the source's; rows for which `bad` is true are bad."""
    if semantics == BUCKET:
        return [f"IF({bad}, NULL, concat('k.', split_part(string(data), ' ', 2))) AS key", "data AS value"]
    return [f"IF({bad}, NULL, '{sink}.out') AS subject", "data"]


def target_of(semantics: str, sink: str, partitions: int, transaction: int) -> tuple[str, dict[str, str]]:
    """Return the format of the sink, and its options without the servers."""
    if semantics == BUCKET:
        return "jetstream_kv", {"bucket": sink, "transactionRows": str(min(transaction, 998))}
    options = {"stream": sink, "semantics": semantics}
    if semantics == "transactional":
        options |= {"sinkPartitions": str(partitions), "transactionRows": str(transaction)}
    return "jetstream", options


def _servers(server: NatsServer | NatsCluster) -> str:
    return ",".join(server.urls if isinstance(server, NatsCluster) else [server.url])


async def _scan(js: JetStreamContext, stream: str, subject: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    async with jsx.DirectGet(js, stream).scan(subject=subject, confirm=True) as messages:
        async for message in messages:
            found[message.data] += 1
    return found


async def _count(js: JetStreamContext, stream: str) -> int:
    return int((await js.stream_info(stream)).state.messages)
