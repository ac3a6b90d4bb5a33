"""Rows of the `jetstream_kv` sink as writes of keys, without Spark and a server."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DoubleType, IntegerType, LongType, StringType, StructField, StructType

from jetstream_ext.kv.commit import Staged
from jetstream_ext.spark.bad_rows import BadRow, BadRows, TaskResult
from jetstream_ext.spark.kv_rows import KeyWrite, KvColumns, KvRowReader, LastRows
from jetstream_ext.spark.kv_source import JetStreamKvDataSource
from jetstream_ext.spark.options import KvWriteOptions, OptionError
from jetstream_ext.spark.rows import RowSizes
from jetstream_ext.types import NEVER

TYPES = {
    "string": StringType(),
    "binary": BinaryType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "double": DoubleType(),
}
COLUMNS = "key string, operation string, value binary, ttl string, expectedRevision bigint"
ROW = ("k", None, b"v", None, None)


def schema_of(columns: str) -> StructType:
    """Return a schema; Spark's own parser needs a session."""
    pairs = [column.split() for column in columns.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in pairs])


class Refused(BadRows):
    """Keeps the bad rows."""

    def __init__(self) -> None:
        super().__init__("drop", "a test", "S", TaskResult(writer="q"), 0)
        self.rows: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self.rows.append(bad)


def read(rows: list[tuple[Any, ...]], **options: str) -> tuple[list[KeyWrite], list[BadRow]]:
    """Return what becomes of rows that have all columns."""
    schema = schema_of(COLUMNS)
    if "ttl" in options:
        schema = StructType([field for field in schema.fields if field.name != "ttl"])
        rows = [(*row[:3], row[4]) for row in rows]
    parsed = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "b"} | options, streaming=False)
    bad, last = Refused(), LastRows(7)
    reader = KvRowReader(KvColumns.of(schema, parsed), parsed, *2 * [RowSizes(1000, "the limit (1000)", 100)], bad)
    types = {"binary": pa.binary(), "string": pa.string(), "bigint": pa.int64()}
    fields = [pa.field(one.name, types[one.dataType.simpleString()]) for one in schema.fields]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([row[at] for row in rows], one.type) for at, one in enumerate(fields)], schema=pa.schema(fields)
    )
    with closing(last):
        last.add(reader.read(batch))
        return list(last), bad.rows


def test_the_last_row_of_each_key_in_the_order_of_these_rows() -> None:
    rows = [("a", None, b"1", None, None), ("b", "PUT", None, None, None), ("a", "DEL", None, None, 3)]
    writes, bad = read(rows)
    assert not bad
    assert writes == [KeyWrite("b", b"", Staged("PUT"), 1, 7), KeyWrite("a", b"", Staged("DEL", expected=3), 2, 7)]


def test_values_beyond_the_memory_are_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetstream_ext.spark.kv_rows._MEMORY", 50)
    rows = [(f"k.{n % 30}", None, b"%d" % n * (n % 5), None, None) for n in range(100)]
    writes, _ = read(rows)
    assert [(write.key, write.value) for write in writes] == [
        (f"k.{n % 30}", b"%d" % n * (n % 5)) for n in range(70, 100)
    ]


BAD = {
    "no key": ((None, None, b"", None, None), "its key is null"),
    "a space": (("a b", None, b"", None, None), "key 'a b' must be tokens of"),
    "an empty token": (("a..b", None, b"", None, None), "must be tokens of"),
    "a wildcard": (("k.*", None, b"", None, None), "must be tokens of"),
    "an empty key": (("", None, b"", None, None), "must be tokens of"),
    "not ASCII": (("\u00e9", None, b"", None, None), "must be tokens of"),
    "a long key": (("k" * 4000, None, b"", None, None), "its key has 4000 bytes"),
    "an operation": (("k", "PATCH", b"", None, None), "its operation 'PATCH' is not one of PUT, DEL, PURGE"),
    "a delete with a value": (("k", "DEL", b"x", None, None), "which has no value"),
    "a purge with a value": (("k", "PURGE", b"x", None, None), "which has no value"),
    "a delete with a TTL": (("k", "DEL", None, "5s", None), "which has no TTL"),
    "a TTL of zero": (("k", None, b"", "0", None), "of at least 1"),
    "no TTL at all": (("k", None, b"", "soon", None), "not a whole number of seconds"),
    "a negative revision": (("k", None, b"", None, -1), "its expectedRevision -1 is negative"),
    "a large value": (("k", None, b"x" * 901, None, None), "more than the limit (1000)"),
}


def test_a_row_that_can_never_be_stored_is_bad(cell: Any) -> None:
    for what, (row, reason) in BAD.items():
        with cell(what):
            writes, bad = read([ROW, row, ("last", None, b"", None, None)])
            assert [write.key for write in writes] == ["k", "last"]
            assert [(one.row, one.subject, one.data) for one in bad] == [(1, row[0], row[2] or b"")]
            assert reason in bad[0].reason


def test_times_to_live() -> None:
    rows = [("a", None, b"", "90s", None), ("b", None, b"", "never", None), ("c", "PURGE", None, "1h", None), ROW]
    writes, bad = read(rows)
    assert not bad
    assert [write.what.ttl for write in writes] == [90, NEVER, 3600, None]
    writes, bad = read([ROW, ("d", "DEL", None, None, None), ("p", "PURGE", None, None, None)], ttl="15m")
    assert not bad
    assert [write.what.ttl for write in writes] == [900, None, None]  # markers stay


def test_other_columns_are_refused(cell: Any) -> None:
    for schema, reason in [
        ("value binary", "column 'key': it is missing"),
        ("key string", "column 'value': it is missing"),
        ("key string, value int", "column 'value': it is int, but must be binary or string"),
        ("key string, value binary, other int", "column 'other': the sink writes only the columns key, value"),
        ("key string, vlaue binary", "operation, ttl and expectedRevision; did you mean 'value'\\?"),
        ("subject string, data binary", "column 'subject': .* expectedRevision; did you mean 'key'\\?"),
        ("key string, KEY string, value binary", "the schema has it twice"),
        ("key string, value binary, ttl double", "column 'ttl': it is double, but must be"),
    ]:
        with cell(schema, reason):
            options = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "b"}, streaming=False)
            with pytest.raises(OptionError, match=reason):
                KvColumns.of(schema_of(schema), options)


def test_markers_have_subjects_of_their_own(cell: Any) -> None:
    for options, problem in [
        ({"markerPrefix": "$KV.B"}, "option 'markerPrefix': below '$KV', the markers would be keys of a bucket"),
        ({"markerPrefix": "$KV"}, "option 'markerPrefix': below '$KV', the markers would be keys of a bucket"),
        ({"onBadRow": "_spark.KV_B.dead"}, "option 'onBadRow': subjects below '_spark.KV_B' are for the markers"),
    ]:
        with cell(options, problem):
            with pytest.raises(OptionError) as raised:
                KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "B", **options}, streaming=True)
            assert str(raised.value).startswith(problem)


def test_options_without_effect_are_refused(cell: Any) -> None:
    for given, problem in [
        ({"ttl": "500ms"}, "option 'ttl': a TTL must be a whole number of seconds of at least 1"),
        ({"asOf": "now"}, "option 'asOf': it applies only to batch reads"),
        ({"transactionRows": "999"}, "999 is more than 998"),
        ({"writeId": "a", "txnAppId": "b", "txnVersion": "1"}, "cannot be combined"),
    ]:
        with cell(given), pytest.raises(OptionError, match=problem):
            KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "B", **given}, streaming=False)
    options = KvWriteOptions.parse({"servers": "nats://unused:4222", "bucket": "B", "ttl": "5s"}, streaming=False)
    with pytest.raises(OptionError, match="option 'ttl': there is a column 'ttl' as well"):
        KvColumns.of(schema_of("key string, value binary, ttl bigint"), options)


def test_overwriting_is_refused() -> None:
    source = JetStreamKvDataSource({"servers": "nats://unused:4222", "bucket": "B"})
    with pytest.raises(OptionError, match="mode 'overwrite' is not supported"):
        source.writer(schema_of("key string, value binary"), True)
