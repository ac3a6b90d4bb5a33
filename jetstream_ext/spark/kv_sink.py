"""The `jetstream_kv` sink, batch and streaming: the last row of each key of a micro-batch, stored once.

A task reads its partition and keeps the last row of each key. Few rows go back to the driver, which stores those of all
tasks as one atomic batch if they fit into one. A partition with more rows is stored by its task (`kv_transactions`).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
from nats.js import JetStreamContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import ROLLUP_HEADERS
from jetstream_ext.kv.history import drops_oldest
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import dead_letters as letters
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC
from jetstream_ext.protocol.options import marker_subjects
from jetstream_ext.spark.bad_rows import BadRow, BadRows, check_dead_letters, log_bad_rows
from jetstream_ext.spark.buckets import bucket_state
from jetstream_ext.spark.connection import connected, run_on_driver
from jetstream_ext.spark.kv_rows import DIGEST_SIZE, KeyWrite, KvColumns, KvRowReader, LastRows, digest_of
from jetstream_ext.spark.kv_transactions import DRIVER, Conflict, KeyTransactions, KvMicroBatch
from jetstream_ext.spark.options import KvWriteOptions
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.spark.row_sizes import RowSizes, batch_headers
from jetstream_ext.spark.sink import HAS_STREAM_ARROW, StreamWriter
from jetstream_ext.spark.tasks import current_task, micro_batch_of, run_of
from jetstream_ext.spark.transactional import SinkError, most_rows
from jetstream_ext.text import counted, get_logger, plural

_log = get_logger("spark")

# Bytes of keys and values that a task hands over to the driver, which holds those of all tasks.
_HANDED_OVER: Final = 1 << 20
_BAD_AT_ONCE: Final = 100  # bad rows that wait to be sent


@dataclass
class Partition(WriterCommitMessage):
    """The result of a task: the writes for the driver, or how many the task has stored."""

    writer: str
    batch: int
    attempt: str
    partition: int
    rows: int  # distinct keys
    writes: list[KeyWrite] = field(default_factory=list, repr=False)  # for the driver
    digests: bytes = field(default=b"", repr=False)  # of its keys, if the task has stored them
    skipped: int = 0
    dropped: int = 0
    diverted: int = 0
    example: str = ""  # of the bad rows
    run: str = ""  # of the query, for a write in `foreachBatch`


class _KvWriter:
    def __init__(self, options: KvWriteOptions, schema: StructType, *, only_changes: bool) -> None:
        self._options = options
        self._columns = KvColumns.of(schema, options)
        self._only_changes = only_changes
        self._attempt = uuid.uuid4().hex[:16]  # one for all tasks, and all attempts at them
        self._target: _Target = run_on_driver(
            options.connection,
            lambda context: check_target(context, options, self._columns, only_changes=only_changes),
        )

    def _write(
        self, writer: str, batch: int, rows: Iterator[Any], *, arrow: bool, run: str = ""
    ) -> WriterCommitMessage:
        options, target, partition = self._options, self._target, current_task().partitionId()
        bad = self._bad_rows(writer, batch, partition)
        reader = KvRowReader(self._columns, options, target.values, target.values_with_options, bad)
        last = LastRows(partition)
        try:
            for some in map(reader.from_arrow, rows) if arrow else [reader.from_rows(rows)]:
                for row in some:
                    last.add(*row)
                    if bad.waiting >= _BAD_AT_ONCE:
                        self._send(bad)
                self._send(bad)
            result = Partition(writer, batch, self._attempt, partition, len(last), run=run)
            if len(last) <= target.most and last.size <= _HANDED_OVER:
                result.writes = list(last)
            else:
                self._store(result, last, bad)
        finally:
            last.close()
        result.dropped, result.diverted, result.example = bad.dropped, bad.diverted, bad.example
        return result

    def _bad_rows(self, writer: str, batch: int, partition: int) -> BadRows:
        return BadRows(
            self._options.on_bad_row,
            what=f"bucket {self._options.bucket!r}, partition {partition} of micro-batch {batch}",
            target=self._target.state.name,
            writer=writer,
            batch=batch,
            partition=partition,
            subject_header=letters.KEY,
        )

    def _send(self, bad: BadRows) -> None:
        if bad.waiting:
            with connected(self._options.connection, "executor") as (lease, context):
                lease.run(bad.send(context))

    def _micro_batch(self, context: JetStreamContext, of: Partition) -> KvMicroBatch:
        state, changes = self._target.state, self._only_changes
        return KvMicroBatch(context, self._options, state, of.writer, of.batch, of.attempt, changes, of.run)

    def _store(self, result: Partition, writes: Iterable[KeyWrite], bad: BadRows) -> None:
        with connected(self._options.connection, "executor") as (lease, context):

            async def refuse(conflict: Conflict) -> None:
                bad.add(_bad_row(conflict))
                await bad.send(context)

            transactions = KeyTransactions(self._micro_batch(context, result), str(result.partition), refuse)

            async def store() -> bool:
                if claimed := await transactions.open():
                    await transactions.store(writes)
                return claimed

            self._note(result, stored=lease.run(self._or_later(store())))
        result.skipped, result.digests = transactions.skipped, b"".join(transactions.digests)

    def commit(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name; a batch write has none
        """Store what the tasks have handed over, and that the micro-batch is complete (called on the driver)."""
        found = sorted((one for one in messages if one is not None), key=lambda one: one.partition)
        if not found:
            return
        bad: list[BadRows] = []
        rows, skipped = sum(one.rows for one in found), sum(one.skipped for one in found)
        if rows:
            _check_partitions(self._options.bucket, found)
            # The last row of a key is that in the partition with the highest number.
            writes = {write.key: write for write in chain.from_iterable(one.writes for one in found)}
            rows += len(writes) - sum(len(one.writes) for one in found)
            of, left = found[0], list(writes.values())
            others, bad = run_on_driver(self._options.connection, lambda context: self._finish(context, of, left))
            skipped += others
        batch, where = found[0].batch, f"bucket {self._options.bucket!r}"
        what = "%s: micro-batch %d writes %s; already stored, or with that value: %d"
        _log.info(what, where, batch, counted(rows, "key"), skipped)
        log_bad_rows(where, batch, [*found, *bad])

    async def _finish(
        self, context: JetStreamContext, of: Partition, writes: Sequence[KeyWrite]
    ) -> tuple[int, list[BadRows]]:
        bad: dict[int, BadRows] = {}

        async def refuse(conflict: Conflict) -> None:
            partition = conflict.write.partition
            if partition not in bad:
                bad[partition] = self._bad_rows(of.writer, of.batch, partition)
            bad[partition].add(_bad_row(conflict))
            await bad[partition].send(context)

        transactions = KeyTransactions(self._micro_batch(context, of), DRIVER, refuse)
        self._note(of, stored=await self._or_later(transactions.finish(writes)))
        return transactions.skipped, list(bad.values())

    async def _or_later(self, stored: Awaitable[bool]) -> bool:
        """Return whether this attempt has stored; a later version of an application is stored instead of its earlier ones."""
        try:
            return await stored
        except FencedError:
            if self._options.txn_app_id is None:
                raise
            return False

    def _note(self, of: Partition, *, stored: bool) -> None:
        if not stored:
            what = "bucket %r: micro-batch or version %d of %r, or a later one, is already stored"
            _log.info(what, self._options.bucket, of.batch, of.writer)

    def abort(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803
        # Stored keys stay; they are recognised when the micro-batch is replayed.
        ended = sum(one is not None for one in messages)
        what = "bucket %r: the write failed; tasks that had ended: %d of %d; some of its keys may be stored"
        _log.warning(what, self._options.bucket, ended, len(messages))


class JetStreamKvWriter(_KvWriter, DataSourceArrowWriter):
    def __init__(self, options: KvWriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, only_changes=False)
        # Chosen here, for all attempts of all tasks.
        self._once = options.txn_app_id is None and options.write_id is None and not options.per_micro_batch
        self._writer = options.txn_app_id or options.write_id or uuid.uuid4().hex[:16]

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        options, writer, run = self._options, self._writer, ""
        batch = options.txn_version or 0
        if options.per_micro_batch:
            instead = "give jetstream_ext.spark.upsert a txnAppId, or df.write the options txnAppId and txnVersion instead of perMicroBatch"
            query, batch = micro_batch_of(current_task(), instead)
            writer = query if options.write_id is None else f"{query}-{options.write_id}"
            run = run_of(current_task())
        return self._write(writer, batch, iterator, arrow=True, run=run)

    def commit(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().commit(messages)
        self._forget()

    def abort(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().abort(messages)
        self._forget()

    def _forget(self) -> None:
        """Remove the records of a write that nothing will repeat, if the permissions allow it."""
        if not self._once:
            return
        options, subjects = self._options, f"{self._options.marker_prefix}.{self._writer}.>"

        async def purge(context: JetStreamContext) -> None:
            api = Api(Context(context), options.connection.timeout)
            await api.ask(f"STREAM.PURGE.{self._target.state.name}", {"filter": subjects})

        try:
            run_on_driver(options.connection, purge)
        except Exception as error:  # they only take space, and the write has ended
            _log.info("bucket %r: the markers of this write stay on %s: %s", options.bucket, subjects, error)


class JetStreamKvStreamWriter(_KvWriter, StreamWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        instead = "write in foreachBatch, with df.write and the options txnAppId and txnVersion"
        query, batch = micro_batch_of(current_task(), instead)
        return self._write(query, batch, iterator, arrow=HAS_STREAM_ARROW)


def _bad_row(conflict: Conflict) -> BadRow:
    write = conflict.write
    return BadRow(write.row, conflict.reason, write.key, write.value)


def _check_partitions(bucket: str, found: Sequence[Partition]) -> None:
    """Raise SinkError if a key is in several partitions, one of which was stored by its task."""
    by_tasks = b"".join(one.digests for one in found)
    if not by_tasks:
        return
    kind = f"S{DIGEST_SIZE}"
    stored, counts = np.unique(np.frombuffer(by_tasks, kind), return_counts=True)
    handed = b"".join(digest_of(write.key) for one in found for write in one.writes)
    again = np.isin(np.frombuffer(handed, kind), stored)
    if repeated := int((counts > 1).sum() + again.sum()):
        raise SinkError(
            f"bucket {bucket!r}: {counted(repeated, 'key')} of micro-batch {found[0].batch} {plural(repeated, 'is', 'are')} in several of its partitions, which are too "
            "large to be compared, so it is not known which row is the last one. Each such key has the value of one of "
            "its rows. Put the rows of a key into one partition with df.repartition(n, 'key'), and restart"
        )


# -- checks of the bucket -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """The bucket's stream as the driver found it."""

    state: StreamState
    most: int  # writes of a transaction
    values: RowSizes
    values_with_options: RowSizes  # with a TTL or an expected revision


async def check_target(
    context: JetStreamContext, options: KvWriteOptions, columns: KvColumns, *, only_changes: bool
) -> _Target:
    """Return the bucket's stream; raise PlanningError if it cannot be written to with these options."""
    bucket, name = Bucket(open_bucket(context, options.bucket)), f"bucket {options.bucket!r}"
    state = await bucket_state(bucket, direct=only_changes)
    config, markers = state.config, f"{options.marker_prefix}.>"
    missing = []
    if not config.get("allow_atomic"):
        missing.append(f"atomic batches are off (allow_atomic, nats-server {ATOMIC.since})")
    if not state.stores(markers):
        missing.append(f"its stream does not store {markers!r}, where the sink keeps its markers")
    if missing:
        how = advice.enable_bucket(options.bucket, "spark")
        if markers != marker_subjects(state.name):
            how = (
                f"enable it with 'nats stream edit {state.name} --allow-atomic-publish --subjects "
                f"{','.join((*state.subjects, markers))!r}'"
            )
        raise PlanningError(f"{name}: {', and '.join(missing)}; {how}")
    if (columns.ttl is not None or options.ttl is not None) and not config.get("allow_msg_ttl"):
        raise PlanningError(
            f"{name}: TTLs of single keys are off; {advice.enable_bucket(options.bucket, 'ttl', what='them')}"
        )
    if config.get("sealed") or config.get("no_ack"):
        raise PlanningError(
            f"{name} is {'sealed' if config.get('sealed') else 'without acks (no_ack)'}: it takes no writes"
        )
    if config.get("subject_transform"):
        raise PlanningError(f"{name} has a subject transform, which hides the sink's markers; remove it")
    if config.get("discard_new_per_subject"):
        raise PlanningError(f"{name} has discard_new_per_subject, so it refuses new values of a key; turn it off")
    if drops_oldest(state):
        raise PlanningError(
            f"{name} drops its oldest messages when it is full (discard=old), also the sink's markers, so a repeated micro-batch could "
            "be stored twice; set discard=new, as buckets have it"
        )
    most = most_rows(context, options.transaction_rows, state)
    if not most:
        raise PlanningError(
            f"{name}: its maximum value size ({state.max_msg_size}) or the server's max_payload is too small for the sink's markers; "
            "raise it to 1024 bytes"
        )
    await check_dead_letters(context, options.connection, options.on_bad_row)
    added, max_payload = batch_headers(state.name), Context(context).connection.max_payload
    optional = [*ROLLUP_HEADERS.items(), (h.EXPECTED_LAST_SUBJECT_SEQ, f"{1 << 63}")]
    values, others = (RowSizes.of(max_payload, state, headers) for headers in (added, [*added, *optional]))
    return _Target(state, most, values, others.with_ttl())
