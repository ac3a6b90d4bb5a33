"""One Spark session for all tests that need one, because starting it takes longer than all of them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import nats
import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from pyspark import TaskContext
from pyspark.sql import Row, datasource
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceArrowWriter
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from jetstream_ext.spark import connection
from jetstream_ext.spark.connection import Connections
from jetstream_ext.testing import NatsServer
from pyspark_jetstream import DefaultSource as StreamSource
from pyspark_jetstream_kv import DefaultSource as BucketSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "correct-horse-battery"

GUARDED = f"""
http: "127.0.0.1:-1"
authorization {{
  users: [
    {{user: all, password: "{SECRET}"}}
    {{user: less, password: "{SECRET}", permissions: {{publish: "_INBOX.>"}}}}
  ]
}}
"""


@pytest.fixture(scope="session")
def guarded() -> Iterator[NatsServer]:
    """A server that requires a password and lists its connections over HTTP."""
    with NatsServer(config=GUARDED) as server:
        yield server


@pytest.fixture(scope="session")
def secret() -> str:
    """The password of `guarded`; Spark's workers have it in JETSTREAM_EXT_TEST_PASSWORD."""
    return SECRET


@pytest.fixture
def connection_names(guarded: NatsServer) -> Callable[[], list[str]]:
    """List the names of the connections that `guarded` has."""

    def names() -> list[str]:
        with urllib.request.urlopen(f"{guarded.endpoints['monitoring'][0]}/connz") as answer:
            return [one.get("name", "") for one in json.load(answer)["connections"]]  # a new one has none yet

    return names


@contextmanager
def _own_connections() -> Iterator[None]:
    made: dict[int, Connections] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "_by_process", made)
            yield
    finally:
        for one in made.values():
            one.close()


@pytest.fixture(autouse=True)
def _connections_are_closed() -> Iterator[None]:
    """Close the connections of this process after each test, also those that a failure has left lent."""
    with _own_connections():
        yield


@pytest.fixture(scope="session")
def own_connections() -> Callable[[], AbstractContextManager[None]]:
    """Let the connector have connections of its own in a block, as in another process, and close them after it."""
    return _own_connections


@pytest.fixture
def cache() -> Connections:
    """The connections of the test."""
    return connection.connections()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two threads; the third attempt of a task is its last (plain ``local[2]`` would not retry any).

    ``JETSTREAM_EXT_SPARK_MASTER`` and ``JETSTREAM_EXT_SPARK_REMOTE`` run the tests elsewhere.
    """
    from pyspark.sql import SparkSession

    # The JVM keeps the environment that it was started in, and looks for formats with the first python3 on PATH.
    os.environ["JETSTREAM_EXT_TEST_PASSWORD"] = SECRET
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    if remote := os.environ.get("JETSTREAM_EXT_SPARK_REMOTE"):
        builder = builder.remote(remote)  # Spark Connect
    else:
        builder = builder.master(os.environ.get("JETSTREAM_EXT_SPARK_MASTER", "local[2,3]"))
    builder = (
        builder.appName("jetstream-ext tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.executor.memory", "1g")
    )
    session = builder.getOrCreate()
    if not remote:
        session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@asynccontextmanager
async def _connected(url: str, **credentials: str) -> AsyncIterator[JetStreamContext]:
    nc = await nats.connect(url, connect_timeout=10, **credentials)  # type: ignore[arg-type]
    try:
        yield nc.jetstream(timeout=30)
    finally:
        await nc.close()


@pytest.fixture
def with_js(server: NatsServer) -> Callable[..., Any]:
    """Run a coroutine function with a JetStream context on a separate connection."""

    def run(function: Callable[[JetStreamContext], Awaitable[Any]], url: str = server.url, **credentials: str) -> Any:
        async def connected() -> Any:
            async with _connected(url, **credentials) as js:
                return await function(js)

        return asyncio.run(connected())

    return run


@contextmanager
def _cell(*what: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the cell {what!r:.1000}")
        raise


@pytest.fixture(scope="session")
def cell() -> Callable[..., AbstractContextManager[None]]:
    """Name the cell of a table in the errors of a block: ``for row in TABLE: with cell(row): …``."""
    return _cell


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """The sink gets rows while the task is running, not when the partition is complete."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "100")
    yield
    spark.conf.set(name, before)


# -- sinks, driven as Spark drives them, but without a JVM ----------------------------------------------------------


_ARROW_WRITERS = (DataSourceArrowWriter, getattr(datasource, "DataSourceStreamArrowWriter", DataSourceArrowWriter))


class _Task(TaskContext):
    """The context of a task."""

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)

    def __init__(self, partition: int, batch: int) -> None:
        self._partition = partition
        self._properties = {"sql.streaming.queryId": "a-query", "streaming.sql.batchId": f"{batch}"}

    def partitionId(self) -> int:  # noqa: N802
        return self._partition

    def getLocalProperty(self, key: str) -> str | None:  # noqa: N802
        return self._properties.get(key)


class Sink:
    """A sink; rows are dicts or tuples of the columns' values, and text may be given as bytes.

    An exception among the rows is raised when the task comes to it, and a function is called.
    """

    def __init__(
        self, kind: type, options: dict[str, str], columns: Mapping[str, DataType], *, rows: bool = False
    ) -> None:
        self._kind, self._options = kind, options
        self._schema = StructType()
        for name, kind_ in columns.items():
            self._schema = self._schema.add(name, kind_)

    def writer(self, *, streaming: bool = True, overwrite: bool = False) -> Any:
        """Plan a write."""
        source = self._kind(CaseInsensitiveDict(self._options))
        return (source.streamWriter if streaming else source.writer)(self._schema, overwrite)

    def task(self, writer: Any, rows: Iterable[Any], *, batch: int = 0, partition: int = 0) -> Any:
        """Run a task of a write."""
        writer = pickle.loads(pickle.dumps(writer))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TaskContext, "get", lambda: _Task(partition, batch))
            if isinstance(writer, _ARROW_WRITERS):
                return writer.write(self._batches(rows))
            return writer.write(self._given(rows))

    def write(
        self, parts: Iterable[Iterable[Any]], *, batch: int = 0, streaming: bool = True, **how: bool
    ) -> list[Any]:
        """Write a micro-batch, given by partition, and commit it, or abort it if a task fails; return the tasks' results."""
        writer, end = self.writer(streaming=streaming, **how), (batch,) if streaming else ()
        results: list[Any] = []
        failure: Exception | None = None
        for number, rows in enumerate(parts):
            try:
                results.append(self.task(writer, rows, batch=batch, partition=number))
            except Exception as error:
                results.append(None)
                failure = failure or error
        if failure is not None:
            writer.abort(results, *end)
            raise failure
        writer.commit(results, *end)
        return results

    def save(self, parts: Iterable[Iterable[Any]]) -> list[Any]:
        """Write a DataFrame, given by partition."""
        return self.write(parts, streaming=False)

    def _given(self, rows: Iterable[Any]) -> Iterator[Row]:
        names = self._schema.names
        for row in rows:
            if isinstance(row, Exception):
                raise row
            if callable(row):
                row()
                continue
            values = [row.get(name) for name in names] if isinstance(row, dict) else (*row, *[None] * len(names))
            yield Row(*names)(*values[: len(names)])

    def _batches(self, rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Yield rows a few at a time."""
        given, kinds = self._given(rows), [to_arrow_type(field.dataType) for field in self._schema]
        while some := list(islice(given, 5)):
            columns = zip(*some, strict=True)
            yield pa.RecordBatch.from_arrays(
                [_array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names=self._schema.names
            )


def _array(values: Sequence[Any], kind: Any) -> Any:
    """Return a column; Spark does not check that text is UTF-8."""
    if pa.types.is_string(kind):
        texts = [value.encode(errors="surrogateescape") if isinstance(value, str) else value for value in values]
        return pa.array(texts, pa.binary()).view(pa.string())
    if pa.types.is_map(kind) and any(isinstance(value, dict) for value in values):
        values = [None if value is None else list(value.items()) for value in values]
        names = _array([name for value in values for name, _ in value or ()], kind.key_type)
        items = _array([item for value in values for _, item in value or ()], kind.item_type)
        offsets, end = [], 0
        for value in values:
            offsets.append(None if value is None else end)
            end += len(value or ())
        return pa.MapArray.from_arrays(pa.array([*offsets, end], pa.int32()), names, items)
    return pa.array(values, kind)


@pytest.fixture(scope="session")
def sink(server: NatsServer) -> Callable[..., Sink]:
    """Make a sink: ``sink(stream, semantics, **options)``, with other columns than subject and data if `columns` are given."""

    def make(
        stream: str, semantics: str = "dedupe", columns: Mapping[str, DataType] | None = None, **options: str
    ) -> Sink:
        given = {"subject": StringType(), "data": BinaryType()}
        if semantics == "dedupe":
            given["msgId"] = StringType()
        given_options = {"servers": server.url, "stream": stream, "semantics": semantics} | options
        return Sink(StreamSource, given_options, columns or given)

    return make


@pytest.fixture(scope="session")
def kv_sink(server: NatsServer) -> Callable[..., Sink]:
    """Make a sink of a bucket: ``kv_sink(bucket, **options)``, with other columns than key and value if `columns` are given."""

    def make(bucket: str, columns: Mapping[str, DataType] | None = None, **options: str) -> Sink:
        given = {"key": StringType(), "value": BinaryType()}
        return Sink(BucketSource, {"servers": server.url, "bucket": bucket} | options, columns or given)

    return make
