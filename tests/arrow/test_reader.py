"""`RecordBatchReader`: pulls from threads, and how each of them ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import duckdb
import nats
import polars
import pyarrow as pa
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import arrow
from jetstream_ext.arrow import reading
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]
N = pa.schema([("n", pa.int64())])


async def fill(js: JetStreamContext, stream: str, count: int) -> None:
    await jsx.ingest(js, ((f"{stream}.{n % 3}", b'{"n": %d}' % n) for n in range(count)))


def query(events: pa.RecordBatchReader) -> Any:
    return duckdb.sql("SELECT count(*), sum(n) FROM events").fetchall()[0]


async def test_libraries_pull_from_a_thread(js: JetStreamContext, make_stream: MakeStream, leak_check: Any) -> None:
    stream = await make_stream()
    await fill(js, stream, 2500)
    for library, read, found in (
        ("pyarrow", lambda reader: sum(reader.read_all().column("n").to_pylist()), 3_123_750),
        ("polars", lambda reader: polars.from_arrow(reader)["n"].sum(), 3_123_750),
        ("pandas", lambda reader: int(reader.read_pandas()["n"].sum()), 3_123_750),
        ("duckdb", query, (2500, 3_123_750)),
    ):
        async with arrow.RecordBatchReader(js, stream, payload=N, batch_rows=1000) as reader:
            assert reader.schema.names[-1] == "n"
            assert await asyncio.to_thread(read, reader) == found, library
    await leak_check.assert_clean()


async def test_a_schema_that_only_payloads_determine_is_known_at_once(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream()
    for count in (0, 30):
        await fill(js, stream, count)
        for payload in (None, "ipc", lambda payloads: payloads):
            if count and payload == "ipc":
                continue
            async with arrow.RecordBatchReader(js, stream, payload=payload, batch_rows=10) as reader:
                assert ("data" in reader.schema.names) == (payload != "ipc")
                table = await asyncio.to_thread(reader.read_all)
            assert table.column("seq").to_pylist() == list(range(1, count + 1))


async def test_the_loop_s_own_thread_is_refused_and_loses_nothing(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    stream = await make_stream()
    await fill(js, stream, 30)
    async with arrow.RecordBatchReader(js, stream, batch_rows=10) as reader:
        with pytest.raises(RuntimeError, match="cannot be read in the event loop's own thread"):
            reader.read_next_batch()
        assert (await asyncio.to_thread(reader.read_all)).num_rows == 30


async def test_a_blocked_loop_is_an_error(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCKED_AFTER", 0.1)
    stream = await make_stream()
    await fill(js, stream, 30)
    failures: list[BaseException] = []

    def pull(reader: pa.RecordBatchReader) -> None:
        try:
            reader.read_all()
        except RuntimeError as error:
            failures.append(error)

    async with arrow.RecordBatchReader(js, stream) as reader:
        thread = threading.Thread(target=pull, args=(reader,))
        thread.start()
        thread.join(30)  # on purpose in the loop's thread
        assert not thread.is_alive()
    assert "the event loop of this reader is blocked" in str(failures[0])


async def test_a_reader_is_for_one_block(js: JetStreamContext, make_stream: MakeStream, leak_check: Any) -> None:
    stream = await make_stream()
    await fill(js, stream, 30)
    async with arrow.RecordBatchReader(js, stream, batch_rows=10) as reader:
        await asyncio.to_thread(reader.read_next_batch)
    with pytest.raises(RuntimeError, match="this reader is closed"):
        await asyncio.to_thread(reader.read_next_batch)
    with pytest.raises(RuntimeError, match="this reader is closed"):  # not the end
        await asyncio.to_thread(reader.read_next_batch)
    await leak_check.assert_clean()
    outer = arrow.RecordBatchReader(js, stream)
    async with outer:
        pass
    with pytest.raises(RuntimeError, match="can be used once"):
        await outer.__aenter__()
    await leak_check.assert_clean()


async def test_a_pull_that_waits_ends_with_the_block(own_server: NatsServer, stream_name: Callable[[], str]) -> None:
    """Meanwhile no other thread can pull."""
    async with await nats.connect(own_server.url) as nc:
        js, stream = nc.jetstream(timeout=60), stream_name()
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_batched=True)
        await fill(js, stream, 30)
        before = set(nc._subs)
        async with arrow.RecordBatchReader(js, stream) as reader:
            own_server.pause()
            pulls = {asyncio.ensure_future(asyncio.to_thread(reader.read_next_batch)) for _ in range(2)}
            refused, waiting = await asyncio.wait(pulls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(RuntimeError, match="another thread is waiting for a batch of this reader"):
                await refused.pop()
        with pytest.raises(RuntimeError, match="this reader was closed while a batch was read"):
            await waiting.pop()
        own_server.resume()
        assert set(nc._subs) <= before


async def test_a_pull_ends_with_the_connection(own_server: NatsServer, stream_name: Callable[[], str]) -> None:
    async with await nats.connect(own_server.url) as nc:
        js, stream = nc.jetstream(timeout=60), stream_name()
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_batched=True)
        await fill(js, stream, 2000)
        async with arrow.RecordBatchReader(js, stream, batch_rows=10, batch=10) as reader:
            await asyncio.to_thread(reader.read_next_batch)
            await nc.close()
            with pytest.raises(nats.errors.ConnectionClosedError):
                await asyncio.to_thread(reader.read_all)
            with pytest.raises(jsx.errors.JetStreamExtError, match="cannot be continued"):
                await asyncio.to_thread(reader.read_all)


def test_a_pull_after_the_loop_closed_is_an_error(server: NatsServer, stream_name: Callable[[], str]) -> None:
    held: list[pa.RecordBatchReader] = []

    async def main() -> None:
        async with await nats.connect(server.url) as nc:
            js, stream = nc.jetstream(timeout=30), stream_name()
            await js.add_stream(name=stream, subjects=[f"{stream}.>"], allow_direct=True, allow_batched=True)
            await fill(js, stream, 30)
            reader = arrow.RecordBatchReader(js, stream, batch_rows=10)
            held.append(await reader.__aenter__())

    asyncio.run(main())
    errors: list[str] = []

    def pull() -> None:
        try:
            held.pop().read_next_batch()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pull)
    thread.start()
    thread.join(30)
    assert errors == ["the event loop of this reader is closed"]
    gc.collect()


async def test_a_reader_that_is_cancelled_leaves_nothing(
    js: JetStreamContext, make_stream: MakeStream, leak_check: Any
) -> None:
    stream = await make_stream()
    await fill(js, stream, 300)

    async def read() -> None:
        async with arrow.RecordBatchReader(js, stream, payload=lambda payloads: payloads, batch_rows=50) as reader:
            await asyncio.to_thread(reader.read_all)

    for steps in range(0, 40, 4):
        task = asyncio.create_task(read())
        for _ in range(steps):
            await asyncio.sleep(0.0003)
        task.cancel()
        await asyncio.wait([task])
        await leak_check.assert_clean()
