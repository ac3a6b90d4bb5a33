"""Transactions: operations on a bucket that are committed together if nothing that was read has changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from inspect import isawaitable
from types import TracebackType
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeVar

from nats.js.api import DEFAULT_PREFIX
from nats.js.kv import KeyValue
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import forget_stream, lookup_stream
from jetstream_ext.client.atomic import BatchState
from jetstream_ext.client.outcome import may_be_known_later
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    AtomicPublishTooLargeError,
    BadSubjectError,
    BatchAbandonedError,
    BatchClosedError,
    BatchOutcomeUnknownError,
    KeyConflictError,
    NoStreamError,
    Outcome,
    RequestTimeoutError,
    StreamRecreatedError,
    WrongLastSequenceError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.commit import BatchCommit, Commit, PublishCommit
from jetstream_ext.kv.entries import KeyValueEntry, check_key, check_keys
from jetstream_ext.kv.staging import Staging
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.options import check_function, check_seconds, check_sequence, reads_subject
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import TTL, BatchAck

_Result = TypeVar("_Result")

_log: Final = get_logger("kv")

_OUTCOMES: Final[dict[BatchState, Outcome]] = {"committed": "stored", "unknown": "unknown"}
_CARRIERS_REFUSED: Final = AtomicPublishTooLargeError, AtomicPublishIncompleteError, NoStreamError
# How often a commit is sent again because a key to be created turned out to have a delete marker.
_MAX_COMMIT_RETRIES: Final = 3
# Seconds. Conflicts are short, so the first pauses between two runs of a transaction are, too.
_FIRST_PAUSE: Final = 0.004


class Committed(NamedTuple, Generic[_Result]):
    """What `retry_transaction` returns.

    Attributes:
        result: What the function returned in the run that was committed.
        revision: The highest revision that it wrote, for `Table.wait_for`; 0 if it wrote nothing.
    """

    result: _Result
    revision: int


class Transaction:
    """Operations on one bucket that are committed all at once or not at all; made by `transaction`.

    `put`, `create`, `update`, `delete` and `purge` send nothing before the commit. `get` and `get_many` read the newest
    state at the bucket's leader, with the transaction's own operations applied, and make the commit conditional: it
    succeeds only if every key that was read, or found missing, is still at the revision that was read. The effect is as
    if the whole transaction had happened at the moment of the commit (serialisable). If the bucket was deleted and created
    again since a key was found, the commit fails.

    The commit stores one message per key, for any number of operations on it, with the headers that nats-py writes. The
    commit of a single key, if no other key was read, is a publish as nats-py's ``put`` and ``update`` are.
    """

    def __init__(self, bucket: Bucket, errors: list[Exception]) -> None:
        self._bucket = bucket
        self._errors = errors  # gets those that `get`, `get_many` and `commit` raise
        self._staging = Staging(bucket.prefix, bucket=bucket.name, max_payload=bucket.context.connection.max_payload)
        self._write: Commit | None = None  # the newest commit
        self._state: BatchState = "open"
        self._revisions: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Transaction on {self._bucket.name!r} of {counted(len(self._staging.writes), 'key')}, {self._state}>"

    @property
    def state(self) -> BatchState:
        """``"open"``, ``"committed"``, ``"failed"`` (nothing written), ``"discarded"`` or ``"unknown"``."""
        return self._state

    @property
    def revisions(self) -> dict[str, int]:
        """The new revision of every key that was written; empty before the commit."""
        return self._revisions.copy()

    def put(self, key: str, value: bytes, *, ttl: TTL | None = None) -> None:
        """Write a value, whatever the key's revision.

        Args:
            key: The key.
            value: Its value.
            ttl: Whole seconds from 1, a timedelta of whole seconds, or `NEVER`. A value that can expire replaces the
                key's history; otherwise its expiry would show the previous value again.

        Raises:
            BatchClosedError: The transaction has ended.
            nats.js.errors.InvalidKeyError, MaxPayloadError, ValueError, TypeError: Invalid argument; nothing changed.
        """
        self._check_open()
        self._staging.write("PUT", key, value, ttl)

    def create(self, key: str, value: bytes, *, ttl: TTL | None = None) -> None:
        """Write a value if the key does not exist; otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction has read or written the key, and it exists.
            BatchClosedError, nats.js.errors.InvalidKeyError, MaxPayloadError, ValueError, TypeError: As for `put`.
        """
        self._check_open()
        self._staging.create(key, value, ttl)

    def update(self, key: str, value: bytes, *, last: int, ttl: TTL | None = None) -> None:
        """Write a value if the key is at revision `last` (0: it has never existed); otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction has read another revision of the key.
            ValueError: The transaction has written the key before; or as for `put`.
            BatchClosedError, nats.js.errors.InvalidKeyError, MaxPayloadError, TypeError: As for `put`.
        """
        self._check_open()
        self._staging.write("PUT", key, value, ttl, last=check_sequence(last, "last", low=0))

    def delete(self, key: str, *, last: int | None = None) -> None:
        """Write a delete marker, if the key is at revision `last` (None: any); the key's history stays.

        Raises:
            KeyConflictError, BatchClosedError, ValueError, nats.js.errors.InvalidKeyError, TypeError: As for `update`.
        """
        self._check_open()
        self._staging.write("DEL", key, last=last)

    def purge(self, key: str, *, last: int | None = None, ttl: TTL | None = None) -> None:
        """Replace the key's history by a purge marker, if the key is at revision `last` (None: any).

        Args:
            key: The key.
            last: The revision that it must be at.
            ttl: How long the marker stays, as for `put`; None is indefinitely. After that, reads of the past may know
                nothing of the key.

        Raises:
            KeyConflictError, BatchClosedError, ValueError, nats.js.errors.InvalidKeyError, TypeError: As for `update`.
        """
        self._check_open()
        self._staging.write("PURGE", key, ttl=ttl, last=last)

    def publish(self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None) -> str:
        """Store an event together with the keys: all of them, or nothing.

        The event is a message of the bucket's stream, and no key. Read it as those of any other stream; see "Outbox" in the
        documentation.

        Args:
            subject: Its subject without the last token: the library appends a unique one that orders events by time, because
                the bucket's history keeps only so many messages of a subject.
            payload: Its payload.
            headers: Its headers.

        Returns:
            The whole subject.

        Raises:
            BatchClosedError: The transaction has ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: Invalid argument; nothing changed.

        Requires: `events` of `ensure_bucket` or `enable` with a filter that matches.
        """
        self._check_open()
        return self._staging.publish(subject, payload, headers)

    async def get(self, key: str) -> KeyValueEntry | None:
        """Return the entry of a key, or None if it does not exist, and make the commit conditional on it.

        The transaction reads a key once. A value that the transaction itself has written comes back with revision 0,
        and adds no condition.

        Raises:
            BatchClosedError: The transaction has ended.
            nats.js.errors.InvalidKeyError: No client accepts such a key.
            nats.js.errors.BucketNotFoundError: The bucket does not exist.
            nats.js.errors.BadBucketError: The key was not found, and the bucket is a mirror, or the stream is not a bucket's.
            StreamConfigMismatchError: The key was not found, but the bucket's server does not find all that is stored,
                because the bucket has reached sequence 2**62.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: The bucket's leader does not answer.

        Cancellation: Safe; the transaction stays usable.
        """
        self._check_open()
        check_key(key)
        return (await self._get((key,))).get(key)

    async def get_many(self, keys: Iterable[str]) -> dict[str, KeyValueEntry]:
        """Return the entries of several keys, without those that do not exist; errors and cancellation as for `get`."""
        self._check_open()
        return await self._get(check_keys(keys))

    async def _get(self, keys: Iterable[str]) -> dict[str, KeyValueEntry]:
        staging = self._staging
        new = [key for key in keys if key not in staging.writes and key not in staging.reads]
        if new:
            with self._remembering_errors():
                entries = await self._bucket.look_up(new)
            for key, entry in entries.items():
                staging.read(key, entry)
        found: dict[str, KeyValueEntry] = {}
        for key in keys:
            staged = staging.writes.get(key)
            if staged is not None:
                entry = KeyValueEntry(self._bucket.name, key, staged.value, 0, datetime.now(UTC), staged.operation)
            else:
                entry = staging.reads[key]
            if entry is not None and entry.operation == "PUT":
                found[key] = entry
        return found

    async def commit(self) -> dict[str, int]:
        """Commit and return the new revisions; a clean exit of ``async with`` does the same.

        A transaction without writes asks a leader that knows to be the only one whether everything is still as it was read.

        Raises:
            KeyConflictError: A key is not as it was read, or not as an operation expects it; nothing is written. Its
                `keys` names the keys.
            StreamRecreatedError: The bucket was deleted and created again since a key was found; nothing is written.
            nats.js.errors.BadBucketError: The bucket is a mirror, or the stream is not a bucket's; nothing is written.
            BatchOutcomeUnknownError: The answer was lost. Either everything is written or nothing; `resolve` may find
                out which.
            AtomicPublishDisabledError: The bucket does not allow atomic batches, which a commit of several keys needs; `enable`
                turns them on.
            MessageTTLDisabledError: The bucket does not allow TTLs; `enable` turns them on.
            MessageTooLargeError: A value with its headers, or a delete marker, is larger than the bucket allows; the error
                names the key, and nothing is written.
            MaxPayloadError: A value with its headers is larger than the server's max_payload; the error names the key, and
                nothing is written.
            StreamConfigMismatchError: As for `get`; nothing is written.
            RequestTimeoutError: There was no connection in time; or nothing was to be written, and no such leader answered.
                Nothing is written.
            NoStreamError: The bucket's leader is away, or the bucket does not exist; nothing is written.
            ServerError: The server refused for another reason: the bucket does not allow rollups (10111), is sealed (10109)
                or is full (10077). Nothing is written. The error is also a `BatchError`, and a nats-py ``APIError`` as
                those of nats-py's ``put`` are; for these reasons it names the bucket and what to do.
            BatchError: Any other failure of the batch; nothing is written.
            UnsupportedFeatureError: The server is older than 2.12.1, and the commit is not one of a single key that is all that
                was read; nothing is written.

        Cancellation: Nothing is written, unless the commit was sent already (then `state` is ``"unknown"``).
        """
        observer, bucket = telemetry.observer, self._bucket
        if observer is None:
            return await self._commit_and_settle()
        with observer.begin(telemetry.Kind.COMMIT, bucket.context.connection, stream=bucket.stream) as operation:
            operation.describe(messages=len(self._staging.writes))
            return await self._commit_and_settle()

    async def _commit_and_settle(self) -> dict[str, int]:
        self._check_open()
        self._state = "failed"
        writes, reads, events = self._staging.writes, self._staging.reads, self._staging.events
        log_state(_log, self._source, "commit begun", writes=len(writes), reads=len(reads))
        try:
            with self._remembering_errors():
                if writes or events:
                    await self._commit()
                elif reads:
                    state = await self._certain_state()  # raises for a mirror, where keys have another prefix
                    if (
                        len(reads) > 1 or state.replicated
                    ):  # else a single read was of one moment, and of the only server
                        await self._check_reads()
        except BaseException as error:
            unknown = self._write is not None and self._write.unknown
            self._enter("unknown" if unknown else "failed", before="open", error=error)
            raise
        self._enter("committed", before="open")
        return self.revisions

    @property
    def _source(self) -> str:
        return f"transaction on {self._bucket.name!r}"

    def _enter(self, state: BatchState, *, before: BatchState, error: BaseException | None = None) -> None:
        self._state = state
        log_state(_log, self._source, f"{before.upper()} -> {state.upper()}", batch=self._batch_id, error=error)

    async def _commit(self) -> None:
        staging, bucket = self._staging, self._bucket
        await self._check_events()
        carrier = await self._carrier() if staging.needs_carriers else ""
        for retries in range(_MAX_COMMIT_RETRIES + 1):
            await self._check_bucket()
            fence: int | None = None
            if staging.needs_carriers and not carrier:
                fence = (await bucket.state(direct=False)).last_seq
                await self._check_reads()  # raises unless everything was as it was read at the fence
            messages = staging.messages(fence=fence, carrier=carrier)
            if staging.is_one_message:
                write: Commit = PublishCommit(bucket, replace(messages[0], msg_id=NUID().next().decode()))
            else:
                write = BatchCommit(bucket, messages)
            self._write = write
            log_state(_log, self._source, "attempt", batch=self._batch_id, number=retries + 1, fence=fence)
            try:
                self._accept(await write.commit())
                return
            except WrongLastSequenceError as refusal:
                now = await bucket.look_up(staging.expectations)
                conflict = staging.refused(now, fenced=fence is not None)
                log_state(_log, self._source, "conflict", batch=self._batch_id, error=conflict or refusal)
                if conflict is not None or retries == _MAX_COMMIT_RETRIES:
                    raise conflict or refusal from refusal
            except _CARRIERS_REFUSED:
                if not carrier:
                    raise
                # They are too many, the client may not publish them, or the stream no longer stores them: the fence needs none.
                carrier = ""

    async def _check_events(self) -> None:
        """Raise BadSubjectError if the bucket's stream does not store an event, or may not be the one that stores it."""
        staging, bucket = self._staging, self._bucket
        if staging.events and not staging.writes and bucket.context.prefix != DEFAULT_PREFIX:
            raise BadSubjectError(
                f"bucket {bucket.name!r}: nothing was written; through an API of its own ({bucket.context.prefix}), only the "
                "message of a key is sure to reach the bucket, so a transaction with events has to write a key"
            )
        for event in staging.events:
            if not await self._stores(event.subject):
                raise BadSubjectError(
                    f"bucket {bucket.name!r}: nothing was written, because its stream does not store events on {event.subject!r}; "
                    "add their subjects with ensure_bucket(events=[...]) or enable(kv, events=[...])"
                )

    async def _carrier(self) -> str:
        """Return the subject of messages that only carry expectations; "" if the bucket has none."""
        subject = reads_subject(self._bucket.stream)
        own = self._bucket.context.prefix == DEFAULT_PREFIX  # servers send only keys through the API of a domain
        return subject if own and await self._stores(subject) else ""

    async def _stores(self, subject: str) -> bool:
        """Return whether the bucket's stream stores a subject, as far as the client can find out."""
        bucket = self._bucket
        for _ in range(2):  # the first answer may be from a cache
            known = await lookup_stream(bucket.context, "", bucket.stream, bucket.timeout)
            if known is None or known[0].stores(subject):
                break
            forget_stream(bucket.context, bucket.stream)
        return known is not None and known[0].stores(subject)

    @property
    def _batch_id(self) -> str:
        return "" if self._write is None else self._write.batch_id

    async def _certain_state(self) -> StreamState:
        """Return the state of the bucket once a leader answers that can have no successor."""
        bucket, retry = self._bucket, Retry(self._bucket.timeout)
        while not (state := await bucket.state(direct=False)).leader_is_certain:
            late = (
                f"bucket {bucket.name!r}: its leader has not heard from the other servers lately, so what was read may be out of "
                f"date (tried for {bucket.timeout:.4g} s); run the transaction again"
            )
            await retry.pause_until_deadline(RequestTimeoutError(late))
        return state

    async def _check_bucket(self) -> None:
        """Raise StreamRecreatedError if another message has the revision of the oldest entry that was read.

        If no message has it, the key or the bucket has changed, and the server refuses the commit.
        """
        oldest = self._staging.oldest_read
        if oldest is not None and await self._bucket.has_replaced(oldest):
            raise StreamRecreatedError(
                f"bucket {self._bucket.name!r}: nothing was written; the bucket was deleted and created again, because revision "
                f"{oldest.revision} is not the message of key {oldest.key!r} that was read; run the transaction again",
                stream=self._bucket.stream,
            )

    async def _check_reads(self) -> None:
        """Raise an error unless everything was as it was read at a moment between the last read and now.

        Raises KeyConflictError, or StreamRecreatedError if that is the reason.
        """
        conflict = self._staging.moved(await self._bucket.look_up(self._staging.reads))
        if conflict is not None:
            await self._check_bucket()
            raise conflict

    def _accept(self, ack: BatchAck) -> None:
        writes = self._staging.writes  # the last messages
        self._revisions = {key: ack.seq - len(writes) + place for place, key in enumerate(writes, 1)}

    async def resolve(self, *, timeout: float | None = None) -> Literal["stored", "not_stored"]:
        """Find out, after a `BatchOutcomeUnknownError`, whether the transaction is written; see `AtomicBatch.resolve`.

        Raises:
            BatchOutcomeUnknownError: It cannot be known, or not yet.
            BatchClosedError: The outcome is known already.

        Cancellation: Safe; the outcome stays unknown, and `resolve` can be called again.
        """
        if self._state != "unknown" or self._write is None:
            raise BatchClosedError(
                f"this transaction is {self._state}; there is nothing to resolve", batch_id=self._batch_id
            )
        ack = await self._write.resolve(timeout)
        if ack is not None:
            self._accept(ack)
        self._enter("failed" if ack is None else "committed", before="unknown")
        return "not_stored" if ack is None else "stored"

    @contextmanager
    def _remembering_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._errors.append(error)
            raise

    async def discard(self) -> None:
        """End the transaction without a commit; nothing is written.

        Cancellation: Sends nothing and waits for nothing.
        """
        if self._state == "open":
            self._enter("discarded", before="open")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.discard()
        elif self._state == "open":
            await self.commit()

    def _check_open(self) -> None:
        if self._state != "open":
            outcome = _OUTCOMES.get(self._state, "not_stored")
            raise BatchClosedError(
                f"the transaction has ended ({self._state})", batch_id=self._batch_id, outcome=outcome
            )


def transaction(kv: KeyValue, *, timeout: float | None = None) -> Transaction:
    """Return a transaction on a bucket, to be used as an async context manager.

    ::

        async with kvx.transaction(kv) as tx:
            stock = await tx.get("stock")
            tx.put("stock", b"%d" % (int(stock.value) - 1))
            tx.create("order.17", b"...")
        print(tx.revisions)

    A clean exit commits; an exception discards. See `Transaction`.

    Args:
        kv: nats-py's bucket.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        KeyConflictError: At the exit: a key has changed since; see `retry_transaction`.
        nats.js.errors.BadBucketError, BatchError, MaxPayloadError, StreamRecreatedError: At the exit: as for `Transaction.commit`.

    Cancellation: Nothing is written, unless the commit was sent already.

    Requires: Permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``; unless only one key is read and written, nats-server
        2.12.1 and ``allow_atomic``. By default a server accepts 1000 keys in one batch.
    """
    return Transaction(Bucket(kv, timeout), [])


async def retry_transaction(
    kv: KeyValue,
    fn: Callable[[Transaction], Awaitable[_Result]],
    *,
    patience: float = 30.0,
    timeout: float | None = None,
) -> Committed[_Result]:
    """Run `fn` in a transaction and commit it; run it again, in a new one, if a key that it read has changed.

    Between two runs there is a random pause, at first of up to 4 ms, then of up to twice as long each time, at most half
    a second. `fn` also runs again after a transient error of the transaction's own reads or commit: the bucket's
    leader is away, the connection is lost, or the server is busy. It also runs again if the bucket was deleted and created
    again since the run read it; the next run reads the new bucket. If the answer to a commit is lost, the call first finds
    out whether the transaction was written, so that `fn` takes effect once (see "Transactions" in the documentation for
    what that needs). Any other exception of `fn` ends the call, and nothing is written: also a conflict or transient error
    of another transaction or call in `fn`, or an exception that `fn` raises because of the transaction's. An exception
    group counts as the transaction's if all exceptions in it are.

    ::

        async def withdraw(tx):
            account = await tx.get("account.7")
            tx.put("account.7", b"%d" % (int(account.value) - 10))

        await kvx.retry_transaction(kv, withdraw)

    Args:
        kv: nats-py's bucket.
        fn: Called with the `Transaction` in every run. Its other side effects may happen more than once.
        patience: Seconds, over 0, after which the next conflict or transient error is raised. If the bucket's leader
            does not answer, that is at most `timeout` later.
        timeout: Seconds to wait for each answer; None is the context's own.

    Returns:
        The result of `fn` in the run that was committed, and the highest revision that it wrote.

    Raises:
        KeyConflictError: There was still a conflict after `patience`; or a condition of `fn`'s own (`create`,
            `last=`) did not hold, which another run would not change.
        StreamRecreatedError: The bucket was deleted and created again during each run until `patience`; nothing is
            written.
        BatchOutcomeUnknownError: Whether the last run was written could not be found out in time.
        BatchError, RequestTimeoutError: The bucket could not be written to in time, or the server refused; nothing is
            written.
        nats.js.errors.BadBucketError, MaxPayloadError, StreamConfigMismatchError: As for `Transaction.commit`, at once;
            nothing is written.
        ValueError, TypeError: `patience` or `timeout` is not over 0, or not a number; `fn` is no async function.
        Exception: Whatever `fn` raises.

    Cancellation: Nothing is written, unless a commit was sent already.

    Requires: As for `transaction`.
    """
    patience = check_seconds(patience, "patience")
    check_function(fn, "fn", "an async function")
    bucket, observer = Bucket(kv, timeout), telemetry.observer
    if observer is None:
        return await _run_until_committed(bucket, fn, patience)
    with observer.begin(telemetry.Kind.TRANSACTION, bucket.context.connection, stream=bucket.stream):
        return await _run_until_committed(bucket, fn, patience)


async def _run_until_committed(
    bucket: Bucket, fn: Callable[[Transaction], Awaitable[_Result]], patience: float
) -> Committed[_Result]:
    retry = Retry(patience, first_pause=_FIRST_PAUSE, jitter=True, transient=_may_run_again)
    retry.start()
    source, run = f"bucket {bucket.name!r}", 0
    while True:
        run += 1
        log_state(_log, source, "run begun", number=run)
        errors: list[Exception] = []
        tx = Transaction(bucket, errors)
        returned = False
        try:
            result: _Result = await _started(fn(tx), fn)
            returned = True
            if tx.state == "open":
                await _commit_once(tx, bucket, retry)
            return Committed(result, max(tx.revisions.values(), default=0))
        except Exception as error:
            if tx.state in ("committed", "unknown") or not (returned or _consists_of(error, errors)):
                raise
            failure = error
            log_state(_log, source, "run failed", number=run, error=error)
        finally:
            await tx.discard()
        await retry.pause_if_transient(failure)


async def _commit_once(tx: Transaction, bucket: Bucket, retry: Retry) -> None:
    """Commit, and find out what the commit did if its answer is lost."""
    try:
        await tx.commit()
        return
    except BatchOutcomeUnknownError as error:
        unknown = error
    while tx.state == "unknown":
        await retry.pause_until_deadline(unknown)
        try:
            if not retry.over:  # else the next pause raises
                await tx.resolve(timeout=retry.remaining)
        except Exception as error:
            if tx.state != "unknown":
                raise
            unknown = _unknown(bucket, unknown.batch_id, error)
            cause = unknown.__cause__
            if cause is not None and not may_be_known_later(cause):
                raise unknown from cause
    if tx.state == "failed":
        raise BatchAbandonedError(
            f"bucket {bucket.name!r}: nothing was written, because the commit was lost; run the transaction again",
            batch_id=unknown.batch_id,
            outcome="not_stored",
        ) from unknown


def _started(running: object, fn: object) -> Awaitable[Any]:
    """Return what `fn` returned; raise TypeError unless it can be awaited."""
    if not isawaitable(running):
        name = getattr(fn, "__qualname__", type(fn).__name__).rpartition(".")[2]
        raise TypeError(
            f"fn must be an async function: {name}() returned {type(running).__name__}, which cannot be awaited; nothing was "
            "written; define it with `async def`"
        )
    return running


def _consists_of(error: Exception, errors: Iterable[Exception]) -> bool:
    """Return whether `error` is one of `errors`, or a group of nothing else."""
    if isinstance(error, ExceptionGroup):
        return all(_consists_of(each, errors) for each in error.exceptions)
    return any(error is each for each in errors)


def _may_run_again(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):
        return all(map(_may_run_again, error.exceptions))
    if isinstance(error, KeyConflictError):
        return error.stale_read
    return is_transient(error) or isinstance(error, StreamRecreatedError)  # the next run reads the new bucket


def _unknown(bucket: Bucket, batch_id: str, error: Exception) -> BatchOutcomeUnknownError:
    """Return the error to raise for `error`, which says nothing about the commit whose answer was lost before."""
    if isinstance(error, BatchOutcomeUnknownError):
        return error
    unknown = BatchOutcomeUnknownError(
        f"bucket {bucket.name!r}: either everything is written or nothing; the answer to the commit was lost, and finding out "
        f"its outcome failed ({type(error).__name__}); read the keys to see which",
        batch_id=batch_id,
        outcome="unknown",
    )
    unknown.__cause__ = error
    return unknown
