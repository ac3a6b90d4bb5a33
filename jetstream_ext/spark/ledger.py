"""What the sinks record beside the rows, so that each row is stored once, whatever Spark repeats.

The records of a query are messages of the stream that is written to, on subjects of their own::

    <markerPrefix>.<query>._position          the micro-batch, the attempt at it, and whether all of it is stored
    <markerPrefix>.<query>.<partition>.<n>    the marker of the n-th transaction: the digests of what it has stored

A transaction is one atomic batch: messages, and a marker that expects the slot ``<partition>.<n>`` as it was read (the fence
of a `FencedWriter`). Of two attempts at a task one stores the n-th transaction; the other one reads its marker, leaves out
what that has stored, and goes on to the next slot. A lost answer is resolved by the slot's marker. ::

    claim    complete ────────────────────────────────────────► stop: everything is stored
             of a later micro-batch ──────────────────────────► FencedError
             unfinished, with another number of partitions ───► ReplayError
             this attempt's ──────────────────────────────────► continue
             otherwise ───────────────────────────────────────► store the claim of this attempt
    learn    the slot that was stored last, or the claim, is another attempt's ► read all markers; one is missing ► ReplayError

The rows of a stream are recognised within their partition, so an earlier attempt that is still running does no harm: it
competes for the same slots. The keys of a bucket may move to another partition. There each transaction begins with a *guard*,
a message that expects the claim to be the newest position, so that no earlier attempt stores anything after a claim, and a
claim that replaces another one reads the markers of all partitions. (Streams have no guard: on a replicated stream, the
guards of all tasks would wait for each other.)

Slots are used again by the next micro-batch, so their number is bounded.
"""

from __future__ import annotations

import uuid
from binascii import a2b_base64, b2a_base64
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, Final, Self

import numpy as np
import orjson
from nats.js import JetStreamContext
from nats.js.errors import APIError

from jetstream_ext.client.api import gather_bounded, get_at_leader, newest_up_to
from jetstream_ext.client.connection import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import AtomicPublishTooLargeError, FencedError, JetStreamExtError, WrongLastSequenceError
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import Request, StoredMsg
from jetstream_ext.protocol.numbers import json_number, json_text
from jetstream_ext.protocol.options import as_message, has_expectation
from jetstream_ext.spark.digests import DIGEST, DIGEST_SIZE, DIGEST_TEXT, DigestCounts, Digests
from jetstream_ext.spark.options import KvWriteOptions, WriteOptions
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.ttl import marker_reason
from jetstream_ext.types import NEVER, TTL, BatchMessage, Entry

_log = get_logger("spark")

PATIENCE: Final = 30.0
"""Seconds that a task keeps trying while no row can be stored: during an election, or a restart."""
# The server holds a transaction in memory until it is committed.
TRANSACTION_BYTES: Final = 8 << 20
# The bytes of a marker and its headers without the digests and the stream's name.
_MARKER_BYTES: Final = 400
_AT_ONCE: Final = 16  # records that are read
_GUARD: Final = "_guard"
_ROLLUP: Final = {"Nats-Rollup": "sub"}


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


class ReplayError(JetStreamExtError):
    """The stored rows of a replayed micro-batch cannot be recognised; no row was stored twice."""


@dataclass(frozen=True, slots=True)
class Record:
    """A position, or the marker of a transaction; without arguments, what there is before the first one."""

    batch: int = -1
    attempt: str = ""  # the driver's attempt at the micro-batch; a marker: and the attempt at the task
    partitions: int = 0  # as the attempt declares them; 0 for a bucket
    replay: bool = False  # a position: another attempt may have stored something before
    complete: bool = False  # a position: everything is stored
    least: int = 0  # a position: at least so many partitions the rows have; more than was declared at first
    run: str = ""  # a position: of the query that has completed it, if that is known
    digests: bytes = field(default=b"", repr=False)  # a marker: of what its transaction has stored
    previous: int = 0  # version 2: the sequence of the partition's marker before this one, on the same subject
    version: int = 3

    @classmethod
    def of(cls, stored: StoredMsg | None) -> Self:
        """Return the record in a message; raise ReplayError for any other message."""
        if stored is None or not stored.data:
            return cls()
        try:
            body = orjson.loads(stored.data)
            json_number(body["v"], "v", low=1, high=3)
            text = json_text(body.get("digests", body.get("keys", "")), "digests")
            digests = a2b_base64(text, strict_mode=True) if text else b""
            if len(digests) % DIGEST_SIZE or (not digests and "rows" in body):
                raise ValueError("'digests' are not those of rows")
            partitions = [json_number(body.get(name, 0), name) for name in ("partitions", "minimum")]
            return cls(
                json_number(body["batch"], "batch"),
                json_text(body.get("attempt", ""), "attempt"),
                max(partitions),
                body.get("replay") is True,
                body.get("complete") is True,
                json_number(body.get("least", 0), "least"),
                json_text(body.get("run", ""), "run"),
                digests,
                json_number(body.get("previous", 0), "previous"),
                body["v"],
            )
        except (KeyError, TypeError, ValueError):
            raise ReplayError(
                f"stream {stored.stream!r}: message {stored.seq} on {stored.subject!r} is not a record of this sink, or one of a "
                "version before 0.1.0. Nothing was stored. Nothing else may be published there (see 'markerPrefix'); start with a new "
                "checkpoint, or purge that subject if rows may be stored again"
            ) from None

    def encode(self) -> bytes:
        given = {name: value for name, value in asdict(self).items() if value and name != "version"}
        if self.digests:
            given["digests"] = b2a_base64(self.digests, newline=False).decode()
        return orjson.dumps({"v": self.version, "batch": self.batch} | given)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch of a query, or a batch write."""

    context: JetStreamContext
    options: WriteOptions | KvWriteOptions
    state: StreamState
    where: str  # the stream or bucket, for errors
    writer: str  # the name of the query, or of the batch write
    batch: int  # the number of the micro-batch or of the batch write's version; 0 without either
    attempt: str = ""  # names the driver's attempt at it
    partitions: int = 0  # as declared; 0 for a bucket, and for a write that nothing repeats
    run: str = ""  # names the run of the query, if it stores each micro-batch once

    @property
    def what(self) -> str:
        return f"{self.where}, micro-batch {self.batch}"

    @property
    def keyed(self) -> bool:
        """Whether it is for a bucket."""
        return isinstance(self.options, KvWriteOptions)

    @property
    def rolls_up(self) -> bool:
        return bool(self.state.config.get("allow_rollup_hdrs"))

    def subject(self, name: str) -> str:
        return f"{self.options.marker_prefix}.{self.writer}.{name}"

    def is_complete(self, position: Record) -> bool:
        return position.batch == self.batch and position.complete

    async def find(self, request: Request) -> StoredMsg | None:
        """Return a message at the stream's leader."""
        try:
            return await Retry(PATIENCE).call(
                lambda: get_at_leader(Context(self.context), self.state.name, request.body())
            )
        except Exception as error:
            raise self.explained(error) from error

    async def newest(self, names: str) -> Record:
        """Return the newest record on a name or on names with a wildcard; raise FencedError if it is of a later micro-batch."""
        subject = self.subject(names)
        stored = await self.find(Request(last_by_subj=subject))
        # The server stores a delete marker when a record expires. With a wildcard, it hides older records that have not.
        while stored is not None and marker_reason(stored.headers) is not None:
            stored = await newest_up_to(self.find, stored.seq - 1, 1, subject=subject)
        return self.checked(stored)

    def checked(self, stored: StoredMsg | None) -> Record:
        record = Record.of(stored)
        if record.batch > self.batch:
            raise FencedError(
                f"{self.what}: micro-batch {record.batch} is already stored, so this attempt is out of date. Nothing more was "
                "stored. If the checkpoint was set back to an earlier state, start with a new checkpoint; a batch write "
                "needs another writeId or txnAppId"
            )
        return record

    def explained(self, error: Exception) -> Exception:
        if is_transient(error):
            return SinkError(
                f"{self.what}: every attempt failed for {PATIENCE:g} s: {error}; its rows may be stored; restart the query, and "
                "the sink stores only the missing rows"
            )
        if isinstance(error, AtomicPublishTooLargeError):
            return SinkError(
                f"{self.what}: the server accepts fewer messages per batch than transactionRows and two ({error}); set "
                "transactionRows to less than that"
            )
        if isinstance(error, APIError) and not isinstance(error, WrongLastSequenceError):
            why = f"{error}" if isinstance(error, JetStreamExtError) else f"{error.description}"
            return SinkError(
                f"{self.what}: {why}; restart when that is corrected, and the sink stores only the missing rows"
            )
        return error


class Place:
    """The newest record on a subject, and the fence that it is for the next one."""

    def __init__(self, of: MicroBatch, name: str) -> None:
        config = of.state.config
        # A record outlives a bucket's TTL where the server allows that: a replay may come later.
        outlives: TTL | None = NEVER if of.keyed and config.get("max_age") and config.get("allow_msg_ttl") else None
        self.last: Record = Record()
        self.subject: str = of.subject(name)
        self._of = of
        self._fence = FencedWriter(
            Context(of.context), of.state.name, self.subject,
            name=of.what, patience=PATIENCE, msg_ttl=outlives, rollup=of.rolls_up,
        )  # fmt: skip

    @property
    def seq(self) -> int:
        return self._fence.fence

    async def read(self) -> Record:
        """Read the record at the stream's leader; raise FencedError if it is of a later micro-batch."""
        try:
            self.last = self._of.checked(await self._fence.read())
        except Exception as error:
            raise self._of.explained(error) from error
        return self.last

    async def store(self, messages: Sequence[Entry], record: Record) -> bool:
        """Store messages and the next record, all or nothing; False: another attempt has stored one, which was read.

        Raises WrongLastSequenceError if an expectation of the messages does not hold.
        """
        try:
            await self._fence.store(messages, record.encode())
        except RecordMovedError:
            log_state(_log, self._of.what, "record moved", "another attempt has stored one", subject=self.subject)
            await self.read()
            return False
        except Exception as error:
            raise self._of.explained(error) from error
        self.last = record
        return True


async def complete(of: MicroBatch) -> Record | None:
    """Store that all of a micro-batch is stored, and return the position before; None: it was complete."""
    position = Place(of, "_position")
    while not of.is_complete(before := await position.read()):
        if before.batch != of.batch:
            await of.newest(">")  # a later one may be known by other records
        record = Record(of.batch, of.attempt, of.partitions, replaces(of, before), complete=True, run=of.run)
        if await position.store([], record):
            return before
    return None


def replaces(of: MicroBatch, before: Record) -> bool:
    """Return whether another attempt may have stored before."""
    return before.batch == of.batch and (before.replay or before.attempt != of.attempt)


def most_rows(context: JetStreamContext, wanted: int, state: StreamState) -> int:
    """Return how many of the rows wanted a transaction can have; 0 if no marker would fit into a message."""
    size = Context(context).connection.max_payload
    if state.max_msg_size is not None:
        size = min(size, state.max_msg_size)
    return min(wanted, max(0, (size - _MARKER_BYTES - len(state.name)) // DIGEST_TEXT))


def slices(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield the transactions of messages of these sizes: `most` at a time, or fewer large ones."""
    begin = 0
    while begin < len(sizes):
        count = most
        while count > 1 and sum(sizes[begin : begin + count]) > TRANSACTION_BYTES:
            count //= 2
        yield slice(begin, begin + count)
        begin += count


class Transactions:
    """What one attempt stores of one partition of a micro-batch."""

    def __init__(self, of: MicroBatch, partition: str) -> None:
        self._of = of
        self._partition = partition
        # A marker names the attempt at the task as well: equal payloads would count as one store (see `FencedWriter`).
        self._task = f"{of.attempt}.{uuid.uuid4().hex[:8]}"
        self._position = Place(of, "_position")
        self._most = max(1, most_rows(of.context, of.options.transaction_rows, of.state))
        self._stored = DigestCounts()  # what the markers have, without what this attempt has given since
        self._number = 0  # of the next slot
        self._slots: deque[Place] = deque()  # the next ones, as far as they were read
        self._empty = False  # no earlier micro-batch has used any slot
        self.skipped: int = 0  # messages that another attempt has stored

    async def open(self) -> bool:
        """Claim the micro-batch for this attempt, and find out what is stored; False: all of it is stored."""
        of, position = self._of, self._position
        await position.read()
        while True:
            before = position.last
            if before.batch != of.batch:
                newest = await of.newest(">")
                if newest.batch == of.batch and newest.version > 2:
                    if (await position.read()).batch == of.batch:  # another task has claimed meanwhile
                        continue
                    raise self._removed(of.subject(">"))  # the position is older than the markers
                before = newest if newest.batch == of.batch else before  # version 2 had no position
            if of.is_complete(before) and (of.keyed or of.options.txn_app_id is not None):
                return False
            await self._check_partitions(before)
            own = before.batch == of.batch and before.attempt == of.attempt
            if own or await position.store([], self._claim(before)):
                self._report_incomplete(before)
                await self._learn()
                return True

    def _claim(self, before: Record, least: int = 0) -> Record:
        of = self._of
        least = max(least, before.least if before.batch == of.batch else 0)
        return Record(of.batch, of.attempt, of.partitions, replaces(of, before), least=least)

    async def _check_partitions(self, before: Record) -> None:
        """Raise ReplayError if the rows have other partitions than they had, or than is declared."""
        of, again = self._of, before.batch == self._of.batch
        # The declared number was wrong from the first attempt on, and the right one is not known.
        open_number = not again or bool(before.least) or not (before.replay or before.attempt != of.attempt)
        if of.partitions and int(self._partition) >= of.partitions:
            least = max(before.least, int(self._partition) + 1)
            what = f"{of.what} has a partition with index {self._partition}, but the option sinkPartitions is {of.partitions}"
            if not open_number:
                raise ReplayError(
                    f"{what}, as in an earlier attempt. Nothing of this partition was stored. If the rows had {of.partitions} partitions in that "
                    "attempt, restore that with df.repartition(n, columns). Otherwise set the right number, and purge the subjects "
                    f"{of.subject('>')!r}; all rows are then stored again, also those that are stored already"
                )
            if before.least < least and not await self._position.store([], self._claim(before, least)):
                await self._check_partitions(self._position.last)
            raise ReplayError(
                f"{what}. Nothing of this partition was stored. Set sinkPartitions to the number of partitions, which is at least "
                f"{least}, and restart without a change of the partitioning"
            )
        if not again or before.attempt == of.attempt:
            return
        if before.least:
            if of.partitions < before.least:
                raise ReplayError(
                    f"{of.what} has at least {before.least:,} partitions, but the option sinkPartitions is {of.partitions:,}. Nothing "
                    "was stored. Set it to the number of partitions, and restart without a change of the partitioning"
                )
        elif before.partitions != of.partitions:
            raise ReplayError(
                f"{of.what} was first stored with sinkPartitions={before.partitions}, and it is {of.partitions:,} now, so its "
                f"stored rows cannot be recognised. Nothing was stored; set it to {before.partitions} again, and the "
                "partitioning to what it was"
            )

    def _report_incomplete(self, before: Record) -> None:
        """Log a warning if an application goes on to another version before the last one is complete."""
        of = self._of
        if of.options.txn_app_id is not None and 0 <= before.batch < of.batch and not before.complete:
            what = (
                "%s: version %d of %r begins, but version %d was never completed; a retry of it stores nothing, so what it has "
                "not stored is lost"
            )
            _log.warning(what, of.where, of.batch, of.writer, before.batch)

    # -- what is stored -----------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        """Read the markers of the micro-batch, if there may be some, and find the first slot without one."""
        of, own, replay = self._of, self._partition, self._position.last.replay
        self._stored, self._number = DigestCounts(), 0
        self._slots.clear()
        newest = await of.newest(f"{own}.>")
        self._empty = newest.batch < 0
        if not replay and newest.batch != of.batch:
            return
        from jetstream_ext.kv.bucket import KeyedStream  # only a replay needs it

        names = [">"] if replay and of.keyed else [own, f"{own}.*"]
        keyed = KeyedStream(of.context, of.state.name, prefix=of.subject(""), what=of.where)
        try:
            found = await Retry(PATIENCE, transient=is_transient_read).call(lambda: keyed.list_keys(names))
        except Exception as error:
            raise of.explained(error) from error
        numbers: defaultdict[str, set[int]] = defaultdict(set)

        async def read(name: str) -> None:
            partition, _, number = name.rpartition(".") if "." in name else (name, "", "")
            if number == _GUARD or (not number and partition != own):
                return
            record = await of.newest(name)
            if record.batch != of.batch:
                return
            if number:
                numbers[partition].add(int(number))
            self._note(record)
            while record.previous:
                record = Record.of(await self._version_2(record, of.subject(name)))
                self._note(record)

        await gather_bounded(read, found, limit=_AT_ONCE)
        for partition, slots in numbers.items():
            if slots != set(range(len(slots))):
                raise self._removed(of.subject(f"{partition}.>"))
        self._number = len(numbers[own])
        log_state(_log, of.what, "markers read", partition=own, slots=sum(map(len, numbers.values())))

    async def _version_2(self, record: Record, subject: str) -> StoredMsg:
        """Return the marker before: in version 2, all of a partition had the same subject."""
        stored = await self._of.find(Request(seq=record.previous))
        if stored is None or stored.subject != subject:
            raise self._removed(subject)
        return stored

    def _removed(self, subject: str) -> ReplayError:
        return ReplayError(
            f"{self._of.what}: markers of its first transactions were removed from the stream, so it is not known which rows are "
            "stored. Nothing more was stored. Keep limits and purges of the stream from removing the markers of a micro-batch. To "
            f"store all rows of this attempt, also those that are stored, purge the subject {subject!r}"
        )

    def _note(self, marker: Record) -> None:
        if marker.digests:
            self._stored.add(np.frombuffer(marker.digests, DIGEST))

    def without_stored(self, items: Sequence[Any], digests: Digests) -> tuple[Sequence[Any], Digests]:
        """Return those of the items, and of their digests, that no marker has; each stored one counts once."""
        if not self._stored or not len(items):
            return items, digests
        new = ~self._stored.take(digests)
        left = list(compress(items, new.tolist()))
        self._skip(len(items) - len(left))
        return left, digests[new]

    def _skip(self, count: int) -> None:
        self.skipped += count

    # -- storing ------------------------------------------------------------------------------------------------

    async def store(self, messages: Iterable[Entry], digests: Digests, sizes: Sequence[int]) -> None:
        """Store those of the messages that are not stored, after `open`, in as many transactions as they need."""
        messages = list(messages)
        for part in slices(sizes, self._most):
            left: Sequence[Entry] = messages[part]
            their = digests[part]
            while len(left):
                left, their = self.without_stored(left, their)
                if not len(left) or await self.commit(left, their):
                    break

    async def commit(self, messages: Sequence[Entry], digests: Digests) -> bool:
        """Store messages as the next transaction; False: it is another attempt's, and its marker is known now.

        Raises WrongLastSequenceError if an expectation of the messages does not hold, and the claim has not moved.
        """
        of, slot, retry = self._of, await self._next_slot(), Retry(PATIENCE)
        while slot.last.batch != of.batch:
            marker = Record(of.batch, self._task, of.partitions, digests=digests.tobytes())
            try:
                if await slot.store([*self._guard(), *messages], marker):
                    self._advance()
                    return True
            except WrongLastSequenceError as error:
                await self._check_claim(error)
                if any(has_expectation(as_message(message)) for message in messages):
                    raise
                await retry.pause_until_deadline(error)  # another task's guard was on its way
        self._note(slot.last)
        self._advance()
        return False

    def _advance(self) -> None:
        self._slots.popleft()
        self._number += 1

    async def _next_slot(self) -> Place:
        if not self._slots:
            ahead = range(self._number, self._number + min(_AT_ONCE, max(1, self._number)))
            self._slots.extend(Place(self._of, f"{self._partition}.{number}") for number in ahead)
            if not self._empty:
                await gather_bounded(Place.read, self._slots, limit=_AT_ONCE)
        return self._slots[0]

    def _guard(self) -> list[Entry]:
        """Return the message that expects the claim to be the newest position.

        It is a message of its own, because its headers would leave less room for a value.
        """
        of, position = self._of, self._position
        if not of.keyed:
            return []
        return [
            BatchMessage(
                of.subject(f"{self._partition}.{_GUARD}"),
                headers=_ROLLUP if of.rolls_up else None,
                expected_last_subject_seq=position.seq,
                expected_last_subject=position.subject,
            )
        ]

    async def _check_claim(self, error: Exception) -> None:
        """Raise SinkError if another attempt has claimed the micro-batch."""
        before = self._position.seq
        await self._position.read()
        if self._position.seq != before:
            raise SinkError(
                f"{self._of.what}: another attempt at it has begun, so this one is out of date. It stored nothing more"
            ) from error
