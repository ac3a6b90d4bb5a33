"""Exactly-once writes without a time limit: rows and a marker of them in one atomic batch, stored together or not at all.

A *marker* holds the digests of a partition's rows (see `markers`). Each marker expects the one before it to be the newest
(`FencedWriter`), so of two attempts at the same partition only one can store; the other reads the new markers and stores
what is still missing. The *layout record* holds the number of partitions of a micro-batch: rows are recognised within their
partition, so the same rows in other partitions would look new. Spark tells a task its partition but not their number,
which is why the option ``sinkPartitions`` exists; the driver checks it at the end of each micro-batch.

::

    claim_layout  no record of this micro-batch ──────────────────► store it
                  no layout, but a marker ────────────────────────► store it again if the number is that of the marker
                  a record with the same number of partitions ────► continue, or stop: the micro-batch is complete
                  with another number ────────────────────────────► ReplayError
                  with a smaller number that a task proved wrong ─► store the declared one
                  of a later micro-batch ─────────────────────────► FencedError
    open          read the markers of this micro-batch; there is one of a later micro-batch ► FencedError
    store         the rows that no marker has, and a new marker ──► stored
                      the marker has moved ───────────────────────► read the new ones, and decide again
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol

from nats.js import JetStreamContext
from nats.js.errors import APIError

from jetstream_ext.client.api import get_at_leader, newest_up_to
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import (
    AtomicPublishTooLargeError,
    BadHeaderError,
    FencedError,
    JetStreamExtError,
    MaxPayloadError,
    WrongLastSequenceError,
)
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Request, StoredMsg
from jetstream_ext.spark.markers import Layout, Marker, Record, ReplayError, StoredRows, decode, rows_per_marker
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.rows import Rows, digests_of
from jetstream_ext.text import counted, get_logger, log_state, numbered
from jetstream_ext.ttl import marker_reason
from jetstream_ext.types import TTL

_log = get_logger("spark")

# Seconds that a task keeps trying while no row can be stored: during an election, or a restart.
PATIENCE: Final = 30.0


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of a query, whose records are its layout and the markers of its partitions."""

    context: JetStreamContext
    options: WriteOptions
    state: StreamState
    writer: str  # the name of the query, or of the batch write
    batch: int  # the number of the micro-batch or of the batch write's version; 0 without either
    attempt: str = ""  # names the driver's attempt at the micro-batch, if it is known

    @property
    def where(self) -> str:
        return f"stream {self.options.stream!r}"

    @property
    def partitions(self) -> int:
        """The declared number of partitions; 0 without one."""
        return self.options.sink_partitions or 0

    def subject(self, name: str) -> str:
        """Return the subject of one of its records."""
        return f"{self.options.marker_prefix}.{self.writer}.{name}"

    async def claim_layout(self, partition: int) -> bool:
        """Record the declared number of partitions, or find it recorded; False: all rows of the micro-batch are stored.

        Raises ReplayError if another number is recorded, or if the index of the caller's partition proves it wrong.
        """
        layout = StoredRecord(self, "_layout", Layout)
        await layout.read()
        while True:
            last = layout.last if layout.last.batch == self.batch else await self._layout_of_markers()
            if last.complete:
                return False
            if not last.allows(self.partitions):
                raise self._other_number(layout.what, last)
            # No other attempt has stored rows, or only those that had the number wrong as well.
            first = last.batch != self.batch or last.minimum > last.partitions
            claim = Layout(
                self.batch, self.partitions, attempt=self.attempt if first else last.attempt, minimum=last.minimum
            )
            wrong = partition >= self.partitions
            own = bool(self.attempt) and claim.attempt == self.attempt
            if wrong and own:
                # Later attempts may declare a larger number: the stored rows are in the partitions where they will be.
                claim = replace(claim, minimum=partition + 1)
            before = layout.last
            if claim != before and not await layout.store([], claim):
                continue
            if self.options.txn_app_id is not None and 0 <= before.batch < self.batch and not before.complete:
                _log.warning(
                    "stream %r: version %d of %r begins, but version %d was never completed; a retry of it stores nothing, so "
                    "those of its rows that are not stored are lost",
                    self.options.stream,
                    self.batch,
                    self.writer,
                    before.batch,
                )
            if wrong:
                raise self._too_small(layout.what, partition, own=own)
            return True

    async def _layout_of_markers(self) -> Layout:
        """Return what the newest record of this micro-batch says. Markers can outlive the layout, which is older."""
        newest = StoredRecord(self, "*", Layout)
        await newest.read()
        return newest.last if newest.last.batch == self.batch else Layout()

    def _other_number(self, what: str, layout: Layout) -> ReplayError:
        if not layout.known:
            return ReplayError(
                f"{what} has at least {counted(layout.minimum, 'partition')}, but the option sinkPartitions is {self.partitions}. Nothing "
                "more was stored; set sinkPartitions to the number of partitions, and do not change the partitioning"
            )
        return ReplayError(
            f"{what} was first stored with {counted(layout.partitions, 'partition')} and now has {self.partitions:,}, so its stored "
            f"rows cannot be recognised. Nothing was stored; set sinkPartitions to {layout.partitions} again, "
            "together with df.repartition(n) or the source's minPartitions"
        )

    def _too_small(self, what: str, partition: int, *, own: bool) -> ReplayError:
        number = self.partitions
        found = f"{what} has a partition with index {partition}, but the option sinkPartitions is {number}"
        if own:
            return ReplayError(
                f"{found}; set it to the number of partitions, which is at least {partition + 1}, and restart without a change "
                "of the partitioning (no stored row will be repeated)"
            )
        return ReplayError(
            f"{found}, as in an earlier attempt. Nothing of this partition was stored. If the rows had {counted(number, 'partition')} "
            f"in that attempt, restore its partitioning, for example with df.repartition({number}, columns). Otherwise set "
            f"the right number and purge the subjects {self.subject('>')!r}; all rows are then stored again, also those "
            "that are stored already"
        )

    async def correct_layout(self, partitions: int) -> None:
        """Record how many partitions a failed attempt had, unless earlier attempts may have stored rows."""
        layout = StoredRecord(self, "_layout", Layout)
        await layout.read()
        last = layout.last
        if (last.batch, last.attempt, last.complete) == (self.batch, self.attempt, False):
            await layout.store([], replace(last, partitions=partitions))

    async def record_layout(self, partitions: int, *, complete: bool = False) -> bool:
        """Record how many partitions there really were, and whether all their rows are stored.

        Returns whether it is known that no earlier attempt has stored rows.
        """
        layout = StoredRecord(self, "_layout", Layout)
        await layout.read()
        while (layout.last.batch, layout.last.complete) != (self.batch, True):
            last = layout.last
            if await layout.store([], Layout(self.batch, partitions, complete)):
                known = bool(self.attempt) and not last.minimum
                return known and (last.batch, last.attempt) == (self.batch, self.attempt)
        return False


class Recorded(Protocol):
    """A micro-batch that has records in a stream."""

    @property
    def context(self) -> JetStreamContext: ...

    @property
    def state(self) -> StreamState: ...

    @property
    def batch(self) -> int: ...

    @property
    def where(self) -> str: ...

    def subject(self, name: str) -> str: ...


class StoredRecord(Generic[Record]):
    """The newest record on a subject of the sink, and the fence that it is for the next one."""

    def __init__(
        self, of: Recorded, name: str, kind: type[Record], what: str = "", *, msg_ttl: TTL | None = None
    ) -> None:
        self.what: str = f"{of.where}, {what}micro-batch {of.batch}"
        self.subject: str = of.subject(name)
        self.last: Record = kind()  # the record that was read or stored last
        self._kind: type[Record] = kind
        self._batch = of.batch
        self._may_roll_up = bool(of.state.config.get("allow_rollup_hdrs"))
        self._context = Context(of.context)
        self._fence = FencedWriter(
            self._context, of.state.name, self.subject, name=self.what, patience=PATIENCE, msg_ttl=msg_ttl
        )

    @property
    def seq(self) -> int:
        """The sequence of the record that was read or stored last; 0 before the first."""
        return self._fence.fence

    async def read(self) -> None:
        """Read the record at the stream's leader; raise FencedError if it is of a later micro-batch."""
        try:
            stored = await self._fence.read()
            # The server stores a delete marker when a record expires. It stays the fence, but is not a record, and with a
            # wildcard it hides older records that have not expired.
            while stored is not None and marker_reason(stored.headers) is not None:
                stored = await newest_up_to(self._find, stored.seq - 1, 1, subject=self.subject)
            self.last = decode(self._kind, stored)
        except Exception as error:
            raise self._explained(error) from error
        if self.last.batch > self._batch:
            raise FencedError(
                f"{self.what}: micro-batch {self.last.batch} is already stored, so this attempt is out of date. Nothing more was "
                "stored. If the checkpoint was set back to an earlier state, start with a new checkpoint; a batch write "
                "needs another writeId or txnAppId"
            )

    async def read_at(self, seq: int) -> Record | None:
        """Read an earlier record at the stream's leader; None if it was removed."""
        try:
            stored = await self._find(Request(seq=seq))
        except Exception as error:
            raise self._explained(error) from error
        return decode(self._kind, stored) if stored is not None and stored.subject == self.subject else None

    async def _find(self, request: Request) -> StoredMsg | None:
        return await Retry(PATIENCE).call(lambda: get_at_leader(self._context, self._fence.stream, request.body()))

    async def store(self, messages: Sequence[Any], record: Record, *, keep: bool = False) -> bool:
        """Store messages and a new record; False: another attempt has stored a record, which was read.

        Removes the records before it where the stream allows that, or else `keep` them.
        """
        self._fence.rollup = self._may_roll_up and not keep
        try:
            await self._fence.store(messages, record.encode())
        except RecordMovedError:
            log_state(_log, self.what, "marker moved", "another attempt has stored one", subject=self.subject)
            await self.read()
            return False
        except Exception as error:
            raise self._explained(error) from error
        log_state(_log, self.what, "committed", messages=len(messages))
        self.last = record
        return True

    def _explained(self, error: Exception) -> Exception:
        if is_transient(error):
            return SinkError(
                f"{self.what}: every attempt failed for {PATIENCE:g} s: {error}; its rows may be stored; restart the query, and "
                "the sink stores only the missing rows"
            )
        if isinstance(error, APIError) and not isinstance(error, WrongLastSequenceError | AtomicPublishTooLargeError):
            why = f"{error}" if isinstance(error, JetStreamExtError) else f"{error.description}"
            return SinkError(
                f"{self.what}: {why}; restart when that is corrected, and the sink stores only the missing rows"
            )
        return error


def most_rows(context: JetStreamContext, wanted: int, state: StreamState) -> int:
    """Return how many of the rows wanted a transaction can have; 0 if no marker would fit into a message."""
    size = Context(context).connection.max_payload
    if state.max_msg_size is not None:
        size = min(size, state.max_msg_size)
    return min(wanted, rows_per_marker(state.name, size))


@dataclass(frozen=True, slots=True)
class Transaction:
    rows: Rows
    digests: bytes  # of the rows
    start: int  # the index in the partition of the first one


class Transactions:
    """The transactions of one attempt at one partition."""

    def __init__(self, of: MicroBatch, partition: int) -> None:
        self._of = of
        self._record = StoredRecord(of, str(partition), Marker, f"partition {partition} of ")
        self._stored = StoredRows(self._record.what, self._record.subject)
        self._known = 0  # the sequence of the newest marker that `_stored` knows
        self._taken = 0
        self.most_rows: int = 0  # that a transaction can have; known once it is open
        self.skipped: int = 0  # rows that an earlier attempt has stored

    async def open(self) -> None:
        """Find out which rows are stored already."""
        of = self._of
        self.most_rows = max(1, most_rows(of.context, of.options.transaction_rows, of.state))
        await self._record.read()
        await self._learn()

    def next(self, rows: Rows) -> Transaction:
        """Prepare the next transaction. Any thread may call it, while the one before is being stored."""
        start, self._taken = self._taken, self._taken + len(rows)
        return Transaction(rows, digests_of(rows), start)

    async def store_all(self, transactions: Iterable[Transaction]) -> None:
        """Store transactions, in the order of `next`, one after the other."""
        for transaction in transactions:
            await self.store(transaction)

    async def store(self, transaction: Transaction) -> None:
        """Store those of a transaction's rows that are not stored."""
        rows, digests = self._stored.select(transaction.rows, transaction.digests)
        while rows:
            marker = self._stored.next_marker(self._of.batch, self._of.partitions, digests, self._known)
            if await self._commit(rows, marker, transaction):
                self._stored.add(marker)
                self._known = self._record.seq
                break
            await self._learn()
            rows, digests = self._stored.select(rows, digests)
        if known := len(transaction.rows) - len(rows):
            log_state(_log, self._record.what, "rows already stored", rows=known, start=transaction.start)
            self.skipped += known

    def check_end(self) -> None:
        """Raise ReplayError if rows must follow; to be called after the last transaction."""
        self._stored.check_end()

    async def _learn(self) -> None:
        """Read the markers of this micro-batch between the newest one and the newest one known."""
        newest, seq = self._record.last, self._record.seq
        if newest.batch != self._of.batch:
            if self._stored.rows:
                raise ReplayError(
                    f"{self._record.what}: the markers of its first {counted(self._stored.rows, 'row')} were removed from "
                    f"{self._record.subject!r}; nothing more was stored; keep limits and purges of the stream from removing markers"
                )
            return
        digests, previous = [newest.digests], newest.previous
        while self._known < previous < seq:
            marker = await self._record.read_at(previous)
            if marker is None:
                break
            digests.append(marker.digests)
            seq, previous = previous, marker.previous
        self._stored.learn(newest, digests)
        self._known = self._record.seq

    async def _commit(self, rows: Rows, marker: Marker, transaction: Transaction) -> bool:
        """Store rows and their marker; False: another attempt has stored a marker, so decide again."""
        what = self._record.what
        try:
            return await self._record.store(rows.entries(), marker, keep=marker.previous > 0)
        except AtomicPublishTooLargeError as error:
            raise SinkError(
                f"{what}: the server accepts fewer than {counted(len(rows) + 1, 'message')} per batch ({error}); set "
                "transactionRows to less than that"
            ) from error
        except (BadHeaderError, MaxPayloadError) as error:
            last = transaction.start + len(transaction.rows) - 1
            row = f"{'' if last == transaction.start else 'one of its '}{numbered(transaction.start, last, 'row')}"
            raise SinkError(f"{what}: {row} was refused: {error}") from error
