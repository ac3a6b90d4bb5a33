"""The time to live of rows: the column and the option ``msgTtl``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from nats.js.api import StreamConfig
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

import jetstream_ext as jsx
from jetstream_ext.spark.bad_rows import TaskResult
from jetstream_ext.spark.options import OptionError, WriteOptions
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.spark.rows import Columns
from jetstream_ext.testing import NatsServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEMANTICS = ["dedupe", "transactional", "none"]


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    def make_stream(**config: Any) -> str:
        name = stream_name()
        given = StreamConfig(
            name=name,
            subjects=[f"{name}.*", f"_spark.{name}.>"],
            allow_direct=True,
            allow_batched=True,
            allow_atomic=True,
            allow_msg_ttl=True,
        )
        with_js(lambda js: js.add_stream(given.evolve(**config)))
        return name

    return make_stream


@pytest.fixture
def stored(with_js: Any) -> Callable[[str], dict[str, str | None]]:
    """Return the TTL of each message of a stream by its data, without the sink's markers."""

    def read(stream: str) -> dict[str, str | None]:
        messages = with_js(lambda js: jsx.DirectGet(js, stream).scan(subject=f"{stream}.*").to_list())
        return {message.data.decode(): message.headers.get("Nats-TTL") for message in messages}

    return read


def given(server: NatsServer, stream: str, semantics: str, **options: str) -> dict[str, str]:
    partitions = {"sinkPartitions": "1"} if semantics == "transactional" else {}
    return {"servers": server.url, "stream": stream, "semantics": semantics} | partitions | options


def until_left(stored: Any, stream: str, left: set[str]) -> None:
    deadline = time.monotonic() + 30
    while set(stored(stream)) != left:
        assert time.monotonic() < deadline, stored(stream)
        time.sleep(0.1)  # the server's clock decides


def test_messages_expire_and_never_outlives_max_age(
    spark: SparkSession, server: NatsServer, make: Any, stored: Any, with_js: Any
) -> None:
    texts = spark.createDataFrame(
        [("short", "1s"), ("never", "never"), ("long", "1h"), ("none", None)], "data string, msgTtl string"
    )
    numbers = spark.range(1).selectExpr("'number' AS data", "CAST(1 AS smallint) AS msgTtl")

    def write(rows: DataFrame, name: str) -> None:
        options = given(server, name, "dedupe", subject=f"{name}.a")
        rows.coalesce(1).write.format("jetstream").mode("append").options(**options).save()

    name, limited = make(), make(max_age=2)
    write(texts, name)
    write(numbers, name)
    write(texts, limited)
    assert {"never": "never", "long": "3600", "none": None}.items() <= stored(name).items()
    until_left(stored, name, {"never", "long", "none"})
    until_left(stored, limited, {"never"})
    assert with_js(lambda js: js.stream_info(limited)).state.last_seq >= 4


@pytest.fixture
def write(sink: Any) -> Callable[..., TaskResult]:
    """Write rows of subject, data and TTL as an executor does."""

    def run(stream: str, rows: list[tuple[Any, ...]], semantics: str, **more: str) -> TaskResult:
        columns = {"subject": StringType(), "data": BinaryType()}
        if "msgTtl" not in more:
            columns["msgTtl"] = StringType()
        partitions = {"sinkPartitions": "1"} if semantics == "transactional" else {}
        target = sink(stream, semantics, columns, **partitions, **more)
        done: TaskResult = target.task(target.writer(), rows)
        return done

    return run


def test_the_ttl_is_part_of_what_a_row_is(cell: Any, make: Any, write: Any, with_js: Any) -> None:
    def check(semantics: str) -> None:
        name = make()
        rows = [(f"{name}.a", b"x", ttl) for ttl in ("90", "90s", "2h", None)]
        write(name, rows[:2], semantics)
        write(name, [*reversed(rows)], semantics)
        messages = with_js(lambda js: jsx.DirectGet(js, name).scan(subject=f"{name}.*").to_list())
        assert sorted(message.headers.get("Nats-TTL", "") for message in messages) == ["", "7200", "90", "90"]

    for semantics in ["dedupe", "transactional"]:
        with cell(semantics):
            check(semantics)


def test_a_replay_does_not_store_expired_rows_again(make: Any, write: Any, stored: Any) -> None:
    names = {semantics: make() for semantics in ("dedupe", "transactional")}
    for attempt in range(2):
        for semantics, name in names.items():
            write(name, [(f"{name}.a", b"x", "1s"), (f"{name}.a", b"y", None)], semantics)
            if attempt:
                assert set(stored(name)) == {"y"}
        for name in names.values():
            until_left(stored, name, {"y"})


def test_the_stream_must_allow_it(cell: Any, make: Any, write: Any) -> None:
    for semantics in SEMANTICS:
        with cell(semantics):
            name = make(allow_msg_ttl=False)
            advice = rf"needs it; enable it with allow_msg_ttl=True .*jetstream-ext enable {name} --ttl"
            with pytest.raises(PlanningError, match=f"allow_msg_ttl is off, and the option 'msgTtl' {advice}"):
                write(name, [], semantics, msgTtl="never")
            with pytest.raises(PlanningError, match=f"allow_msg_ttl is off, and the column 'msgTtl' {advice}"):
                write(name, [], semantics)


def test_an_invalid_option_is_refused(cell: Any) -> None:
    for value, problem in [
        ("0", "must be a whole number of seconds of at least 1, not 0"),
        ("500ms", "a TTL must be a whole number of seconds of at least 1, not 0.5"),
        ("101y", "is not a whole number of seconds"),
        ("36526d", "must be at most 100 years"),
    ]:
        with cell(value, problem), pytest.raises(OptionError, match=f"option 'msgTtl': .*{problem}"):
            WriteOptions.parse({"servers": "nats://s", "stream": "S", "msgTtl": value}, streaming=True)


def test_the_option_beside_the_column_is_refused() -> None:
    options = WriteOptions.parse({"servers": "nats://s", "stream": "S", "subject": "s", "msgTtl": "1h"}, streaming=True)
    schema = StructType().add("data", StringType()).add("msgttl", IntegerType())
    with pytest.raises(OptionError, match="option 'msgTtl': there is a column 'msgTtl' as well; drop one of them"):
        Columns.of(schema, options)
    schema = StructType().add("data", StringType()).add("msgTtl", "double")
    with pytest.raises(OptionError, match="it is double, but must be tinyint or smallint or int or bigint or string"):
        Columns.of(schema, options)
