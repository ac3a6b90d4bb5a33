"""A stream as record batches: for a coroutine, as one table, or for libraries that pull from a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import Any, Final, Self, Unpack

import pyarrow as pa
from nats.js import JetStreamContext

from jetstream_ext.arrow.payloads import Decoder, Payload, decoder_of
from jetstream_ext.arrow.schemas import Array, Field, check_schema, first_bad, misfit
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import ScanOptions, scan_blocks
from jetstream_ext.client.direct_reader import ExclusiveReader
from jetstream_ext.client.pieces import pieces_of
from jetstream_ext.client.stream_options import check_known_options
from jetstream_ext.columns import SCHEMA, Columns
from jetstream_ext.errors import ConversionError
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.options import check_int
from jetstream_ext.protocol.subjects import check_name

_ROWS: Final = 10_000
_MOST_ROWS: Final = 1 << 31
_BYTES: Final = 8 << 20
_DATA: Final = pa.schema([SCHEMA.field("data")])
_UNKNOWN: Final = "\ufffd".encode()
_SYNONYMS: Final = {"columns": "schema", "subjects": "subject"}
_BLOCKED_AFTER: Final = 10.0  # seconds in which the event loop runs nothing


def record_batches(
    js: JetStreamContext,
    stream: str,
    *,
    schema: pa.Schema | None = None,
    payload: Payload | None = None,
    batch_rows: int = _ROWS,
    timeout: float | None = None,
    **scan: Unpack[ScanOptions],
) -> RecordBatches:
    """Read a whole range of a stream as record batches, with as many requests as it takes.

    Memory is bounded as for `DirectGet.scan`, plus the messages of one batch and the batch: about 8 MiB each, or one message,
    if that is larger. Every value is exact: times have nanoseconds, and headers have all values of a repeated name, in order.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        schema: The columns, some of those of `SCHEMA` in any order. A column may have another type that can hold its
            values, such as ``int64`` for ``seq``. Streams can have subjects and headers that are not UTF-8; these need
            ``binary``. None is `SCHEMA`, without ``data`` if there is a `payload`.
        payload: How payloads become columns, which follow those of `schema`; see `Payload`. None leaves them as they are,
            in the column ``data``.
        batch_rows: The maximum number of rows of a batch, from 1.
        timeout: As for `DirectGet`.
        **scan: ``subject``, ``seq``, ``start_time``, ``up_to_seq``, ``batch``, ``max_bytes``, ``prefetch``, ``confirm``,
            ``min_seq`` and ``on_bad``, as for `DirectGet.scan`.

    Returns:
        The batches, in the order of the sequences; the first request goes out on first use.

    Raises:
        ValueError: A number is out of range, `schema` or `payload` has a column that does not exist, comes twice or cannot
            have its type, or they have a column in common.
        TypeError: An argument has another type.
        BadSubjectError: `stream` is not a valid stream name, or the subject is not a valid filter.
        ConversionError: While iterating: a value does not fit its column, or a payload cannot be decoded. Batches before
            it are valid.
        JetStreamExtError, nats.errors.Error: While iterating: as for `DirectGet.scan`.

    Cancellation: The call itself sends nothing; see `RecordBatches` for the read.

    Requires: nats-server 2.11 (ADR-31, Batched requests).
    """
    check_name(stream, "stream name")
    check_known_options(
        "record_batches", scan, [*ScanOptions.__annotations__, "schema", "payload", "batch_rows", "timeout"], _SYNONYMS
    )
    if schema is not None:
        check_schema(schema, SCHEMA, optional=payload is not None)
    elif payload is None:
        schema = SCHEMA
    else:
        schema = SCHEMA.remove(SCHEMA.get_field_index("data"))
    builder = _Builder(schema, None if payload is None else decoder_of(payload), check_int(batch_rows, "batch_rows"))
    context = Context(js)
    _, blocks = scan_blocks(context, stream, context.resolve_timeout(timeout), **scan)
    return RecordBatches(builder, blocks)


def exact_record_batches(
    js: JetStreamContext, stream: str, schema: pa.Schema, batch_rows: int, **scan: Unpack[ScanOptions]
) -> RecordBatches:
    """As `record_batches`, but raise ConversionError for lines among stored headers that are not headers, such as a status."""
    context = Context(js)
    _, blocks = scan_blocks(context, stream, context.resolve_timeout(None), **scan)
    return RecordBatches(_Builder(schema, None, batch_rows, all_lines=True), blocks)


async def to_arrow(
    js: JetStreamContext,
    stream: str,
    *,
    schema: pa.Schema | None = None,
    payload: Payload | None = None,
    timeout: float | None = None,
    **scan: Unpack[ScanOptions],
) -> pa.Table:
    """Read a whole range of a stream into a table.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        schema: As for `record_batches`.
        payload: As for `record_batches`.
        timeout: As for `DirectGet`.
        **scan: As for `record_batches`.

    Returns:
        The table; without messages, it has no rows.

    Raises:
        ValueError, TypeError, BadSubjectError, ConversionError: As for `record_batches`.
        JetStreamExtError, nats.errors.Error: As for `DirectGet.scan`.

    Cancellation: Safe; nothing is left behind, but that a thread that is decoding payloads finishes its batch.

    Requires: nats-server 2.11 (ADR-31, Batched requests).
    """
    async with record_batches(js, stream, schema=schema, payload=payload, timeout=timeout, **scan) as batches:
        read = [batch async for batch in batches]
        return pa.Table.from_batches(read, batches.schema)


class RecordBatches:
    """The record batches of one read: iterate over it, or use it as an async context manager.

    The first request goes out on first use. To leave early, use ``break`` and then `aclose` (or the end of the
    ``async with`` block): nothing is left behind. Only one task at a time may read. An error ends the read.

    Raises:
        ConversionError: While iterating: see `record_batches`.
        JetStreamExtError, nats.errors.Error: While iterating: see `DirectGet`. After an error or a cancellation, every
            further use of the read.
        RuntimeError: Another task is waiting for a batch of the same read.

    Cancellation: A cancelled read is over and cannot be continued. Nothing is left behind, but that a thread that is
    decoding payloads finishes its batch.

    Requires: nats-server 2.11 (ADR-31, Batched requests).
    """

    def __init__(self, builder: _Builder, blocks: AsyncGenerator[Block, None]) -> None:
        self._builder = builder
        self._batches = ExclusiveReader(builder.batches(blocks))

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of all batches; with the payload ``"ipc"`` or a function, None before the first batch or the end."""
        return self._builder.schema

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pa.RecordBatch:
        if (batch := await self._batches.next()) is None:
            raise StopAsyncIteration
        return batch

    async def aclose(self) -> None:
        """End the read; safe to call more than once.

        Raises:
            RuntimeError: Another task is waiting for a batch of the read; cancel that task first.

        Cancellation: The read is over; nothing is left behind.
        """
        await self._batches.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class RecordBatchReader:
    """Reads a stream for a library that pulls: an async context manager around a ``pyarrow.RecordBatchReader``.

    ::

        async with arrow.RecordBatchReader(js, "ORDERS") as reader:
            frame = await asyncio.to_thread(polars.from_arrow, reader)

    The reader is for one thread at a time, and not for the event loop's own: that thread receives the messages. Memory is
    bounded as for `record_batches`, because each batch is read when it is pulled.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        stream: The stream's name.
        schema: As for `record_batches`.
        payload: As for `record_batches`. With ``"ipc"`` or a function, ``async with`` reads the first batch, because it
            determines the schema.
        batch_rows: As for `record_batches`.
        timeout: As for `DirectGet`.
        **scan: As for `record_batches`.

    Raises:
        ValueError, TypeError, BadSubjectError: As for `record_batches`.
        ConversionError, JetStreamExtError, nats.errors.Error: While the reader is read: as for `record_batches`. A library
            may wrap the error of a pull in its own.
        RuntimeError: While the reader is read: from the event loop's thread, after the end of the block, after the loop
            was closed, or while something blocks the loop for 10 s.

    Cancellation: The end of the ``async with`` block ends a pull that is waiting, with a RuntimeError in its thread, and
    leaves nothing behind.

    Requires: nats-server 2.11 (ADR-31, Batched requests).
    """

    def __init__(
        self,
        js: JetStreamContext,
        stream: str,
        *,
        schema: pa.Schema | None = None,
        payload: Payload | None = None,
        batch_rows: int = _ROWS,
        timeout: float | None = None,
        **scan: Unpack[ScanOptions],
    ) -> None:
        self._batches = record_batches(
            js, stream, schema=schema, payload=payload, batch_rows=batch_rows, timeout=timeout, **scan
        )
        self._pull: _Pull | None = None

    async def __aenter__(self) -> pa.RecordBatchReader:
        if self._pull is not None:
            raise RuntimeError("a RecordBatchReader can be used once; make another one for another read")
        self._pull = _Pull(self._batches)
        if self._batches.schema is None:
            await self._pull.fetch_first()
        schema = self._batches.schema
        assert schema is not None
        return pa.RecordBatchReader.from_batches(schema, self._pull)

    async def __aexit__(self, *_: object) -> None:
        assert self._pull is not None
        await self._pull.aclose()


class _Pull:
    """Lets another thread iterate over record batches of this loop."""

    def __init__(self, batches: RecordBatches) -> None:
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._first: pa.RecordBatch | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._closed = False

    async def fetch_first(self) -> None:
        self._first = await anext(self._batches, None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        if threading.get_ident() == self._thread:
            raise RuntimeError(
                "this reader cannot be read in the event loop's own thread, which receives the messages; read it in "
                "another one (await asyncio.to_thread(...)), or use record_batches or to_arrow"
            )
        batch, self._first = self._first, None
        if batch is None:
            batch = self._from_loop()
        if batch is None:
            raise StopIteration
        return batch

    def _from_loop(self) -> pa.RecordBatch | None:
        fetching = self._fetch()
        try:
            future = asyncio.run_coroutine_threadsafe(fetching, self._loop)
        except RuntimeError:
            fetching.close()
            raise RuntimeError("the event loop of this reader is closed") from None
        while not concurrent.futures.wait([future], _BLOCKED_AFTER).done:
            self._check_loop(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("this reader was closed while a batch was read") from None

    async def _fetch(self) -> pa.RecordBatch | None:
        if self._closed:
            raise RuntimeError("this reader is closed; read it inside of its async with block")
        if self._waiting is not None:
            raise RuntimeError(
                "another thread is waiting for a batch of this reader, which is for one thread at a time"
            )
        self._waiting = asyncio.current_task()
        try:
            return await anext(self._batches, None)
        finally:
            self._waiting = None

    def _check_loop(self, future: concurrent.futures.Future[pa.RecordBatch | None]) -> None:
        """Raise RuntimeError if the loop is closed or blocked, for example by the call that pulls from a thread."""
        runs = threading.Event()
        try:
            self._loop.call_soon_threadsafe(runs.set)
        except RuntimeError:
            raise RuntimeError("the event loop of this reader is closed") from None
        if not runs.wait(_BLOCKED_AFTER) and future.cancel():
            raise RuntimeError(
                "the event loop of this reader is blocked, perhaps by the call that reads it; make that call in another "
                "thread (await asyncio.to_thread(...))"
            )

    async def aclose(self) -> None:
        self._closed = True
        self._first = None
        if self._waiting is not None:
            self._waiting.cancel()  # which ends the read
            await asyncio.wait([self._waiting])
        await self._batches.aclose()


class _Builder:
    """Makes record batches of blocks: the columns of messages, then those of their payloads."""

    def __init__(self, schema: pa.Schema, decoder: Decoder | None, rows: int, *, all_lines: bool = False) -> None:
        self.schema: pa.Schema | None = None
        self._columns = Columns(schema, all_lines=all_lines)
        self._decoder = decoder
        self._payloads = Columns(_DATA)
        self._rows = min(rows, _MOST_ROWS)
        self._learn(decoder.schema if decoder else pa.schema([]))

    def _learn(self, decoded: pa.Schema | None) -> None:
        if decoded is None or self.schema is not None:
            return
        messages = self._columns.schema
        if both := set(messages.names) & set(decoded.names):
            raise ConversionError(
                f"column {min(both)!r} is in the payload and in the message; leave it out of schema, or rename it"
            )
        self.schema = pa.schema([*messages, *decoded]).with_metadata(messages.metadata)

    async def batches(self, blocks: AsyncGenerator[Block, None]) -> AsyncGenerator[pa.RecordBatch, None]:
        async with aclosing(pieces_of(blocks, self._rows, _BYTES)) as pieces:
            if (decoder := self._decoder) is None:
                async for block in pieces:
                    yield self._messages(block)
                return
            with _own_thread() as thread:
                async for block in pieces:
                    decoded = self._decoded(decoder, block)
                    while (batch := await thread(next, decoded, None)) is not None:
                        yield batch
                self._learn(await thread(decoder.finish))

    def _decoded(self, decoder: Decoder, block: Block) -> Iterator[pa.RecordBatch]:
        messages = self._messages(block) if self._columns.schema.names else None
        payloads = self._payloads.batch(block).column(0)
        stream, seqs = block.stream, block.seqs
        start = 0
        for decoded, rows in decoder.decode(payloads, lambda index: f"message {seqs[index]} of stream {stream!r}"):
            self._learn(decoder.schema)
            # Few rows at a time: a payload of some bytes can have millions.
            for batch in decoded.to_reader(self._rows):
                own: list[Array] = []
                if messages is not None:
                    if rows is None:
                        some = messages.slice(start, batch.num_rows)
                        start += batch.num_rows
                    else:
                        some = messages.take(pa.array(islice(rows, batch.num_rows), pa.int64()))
                    own = some.columns
                yield pa.RecordBatch.from_arrays([*own, *batch.columns], schema=self.schema)

    def _messages(self, block: Block) -> pa.RecordBatch:
        try:
            return self._columns.batch(block)
        except ValueError:
            for field in self._columns.schema:
                _check_column(field, block)
            raise


@contextmanager
def _own_thread() -> Iterator[Callable[..., Awaitable[Any]]]:
    """Yield a function that calls another one in a thread of this read.

    Those of `asyncio.to_thread` may all be waiting for this read, each in the loop of a `RecordBatchReader`. After a
    cancellation, the thread ends with the call that it is in.
    """
    executor = ThreadPoolExecutor(1, "jetstream_ext.arrow")
    loop = asyncio.get_running_loop()

    def call(function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        return loop.run_in_executor(executor, partial(copy_context().run, function, *arguments))

    try:
        yield call
    finally:
        executor.shutdown(wait=False)


def _check_column(field: Field, block: Block) -> None:
    """Raise ConversionError if a value does not fit a column."""
    column = Columns(pa.schema([field]))
    try:
        column.batch(block)
    except ValueError:
        index, error = first_bad(lambda start, stop: column.batch(block.part(start, stop)), len(block))
        raise misfit(field, f"message {block.seqs[index]} of stream {block.stream!r}", error) from error
