"""Transactions: many operations on a bucket, committed at once, on condition of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, Self

from nats.js.kv import KeyValue
from nats.nuid import NUID

from jetstream_ext.client.api import lookup_stream
from jetstream_ext.client.atomic import AtomicBatch, publish_atomic
from jetstream_ext.errors import (
    AtomicPublishDisabledError,
    AtomicPublishDuplicateMessageIDError,
    AtomicPublishIncompleteError,
    AtomicPublishTooLargeError,
    BatchClosedError,
    BatchServerError,
    MessageTooLargeError,
    MessageTTLDisabledError,
    WrongLastSequenceError,
)
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.kv.keys import check_key, check_keys
from jetstream_ext.kv.staging import Staged, Staging
from jetstream_ext.protocol.feature_table import FENCED_BATCHES
from jetstream_ext.types import TTL, BatchAck, BatchMessage

State = Literal["open", "committed", "failed", "discarded", "unknown"]

_MENDS: Final = 3
"""How often a commit is tried again because a key that was to be created had left a marker meanwhile."""


class Transaction:
    """Operations on one bucket that are committed all at once or not at all; made by `transaction`.

    `put`, `create`, `update`, `delete` and `purge` only take note. `get` and `get_many` read the newest state at the
    bucket's leader, together with the transaction's own operations, and make the commit conditional: it succeeds only
    if every key that was read, or found missing, is still at the revision that was read. What is committed is as if
    the whole transaction had happened at that one moment (serialisable).

    One message is written per key, whatever the operations on it; its headers are those that nats-py writes.
    """

    def __init__(self, bucket: Bucket, *, with_id: bool = False) -> None:
        self._bucket = bucket
        self._staging = Staging(bucket.prefix, max_payload=bucket.js.connection.max_payload)
        self._batch_id = NUID().next().decode()
        self._with_id = with_id
        self._batch: AtomicBatch | None = None
        self._messages: list[BatchMessage] = []
        self._state: State = "open"
        self._revisions: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Transaction on {self._bucket.name!r} of {len(self._staging.writes)} keys, {self._state}>"

    @property
    def state(self) -> State:
        """``"open"``, ``"committed"``, ``"failed"`` (nothing written), ``"discarded"`` or ``"unknown"``."""
        return self._state

    @property
    def revisions(self) -> dict[str, int]:
        """The new revision of every key that was written; empty before the commit."""
        return self._revisions.copy()

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, *, ttl: TTL | None = None) -> None:
        """Write a value, whatever the key was.

        Args:
            key: The key.
            value: Its value.
            ttl: How long it lives; whole seconds from 1, a timedelta, or `NEVER`. A value that expires replaces the
                key's history, because the server would bring back what came before it.

        Raises:
            nats.js.errors.InvalidKeyError, MaxPayloadError, ValueError, TypeError: Refused; nothing changed.
        """
        self._open()
        self._staging.put(key, value, ttl)

    def create(self, key: str, value: bytes, *, ttl: TTL | None = None) -> None:
        """Write a value if the key does not exist; otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction knows already that it exists.
            nats.js.errors.InvalidKeyError, MaxPayloadError, ValueError, TypeError: As for `put`.
        """
        self._open()
        self._staging.create(key, value, ttl)

    def update(self, key: str, value: bytes, *, last: int, ttl: TTL | None = None) -> None:
        """Write a value if the key is at revision `last` (0: it has never existed); otherwise the commit fails.

        Raises:
            KeyConflictError: The transaction knows already that it is not.
            ValueError: The transaction has written the key before; or as for `put`.
            nats.js.errors.InvalidKeyError, MaxPayloadError, TypeError: As for `put`.
        """
        self._open()
        self._staging.update(key, value, last, ttl)

    def delete(self, key: str, *, last: int | None = None) -> None:
        """Leave a delete marker, on condition of revision `last` if that is given; the key's history stays.

        Raises:
            KeyConflictError, ValueError, nats.js.errors.InvalidKeyError, TypeError: As for `update`.
        """
        self._open()
        self._staging.delete(key, last)

    def purge(self, key: str, *, last: int | None = None, ttl: TTL | None = None) -> None:
        """Leave a purge marker in place of the key's history, on condition of revision `last` if that is given.

        Args:
            key: The key.
            last: The revision that it must be at.
            ttl: How long the marker stays; None is for ever.

        Raises:
            KeyConflictError, ValueError, nats.js.errors.InvalidKeyError, TypeError: As for `update`.
        """
        self._open()
        self._staging.purge(key, last, ttl)

    # -- reading ------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValueEntry | None:
        """Return the entry of a key, or None where it does not exist, and make the commit conditional on it.

        A key that was read before is not read again. A value that this transaction has written comes back with
        revision 0, and adds no condition.

        Raises:
            nats.js.errors.InvalidKeyError: No client would take such a key.
            RequestTimeoutError, nats.js.errors.ServiceUnavailableError: The bucket's leader does not answer.

        Cancellation: Safe; the transaction stays usable.
        """
        self._open()
        check_key(key)
        return (await self._get((key,))).get(key)

    async def get_many(self, keys: Iterable[str]) -> dict[str, KeyValueEntry]:
        """Return the entries of several keys, without those that do not exist; errors and cancellation as for `get`."""
        self._open()
        wanted = check_keys(keys)
        found = await self._get(wanted)
        return {key: found[key] for key in wanted if key in found}

    async def _get(self, keys: Iterable[str]) -> dict[str, KeyValueEntry]:
        staging = self._staging
        new = [key for key in keys if key not in staging.writes and key not in staging.reads]
        for key, entry in (await self._bucket.look_up(new)).items():
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

    # -- the end ------------------------------------------------------------------------------------------------

    async def commit(self) -> dict[str, int]:
        """Commit, and return the new revisions; leaving the ``async with`` block does that.

        A transaction that writes nothing has nothing to commit, but makes sure that all it has read was there at one
        moment.

        Raises:
            KeyConflictError: A key is not as it was read, or as an operation expects it; nothing is written. Its
                `keys` says which.
            BatchOutcomeUnknownError: The answer was lost. Either all is written or nothing; `resolve` may find out.
            AtomicPublishDisabledError: The bucket does not allow atomic batches; `enable` turns them on.
            MessageTTLDisabledError: The bucket does not allow times to live; `enable` turns them on.
            MessageTooLargeError: A value is larger than the bucket allows; the error names its key.
            BatchError: Any other refusal; nothing is written.
            UnsupportedFeatureError: The server is older than 2.12.1.

        Cancellation: Nothing is written, unless the commit was on its way already (`state` is ``"unknown"`` then).
        """
        self._open()
        self._state = "failed"
        try:
            if self._staging.writes:
                await self._commit()
            else:
                await self._check_reads()
        finally:
            if self._state == "failed" and self._batch is not None and self._batch.state == "unknown":
                self._state = "unknown"
        self._state = "committed"
        return self.revisions

    async def _commit(self) -> None:
        staging = self._staging
        await self._check_server()
        for mended in range(_MENDS + 1):
            fence = await self._find_fence() if staging.needs_fence else None
            self._messages = staging.messages(fence=fence, msg_id=self._batch_id if self._with_id else None)
            self._batch = batch = AtomicBatch(
                self._bucket.context,
                batch_id=self._batch_id,
                ack_first=not self._with_id,
                timeout=self._bucket.timeout,
            )
            try:
                await batch.add_many(self._messages)
                self._accept(await batch.commit_eob())
                return
            except WrongLastSequenceError as refusal:
                conflict = staging.refused(await self._bucket.look_up(staging.expectations))
                if conflict is not None or mended == _MENDS:
                    raise conflict or refusal from refusal
            except BatchServerError as refusal:
                limit = -1
                if isinstance(refusal, AtomicPublishIncompleteError):
                    limit = int((await self._bucket.state(direct=False)).config.get("max_msg_size", -1))
                raise explained(refusal, self._bucket.name, staging.writes, limit) from refusal.__cause__
            finally:
                await batch.discard()
            self._batch_id = NUID().next().decode()

    async def _check_server(self) -> None:
        """Refuse a server that checks the expectations of a batch against the wrong messages."""
        bucket = self._bucket
        owner = await lookup_stream(
            bucket.js, bucket.subject(next(iter(self._staging.writes))), bucket.stream, bucket.timeout
        )
        version = (owner[0].server_version if owner else None) or bucket.js.connection.server_version
        FENCED_BATCHES.check(version, "nothing was written")

    def _accept(self, ack: BatchAck) -> None:
        first = ack.seq - len(self._messages) + 1
        self._revisions = {key: first + i for i, key in enumerate(self._staging.writes)}

    async def resolve(self, *, timeout: float | None = None) -> Literal["stored", "not_stored"]:
        """Find out, after a `BatchOutcomeUnknownError`, whether the transaction is written; see `AtomicBatch.resolve`.

        Raises:
            BatchOutcomeUnknownError: It cannot be known, or not yet.
            BatchClosedError: The outcome is known already.

        Cancellation: Safe; the outcome stays unknown, and can be asked for again.
        """
        if self._state != "unknown" or self._batch is None:
            raise BatchClosedError(f"the outcome of this transaction is known: {self._state}", batch_id=self._batch_id)
        outcome = await self._batch.resolve(timeout=timeout)
        if outcome == "stored":
            assert self._batch.ack is not None
            self._accept(self._batch.ack)
        self._state = "committed" if outcome == "stored" else "failed"
        return outcome

    @property
    def can_repeat(self) -> bool:
        """Whether the same commit can be sent once more and count once."""
        return self._with_id and self._state == "unknown"

    async def repeat(self) -> None:
        """Send the same commit once more; the message id in it keeps it from counting twice.

        Raises:
            BatchOutcomeUnknownError: The answer was lost again.
            KeyConflictError: It had not been written, and cannot be any more.
            BatchError: It had not been written, and the server refused it now.

        Cancellation: The outcome stays unknown; `resolve` finds it out.
        """
        assert self.can_repeat
        try:
            ack = await publish_atomic(
                self._bucket.context, self._messages, batch_id=self._batch_id, timeout=self._bucket.timeout
            )
        except AtomicPublishDuplicateMessageIDError:
            pass  # it was written, and others have written to its keys since
        except WrongLastSequenceError as refusal:
            self._state = "failed"
            conflict = self._staging.refused(await self._bucket.look_up(self._staging.expectations))
            raise conflict or refusal from refusal
        else:
            self._accept(ack)
        self._state = "committed"

    async def discard(self) -> None:
        """Give it up; nothing is written.

        Cancellation: Sends nothing and waits for nothing.
        """
        if self._state == "open":
            self._state = "discarded"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.discard()
        elif self._state == "open":
            await self.commit()

    def _open(self) -> None:
        if self._state != "open":
            outcome: Literal["stored", "not_stored", "unknown"] = (
                "stored" if self._state == "committed" else "unknown" if self._state == "unknown" else "not_stored"
            )
            raise BatchClosedError(
                f"the transaction has ended ({self._state})", batch_id=self._batch_id, outcome=outcome
            )

    # -- conditions that no message can carry -------------------------------------------------------------------

    async def _find_fence(self) -> int:
        """Return a revision of the bucket at which all that was read was so."""
        state = await self._bucket.state(direct=False)
        await self._check_reads()
        return state.last_seq

    async def _check_reads(self) -> None:
        """Make sure that all that was read was so between the last read and now."""
        staging = self._staging
        if staging.reads and not staging.writes and not any(staging.reads.values()):
            await self._bucket.state(direct=False)  # or nothing is there because the keys have another prefix
        if len(staging.reads) < 2 and not staging.writes:
            return  # one key is as it was when it was read
        conflict = staging.moved(await self._bucket.look_up(staging.reads))
        if conflict is not None:
            raise conflict


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
        BatchError: At the exit: as for `Transaction.commit`.

    Cancellation: Nothing is written, unless the commit was on its way already.

    Requires: nats-server 2.12.1, ``allow_atomic``, permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``. A server takes
        1000 keys at a time.
    """
    return Transaction(Bucket(kv, timeout))


def explained(
    refusal: BatchServerError, bucket: str, writes: Mapping[str, Staged], max_value_size: int
) -> BatchServerError:
    """Return a refusal of a transaction, with the key it is about and what the caller can do.

    Args:
        refusal: What the server said.
        bucket: The bucket's name.
        writes: What was to be written.
        max_value_size: The bucket's limit in bytes, where it matters; -1: none.
    """
    if isinstance(refusal, AtomicPublishDisabledError):
        return _again(
            refusal,
            f"bucket {bucket!r} does not allow atomic batches, which transactions are made of; turn them on once, "
            "with `await jetstream_ext.kv.enable(kv, atomic=True)`",
        )
    if isinstance(refusal, MessageTTLDisabledError):
        keys = ", ".join(repr(key) for key, staged in writes.items() if staged.ttl is not None)
        return _again(
            refusal,
            f"bucket {bucket!r} does not allow times to live (key {keys}); turn them on once, "
            "with `await jetstream_ext.kv.enable(kv, ttl=True)`",
        )
    if isinstance(refusal, AtomicPublishTooLargeError):
        return _again(
            refusal, f"bucket {bucket!r}: {len(writes)} keys are more than the server takes at once: {refusal}"
        )
    if isinstance(refusal, AtomicPublishIncompleteError):
        # No caller is awaiting the refusal of a message that is too large, so the batch is then incomplete.
        for key, staged in writes.items():
            if 0 <= max_value_size < len(staged.value):
                return MessageTooLargeError(
                    f"key {key!r}: {len(staged.value)} bytes are over the {max_value_size} that bucket {bucket!r} allows",
                    code=400,
                    err_code=10054,
                    description="message size exceeds maximum allowed",
                    batch_id=refusal.batch_id,
                    outcome="not_stored",
                )
    return refusal


def _again(refusal: BatchServerError, message: str) -> BatchServerError:
    return type(refusal)(
        message,
        code=refusal.code,
        err_code=refusal.err_code,
        description=refusal.description or "",
        batch_id=refusal.batch_id,
        outcome="not_stored",
    )
