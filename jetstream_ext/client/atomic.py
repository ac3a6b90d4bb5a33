"""Atomic batches (ADR-50): `AtomicBatch`, `publish_atomic`, `publish_atomic_many` and `watch_abandoned`."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, cast

import nats.errors
from nats.js import JetStreamContext

from jetstream_ext.client import telemetry
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription, weakly
from jetstream_ext.client.connection import Context
from jetstream_ext.errors import BadSubjectError, MessageTooLargeError, ResponseError
from jetstream_ext.protocol.api import ABANDONED, parse_abandoned
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import check_int
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.text import get_logger, log_state
from jetstream_ext.types import AbandonedBatch, BatchAck, BatchMessage, Entry, PublishOptions

Messages = Iterable[Entry] | AsyncIterable[Entry]
BatchState = Literal["open", "committed", "discarded", "failed", "unknown"]

_log = get_logger("atomic")
_PENDING_LIMIT: Final = 65_536


class AtomicBatch:
    """Store many messages of one stream all at once, or none of them (ADR-50).

    Use it as an async context manager: a clean exit commits the batch and sets `ack` to the server's ack; an exception
    or a cancellation discards it. If the batch failed inside the block and the error was caught there, a clean exit
    raises it again, unless `discard` was called. Without ``async with``, end it by `commit`, `commit_eob` or `discard`.
    By default the server drops a batch that is idle for 10 s, and takes 1000 messages per batch and 50 open batches per
    stream.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        timeout: Seconds that a call may take: to wait for the calls before it, to look up the stream, to wait for room in the
            connection's write buffer, and for the reply. `add_many` may take as long for each of its writes and for the last
            reply. None is the context's timeout.

    Raises:
        ValueError, TypeError: An argument is out of its range or of another type.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """

    _observed = True  # whether an observer is told about the calls of this batch

    def __init__(
        self,
        js: JetStreamContext,
        *,
        timeout: float | None = None,
    ) -> None:
        self._session = AtomicSession(Context(js), timeout)

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
        machine = self._session.machine
        return cast("BatchState", machine.state.value) if machine.ended else "open"

    @property
    def ack(self) -> BatchAck:
        """The server's ack of the commit, which is there after a clean exit of the block.

        Raises:
            BatchError: The batch is still open, was discarded, or ended with this error.
        """
        return self._session.machine.result()

    async def add(self, subject: str, payload: bytes = b"", **options: Unpack[PublishOptions]) -> None:
        """Add one message; it is stored when the batch is committed. The first call waits for the server's reply.

        The message is checked before it takes a sequence: a refused call changes nothing. Concurrent calls add in the
        order in which they were made. The server checks expectations at commit.

        Args:
            subject: The message's subject.
            payload: Its bytes.
            options: As for `BatchMessage`. Only the first message can have `expected_last_seq`, and a subject that was
                written earlier in the batch cannot have `expected_last_subject_seq`. `msg_id` and
                `expected_last_subject_seq` need 2.12.1.

        Raises:
            BatchError: The server refused a message of the batch, or the batch had ended.
            MessageTooLargeError: The message is larger than the stream's ``max_msg_size``; the batch stays open.
            UnsupportedFeatureError: The server is older than 2.12, or it is 2.12.0 and there is an
                `expected_last_subject_seq`; nothing was sent.
            BadSubjectError: The subject is invalid or too long (about 4000 bytes), or another stream stores it.
            BadHeaderError, MaxPayloadError, ValueError, TypeError: The message cannot be sent.
            RequestTimeoutError: The message was not added within `timeout`, and the batch stays open: the connection took
                nothing, or the calls before this one have not ended.

        Cancellation: The batch stays usable. If `size` counts the message, it is part of the batch.
        """
        session, message = self._session, BatchMessage(subject, payload, **options)
        if telemetry.observer is None:
            await session.add(message)
        else:
            with session.call(telemetry.Kind.SEND, subject, observed=self._observed) as call:
                call.messages = 1
                await session.add(message, call.trace)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> None:
        """Add many messages, with one write for many of them; much faster than `add`.

        The call waits for the last reply that it requests, and for earlier ones only if the server is 1000 messages
        behind. If the server refuses any message, the batch ends.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or an
                async iterable.

        Raises:
            BatchError, UnsupportedFeatureError: As for `add`.
            Exception: What `messages` raises, or the error of a message that cannot be sent. Everything before it was
                sent; the batch stays usable.

        Cancellation: The batch stays usable. The messages that `size` counts are part of it.
        """
        with self._session.call(telemetry.Kind.SEND, observed=self._observed) as call:
            await self._session.add_many(messages, call)

    async def commit(self, subject: str, payload: bytes = b"", **options: Unpack[PublishOptions]) -> BatchAck:
        """Add a last message (arguments as for `add`), commit, and return the server's ack.

        Raises:
            BatchOutcomeUnknownError: The answer was lost: either all messages are stored, or none. See `resolve`.
            BatchError: The server refused, or the batch had ended; nothing is stored.
            RequestTimeoutError: As for `add` and `commit_eob`; the commit was not sent. `commit` can be called again, and
                waits again for what did not come.
            UnsupportedFeatureError, BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: As for `add`.

        Cancellation: `state` is ``"unknown"`` if the commit was sent, and ``"open"`` if it was not; then as after a
            RequestTimeoutError.
        """
        return await self._commit(BatchMessage(subject, payload, **options))

    async def commit_eob(self) -> BatchAck:
        """Commit without another message, and return the server's ack.

        Raises:
            EmptyBatchError: Nothing was added.
            BatchOutcomeUnknownError, BatchError: As for `commit`.
            RequestTimeoutError: The calls before this one have not ended within `timeout`, or the connection has no room; the
                commit was not sent.

        Cancellation: As for `commit`.
        """
        return await self._commit(None)

    async def _commit(self, message: BatchMessage | None) -> BatchAck:
        with self._session.call(telemetry.Kind.COMMIT, observed=self._observed) as call:
            try:
                return await self._session.commit(message, call.trace)
            finally:
                call.messages = self.size

    async def resolve(self, *, timeout: float | None = None) -> Literal["stored", "not_stored"]:
        """Find out, after a `BatchOutcomeUnknownError`, whether the batch is stored.

        The call makes sure at the stream's leader that the commit can no longer be applied, then reads everything that
        was stored since the batch was opened. It sets `state` to ``"committed"`` (and `ack`) or to ``"failed"``.

        Args:
            timeout: Seconds that the call may take; None is four times the batch's own, because an election, the usual
                reason for a lost answer, takes some seconds.

        Raises:
            BatchOutcomeUnknownError: The outcome cannot be known: no leader answered (a later call may succeed), or
                messages that could have been the batch's were removed from the stream since. The error says which.
            ValueError, TypeError: `timeout` is not over 0, or not a number.
            BatchError: The batch is still open, or is being committed.

        Cancellation: Safe; `resolve` can be called again.

        Requires: Permission for ``STREAM.INFO`` and ``STREAM.MSG.GET``.
        """
        return "not_stored" if await self._session.resolve(timeout) is None else "stored"

    async def discard(self) -> None:
        """Discard the batch: nothing of it is stored, unless its commit was sent already. Safe at any time.

        Cancellation: Cannot occur: the call never suspends.
        """
        self._session.discard()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        if kind is not None:
            session.discard()
        else:
            commits = self.size > 0 and not session.machine.ended
            with session.call(telemetry.Kind.COMMIT, observed=self._observed and commits) as call:
                call.messages = self.size
                await session.finish()


async def publish_atomic(
    js: JetStreamContext,
    messages: Iterable[Entry] | AsyncIterable[Entry],
    *,
    timeout: float | None = None,
) -> BatchAck:
    """Store all `messages`, or none of them, and return the server's ack.

    Args:
        js: nats-py's JetStream context.
        messages: At least one ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an
            iterable or an async iterable. If it raises, nothing is stored.
        timeout: Seconds that the call may take, without those in which it waits for `messages`; None is the context's
            timeout.

    Raises:
        EmptyBatchError: There were no messages.
        BatchOutcomeUnknownError: The answer was lost: either all messages are stored, or none.
        AtomicPublishDuplicateMessageIDError: The stream has a message with the `msg_id` of one of them, within its
            ``duplicate_window``. If every call has its own ids, this batch was stored by an earlier call.
        MessageTooLargeError: A message is larger than the stream's ``max_msg_size``; nothing is stored. Without permission
            for ``STREAM.INFO``, an AtomicPublishIncompleteError, because servers drop such a message without a word.
        BatchError: The server refused; nothing is stored.
        UnsupportedFeatureError, RequestTimeoutError: As for `AtomicBatch.add`; nothing is stored.
        BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: A message cannot be sent, or an argument
            is invalid; nothing is stored.

    Cancellation: Nothing is stored, unless the commit was sent already.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """
    try:
        return await _publish_one(js, messages, timeout)
    except (BadSubjectError, MessageTooLargeError):
        if not isinstance(messages, Sequence):
            raise
        return await _publish_one(js, messages, timeout)  # the stream may have changed since it was last looked up


async def _publish_one(js: JetStreamContext, messages: Messages, timeout: float | None) -> BatchAck:
    session = AtomicSession(Context(js), timeout, in_one_go=True)
    with session.call(telemetry.Kind.SEND) as call:
        try:
            await session.fill(messages, call)
            return await session.commit(None)
        finally:
            session.discard()


class AtomicBatches:
    """The acks of many batches, in order; returned by `publish_atomic_many`.

    Await it for the list of acks, or iterate over it for each ack as it arrives. A batch is taken from the source when
    fewer than `in_flight` commits are unanswered. Close an iteration that ends early with `aclose`.
    """

    def __init__(self, acks: AsyncGenerator[BatchAck, None]) -> None:
        self._acks = acks
        self._listed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchAck:
        return await self._acks.__anext__()

    def __await__(self) -> Generator[Any, None, list[BatchAck]]:
        return self.to_list().__await__()

    async def to_list(self) -> list[BatchAck]:
        """Publish everything and return all acks.

        Raises:
            RuntimeError: The acks were awaited before.
            BatchError, UnsupportedFeatureError: As for `publish_atomic_many`.

        Cancellation: As for `publish_atomic_many`.
        """
        if self._listed:
            raise RuntimeError(
                "this result of publish_atomic_many() was already consumed; call publish_atomic_many again"
            )
        self._listed = True
        try:
            return [ack async for ack in self._acks]
        finally:
            await self._acks.aclose()

    async def aclose(self) -> None:
        """Stop taking batches; those whose commit was sent may still be stored.

        Cancellation: As for `publish_atomic_many`.
        """
        await self._acks.aclose()


def publish_atomic_many(
    js: JetStreamContext,
    batches: Iterable[Messages] | AsyncIterable[Messages],
    *,
    in_flight: int = 4,
    timeout: float | None = None,
) -> AtomicBatches:
    """Store many batches, each whole or not at all, with several commits in flight.

    ``acks = await publish_atomic_many(js, batches)``, or ``async for ack in publish_atomic_many(js, batches)``. The
    batches are committed in their order, and the acks arrive in that order. If a batch fails, no further one is started,
    and the error is raised when the commits in flight are answered: **they may be stored**, although an earlier batch is
    not (a note on the error says which). For "all in order or stop" use `publish_atomic` in a loop.

    Args:
        js: nats-py's JetStream context.
        batches: The messages of each batch, as for `publish_atomic`, from an iterable or an async iterable.
        in_flight: How many commits may be unanswered, from 1. Each open batch counts against the server's limits.
        timeout: For each batch, as for `publish_atomic`.

    Returns:
        The acks, to await or to iterate over.

    Raises:
        ValueError, TypeError: An argument is out of its range or of another type.
        EmptyBatchError, BatchOutcomeUnknownError, BatchError, UnsupportedFeatureError: As for `publish_atomic`; raised
            when the result is awaited or iterated.

    Cancellation: Batches whose commit was sent may still be stored, and no others.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """
    check_int(in_flight, "in_flight")
    context = Context(js)
    return AtomicBatches(_publish(context, batches, in_flight, context.resolve_timeout(timeout)))


async def _publish(
    context: Context, batches: Iterable[Messages] | AsyncIterable[Messages], in_flight: int, timeout: float
) -> AsyncGenerator[BatchAck, None]:
    commits: deque[_Commit] = deque()
    clock = asyncio.get_running_loop().time
    try:
        async with aclosing(_each(batches)) as source:
            began = clock()
            async for batch in source:
                while len(commits) >= in_flight:
                    yield await _oldest_ack(commits)
                commit = _Commit(AtomicSession(context, timeout, in_one_go=True))
                await commit.send(batch)
                for earlier in commits:  # the loop may not have read their answers while a source was at work
                    earlier.session.postpone(clock() - began)
                began = clock()
                commits.append(commit)
                while commits and commits[0].session.answered:
                    yield await _oldest_ack(commits)
        while commits:
            yield await _oldest_ack(commits)
    except Exception as error:
        if commits:
            fates = await asyncio.gather(*(commit.ack() for commit in commits), return_exceptions=True)
            notes = (f"{fate.batch_id} stored" if isinstance(fate, BatchAck) else repr(fate) for fate in fates)
            error.add_note("outcomes of the batches whose commits were in flight: " + ", ".join(notes))
        raise
    finally:
        for commit in commits:
            commit.end(sys.exception())


async def _oldest_ack(commits: deque[_Commit]) -> BatchAck:
    return await commits.popleft().ack()


class _Commit:
    """A batch of `publish_atomic_many`, from its first message to the ack of its commit."""

    def __init__(self, session: AtomicSession) -> None:
        self.session: AtomicSession = session
        self._call = session.call(telemetry.Kind.SEND)

    async def send(self, messages: Messages) -> None:
        """Send the messages and the commit: few messages and their commit go out in one write."""
        try:
            await self.session.fill(messages, self._call)
            await self.session.send_commit(None)
        except BaseException as error:
            self.end(error)
            raise

    async def ack(self) -> BatchAck:
        """Wait for the answer to the commit."""
        try:
            ack = await self.session.committed()
        except BaseException as error:
            self.end(error)
            raise
        self.end()
        return ack

    def end(self, error: BaseException | None = None) -> None:
        """Discard the batch, unless it is committed."""
        self.session.discard()
        self._call.__exit__(None, error, None)  # it was not entered


async def _each(batches: Iterable[Messages] | AsyncIterable[Messages]) -> AsyncGenerator[Messages, None]:
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch


class AbandonedBatches:
    """The batches of a stream that the server drops, as it announces them; created by `watch_abandoned`.

    Use it as an async context manager and iterate over it inside. The iteration ends with nats-py's
    ``ConnectionClosedError`` or ``ConnectionDrainingError`` when the connection is closed or drained. It continues after
    a reconnect, without the batches that were announced in between, or before the server had the subscription. It ends with `RequestTimeoutError`, which names the
    subject, without the permission to subscribe to the advisories, also if that is withdrawn later.
    """

    _inbox: InboxSubscription | None = None

    def __init__(self, js: JetStreamContext, stream: str) -> None:
        check_name(stream, "stream name")
        self._js = Context(js)
        self._subject = f"{ABANDONED}.{stream}"
        # All domains publish to the same subject; the advisory names its domain.
        self._domain = self._js.domain
        self._pending: deque[AbandonedBatch] = deque()
        self._failure: nats.errors.Error | None = None  # why no advisory comes any more
        self._changed = asyncio.Event()  # set while a batch is pending, and after the end

    async def __aenter__(self) -> Self:
        if self._inbox is not None:
            raise RuntimeError(f"the watch on {self._subject} is already open; call watch_abandoned() for another one")
        connection = self._js.connection
        connection.check_usable()
        self._failure = None
        handler = InboxHandler(weakly(self._receive), weakly(self._disconnected), refused=weakly(self._fail))
        self._inbox = await connection.inbox(handler, subject=self._subject, timeout=self._js.timeout)
        log_state(_log, f"watch {self._subject}", "opened")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching; this ends every iteration. Safe to call twice.

        Cancellation: Safe; nothing is left behind.
        """
        inbox, self._inbox = self._inbox, None
        self._changed.set()
        if inbox is not None:
            inbox.close()
            log_state(_log, f"watch {self._subject}", "closed")

    def _receive(self, received: list[Frame]) -> None:
        for _, body, header_size in received:
            try:
                abandoned, domain = parse_abandoned(body[header_size:])
            except ResponseError as error:
                # Any client may publish there.
                _log.warning("%s: ignored a malformed advisory: %s", self._subject, error)
                continue
            if self._domain is not None and domain not in (None, self._domain):
                continue
            if len(self._pending) >= _PENDING_LIMIT:
                _log.warning("%s: dropped an advisory, because %d are unread", self._subject, _PENDING_LIMIT)
                return
            self._pending.append(abandoned)
            self._changed.set()
            log_state(_log, f"watch {self._subject}", "batch abandoned", abandoned.reason, batch=abandoned.batch_id)

    def _disconnected(self) -> None:
        if (end := self._js.connection.end) is not None:
            self._fail(end)

    def _fail(self, error: nats.errors.Error) -> None:
        self._failure = error
        self._changed.set()

    def __del__(self) -> None:
        if self._inbox is not None:
            self._inbox.owner_dropped(f"watch_abandoned {self._subject}")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AbandonedBatch:
        while self._inbox is not None:
            if self._pending:
                return self._pending.popleft()
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        raise StopAsyncIteration


def watch_abandoned(js: JetStreamContext, stream: str) -> AbandonedBatches:
    """Watch for atomic batches that the server of `stream` drops: messages that were published but not stored.

    The server announces batches that were idle too long, incomplete or too large. It does not announce batches that it
    refuses at the commit, nor batches that are lost with a leader.

    Args:
        js: nats-py's JetStream context. With a domain, only batches of that domain are reported.
        stream: The stream's name.

    Returns:
        An async context manager and async iterator of `AbandonedBatch`.

    Raises:
        BadSubjectError: The name is not a valid stream name.

    Requires: nats-server 2.12, and the permission to subscribe to ``$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.<stream>``.
    """
    return AbandonedBatches(js, stream)
