"""One partition, written in an executor: rows as they come, one chunk on its way while the next is made."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nats.js import JetStreamContext

from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.ingest import ingest
from jetstream_ext.errors import BadHeaderError, IngestError, MaxPayloadError
from jetstream_ext.spark.connections import Lease, connections
from jetstream_ext.spark.dedupe import with_ids, without_ids
from jetstream_ext.spark.layout import claim_layout
from jetstream_ext.spark.markers import ReplayError
from jetstream_ext.spark.patience import PATIENCE, SinkError
from jetstream_ext.spark.rows import Message
from jetstream_ext.spark.sink_states import SinkFacts
from jetstream_ext.spark.transactional import Transactions
from jetstream_ext.spark.write_options import Semantics, WriteOptions
from jetstream_ext.types import Entry

# The most that servers grant; they share it among the publishers of a stream.
_FLOW: Final = 500
# Of rows that wait while others are on their way.
_ROWS_AT_ONCE: Final = 50_000
_BYTES_AT_ONCE: Final = 8 << 20
# Bytes of a transaction: the server holds it in memory until it is committed.
_TRANSACTION_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """Which rows these are.

    Attributes:
        writer: The name of the query, or of the batch write.
        batch: The micro-batch; 0 for a batch write.
        partition: The partition.
    """

    writer: str
    batch: int
    partition: int


@dataclass(frozen=True, slots=True)
class Done:
    """What became of them.

    Attributes:
        rows: How many there were.
        skipped: How many of them an earlier attempt had stored (transactional only).
    """

    rows: int
    skipped: int = 0


def write_partition(options: WriteOptions, facts: SinkFacts, task: Task, chunks: Iterable[Sequence[Message]]) -> Done:
    """Store the rows of one partition.

    Args:
        options: The write.
        facts: What the driver found out about the stream.
        task: Which rows these are.
        chunks: The rows, in order.

    Raises:
        ReplayError, FencedError: A transactional write must not go on; see `Transactions`.
        SinkError: A row was refused, or nothing got through for too long.
        JetStreamExtError: The write failed; Spark tries the task again.
    """
    count = options.sink_partitions
    if count is not None and task.partition >= count:
        raise ReplayError(
            f"stream {options.stream!r}: there is a partition {task.partition}, but the option sinkPartitions says that "
            f"there are {count}; correct it, or use df.repartition({count})"
        )
    with connections().lend(options.connection, "jetstream-ext spark executor") as lease:
        context = lease.connection.context(options)
        if options.semantics is Semantics.TRANSACTIONAL:
            return _transactional(lease, context, options, facts, task, chunks)
        return _fast(lease, context, options, task, chunks)


def _fast(
    lease: Lease, context: JetStreamContext, options: WriteOptions, task: Task, chunks: Iterable[Sequence[Message]]
) -> Done:
    prefix = f"{task.writer}:{task.batch}:{task.partition}"
    rows = 0
    waiting: tuple[int, Callable[[], Any]] | None = None
    try:
        for messages in _joined(chunks, lambda: lease.busy):
            send: Callable[[], Coroutine[Any, Any, Any]]
            if options.semantics is Semantics.DEDUPE:
                entries = with_ids(messages, prefix, rows)
                send = partial(ingest, context, entries, flow=_FLOW, timeout=PATIENCE)
            else:
                send = partial(_publish, context, without_ids(messages))
            if waiting is not None:
                # Not both at once: rows of a partition are stored in order.
                (first, wait), waiting = waiting, None
                _outcome(lease, task, first, wait)
            waiting = rows, lease.start(send())
            rows += len(messages)
        if waiting is not None:
            (first, wait), waiting = waiting, None
            _outcome(lease, task, first, wait)
    finally:
        if waiting is not None:
            lease.abandon()
    return Done(rows)


def _joined(chunks: Iterable[Sequence[Message]], busy: Callable[[], bool]) -> Iterator[list[Message]]:
    """Join the chunks that come while one before them is on its way: the beginning and end of a batch take time."""
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


async def _publish(context: JetStreamContext, entries: list[Entry]) -> None:
    async with FastPublisher(context, flow=_FLOW) as publisher:
        await publisher.add_many(entries)
        await publisher.commit_eob()
        if publisher.error_count:
            raise publisher.errors[0].error


def _outcome(lease: Lease, task: Task, first: int, wait: Callable[[], Any]) -> None:
    try:
        wait()
    except IngestError as error:
        refusal = f"; the server said: {lease.connection.refusal}" if lease.connection.refusal else ""
        raise SinkError(f"row {first + error.index} of partition {task.partition}: {error}{refusal}") from error
    except (BadHeaderError, MaxPayloadError) as error:
        raise SinkError(f"row {first} of partition {task.partition}, or one after it: {error}") from error


def _transactional(
    lease: Lease,
    context: JetStreamContext,
    options: WriteOptions,
    facts: SinkFacts,
    task: Task,
    chunks: Iterable[Sequence[Message]],
) -> Done:
    transactions = Transactions(context, options, task.writer, task.batch, task.partition, rollup=facts.rollup)
    if options.sink_partitions is not None:
        lease.run(claim_layout(context, options, task.writer, task.batch, options.sink_partitions, rollup=facts.rollup))
    lease.run(transactions.open())
    rows = 0
    waiting: Callable[[], Any] | None = None
    try:
        for messages, last in _transactions_of(chunks, options.transaction_rows):
            transaction = transactions.next(messages, last=last)
            if waiting is not None:
                wait, waiting = waiting, None
                wait()
            rows += len(messages)
            waiting = lease.start(transactions.store(transaction))
        if waiting is not None:
            wait, waiting = waiting, None
            wait()
    finally:
        if waiting is not None:
            lease.abandon()
    return Done(rows, transactions.skipped)


def _transactions_of(chunks: Iterable[Sequence[Message]], most: int) -> Iterator[tuple[list[Message], bool]]:
    """Cut rows into transactions, the same ones each time; yield each with whether it is the last one."""
    collected: list[Message] = []
    size = 0
    for chunk in chunks:
        for message in chunk:
            if len(collected) == most or size >= _TRANSACTION_BYTES:
                yield collected, False  # there is one more row at least
                collected, size = [], 0
            collected.append(message)
            size += len(message[1])
    yield collected, True


def new_writer() -> str:
    """Return a name for a batch write that has none."""
    return uuid.uuid4().hex[:16]
