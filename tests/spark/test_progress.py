"""The progress of a query: records in a bucket, and the listener."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import KeyNotFoundError

import jetstream_ext as jsx
from jetstream_ext.log import OffsetStore
from jetstream_ext.log.offsets import StoredOffset
from jetstream_ext.spark import ProgressListener, StreamProgress, progress
from jetstream_ext.spark.offsets import Position
from jetstream_ext.spark.options import OptionError, ReadOptions, WriteOptions
from jetstream_ext.spark.progress import PositionMirror, ReadPosition, SinkRecord, SourceRecord
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CREATED = "2026-01-31T08:00:00Z"
NOW = datetime(2026, 1, 31, 13, 45, tzinfo=UTC)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, wait longer for an ack than a query does: a busy machine may need it."""
    monkeypatch.setattr(progress, "_TIMEOUT", 30)


@pytest.fixture
def bucket(with_js: Any, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    with_js(lambda js: js.create_key_value(bucket=name, history=8))
    return name


@pytest.fixture
def values(with_js: Any, bucket: str, found: Any) -> Callable[[str], list[dict[str, Any]]]:
    """All records that were stored under a key, oldest first."""

    def read(key: str) -> list[dict[str, Any]]:
        async def history(js: JetStreamContext) -> list[dict[str, Any]]:
            kv = await js.key_value(bucket)
            try:
                await kv.get(key)
            except KeyNotFoundError:
                return []
            return [json.loads(entry.value or b"") for entry in await found(kv.history, key)]

        return with_js(history)  # type: ignore[no-any-return]

    return read


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[[int], str]:
    def stream(count: int) -> str:
        name = stream_name()

        async def fill(js: JetStreamContext) -> None:
            await js.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], allow_direct=True, allow_batched=True))
            async with jsx.FastPublisher(js) as publisher:
                await publisher.add_many((f"{name}.a", b"%d" % row) for row in range(count))

        with_js(fill)
        return name

    return stream


RECORDS = [
    SourceRecord((ReadPosition("A", CREATED, 9, 3), ReadPosition("B", "", 0))),
    SourceRecord((), "app-1"),
    SinkRecord("A", "q", 7, 500, 3, 2, 1, "app-1"),
    SinkRecord("A", "q", None, 0),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_read_back_and_no_reader_takes_it_for_its_position(record: SourceRecord | SinkRecord) -> None:
    data = record.encode(NOW)
    assert progress.decode(data) == record
    with pytest.raises(ValueError, match="is not a position"):
        StoredOffset.decode("name", data, 1)


def test_a_source_record_is_readable() -> None:
    assert RECORDS[0].encode(NOW).decode() == (
        '{"v":1,"kind":"spark-source","time":"2026-01-31T13:45:00+00:00","streams":'
        '{"A":{"created":"2026-01-31T08:00:00Z","last_read":9,"lag":3},"B":{"created":"","last_read":0}}}'
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b'{"v":1}',
        b'{"v":2,"kind":"spark-source","streams":{}}',
        b'{"v":1,"kind":"other"}',
        b'{"v":1,"kind":"spark-source","streams":[]}',
        b'{"v":1,"kind":"spark-source","streams":{"A":7}}',
        b'{"v":1,"kind":"spark-source","streams":{"A":{"created":"x","last_read":-1}}}',
        b'{"v":1,"kind":"spark-sink","stream":"A","query":"q","batch":true,"rows":0}',
        b'{"v":1,"kind":' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
)
def test_other_values_are_no_records(data: bytes) -> None:
    assert progress.decode(data) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"progressBucket": "b"}, "'progressBucket': it needs 'progressName'"),
        ({"progressName": "n"}, "'progressName': it needs 'progressBucket'"),
        ({"progressBucket": "a.b", "progressName": "n"}, "'a.b' is not a valid bucket name"),
        ({"progressBucket": "b", "progressName": "a b"}, "'a b' is not a key of tokens"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], message: str) -> None:
    options = {"servers": "nats://unused", "stream": "A"} | given
    with pytest.raises(OptionError, match=message):
        ReadOptions.parse(options, streaming=True)
    with pytest.raises(OptionError, match=message):
        WriteOptions.parse(options, streaming=True)


def test_a_batch_read_has_no_progress() -> None:
    options = {"servers": "nats://unused", "stream": "A", "progressBucket": "b", "progressName": "n"}
    with pytest.raises(OptionError, match="it applies to streaming reads"):
        ReadOptions.parse(options)


class TestMirror:
    def test_a_changed_position_is_stored_once_a_second_and_the_last_one_at_once(
        self, with_js: Any, bucket: str, values: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [100.0]
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        mirror = PositionMirror(bucket, "q", "app-1")

        async def work(js: JetStreamContext) -> None:
            async def store(seq: int, *, last: bool = False) -> None:
                await mirror.store(js, {"A": Position(CREATED, seq)}, {"A": 100 - seq}, last=last)

            await store(1)
            await store(2)
            clock[0] += 1.1
            await store(3)
            clock[0] += 1.1
            await store(3)
            await store(4)
            await store(5)
            await store(6, last=True)
            await store(6, last=True)

        with_js(work)
        found = values("q")
        assert [one["streams"]["A"]["last_read"] for one in found] == [1, 3, 4, 6]
        assert [one["streams"]["A"]["lag"] for one in found] == [99, 97, 96, 94]
        assert {one["application"] for one in found} == {"app-1"}

    @pytest.mark.parametrize("silent", [False, True])
    def test_a_failure_is_a_warning_and_the_next_attempt_waits(
        self,
        server: NatsServer,
        with_js: Any,
        stream_name: Any,
        silent: bool,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        clock = [100.0]
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(progress, "_TIMEOUT", 0.2)
        bucket = stream_name()
        mirror = PositionMirror(bucket, "q")

        async def work(js: JetStreamContext) -> None:
            if silent:  # a stream without acks
                await js.add_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], no_ack=True)
            start = time.monotonic()
            for seq in range(1, 5):
                await mirror.store(js, {"A": Position(CREATED, seq)}, {}, last=False)
            assert time.monotonic() - start < 20
            clock[0] += 31
            await mirror.store(js, {"A": Position(CREATED, 5)}, {}, last=False)

        with caplog.at_level(logging.WARNING, logger="jetstream_ext.spark"):
            with_js(work)
        assert len(caplog.records) == 2
        wanted = (
            f"the progress 'q' was not stored in bucket '{bucket}': timed out after 0.2 s while waiting for the ack of "
            f"$KV.{bucket}.q (without the permission to publish there, none comes); the query continues"
            if silent
            else f"the progress 'q' was not stored: bucket '{bucket}' does not exist; create it with 'nats kv add {bucket}'; "
            "the query continues"
        )
        assert {record.getMessage() for record in caplog.records} == {wanted}

    def test_the_name_is_refused_as_the_name_of_a_reader(self, with_js: Any, bucket: str) -> None:
        async def work(js: JetStreamContext) -> None:
            await PositionMirror(bucket, "q").store(js, {"A": Position(CREATED, 1)}, {}, last=True)
            with pytest.raises(ValueError, match="is not a position"):
                await OffsetStore(js, bucket).fetch("q")

        with_js(work)


def test_a_sink_without_a_connection_goes_on(cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = WriteOptions.parse(
        {
            "servers": "nats://127.0.0.1:1",
            "requestTimeout": "0.2",
            "stream": "A",
            "progressBucket": "b",
            "progressName": "n",
        },
        streaming=True,
    )
    with caplog.at_level(logging.WARNING, logger="jetstream_ext.spark"):
        progress.store_sink_progress(options, SinkRecord("A", "q", 1, 1))
    assert "the progress 'n.sink' was not stored in bucket 'b': no connection" in caplog.text


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def limited(spark: SparkSession) -> bool:
    """Whether this Spark limits micro-batches, and tells the source where each starts."""
    return tuple(map(int, spark.version.split(".")[:2])) >= (4, 2)


class TestWithSpark:
    @pytest.fixture
    def start(self, spark: SparkSession, server: NatsServer, bucket: str, tmp_path: Path) -> Callable[..., Any]:
        """Start a copy of a stream whose source and sink mirror their progress as `copy`."""

        def query(source: str, target: str, now: bool = True, **options: str) -> Any:
            common = {"servers": server.url, "progressBucket": bucket, "progressName": "copy"}
            frame = spark.readStream.format("jetstream").options(**common, **options).load(source)
            frame = frame.selectExpr(f"'{target}.b' AS subject", "data")
            writer = frame.writeStream.format("jetstream").options(**common).option("stream", target)
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).queryName("copying")
            return (writer.trigger(availableNow=True) if now else writer).start()

        return query

    def test_a_query_mirrors_what_it_has_read_and_written(
        self, spark: SparkSession, make: Any, start: Any, values: Any
    ) -> None:
        source, target = make(1000), make(0)
        query = start(source, target, **({"maxRowsPerTrigger": "400"} if limited(spark) else {}))
        query.awaitTermination()
        assert query.exception() is None
        if limited(spark):  # before, Spark ends the query before it commits the last micro-batch
            last = values("copy")[-1]
            assert last["kind"] == "spark-source"
            assert last["streams"][source].items() >= {"last_read": 1000, "lag": 0}.items()
        written = values("copy.sink")
        assert sum(one["rows"] for one in written) == 1000
        assert {(one["stream"], one["query"]) for one in written} == {(target, str(query.id))}
        assert [one["batch"] for one in written] == list(range(len(written)))

    def test_the_mirror_of_a_running_query_follows_it(
        self, spark: SparkSession, make: Any, start: Any, with_js: Any, bucket: str
    ) -> None:
        source, target = make(10), make(0)

        async def position(js: JetStreamContext) -> int:
            try:
                record = json.loads((await (await js.key_value(bucket)).get("copy")).value or b"")
            except KeyNotFoundError:
                return -1
            return int(record["streams"][source]["last_read"])

        query = start(source, target, now=False)
        try:
            if limited(spark):  # before, Spark tells the source when it commits the next micro-batch
                eventually(lambda: with_js(position) == 10)
            else:
                eventually(lambda: with_js(lambda js: js.stream_info(target)).state.messages == 10)
            with_js(lambda js: js.publish(f"{source}.a", b""))
            eventually(lambda: with_js(position) == (11 if limited(spark) else 10))
        finally:
            query.stop()

    def test_a_query_goes_on_without_the_bucket(
        self, make: Any, start: Any, with_js: Any, bucket: str, stream_name: Any
    ) -> None:
        source, target = make(10), make(0)
        with_js(lambda js: js.delete_key_value(bucket))
        query = start(source, target)
        query.awaitTermination()
        assert query.exception() is None
        assert with_js(lambda js: js.stream_info(target)).state.messages == 10

    def test_a_listener_reports_each_stream_of_each_micro_batch(
        self, spark: SparkSession, make: Any, start: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        source, target = make(1000), make(0)
        found: list[StreamProgress] = []

        def keep(one: StreamProgress) -> None:
            found.append(one)
            raise ZeroDivisionError  # which must not stop the reports

        listener = ProgressListener(keep)
        spark.streams.addListener(listener)
        try:
            with caplog.at_level(logging.INFO, logger="jetstream_ext.spark"):
                query = start(source, target, **({"maxRowsPerTrigger": "400"} if limited(spark) else {}))
                query.awaitTermination()
                eventually(lambda: sum(one.rows or 0 for one in found) == 1000)
        finally:
            if "connect" not in type(spark).__module__:  # there it deadlocks if an event arrives meanwhile (Spark 4.3)
                spark.streams.removeListener(listener)
        rows = [one for one in found if one.rows]
        assert {(one.query, one.stream) for one in rows} == {("copying", source)}
        if limited(spark):
            assert [(one.batch, one.rows, one.read, one.last_read, one.lag) for one in rows] == [
                (0, 400, 400, 400, 600),
                (1, 400, 400, 800, 200),
                (2, 200, 200, 1000, 0),
            ]
            assert all(one.rate for one in rows)
        records = [record for record in caplog.records if getattr(record, "progress", None) in rows]
        assert len(records) == len(rows)
        assert "the function on_progress raised" in caplog.text


def test_a_listener_refuses_what_it_cannot_call() -> None:
    async def report(_: StreamProgress) -> None: ...

    with pytest.raises(
        TypeError, match=r"^on_progress must be a plain function, not an async one, which would never run"
    ):
        ProgressListener(report)
    given: Any = "x"
    with pytest.raises(TypeError, match=r"^on_progress must be a function or None, not 'x'$"):
        ProgressListener(given)


def test_rows_of_a_source_with_several_streams_are_not_attributed() -> None:
    def offset(**streams: int) -> str:
        return json.dumps({"v": 2, "streams": {name: {"created": "x", "seq": seq} for name, seq in streams.items()}})

    pytest.importorskip("pyspark")
    from jetstream_ext.spark.listener import progress_of

    source = SimpleNamespace(
        startOffset=offset(A=3),
        endOffset=offset(A=5, B=2),
        latestOffset=offset(A=9, B=2),
        numInputRows=4,
        processedRowsPerSecond=float("nan"),
    )
    other = SimpleNamespace(startOffset=None, endOffset='{"topic":{"0":5}}', latestOffset=None)
    found = progress_of(SimpleNamespace(name=None, id="id", batchId=7, sources=[source, other]))
    assert found == [
        StreamProgress("id", 7, "A", last_read=5, read=2, rows=None, rate=None, lag=4),
        StreamProgress("id", 7, "B", last_read=2, read=2, rows=None, rate=None, lag=0),
    ]
