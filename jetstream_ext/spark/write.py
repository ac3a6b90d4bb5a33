"""One partition, written in an executor: each chunk of rows is prepared while the chunk before it is being stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from nats.js import JetStreamContext
from pyspark.sql.datasource import WriterCommitMessage

from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.ingest import ingest
from jetstream_ext.errors import BadHeaderError, IngestError, MaxPayloadError
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.spark.connection import Lease, connected
from jetstream_ext.spark.errors import ReplayError, SinkError
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.rows import Message, with_ids, without_ids
from jetstream_ext.spark.transactional import PATIENCE, MicroBatch, Transactions

_log = logging.getLogger("jetstream_ext.spark")

# The largest flow that servers grant; the publishers of a stream share it.
_FLOW: Final = 500
# Limits of the rows that wait while others are being stored.
_ROWS_AT_ONCE: Final = 50_000
_BYTES_AT_ONCE: Final = 8 << 20
# The server holds a transaction in memory until it is committed.
_TRANSACTION_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """Which rows are written."""

    writer: str  # the name of the query, or of the batch write
    batch: int  # the micro-batch; 0 for a batch write
    partition: int


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: how many rows it had, and how many of them an earlier attempt had stored (transactional)."""

    writer: str
    rows: int
    skipped: int = 0


class _Pipeline:
    """Runs one store at a time on the connection, while the caller prepares the next."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._wait: Callable[[], Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        elif self._wait is not None:
            self._lease.abandon()

    def store(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the store before, so that the rows of a partition are stored in order, and start the next."""
        self._finish()
        self._wait = self._lease.start(work())

    def _finish(self) -> None:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()


def write_partition(
    options: WriteOptions, state: StreamState, task: Task, chunks: Iterable[Sequence[Message]]
) -> Written:
    """Store the rows of one partition, which come in chunks, in order; `state` is the stream as the driver found it.

    Raises:
        ReplayError, FencedError: A transactional write must not continue; see `Transactions`.
        SinkError: A row was refused, or no row could be stored for too long.
        JetStreamExtError: The write failed; Spark tries the task again.
    """
    count = options.sink_partitions
    if count is not None and task.partition >= count:
        raise ReplayError(
            f"stream {options.stream!r}: there is a partition {task.partition}, but the option sinkPartitions is {count}; "
            f"correct it, or use df.repartition({count})"
        )
    with connected(options.connection, "executor") as (lease, context):
        if options.semantics == "transactional":
            done = _transactional(lease, context, options, state, task, chunks)
        else:
            done = _fast(lease, context, options, task, chunks)
    _log.debug("stream %r: stored %s of %s", options.stream, done, task)
    return done


def _fast(
    lease: Lease, context: JetStreamContext, options: WriteOptions, task: Task, chunks: Iterable[Sequence[Message]]
) -> Written:
    rows = 0
    with _Pipeline(lease) as pipeline:
        for messages in _joined(chunks, lambda: lease.busy):
            pipeline.store(partial(_publish, lease, context, options, task, messages, rows))
            rows += len(messages)
    return Written(task.writer, rows)


async def _publish(
    lease: Lease, context: JetStreamContext, options: WriteOptions, task: Task, messages: list[Message], first: int
) -> None:
    """Store rows of which the first has the index `first`."""
    try:
        if options.semantics == "dedupe":
            entries = with_ids(messages, f"{task.writer}:{task.batch}:{task.partition}", first)
            await ingest(context, entries, flow=_FLOW, timeout=PATIENCE)
            return
        async with FastPublisher(context, flow=_FLOW) as publisher:
            await publisher.add_many(without_ids(messages))
            await publisher.commit_eob()
            if publisher.error_count:
                raise publisher.errors[0].error
    except IngestError as error:
        refusal = f"; the server said: {lease.connection.refusal}" if lease.connection.refusal else ""
        raise SinkError(f"row {first + error.index} of partition {task.partition}: {error}{refusal}") from error
    except (BadHeaderError, MaxPayloadError) as error:
        raise SinkError(f"row {first} of partition {task.partition}, or one after it: {error}") from error


def _joined(chunks: Iterable[Sequence[Message]], busy: Callable[[], bool]) -> Iterator[list[Message]]:
    """Join the chunks that arrive while another one is being stored, because each store has a fixed cost."""
    joined: list[Message] = []
    size = 0
    for chunk in chunks:
        joined += chunk
        size += sum(len(message[1]) for message in chunk)
        if joined and (not busy() or len(joined) >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE):
            yield joined
            joined, size = [], 0
    if joined:
        yield joined


def _transactional(
    lease: Lease,
    context: JetStreamContext,
    options: WriteOptions,
    state: StreamState,
    task: Task,
    chunks: Iterable[Sequence[Message]],
) -> Written:
    batch = MicroBatch(context, options, state, task.writer, task.batch)
    if options.sink_partitions is not None:
        lease.run(batch.claim_layout(options.sink_partitions))
    transactions = Transactions(batch, task.partition)
    lease.run(transactions.open())
    rows = 0
    with _Pipeline(lease) as pipeline:
        for messages, last in _transactions_of(chunks, options.transaction_rows):
            transaction = transactions.next(messages, last=last)
            pipeline.store(partial(transactions.store, transaction))
            rows += len(messages)
    return Written(task.writer, rows, transactions.skipped)


def _transactions_of(chunks: Iterable[Sequence[Message]], most: int) -> Iterator[tuple[list[Message], bool]]:
    """Cut rows into transactions, always the same ones; yield each with whether it is the last one."""
    collected: list[Message] = []
    size = 0
    for chunk in chunks:
        for message in chunk:
            if len(collected) == most or size >= _TRANSACTION_BYTES:
                yield collected, False  # there is at least one more row
                collected, size = [], 0
            collected.append(message)
            size += len(message[1])
    yield collected, True
