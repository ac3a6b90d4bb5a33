"""The `jetstream` sink, batch and streaming: the driver checks the stream, and each executor writes a partition.

The driver makes a writer for each write (a new one for every micro-batch of a streaming query). Spark pickles it to the
tasks and back to the driver; it keeps only what the driver found out. The ids of the query and the micro-batch are in the
task's local properties, and nowhere else. A task prepares each chunk of rows while the chunk before it is being stored.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fast import FastPublisher
from jetstream_ext.client.ingest import ingest
from jetstream_ext.errors import BadHeaderError, FencedError, IngestError, MaxPayloadError
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC, FAST_INGEST, MSG_TTL
from jetstream_ext.protocol.subjects import covers
from jetstream_ext.spark.bad_rows import BadRows, TaskResult, check_dead_letters, log_results
from jetstream_ext.spark.connection import Lease, connected, run_on_driver
from jetstream_ext.spark.digests import DIGEST, DIGEST_TEXT, Digests, MessageIds, Rows, digests_of
from jetstream_ext.spark.ledger import (
    PATIENCE,
    MicroBatch,
    ReplayError,
    SinkError,
    Transactions,
    complete,
    most_rows,
)
from jetstream_ext.spark.options import KvWriteOptions, WriteOptions
from jetstream_ext.spark.planning import PlanningError, state_of
from jetstream_ext.spark.rows import Columns, RowReader, RowSizes, batch_headers, record_batches
from jetstream_ext.text import counted, get_logger, log_state, numbered, plural
from jetstream_ext.types import Entry

_log = get_logger("spark")

_Chunk: TypeAlias = tuple[Iterable[Entry], list[int], Digests]
"""Messages, their sizes and (transactional) their digests."""
_Store: TypeAlias = Callable[[Iterable[Entry], Digests, list[int]], Coroutine[Any, Any, None]]

_SHORT_WINDOW: Final = 120.0
# The largest flow that servers grant; the publishers of a stream share it.
_FLOW: Final = 500
# Limits of the rows that wait while others are being stored.
_ROWS_AT_ONCE: Final = 50_000
_BYTES_AT_ONCE: Final = 8 << 20
_NO_DIGESTS: Final = np.empty(0, DIGEST)

# Spark 4.0 passes rows to a streaming sink; later versions pass Arrow.
HAS_STREAM_ARROW: Final = hasattr(datasource, "DataSourceStreamArrowWriter")
if TYPE_CHECKING or not HAS_STREAM_ARROW:
    StreamWriter = DataSourceStreamWriter
else:
    StreamWriter = datasource.DataSourceStreamArrowWriter


# -- what a task of Spark knows about itself ----------------------------------------------------------------------


def current_task() -> TaskContext:
    """Return the context of the task that calls."""
    context = TaskContext.get()
    assert context is not None
    return context


def micro_batch_of(context: TaskContext, instead: str) -> tuple[str, int]:
    """Return the query and the micro-batch of a task; `instead` says what to do where Spark does not pass them on."""
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if not query or not batch:
        raise SinkError(
            "Spark did not pass the query id and the micro-batch id to this task, so the sink could not recognise replayed rows; "
            f"nothing was stored; {instead}"
        )
    return query, int(batch)


def run_of(context: TaskContext) -> str:
    """Return the id of a query's run, which repeats no micro-batch; "" if the program has given its jobs another group."""
    group = context.getLocalProperty("spark.jobGroup.id") or ""
    return group if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", group) else ""


# -- the writers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def later_version_wins(options: WriteOptions | KvWriteOptions, where: str) -> Iterator[None]:
    """End the block without an error if a later version of an application is stored: it replaces the earlier ones."""
    try:
        yield
    except FencedError:
        if options.txn_app_id is None:
            raise
        _log.info("%s: a later version of %r than %s is already stored", where, options.txn_app_id, options.txn_version)


def forget(options: WriteOptions | KvWriteOptions, stream: str, writer: str) -> None:
    """Remove the records of a write that nothing will repeat, if the permissions allow it."""
    subjects = f"{options.marker_prefix}.{writer}.>"

    async def purge(context: JetStreamContext) -> None:
        api = Api(Context(context), options.connection.timeout)
        await api.ask(f"STREAM.PURGE.{stream}", {"filter": subjects})

    try:
        run_on_driver(options.connection, purge)
    except Exception as error:  # they only take space, and the write has ended
        _log.info("stream %r: the markers of this write stay on %s: %s", stream, subjects, error)


class StreamingWrite(StreamWriter):
    """The part of a writer that finds out which micro-batch it is for."""

    _schema: StructType

    def _write(self, writer: str, batch: int, batches: Iterator[Any]) -> WriterCommitMessage:
        raise NotImplementedError

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        instead = "write in foreachBatch, with df.write and the options txnAppId and txnVersion"
        query, batch = micro_batch_of(current_task(), instead)
        return self._write(query, batch, iterator if HAS_STREAM_ARROW else record_batches(iterator, self._schema))


class _Writer:
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._columns = Columns.of(schema, options)
        self._where = f"stream {options.stream!r}"
        self._batch = options.txn_version or 0  # of a batch write
        self._name = ""  # of a batch write
        self._attempt = uuid.uuid4().hex[:16]  # one for all tasks, and all attempts at them
        self._state: StreamState = run_on_driver(
            options.connection, lambda context: check_sink(context, options, ttl=self._columns.ttl is not None)
        )

    def _write(self, writer: str, batch: int, batches: Iterator[Any]) -> WriterCommitMessage:
        """Store the rows of one partition, in order (called on an executor)."""
        options, partition = self._options, current_task().partitionId()
        result = TaskResult(writer=writer, batch=batch, attempt=self._attempt)
        bad = BadRows(options.on_bad_row, self._where, options.stream, result, partition)
        ids = f"{writer}:{batch}:{partition}"
        added = {
            "none": [],
            "dedupe": [(h.MSG_ID, f"{ids}:{'x' * DIGEST_TEXT}:{1 << 32}")],
            "transactional": batch_headers(options.stream),
        }
        with connected(options.connection, "executor") as (lease, context):
            sizes = RowSizes.of(lease.run(_max_payload(context)), self._state, added[options.semantics])
            ttls = bool(self._state.config.get("allow_msg_ttl"))
            reader = RowReader(self._columns, options, self._state.subjects, sizes, bad, ttls=ttls)
            task = _Task(lease, context, options, partition, bad, map(reader.read, batches))
            if options.semantics == "transactional":
                transactions = Transactions(self._micro_batch(context, result), str(partition))
                with later_version_wins(options, self._where):
                    if lease.run(transactions.open()):
                        result.rows = task.store(_with_digests, transactions.store)
                        result.skipped = transactions.skipped
            elif options.semantics == "dedupe":
                result.rows = task.store(partial(_with_ids, MessageIds(ids)), task.ingest)
            else:
                result.rows = task.store(_plain, task.publish)
        log_state(_log, self._where, "task stored", partition=partition, **vars(result))
        return result

    def _micro_batch(self, context: JetStreamContext, task: TaskResult) -> MicroBatch:
        options = self._options
        return MicroBatch(
            context,
            options,
            self._state,
            self._where,
            task.writer,
            task.batch,
            task.attempt,
            options.sink_partitions or 0,
        )

    def commit(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name; a batch write has none
        """Store that the micro-batch is complete (called on the driver)."""
        options, batch = self._options, self._batch if batchId is None else batchId
        found = [message for message in messages if message is not None]
        rows, skipped = sum(task.rows for task in found), sum(task.skipped for task in found)
        log_results(self._where, f"{counted(rows, 'row')}, already stored: {skipped}", batch, found)
        writer = found[0].writer if found else self._name
        if options.sink_partitions is None or not writer:
            return
        task = found[0] if found else TaskResult(writer=writer, batch=batch, attempt=self._attempt)
        with later_version_wins(options, self._where):
            before = run_on_driver(options.connection, lambda context: complete(self._micro_batch(context, task)))
            repeated = before is not None and (before.replay or before.attempt != task.attempt)
            if rows and repeated and len(messages) != options.sink_partitions:
                raise ReplayError(
                    f"{self._where}: the option sinkPartitions is {options.sink_partitions}, but the rows of micro-batch {batch}, which was "
                    f"repeated, had {counted(len(messages), 'partition')}. All of them are stored. If an earlier attempt had another "
                    "number, some may be stored twice. Fix the number with df.repartition(n, columns), or with the source's "
                    "minPartitions, and restart"
                )

    def abort(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803
        # Stored rows stay; they are recognised when the micro-batch is replayed.
        batch, ended = self._batch if batchId is None else batchId, sum(message is not None for message in messages)
        _log.warning("%s: micro-batch %d failed; tasks that had ended: %d", self._where, batch, ended)


class JetStreamWriter(_Writer, DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        # Chosen here, for all attempts of all tasks.
        self._once = options.semantics == "transactional" and options.txn_app_id is None and options.write_id is None
        self._name = options.txn_app_id or options.write_id or uuid.uuid4().hex[:16]

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._write(self._name, self._batch, iterator)

    def commit(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().commit(messages)
        self._forget()

    def abort(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().abort(messages)
        self._forget()

    def _forget(self) -> None:
        if self._once:
            forget(self._options, self._options.stream, self._name)


class JetStreamStreamWriter(_Writer, StreamingWrite):
    pass


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
    if problem := next(_problems(context, options, state, ttl=ttl), None):
        raise PlanningError(f"stream {name!r}: {problem}")
    if not state.stores(options.on_bad_row):
        await check_dead_letters(context, options.connection, options.on_bad_row)
    return state


def _problems(context: JetStreamContext, options: WriteOptions, state: StreamState, *, ttl: bool) -> Iterator[str]:
    """Yield why a stream cannot be written to; log a warning for what is only a risk."""
    config, name, semantics = state.config, state.name, options.semantics
    if config.get("mirror") or config.get("sealed"):
        yield f"it is {'a mirror' if config.get('mirror') else 'sealed'}: no message can be published to it"
    if config.get("no_ack"):
        yield "it has no_ack, so it never confirms that a row is stored; turn no_ack off"
    if config.get("allow_msg_counter"):
        yield "it holds counters (allow_msg_counter), which the sink cannot increment"
    if (ttl or options.msg_ttl is not None) and not config.get("allow_msg_ttl"):
        how = f"{advice.enable_stream(name, 'ttl')} (nats-server {MSG_TTL.since})"
        yield f"allow_msg_ttl is off, and the {'column' if ttl else 'option'} 'msgTtl' needs it; {how}"
    if options.subject is not None and not state.stores(options.subject):
        yield f"{options.subject!r} (option 'subject') is not among its subjects ({', '.join(state.subjects)})"
    if semantics == "transactional":
        yield from _transactional_problems(context, options, state)
        return
    if not config.get("allow_batched"):
        how = f"{advice.enable_stream(name, 'batched')} (nats-server {FAST_INGEST.since}), or use semantics=transactional with allow_atomic"
        yield f"allow_batched is off, and semantics={semantics} needs it; {how}"
    if config.get("persist_mode") == "async":
        # Such a stream acknowledges messages before it writes them.
        what = "it has persist_mode=async, so a crash of the server loses acknowledged rows"
        if semantics == "dedupe":
            yield f"{what}; create the stream without persist_mode, or use semantics=none if rows may be lost"
        _log.warning("stream %r: %s", name, what)
    if semantics == "dedupe":
        yield from _dedupe_problems(state)


def _dedupe_problems(state: StreamState) -> Iterator[str]:
    window = state.duplicate_window
    if state.max_msgs_per_subject > 0:
        # Of a row that was replaced, a restarted server does not know the id, but it knows that of its successor.
        yield (
            "it has max_msgs_per_subject, so a replay could store a replaced row again and drop the newer one as a "
            "duplicate; use semantics=transactional, or semantics=none, which stores both again"
        )
    if not window:
        yield (
            "it has no duplicate window, so semantics=dedupe would store retried rows twice; set duplicate_window, "
            "or use semantics=transactional"
        )
    elif window.total_seconds() < _SHORT_WINDOW:
        what = "stream %r: its duplicate window is %g s; rows of a micro-batch that is retried later are stored twice"
        _log.warning(what, state.name, window.total_seconds())
    if state.retention != "limits":
        what = "stream %r has %s retention: after a restart of the server, replayed rows that were acknowledged are stored again"
        _log.warning(what, state.name, state.retention)


def _transactional_problems(context: JetStreamContext, options: WriteOptions, state: StreamState) -> Iterator[str]:
    config, markers = state.config, f"{options.marker_prefix}.>"
    if not config.get("allow_atomic"):
        how = f"{advice.enable_stream(state.name, 'atomic')} (nats-server {ATOMIC.since})"
        yield f"allow_atomic is off, and semantics=transactional needs it; {how}"
    if config.get("subject_transform"):
        yield "it has a subject transform, which hides the sink's markers; use semantics=dedupe"
    if state.retention == "interest":
        yield "it has interest retention, which removes the sink's markers at once; use semantics=dedupe"
    if state.max_msgs_per_subject > 0 and config.get("discard_new_per_subject"):
        yield "it has discard_new_per_subject, so it refuses new markers of the sink; turn it off, or write to another stream"
    if not any(covers(subject, markers) for subject in state.subjects):
        yield (
            f"it does not store {markers!r}, where semantics=transactional keeps its markers: add that to the "
            f"stream's subjects ({', '.join(state.subjects)}), or set markerPrefix to a subject below them that rows do not use"
        )
    if not most_rows(context, options.transaction_rows, state):
        yield (
            f"its max_msg_size ({state.max_msg_size}) or the server's max_payload is too small for the sink's markers; "
            "raise it to 1024 bytes, or use semantics=dedupe"
        )
    if state.retention == "workqueue":
        what = "stream %r has workqueue retention: no consumer may acknowledge the sink's markers (%s)"
        _log.warning(what, state.name, markers)


# -- on the executors ---------------------------------------------------------------------------------------------


async def _max_payload(context: JetStreamContext) -> int:
    return Context(context).connection.max_payload  # on the connection's own loop, because it may change the connection


def _plain(rows: Rows) -> _Chunk:
    return rows.entries(), rows.sizes(), _NO_DIGESTS


def _with_ids(ids: MessageIds, rows: Rows) -> _Chunk:
    return ids.entries(rows), rows.sizes(), _NO_DIGESTS


def _with_digests(rows: Rows) -> _Chunk:
    return rows.entries(), rows.sizes(), digests_of(rows)


class _Task:
    """A task that stores its rows: one store at a time on the connection, while the next is prepared."""

    def __init__(
        self,
        lease: Lease,
        context: JetStreamContext,
        options: WriteOptions,
        partition: int,
        bad: BadRows,
        rows: Iterable[Rows],
    ) -> None:
        self._lease = lease
        self._context = context
        self._options = options
        self._partition = partition
        self._bad = bad
        self._rows = rows
        self._wait: Callable[[], Any] | None = None

    def store(
        self,
        prepare: Callable[[Rows], _Chunk],
        store: _Store,
    ) -> int:
        """Store the rows, in order, and the dead letters of bad ones; return how many rows there were."""
        count = 0
        try:
            for entries, sizes, digests in self._joined(prepare):
                self._start(partial(self._named, store, entries, digests, sizes, count))
                count += len(sizes)
            self._finish()
        except BaseException:
            if self._wait is not None:
                self._lease.abandon()
            raise
        return count

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the store before, so that the rows of a partition are stored in order, and start the next."""
        self._finish()
        self._wait = self._lease.start(work())

    def _finish(self) -> None:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def _joined(self, prepare: Callable[[Rows], _Chunk]) -> Iterator[_Chunk]:
        """Join chunks that arrive while another one is being stored, because each store has a fixed cost."""
        entries: list[Iterable[Entry]] = []
        sizes: list[int] = []
        digests: list[Digests] = []
        size = 0
        for rows in chain(self._rows, (None,)):
            if self._bad.waiting:
                self._start(partial(self._bad.send, self._context, patience=PATIENCE))
            if rows is not None and rows.data:
                some = prepare(rows)
                entries.append(some[0])
                sizes += some[1]
                digests.append(some[2])
                size += sum(some[1])
            full = len(sizes) >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE
            if sizes and (rows is None or full or not self._lease.busy):
                yield chain.from_iterable(entries), sizes, np.concatenate(digests)
                entries, sizes, digests, size = [], [], [], 0

    async def _named(
        self,
        store: _Store,
        entries: Iterable[Entry],
        digests: Digests,
        sizes: list[int],
        first: int,
    ) -> None:
        """Store rows of which the first has the index `first`, without the bad ones; name those that cannot be stored."""
        where = f"stream {self._options.stream!r}"
        try:
            await store(entries, digests, sizes)
        except IngestError as error:
            # `ingest` counts the messages of this call; the cause does not.
            row, why, client = first + error.index, str(error.__cause__ or error), self._lease.connection.client
            if isinstance(error.__cause__, NoStreamResponseError):
                why = f"no stream stores subject {error.subject!r}, or the stream has no leader"
            refusal = f"; the server said: {client.refusal}" if client.refusal else ""
            stored = [f"{numbered(0, row - 1, 'row')} {plural(row, 'is', 'are')} stored"] if row else []
            if error.in_doubt:
                stored.append(f"{error.in_doubt} of the rows from {row} on may be stored")
            place = f"row {row} of partition {self._partition}" + (" (bad rows not counted)" if self._bad.count else "")
            outcome = ", and ".join(stored) or "nothing is stored"
            raise SinkError(f"{where}: {place}: {why}{refusal}; {outcome}") from error
        except (BadHeaderError, MaxPayloadError) as error:
            place = f"row {first} of partition {self._partition}, or a later one,"
            raise SinkError(f"{where}: {place} could not be stored: {error}") from error

    async def ingest(self, entries: Iterable[Entry], *_: object) -> None:
        report = await ingest(self._context, entries, flow=_FLOW, patience=PATIENCE)
        if report.in_doubt:
            what = "stream %r: after an outage, %s of partition %d may be stored more than once"
            _log.warning(what, self._options.stream, counted(report.in_doubt, "row"), self._partition)

    async def publish(self, entries: Iterable[Entry], *_: object) -> None:
        async with FastPublisher(self._context, flow=_FLOW) as publisher:
            await publisher.add_many(entries)
            await publisher.commit_eob()
            if publisher.error_count:
                raise publisher.errors[0].error
