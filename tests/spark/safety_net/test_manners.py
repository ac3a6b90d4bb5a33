"""What a user of Spark's Kafka source expects of the formats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from jetstream_ext.testing import NatsServer
from pyspark_jetstream import DefaultSource as StreamSource
from pyspark_jetstream_kv import DefaultSource as BucketSource

FORMATS: dict[str, tuple[type, str, StructType]] = {
    "jetstream": (
        StreamSource,
        "stream",
        StructType().add("SEQ", "long").add("TIMENanos", "long").add("Data", "binary"),
    ),
    "jetstream_kv": (
        BucketSource,
        "bucket",
        StructType().add("KEY", "string").add("Value", "binary").add("reVision", "long"),
    ),
}
BYTES = b"\xff\x00\xc3"


@pytest.fixture
def strange(make_stream: Callable[..., str], with_js: Any) -> str:
    """A stream and a bucket of one name, with subjects, keys, headers and values that are not UTF-8."""
    name = make_stream()

    async def fill(js: JetStreamContext) -> None:
        await js.create_key_value(KeyValueConfig(bucket=name, history=3, direct=True))
        await js.publish(f"{name}.a", b"fine")
        await js._nc.flush()
        headers = b"NATS/1.0\r\nX-\xff: \xfe\r\n\r\n"
        for subject in (f"{name}.".encode() + b"\xff\xfe", f"$KV.{name}.".encode() + b"k\xff\xfe"):
            size = len(headers)
            await js._nc._send_command(
                b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, size, size + len(BYTES), headers, BYTES)
            )
            await js._nc._send_command(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, size, size + 1, headers, b"1"))
        await js._nc.flush()

    with_js(fill)
    return name


def rows_of(source: Any, schema: StructType, *, streaming: bool) -> list[dict[str, Any]]:
    """Read all rows, each batch of which must have exactly the columns that Spark was given."""
    if not streaming:
        reader = source.reader(schema)
        parts = reader.partitions()
    else:
        reader = source.streamReader(schema)
        start = reader.initialOffset()
        arguments = (start, reader.getDefaultReadLimit()) if hasattr(reader, "getDefaultReadLimit") else ()  # Spark 4.2
        parts = reader.partitions(start, reader.latestOffset(*arguments))
    batches = [batch for part in parts for batch in reader.read(part)]
    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}  # Spark 4.1
    for batch in batches:
        assert batch.schema == to_arrow_schema(schema, **zone)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize("kind", FORMATS)
def test_columns_keep_the_letters_of_the_schema(server: NatsServer, strange: str, kind: str, streaming: bool) -> None:
    make, target, schema = FORMATS[kind]
    source = make(CaseInsensitiveDict({"servers": server.url, target: strange}))
    rows = rows_of(source, schema, streaming=streaming)
    assert rows
    assert all(list(row) == schema.names for row in rows)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_column_is_named_once_whatever_its_letters(kind: str) -> None:
    make, target, schema = FORMATS[kind]
    source = make(CaseInsensitiveDict({"servers": "nats://unused", target: "A"}))
    name = schema.names[0]
    for read in (source.reader, source.streamReader):
        with pytest.raises(ValueError, match="each once"):
            read(StructType().add(name, "long").add(name.lower(), "long"))


@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize("kind", FORMATS)
def test_text_that_is_not_utf_8_can_be_read(
    server: NatsServer, strange: str, kind: str, streaming: bool, cell: Any
) -> None:
    make, target, _ = FORMATS[kind]
    options = [{}, {"subjects": f"{strange}.>"}, {"subjects": f"{strange}.*"}, {"subjects": f"{strange}.*,{strange}.a"}]
    if kind == "jetstream_kv":
        options = [
            {},
            {"keys": "*"},
            {"includeDeleted": "true"},
            {"startingOffsets": "1"} if streaming else {"asOf": "1"},
        ]
    for more in options:
        source = make(CaseInsensitiveDict({"servers": server.url, target: strange} | more))
        whole = source.schema()
        for schema in (whole, *(StructType([field]) for field in whole.fields)):
            with cell(more, schema.names):
                rows = rows_of(source, schema, streaming=streaming)
                assert len(rows) == (3 if kind == "jetstream" else 2 if "startingOffsets" in more else 1)
                if "data" in schema.names:
                    assert [row["data"] for row in rows] == [b"fine", BYTES, b"1"]
                if "subject" in schema.names:
                    assert [row["subject"] for row in rows][1:] == [f"{strange}.��"] * 2
                if "key" in schema.names:
                    assert {row["key"] for row in rows} == {r"k\xff\xfe"}


@pytest.mark.parametrize("kind", FORMATS)
def test_tables_of_the_catalog_are_refused_with_what_to_use(kind: str) -> None:
    make, target, schema = FORMATS[kind]
    advice = rf"CREATE TEMPORARY VIEW … USING {kind} OPTIONS"
    create = {"provider": kind, "owner": "me", "servers": "nats://n", "option.servers": "nats://n", target: "A"}
    with pytest.raises(ValueError, match=advice):
        make(CaseInsensitiveDict(create)).schema()
    table = make(CaseInsensitiveDict({}))  # as Spark reads and writes a table that has columns
    for use in (
        lambda: table.reader(schema),
        lambda: table.writer(schema, False),
        lambda: table.writer(schema, True),
        lambda: table.streamReader(schema),
        lambda: table.streamWriter(schema, False),
    ):
        with pytest.raises(ValueError, match=rf"'servers': it is missing.*{advice}"):
            use()
    unnamed = make(
        CaseInsensitiveDict({"servers": "nats://n"})
    )  # saveAsTable and toTable do not pass the table's name on
    for use in (lambda: unnamed.writer(schema, False), lambda: unnamed.streamWriter(schema, False)):
        with pytest.raises(ValueError, match=rf"'{target}': it is missing.*option\('{target}'.*toTable"):
            use()
