"""The data sources driven as Spark drives them, but without a JVM: offsets go through JSON, readers through pickle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import nats
import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from pyspark.sql.datasource import CaseInsensitiveDict

import jetstream_ext as jsx
from jetstream_ext.testing import NatsServer
from pyspark_jetstream import DefaultSource as StreamSource
from pyspark_jetstream_kv import DefaultSource as BucketSource

Offset = dict[str, Any]
Message = dict[str, Any]


def _spark_limits_batches() -> bool:
    try:
        import pyspark.sql.streaming.datasource  # noqa: F401
    except ImportError:  # before Spark 4.2
        return False
    return True


class Reader:
    """One reader, planned and read."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def read(self, partition: Any) -> list[Message]:
        """Read a partition as a task does."""
        return [row for batch in self.batches(partition) for row in batch.to_pylist()]

    def batches(self, partition: Any) -> Iterator[pa.RecordBatch]:
        reader, partition = pickle.loads(pickle.dumps((self.reader, partition)))
        return iter(reader.read(partition))


class BatchRead(Reader):
    """A batch query."""

    def partitions(self) -> list[Any]:
        return list(self.reader.partitions())

    def rows(self) -> list[Message]:
        return [row for partition in self.partitions() for row in self.read(partition)]


class StreamQuery(Reader):
    """A streaming query."""

    def initial(self) -> Offset:
        return _stored(self.reader.initialOffset())

    def latest(self, start: Offset) -> Offset:
        """Return the end of the next micro-batch, within the options' limits."""
        if not _spark_limits_batches():
            return _stored(self.reader.latestOffset())
        return _stored(self.reader.latestOffset(_stored(start), self.reader.getDefaultReadLimit()))

    def next(self, start: Offset, within: float = 60) -> Offset:
        """Return the end of the next micro-batch, for which Spark asks again and again."""
        deadline = time.monotonic() + within
        while (end := self.latest(start)) == start:
            assert time.monotonic() < deadline, "there is no new message"
            time.sleep(0.01)
        return end

    def partitions(self, start: Offset, end: Offset) -> list[Any]:
        return list(self.reader.partitions(_stored(start), _stored(end)))

    def parts(self, start: Offset, end: Offset) -> list[list[Message]]:
        """Return the rows of a micro-batch, by partition."""
        return [self.read(partition) for partition in self.partitions(start, end)]

    def rows(self) -> list[Message]:
        """Return the rows of the first micro-batch."""
        start = self.initial()
        return [row for part in self.parts(start, self.latest(start)) for row in part]

    def seqs(self, start: Offset, end: Offset) -> list[int]:
        return [row["seq"] for part in self.parts(start, end) for row in part]


def _stored(offset: Offset) -> Offset:
    """Return an offset as it comes out of Spark's log."""
    return dict(json.loads(json.dumps(offset)))


@pytest.fixture(scope="session")
def batch_read(server: NatsServer) -> Callable[..., BatchRead]:
    """Make a batch read of a stream: ``batch_read(stream, **options)``."""

    def make(stream: str, **options: str) -> BatchRead:
        return BatchRead(_reader(StreamSource, {"servers": server.url, "stream": stream} | options, "reader"))

    return make


@pytest.fixture(scope="session")
def bucket_read(server: NatsServer) -> Callable[..., BatchRead]:
    """Make a batch read of a bucket: ``bucket_read(bucket, **options)``."""

    def make(bucket: str, **options: str) -> BatchRead:
        return BatchRead(_reader(BucketSource, {"servers": server.url, "bucket": bucket} | options, "reader"))

    return make


@pytest.fixture(scope="session")
def stream_query(server: NatsServer) -> Callable[..., StreamQuery]:
    """Make a streaming query: ``stream_query(stream, **options)``; ``stream=""`` leaves the option out."""

    def make(stream: str, **options: str) -> StreamQuery:
        given = {"servers": server.url} | ({"stream": stream} if stream else {}) | options
        return StreamQuery(_reader(StreamSource, given, "streamReader"))

    return make


@pytest.fixture(scope="session")
def bucket_query(server: NatsServer) -> Callable[..., StreamQuery]:
    """Make a change feed of a bucket: ``bucket_query(bucket, **options)``."""

    def make(bucket: str, **options: str) -> StreamQuery:
        return StreamQuery(_reader(BucketSource, {"servers": server.url, "bucket": bucket} | options, "streamReader"))

    return make


def _reader(kind: type, options: dict[str, str], method: str) -> Any:
    source = kind(CaseInsensitiveDict(options))
    return getattr(source, method)(source.schema())


@pytest.fixture
def make_stream(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    """Make a stream that can be read and written, with `messages` messages on ``<stream>.a`` whose data are numbers."""

    def make(messages: int = 0, *, name: str = "", **config: Any) -> str:
        name = name or stream_name()

        async def create(js: JetStreamContext) -> None:
            await js.add_stream(
                StreamConfig(
                    name=name,
                    subjects=[f"{name}.>", f"_spark.{name}.>"],
                    allow_direct=True,
                    allow_batched=True,
                    allow_atomic=True,
                ).evolve(**config)
            )

        with_js(create)
        if messages:
            _publish(with_js, name, [(f"{name}.a", b"%d" % number) for number in range(messages)])
        return name

    return make


def _publish(with_js: Any, name: str, messages: list[tuple[str, bytes]]) -> None:
    async def publish(js: JetStreamContext) -> None:
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add_many(messages)

    with_js(publish)


@pytest.fixture
def publish(with_js: Any) -> Callable[[list[tuple[str, bytes]]], None]:
    """Publish messages: ``publish([(subject, data), …])``."""
    return lambda messages: _publish(with_js, "", messages)


@pytest.fixture
def stored(with_js: Any) -> Callable[[str, str], Counter[bytes]]:
    """Count the messages of a stream on a subject, by their data: ``stored(stream, subject)``."""

    async def scan(js: JetStreamContext, stream: str, subject: str) -> Counter[bytes]:
        return Counter(
            one.data for one in await jsx.DirectGet(js, stream).scan(subject=subject, confirm=True).to_list()
        )

    return lambda stream, subject: with_js(lambda js: scan(js, stream, subject))


@pytest.fixture
def requests_seen(server: NatsServer) -> Callable[..., Any]:
    """Record the subjects of all requests about some streams: ``with requests_seen(stream, …) as subjects:``."""

    @contextlib.contextmanager
    def record(*streams: str) -> Iterator[list[str]]:
        subjects: list[str] = []
        ready, done = threading.Event(), threading.Event()

        async def listen() -> None:
            async def take(msg: Any) -> None:
                if not set(streams).isdisjoint(msg.subject.split(".")):
                    subjects.append(msg.subject)

            async with await nats.connect(server.url, connect_timeout=10) as nc:
                requests = await nc.subscribe("$JS.API.>", cb=take)
                await nc.flush()
                ready.set()
                await asyncio.to_thread(done.wait)
                await nc.flush()
                await requests.drain()  # the callback runs after the flush

        thread = threading.Thread(target=lambda: asyncio.run(listen()))
        thread.start()
        try:
            assert ready.wait(60)
            yield subjects
        finally:
            done.set()
            thread.join()

    return record


class MeasuredServer(NatsServer):
    """A server that reports how many messages it has sent."""

    def sent(self) -> int:
        with urllib.request.urlopen(f"{self.endpoints['monitoring'][0]}/varz") as answer:
            return int(json.load(answer)["out_msgs"])


@pytest.fixture(scope="session")
def measured() -> Iterator[MeasuredServer]:
    with MeasuredServer(config='http: "127.0.0.1:-1"') as server:
        yield server
