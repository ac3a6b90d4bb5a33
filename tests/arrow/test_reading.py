"""Streams as record batches and tables: exact values, schemas, sizes, and reads that end early."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow
from jetstream_ext.testing import NatsServer

INTERNALS = pytest.mark.internals(
    "nats-py's headers have the last value of a name, and U+FFFD for other bytes than UTF-8"
)
MakeStream = Callable[..., Awaitable[str]]
BYTES_HEADERS = pa.map_(pa.binary(), pa.list_(pa.binary()))


def only(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


async def fill(js: JetStreamContext, stream: str, count: int, size: int = 8) -> None:
    await jsx.ingest(js, ((f"{stream}.{n % 3}", b"%0*d" % (size, n)) for n in range(count)))


async def test_an_empty_stream_is_an_empty_table_with_the_schema(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    table = await arrow.to_arrow(js, stream)
    assert (table.num_rows, table.schema) == (0, arrow.SCHEMA)
    batches = arrow.record_batches(js, stream)
    assert batches.schema == arrow.SCHEMA
    assert [batch async for batch in batches] == []


@INTERNALS
async def test_every_value_is_exact(
    js: JetStreamContext, server: NatsServer, make_stream: MakeStream, publish_raw: Callable[..., None]
) -> None:
    stream = await make_stream()
    token = stream.encode()
    publish_raw(server, [(token + b".a", b"\0\xff"), (token + b".b", b"")])
    block = b"NATS/1.0\r\nX: 1\r\nY: two words\r\nX: 3\r\nEmpty:\r\n\r\n"
    publish_raw(server, [("é.".encode().join([token + b".", b"x"]), b"h")], block=block)
    table = await arrow.to_arrow(js, stream)
    table.validate(full=True)
    expected = await jsx.DirectGet(js, stream).scan().to_list()
    assert table.column("stream").to_pylist() == [stream] * 3
    assert table.column("seq").to_pylist() == [1, 2, 3]
    assert table.column("subject").to_pylist() == [f"{stream}.a", f"{stream}.b", f"{stream}.é.x"]
    assert table.column("time").cast(pa.int64()).to_pylist() == [message.time_ns for message in expected]
    assert any(message.time_ns % 1000 for message in expected)
    assert table.column("data").to_pylist() == [b"\0\xff", b"", b"h"]
    assert table.column("headers").to_pylist() == [[], [], [("X", ["1", "3"]), ("Y", ["two words"]), ("Empty", [""])]]


@INTERNALS
async def test_bytes_that_are_not_utf_8_need_binary_columns(
    js: JetStreamContext, server: NatsServer, make_stream: MakeStream, publish_raw: Callable[..., None]
) -> None:
    stream = await make_stream()
    publish_raw(server, [(f"{stream}.a".encode(), b"\xff")])
    publish_raw(server, [(stream.encode() + b".\xff", b"\xfe")], block=b"NATS/1.0\r\nX: \xff\r\n\r\n")
    for schema, column, wider in (
        (None, "subject", "pyarrow.binary()"),
        (only(seq=pa.uint64(), headers=arrow.SCHEMA.field("headers").type), "headers", "pyarrow.map_("),
    ):
        with pytest.raises(arrow.ConversionError) as refused:
            await arrow.to_arrow(js, stream, schema=schema)
        text = str(refused.value)
        assert text.startswith(f"message 2 of stream {stream!r} does not fit column {column!r}"), text
        assert wider in text
        assert str(pickle.loads(pickle.dumps(refused.value))) == text
    with pytest.raises(arrow.ConversionError, match=r"message 1 of .* does not fit column 'data', which is string"):
        await arrow.to_arrow(js, stream, schema=only(data=pa.string()))
    exact = only(headers=BYTES_HEADERS, subject=pa.binary(), data=pa.large_binary())
    table = await arrow.to_arrow(js, stream, schema=exact)
    assert table.schema == exact
    assert table.slice(1).to_pylist() == [
        {"headers": [(b"X", [b"\xff"])], "subject": stream.encode() + b".\xff", "data": b"\xfe"}
    ]


async def test_a_schema_selects_orders_and_retypes_the_columns(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await fill(js, stream, 2)
    schema = pa.schema(
        [
            ("data", pa.string()),
            ("seq", pa.int32()),
            ("time", pa.timestamp("ns", tz="Africa/Lagos")),
            ("headers", pa.map_(pa.large_string(), pa.large_list(pa.binary()))),
        ],
        metadata={"for": "a test"},
    )
    table = await arrow.to_arrow(js, stream, schema=schema)
    table.validate(full=True)
    assert table.schema.equals(schema, check_metadata=True)
    assert table.column("data").to_pylist() == ["00000000", "00000001"]
    [name, [value]] = table.column("headers").to_pylist()[0][0]
    assert (name, type(value)) == ("Nats-Msg-Id", bytes)


async def test_a_time_is_not_truncated(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await fill(js, stream, 20)  # one of the times has nanoseconds
    with pytest.raises(
        arrow.ConversionError, match=r"does not fit column 'time'.*pyarrow.timestamp\('ns', tz='UTC'\) can hold it"
    ):
        await arrow.to_arrow(js, stream, schema=only(time=pa.timestamp("us", tz="UTC")))


def test_an_impossible_schema_is_refused_at_the_call(js: JetStreamContext) -> None:
    for schema, words in (
        (
            only(nope=pa.string()),
            "there is no column 'nope'; the columns are stream, seq, subject, time, data, headers",
        ),
        (pa.schema([("seq", pa.uint64())] * 2), "it has the column 'seq' twice"),
        (only(seq=pa.string()), "column 'seq' cannot be string; it can be an integer type"),
        (
            only(time=pa.timestamp("ns")),
            r"column 'time' cannot be timestamp\[ns\]; it can be a timestamp with a time zone",
        ),
        (only(data=pa.int64()), "column 'data' cannot be int64"),
        (pa.schema([]), "it has no columns"),
        (only(headers=pa.map_(pa.string(), pa.string())), "column 'headers' cannot be map<string, string>"),
        (
            only(headers=pa.map_(pa.string(), pa.list_(pa.string()), keys_sorted=True)),
            "column 'headers' cannot be map<string, list<.*>, keys_sorted>",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            arrow.record_batches(js, "S", schema=schema)


def test_other_arguments_are_refused_at_the_call(js: JetStreamContext) -> None:
    for options, error in (
        ({"schema": "seq"}, TypeError),
        ({"payload": "json"}, TypeError),
        ({"batch_rows": 0}, ValueError),
        ({"seq": 0}, ValueError),
        ({"subject": "a b"}, jsx.errors.BadSubjectError),
        ({"timeout": 0}, ValueError),
        ({"nope": 1}, TypeError),
    ):
        with pytest.raises(error):
            arrow.record_batches(js, "S", **options)  # type: ignore[arg-type]
        with pytest.raises(error):
            arrow.RecordBatchReader(js, "S", **options)  # type: ignore[arg-type]
    with pytest.raises(jsx.errors.BadSubjectError):
        arrow.record_batches(js, "a.b")


async def test_batches_have_at_most_the_rows_asked_for(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await fill(js, stream, 2500)
    batches = [batch async for batch in arrow.record_batches(js, stream, batch_rows=1000)]
    assert [batch.num_rows for batch in batches] == [1000, 1000, 500]
    assert pa.Table.from_batches(batches).column("seq").to_pylist() == list(range(1, 2501))
    found = await arrow.to_arrow(js, stream, subject=f"{stream}.1", seq=10, up_to_seq=2000, confirm=True)
    assert found.column("seq").to_pylist() == [seq for seq in range(10, 2001) if seq % 3 == 2]


async def test_batches_have_about_8_mib(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await fill(js, stream, 60, 500_000)
    sizes = [batch.num_rows async for batch in arrow.record_batches(js, stream)]
    assert sum(sizes) == 60
    assert max(sizes) <= 17


async def test_a_read_that_is_left_early_leaves_nothing(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any
) -> None:
    stream = await make_stream()
    await fill(js, stream, 3000)
    async with arrow.record_batches(js, stream, batch_rows=100, batch=200) as batches:
        async for batch in batches:
            assert batch.num_rows == 100
            break
    await leak_check.assert_clean()
    assert [batch async for batch in batches] == []


async def test_a_read_that_is_cancelled_at_any_await_leaves_nothing(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any
) -> None:
    stream = await make_stream()
    await fill(js, stream, 500)
    for steps in range(0, 60, 3):
        task = asyncio.create_task(arrow.to_arrow(js, stream, batch=100, confirm=True))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await leak_check.assert_clean()


async def test_only_one_task_reads_and_a_failed_read_is_over(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await fill(js, stream, 10)
    batches = arrow.record_batches(js, stream)
    first = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task is waiting"):
        await anext(batches)
    with pytest.raises(RuntimeError, match="another task is waiting"):
        await batches.aclose()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(jsx.errors.JetStreamExtError, match="cannot be continued"):
        await anext(batches)
    await batches.aclose()


async def test_a_stream_without_direct_gets_is_an_error(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream(allow_direct=False)
    with pytest.raises(jsx.errors.DirectGetDisabledError):
        await arrow.to_arrow(js, stream)
