"""Payloads as columns: JSON, Arrow IPC and functions."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow
from jetstream_ext.arrow.payloads import decoder_of

MakeStream = Callable[..., Awaitable[str]]
SEQ = pa.schema([("seq", pa.int64())])
N = pa.schema([("n", pa.int64())])
TWICE = pa.struct([("a", pa.int64()), ("a", pa.int64())])


async def store(js: JetStreamContext, stream: str, *payloads: bytes) -> None:
    await jsx.ingest(js, [(f"{stream}.x", payload) for payload in payloads])


def ipc(*tables: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, tables[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for table in tables:
            writer.write_table(table)
    return out.getvalue()


async def test_json_objects_become_the_columns_of_the_schema(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await store(
        js,
        stream,
        b'{"n": 9007199254740993, "when": "2026-01-02T03:04:05.123456789Z", "price": "1.10", "tags": ["a"]}',
        b'\r\n{\n "other": {"n": [7]},\r\n "n": null, "price": 2.25\n}\n',
        b"{}",
        b'{"n": -1, "text": "\\u00e9\\n"}',
    )
    schema = pa.schema(
        [
            ("n", pa.int64()),
            ("when", pa.timestamp("ns", tz="UTC")),
            ("price", pa.decimal128(9, 2)),
            ("tags", pa.list_(pa.string())),
            ("text", pa.string()),
        ]
    )
    table = await arrow.to_arrow(js, stream, schema=SEQ, payload=schema)
    assert table.schema == pa.schema([*SEQ, *schema])
    assert table.column("seq").to_pylist() == [1, 2, 3, 4]
    assert table.column("n").to_pylist() == [9007199254740993, None, None, -1]
    assert table.column("when").cast(pa.int64()).to_pylist()[0] % 10**9 == 123456789
    assert table.column("price").to_pylist() == [Decimal("1.10"), Decimal("2.25"), None, None]
    assert table.column("tags").to_pylist() == [["a"], None, None, None]
    assert table.column("text").to_pylist() == [None, None, None, "é\n"]
    default = await arrow.to_arrow(js, stream, payload=schema)
    assert default.schema.names == ["stream", "seq", "subject", "time", "headers", *schema.names]
    alone = await arrow.to_arrow(js, stream, schema=pa.schema([]), payload=N)
    assert alone.to_pylist()[0] == {"n": 9007199254740993}


async def test_a_payload_that_is_no_such_object_is_an_error_with_its_sequence(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream()
    for payload, words in (
        (b"", "is not JSON"),
        (b'{"n": 1} {"n": 2}', "is not JSON"),
        (b'{"n": 1}\n{"n": 2}', "is not JSON"),
        (b'{"n": NaN}', "is not JSON"),
        (b'{"n": "\xff"}', "is not JSON"),
        (b'{"t": "a\nb"}', "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"n": 1.5}', "does not fit the schema"),
        (b'{"n": "1"}', "does not fit the schema"),
        (b'{"n": 9223372036854775808}', "does not fit the schema"),
        (b'{"n": 1, "n": 2}', "does not fit the schema"),
    ):
        first = (await js.stream_info(stream)).state.last_seq + 1
        await store(js, stream, b'{"n": 1}', b"{}", payload, b'{"n": 4}')
        words = f"the payload of message {first + 2} of stream {stream!r} {words}"
        with pytest.raises(arrow.ConversionError, match=words):
            await arrow.to_arrow(js, stream, payload=N, seq=first)


async def test_a_field_that_may_not_be_null_must_be_there(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await store(js, stream, b'{"n": 1}', b"{}", b'{"n": null}')
    for start in (1, 3):
        with pytest.raises(
            arrow.ConversionError, match=rf"message {max(2, start)} of .* does not fit the schema: .*required"
        ):
            await arrow.to_arrow(js, stream, payload=pa.schema([pa.field("n", pa.int64(), nullable=False)]), seq=start)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=3),
    max_leaves=5,
)
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={"n": st.none() | st.integers(-(2**63), 2**63 - 1), "t": st.text(st.characters(codec="utf-8")), "o": JSON},
)


@given(st.lists(st.tuples(DOCUMENT, st.sampled_from([None, 1]), st.booleans()), min_size=1))
def test_each_row_belongs_to_its_payload(rows: list[tuple[dict[str, Any], int | None, bool]]) -> None:
    decoder = decoder_of(pa.schema([("n", pa.int64()), ("t", pa.string())]))
    texts = [json.dumps(document, indent=indent, ensure_ascii=plain).encode() for document, indent, plain in rows]
    [(table, places)] = decoder.decode(pa.array(texts, pa.binary()), str)
    assert places is None
    assert table.to_pylist() == [{"n": document.get("n"), "t": document.get("t")} for document, _, _ in rows]


def zeros(size: int) -> pa.Array:
    """Return numbers that take `size` bytes."""
    return pa.Array.from_buffers(pa.int64(), size // 8, [None, pa.py_buffer(bytes(size))])


_pools: list[pa.MemoryPool] = []  # kept, because buffers return their memory to them


@contextmanager
def measured_pool() -> Iterator[pa.MemoryPool]:
    """Let pyarrow allocate from a pool of its own, whose `max_memory` is that of the block."""
    before = pa.default_memory_pool()
    _pools.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(_pools[-1])
    try:
        yield _pools[-1]
    finally:
        pa.set_memory_pool(before)


def grown(count: int, **options: Any) -> bytes:
    """Return a stream of batches, each with one more value of the dictionary, all of which use all values before."""
    text = [f"{n}".zfill(1 << 10) for n in range(count)]
    parts = [pa.array(text[: n + 1]).dictionary_encode() for n in range(count)]
    return ipc(*(pa.table({"n": part}) for part in parts), emit_dictionary_deltas=True, **options)


MIB = 1 << 20
BOMBS = {
    "zstd": lambda: ipc(pa.table({"n": zeros(65 * MIB)}), compression="zstd"),
    "lz4": lambda: ipc(pa.table({"n": zeros(65 * MIB)}), compression="lz4"),
    "many columns": lambda: ipc(pa.table({f"{n}": zeros(MIB) for n in range(65)}), compression="zstd"),
    "many batches": lambda: ipc(*[pa.table({"n": zeros(MIB)})] * 65, compression="zstd"),
    "a dictionary": lambda: ipc(
        pa.table({"n": pa.DictionaryArray.from_arrays([0], ["0" * 65 * MIB])}), compression="zstd"
    ),
    "dictionaries that grow": lambda: grown(400),
    "nulls": lambda: ipc(pa.table({"n": pa.nulls(65 * MIB)})),
}


async def test_an_ipc_stream_that_expands_too_much_is_refused_before_it_does(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    for bomb, make in BOMBS.items():
        stream, payload = await make_stream(), make()
        assert len(payload) < MIB, bomb
        await store(js, stream, ipc(pa.table({"m": [1]})), payload)
        words = f"the payload of message 2 of stream {stream!r} .* at most 64 MiB and 67,108,864 rows"
        with measured_pool() as pool, pytest.raises(arrow.ConversionError, match=words):
            await arrow.to_arrow(js, stream, payload="ipc")
        assert pool.max_memory() < 2 * MIB, bomb


PIECES = pa.table(
    {
        "t": pa.array(["a", "b" * 50, "a"]).dictionary_encode(),
        "l": pa.array([[1], [], None]),
        "m": pa.array([[("k", {"x": 1})], None, []], pa.map_(pa.string(), pa.struct([("x", pa.int64())]))),
        "z": pa.nulls(3),
    }
)
VALID = [
    *(ipc(PIECES, PIECES, compression=compression) for compression in (None, "zstd", "lz4")),
    grown(4),
]


@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8))))
def test_a_damaged_ipc_stream_is_a_table_or_an_error_that_names_its_payload(
    payload: bytes, damage: list[tuple[int, bytes]]
) -> None:
    changed = bytearray(payload)
    for place, new in damage:
        start = place % len(payload)
        changed[start : start + len(new)] = new
    before, error = pa.total_allocated_bytes(), ""
    try:
        for table, rows in decoder_of("ipc").decode(pa.array([bytes(changed)]), str):
            assert pa.total_allocated_bytes() - before < 65 * MIB
            assert set(islice(rows, table.num_rows)) <= {0}
    except arrow.ConversionError as refused:
        error = str(refused)
    assert error == "" or error.startswith("the payload of 0 ")


async def test_ipc_streams_of_any_compression_are_read(js: JetStreamContext, make_stream: MakeStream) -> None:
    table = pa.table({"n": zeros(63 * MIB)})
    names = pa.array(["a", "b" * 1000, "a"]).dictionary_encode()
    odd = pa.table({"n": pa.array([1, 2, None], pa.int8()), "t": names, "b": [b"incompressible"] * 3})
    for compression in (None, "zstd", "lz4"):
        stream = await make_stream()
        if compression:
            await store(js, stream, *[ipc(table, compression=compression)] * 2)
            assert await rows_of(arrow.record_batches(js, stream, schema=SEQ, payload="ipc")) == 2 * 63 * MIB // 8
            await js.purge_stream(stream)
        await store(js, stream, ipc(odd, odd, compression=compression))
        found = await arrow.to_arrow(js, stream, schema=pa.schema([]), payload="ipc")
        assert found.to_pylist() == odd.to_pylist() * 2, compression


async def rows_of(batches: arrow.RecordBatches) -> int:
    return sum([batch.num_rows async for batch in batches])


async def test_ipc_streams_become_as_many_rows_as_they_have(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    schema = pa.schema([("n", pa.int64()), ("name", pa.dictionary(pa.int8(), pa.string()))])

    def part(*rows: tuple[int, str]) -> bytes:
        numbers, names = [n for n, _ in rows], pa.array([name for _, name in rows], pa.string())
        table = pa.table({"n": pa.array(numbers, pa.int64()), "name": names.dictionary_encode()})
        return ipc(table.cast(schema))

    await store(js, stream, part((1, "a"), (2, "b")), part(), part((3, "c"), (4, "a"), (5, "c")))
    table = await arrow.to_arrow(
        js, stream, schema=pa.schema([("seq", pa.int64()), ("subject", pa.string())]), payload="ipc"
    )
    table.validate(full=True)
    assert table.column("seq").to_pylist() == [1, 1, 3, 3, 3]
    assert table.column("n").to_pylist() == [1, 2, 3, 4, 5]
    assert table.column("name").to_pylist() == ["a", "b", "c", "a", "c"]
    rows = [batch.num_rows async for batch in arrow.record_batches(js, stream, payload="ipc", batch_rows=2)]
    assert sum(rows) == 5
    assert max(rows) <= 2


async def test_a_payload_that_is_no_such_ipc_stream_is_an_error_with_its_sequence(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream, first = await make_stream(), ipc(pa.table({"n": [1]}))
    required = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    for payload, words in (
        (b"", "is not an Arrow IPC stream"),
        (b"x" * 100, "is not an Arrow IPC stream"),
        (ipc(pa.table({"n": [1] * 100}))[:-200], "is not an Arrow IPC stream"),
        (ipc(pa.table({"abc": [1]})).replace(b"abc", b"a\xffc"), "is not an Arrow IPC stream: .*utf-8"),
        (first * 2, "is not an Arrow IPC stream: 1?[0-9]+ bytes follow"),
        (first + b"\0", "is not an Arrow IPC stream: 1 byte follows its end"),
        (ipc(pa.table({"n": ["1"]})), "has other columns than before: n string, before n int64"),
        (ipc(pa.table({"m": [1]})), "has other columns than before: m int64, before n int64"),
        (ipc(pa.table({"n": [1]}, required)), "has other columns than before: n int64 not null, before n int64"),
    ):
        seq = (await js.stream_info(stream)).state.last_seq + 1
        await store(js, stream, first, payload)
        with pytest.raises(arrow.ConversionError, match=f"message {seq + 1} of .* {words}"):
            await arrow.to_arrow(js, stream, payload="ipc", seq=seq)


async def test_a_function_makes_the_columns(js: JetStreamContext, make_stream: MakeStream) -> None:
    for function, names, first in (
        (lambda payloads: pc.binary_length(payloads), ["data"], {"data": 3}),
        (lambda payloads: pa.record_batch({"x": payloads}), ["x"], {"x": b"one"}),
        (
            lambda payloads: pa.StructArray.from_arrays([payloads, payloads.cast("string")], ["a", "b"]),
            ["a", "b"],
            {"a": b"one", "b": "one"},
        ),
    ):
        stream = await make_stream()
        empty = await arrow.to_arrow(js, stream, schema=SEQ, payload=function)
        await store(js, stream, b"one", b"", b"three")
        batches = arrow.record_batches(js, stream, schema=SEQ, payload=function, batch_rows=2)
        assert batches.schema is None
        found = [batch async for batch in batches]
        assert [batch.num_rows for batch in found] == [2, 1]
        assert found[0].schema == batches.schema == empty.schema
        assert found[0].schema.names == ["seq", *names]
        assert found[0].to_pylist()[0] == {"seq": 1, **first}


async def test_a_function_that_returns_something_else_is_an_error(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream()
    await store(js, stream, b"1", b"2", b"x")
    with pytest.raises(TypeError, match="must return an Array, a StructArray or a RecordBatch, not list"):
        await arrow.to_arrow(js, stream, payload=lambda payloads: payloads.to_pylist())
    with pytest.raises(arrow.ConversionError, match="returned 1 value for 3 payloads, at message 1 of"):
        await arrow.to_arrow(js, stream, payload=lambda payloads: payloads[:1])
    with pytest.raises(ZeroDivisionError):
        await arrow.to_arrow(js, stream, payload=lambda _: 1 // 0)
    async with asyncio.timeout(30):
        for subject in ("x", "none"):
            with pytest.raises(RuntimeError, match="the payload function raised StopIteration"):
                await arrow.to_arrow(js, stream, subject=f"{stream}.{subject}", payload=lambda _: next(iter(())))

    def changes(payloads: Any) -> Any:
        return payloads if payloads[0].as_py() == b"1" else payloads.cast("string")

    with pytest.raises(
        arrow.ConversionError, match=r"at message 2 .* other columns than before: data string, before data b"
    ):
        async for _ in arrow.record_batches(js, stream, payload=changes, batch_rows=1):
            pass


async def test_columns_with_one_name_are_refused(js: JetStreamContext, make_stream: MakeStream) -> None:
    for payload, words in (
        (pa.schema([("seq", pa.int64())]), "column 'seq' is in the payload and in the message"),
        (pa.schema([]), "the schema has no fields"),
        (pa.schema([("a", pa.int64())] * 2), "the schema has the field 'a' twice"),
        (pa.schema([("a", pa.map_(pa.string(), pa.string()))]), "payload: JSON conversion to map"),
    ):
        with pytest.raises(ValueError, match=words):
            arrow.record_batches(js, "S", payload=payload)
    stream = await make_stream()
    await store(js, stream, b"1")
    with pytest.raises(arrow.ConversionError, match="column 'data' is in the payload and in the message"):
        await arrow.to_arrow(js, stream, schema=arrow.SCHEMA, payload=lambda payloads: payloads)


def test_times_without_a_zone_are_in_utc() -> None:
    zoned = pa.timestamp("us", tz="UTC")
    for kind, text, value in (
        (zoned, b'"2026-01-02T03:04:05"', 1767323045_000_000),
        (zoned, b'"2026-01-02T03:04:05+02:00"', 1767315845_000_000),
        (pa.timestamp("us"), b'"2026-01-02T03:04:05Z"', 1767323045_000_000),
    ):
        [(table, _)] = decoder_of(pa.schema([("a", kind)])).decode(pa.array([b'{"a": %b}' % text]), str)
        assert table.column("a").cast(pa.int64()).to_pylist() == [value], text


def test_a_value_that_the_field_cannot_hold_exactly_is_refused() -> None:
    for kind, text in (
        (pa.int64(), b"1.0"),
        (pa.int8(), b"300"),
        (pa.uint64(), b"-1"),
        (pa.decimal128(5, 2), b"1.239"),
        (pa.decimal128(5, 2), b'"1e4"'),
        (pa.struct([("x", pa.decimal128(5, 2))]), b'{"x": "1e4"}'),
        (pa.time32("s"), b"90000"),
        (pa.date64(), b"5"),
        (pa.float64(), b"1e400"),
        (pa.float32(), b"1e39"),
        (pa.struct([("x", pa.list_(pa.float32()))]), b'{"x": [1, -1e39]}'),
        (pa.timestamp("us"), b'"2026-01-02T03:04:05.1234567Z"'),
        (pa.string(), b"1"),
        (pa.string(), b'"\\ud83d"'),
        (pa.bool_(), b"1"),
    ):
        decoder = decoder_of(pa.schema([("a", kind)]))
        with pytest.raises(arrow.ConversionError, match="the payload of 1 "):
            list(decoder.decode(pa.array([b"{}", b'{"a": %b}' % text]), str))
    for fields in ([("a", pa.int64()), ("a", pa.int64())], [("b", pa.list_(TWICE))]):
        with pytest.raises(ValueError, match="payload: the schema has the field 'a' twice"):
            decoder_of(pa.schema(fields))


async def test_a_function_runs_in_a_thread_one_call_at_a_time(js: JetStreamContext, make_stream: MakeStream) -> None:
    stream = await make_stream()
    await store(js, stream, *(b"%d" % n for n in range(8)))
    mark = ContextVar("mark", default="")
    mark.set("the caller's")
    loop, running, calls = asyncio.get_running_loop(), threading.Lock(), list[tuple[int, str]]()

    def slow(payloads: Any) -> Any:
        assert running.acquire(blocking=False)
        calls.append((threading.get_ident(), mark.get()))
        ticked = threading.Event()
        loop.call_soon_threadsafe(ticked.set)
        assert ticked.wait(60), "the event loop goes on meanwhile"
        running.release()
        return payloads

    batches = arrow.record_batches(js, stream, schema=SEQ, payload=slow, batch_rows=2)
    found = [row async for batch in batches for row in batch.to_pylist()]
    assert found == [{"seq": n + 1, "data": b"%d" % n} for n in range(8)]
    assert [mark for _, mark in calls] == ["the caller's"] * 4
    assert threading.get_ident() not in {thread for thread, _ in calls}


async def test_a_cancelled_read_does_not_wait_for_the_function(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any
) -> None:
    stream = await make_stream()
    await store(js, stream, b"1", b"2")
    entered, left = threading.Event(), threading.Event()

    def slow(payloads: Any) -> Any:
        entered.set()
        assert left.wait(60)
        raise ZeroDivisionError

    reading = asyncio.create_task(arrow.to_arrow(js, stream, payload=slow))
    async with asyncio.timeout(30):
        while not entered.is_set():
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await leak_check.assert_clean()
    threads = threading.active_count()
    left.set()
    async with asyncio.timeout(30):
        while threading.active_count() == threads:
            await asyncio.sleep(0.01)
