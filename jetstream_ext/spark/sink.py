"""The `jetstream` sink, batch and streaming: the driver checks the stream, and each executor writes a partition.

The driver makes a writer for each write (a new one for every micro-batch of a streaming query). Spark pickles it to the
tasks and back to the driver; it keeps only what the driver found out. The ids of the query and the micro-batch are in the
task's local properties, and nowhere else. A task prepares each chunk of rows while the chunk before it is being stored.
"""

from __future__ import annotations

import contextlib
import uuid
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from jetstream_ext.client.connection import Context
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.ingest import ingest
from jetstream_ext.errors import BadHeaderError, FencedError, IngestError, MaxPayloadError
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC, FAST_INGEST, MSG_TTL
from jetstream_ext.protocol.subjects import covers
from jetstream_ext.spark.bad_rows import BadRows, check_dead_letters, log_bad_rows
from jetstream_ext.spark.connection import Lease, connected, run_on_driver
from jetstream_ext.spark.markers import ReplayError
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.planning import PlanningError, state_of
from jetstream_ext.spark.row_sizes import RowSizes, batch_headers
from jetstream_ext.spark.rows import DIGEST_TEXT, Columns, MessageIds, RowReader, Rows
from jetstream_ext.spark.tasks import current_task, micro_batch_of
from jetstream_ext.spark.transactional import PATIENCE, MicroBatch, SinkError, Transactions, most_rows
from jetstream_ext.text import counted, get_logger, log_state, numbered, plural
from jetstream_ext.types import Entry

_log = get_logger("spark")

_Result = TypeVar("_Result")
RowChunks: TypeAlias = Callable[[RowSizes, BadRows], Iterable[Rows]]
"""Reads the rows of a partition, in order and in chunks, given the limits of messages and where the bad rows go."""

_SHORT_WINDOW: Final = 120.0
# The largest flow that servers grant; the publishers of a stream share it.
_FLOW: Final = 500
# Limits of the rows that wait while others are being stored.
_ROWS_AT_ONCE: Final = 50_000
_BYTES_AT_ONCE: Final = 8 << 20
# The server holds a transaction in memory until it is committed.
_TRANSACTION_BYTES: Final = 8 << 20

# Spark 4.0 passes rows to a streaming sink; later versions pass Arrow.
HAS_STREAM_ARROW: Final = hasattr(datasource, "DataSourceStreamArrowWriter")
if TYPE_CHECKING or not HAS_STREAM_ARROW:
    StreamWriter = DataSourceStreamWriter
else:
    StreamWriter = datasource.DataSourceStreamArrowWriter


@dataclass(frozen=True, slots=True)
class Task:
    writer: str  # the name of the query, or of the batch write
    batch: int  # the micro-batch, or the version of a batch write (0 if it has none)
    partition: int
    attempt: str = ""  # names the driver's attempt at the write or the micro-batch, if it is known


@dataclass
class Written(WriterCommitMessage):
    """The result of a task.

    Attributes:
        writer: The name of the query, or of the batch write.
        rows: How many rows it had, without the bad ones.
        skipped: How many of them an earlier attempt had stored (transactional).
        dropped: How many bad rows it left out.
        diverted: How many bad rows it stored as dead letters.
        example: A bad row and the reason, if there is one.
    """

    writer: str
    rows: int
    skipped: int = 0
    dropped: int = 0
    diverted: int = 0
    example: str = ""


class _Writer:
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._columns = Columns.of(schema, options)
        self._batch = options.txn_version or 0  # of a batch write
        self._attempt = uuid.uuid4().hex[:16]  # one for all tasks, and all attempts at them
        self._state: StreamState = run_on_driver(
            options.connection, lambda context: check_sink(context, options, ttl=self._columns.ttl is not None)
        )

    def _write(self, writer: str, batch: int, rows: Iterator[Any], *, arrow: bool) -> WriterCommitMessage:
        def read(sizes: RowSizes, bad: BadRows) -> Iterable[Rows]:
            reader = RowReader(self._columns, self._options, self._state.subjects, sizes, bad)
            return map(reader.from_arrow, rows) if arrow else reader.chunks_from_rows(rows)

        task = Task(writer, batch, current_task().partitionId(), self._attempt)
        return write_partition(self._options, self._state, task, read)

    def commit(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name; a batch write has none
        """Check that the rows had the declared number of partitions (called on the driver)."""
        options, batch = self._options, self._batch if batchId is None else batchId
        written = [message for message in messages if message is not None]
        rows, skipped = sum(task.rows for task in written), sum(task.skipped for task in written)
        what = "stream %r: micro-batch %d has %s; already stored: %d"
        _log.info(what, options.stream, batch, counted(rows, "row"), skipped)
        log_bad_rows(f"stream {options.stream!r}", batch, written)
        count = options.sink_partitions
        if count is None:
            return
        if rows and len(messages) != count:
            only = self._run(written[0].writer, batch, lambda of: of.record_layout(len(messages)))
            outcome = (
                "every row is stored once, and none will be repeated"
                if only
                else "every row is stored; rows that an earlier attempt stored in other partitions may be stored twice"
            )
            raise ReplayError(
                f"stream {options.stream!r}: the option sinkPartitions is {count}, but the rows had {counted(len(messages), 'partition')}; "
                f"set it to {len(messages)} and restart ({outcome})"
            )
        if options.txn_app_id is not None:
            with contextlib.suppress(FencedError):  # a later version is stored, so the tasks have stored nothing
                self._run(options.txn_app_id, batch, lambda of: of.record_layout(count, complete=True))

    def _run(self, writer: str, batch: int, work: Callable[[MicroBatch], Coroutine[Any, Any, _Result]]) -> _Result:
        options, state, attempt = self._options, self._state, self._attempt
        return run_on_driver(
            options.connection, lambda context: work(MicroBatch(context, options, state, writer, batch, attempt))
        )

    def abort(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803
        # Stored rows stay; they are recognised when the micro-batch is replayed.
        options, batch = self._options, self._batch if batchId is None else batchId
        written = [message for message in messages if message is not None]
        _log.warning("stream %r: micro-batch %d failed; tasks that had ended: %d", options.stream, batch, len(written))
        if written and options.sink_partitions not in (None, len(messages)):
            what = "stream %r: the option sinkPartitions is %d, but the rows have %s; set it to %d"
            count = counted(len(messages), "partition")
            _log.warning(what, options.stream, options.sink_partitions, count, len(messages))
            try:
                self._run(written[0].writer, batch, lambda of: of.correct_layout(len(messages)))
            except Exception as error:  # the tasks' error is the one to report
                _log.warning("stream %r: this number could not be recorded: %s", options.stream, error)


class JetStreamWriter(_Writer, DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        # Chosen here, for all attempts of all tasks.
        self._writer = options.txn_app_id or options.write_id or uuid.uuid4().hex[:16]

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._write(self._writer, self._batch, iterator, arrow=True)


class JetStreamStreamWriter(_Writer, StreamWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        instead = "write in foreachBatch, with df.write and the options txnAppId and txnVersion"
        query, batch = micro_batch_of(current_task(), instead)
        return self._write(query, batch, iterator, arrow=HAS_STREAM_ARROW)


# -- checks of the stream -----------------------------------------------------------------------------------------


async def check_sink(context: JetStreamContext, options: WriteOptions, *, ttl: bool = False) -> StreamState:
    """Return the state of the stream; raise PlanningError if it cannot be written to with these options.

    `ttl` says whether the rows have a column with their times to live.
    """
    name = options.stream
    state = await state_of(context, name)
    if state is None:
        raise PlanningError(
            f"stream {name!r} does not exist; create it, or check 'stream', 'servers', 'domain' and 'apiPrefix'"
        )
    if state.config.get("mirror") or state.config.get("sealed"):
        what = "a mirror" if state.config.get("mirror") else "sealed"
        raise PlanningError(f"stream {name!r} is {what}: no message can be published to it")
    if state.config.get("no_ack"):
        raise PlanningError(f"stream {name!r} has no_ack, so it never confirms that a row is stored; turn no_ack off")
    if state.config.get("allow_msg_counter"):
        raise PlanningError(f"stream {name!r} holds counters (allow_msg_counter), which the sink cannot increment")
    if (ttl or options.msg_ttl is not None) and not state.config.get("allow_msg_ttl"):
        raise PlanningError(
            f"stream {name!r}: allow_msg_ttl is off, and the {'column' if ttl else 'option'} 'msgTtl' needs it; "
            f"{advice.enable_stream(name, 'ttl')} (nats-server {MSG_TTL.since})"
        )
    if options.semantics == "transactional":
        _check_transactional(context, options, state)
    else:
        _check_fast(options, state)
    if options.subject is not None and not state.stores(options.subject):
        subjects = ", ".join(state.subjects)
        raise PlanningError(
            f"option 'subject': {options.subject!r} is not among the subjects of stream {name!r} ({subjects})"
        )
    if not state.stores(options.on_bad_row):
        await check_dead_letters(context, options.connection, options.on_bad_row)
    return state


def _check_fast(options: WriteOptions, state: StreamState) -> None:
    stream = f"stream {state.name!r}"
    if not state.config.get("allow_batched"):
        raise PlanningError(
            f"{stream}: allow_batched is off, and semantics={options.semantics} needs it; "
            f"{advice.enable_stream(state.name, 'batched')} (nats-server {FAST_INGEST.since}), or use semantics=transactional with allow_atomic"
        )
    if state.config.get("persist_mode") == "async":
        # Such a stream acknowledges messages before it writes them.
        what = f"{stream} has persist_mode=async, so a crash of the server loses acknowledged rows"
        if options.semantics == "dedupe":
            raise PlanningError(
                f"{what}; create the stream without persist_mode, or use semantics=none if rows may be lost"
            )
        _log.warning("%s", what)
    if options.semantics == "dedupe":
        if state.max_msgs_per_subject > 0:
            # Of a row that was replaced, a restarted server does not know the id, but it knows that of its successor.
            raise PlanningError(
                f"{stream} has max_msgs_per_subject, so a replay could store a replaced row again and drop the newer one as a "
                "duplicate; use semantics=transactional, or semantics=none, which stores both again"
            )
        if state.retention != "limits":
            what = "%s has %s retention: after a restart of the server, replayed rows that were acknowledged are stored again"
            _log.warning(what, stream, state.retention)
        window = state.duplicate_window
        if not window:
            raise PlanningError(
                f"{stream} has no duplicate window, so semantics=dedupe would store retried rows twice; set duplicate_window, "
                "or use semantics=transactional"
            )
        if window.total_seconds() < _SHORT_WINDOW:
            what = "%s: its duplicate window is %g s; rows of a micro-batch that is retried later are stored twice"
            _log.warning(what, stream, window.total_seconds())


def _check_transactional(context: JetStreamContext, options: WriteOptions, state: StreamState) -> None:
    stream = f"stream {state.name!r}"
    if not state.config.get("allow_atomic"):
        raise PlanningError(
            f"{stream}: allow_atomic is off, and semantics=transactional needs it; "
            f"{advice.enable_stream(state.name, 'atomic')} (nats-server {ATOMIC.since})"
        )
    if state.config.get("subject_transform"):
        raise PlanningError(f"{stream} has a subject transform, which hides the sink's markers; use semantics=dedupe")
    markers = f"{options.marker_prefix}.>"
    if state.retention == "interest":
        raise PlanningError(
            f"{stream} has interest retention, which removes the sink's markers at once; use semantics=dedupe"
        )
    if state.retention == "workqueue":
        _log.warning("%s has workqueue retention: no consumer may acknowledge the sink's markers (%s)", stream, markers)
    if state.max_msgs_per_subject > 0 and state.config.get("discard_new_per_subject"):
        raise PlanningError(
            f"{stream} has discard_new_per_subject, so it refuses new markers of the sink; turn it off, or write to another stream"
        )
    if not any(covers(subject, markers) for subject in state.subjects):
        raise PlanningError(
            f"{stream} does not store {markers!r}, where semantics=transactional keeps its markers: add that to the "
            f"stream's subjects ({', '.join(state.subjects)}), or set markerPrefix to a subject below them that rows do "
            "not use"
        )
    if not most_rows(context, options.transaction_rows, state):
        raise PlanningError(
            f"{stream}: its max_msg_size ({state.max_msg_size}) or the server's max_payload is too small for the sink's markers; "
            "raise it to 1024 bytes, or use semantics=dedupe"
        )


# -- on the executors ---------------------------------------------------------------------------------------------


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


def write_partition(options: WriteOptions, state: StreamState, task: Task, read: RowChunks) -> Written:
    """Store the rows of one partition, in order; `state` is the stream as the driver found it."""
    bad = BadRows(
        options.on_bad_row,
        what=f"stream {options.stream!r}, partition {task.partition} of micro-batch {task.batch}",
        target=options.stream,
        writer=task.writer,
        batch=task.batch,
        partition=task.partition,
    )
    with connected(options.connection, "executor") as (lease, context):
        sizes = RowSizes.of(lease.run(_max_payload(context)), state, _added_headers(options, task))
        chunks = read(sizes, bad)
        if options.semantics == "transactional":
            batch = MicroBatch(context, options, state, task.writer, task.batch, task.attempt)
            done = _transactional(lease, batch, task.partition, chunks, bad)
        else:
            done = _fast(lease, context, options, task, chunks, bad)
    done.dropped, done.diverted, done.example = bad.dropped, bad.diverted, bad.example
    log_state(
        _log, f"stream {options.stream!r}", "task stored",
        writer=task.writer, batch=task.batch, partition=task.partition,
        rows=done.rows, skipped=done.skipped, dropped=done.dropped, diverted=done.diverted,
    )  # fmt: skip
    return done


async def _max_payload(context: JetStreamContext) -> int:
    return Context(context).connection.max_payload  # on the connection's own loop, because it may change the connection


def _id_prefix(task: Task) -> str:
    return f"{task.writer}:{task.batch}:{task.partition}"


def _added_headers(options: WriteOptions, task: Task) -> list[tuple[str, str]]:
    """Return the longest headers that a row can get beside its own."""
    if options.semantics == "dedupe":
        return [(h.MSG_ID, f"{_id_prefix(task)}:{'x' * DIGEST_TEXT}:{1 << 32}")]
    return batch_headers(options.stream) if options.semantics == "transactional" else []


def _with_dead_letters(
    chunks: Iterable[Rows], bad: BadRows, context: JetStreamContext, pipeline: _Pipeline
) -> Iterator[Rows]:
    """Yield chunks of rows, and store the bad rows of each, so that few are in memory."""
    for rows in chunks:
        if bad.waiting:
            pipeline.store(partial(bad.send, context, patience=PATIENCE))
        yield rows


def _fast(
    lease: Lease, context: JetStreamContext, options: WriteOptions, task: Task, chunks: Iterable[Rows], bad: BadRows
) -> Written:
    stored = 0
    ids = MessageIds(_id_prefix(task)) if options.semantics == "dedupe" else None
    with _Pipeline(lease) as pipeline:
        good = _with_dead_letters(chunks, bad, context, pipeline)
        messages = ((ids.entries(rows) if ids else rows.entries(), rows.sizes()) for rows in good)
        for entries, count in _joined(messages, lambda: lease.busy):
            pipeline.store(partial(_publish, lease, context, options, task, entries, stored, bad))
            stored += count
    return Written(task.writer, stored)


async def _publish(
    lease: Lease,
    context: JetStreamContext,
    options: WriteOptions,
    task: Task,
    entries: Iterable[Entry],
    first: int,
    bad: BadRows,
) -> None:
    """Store rows of which the first has the index `first`, without the bad ones."""
    try:
        if options.semantics == "dedupe":
            report = await ingest(context, entries, flow=_FLOW, patience=PATIENCE)
            if report.in_doubt:
                _log.warning(
                    "stream %r: after an outage, %s of partition %d may be stored more than once",
                    options.stream,
                    counted(report.in_doubt, "row"),
                    task.partition,
                )
            return
        async with FastPublisher(context, flow=_FLOW) as publisher:
            await publisher.add_many(entries)
            await publisher.commit_eob()
            if publisher.error_count:
                raise publisher.errors[0].error
    except IngestError as error:
        # `ingest` counts the messages of this call; the cause does not.
        row, why = first + error.index, str(error.__cause__ or error)
        if isinstance(error.__cause__, NoStreamResponseError):
            why = f"no stream stores subject {error.subject!r}, or the stream has no leader"
        refusal = f"; the server said: {lease.connection.client.refusal}" if lease.connection.client.refusal else ""
        stored = [f"{numbered(0, row - 1, 'row')} {plural(row, 'is', 'are')} stored"] if row else []
        if error.in_doubt:
            stored.append(f"{error.in_doubt} of the rows from {row} on may be stored")
        place = f"row {row} of partition {task.partition}" + (" (bad rows not counted)" if bad.count else "")
        outcome = ", and ".join(stored) or "nothing is stored"
        raise SinkError(f"stream {options.stream!r}: {place}: {why}{refusal}; {outcome}") from error
    except (BadHeaderError, MaxPayloadError) as error:
        place = f"row {first} of partition {task.partition}, or a later one,"
        raise SinkError(f"stream {options.stream!r}: {place} could not be stored: {error}") from error


def _joined(
    chunks: Iterable[tuple[Iterable[Entry], list[int]]], busy: Callable[[], bool]
) -> Iterator[tuple[Iterable[Entry], int]]:
    """Join chunks that arrive while another one is being stored, because each store has a fixed cost.

    A chunk comes with the sizes of its messages; what it is joined to goes with the number of its messages.
    """
    collected: list[Iterable[Entry]] = []
    count = size = 0
    for entries, sizes in chunks:
        collected.append(entries)
        count += len(sizes)
        size += sum(sizes)
        if count and (not busy() or count >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE):
            yield chain.from_iterable(collected), count
            collected, count, size = [], 0, 0
    if count:
        yield chain.from_iterable(collected), count


def _transactional(lease: Lease, batch: MicroBatch, partition: int, chunks: Iterable[Rows], bad: BadRows) -> Written:
    options, nothing = batch.options, Written(batch.writer, 0)
    transactions = Transactions(batch, partition)
    rows = 0
    try:
        if options.sink_partitions is not None and not lease.run(batch.claim_layout(partition)):
            _log.info("stream %r: version %d of %r is already stored", options.stream, batch.batch, batch.writer)
            return nothing
        lease.run(transactions.open())
        with _Pipeline(lease) as pipeline:
            good = _with_dead_letters(chunks, bad, batch.context, pipeline)
            for some in _transactions_of(good, transactions.most_rows):
                pipeline.store(partial(transactions.store_all, [transactions.next(each) for each in some]))
                rows += sum(map(len, some))
    except FencedError:
        if options.txn_app_id is None:
            raise
        _log.info(
            "stream %r: a later version of %r than %d is already stored", options.stream, batch.writer, batch.batch
        )
        return nothing
    transactions.check_end()
    return Written(batch.writer, rows, transactions.skipped)


def _transactions_of(chunks: Iterable[Rows], most: int) -> Iterator[list[Rows]]:
    """Cut rows into transactions, of `most` rows or of fewer if they are large; yield together those that a chunk completes."""
    collected: list[Rows] = []
    count = size = 0
    for chunk in chunks:
        complete: list[Rows] = []
        totals = list(accumulate(chunk.sizes()))
        at = before = 0
        while at < len(chunk):
            large = bisect_left(totals, before + _TRANSACTION_BYTES - size) + 1
            end = min(at + most - count, large, len(chunk))
            collected.append(chunk[at:end])
            count += end - at
            size += totals[end - 1] - before
            at, before = end, totals[end - 1]
            if count == most or size >= _TRANSACTION_BYTES:
                complete.append(Rows.joined(collected))
                collected, count, size = [], 0, 0
        if complete:
            yield complete
    if count:
        yield [Rows.joined(collected)]
