"""Exactly-once writes without a time limit: rows and a marker of them in one atomic batch, stored together or not at all.

A *marker* holds how many rows of which micro-batch a partition has stored, and their digest. Each marker names the one
before (`FencedWriter`), so of two attempts at the same partition only one can store; the other reads the new marker and
continues behind it. The *layout record* holds the number of partitions of a micro-batch: rows are recognised by partition
and index, so the same rows in other partitions would look new. Spark tells a task its partition but not their number,
which is why the option ``sinkPartitions`` exists; the driver checks it at the end of each micro-batch.

::

    claim_layout  no record of this micro-batch ──────────────────► store it
                  a record with the same number of partitions ────► continue
                  with another number ────────────────────────────► ReplayError
                  of a later micro-batch ─────────────────────────► FencedError
    open          read the marker; of a later micro-batch ────────► FencedError
    store         rows that are stored: the marker's digest differs ► ReplayError
                  the other rows, and a new marker ───────────────► stored
                      the marker has moved ───────────────────────► read it, and decide again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import orjson
from nats.js import JetStreamContext

from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import is_transient
from jetstream_ext.errors import (
    AtomicPublishTooLargeError,
    BadHeaderError,
    FencedError,
    JetStreamExtError,
    MaxPayloadError,
)
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.spark.options import WriteOptions
from jetstream_ext.spark.rows import Message, content, without_ids
from jetstream_ext.text import get_logger

_log = get_logger("spark")

# Seconds that a task keeps trying while no row can be stored: during an election, or a restart.
PATIENCE: Final = 30.0

_VERSION: Final = 1
_ADVICE: Final = (
    "nothing more was stored. The input changes between attempts (see the documentation on exactly-once), or its "
    "partitions have changed"
)


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


class ReplayError(JetStreamExtError):
    """A micro-batch was replayed with other rows, or in another number of partitions; no row was stored twice."""


@dataclass(frozen=True, slots=True)
class Marker:
    batch: int = -1
    rows: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    batch: int = -1
    partitions: int = 0


_Record = TypeVar("_Record", Marker, Layout)


def _decode(kind: type[_Record], stored: StoredMsg | None) -> _Record:
    """Return the record in a message, or the default without a message; raise ReplayError for any other message."""
    if stored is None:
        return kind()
    try:
        body = orjson.loads(stored.data)
        if json_number(body["v"], "v") == _VERSION:
            readers: dict[Any, Callable[..., Any]] = {int: json_number, str: json_text}
            return kind(**{each.name: readers[type(each.default)](body[each.name], each.name) for each in fields(kind)})
    except (KeyError, TypeError, ValueError):
        pass  # reported below
    raise ReplayError(
        f"stream {stored.stream!r}: message {stored.seq} on {stored.subject!r} is not a marker of this sink; nothing else "
        "may be published there (see 'markerPrefix')"
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of a query (0: a batch write), whose records are its layout and a marker for each partition."""

    context: JetStreamContext
    options: WriteOptions
    state: StreamState
    writer: str  # the name of the query, or of the batch write
    batch: int

    async def claim_layout(self, partitions: int) -> None:
        """Record the number of partitions, or find it recorded; raise ReplayError if another number is recorded."""
        layout = StoredRecord(self, "_layout", Layout)
        await layout.read()
        while layout.last.batch != self.batch:
            if await layout.store([], Layout(self.batch, partitions)):
                return
        if layout.last.partitions != partitions:
            raise ReplayError(
                f"{layout.what} was first stored with {layout.last.partitions} partitions and now has {partitions}, so its stored "
                f"rows cannot be recognised. Nothing was stored; set sinkPartitions to {layout.last.partitions} again, "
                "together with df.repartition(n) or the source's minPartitions"
            )

    async def correct_layout(self, partitions: int) -> None:
        """Record how many partitions there really were."""
        layout = StoredRecord(self, "_layout", Layout)
        await layout.read()
        while not await layout.store([], Layout(self.batch, partitions)):
            pass


class StoredRecord(Generic[_Record]):
    """The newest record on a subject of the sink, and the fence that it is for the next one."""

    def __init__(self, of: MicroBatch, name: str, kind: type[_Record], what: str = "") -> None:
        self.what: str = f"stream {of.options.stream!r}, {what}micro-batch {of.batch}"
        self.subject: str = f"{of.options.marker_prefix}.{of.writer}.{name}"
        self.last: _Record = kind()  # the record that was read or stored last
        self._kind: type[_Record] = kind
        self._batch = of.batch
        self._fence = FencedWriter(
            Context(of.context),
            of.options.stream,
            self.subject,
            name=self.what,
            patience=PATIENCE,
            rollup=bool(of.state.config.get("allow_rollup_hdrs")),
        )

    async def read(self) -> None:
        """Read the record at the stream's leader; raise FencedError if it is of a later micro-batch."""
        try:
            self.last = _decode(self._kind, await self._fence.read())
        except Exception as error:
            raise self._explained(error) from error
        if self.last.batch > self._batch:
            raise FencedError(
                f"{self.what}: micro-batch {self.last.batch} is already stored; this attempt is out of date"
            )

    async def store(self, messages: Sequence[Any], record: _Record) -> bool:
        """Store messages and a new record; False: another attempt has stored a record, which was read."""
        body = orjson.dumps({"v": _VERSION, **asdict(record)})
        try:
            await self._fence.store(messages, body)
        except RecordMovedError:
            _log.debug("%s: another attempt has stored a marker on %r", self.what, self.subject)
            await self.read()
            return False
        except Exception as error:
            raise self._explained(error) from error
        _log.debug("%s: stored %d messages and %s", self.what, len(messages), record)
        self.last = record
        return True

    def _explained(self, error: Exception) -> Exception:
        if is_transient(error):
            return SinkError(
                f"{self.what}: every attempt failed for {PATIENCE:g} s: {error}; its rows may be stored; restart the query, and "
                "the sink stores only the missing rows"
            )
        return error


def _add_rows(digest: blake2b, messages: Iterable[Message]) -> None:
    pieces: list[bytes] = []
    heads: dict[str, bytes] = {}  # by subject: the start of `content`, for messages without headers
    for subject, data, headers, _ in messages:
        head = content(subject, b"", headers) if headers else heads.get(subject)
        if head is None:
            head = heads[subject] = content(subject, b"", None)
        pieces += (b"%d:%b" % (len(head) + len(data), head), data)
    digest.update(b"".join(pieces))


@dataclass(frozen=True, slots=True)
class Transaction:
    messages: Sequence[Message]
    start: int  # the number of rows before them
    before: blake2b  # the digest of the rows before them
    after: blake2b  # the digest including them
    # The input ended after them. It also ends where Spark stops a failing attempt, so the next attempt may have more
    # rows; only fewer rows are a contradiction.
    last: bool


class Transactions:
    """The transactions of one attempt at one partition."""

    def __init__(self, of: MicroBatch, partition: int) -> None:
        self._batch = of.batch
        self._marker = StoredRecord(of, str(partition), Marker, f"partition {partition} of ")
        self._digest = blake2b(digest_size=16)
        self._taken = 0
        self.skipped: int = 0  # rows that an earlier attempt has stored

    async def open(self) -> None:
        """Find out which rows are stored already."""
        await self._marker.read()

    def next(self, messages: Sequence[Message], *, last: bool) -> Transaction:
        """Prepare the next transaction. Any thread may call it, while the one before is being stored."""
        before, start = self._digest, self._taken
        self._digest = after = before.copy()
        _add_rows(after, messages)
        self._taken += len(messages)
        return Transaction(messages, start, before, after, last)

    async def store(self, transaction: Transaction) -> None:
        """Store a transaction's rows, or find them stored; in the order of `next`, one after the other."""
        messages, start = transaction.messages, transaction.start
        end = start + len(messages)
        what = self._marker.what
        while True:
            marker = self._marker.last
            stored = marker.rows if marker.batch == self._batch else 0
            if stored >= end:
                if transaction.last and stored > end:
                    raise ReplayError(
                        f"{what}: {stored} of its rows are already stored, but now it has only {end}; {_ADVICE}"
                    )
                if stored == end and stored:
                    self._compare(transaction.after)
                _log.debug("%s: rows %d to %d are already stored", what, start, end - 1)
                self.skipped += len(messages)
                return
            if stored < start:
                raise ReplayError(
                    f"{what}: the marker of the first {start} rows was removed from {self._marker.subject!r}; nothing more "
                    "was stored; keep limits and purges of the stream from removing markers"
                )
            if stored > start:
                some = transaction.before.copy()
                _add_rows(some, messages[: stored - start])
                self._compare(some)
            marker = Marker(self._batch, end, transaction.after.hexdigest())
            if await self._commit(messages[stored - start :], marker):
                return

    async def _commit(self, messages: Sequence[Message], marker: Marker) -> bool:
        """Store rows and their marker; False: another attempt has stored a marker, so decide again."""
        what = self._marker.what
        try:
            return await self._marker.store(without_ids(messages), marker)
        except AtomicPublishTooLargeError as error:
            raise SinkError(
                f"{what}: the server accepts fewer than {len(messages) + 1} messages per batch ({error}); set "
                "transactionRows to less than that"
            ) from error
        except (BadHeaderError, MaxPayloadError) as error:
            first = marker.rows - len(messages)
            raise SinkError(f"{what}: one of its rows {first} to {marker.rows - 1} was refused: {error}") from error

    def _compare(self, digest: blake2b) -> None:
        if digest.hexdigest() != self._marker.last.digest:
            raise ReplayError(
                f"{self._marker.what}: {self._marker.last.rows} of its rows are already stored, but the rows of this attempt differ; {_ADVICE}"
            )
