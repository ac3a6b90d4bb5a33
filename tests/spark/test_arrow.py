"""Arrow record batches from the replies of a server."""

import inspect
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from jetstream_ext.protocol.direct import Block
from jetstream_ext.spark.reading import columns_of
from jetstream_ext.spark.source import JetStreamDataSource

ALL = JetStreamDataSource({"servers": "nats://n", "stream": "A"}).schema()


def row(subject: bytes, time: bytes = b"2026-11-20T21:23:31Z", headers: bytes = b"") -> bytes:
    """Return the header block of a message in a reply; `headers` are the stored ones."""
    stored = headers + b"\r\n" if headers else b""
    return (
        b"NATS/1.0\r\n%bNats-Stream: A\r\nNats-Subject: %b\r\nNats-Sequence: 1\r\nNats-Time-Stamp: %b\r\n"
        b"Nats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n" % (stored, subject, time)
    )


def build(*rows: bytes, datas: list[bytes] | None = None, schema: StructType = ALL) -> pa.RecordBatch:
    seqs = list(range(1, len(rows) + 1))
    bodies = [block + data for block, data in zip(rows, datas or [b""] * len(rows), strict=True)]
    return columns_of(schema).batch(Block("A", seqs, bodies, [len(block) for block in rows]))


def wanted(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark makes of its own schema, in UTC."""
    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


def test_batches_have_the_schema_that_spark_requires(cell: Any) -> None:
    for nullable in [True, False]:
        with cell(nullable):
            schema = StructType([StructField(field.name, field.dataType, nullable) for field in ALL.fields])
            assert build(row(b"a"), schema=schema).schema == wanted(schema)


def test_every_column_is_built() -> None:
    first = row(b"a.1", b"2026-11-20T21:23:31.244826317Z", b"X: 1\r\nY: two words \r\nX:3")
    batch = build(first, row(b"a.2"), datas=[b"\0\xff", b""])
    assert batch.to_pylist() == [
        {
            "stream": "A",
            "seq": 1,
            "subject": "a.1",
            "time": datetime(2026, 11, 20, 21, 23, 31, 244826, UTC),
            "data": b"\0\xff",
            "headers": [("X", ["1", "3"]), ("Y", ["two words"])],
        },
        {
            "stream": "A",
            "seq": 2,
            "subject": "a.2",
            "time": datetime(2026, 11, 20, 21, 23, 31, tzinfo=UTC),
            "data": b"",
            "headers": [],
        },
    ]


def test_times_of_any_precision_are_parsed(cell: Any) -> None:
    for digits, microseconds in [
        ("", 0),
        (".1", 100000),
        (".000001", 1),
        (".0000019", 1),
        (".999999999", 999999),
        (".12345678", 123456),
    ]:
        with cell(digits, microseconds):
            [time] = build(row(b"a", f"1999-12-31T23:59:59{digits}Z".encode())).column("time").to_pylist()
            assert time == datetime(1999, 12, 31, 23, 59, 59, microseconds, UTC)


def test_invalid_utf_8_is_replaced() -> None:
    batch = build(row(b"a.\xff", headers=b"X: \xff"), row("a.é".encode()))
    assert batch.column("subject").to_pylist() == ["a.\ufffd", "a.é"]
    assert batch.column("headers").to_pylist() == [[("X", ["\ufffd"])], []]


def test_stored_headers_named_like_the_servers_are_kept() -> None:
    """A republished message stores those of its origin."""
    [headers] = build(row(b"a", headers=b"X: 1\r\nNats-Stream: A\r\nNats-Sequence: 1")).column("headers").to_pylist()
    assert headers == [("X", ["1"]), ("Nats-Stream", ["A"]), ("Nats-Sequence", ["1"])]


def test_no_rows_make_an_empty_batch() -> None:
    assert build().num_rows == 0
    assert build().schema == wanted(ALL)
