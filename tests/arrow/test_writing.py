"""`from_arrow`: rows of every kind of source as messages, and rows that cannot be one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow
from jetstream_ext.testing import NatsServer

INTERNALS = pytest.mark.internals(
    "nats-py's headers have the last value of a name, and U+FFFD for other bytes than UTF-8"
)
MakeStream = Callable[..., Awaitable[str]]
Stored = list[tuple[str, bytes, list[tuple[str, str]]]]
MULTIPLE = pa.map_(pa.string(), pa.list_(pa.string()))
TWICE = pa.struct([pa.field("text", pa.string()), pa.field("text", pa.string())])
HEADER = pa.struct([("name", pa.string()), ("value", pa.string())])


async def stored(js: JetStreamContext, stream: str) -> Stored:
    """Return the messages, without ids that `ingest` made."""
    return [
        (one.subject, one.data, [(name, value) for name, value in one.header_pairs if name != "Nats-Msg-Id"])
        for one in await jsx.DirectGet(js, stream).scan().to_list()
    ]


def rows(stream: str, count: int = 3, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    types = [("subject", pa.string()), ("data", pa.binary())]
    return pa.table([[f"{stream}.{n}" for n in numbers], [b"%d" % n for n in numbers]], pa.schema(types))


def expected(stream: str, count: int = 3) -> Stored:
    return [(f"{stream}.{n}", b"%d" % n, []) for n in range(count)]


SOURCES: dict[str, Callable[[pa.Table], Any]] = {
    "table": lambda table: table,
    "batch": lambda table: table.to_batches()[0],
    "reader": lambda table: table.to_reader(max_chunksize=2),
    "list": lambda table: table.to_batches(max_chunksize=1),
    "generator": lambda table: (batch for batch in table.to_batches(max_chunksize=2)),
    "async": lambda table: _async(table.to_batches(max_chunksize=2)),
    "polars": polars.from_arrow,
    "pandas": lambda table: table.to_pandas(),
    "pandas with an index": lambda table: table.to_pandas().set_index("subject"),
    "duckdb": lambda table: duckdb.from_arrow(table),
    "views": lambda table: table.cast(pa.schema([("subject", pa.string_view()), ("data", pa.binary_view())])),
    "large": lambda table: table.cast(pa.schema([("subject", pa.large_string()), ("data", pa.large_binary())])),
    "binary subjects": lambda table: table.cast(pa.schema([("subject", pa.binary()), ("data", pa.binary())])),
    "text": lambda table: table.cast(pa.schema([("subject", pa.string()), ("data", pa.string())])),
    "polars with categories": lambda table: polars.from_arrow(table).with_columns(
        polars.col("subject").cast(polars.Categorical)
    ),
    "dictionary with offsets": lambda table: [
        pa.record_batch({"subject": batch.column("subject").dictionary_encode(), "data": batch.column("data")})
        for batch in (
            table.combine_chunks().to_batches()[0].slice(0, 1),
            table.combine_chunks().to_batches()[0].slice(1),
        )
    ],
    "dictionary with nulls": lambda table: table.set_column(
        0,
        "subject",
        pa.concat_arrays([pa.nulls(1, pa.string()), *table["subject"].chunks]).dictionary_encode().slice(1),
    ),
    "batches with offsets": lambda table: [
        batch
        for start in range(3)
        for batch in (table.to_batches()[0].slice(start, 0), table.to_batches()[0].slice(start, 1))
    ],
    "columns of nulls": lambda table: table.append_column("headers", pa.nulls(3)).append_column("msg_id", pa.nulls(3)),
    "lists of nothing": lambda table: table.append_column("headers", [[[], None, []]]),
    "other columns of any type": lambda table: table.append_column("time", [[{"a": 1}] * 3]).append_column(
        "seq", pa.nulls(3)
    ),
    "dictionary": lambda table: pa.table({name: table.column(name).dictionary_encode() for name in table.schema.names}),
}


async def _async(batches: list[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
    for batch in batches:
        await asyncio.sleep(0)
        yield batch


async def test_every_source_is_stored_in_order(js: JetStreamContext, make_stream: MakeStream) -> None:
    for kind, source in SOURCES.items():
        stream = await make_stream()
        report = await arrow.from_arrow(js, source(rows(stream)))
        assert report.stored == 3, kind
        assert await stored(js, stream) == expected(stream), kind
        await js.delete_stream(stream)


async def test_a_relation_that_reads_a_stream_can_be_stored(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream, copy = await make_stream(), await make_stream()
    await arrow.from_arrow(js, rows(stream))
    async with arrow.RecordBatchReader(js, stream) as reader:  # noqa: F841 - DuckDB finds it by its name
        relation = duckdb.sql(f"SELECT '{copy}.' || (seq - 1) AS subject, data FROM reader")
        report = await arrow.from_arrow(js, relation)
        del relation
    assert report.stored == 3
    assert await stored(js, copy) == expected(copy)


@INTERNALS
async def test_what_was_read_can_be_stored_again(
    js: JetStreamContext, server: NatsServer, make_stream: MakeStream, publish_raw: Callable[..., None]
) -> None:
    stream, copy = await make_stream(), await make_stream()
    publish_raw(server, [(f"{stream}.a".encode(), b"\0\xff"), (f"{stream}.b".encode(), b"")])
    publish_raw(server, [(f"{stream}.c".encode(), b"c")], block=b"NATS/1.0\r\nX: 1\r\nY: 2\r\nX: 3\r\n\r\n")
    table = await arrow.to_arrow(js, stream)
    subjects = [subject.replace(stream, copy) for subject in table["subject"].to_pylist()]
    table = table.set_column(2, "subject", [subjects])
    for source in (
        table,
        polars.from_arrow(table),
        table.to_pandas(types_mapper=pandas.ArrowDtype),
        duckdb.from_arrow(table),
    ):
        await js.purge_stream(copy)
        assert (await arrow.from_arrow(js, source)).stored == 3
        found = await arrow.to_arrow(js, copy)
        assert found["data"].to_pylist() == [b"\0\xff", b"", b"c"], type(source)
        headers = [one[:-1] for one in found["headers"].to_pylist()]
        assert headers == [[], [], [("X", ["1", "3"]), ("Y", ["2"])]], type(source)


@INTERNALS
async def test_headers_are_maps_or_structs_of_one_or_several_values(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream()
    entry = pa.struct([("name", pa.string()), ("value", pa.large_string())])
    for headers, found in (
        (pa.array([None, [], [("A", "1"), ("B", "")]], pa.map_(pa.string(), pa.string())), [("A", "1"), ("B", "")]),
        (pa.array([None, [], [("A", ["1", "2"]), ("B", [])]], MULTIPLE), [("A", "1"), ("A", "2")]),
        (pa.array([None, [], [("A", "1")]], pa.large_list(entry)), [("A", "1")]),
        (pa.array([None, [], [(b"A", [b"1"])]], pa.map_(pa.binary(), pa.list_(pa.binary()))), [("A", "1")]),
    ):
        await js.purge_stream(stream)
        await arrow.from_arrow(js, rows(stream).append_column("headers", headers))
        assert [pairs for _, _, pairs in await stored(js, stream)] == [[], [], found]


async def test_message_ids_come_from_the_column_or_the_option(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    table = rows(stream).append_column("msg_id", pa.array(["one", None, "three"]))
    await arrow.from_arrow(js, table, msg_id=lambda entry: f"made for {entry[0]}")  # type: ignore[index]
    found = [one.headers["Nats-Msg-Id"] for one in await jsx.DirectGet(js, stream).scan().to_list()]
    assert found == ["one", f"made for {stream}.1", "three"]
    again = await arrow.from_arrow(js, table, msg_id=lambda entry: f"made for {entry[0]}")  # type: ignore[index]
    assert again.stored == 3
    assert len(await stored(js, stream)) == 3


async def test_an_option_gives_all_rows_one_subject(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await arrow.from_arrow(js, rows(stream).select(["data"]), subject=f"{stream}.all")
    assert [subject for subject, _, _ in await stored(js, stream)] == [f"{stream}.all"] * 3


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    """Return a function that replaces or adds a column."""

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.append_column(name, values) if place < 0 else table.set_column(place, name, values)

    return change


async def test_other_columns_and_sources_are_refused(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    json = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"] * 3))
    for change, error, words in (
        (lambda table: table.drop_columns("data"), ValueError, "column 'data': it is missing"),
        (lambda table: table.drop_columns("subject"), ValueError, "column 'subject': it is missing"),
        (lambda table: table.select([]), ValueError, "column 'data': it is missing"),
        (lambda table: table.append_column("data", [[b""] * 3]), ValueError, "column 'data': it is there twice"),
        (column("x", [[1] * 3]), ValueError, "column 'x': only the columns subject, data, headers"),
        (column("data", [[1] * 3]), ValueError, "column 'data': it is int64, but must be binary"),
        (column("data", pa.nulls(3)), ValueError, "it is null, but must be binary or text"),
        (column("data", json), ValueError, "it is extension<arrow.json>, but must be binary or text; cast it"),
        (column("headers", [["x"] * 3]), ValueError, "column 'headers': it is string, but must be a map"),
        (column("headers", pa.nulls(3, pa.list_(TWICE))), ValueError, "must be a map, or a list of structs"),
        (lambda table: table.to_pylist(), TypeError, "must yield pyarrow.RecordBatch, not dict"),
        (lambda _: "table", TypeError, "source must be a pyarrow Table"),
        (lambda _: 1, TypeError, "source must be a pyarrow Table"),
    ):
        with pytest.raises(error, match=words):
            await arrow.from_arrow(js, change(rows(stream)))
    assert await stored(js, stream) == []


async def test_options_are_checked_before_anything_is_stored(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    for options, error in (
        ({"subject": "x"}, ValueError),
        ({"subject": "a b"}, jsx.errors.BadSubjectError),
        ({"timeout": 0}, ValueError),
        ({"flow": 0}, ValueError),
    ):
        with pytest.raises(error):
            await arrow.from_arrow(js, rows(stream), **options)  # type: ignore[arg-type]
    assert await stored(js, stream) == []


def not_utf_8(kind: pa.DataType, first: str = "a.1") -> Any:
    """Return an array of three texts, of which the second one is not UTF-8; libraries may make such arrays."""
    width = "large_binary" if kind == pa.large_string() else "binary"
    return pa.Array.from_buffers(kind, 3, pa.array([first.encode(), b"a.\xff", b"a.2"], width).buffers())


def headers(*pairs: tuple[str, list[str | None] | None]) -> Callable[[pa.Table], pa.Table]:
    return column("headers", pa.array([None, list(pairs), None], MULTIPLE))


async def test_a_row_that_cannot_be_a_message_is_refused_after_those_before_it(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    names = pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["X"] * 3), not_utf_8(pa.string()))
    no_pair = pa.array([[], [None], []], pa.list_(HEADER))
    for change, words in (
        (lambda stream: column("subject", [[f"{stream}.1", None, "a.2"]]), "its subject is null"),
        (
            lambda stream: column("subject", [[f"{stream}.1".encode(), b"\xff", b""]]),
            r"its subject b'\\xff' is not UTF-8",
        ),
        (
            lambda stream: column("subject", [not_utf_8(pa.string(), f"{stream}.1")]),
            r"its subject b'a.\\xff' is not UTF-8",
        ),
        (lambda _: column("data", [[b"", None, b""]]), "its data is null"),
        (lambda _: column("msg_id", not_utf_8(pa.string())), r"its msg_id b'a.\\xff' is not UTF-8"),
        (lambda _: column("msg_id", [["a", " b", "c"]]), "its msg_id is empty or has white space"),
        (lambda _: column("msg_id", [["a", "", "c"]]), "its msg_id is empty or has white space"),
        (lambda _: column("headers", names), "one of its headers is not UTF-8: 'utf-8' codec .* 0xff in position 2"),
        (lambda _: column("headers", no_pair), "one of its headers is null"),
        (lambda _: headers(("Nats-Rollup", ["all"])), "its header 'Nats-Rollup' is an instruction"),
        (lambda _: headers(("Nats-Expected-Stream", ["x"])), "its header 'Nats-Expected-Stream' is an instruction"),
        (lambda _: headers(("X", ["1", None])), "its header 'X' is null"),
        (lambda _: headers(("X", None)), "its header 'X' is null"),
    ):
        for kind in ("table", "reader"):
            stream = await make_stream()
            with pytest.raises(arrow.ConversionError, match=f"the row at index 1 cannot be a message: {words}"):
                await arrow.from_arrow(js, SOURCES[kind](change(stream)(rows(stream))))
            assert len(await stored(js, stream)) == 1, words
            await js.delete_stream(stream)


async def test_a_payload_is_stored_as_it_is_although_its_column_is_text(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    for kind in (pa.string(), pa.large_string()):
        data = not_utf_8(kind)
        for column in (data, pa.DictionaryArray.from_arrays([0, 1, 2], data)):
            stream = await make_stream()
            await arrow.from_arrow(js, rows(stream).set_column(1, "data", [column]))
            assert [payload for _, payload, _ in await stored(js, stream)] == [b"a.1", b"a.\xff", b"a.2"]


async def test_a_row_that_the_server_refuses_is_named(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    table = rows(stream).set_column(0, "subject", [[f"{stream}.a", f"{stream}.*", f"{stream}.b"]])
    with pytest.raises(jsx.errors.IngestError, match=r"the message at index 1 .* was refused"):
        await arrow.from_arrow(js, table)
    assert len(await stored(js, stream)) == 1


async def test_a_source_that_raises_stores_what_came_before(js: JetStreamContext, make_stream: MakeStream) -> None:
    def broken(table: pa.Table) -> Iterator[pa.RecordBatch]:
        yield from table.to_batches()
        raise ZeroDivisionError("the source")

    async def broken_async(table: pa.Table) -> AsyncIterator[pa.RecordBatch]:
        for batch in broken(table):
            yield batch

    def broken_reader(table: pa.Table) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(table.schema, broken(table))

    for source in (broken, broken_async, broken_reader):
        stream = await make_stream()
        with pytest.raises(ZeroDivisionError, match="the source"):
            await arrow.from_arrow(js, source(rows(stream)))
        assert await stored(js, stream) == expected(stream), source


async def test_a_stream_is_copied_within_one_loop(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream, two, three = await make_stream(), await make_stream(), await make_stream()
    await arrow.from_arrow(js, rows(stream, 2500))
    data = pa.schema([("data", pa.binary())])
    async with arrow.record_batches(js, stream, schema=data, batch_rows=1000) as batches:
        await arrow.from_arrow(js, batches, subject=f"{two}.x")
    async with arrow.RecordBatchReader(js, stream, schema=data, batch_rows=1000) as reader:
        await arrow.from_arrow(js, reader, subject=f"{three}.x")
    for copy in (two, three):
        assert [one for _, one, _ in await stored(js, copy)] == [b"%d" % n for n in range(2500)]


async def test_a_cancelled_call_leaves_nothing(js: JetStreamContext, make_stream: MakeStream, leak_check: Any) -> None:
    stream = await make_stream()
    for kind in ("table", "reader", "async"):
        task = asyncio.create_task(arrow.from_arrow(js, SOURCES[kind](rows(stream, 20_000))))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await leak_check.assert_clean()


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"]), max_size=5)


@INTERNALS
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.text("abé", min_size=1),
            st.binary(max_size=50),
            st.none() | st.dictionaries(st.sampled_from(["A", "B"]), st.lists(TEXT, min_size=1, max_size=3)),
        ),
        max_size=10,
    )
)
async def test_a_table_comes_back_as_it_was(js: JetStreamContext, make_stream: MakeStream, given_rows: Any) -> None:
    stream = await make_stream()
    table = pa.table(
        {
            "subject": pa.array([f"{stream}.{subject}" for subject, _, _ in given_rows], pa.string()),
            "data": pa.array([data for _, data, _ in given_rows], pa.binary()),
            "headers": pa.array([None if own is None else list(own.items()) for _, _, own in given_rows], MULTIPLE),
        }
    )
    await arrow.from_arrow(js, table)
    found = (await arrow.to_arrow(js, stream)).select(["subject", "data", "headers"]).to_pylist()
    assert [(row["subject"], row["data"], dict(row["headers"][:-1])) for row in found] == [
        (row["subject"], row["data"], dict(row["headers"] or ())) for row in table.to_pylist()
    ]
    await js.delete_stream(stream)
