"""Errors of the sink on the driver, before any task runs: Spark makes the writers there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from nats.js.api import StreamConfig
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
)

from jetstream_ext.spark.options import OptionError
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.spark.source import JetStreamDataSource
from jetstream_ext.testing import NatsServer

TYPES: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "array<string>": ArrayType(StringType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,array<string>>": MapType(StringType(), ArrayType(StringType())),
}
BOTH = {"subject": "string", "data": "string"}


@pytest.fixture
def make(with_js: Any, stream_name: Callable[[], str]) -> Callable[..., str]:
    def make_stream(**config: Any) -> str:
        name = stream_name()
        defaults = StreamConfig(
            name=name, subjects=[f"{name}.*", f"_spark.{name}.>"], allow_batched=True, allow_atomic=True
        )
        if config.get("subjects") == "one":
            config["subjects"] = [f"{name}.a"]
        with_js(lambda js: js.add_stream(defaults.evolve(**config)))
        return name

    return make_stream


@pytest.fixture
def writer(server: NatsServer) -> Any:
    def make_writer(
        columns: dict[str, str], name: str, *, overwrite: bool = False, streaming: bool = False, **options: str
    ) -> Any:
        given = CaseInsensitiveDict({"servers": server.url, "stream": name, "requestTimeout": "5"} | options)
        source, schema = JetStreamDataSource(given), StructType()
        for column, kind in columns.items():
            schema = schema.add(column, TYPES[kind])
        return (source.streamWriter if streaming else source.writer)(schema, overwrite)

    return make_writer


TRANSACTIONAL = {"semantics": "transactional"}
VERSION = {"txnAppId": "a", "txnVersion": "0"}


def test_unsuitable_streams_and_options_are_refused(cell: Any, make: Any, writer: Any) -> None:
    for streaming, (config, options, message) in itertools.product(
        [False, True],
        [
            ({"allow_batched": False}, {}, "allow_batched is off, and semantics=dedupe needs it; enable it"),
            ({"allow_batched": False}, {"semantics": "none"}, "allow_batched is off"),
            ({"allow_atomic": False}, TRANSACTIONAL | {"sinkPartitions": "2"}, "allow_atomic is off"),
            ({"no_ack": True}, {"semantics": "none"}, "has no_ack, so it never confirms that a row is stored"),
            ({"allow_msg_counter": True, "allow_direct": True}, {}, "holds counters (allow_msg_counter)"),
            ({"max_msgs_per_subject": 2}, {}, "drop the newer one as a duplicate; use semantics=transactional"),
            ({"retention": "interest"}, TRANSACTIONAL | {"sinkPartitions": "2"}, "removes the sink's markers at once"),
            (
                {"max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True},
                TRANSACTIONAL | {"sinkPartitions": "2"},
                "has discard_new_per_subject, so it refuses new markers of the sink",
            ),
            (
                {"subjects": "one"},
                TRANSACTIONAL | {"sinkPartitions": "2"},
                "keeps its markers: add that to the stream",
            ),
            ({}, {"subject": "other.subject"}, "'other.subject' (option 'subject') is not among its subjects"),
            ({}, {"subject": "a.*"}, "'subject': subject 'a.*' has a wildcard"),
            ({}, {"stream": "NOT_THERE"}, "stream 'NOT_THERE' does not exist"),
            ({}, {"stream": "A,B"}, "a write goes to one stream"),
            ({}, {"semantic": "none"}, "did you mean 'semantics'"),
            ({}, {"semantics": "exactly"}, "not one of dedupe, transactional, none"),
            ({}, {"startingOffsets": "latest"}, "applies only to reads"),
            ({}, {"sinkPartitions": "3"}, "it is for semantics=transactional, not for dedupe"),
            ({}, TRANSACTIONAL | {"sinkPartitions": "0"}, "'sinkPartitions': '0' is not an integer of at least 1"),
            ({}, TRANSACTIONAL | {"sinkPartitions": "2", "transactionRows": "1000"}, "1000 is more than 998"),
            ({}, {"domain": "a", "apiPrefix": "b"}, "cannot be combined"),
            (
                {"max_msg_size": 400},
                TRANSACTIONAL | {"sinkPartitions": "2"},
                "its max_msg_size (400) or the server's max_payload is too small",
            ),
            ({}, {"password": "hunter2"}, "use 'passwordEnv'"),
        ],
    ):
        with cell(streaming, config, options, message):
            name = make(**config)
            options = {"subject": f"{name}.a"} | options
            with pytest.raises((OptionError, PlanningError)) as caught:
                writer({"data": "string"}, options.pop("stream", name), streaming=streaming, **options)
            assert message in str(caught.value)
            assert "hunter2" not in str(caught.value)


def test_options_of_another_kind_of_write_are_refused(cell: Any, make: Any, writer: Any) -> None:
    for options, streaming, message in [
        (TRANSACTIONAL | {"writeId": "a"}, False, "'sinkPartitions': it is missing"),
        (TRANSACTIONAL, True, "'sinkPartitions': it is missing"),
        ({"semantics": "none", "writeId": "a"}, False, "'writeId': it has no effect"),
        ({"writeId": "a b"}, False, "'writeId': 'a b' is not"),
        ({"writeId": "a"}, True, "a streaming query takes its id from its checkpoint"),
        (TRANSACTIONAL | VERSION, False, "'sinkPartitions': it is missing"),
        ({"semantics": "none"} | VERSION, False, "'txnAppId': it has no effect"),
        ({"txnAppId": "a"}, False, "'txnAppId': it needs 'txnVersion'"),
        ({"txnVersion": "1"}, False, "'txnVersion': it needs 'txnAppId'"),
        (VERSION | {"writeId": "a"}, False, "'writeId': it cannot be combined with 'txnAppId'"),
        (VERSION | {"txnAppId": "a.b"}, False, "'txnAppId': 'a.b' is not 1 to 64 characters"),
        (VERSION | {"txnVersion": "-1"}, False, "'txnVersion': '-1' is not an integer of at least 0"),
        (
            VERSION,
            True,
            "'txnAppId': it applies only to batch writes; a streaming query takes its id from its checkpoint",
        ),
    ]:
        with cell(options, streaming, message), pytest.raises(OptionError, match=re.escape(message)):
            writer(BOTH, make(), streaming=streaming, **options)


def test_unsuitable_columns_are_refused(cell: Any, make: Any, writer: Any) -> None:
    for columns, options, message in [
        (BOTH | {"data": "bigint"}, {}, "column 'data': it is bigint, but must be binary or string; cast it"),
        (BOTH | {"subject": "int"}, {}, "column 'subject': it is int, but must be string"),
        ({"data": "string"}, {}, "column 'subject': it is missing"),
        ({"subject": "string"}, {}, "column 'data': it is missing"),
        (
            BOTH | {"seq": "int"},
            {},
            "column 'seq': the sink writes only the columns subject, data, headers, msgId and msgTtl; select those (",
        ),
        (BOTH | {"msg_id": "string"}, {}, "headers, msgId and msgTtl; did you mean 'msgId'?"),
        ({"topic": "string", "value": "string"}, {}, "column 'topic': the sink writes only the columns subject, data"),
        ({"subject": "string", "value": "string"}, {}, "and msgTtl; did you mean 'data'?"),
        (BOTH | {"DATA": "binary"}, {}, "column 'DATA': the schema has it twice"),
        (BOTH, {"subject": "s"}, "there is a column 'subject' as well"),
        (BOTH | {"headers": "array<string>"}, {}, "column 'headers': it is array<string>"),
        (BOTH | {"msgId": "string"}, {"semantics": "none"}, "'msgId': it is for semantics=dedupe"),
    ]:
        with cell(columns, options, message):
            with pytest.raises(OptionError, match=r"^(column|option) ") as caught:
                writer(columns, make(), **options)
            assert message in str(caught.value)


def test_names_of_columns_and_options_ignore_case(make: Any, writer: Any) -> None:
    for headers in ("map<string,string>", "map<string,array<string>>"):
        writer({"SUBJECT": "string", "Data": "binary", "headers": headers, "msgid": "string"}, make())
    writer(BOTH, make(), streaming=True, checkpointLocation="/somewhere", queryName="q")


def test_overwriting_is_refused(cell: Any, make: Any, writer: Any) -> None:
    for streaming in [False, True]:
        with cell(streaming), pytest.raises(OptionError, match=r"mode 'overwrite'.*use \.mode\('append'\)"):
            writer(BOTH, make(), overwrite=True, streaming=streaming)


def test_a_mirror_is_refused(make: Any, writer: Any, with_js: Any, stream_name: Callable[[], str]) -> None:
    from nats.js.api import StreamSource

    origin, mirror = make(), stream_name()
    with_js(lambda js: js.add_stream(StreamConfig(name=mirror, mirror=StreamSource(name=origin))))
    with pytest.raises(PlanningError, match="is a mirror: no message can be published"):
        writer(BOTH, mirror)


def test_dedupe_refuses_a_stream_that_acknowledges_before_it_writes(
    make: Any, writer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = make(allow_atomic=False, persist_mode="async")
    with pytest.raises(PlanningError, match="persist_mode=async, so a crash of the server loses acknowledged rows"):
        writer(BOTH, name)
    assert not caplog.text
    writer(BOTH, name, semantics="none")
    assert "persist_mode=async" in caplog.text


def test_a_short_duplicate_window_is_logged(make: Any, writer: Any, caplog: pytest.LogCaptureFixture) -> None:
    writer(BOTH, make(duplicate_window=5))
    assert "its duplicate window is 5 s" in caplog.text


def test_a_stream_whose_messages_are_acknowledged_is_logged(
    cell: Any, make: Any, writer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for options, warning in [
        ({}, "replayed rows that were acknowledged are stored again"),
        (TRANSACTIONAL | {"sinkPartitions": "2"}, "no consumer may acknowledge the sink's markers (_spark."),
    ]:
        with cell(options, warning):
            writer(BOTH, make(retention="workqueue"), **options)
            assert warning in caplog.text
