"""Arrow record batches from the replies of a server."""

import inspect
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
