"""A micro-batch that Spark runs again: the same rows where that is possible, and no row lost or repeated where it is not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

row_by_row = pytest.mark.skipif(
    not hasattr(datasource, "DataSourceStreamArrowWriter"),
    reason="Spark 4.0 passes a whole partition to a sink at once",
)

EXACT = ["dedupe", "transactional"]
ROWS = 30


async def _delete(js: JetStreamContext, name: str) -> None:
    await js.delete_msg(name, 3)


async def _replace(js: JetStreamContext, name: str) -> None:
    await js.publish(f"{name}.2", b"newer")


async def _roll_up(js: JetStreamContext, name: str) -> None:
    await js.publish(f"{name}.2", b"newer", headers={"Nats-Rollup": "sub"})


async def _expire(js: JetStreamContext, name: str) -> None:
    """Wait until the third message has expired."""
    async with asyncio.timeout(60):
        while True:
            try:
                await js.get_msg(name, 3)
            except NotFoundError:
                return
            await asyncio.sleep(0.05)


# Causes of a lost row: the source's configuration, headers of the third message, and an action between the attempts.
VANISHING: dict[str, tuple[dict[str, Any], dict[str, str], Any]] = {
    "delete": ({}, {}, _delete),
    "per-subject limit": ({"max_msgs_per_subject": 1}, {}, _replace),
    "rollup": ({"allow_rollup_hdrs": True}, {}, _roll_up),
    "limit at the head": ({"max_msgs": ROWS}, {}, _replace),
    "TTL": ({"allow_msg_ttl": True}, {"Nats-TTL": "5s"}, _expire),
}


ONCE = Counter(b"%d" % number for number in range(ROWS))


@pytest.mark.parametrize("how", VANISHING)
@pytest.mark.parametrize("semantics", EXACT)
def test_a_row_that_vanished_from_the_source_repeats_no_other_row(
    make_stream: Any, stream_query: Any, sink: Any, stored: Any, with_js: Any, how: str, semantics: str
) -> None:
    config, headers, vanish = VANISHING[how]
    source, out = make_stream(**config), make_stream()

    async def fill(js: JetStreamContext) -> None:
        for number in range(ROWS):
            given = headers if number == 2 else None
            await js.publish(f"{source}.{number}", b"%d" % number, headers=given)

    with_js(fill)
    query = stream_query(source)
    more = {"sinkPartitions": "2", "transactionRows": "5"} if semantics == "transactional" else {}
    target = sink(out, semantics, **more)
    start = query.initial()
    end = query.latest(start)

    def run() -> None:
        parts = query.parts(start, end)
        target.write([[{"subject": f"{out}.rows", "data": row["data"]} for row in part] for part in parts])

    run()
    assert stored(out, f"{out}.rows") == ONCE, "the first attempt did not store every row once"
    with_js(lambda js: vanish(js, source))
    run()  # Spark could not record that the micro-batch was done
    assert stored(out, f"{out}.rows") == ONCE


@pytest.mark.parametrize("semantics", EXACT)
def test_other_min_partitions_on_the_replay_repeat_no_row(
    make_stream: Any, stream_query: Any, sink: Any, stored: Any, semantics: str
) -> None:
    source, out = make_stream(ROWS), make_stream()
    target = sink(out, semantics, **({"sinkPartitions": "2"} if semantics == "transactional" else {}))
    query = stream_query(source, minPartitions="2")
    start = query.initial()
    end = query.latest(start)
    for attempt in (query, stream_query(source, minPartitions="3")):
        parts = attempt.parts(start, end)
        target.write([[{"subject": f"{out}.rows", "data": row["data"]} for row in part] for part in parts])
    assert stored(out, f"{out}.rows") == ONCE


def test_rows_that_come_in_another_order_are_not_repeated(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    rows = [{"subject": f"{out}.rows", "data": b"%d" % number} for number in range(10)]
    sink(out).write([rows])
    sink(out).write([list(reversed(rows))], attempt=1)
    assert stored(out, f"{out}.rows") == Counter(row["data"] for row in rows)


def test_equal_rows_are_all_kept(make_stream: Any, sink: Any, stored: Any) -> None:
    out = make_stream()
    rows = [{"subject": f"{out}.rows", "data": b"the same"}] * 10
    sink(out).write([rows])
    sink(out).write([rows], attempt=1)
    assert stored(out, f"{out}.rows") == {b"the same": 10}


@row_by_row
def test_a_transactional_task_stores_its_remaining_rows_after_an_earlier_row_vanished(
    make_stream: Any, sink: Any, stored: Any
) -> None:
    out = make_stream()
    rows = [{"subject": f"{out}.rows", "data": b"%d" % number} for number in range(ROWS)]
    target = sink(out, "transactional", sinkPartitions="1", transactionRows="5")

    def failing() -> Iterator[Any]:
        yield from rows[:20]
        deadline = time.monotonic() + 60
        while not stored(out, f"{out}.rows") and time.monotonic() < deadline:
            time.sleep(0.02)
        raise RuntimeError("the task fails")

    with pytest.raises(RuntimeError, match="the task fails"):
        target.write([failing()])
    before = stored(out, f"{out}.rows")
    assert 0 < sum(before.values()) < ROWS
    target.write([rows[:2] + rows[3:]], attempt=1)
    now = stored(out, f"{out}.rows")
    now.pop(b"2", None)
    assert now == Counter(row["data"] for row in rows if row["data"] != b"2")


class Pipeline:
    """A Spark query from one stream to another."""

    def __init__(self, spark: SparkSession, url: str, source: str, out: str, folder: Path) -> None:
        self.spark, self.url, self.source, self.out = spark, url, source, out
        self.checkpoint = folder / "checkpoint"

    def run(self, semantics: str, through: Any) -> None:
        reader = self.spark.readStream.format("jetstream").options(servers=self.url, minPartitions="2")
        frame = reader.load(self.source).selectExpr(
            f"concat('{self.out}.rows.', spark_partition_id()) AS subject", "data"
        )
        frame = frame.mapInArrow(through, frame.schema)
        options = {"servers": self.url, "stream": self.out, "semantics": semantics}
        if semantics == "transactional":
            options |= {"sinkPartitions": "2", "transactionRows": "100"}
        writer = frame.writeStream.format("jetstream").options(**options).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.checkpoint)).start().awaitTermination()


@pytest.fixture
def pipeline(spark: SparkSession, server: Any, make_stream: Any, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, server.url, make_stream(), make_stream(), tmp_path)


def losing_a_row_and_failing(url: str, source: str, out: str) -> Any:
    """Fail the first attempt at partition 0 when some of its rows are stored and its first row is gone from the source."""

    async def lose() -> None:
        async with await nats.connect(url, connect_timeout=10) as nc:
            js = nc.jetstream()
            async with asyncio.timeout(60):
                rows = f"{out}.rows.0"
                while (((await js.stream_info(out, subjects_filter=rows)).state.subjects or {}).get(rows) or 0) < 2:
                    await asyncio.sleep(0.05)
            await js.delete_msg(source, 1)

    def work(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        passed = 0
        for batch in batches:
            for first in range(0, batch.num_rows, 100):
                yield batch.slice(first, 100)
                passed += 100
                if passed >= 1000 and context.partitionId() == 0 and context.attemptNumber() == 0:
                    asyncio.run(lose())
                    raise RuntimeError("a task fails")

    return work


@row_by_row
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("semantics", EXACT)
def test_a_task_that_fails_while_its_source_loses_a_row_repeats_no_other_row(
    pipeline: Pipeline, stored: Any, publish: Any, with_js: Any, semantics: str
) -> None:
    query = pipeline
    # Larger than what Spark's buffers hold, so that the sink stores some rows before the task fails.
    rows = [b"%d " % number + b"." * 400 for number in range(4000)]
    publish([(f"{query.source}.a", row) for row in rows])
    try:
        query.run(semantics, losing_a_row_and_failing(query.url, query.source, query.out))
    finally:
        state = with_js(lambda js: js.stream_info(query.source)).state
        assert state.first_seq == 2, "the source did not lose its first row"
    now = stored(query.out, f"{query.out}.rows.*")
    now.pop(rows[0], None)
    assert now == Counter(rows[1:])
