"""The `jetstream_kv` sink, batch and streaming: the last row of each key of a micro-batch, stored once.

A task reads its partition and keeps the last row of each key. Few rows go back to the driver, which stores those of all
tasks and that the micro-batch is complete as one atomic batch, if they fit into one. A partition with more rows is stored by
its task (see `ledger`). If tasks have claimed the micro-batch, the driver claims it as well before it stores anything:
another attempt at a task whose rows the driver has may have stored some of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Final

import numpy as np
from nats.js import JetStreamContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import WrongLastSequenceError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import ROLLUP_HEADERS
from jetstream_ext.kv.history import drops_oldest
from jetstream_ext.kv.reads import get_many
from jetstream_ext.protocol import advice
from jetstream_ext.protocol import dead_letters as letters
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.feature_table import ATOMIC
from jetstream_ext.protocol.options import marker_subjects
from jetstream_ext.spark.bad_rows import BadRow, BadRows, TaskResult, check_dead_letters, log_results
from jetstream_ext.spark.buckets import bucket_state
from jetstream_ext.spark.connection import connected, run_on_driver
from jetstream_ext.spark.digests import DIGEST, DIGEST_SIZE, Digests
from jetstream_ext.spark.kv_rows import KeyWrite, KvColumns, KvRowReader, LastRows
from jetstream_ext.spark.ledger import (
    PATIENCE,
    TRANSACTION_BYTES,
    MicroBatch,
    Record,
    SinkError,
    Transactions,
    most_rows,
    replaces,
)
from jetstream_ext.spark.options import KvWriteOptions
from jetstream_ext.spark.planning import PlanningError
from jetstream_ext.spark.rows import RowSizes, batch_headers
from jetstream_ext.spark.sink import StreamingWrite, current_task, forget, later_version_wins, micro_batch_of, run_of
from jetstream_ext.text import counted, get_logger, plural
from jetstream_ext.types import Entry

_log = get_logger("spark")

# Bytes of keys and values that a task hands over to the driver, which holds those of all tasks.
_HANDED_OVER: Final = 1 << 20
_DRIVER: Final = "_driver"
_NO_DIGESTS: Final = np.empty(0, DIGEST)


def digests_of(writes: Iterable[KeyWrite]) -> Digests:
    """Return the digests of the keys."""
    return np.frombuffer(
        b"".join(blake2b(one.key.encode(), digest_size=DIGEST_SIZE).digest() for one in writes), DIGEST
    )


class KeyTransactions(Transactions):
    """The writes of one attempt at one partition of a micro-batch, or of the driver.

    `refuse` is called with each write that cannot be stored, and why, before anything else of its transaction is.
    """

    def __init__(
        self,
        of: MicroBatch,
        partition: str,
        refuse: Callable[[KeyWrite, str], Awaitable[None]],
        *,
        only_changes: bool = False,
    ) -> None:
        super().__init__(of, partition)
        self._refuse = refuse
        self._only_changes = only_changes  # leave out values that the bucket has already
        self._kv = open_bucket(of.context, of.options.bucket)  # type: ignore[union-attr]
        self._bucket = Bucket(self._kv)
        self.digests: list[bytes] = []  # of the keys that `store_writes` was called with

    async def store_writes(self, writes: Iterable[KeyWrite]) -> None:
        """Store writes of distinct keys, after `open`, in as many transactions as they need."""
        for group in _grouped(writes, self._most):
            retry, digests = Retry(PATIENCE), digests_of(group)
            self.digests.append(digests.tobytes())
            left, digests = await self._changes(group, digests)
            while left:
                tried = await self._try(left, digests, self.commit, lambda: self.commit([], _NO_DIGESTS), retry)
                if tried is None:
                    break
                left, digests = self.without_stored(tried, digests if tried is left else digests_of(tried))

    async def finish(self, writes: Sequence[KeyWrite]) -> bool:
        """Store the last writes of the micro-batch and that it is complete; False: it was already.

        The last transaction has as many of the writes as possible.
        """
        of, position, retry = self._of, self._position, Retry(PATIENCE)
        await position.read()
        while not of.is_complete(position.last):
            *groups, rest = *_grouped(writes, self._most), []
            if groups:
                rest = groups.pop()
            # Tasks have stored keys, perhaps some of these, and may still be storing. Once they have lost the claim, they cannot.
            if (groups or (rest and position.last.batch == of.batch)) and not await self.open():
                break
            await self.store_writes(chain.from_iterable(groups))
            before = position.last
            last = Record(of.batch, of.attempt, 0, replaces(of, before), complete=True, run=of.run)
            begun = replace(last, complete=False)
            left = await self._try(
                *await self._changes(rest, digests_of(rest)),
                lambda messages, _: position.store(messages, last),  # noqa: B023 - used at once
                lambda: position.store([], begun),  # noqa: B023
                retry,
            )
            if left is None:
                self._report_incomplete(before)
                return True
            writes = left
        if of.run and (last := position.last).run == of.run and last.attempt != of.attempt:
            raise SinkError(
                f"{of.what}: this run of the query has already stored it, so another write of the same micro-batch "
                "would be taken for a repetition. No row of this write is stored; give each write of a query to the same bucket "
                "a writeId of its own, as in upsert(..., writeId='totals')"
            )
        return False

    async def _changes(self, writes: Sequence[KeyWrite], digests: Digests) -> tuple[Sequence[KeyWrite], Digests]:
        """Return those of the writes that are not stored and, with `only_changes`, that change the value."""
        writes, digests = self.without_stored(writes, digests)
        if not self._only_changes or not writes:
            return writes, digests
        found = await Retry(PATIENCE).call(lambda: get_many(self._kv, [write.key for write in writes]))
        changes = [
            write
            for write in writes
            if write.what.operation != "PUT" or (entry := found.get(write.key)) is None or entry.value != write.value
        ]
        self._skip(len(writes) - len(changes))
        return changes, digests_of(changes)

    async def _try(
        self,
        writes: Sequence[KeyWrite],
        digests: Digests,
        store: Callable[[Sequence[Entry], Digests], Awaitable[bool]],
        store_nothing: Callable[[], Awaitable[bool]],
        retry: Retry,
    ) -> Sequence[KeyWrite] | None:
        """Store writes, all or nothing; return None, or those that are left if nothing was stored."""
        try:
            messages = [write.message(self._bucket.prefix) for write in writes]
            return None if await store(messages, digests) else writes
        except WrongLastSequenceError as error:
            left, conflicts = await self._conflicts_of(writes)
            if not conflicts:
                await retry.pause_until_deadline(error)  # there was a delete marker, or the server was not up to date
            # Keys can be at other revisions because this transaction is stored, or that of another attempt. A former leader
            # that answers reads does not know that; only the leader can store.
            elif not await store_nothing():
                return writes
            for write, reason in conflicts:
                await self._refuse(write, reason)
            return left

    async def _conflicts_of(self, writes: Sequence[KeyWrite]) -> tuple[list[KeyWrite], list[tuple[KeyWrite, str]]]:
        """Return the writes that can be stored after the server has refused an expectation, and the others with the reason."""
        expecting = [write.key for write in writes if write.what.expected is not None]
        now = await Retry(PATIENCE).call(lambda: self._bucket.look_up(expecting))
        left: list[KeyWrite] = []
        conflicts: list[tuple[KeyWrite, str]] = []
        for write in writes:
            expected, entry = write.what.expected, now.get(write.key)
            revision = 0 if entry is None else entry.revision
            if expected is None or revision == expected:
                left.append(write)
            elif write.what.creates and entry is not None and entry.operation != "PUT":
                left.append(write._replace(what=replace(write.what, expected=revision)))  # it may replace the marker
            else:
                said = 0 if write.what.creates else expected
                conflicts.append((write, f"its key is at revision {revision}, but its expectedRevision is {said}"))
        return left, conflicts


def _grouped(writes: Iterable[KeyWrite], most: int) -> Iterator[list[KeyWrite]]:
    """Yield the writes of transactions: as many as fit, `most` at a time. Few of them are in memory."""
    group: list[KeyWrite] = []
    total = 0
    for write in writes:
        size = len(write.key) + len(write.value)
        if len(group) == most or (group and total + size > TRANSACTION_BYTES):
            yield group
            group, total = [], 0
        group.append(write)
        total += size
    if group:
        yield group


# -- the writers --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Partition(TaskResult):
    """The result of a task: the writes for the driver, or the digests of the keys that the task has stored."""

    partition: int
    writes: list[KeyWrite] = field(default_factory=list, repr=False)
    digests: bytes = field(default=b"", repr=False)
    run: str = ""  # of the query, for a write in `foreachBatch`


class _KvWriter:
    def __init__(self, options: KvWriteOptions, schema: StructType, *, only_changes: bool) -> None:
        self._options = options
        self._schema = schema
        self._columns = KvColumns.of(schema, options)
        self._only_changes = only_changes
        self._where = f"bucket {options.bucket!r}"
        self._attempt = uuid.uuid4().hex[:16]  # one for all tasks, and all attempts at them
        self._target: _Target = run_on_driver(
            options.connection,
            lambda context: check_target(context, options, self._columns, only_changes=only_changes),
        )

    def _write(self, writer: str, batch: int, batches: Iterator[Any], run: str = "") -> WriterCommitMessage:
        """Keep the last row of each key of a partition, and store them if they are many (called on an executor)."""
        target, partition = self._target, current_task().partitionId()
        result = Partition(writer=writer, batch=batch, attempt=self._attempt, partition=partition, run=run)
        bad = self._bad_rows(result, partition)
        reader = KvRowReader(self._columns, self._options, target.plain, target.with_options, bad)
        last = LastRows(partition)
        try:
            for some in batches:
                last.add(reader.read(some))
                self._send(bad)
            result.rows = len(last)
            if len(last) <= target.most and last.size <= _HANDED_OVER:
                result.writes = list(last)
            else:
                self._store(result, last, bad)
        finally:
            last.close()
        return result

    def _bad_rows(self, of: TaskResult, partition: int) -> BadRows:
        policy, stream = self._options.on_bad_row, self._target.state.name
        return BadRows(policy, self._where, stream, of, partition, subject_header=letters.KEY)

    def _send(self, bad: BadRows) -> None:
        if bad.waiting:
            with connected(self._options.connection, "executor") as (lease, context):
                lease.run(bad.send(context))

    def _transactions(
        self, context: JetStreamContext, of: Partition, name: str, bad: Callable[[int], BadRows]
    ) -> KeyTransactions:
        async def refuse(write: KeyWrite, reason: str) -> None:
            rows = bad(write.partition)
            rows.add(BadRow(write.row, reason, write.key, write.value))
            await rows.send(context)

        # The driver's attempt has a name of its own, because it has to claim what its tasks have claimed.
        attempt = of.attempt if name != _DRIVER else f"{of.attempt}.{name}"
        state, options = self._target.state, self._options
        micro = MicroBatch(context, options, state, self._where, of.writer, of.batch, attempt, run=of.run)
        return KeyTransactions(micro, name, refuse, only_changes=self._only_changes)

    def _store(self, result: Partition, writes: LastRows, bad: BadRows) -> None:
        with connected(self._options.connection, "executor") as (lease, context):
            transactions = self._transactions(context, result, str(result.partition), lambda _: bad)
            with later_version_wins(self._options, self._where):
                if lease.run(transactions.open()):
                    lease.run(transactions.store_writes(writes))
        result.skipped, result.digests = transactions.skipped, b"".join(transactions.digests)

    def commit(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name; a batch write has none
        """Store what the tasks have handed over, and that the micro-batch is complete (called on the driver)."""
        found: list[Partition] = sorted((one for one in messages if one is not None), key=lambda one: one.partition)
        if not found:
            return
        bad: dict[int, BadRows] = {}
        rows, skipped, of = sum(one.rows for one in found), sum(one.skipped for one in found), found[0]
        if rows or self._options.txn_app_id is not None:
            _check_partitions(self._where, found)
            # The last row of a key is that in the partition with the highest number.
            writes = {write.key: write for write in chain.from_iterable(one.writes for one in found)}
            rows += len(writes) - sum(len(one.writes) for one in found)
            with (
                later_version_wins(self._options, self._where),
                connected(self._options.connection, "driver") as (lease, context),
            ):
                transactions = self._transactions(
                    context,
                    of,
                    _DRIVER,
                    lambda number: bad.setdefault(
                        number, self._bad_rows(TaskResult(writer=of.writer, batch=of.batch), number)
                    ),
                )
                if not lease.run(transactions.finish(list(writes.values()))):
                    _log.info("%s: micro-batch %d of %r is already stored", self._where, of.batch, of.writer)
                skipped += transactions.skipped
        what = f"{counted(rows, 'key')}, already stored, or with that value: {skipped}"
        log_results(self._where, what, of.batch, [*found, *(one.result for one in bad.values())])

    def abort(self, messages: list[Any], batchId: int | None = None) -> None:  # noqa: N803
        # Stored keys stay; they are recognised when the micro-batch is replayed.
        ended = sum(one is not None for one in messages)
        what = "%s: the write failed; tasks that had ended: %d of %d; some of its keys may be stored"
        _log.warning(what, self._where, ended, len(messages))


class JetStreamKvWriter(_KvWriter, DataSourceArrowWriter):
    def __init__(self, options: KvWriteOptions, schema: StructType) -> None:
        super().__init__(options, schema, only_changes=False)
        # Chosen here, for all attempts of all tasks.
        self._once = options.txn_app_id is None and options.write_id is None and not options.per_micro_batch
        self._writer = options.txn_app_id or options.write_id or uuid.uuid4().hex[:16]

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        options, task = self._options, current_task()
        if not options.per_micro_batch:
            return self._write(self._writer, options.txn_version or 0, iterator)
        instead = "give jetstream_ext.spark.upsert a txnAppId, or df.write the options txnAppId and txnVersion instead of perMicroBatch"
        query, batch = micro_batch_of(task, instead)
        return self._write(
            query if options.write_id is None else f"{query}-{options.write_id}", batch, iterator, run_of(task)
        )

    def commit(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().commit(messages)
        self._forget()

    def abort(self, messages: list[Any]) -> None:  # type: ignore[override]
        super().abort(messages)
        self._forget()

    def _forget(self) -> None:
        if self._once:
            forget(self._options, self._target.state.name, self._writer)


class JetStreamKvStreamWriter(_KvWriter, StreamingWrite):
    pass


def _check_partitions(where: str, found: Sequence[Partition]) -> None:
    """Raise SinkError if a key is in several partitions, one of which was stored by its task."""
    by_tasks = b"".join(one.digests for one in found)
    if not by_tasks:
        return
    stored, counts = np.unique(np.frombuffer(by_tasks, DIGEST), return_counts=True)
    again = np.isin(digests_of([write for one in found for write in one.writes]), stored)
    if repeated := int((counts > 1).sum() + again.sum()):
        raise SinkError(
            f"{where}: {counted(repeated, 'key')} of micro-batch {found[0].batch} {plural(repeated, 'is', 'are')} in several of its partitions, which are too "
            "large to be compared, so it is not known which row is the last one. Each such key has the value of one of "
            "its rows. Put the rows of a key into one partition with df.repartition(n, 'key'), and restart"
        )


# -- checks of the bucket -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """The bucket's stream as the driver found it."""

    state: StreamState
    most: int  # writes of a transaction
    plain: RowSizes
    with_options: RowSizes  # with a TTL or an expected revision


async def check_target(
    context: JetStreamContext, options: KvWriteOptions, columns: KvColumns, *, only_changes: bool
) -> _Target:
    """Return the bucket's stream; raise PlanningError if it cannot be written to with these options."""
    bucket, name = Bucket(open_bucket(context, options.bucket)), f"bucket {options.bucket!r}"
    state = await bucket_state(bucket, direct=only_changes)
    most = most_rows(context, options.transaction_rows, state)
    if problem := next(_problems(options, columns, state, most), None):
        raise PlanningError(f"{name}: {problem}")
    await check_dead_letters(context, options.connection, options.on_bad_row)
    added, max_payload = batch_headers(state.name), Context(context).connection.max_payload
    optional = [*ROLLUP_HEADERS.items(), (h.EXPECTED_LAST_SUBJECT_SEQ, f"{1 << 63}")]
    plain, others = (RowSizes.of(max_payload, state, headers) for headers in (added, [*added, *optional]))
    return _Target(state, most, plain, others.with_ttl())


def _problems(options: KvWriteOptions, columns: KvColumns, state: StreamState, most: int) -> Iterator[str]:
    """Yield why a bucket cannot be written to."""
    config, markers, missing = state.config, f"{options.marker_prefix}.>", []
    if not config.get("allow_atomic"):
        missing.append(f"atomic batches are off (allow_atomic, nats-server {ATOMIC.since})")
    if not state.stores(markers):
        missing.append(f"its stream does not store {markers!r}, where the sink keeps its markers")
    if missing:
        how = advice.enable_bucket(options.bucket, "spark")
        if markers != marker_subjects(state.name):
            subjects = ",".join((*state.subjects, markers))
            how = f"enable it with 'nats stream edit {state.name} --allow-atomic-publish --subjects {subjects!r}'"
        yield f"{', and '.join(missing)}; {how}"
    if (columns.ttl is not None or options.ttl is not None) and not config.get("allow_msg_ttl"):
        yield f"TTLs of single keys are off; {advice.enable_bucket(options.bucket, 'ttl', what='them')}"
    if config.get("sealed") or config.get("no_ack"):
        yield f"it is {'sealed' if config.get('sealed') else 'without acks (no_ack)'}, so it takes no writes"
    if config.get("subject_transform"):
        yield "it has a subject transform, which hides the sink's markers; remove it"
    if config.get("discard_new_per_subject"):
        yield "it has discard_new_per_subject, so it refuses new values of a key; turn it off"
    if drops_oldest(state):
        yield (
            "it drops its oldest messages when it is full (discard=old), also the sink's markers, so a repeated micro-batch could "
            "be stored twice; set discard=new, as buckets have it"
        )
    if not most:
        yield (
            f"its maximum value size ({state.max_msg_size}) or the server's max_payload is too small for the sink's markers; "
            "raise it to 1024 bytes"
        )
