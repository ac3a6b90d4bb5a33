"""Transactions: operations on a bucket that are committed together if nothing that was read has changed; and `touch`."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from inspect import isawaitable
from types import TracebackType
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeVar

from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from jetstream_ext.client import telemetry
from jetstream_ext.client.atomic import BatchState
from jetstream_ext.client.base_connection import NotPermittedError
from jetstream_ext.client.retry import Retry, is_transient
from jetstream_ext.errors import (
    BadHeaderError,
    BadSubjectError,
    BatchAbandonedError,
    BatchClosedError,
    BatchOutcomeUnknownError,
    KeyConflictError,
    MaxPayloadError,
    Outcome,
    RequestTimeoutError,
    StreamRecreatedError,
    WrongLastSequenceError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.commit import Commit, PublishWrite, Staged, conflict, exists, moved, revision_of
from jetstream_ext.kv.entries import ROLLUP_HEADERS, KeyValueEntry, Operation, check_key, check_keys, operation
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID, MSG_TTL, encode, is_instruction
from jetstream_ext.protocol.options import (
    check_function,
    check_seconds,
    check_sequence,
    message_headers,
    payload_bytes,
    ttl_value,
)
from jetstream_ext.protocol.subjects import check_subject
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import NEVER, TTL, BatchMessage, own_headers

_Result = TypeVar("_Result")

_log: Final = get_logger("kv")

_OUTCOMES: Final[dict[BatchState, Outcome]] = {"committed": "stored", "unknown": "unknown"}
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
        self._max_payload = bucket.context.connection.max_payload
        self._reads: dict[str, KeyValueEntry | None] = {}  # delete markers included; None: the key had no message
        self._writes: dict[str, Staged] = {}
        self._events: list[BatchMessage] = []
        self._commit: Commit | None = None
        self._state: BatchState = "open"
        self._revisions: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Transaction on {self._bucket.name!r} of {counted(len(self._writes), 'key')}, {self._state}>"

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
        self._stage("PUT", key, value, ttl)

    def create(self, key: str, value: bytes, *, ttl: TTL | None = None) -> None:
        """Write a value if the key does not exist; otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction has read or written the key, and it exists.
            BatchClosedError, nats.js.errors.InvalidKeyError, MaxPayloadError, ValueError, TypeError: As for `put`.
        """
        staged, found = self._writes.get(key), self._reads.get(key)
        known = staged or found
        if self._state == "open" and known is not None and known.operation == "PUT":
            why = exists(found.revision) if found and not staged else "this transaction already writes it"
            raise conflict(self._bucket, f"key {key!r} cannot be created, because {why}", (key,))
        self._stage("PUT", key, value, ttl, creates=True)

    def update(self, key: str, value: bytes, *, last: int, ttl: TTL | None = None) -> None:
        """Write a value if the key is at revision `last` (0: it has never existed); otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction has read another revision of the key.
            ValueError: The transaction has written the key before; or as for `put`.
            BatchClosedError, nats.js.errors.InvalidKeyError, MaxPayloadError, TypeError: As for `put`.
        """
        self._stage("PUT", key, value, ttl, last=check_sequence(last, "last", low=0))

    def delete(self, key: str, *, last: int | None = None) -> None:
        """Write a delete marker, if the key is at revision `last` (None: any); the key's history stays.

        Raises:
            KeyConflictError, BatchClosedError, ValueError, nats.js.errors.InvalidKeyError, TypeError: As for `update`.
        """
        self._stage("DEL", key, last=last)

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
        self._stage("PURGE", key, ttl=ttl, last=last)

    def _stage(
        self,
        operation: Operation,
        key: str,
        value: bytes = b"",
        ttl: TTL | None = None,
        *,
        last: int | None = None,
        creates: bool = False,
    ) -> None:
        """Stage an operation on a key that must be at revision `last` (None: any)."""
        self._check_open()
        check_key(key)
        value = payload_bytes(value, "the value of key", key)
        self._check_size(len(value), f"the value of key {key!r}")
        if ttl is not None:
            ttl_value(ttl)
        if last is not None:
            check_sequence(last, "last", low=0)
        expected = 0 if creates else last
        earlier = self._writes.get(key)
        if earlier is not None:
            if last is not None:
                raise ValueError(
                    f"bucket {self._bucket.name!r}: key {key!r} was already written in this transaction, so it has no revision "
                    "to compare with"
                )
            expected, creates = earlier.expected, earlier.creates
        elif key in self._reads:
            expected, creates = revision_of(self._reads[key]), False
            if last is not None and last != expected:
                raise conflict(self._bucket, moved(key, expected, last), (key,))
        self._writes[key] = Staged(operation, value, ttl, expected, creates)

    def _check_size(self, size: int, what: str) -> None:
        if size > self._max_payload:
            raise MaxPayloadError(
                f"bucket {self._bucket.name!r}: {what} has {size} bytes, more than the server's max_payload of "
                f"{self._max_payload}"
            )

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
        check_subject(subject)
        what = f"bucket {self._bucket.name!r}"
        if subject.startswith(("$", "_")):
            raise BadSubjectError(f"{what}: the subject of an event cannot begin with '$' or '_': {subject!r}")
        for name in headers or ():
            if is_instruction(name):
                raise BadHeaderError(f"{what}: an event cannot have the header {name!r}: servers would obey it")
        whole = f"{subject}.{time.time_ns():016x}{secrets.token_hex(5)}"
        event = BatchMessage(whole, payload_bytes(payload, "the payload on subject", subject), headers=headers)
        size = len(encode(message_headers(event))) + len(event.payload)
        self._check_size(size, f"with its headers, the event on {subject!r}")
        self._events.append(event)
        return whole

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
        new = [key for key in keys if key not in self._writes and key not in self._reads]
        if new:
            try:
                entries = await self._bucket.look_up(new)
            except Exception as error:
                self._errors.append(error)
                raise
            self._reads = entries | self._reads  # of concurrent reads of a key, the first one counts
        found: dict[str, KeyValueEntry] = {}
        for key in keys:
            entry, staged = self._reads.get(key), self._writes.get(key)
            if staged is not None:
                entry = KeyValueEntry(self._bucket.name, key, staged.value, 0, datetime.now(UTC), staged.operation)
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
            operation.describe(messages=len(self._writes))
            return await self._commit_and_settle()

    async def _commit_and_settle(self) -> dict[str, int]:
        self._check_open()
        self._state = "failed"
        log_state(_log, self._source, "commit begun", writes=len(self._writes), reads=len(self._reads))
        commit = self._commit = Commit(self._bucket, self._reads, self._writes, self._events)
        try:
            self._revisions = await commit.run()
        except BaseException as error:
            if isinstance(error, Exception):
                self._errors.append(error)
            self._enter("unknown" if commit.unknown else "failed", before="open", error=error)
            raise
        self._enter("committed", before="open")
        return self.revisions

    @property
    def _source(self) -> str:
        return f"transaction on {self._bucket.name!r}"

    @property
    def _batch_id(self) -> str:
        return "" if self._commit is None else self._commit.batch_id

    def _enter(self, state: BatchState, *, before: BatchState, error: BaseException | None = None) -> None:
        self._state = state
        log_state(_log, self._source, f"{before.upper()} -> {state.upper()}", batch=self._batch_id, error=error)

    async def resolve(self, *, timeout: float | None = None) -> Literal["stored", "not_stored"]:
        """Find out, after a `BatchOutcomeUnknownError`, whether the transaction is written; see `AtomicBatch.resolve`.

        Raises:
            BatchOutcomeUnknownError: It cannot be known, or not yet.
            BatchClosedError: The outcome is known already.

        Cancellation: Safe; the outcome stays unknown, and `resolve` can be called again.
        """
        if self._state != "unknown" or self._commit is None:
            raise BatchClosedError(
                f"this transaction is {self._state}; there is nothing to resolve", batch_id=self._batch_id
            )
        stored = await self._commit.resolve(timeout)
        self._revisions = stored or {}
        self._enter("failed" if stored is None else "committed", before="unknown")
        return "not_stored" if stored is None else "stored"

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
                await _commit_once(tx, source, retry)
            return Committed(result, max(tx.revisions.values(), default=0))
        except Exception as error:
            if tx.state in ("committed", "unknown") or not (returned or _consists_of(error, errors)):
                raise
            failure = error
            log_state(_log, source, "run failed", number=run, error=error)
        finally:
            await tx.discard()
        await retry.pause_if_transient(failure)


async def _commit_once(tx: Transaction, source: str, retry: Retry) -> None:
    """Commit, and find out what the commit did if its answer is lost."""
    try:
        await tx.commit()
        return
    except BatchOutcomeUnknownError as error:
        lost = error
    try:
        outcome = await tx.resolve(timeout=retry.remaining)
    except BatchOutcomeUnknownError:
        raise
    except Exception as error:
        raise BatchOutcomeUnknownError(
            f"{source}: either everything is written or nothing; the answer to the commit was lost, and finding out its outcome "
            f"failed ({type(error).__name__}); read the keys to see which",
            batch_id=lost.batch_id,
            outcome="unknown",
        ) from error
    if outcome == "not_stored":
        raise BatchAbandonedError(
            f"{source}: nothing was written, because the commit was lost; run the transaction again",
            batch_id=lost.batch_id,
            outcome="not_stored",
        ) from lost


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


async def touch(kv: KeyValue, key: str, ttl: TTL, *, timeout: float | None = None) -> int:
    """Give a key a new TTL, unless another client changes it meanwhile; return its new revision.

    Servers cannot extend the TTL of a stored message, so the call writes the value again, with the headers that it had:
    every value of each header, in order, except those whose name begins with ``Nats-``. NATS reserves these for the server,
    which would take them as instructions. (Names are case-sensitive, so ``nats-own`` stays.) A value that can expire
    replaces the key's history; otherwise its expiry would show the previous value again.

    Args:
        kv: nats-py's bucket.
        key: The key.
        ttl: Whole seconds from 1, a timedelta of whole seconds, or `NEVER`. The bucket's own TTL is an upper limit,
            except for `NEVER`.
        timeout: Seconds to wait for each answer; None is the context's own.

    Raises:
        nats.js.errors.KeyNotFoundError: There is no such key.
        nats.js.errors.BucketNotFoundError: There is no such bucket.
        nats.js.errors.BadBucketError: The bucket is a mirror, or the stream is not a bucket's; nothing was written.
        KeyConflictError: The key changed between the read and the write; nothing was written.
        MessageTTLDisabledError: The bucket does not allow TTLs; `enable` turns them on.
        MessageTooLargeError: The value with the headers for its TTL is larger than the bucket allows; nothing was written.
        MaxPayloadError: It is larger than the server's max_payload; nothing was written.
        NoStreamError: The bucket's leader is away, or the stream does not store the bucket's keys; nothing was written. It
            is also nats-py's ``NoStreamResponseError``.
        ServerError: The server refused the write for another reason: the bucket does not allow rollups (10111), is sealed
            (10109) or is full (10077). Nothing was written. The error is a nats-py ``APIError``, as those of nats-py's
            ``put`` are, and names the bucket and the reason.
        BadHeaderError: A header of the value has a name that clients must not send, or is not UTF-8, which nats-py cannot
            send; nothing was written.
        StreamConfigMismatchError: The key was not found, but the bucket's server does not find all that is stored, because
            the bucket has reached sequence 2**62. Only a client with permission for ``STREAM.INFO`` notices.
        UnsupportedFeatureError: The server is older than 2.11, and would never let the key expire; nothing was written.
        nats.js.errors.InvalidKeyError, ValueError, TypeError: Invalid argument; nothing was sent.
        RequestTimeoutError: No answer within `timeout`; the key may have been written.
        nats.js.errors.ServiceUnavailableError: No JetStream answers; nothing was written.

    Cancellation: The key may have been written.

    Requires: nats-server 2.11, ``allow_msg_ttl`` and ``allow_rollup_hdrs`` (nats-py's buckets have both), permission for
        ``STREAM.MSG.GET``.
    """
    check_key(key)
    ttl_value(ttl)
    bucket = Bucket(kv, timeout)
    subject = bucket.subject(key)
    found = await bucket.get_at_leader(last_by_subj=subject)
    if found is None or operation(found.headers)[0] != "PUT":
        with contextlib.suppress(NotPermittedError):
            await bucket.state(direct=False)
        raise KeyNotFoundError(message=f"key {key!r} of bucket {bucket.name!r}")
    # By its message id, the server would take the call for a duplicate of the value.
    replaced = {MSG_ID, MSG_TTL}
    pairs = [pair for pair in _text_headers(bucket, key, found) if pair[0] not in replaced]
    if ttl is not NEVER:
        pairs += ROLLUP_HEADERS.items()
    copy = BatchMessage(
        subject, found.data, headers=own_headers(pairs), msg_ttl=ttl, expected_last_subject_seq=found.seq
    )
    try:
        return (await PublishWrite(bucket, copy).store()).seq
    except WrongLastSequenceError as refusal:
        raise KeyConflictError(
            f"bucket {bucket.name!r}: another client changed key {key!r} during touch(), so it is no longer at revision "
            f"{found.seq}; nothing was written",
            keys=(key,),
            description=refusal.description,
        ) from refusal
    except BatchOutcomeUnknownError as lost:
        raise RequestTimeoutError(
            f"bucket {bucket.name!r}: no answer within {bucket.timeout:g} s; key {key!r} may have been written"
        ) from lost


def _text_headers(bucket: Bucket, key: str, message: StoredMsg) -> list[tuple[str, str]]:
    """Return the stored headers that a copy has; raise BadHeaderError if one is not UTF-8."""
    pairs: list[tuple[str, str]] = []
    for name, value in message.raw_headers:
        try:
            pairs.append((name.decode(), value.decode()))
        except UnicodeDecodeError as error:
            raise BadHeaderError(
                f"bucket {bucket.name!r}: the header {name.decode('utf-8', 'backslashreplace')!r} of key {key!r} is not UTF-8 "
                f"({value[:64]!r}), which nats-py cannot send; nothing was written, and the key keeps its earlier TTL; put the "
                "value again with its new TTL (a transaction with put(ttl=...)), without that header"
            ) from error
    return [pair for pair in pairs if not is_instruction(pair[0])]
