"""One Spark session for all tests that need one, because starting it takes longer than all of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import nats
import pytest
from nats.js import JetStreamContext

from jetstream_ext.spark import connection
from jetstream_ext.spark.connection import Connections
from jetstream_ext.testing import NatsServer

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
