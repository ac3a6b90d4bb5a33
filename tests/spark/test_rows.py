"""Rows as messages, without Spark."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, BinaryType, LongType, MapType, StringType, StructType

from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.headers import check_header
from jetstream_ext.spark.bad_rows import BadRow, BadRows, RowError, TaskResult
from jetstream_ext.spark.digests import Rows
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.rows import Columns, RowReader, RowSizes, record_batches

ONE, SEVERAL = MapType(StringType(), StringType()), MapType(StringType(), ArrayType(StringType()))
ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "bigint": pa.int64(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "map<string,array<string>>": pa.map_(pa.string(), pa.list_(pa.string())),
}


STREAM = StreamState("S", "", {"subjects": ["s.>", "_spark.S.>"]})
SIZES = RowSizes.of(1 << 20, STREAM)


class Collected(BadRows):
    """The bad rows of a partition."""

    def __init__(self) -> None:
        super().__init__("drop", "a test", "S", TaskResult(writer="q"), 0)
        self.rows: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self.rows.append(bad)


Message = tuple[str, bytes, dict[str, str] | None, str | None]


def messages(rows: Rows) -> list[Message]:
    """Return each row's subject, data, headers and id."""
    none = itertools.repeat(None)
    return list(zip(rows.subjects, rows.data, rows.headers or none, rows.ids or none, strict=False))  # type: ignore[arg-type]


def read(
    *rows: tuple[Any, ...],
    several: bool = False,
    ttl: Any = None,
    bad: BadRows | None = None,
    **options: str,
) -> list[Message]:
    """Return the messages of rows of subject, data, headers and (with dedupe) id.

    With a type of the column `ttl`, rows also have that. Bad rows are an error, unless they go to `bad`.
    """
    given = {"servers": "nats://unused", "stream": "S"} | options
    if options.get("semantics") == "transactional":
        given["sinkPartitions"] = "1"
    schema = StructType().add("subject", StringType()).add("data", BinaryType())
    schema = schema.add("headers", SEVERAL if several else ONE)
    if options.get("semantics", "dedupe") == "dedupe":
        schema = schema.add("msgId", StringType())
    if ttl is not None:
        schema = schema.add("msgTtl", ttl)
    parsed = WriteOptions.parse(given, streaming=True)
    collected = (
        BadRows(parsed.on_bad_row, "stream 'S'", "S", TaskResult(writer="q", batch=7), 3) if bad is None else bad
    )
    reader = RowReader(Columns.of(schema, parsed), parsed, STREAM.subjects, SIZES, collected)
    width = len(schema.fields)
    table = [(*row, *[None] * 5)[:width] for row in rows]
    arrays = [
        pa.array(
            [list(row[index].items()) if isinstance(row[index], dict) else row[index] for row in table],
            ARROW[field.dataType.simpleString()],
        )
        for index, field in enumerate(schema.fields)
    ]
    return messages(reader.read(pa.RecordBatch.from_arrays(arrays, names=schema.names)))


def test_rows_become_messages() -> None:
    rows = [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", None, {}, None)]
    assert (read(*rows)) == [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", b"", None, None)]


def test_headers_that_were_read_are_written_without_the_message_id() -> None:
    kept = {"nats-rollup": "all", "Natsy": "stays", "Nats-TTL": "60", "Nats-Marker-Reason": "MaxAge", "Nats-Own": "x"}
    assert (read(("s.a", b"", {"Nats-Msg-Id": "1", **kept}))) == [("s.a", b"", kept, None)]
    assert (read(("s.a", b"", kept, "id"))) == [("s.a", b"", kept, "id")]


def test_headers_keep_several_values() -> None:
    [(_, _, headers, _)] = read(("s.a", b"", {"A": ["1", "2"]}), several=True, semantics="transactional")
    assert headers is not None
    assert list(headers.items()) == [("A", "1"), ("A", "2")]
    [(_, _, headers, _)] = read(("s.a", b"", {"A": ["1"], "B": [], "C": None}), several=True)
    assert headers == {"A": "1"}


def test_a_row_that_cannot_be_a_message_is_refused(cell: Any) -> None:
    for row, options, problem in [
        ((None, b""), {}, "its subject is null"),
        (("", b""), {}, "subject '' is empty"),
        (("elsewhere", b""), {}, "its subject 'elsewhere' is not among the subjects of stream 'S' (s.>, _spark.S.>)"),
        (("s.*", b""), {}, "subject 's.*' has a wildcard"),
        (("s..a", b""), {}, "subject 's..a' has an empty token"),
        (("s.a\r\nPUB x 0", b""), {}, "white space or control characters"),
        (("_spark.S.q.0", b""), {"semantics": "transactional"}, "is reserved for the markers of the sink"),
        (("s.a", b"", {"Nats-Rollup": "all"}), {}, "its header 'Nats-Rollup' is an instruction to the server"),
        (("s.a", b"", {"Nats-Expected-Stream": "S"}), {}, "'Nats-Expected-Stream' is an instruction to the server"),
        (("s.a", b"", None, ""), {}, "its msgId is empty"),
        (("s.a", b"", None, "x\u00a0"), {}, "its msgId is empty or has white space around it"),
        (("s.a", b"", None, "x\ny"), {}, "the value of header 'Nats-Msg-Id' has a line break"),
        (("s." + "a" * 4000, b""), {}, "has 4002 bytes, and at most"),
        (("s.a", b"", {"A b": "1"}), {}, "header name 'A b' is empty or has characters that are not allowed"),
        (("s.a", b"", {"A": "1\r\nNats-Rollup: all"}), {}, "the value of header 'A' has a line break"),
        (("s.a", b"", {"A": "x" * 70_000}), {}, "servers store at most 65535 with a message"),
        (
            ("s.a", bytes(1 << 20), {"A": "1"}),
            {},
            "bytes with its headers, more than the server's max_payload (1048576)",
        ),
        (
            ("s.a", bytes((1 << 20) + 1)),
            {},
            "it has 1048577 bytes with its headers, more than the server's max_payload",
        ),
    ]:
        with cell(row, options, problem):
            with pytest.raises(RowError, match=re.escape(problem)) as caught:
                read(("s.ok", b""), row, **options)
            text = str(caught.value)
            assert text.startswith("stream 'S', partition 3 of micro-batch 7: row 1 cannot be stored: ")
            assert text.endswith("set the option onBadRow to drop, or to a subject for dead letters")
            bad = Collected()
            kept = read(("s.ok", b""), row, ("s.ok", b"2"), bad=bad, **options)
            assert [message[:2] for message in kept] == [("s.ok", b""), ("s.ok", b"2")]
            [found] = bad.rows
            assert problem in found.reason
            assert (found.row, found.subject, found.data) == (1, row[0], row[1])


def test_dedupe_refuses_headers_with_several_values() -> None:
    with pytest.raises(RowError, match=r"partition 3 .* row 0 .* has several values"):
        read(("s.a", b"", {"A": ["1", "2"]}), several=True)


def test_rows_of_spark_4_0_are_read_like_record_batches() -> None:
    """Spark before 4.1 passes rows to a streaming sink; text that is not UTF-8 fails in its own code."""
    schema = StructType().add("subject", StringType()).add("data", BinaryType()).add("headers", SEVERAL)
    rows = [Row(subject="s.a", data=b"%d" % number, headers={"A": ["1", "2"]}) for number in range(2500)]
    found = [row for batch in record_batches(iter(rows), schema) for row in batch.to_pylist()]
    assert found == [{"subject": "s.a", "data": row.data, "headers": [("A", ["1", "2"])]} for row in rows]

    def failing() -> Iterator[Row]:
        yield rows[0]
        b"\xff".decode()

    with pytest.raises(
        RowError, match=r"a text column has a row that is not UTF-8 .*; cast the column to binary, or use"
    ):
        list(record_batches(failing(), schema))


def test_the_time_to_live_is_a_header(cell: Any) -> None:
    for semantics, (kind, values) in itertools.product(
        ["dedupe", "none"],
        [
            (LongType(), [(90, "90"), (1, "1"), (3_155_760_000, "3155760000"), (None, None)]),
            (
                StringType(),
                [("90", "90"), ("90s", "90"), ("15m", "900"), ("2h", "7200"), (" Never ", "never"), (None, None)],
            ),
        ],
    ):
        with cell(semantics, kind, values):
            ids = [None] if semantics == "dedupe" else []
            for own in (None, {"A": "1"}):
                rows = [("s.a", b"", own, *ids, given) for given, _ in values]
                found = [headers for _, _, headers, _ in read(*rows, ttl=kind, semantics=semantics)]
                expected = [(own or {}) | ({} if text is None else {"Nats-TTL": text}) for _, text in values]
                assert [headers or {} for headers in found] == expected


def test_an_invalid_time_to_live_is_bad(cell: Any) -> None:
    for kind, values in [
        (LongType(), [0, -1, 3_155_760_001, -(1 << 63), (1 << 63) - 1]),
        (StringType(), ["", "0", "-1", "1.5", "500ms", "soon", "1h30m", "never ever", "99999999999d", "\u0661"]),
    ]:
        with cell(kind, values):
            bad = Collected()
            rows = [("s.a", b"", None, None, given) for given in values]
            assert (read(*rows, ("s.a", b"good", None, None, values[0]), bad=bad, ttl=kind)) == []
            assert [row.row for row in bad.rows] == list(range(len(values) + 1))
            assert all(row.reason.startswith("its msgTtl is invalid: ") for row in bad.rows)


def test_the_option_gives_every_row_its_time_to_live() -> None:
    rows = [("s.a", b""), ("s.a", b"", {"A": "1"}), ("s.a", b"", {"Nats-TTL": "7"})]
    ttl = {"Nats-TTL": "900"}
    for some in (rows[:1], rows):
        found = read(*some, msgTtl="15m")
        assert [headers for _, _, headers, _ in found] == [ttl, {"A": "1"} | ttl, ttl][: len(some)]


@given(st.text(min_size=1, max_size=3), st.text(max_size=3))
def test_a_header_is_good_exactly_if_it_can_be_sent(name: str, value: str) -> None:
    options = WriteOptions.parse({"servers": "nats://unused", "stream": "S", "subject": "s.a"}, streaming=True)
    columns = Columns.of(StructType().add("data", BinaryType()).add("headers", ONE), options)
    bad = Collected()
    headers = pa.array([[(name, value)]], ARROW["map<string,string>"])
    batch = pa.RecordBatch.from_arrays([pa.array([b""]), headers], names=["data", "headers"])
    RowReader(columns, options, ("s.>",), SIZES, bad).read(batch)
    try:
        check_header(name, value)
    except ValueError:
        assert bad.rows
    else:
        assert not bad.rows
