"""Rows as messages, without Spark."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, BinaryType, LongType, MapType, StringType, StructType

from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.headers import check_header
from jetstream_ext.spark.bad_rows import BadRow, BadRows, RowError
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.row_sizes import RowSizes
from jetstream_ext.spark.rows import Columns, Message, RowReader, Rows

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
        super().__init__("drop", what="a test")
        self.rows: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self.rows.append(bad)


def _read(
    *rows: tuple[Any, ...],
    arrow: bool,
    several: bool = False,
    ttl: Any = None,
    bad: BadRows | None = None,
    sizes: RowSizes = SIZES,
    **options: str,
) -> Rows:
    """Make messages of rows of subject, data, headers and (with dedupe) id, from Arrow or from single rows.

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
    what = "stream 'S', partition 3 of micro-batch 7"
    collected = BadRows(parsed.on_bad_row, what=what) if bad is None else bad
    reader = RowReader(Columns.of(schema, parsed), parsed, STREAM.subjects, sizes, collected)
    width = len(schema.fields)
    table = [(*row, *[None] * 5)[:width] for row in rows]
    if not arrow:
        return reader.from_rows(table)
    arrays = [
        pa.array(
            [list(row[index].items()) if isinstance(row[index], dict) else row[index] for row in table],
            ARROW[field.dataType.simpleString()],
        )
        for index, field in enumerate(schema.fields)
    ]
    return reader.from_arrow(pa.RecordBatch.from_arrays(arrays, names=schema.names))


def read(*rows: tuple[Any, ...], bad: Collected | None = None, **given: Any) -> Rows:
    """Return the messages of rows: the same ones from Arrow as from single rows, with the same bad rows."""
    try:
        messages = _read(*rows, arrow=True, bad=bad, **given)
    except RowError as error:
        with pytest.raises(RowError, match=f"^{re.escape(str(error))}$"):
            _read(*rows, arrow=False, **given)
        raise
    others = None if bad is None else Collected()
    assert list(_read(*rows, arrow=False, bad=others, **given)) == list(messages)
    assert bad is None or others is None or others.rows == bad.rows
    return messages


def test_rows_become_messages() -> None:
    rows = [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", None, {}, None)]
    assert list(read(*rows)) == [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", b"", None, None)]


def test_headers_that_were_read_are_written_without_the_message_id() -> None:
    kept = {"nats-rollup": "all", "Natsy": "stays", "Nats-TTL": "60", "Nats-Marker-Reason": "MaxAge", "Nats-Own": "x"}
    assert list(read(("s.a", b"", {"Nats-Msg-Id": "1", **kept}))) == [("s.a", b"", kept, None)]
    assert list(read(("s.a", b"", kept, "id"))) == [("s.a", b"", kept, "id")]


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


def test_texts_with_surrogates_are_bad() -> None:
    bad, wrong = Collected(), "s.\udcff"
    schema = StructType().add("subject", StringType()).add("data", StringType())
    schema = schema.add("headers", ONE).add("msgId", StringType())
    options = WriteOptions.parse({"servers": "nats://unused", "stream": "S"}, streaming=True)
    reader = RowReader(Columns.of(schema, options), options, STREAM.subjects, SIZES, bad)
    rows = [("s.a", "0", None, None), (wrong, "1", {}, None), ("s.a", "2", {"A": wrong}, None)]
    kept = reader.from_rows(
        [*rows, ("s.a", "3", None, wrong), ("s.a", "4", None, None), ("s.a", "\ud83d5", None, None)]
    )
    half = bad.rows.pop()
    assert half.reason == "its data has half of a surrogate pair, which UTF-8 cannot encode"
    assert half.data == b"\xed\xa0\xbd5"
    check_surrogates(list(kept), bad)


def test_arrow_texts_that_are_not_utf8_are_bad() -> None:
    """Spark passes any bytes as a string."""

    def texts(*values: bytes | None) -> Any:
        return pa.array(values, pa.binary()).view(pa.string())

    bad = Collected()
    schema = StructType().add("subject", StringType()).add("data", StringType())
    schema = schema.add("headers", ONE).add("msgId", StringType())
    options = WriteOptions.parse({"servers": "nats://unused", "stream": "S"}, streaming=True)
    reader = RowReader(Columns.of(schema, options), options, STREAM.subjects, SIZES, bad)
    columns = [
        texts(b"s.a", b"s.\xff", b"s.a", b"s.a", b"s.a"),
        texts(b"0", b"1", b"2", b"3", b"4"),
        pa.MapArray.from_arrays([0, 0, 0, 1, 1, 1], texts(b"A"), texts(b"\xff")),
        texts(None, None, None, b"\xff", None),
    ]
    kept = reader.from_arrow(pa.RecordBatch.from_arrays(columns, names=schema.names))
    check_surrogates(list(kept), bad)
    [row] = reader.from_arrow(
        pa.RecordBatch.from_arrays([texts(b"s.a"), texts(b"\xff"), columns[2][:1], texts(None)], names=schema.names)
    )
    assert row == ("s.a", b"\xff", None, None)


def check_surrogates(kept: list[Message], bad: Collected) -> None:
    assert kept == [("s.a", b"0", None, None), ("s.a", b"4", None, None)]
    assert [(row.row, row.data) for row in bad.rows] == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert [row.reason for row in bad.rows] == [
        "its subject 's.\\udcff' is not UTF-8",
        "its header 'A' is not UTF-8",
        "its header 'Nats-Msg-Id' is not UTF-8",
    ]


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
            assert list(read(*rows, ("s.a", b"good", None, None, values[0]), bad=bad, ttl=kind)) == []
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
    RowReader(columns, options, ("s.>",), SIZES, bad).from_rows([(b"", {name: value})])
    try:
        check_header(name, value)
    except ValueError:
        assert bad.rows
    else:
        assert not bad.rows
