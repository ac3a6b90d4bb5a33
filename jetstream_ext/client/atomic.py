"""Atomic batches for nats-py users (ADR-50)."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import Final, Literal, Self, Unpack

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.context import Context
from jetstream_ext.errors import AtomicPublishDuplicateMessageIDError
from jetstream_ext.protocol.atomic import State
from jetstream_ext.protocol.options import check_message
from jetstream_ext.types import BatchAck, BatchMessage, Entry, PublishOptions

BatchState = Literal["open", "committed", "discarded", "failed", "unknown"]

_PUBLIC_STATES: Final[dict[State, BatchState]] = {
    State.NEW: "open",
    State.OPEN: "open",
    State.COMMITTING: "open",
    State.COMMITTED: "committed",
    State.DISCARDED: "discarded",
    State.FAILED: "failed",
    State.UNKNOWN: "unknown",
}


class AtomicBatch:
    """Store many messages of one stream all at once, or none of them (ADR-50).

    Use it as an async context manager: a clean exit commits and leaves the server's ack in `ack`, an exception (and a
    cancellation) discards. If the batch failed inside the block and the error was caught there, a clean exit raises it
    again, unless `discard` was called. Without ``async with``, end it by `commit`, `commit_eob` or `discard`. The server
    drops a batch that is idle for 10 s, and by default takes 1000 messages per batch and 50 open batches per stream.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None makes one.
        ack_first: Wait for the server's reply to the first message, which is where most refusals show.
        ack_every: Wait for the reply to every n-th message; None is every 1000th. Without it a caller could add to a
            batch indefinitely that the server has dropped.
        timeout: Seconds to wait for a reply; None is the context's timeout.

    Raises:
        ValueError, TypeError: An argument is out of its range or of another type.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """

    def __init__(
        self,
        js: JetStreamContext,
        *,
        batch_id: str | None = None,
        ack_first: bool = True,
        ack_every: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(ack_first, bool):
            raise TypeError(f"ack_first must be a bool, not {type(ack_first).__name__}")
        if ack_every is not None and (isinstance(ack_every, bool) or not isinstance(ack_every, int) or ack_every < 1):
            raise ValueError(f"ack_every must be an integer from 1 up, not {ack_every!r}")
        self._session = AtomicSession(Context(js), batch_id, timeout, ack_first=ack_first, ack_every=ack_every)

    def __repr__(self) -> str:
        return f"<AtomicBatch batch_id={self.batch_id!r} size={self.size} state={self.state!r}>"

    @property
    def batch_id(self) -> str:
        """The batch's id; the stored messages keep it in ``Nats-Batch-Id``."""
        return self._session.machine.batch_id

    @property
    def size(self) -> int:
        """How many messages the batch will store."""
        return self._session.machine.size

    @property
    def state(self) -> BatchState:
        """``"open"``, ``"committed"``, ``"discarded"``, ``"failed"`` (nothing stored) or ``"unknown"``."""
        return _PUBLIC_STATES[self._session.machine.state]

    @property
    def ack(self) -> BatchAck | None:
        """The server's ack once the batch is committed."""
        return self._session.machine.ack

    async def add(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        ack: bool | None = None,
        **options: Unpack[PublishOptions],
    ) -> None:
        """Add one message; it is stored when the batch is committed.

        Everything that can be checked here is, before the message takes a sequence: a refused call changes nothing.
        Expectations are checked by the server, at commit.

        Args:
            subject: Where it will be stored.
            payload: Its bytes.
            ack: Whether to wait for the server's reply to this message; None follows `ack_first` and `ack_every`.
            options: As for `BatchMessage`. `expected_last_seq` may be on the first message only, and
                `expected_last_subject_seq` not on a subject written earlier in the batch. `msg_id` and
                `expected_last_subject_seq` need 2.12.1.

        Raises:
            BatchError: The server refused, or the batch had ended.
            UnsupportedFeatureError: The server is older than 2.12, or it is 2.12.0 and there is an
                `expected_last_subject_seq`; nothing was sent.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: The batch stays usable. If `size` counts the message, it is part of the batch.
        """
        message = BatchMessage(subject, payload, **options)
        await self.add_message(message, ack=ack)

    async def add_message(self, message: BatchMessage, *, ack: bool | None = None) -> None:
        """Add one `BatchMessage`; arguments, errors and cancellation as for `add`."""
        check_message(message)
        if ack is not None and not isinstance(ack, bool):
            raise TypeError(f"ack must be a bool or None, not {type(ack).__name__}")
        await self._session.add(message, ack)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> None:
        """Add many messages, a block of them per write: the fast road.

        It waits for the last reply that it asks for, and for earlier ones only if the server is 1000 messages behind.
        The refusal of any message ends the batch.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an
                async iterable.

        Raises:
            BatchError, UnsupportedFeatureError: As for `add`.
            Exception: What `messages` raises, or why one of them was refused here, after everything before it was sent;
                the batch stays usable.

        Cancellation: The batch stays usable. What `size` counts is part of it.
        """
        await self._session.reply_to(await self._session.fill(messages))

    async def commit(
        self,
        subject: str,
        payload: bytes = b"",
        **options: Unpack[PublishOptions],
    ) -> BatchAck:
        """Add a last message, commit, and return the server's ack.

        Args:
            subject: Where the message will be stored.
            payload: Its bytes.
            options: As for `add`.

        Raises:
            BatchOutcomeUnknownError: The answer was lost; the batch is either stored whole or not at all.
            BatchError: The server refused, or the batch had ended; nothing is stored.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: `state` is ``"unknown"`` if the commit was sent, and ``"open"`` if it was not.
        """
        return await self._session.commit(BatchMessage(subject, payload, **options))

    async def commit_eob(self) -> BatchAck:
        """Commit what was added and return the server's ack.

        Raises:
            EmptyBatchError: Nothing was added.
            BatchOutcomeUnknownError, BatchError: As for `commit`.

        Cancellation: `state` is ``"unknown"`` if the commit was sent, and ``"open"`` if it was not.
        """
        return await self._session.commit(None)

    async def resolve(self, *, timeout: float | None = None) -> Literal["stored", "not_stored"]:
        """Find out, after a `BatchOutcomeUnknownError`, whether the batch is stored.

        It makes sure at the stream's leader that the commit can no longer be applied, then reads everything that was
        stored since the batch was opened. Then `state` is ``"committed"`` (and `ack` there) or ``"failed"``.
        After a commit that was refused because of its message ids (10201) it looks for an earlier batch with this id
        and its messages: ``"stored"`` then means that they were stored before.

        Args:
            timeout: Seconds that it may take; None is four times the batch's own, because the usual reason for a lost
                answer, an election, takes some seconds.

        Raises:
            BatchOutcomeUnknownError: It cannot be known: no leader answered, or messages were removed from the stream
                since that could have been the batch's. The error says which; calling again may help for the former.
            ValueError, TypeError: `timeout` is not over 0, or not a number.
            BatchError: The batch is still open, or is being committed.
            AtomicPublishDuplicateMessageIDError: No earlier batch with this id was found.
            RequestTimeoutError: The stream was not read to the end in time.

        Cancellation: Safe; nothing is left behind, and `resolve` can be called again.

        Requires: Permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
        """
        return "not_stored" if await self._session.resolve(timeout) is None else "stored"

    async def discard(self) -> None:
        """Discard the batch: nothing of it is stored, unless its commit was sent already. Safe at any time.

        Cancellation: Sends nothing and waits for nothing.
        """
        self._session.discard()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._session.leave()
        else:
            self._session.discard()


async def publish_atomic(
    js: JetStreamContext,
    messages: Iterable[Entry] | AsyncIterable[Entry],
    *,
    batch_id: str | None = None,
    timeout: float | None = None,
) -> BatchAck:
    """Store all `messages`, or none of them, and return the server's ack.

    Args:
        js: nats-py's JetStream context.
        messages: At least one ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an
            iterable or an async iterable. If it raises, nothing is stored.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None makes one. With an id of yours and a `msg_id` on every
            message the call can be repeated: if the batch was stored before, inside the stream's duplicate window,
            the ack of that one is returned.
        timeout: Seconds to wait for a reply; None is the context's timeout.

    Raises:
        EmptyBatchError: There were no messages.
        BatchOutcomeUnknownError: The answer was lost; the batch is either stored whole or not at all.
        BatchError: The server refused; nothing is stored.
        UnsupportedFeatureError: As for `AtomicBatch.add`; nothing is stored.
        BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: A message or an argument was refused
            here; nothing is stored.

    Cancellation: Nothing is stored, unless the commit was sent already.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """
    session = AtomicSession(Context(js), batch_id, timeout, in_one_go=True)
    try:
        await session.fill(messages)
        return await session.commit(None)
    except AtomicPublishDuplicateMessageIDError as refusal:
        if batch_id is None:
            raise  # no other batch can have this id
        try:
            ack = await session.resolve(None)
        except (nats.errors.Error, nats.js.errors.APIError) as unknown:
            raise refusal from unknown
        if ack is None:
            raise
        return ack
    finally:
        session.discard()
