"""Exactly-once writes to a bucket: each key at most once in a micro-batch, whatever is replayed in whichever partitions.

A *marker* is stored in one atomic batch with writes, and holds the digests of their keys. The *position* of a query says
which micro-batch it is at, which attempt at it may store, and whether all of it is stored. Both are on subjects of the
bucket's stream that belong to no key (``_spark.KV_<bucket>.>``), so clients of the bucket do not see them.

::

    <prefix>.<query>._position          the position
    <prefix>.<query>.<partition>.<n>    the n-th marker of a partition; `_driver` is what the driver stores

The driver stores a small micro-batch: one atomic batch has its writes and the new position, which is complete. A partition
that is too large for that is stored by its task in several transactions. Before the first of them the task *claims* the
micro-batch for its attempt, and every transaction expects that the claim is still the newest position. So once an attempt
has claimed, no earlier one can store. It then reads the markers of the micro-batch, and leaves out the keys that they have.
If a task has claimed the micro-batch, the driver claims it as well before it stores anything: another attempt at a task whose
rows the driver has may have stored some of them::

    claim    no position, or one of an earlier micro-batch ──► claim it
             complete ───────────────────────────────────────► stop: everything is stored
             claimed by this attempt ────────────────────────► continue
             claimed by another attempt ─────────────────────► claim it, and read all markers
             of a later micro-batch ─────────────────────────► FencedError
    store    the claim has moved ────────────────────────────► SinkError; Spark may try the task again
             another attempt at the task has stored a marker ► leave out its keys, and decide again
             a key is not at its expected revision ──────────► give its row back

The subjects of markers are used again by the next micro-batch, so their number is bounded. A bucket keeps few values for a
subject, which is why the markers of a partition have subjects of their own.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import orjson
from nats.js import JetStreamContext

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import AtomicPublishTooLargeError, WrongLastSequenceError
from jetstream_ext.kv.bucket import Bucket, KeyedStream
from jetstream_ext.kv.entries import ROLLUP_HEADERS
from jetstream_ext.kv.reads import get_many
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.spark.kv_rows import DIGEST_SIZE, KeyWrite, digest_of
from jetstream_ext.spark.options import KvWriteOptions
from jetstream_ext.spark.transactional import PATIENCE, SinkError, StoredRecord, most_rows
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import NEVER, TTL, BatchMessage, Entry

_log = get_logger("spark")

# The server holds a transaction in memory until it is committed.
_TRANSACTION_BYTES: Final = 8 << 20
_MARKERS_AT_ONCE: Final = 16
DRIVER: Final = "_driver"


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a query in its micro-batches."""

    batch: int = -1
    attempt: str = ""  # that may store
    replay: bool = False  # another attempt may have stored before it
    complete: bool = False  # all of the micro-batch is stored
    run: str = ""  # of the query that has stored it, if it is known

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        json_number(body["v"], "v", low=1, high=1)
        return cls(
            json_number(body["batch"], "batch"),
            json_text(body["attempt"], "attempt"),
            body.get("replay") is True,
            body.get("complete") is True,
            json_text(body.get("run", ""), "run"),
        )

    def encode(self) -> bytes:
        return orjson.dumps({"v": 1, **asdict(self)})


@dataclass(frozen=True, slots=True)
class KeyMarker:
    """Which keys a transaction has stored."""

    batch: int = -1
    attempt: str = ""
    digests: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        json_number(body["v"], "v", low=1, high=1)
        digests = a2b_base64(json_text(body["keys"], "keys"), strict_mode=True)
        if len(digests) % DIGEST_SIZE:
            raise ValueError("'keys' are not digests")
        return cls(json_number(body["batch"], "batch"), json_text(body["attempt"], "attempt"), digests)

    def encode(self) -> bytes:
        keys = b2a_base64(self.digests, newline=False).decode()
        return orjson.dumps({"v": 1, "batch": self.batch, "attempt": self.attempt, "keys": keys})

    def keys(self) -> Iterator[bytes]:
        return (self.digests[at : at + DIGEST_SIZE] for at in range(0, len(self.digests), DIGEST_SIZE))


@dataclass(frozen=True, slots=True)
class KvMicroBatch:
    """A micro-batch of a query that writes to a bucket."""

    context: JetStreamContext
    options: KvWriteOptions
    state: StreamState
    writer: str  # the name of the query, or of the batch write
    batch: int  # the number of the micro-batch or of the batch write's version; 0 without either
    attempt: str  # names the driver's attempt at it
    only_changes: bool = False  # leave out values that the bucket has already
    run: str = ""  # names the run of the query, if it stores each micro-batch once

    @property
    def where(self) -> str:
        return f"bucket {self.options.bucket!r}"

    def subject(self, name: str) -> str:
        return f"{self.options.marker_prefix}.{self.writer}.{name}"

    @property
    def marker_ttl(self) -> TTL | None:
        """Markers outlive a bucket's TTL where the server allows that: a replay may come later."""
        outlives = self.state.config.get("max_age") and self.state.config.get("allow_msg_ttl")
        return NEVER if outlives else None


@dataclass(frozen=True, slots=True)
class Conflict:
    """A write that cannot be stored, because its key is not at the revision that it expects."""

    write: KeyWrite
    reason: str


class KeyTransactions:
    """The writes of one attempt at one partition of a micro-batch, or of the driver.

    `refuse` is called with each write that cannot be stored, before anything else of its transaction is.
    """

    def __init__(self, of: KvMicroBatch, partition: str, refuse: Callable[[Conflict], Awaitable[None]]) -> None:
        self._of = of
        self._partition = partition
        self._refuse = refuse
        self._position = StoredRecord(of, "_position", Place, msg_ttl=of.marker_ttl)
        self._kv = open_bucket(of.context, of.options.bucket)
        self._bucket = Bucket(self._kv)
        self._most = max(1, most_rows(of.context, of.options.transaction_rows, of.state))
        self._stored: set[bytes] = set()  # the digests of the keys that other attempts have stored
        self._refused: set[str] = set()  # the keys of refused writes
        self._number = 0  # of the next marker
        # The driver's attempt has a name of its own, because it has to claim what its tasks have claimed.
        self._attempt = of.attempt if partition != DRIVER else f"{of.attempt}.{DRIVER}"
        self._wanted: frozenset[bytes] | None = None  # the digests of all keys to be stored, if they are known
        self.skipped: int = 0  # writes whose keys other attempts have stored, or that change nothing
        self.digests: list[bytes] = []  # those of each transaction's keys that `store` was called with

    async def open(self) -> bool:
        """Claim the micro-batch for this attempt, and find out what is stored; False: all of it is stored."""
        await self._position.read()
        while not self._is_complete:
            last = self._position.last
            mine = (last.batch, last.attempt) == (self._of.batch, self._attempt)
            claim = Place(self._of.batch, self._attempt, replay=last.batch == self._of.batch)
            if mine or await self._position.store([], claim):
                self._report_incomplete(last)
                await self._learn()
                return True
        return False

    def _report_incomplete(self, before: Place) -> None:
        """Log a warning if an application goes on to another version before the last one is complete."""
        of = self._of
        if of.options.txn_app_id is not None and 0 <= before.batch < of.batch and not before.complete:
            what = (
                "%s: version %d of %r begins, but version %d was never completed; a retry of it stores nothing, so those of its "
                "keys that are not stored are lost"
            )
            _log.warning(what, of.where, of.batch, of.writer, before.batch)

    @property
    def _is_complete(self) -> bool:
        last = self._position.last
        return last.batch == self._of.batch and last.complete

    async def store(self, writes: Iterable[KeyWrite]) -> None:
        """Store writes of distinct keys, after `open`, in as many transactions as they need."""
        for some in self._cut(writes):
            self.digests.append(b"".join(digest_of(write.key) for write in some))
            await self._store(some)

    async def finish(self, writes: Sequence[KeyWrite]) -> bool:
        """Store the last writes of the micro-batch and that it is complete; False: it was already.

        The last transaction has as many of the writes as possible.
        """
        of = self._of
        self._wanted = frozenset(digest_of(write.key) for write in writes)
        await self._position.read()
        while not self._is_complete:
            transactions = list(self._cut(writes))
            claimed = self._position.last.batch == of.batch
            # Tasks have stored keys, perhaps some of these, and may still be storing. Once they have lost the claim, they cannot.
            if (len(transactions) > 1 or (writes and claimed)) and not await self.open():
                break
            for some in transactions[:-1]:
                await self._store(some)
            writes = transactions[-1] if transactions else []
            before = self._position.last
            pending = await self._pending(writes)
            last = Place(of.batch, self._attempt, self._position.last.replay, complete=True, run=of.run)
            retry = Retry(PATIENCE)
            retry.start()
            while True:
                try:
                    if not await self._position.store(self._messages(pending), last):
                        break  # another attempt has moved the position: decide again
                    self._report_incomplete(before)
                    return True
                except WrongLastSequenceError as error:
                    left, conflicts = await self._conflicts_of(pending)
                    if conflicts and not await self._still_newest(self._position, [], replace(last, complete=False)):
                        break
                    pending = await self._without_conflicts(left, conflicts, error, retry)
                except AtomicPublishTooLargeError as error:
                    raise self._too_many(len(pending) + 1, error) from error
        if of.run and (last := self._position.last).run == of.run and last.attempt != self._attempt:
            raise SinkError(
                f"{self._position.what}: this run of the query has already stored it, so another write of the same micro-batch "
                "would be taken for a repetition. No row of this write is stored; give each write of a query to the same bucket "
                "a writeId of its own, as in upsert(..., writeId='totals')"
            )
        return False

    # -- one transaction ----------------------------------------------------------------------------------------

    async def _store(self, writes: Sequence[KeyWrite]) -> None:
        """Store the writes of one transaction."""
        retry = Retry(PATIENCE)
        retry.start()
        pending = await self._pending(writes)
        while pending:
            marker = self._marker()
            await marker.read()
            if marker.last.batch == self._of.batch:  # of another attempt at this task
                self._number += 1
                self._stored.update(marker.last.keys())
                pending = self._not_stored(pending)
                continue
            digests = b"".join(digest_of(write.key) for write in pending)
            record = KeyMarker(self._of.batch, self._attempt, digests)
            try:
                if not await marker.store(self._guarded(pending), record):
                    continue
            except WrongLastSequenceError as error:
                await self._check_claim(error)
                left, conflicts = await self._conflicts_of(pending)
                if conflicts:
                    nothing = KeyMarker(self._of.batch, self._attempt)
                    try:
                        unmoved = await self._still_newest(marker, self._guarded([]), nothing)
                    except WrongLastSequenceError as moved:
                        await self._check_claim(moved)
                        await retry.pause_until_deadline(moved)
                        continue
                    if not unmoved:
                        continue
                    self._number += 1
                pending = await self._without_conflicts(left, conflicts, error, retry)
                continue
            except AtomicPublishTooLargeError as error:
                raise self._too_many(len(pending) + 2, error) from error
            self._number += 1
            return

    def _marker(self) -> StoredRecord[KeyMarker]:
        what = "the driver's part of " if self._partition == DRIVER else f"partition {self._partition} of "
        return StoredRecord(self._of, f"{self._partition}.{self._number}", KeyMarker, what, msg_ttl=self._of.marker_ttl)

    def _cut(self, writes: Iterable[KeyWrite]) -> Iterator[list[KeyWrite]]:
        collected: list[KeyWrite] = []
        size = 0
        for write in writes:
            if collected and (len(collected) == self._most or size + write.size > _TRANSACTION_BYTES):
                yield collected
                collected, size = [], 0
            collected.append(write)
            size += write.size
        if collected:
            yield collected

    def _messages(self, writes: Iterable[KeyWrite]) -> list[Entry]:
        return [write.message(self._bucket.prefix) for write in writes]

    def _guarded(self, writes: Sequence[KeyWrite]) -> list[Entry]:
        """Return the messages of writes, and one before them that expects that the claim is the newest position.

        It is a message of its own, because its headers would leave less room for a value.
        """
        guard = BatchMessage(
            self._of.subject(f"{self._partition}._guard"),
            b"",
            headers=ROLLUP_HEADERS if self._of.state.config.get("allow_rollup_hdrs") else None,
            expected_last_subject_seq=self._position.seq,
            expected_last_subject=self._position.subject,
        )
        return [guard, *self._messages(writes)]

    async def _check_claim(self, error: Exception) -> None:
        """Raise an error if another attempt has claimed the micro-batch."""
        before = self._position.seq
        await self._position.read()
        if self._position.seq != before:
            raise SinkError(
                f"{self._position.what}: another attempt at it has begun, so this one is out of date. It stored nothing more"
            ) from error

    # -- what is not to be stored -------------------------------------------------------------------------------

    async def _pending(self, writes: Sequence[KeyWrite]) -> list[KeyWrite]:
        pending = self._not_stored(writes)
        if self._of.only_changes and pending:
            found = await Retry(PATIENCE).call(lambda: get_many(self._kv, [write.key for write in pending]))
            changed = [
                write
                for write in pending
                if write.what.operation != "PUT"
                or (entry := found.get(write.key)) is None
                or entry.value != write.value
            ]
            self.skipped += len(pending) - len(changed)
            pending = changed
        return pending

    def _not_stored(self, writes: Sequence[KeyWrite]) -> list[KeyWrite]:
        left = [write for write in writes if write.key not in self._refused]
        if not self._stored:
            return left
        pending = [write for write in left if digest_of(write.key) not in self._stored]
        self.skipped += len(left) - len(pending)
        return pending

    async def _learn(self) -> None:
        """Read the markers of the micro-batch, if another attempt may have stored some."""
        last, of = self._position.last, self._of
        if last.batch != of.batch or (last.attempt == self._attempt and not last.replay):
            return
        prefix = of.subject("")
        names = await KeyedStream(of.context, of.state.name, prefix=prefix, what=of.where).list_keys([">"])

        async def read(name: str) -> None:
            marker = StoredRecord(of, name, KeyMarker)
            await marker.read()
            if marker.last.batch == of.batch:
                keys = marker.last.keys()
                self._stored.update(keys if self._wanted is None else self._wanted.intersection(keys))

        markers = [name for name in names if name != "_position" and not name.endswith("._guard")]
        await gather_bounded(read, markers, limit=_MARKERS_AT_ONCE)
        log_state(_log, self._position.what, "earlier attempts read", keys=len(self._stored))

    async def _conflicts_of(self, writes: Sequence[KeyWrite]) -> tuple[list[KeyWrite], list[Conflict]]:
        """Return the writes that can be stored after the server has refused an expectation, and the others."""
        expecting = [write.key for write in writes if write.what.expected is not None]
        now = await Retry(PATIENCE).call(lambda: self._bucket.look_up(expecting))
        left: list[KeyWrite] = []
        conflicts: list[Conflict] = []
        for write in writes:
            expected, entry = write.what.expected, now.get(write.key)
            revision = 0 if entry is None else entry.revision
            if expected is None or revision == expected:
                left.append(write)
            elif write.what.creates and entry is not None and entry.operation != "PUT":
                left.append(replace(write, what=replace(write.what, expected=revision)))  # it may replace the marker
            else:
                said = 0 if write.what.creates else expected
                reason = f"its key is at revision {revision}, but its expectedRevision is {said}"
                conflicts.append(Conflict(write, reason))
        return left, conflicts

    @staticmethod
    async def _still_newest(record: StoredRecord[Any], messages: Sequence[Entry], successor: Any) -> bool:
        """Return whether `record` was the newest on its subject until `successor` was stored behind it.

        Keys can be at other revisions because this transaction is stored, or that of another attempt. A former leader that
        answers reads does not know that; only the leader can store.
        """
        before = record.seq
        await record.read()
        return record.seq == before and await record.store(messages, successor)

    async def _without_conflicts(
        self, left: list[KeyWrite], conflicts: Sequence[Conflict], error: WrongLastSequenceError, retry: Retry
    ) -> list[KeyWrite]:
        """Refuse the writes that cannot be stored, and return those that are left."""
        for conflict in conflicts:
            await self._refuse(conflict)
            self._refused.add(conflict.write.key)
        if not conflicts:
            await retry.pause_until_deadline(error)  # there was a delete marker, or the server was not up to date
        return left

    def _too_many(self, messages: int, error: Exception) -> SinkError:
        return SinkError(
            f"{self._position.what}: the server accepts fewer than {counted(messages, 'message')} per batch ({error}); set "
            "transactionRows to less than that"
        )
