"""Rows as messages, without Spark."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

from jetstream_ext.protocol.options import as_message, message_headers
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.rows import Columns, Message, RowError, RowReader, Rows
from jetstream_ext.spark.sink import _transactions_of

Reads = Callable[..., Rows]

ONE, SEVERAL = MapType(StringType(), StringType()), MapType(StringType(), ArrayType(StringType()))
ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "map<string,array<string>>": pa.map_(pa.string(), pa.list_(pa.string())),
}


@pytest.fixture(params=["arrow", "rows"])
def read(request: pytest.FixtureRequest) -> Reads:
    """Make messages of rows of subject, data, headers and (with dedupe) id, from Arrow or from single rows."""

    def run(*rows: tuple[Any, ...], several: bool = False, **options: str) -> Rows:
        given = {"servers": "nats://unused", "stream": "S"} | options
        if options.get("semantics") == "transactional":
            given["sinkPartitions"] = "1"
        schema = StructType().add("subject", StringType()).add("data", BinaryType())
        schema = schema.add("headers", SEVERAL if several else ONE)
        if options.get("semantics", "dedupe") == "dedupe":
            schema = schema.add("msgId", StringType())
        parsed = WriteOptions.parse(given, streaming=True)
        reader = RowReader(Columns.of(schema, parsed), parsed, ("s.>", "_spark.S.>"), 3)
        width = len(schema.fields)
        table = [(*row, *[None] * 4)[:width] for row in rows]
        if request.param == "rows":
            return reader.from_rows(table)
        arrays = [
            pa.array(
                [list(row[index].items()) if isinstance(row[index], dict) else row[index] for row in table],
                ARROW[field.dataType.simpleString()],
            )
            for index, field in enumerate(schema.fields)
        ]
        return reader.from_arrow(pa.RecordBatch.from_arrays(arrays, names=schema.names))

    return run


def test_rows_become_messages(read: Reads) -> None:
    rows = [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", None, {}, None)]
    assert list(read(*rows)) == [("s.a", b"x", {"A": "1"}, "id"), ("s.b", b"", None, None), ("s.a", b"", None, None)]


def test_nats_headers_are_stripped_on_request(read: Reads) -> None:
    headers = {"Nats-Msg-Id": "1", "nats-rollup": "all", "NATS-TTL": "1s", "Natsy": "stays", "Nats-Rollup": "all"}
    kept = {"nats-rollup": "all", "NATS-TTL": "1s", "Natsy": "stays"}
    assert list(read(("s.a", b"", headers), natsHeaders="strip")) == [("s.a", b"", kept, None)]
    assert list(read(("s.a", b"", kept))) == [("s.a", b"", kept, None)]  # servers compare names case-sensitively
    assert list(read(("s.a", b"", {"Nats-TTL": "1s"}), natsHeaders="strip")) == [("s.a", b"", None, None)]


def test_headers_keep_several_values(read: Reads) -> None:
    [(_, _, headers, _)] = read(("s.a", b"", {"A": ["1", "2"]}), several=True, semantics="transactional")
    assert headers is not None
    assert list(headers.items()) == [("A", "1"), ("A", "2")]
    [(_, _, headers, _)] = read(("s.a", b"", {"A": ["1"], "B": [], "C": None}), several=True)
    assert headers == {"A": "1"}


@pytest.mark.parametrize(
    ("row", "options", "problem"),
    [
        ((None, b""), {}, "its subject is null"),
        (("", b""), {}, "subject '' is empty"),
        (("elsewhere", b""), {}, "its subject 'elsewhere' is not among the subjects of stream 'S' (s.>, _spark.S.>)"),
        (("s.*", b""), {}, "subject 's.*' has a wildcard"),
        (("s..a", b""), {}, "subject 's..a' has an empty token"),
        (("s.a\r\nPUB x 0", b""), {}, "white space or control characters"),
        (("_spark.S.q.0", b""), {"semantics": "transactional"}, "is reserved for the markers of the sink"),
        (("s.a", b"", {"Nats-Rollup": "all"}), {}, "its header 'Nats-Rollup' is an instruction to the server"),
        (("s.a", b"", {"Nats-Msg-Id": "1"}), {}, "and give ids in the column msgId"),
        (("s.a", b"", None, ""), {}, "its msgId is empty"),
        (("s.a", b"", None, "x\u00a0"), {}, "its msgId is empty or has white space around it"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_refused(
    read: Reads, row: tuple[Any, ...], options: dict[str, str], problem: str
) -> None:
    with pytest.raises(RowError, match=re.escape(problem)) as caught:
        read(("s.ok", b""), row, **options)
    assert str(caught.value).startswith("row 1 of partition 3 cannot be a message: ")


def test_dedupe_refuses_headers_with_several_values(read: Reads) -> None:
    with pytest.raises(RowError, match=r"row 0 of partition 3 .* has several values"):
        read(("s.a", b"", {"A": ["1", "2"]}), several=True)


def test_every_value_of_a_header_is_sent(read: Reads) -> None:
    (entry,) = read(("s.a", b"", {"A": ["1", "2"]}), several=True, semantics="transactional").entries()
    assert message_headers(as_message(entry)) == [("A", "1"), ("A", "2")]


def test_single_rows_are_collected_into_chunks() -> None:
    options = WriteOptions.parse({"servers": "nats://unused", "stream": "S", "subject": "s.a"}, streaming=True)
    columns = Columns.of(StructType().add("data", BinaryType()), options)

    def sizes(count: int, size: int) -> list[int]:
        reader = RowReader(columns, options, ("s.>",), 0)
        return [len(chunk) for chunk in reader.chunks_from_rows(iter([(bytes(size),)] * count)) if chunk]

    assert sizes(25_000, 1) == [10_000, 10_000, 5_000]
    assert sizes(250, 1 << 20) == [100, 100, 50]
    assert sizes(0, 1) == []


def transactions_of(chunks: list[list[Message]], most: int) -> list[list[Message]]:
    return [list(rows) for some in _transactions_of(map(Rows.of, chunks), most) for rows in some]


def test_the_headers_of_rows_count_for_the_size_of_a_transaction() -> None:
    large: Message = ("s.a", b"", {"H": "x" * (5 << 20)}, None)
    assert transactions_of([[large] * 5], 999) == [[large] * 2, [large] * 2, [large]]


ROWS = st.lists(
    st.tuples(st.just("s.a"), st.sampled_from([b"", bytes(3 << 20), bytes(8 << 20)]), st.none(), st.none()), max_size=9
)


@given(st.lists(ROWS, max_size=5), st.integers(1, 5))
def test_transactions_have_all_rows_in_order_and_end_where_they_are_full(
    chunks: list[list[Message]], most: int
) -> None:
    found = transactions_of(chunks, most)
    assert [row for rows in found for row in rows] == [row for chunk in chunks for row in chunk]
    for index, rows in enumerate(found):
        sizes = [len(subject) + len(data) for subject, data, _, _ in rows]
        assert len(rows) <= most
        assert sum(sizes[:-1]) < 8 << 20
        assert index == len(found) - 1 or len(rows) == most or sum(sizes) >= 8 << 20


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.just("s.a"), st.binary(max_size=2), st.none() | st.just({"A": "1"}), st.none() | st.text(max_size=2)
            ),
            max_size=4,
        ),
        min_size=1,
    )
)
def test_joined_rows_are_the_rows_of_all_parts(parts: list[list[Message]]) -> None:
    joined = Rows.joined([Rows.of(part) for part in parts])
    assert list(joined) == [row for part in parts for row in part]
    assert len(joined.sizes()) == len(joined)
    assert list(joined[1:3]) == list(joined)[1:3]
