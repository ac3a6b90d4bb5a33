"""Fast ingest (ADR-50): the public `FastPublisher`, and the session that connects its batch to the connection."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self, Unpack

import nats.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import LeaderInfo, known_stream_name, lookup_leader, why_no_jetstream
from jetstream_ext.client.base_connection import (
    ROOM,
    BaseConnection,
    InboxHandler,
    InboxSubscription,
    Over,
    cancel,
    never,
    weakly,
)
from jetstream_ext.client.connection import Context, call_as, connection_of
from jetstream_ext.client.turns import Turns
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.fast import KEPT_REPORTS, Ended, Event, FastBatch, State
from jetstream_ext.protocol.fast_wire import BatchFlowError, Encoded, UnrecognisedReply
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import as_message, check_function, check_messages
from jetstream_ext.protocol.subjects import SubjectElsewhere
from jetstream_ext.protocol.trace_context import TraceContext
from jetstream_ext.text import get_logger
from jetstream_ext.types import (
    BatchAck,
    BatchFlowAck,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    Entry,
    FastPubAck,
    GapMode,
    InDoubt,
    PublishOptions,
)

GapHandler = Callable[[BatchFlowGap], Awaitable[None] | None]
ErrorHandler = Callable[[BatchFlowError], Awaitable[None] | None]
FlowHandler = Callable[[BatchFlowAck], Awaitable[None] | None]

_log: Final = get_logger("fast")

_REPLY_SHARE: Final = 0.25  # the part of `ack_timeout` that is kept for the reply to the first message
_CANCEL_TIMEOUT: Final = 1.0  # seconds for a handler to end after its cancellation

_COUNTED_AT_ONCE: Final = 10_000  # acknowledged messages that an observer is told of, at the latest

_WAITED_FOR: Final[set[FastSession]] = set()
"""Sessions with a waiting caller: a task that waits must not be collected with the session that it waits for."""


class FastPublisher:
    """Publish into a stream with one acknowledgement for many messages.

    One instance is one batch (ADR-50, fast ingest). The server stores messages as they arrive, in order, and limits how
    many may be unacknowledged: the window is `flow` times `max_outstanding_acks` messages. Use it as an async context
    manager: a clean exit commits the batch and sets `ack` to the final ack; an exception or a cancellation discards it,
    and what was sent stays stored. Without ``async with``, end it by `commit`, `commit_eob` or `discard`.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        flow: Messages per acknowledgement to request, 1 to 65535; by default, servers grant at most 500, shared by
            the publishers of a stream.
        max_outstanding_acks: The window, in acknowledgements (`flow` messages each), 1 to 3.
        gap: What happens when messages are lost before they reach the server: `GapMode.FAIL` ends the batch;
            `GapMode.OK` reports the gap and continues, also after a reconnect.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None generates one.
        ack_timeout: Seconds that a wait may last without progress by the server; None is the context's timeout. After the
            connection is lost, `GapMode.OK` waits this long for the next one, and again for the server's answer on it.
        keepalive: Seconds without traffic after which a ping keeps an idle batch alive (the server drops it after 10 s).
            An idle batch notices after `keepalive` + `ack_timeout` that the server does not answer. 0 or None sends no
            pings: then it does not notice while idle.
        on_gap: Called with every `BatchFlowGap`.
        on_error: Called with every `BatchFlowError`: a message was refused, and the batch continues.
        on_flow: Called with every `BatchFlowAck`.

    The handlers may be plain or coroutine functions. They run on the loop after the batch's state is updated. Their
    exceptions go to the loop's exception handler. Coroutine functions run one at a time, in the order of the events. At
    most 1000 events wait for them; then the oldest are dropped, with one warning in the log. The end of the ``async
    with`` block waits for them for what is left of `ack_timeout`, and then cancels them; if the block is cancelled, at once.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """

    _one_stream = True  # whether messages of other streams than the batch's are refused

    def __init__(
        self,
        js: JetStreamContext,
        *,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        batch_id: str | None = None,
        ack_timeout: float | None = None,
        keepalive: float | None = 5.0,
        on_gap: GapHandler | None = None,
        on_error: ErrorHandler | None = None,
        on_flow: FlowHandler | None = None,
    ) -> None:
        for name, handler in (("on_gap", on_gap), ("on_error", on_error), ("on_flow", on_flow)):
            if handler is not None:
                check_function(handler, name, "a function or None")
        context = Context(js)
        self._session = FastSession(
            context,
            one_stream=self._one_stream,
            handlers={BatchFlowGap: on_gap, BatchFlowError: on_error, BatchFlowAck: on_flow},
            batch_id=NUID().next().decode() if batch_id is None else batch_id,
            flow=flow,
            max_outstanding_acks=max_outstanding_acks,
            gap=gap,
            ack_timeout=context.resolve_timeout(ack_timeout, "ack_timeout"),
            keepalive=keepalive or 0.0,
        )
        self._batch = self._session.batch

    def __repr__(self) -> str:
        return f"<FastPublisher batch_id={self.batch_id!r} sent={self.batch_seq} acked={self.ack_seq}>"

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self._batch.batch_id

    @property
    def batch_seq(self) -> int:
        """The batch sequence of the newest message sent."""
        return self._batch.sent

    @property
    def ack_seq(self) -> int:
        """The highest batch sequence that the server acknowledged."""
        return self._batch.acked

    @property
    def flow(self) -> int:
        """Messages per acknowledgement, as the server last set it."""
        return self._batch.window.flow

    @property
    def ack(self) -> BatchAck:
        """The server's final ack, which is there after a clean exit of the block, and if the server ended the batch.

        Its ``batch_size`` is the highest batch sequence, not the number of messages stored.

        Raises:
            BatchError: The batch is still open, was discarded, or ended with this error.
            UnsupportedFeatureError: The server is older than 2.14.
        """
        return self._batch.result()

    @property
    def gaps(self) -> list[BatchFlowGap]:
        """The newest gap reports (at most 1000 are kept; `gap_count` counts all)."""
        return list(self._batch.gaps)

    @property
    def gap_count(self) -> int:
        """How many gaps were reported."""
        return self._batch.gap_count

    @property
    def errors(self) -> list[BatchFlowError]:
        """The newest refused messages (at most 1000 are kept; `error_count` counts all)."""
        return list(self._batch.errors)

    @property
    def error_count(self) -> int:
        """How many messages were refused."""
        return self._batch.error_count

    @property
    def in_doubt(self) -> list[InDoubt]:
        """Messages neither acknowledged nor reported lost, because the connection was lost (`GapMode.OK` only)."""
        return list(self._batch.in_doubt)

    @property
    def end_reason(self) -> EndReason | None:
        """Why the batch ended; None while it is open. It is set when the server or the connection ends it, also while idle."""
        return self._batch.end_reason

    # -- publishing ---------------------------------------------------------------------------------------------

    async def add(self, subject: str, payload: bytes = b"", **options: Unpack[PublishOptions]) -> FastPubAck:
        """Publish one message, once the window has room for it.

        The message is checked before it takes a sequence: a refused call changes nothing. Concurrent calls send in the
        order in which they were made. The first call also waits for the server's first reply.

        Args:
            subject: The message's subject.
            payload: Its bytes.
            options: As for `BatchMessage`.

        Returns:
            The message's batch sequence, and the highest one that the server has acknowledged.

        Raises:
            BatchError: The batch has ended; the error says why, what is stored, and holds the server's final ack.
            UnsupportedFeatureError: The server is older than 2.14. Nothing was sent; if the library could not know the
                version before, the error says that this one message is stored as a separate message.
            StreamConfigMismatchError: The stream has ``no_ack``. Nothing was sent.
            RequestTimeoutError: The connection took nothing for `ack_timeout` before the first message, or no server said
                which stream stores a subject that is not one of the batch's stream. The message was not sent.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message cannot be sent; a subject of
                another stream than the batch's is a BadSubjectError, if the servers can tell.

        Cancellation: While the call waits for room or for the connection, nothing is sent and the message has no
        sequence (`batch_seq` does not count it). After that the message is sent and counted. The batch stays usable.
        """
        session, batch = self._session, self._batch
        if telemetry.observer is not None:
            return await self.add_message(BatchMessage(subject, payload, **options))
        if options or not session.can_send:
            return await self._add(BatchMessage(subject, payload, **options))
        try:
            command = batch.add_plain(subject, payload, session.now())
        except SubjectElsewhere:
            return await self._add(BatchMessage(subject, payload))
        seq = batch.sent
        session.write(command, 1, len(payload))
        # The batch was open; the write may have found out that the connection is lost.
        if batch.state is not State.OPEN:
            await session.wait(batch.started)
        return FastPubAck(seq, batch.window.acked)

    async def add_message(self, message: BatchMessage) -> FastPubAck:
        """Publish one `BatchMessage`; arguments, errors, result and cancellation as for `add`."""
        observer = telemetry.observer
        if observer is None:
            return await self._add(message)
        session = self._session
        with session.begin(observer, telemetry.Kind.SEND, message.subject) as operation:
            alone = _Bulk(session, operation.trace)
            try:
                return await self._add(message, alone)
            finally:
                session.describe(operation, alone.sent)

    async def _add(self, message: BatchMessage, bulk: _Bulk | None = None) -> FastPubAck:
        """As `add_message`; `bulk` counts the message once it has its sequence, even if the call then ends early."""
        session, batch = self._session, self._batch
        try:
            encoded = batch.encode(message)
            ready = session.can_send
        except SubjectElsewhere:
            ready = False
        if not ready:
            encoded = await session.wait_turn(message)
        if bulk is not None and bulk.trace is not None:  # not before the batch is open, and the stream's limit known
            encoded = batch.encode(session.traced(message, bulk.trace))
        command = batch.add(encoded, session.now())
        if bulk is not None:
            bulk.sent += 1
        seq = batch.sent
        session.write(command, 1, len(encoded.payload))
        await session.wait(batch.started)
        return FastPubAck(seq, batch.acked)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> FastPubAck:
        """Publish many messages, with one write for as many as the window has room for.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or
                an async iterable. It is consumed as the window allows, so it may be endless.

        Returns:
            As for `add`, when all messages are sent and at most a window of them is unacknowledged.

        Raises:
            BatchError, UnsupportedFeatureError, StreamConfigMismatchError: As for `add`.
            Exception: What `messages` raises, or the error of a message that cannot be sent. Everything before it was
                sent; the batch stays usable.

        Cancellation: The batch stays usable. `batch_seq` counts what was sent; the last message that was taken from
            `messages` may not be.
        """
        observer = telemetry.observer
        if observer is None:
            return await self._add_many(messages, _Bulk(self._session))
        session = self._session
        with session.begin(observer, telemetry.Kind.SEND) as operation:
            bulk = _Bulk(session, operation.trace)
            try:
                return await self._add_many(messages, bulk)
            finally:
                session.describe(operation, bulk.sent)

    async def _add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry], bulk: _Bulk) -> FastPubAck:
        batch, session = self._batch, self._session
        check_messages(messages)
        if isinstance(messages, AsyncIterable):
            source = aiter(messages)
            while True:
                # Before a message is taken, so that a cancelled call rarely loses one. The first one opens the batch.
                if not session.opened:
                    session.check_new()
                elif not session.can_send:
                    await session.wait_room()
                try:
                    entry = await anext(source)
                except StopAsyncIteration:
                    return FastPubAck(batch.sent, batch.acked)
                # One write each: nats-py's buffer joins them, and a slow source must not wait for a full block.
                await self._add(as_message(entry), bulk)
        bulk.entries = iter(messages)
        if not session.opened:
            session.check_new()
            first = bulk.take_one()
            if not first:
                return FastPubAck(batch.sent, batch.acked)
            await self._add(as_message(first[0]), bulk)
        while isinstance(stopped := await session.send_bulk(bulk), SubjectElsewhere):
            await self._add(as_message(stopped.entry), bulk)
            bulk.stopped = None
        if not isinstance(stopped, StopIteration):
            raise stopped
        if batch.sent:
            await session.wait(batch.started)
        return FastPubAck(batch.sent, batch.acked)

    async def flush(self) -> None:
        """Wait until the server has dealt with everything sent so far.

        Servers acknowledge only every `flow` messages. What an acknowledgement covers is stored (in `GapMode.OK`:
        stored, or reported as lost or refused). For the messages after it this call sends a ping: the server answers it
        after it has received everything before the ping and reported any loss. On a stream with one replica these
        messages are then stored. On a replicated stream they are on their way to the replicas, and only a later
        acknowledgement or the final one proves that they are stored.

        Raises:
            BatchError: The batch ended first.

        Cancellation: The batch stays usable.
        """
        batch, session = self._batch, self._session
        if not batch.sent:
            return
        await session.wait_ready(batch.can_ask)
        sent = batch.sent
        if not batch.is_settled(sent):
            session.write(batch.ping(session.now()), 1, 0)
            await session.wait(lambda: batch.is_settled(sent))

    async def ping(self) -> FastPubAck:
        """Ask the server for its position in the batch; return it as `add` does.

        Raises:
            EmptyBatchError: Nothing was sent yet.
            BatchError: The batch has ended.

        Cancellation: The batch stays usable.
        """
        batch, session = self._batch, self._session
        await session.wait_ready(batch.can_ask)
        before = batch.pongs
        session.write(batch.ping(session.now()), 1, 0)
        await session.wait(lambda: batch.pongs > before)
        return FastPubAck(batch.sent, batch.acked)

    # -- ending -------------------------------------------------------------------------------------------------

    async def commit(self, subject: str, payload: bytes = b"", **options: Unpack[PublishOptions]) -> BatchAck:
        """Publish a last message, end the batch and return the server's final ack.

        Arguments, errors and cancellation are those of `add` and then, once the message is sent, of `commit_eob`.
        """
        await self.add(subject, payload, **options)
        return await self.commit_eob()

    async def commit_eob(self) -> BatchAck:
        """End the batch without another message and return the server's final ack.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchOutcomeUnknownError: The ack did not arrive; the messages may be stored.
            BatchError: The batch had ended.

        Cancellation: Before the commit is sent, the batch stays usable. After that the batch is discarded here, and the
            commit still ends it on the server.
        """
        observer = telemetry.observer
        if observer is None:
            return await self._commit()
        session = self._session
        with session.begin(observer, telemetry.Kind.COMMIT) as operation:
            try:
                return await self._commit()
            finally:
                session.describe(operation, self._batch.sent)

    async def _commit(self) -> BatchAck:
        batch, session = self._batch, self._session
        await session.wait_to_commit()
        command = batch.commit(session.now())
        try:
            session.write(command, 1, 0)
            await session.wait(batch.committed)
        except asyncio.CancelledError:
            await self.discard()
            raise
        return batch.result()

    async def discard(self) -> None:
        """End the batch without a commit. What was sent stays stored; the server drops the idle batch by itself.

        Cancellation: Cannot occur: the call never suspends.
        """
        self._session.deliver(self._batch.discard())

    async def wait_closed(self) -> EndReason:
        """Wait until the batch ends, and return the reason.

        Cancellation: The batch stays open.
        """
        return await self._session.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batch, session = self._batch, self._session
        deadline = session.now() + batch.ack_timeout
        try:
            if kind is not None or not batch.sent:
                await self.discard()
            elif batch.end_reason is None:
                try:
                    await self.commit_eob()
                except BaseException:
                    await self.discard()  # a failed commit must leave nothing open after the block
                    raise
            elif batch.error is not None:
                batch.check_open()
        except asyncio.CancelledError:
            deadline = 0.0
            raise
        finally:
            cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
            await session.end_handlers(0.0 if cancelled else deadline - session.now())


class FastSession:
    """Carries messages, replies, timers and events between the callers, the batch and the connection.

    `batch` are the arguments of `FastBatch`, which makes every decision; `handlers` are called with events of their type.
    """

    _inbox: InboxSubscription | None = None

    def __init__(
        self,
        context: Context,
        *,
        one_stream: bool,
        handlers: Mapping[type[Event], Callable[[Any], object] | None],
        **batch: Any,
    ) -> None:
        self._context = context
        self._one_stream = one_stream
        self._handlers = handlers
        self.connection: BaseConnection = connection_of(context.nc)
        self.leader: LeaderInfo | None = None  # the server of the stream, once the batch is opened
        self.batch: FastBatch = FastBatch(
            max_payload=self.connection.max_payload, inbox_size=self.connection.inbox_size, **batch
        )
        self.now: Callable[[], float] = lambda: asyncio.get_running_loop().time()  # `_open` sets a faster one
        self._turns = Turns()
        self._waiters = 0  # callers in `wait` and `_send_as_acks_arrive`
        self._changed = asyncio.Event()  # set and cleared at once, to wake all callers in `wait`
        self._bulk: _Bulk | None = None  # its task waits for room in the window
        self._ended = asyncio.Event()
        self._fire = weakly(self._timer_fired)
        self._timer: asyncio.TimerHandle | None = None
        self._results = _Results(self.batch.batch_id)
        self._counted = 0  # messages that an observer was told are acknowledged
        self._is_refused: Callable[[], bool] = never  # whether the server has refused a message to the first subject
        # Whether the batch ended because the user may not publish its first message: then nothing is stored.
        self.not_permitted: bool = False

    # -- callers --------------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether a message can be sent without waiting."""
        # The connection is asked first: where nats-py is not known, only that tells the batch of a reconnect.
        return not self._turns.queue and self.connection.ready and self.batch.has_room

    @property
    def bulk_can_send(self) -> bool:
        """As `can_send`, for a bulk, which has a turn: it goes on unless another caller waits for one."""
        return len(self._turns.queue) == 1 and self.connection.ready and self.batch.has_room

    def traced(self, message: BatchMessage, trace: TraceContext) -> BatchMessage:
        """Return a message with a trace context, if the message has room for it."""
        stream, room = None if self.leader is None else self.leader.stream, self.connection.max_payload
        limit = None if stream is None else stream.max_msg_size
        return trace.added_to(message, room if limit is None else min(room, limit))

    def begin(
        self, observer: telemetry.Observer, kind: telemetry.Kind, subject: str | None = None
    ) -> telemetry.Operation:
        """Begin an operation on the batch, about one message of `subject` or any number of messages."""
        name, subjects = self._stream_facts()
        facts = {"jetstream_ext.batch.id": self.batch.batch_id}
        return observer.begin(kind, self.connection, subject=subject, stream=name, subjects=subjects, attributes=facts)

    def describe(self, operation: telemetry.Operation, messages: int) -> None:
        """Tell an operation of how many messages it was, and the batch's stream, which is known once it is opened."""
        name, subjects = self._stream_facts()
        operation.describe(stream=name, subjects=subjects, messages=messages)

    def _stream_facts(self) -> tuple[str | None, Sequence[str]]:
        stream = None if self.leader is None else self.leader.stream
        return (None, ()) if stream is None else (stream.name, stream.subjects)

    @property
    def opened(self) -> bool:
        """Whether the batch has its inbox; until then only `wait_turn` can be called."""
        return self._inbox is not None

    def check_new(self) -> None:
        """Raise if a batch that is not opened yet cannot be opened now."""
        self.batch.check_open()
        self._context.connection.check_usable()

    async def wait_turn(self, message: BatchMessage) -> Encoded:
        """Check and encode a message; return when it can be sent. Callers get their turn in the order of their calls.

        A message takes its sequence only while the write buffer has room, so the buffer bounds the memory of a window.
        """
        began, encoded, opened = self.now(), None, self.opened
        with self._turns.join() as turn:
            while True:
                self._check_ended()
                if encoded is None or opened != self.opened:
                    if self.opened:
                        began = self.now()
                    try:
                        encoded, opened = self.batch.encode(message), self.opened
                    except SubjectElsewhere as question:
                        await self._find_stream(question.subject, began + self.batch.ack_timeout / 2 - self.now())
                        continue
                if turn.has_come:
                    await self._when_sendable(began, message)
                    return encoded
                try:
                    await turn.wait(None if opened else self._must_open_by(began))
                except RequestTimeoutError as late:
                    raise self._not_sent(began, str(late)) from late

    async def wait_room(self, bulk: _Bulk | None = None) -> None:
        """Wait as `wait_turn` until a message of an open batch can be sent, or `bulk` is stopped."""
        with self._turns.join() as turn:
            while not turn.has_come:
                await turn.wait(None)
                self._check_ended()
            if bulk is not None:
                await self._send_as_acks_arrive(bulk)
                if bulk.stopped is not None:
                    return
            await self._when_sendable(self.now())

    async def send_bulk(self, bulk: _Bulk) -> BaseException:
        """Send the messages of `bulk` as the window has room for them; return what stopped it."""
        while bulk.stopped is None:
            if not self.can_send:
                await self.wait_room(bulk)
            if bulk.stopped is None:
                with self._turns.join():  # a call that the source makes, in an eager task, has its turn after the block
                    bulk.send()
        return bulk.stopped

    async def _send_as_acks_arrive(self, bulk: _Bulk) -> None:
        """Wait until the window has room, or `bulk` is stopped.

        Meanwhile `deliver` sends from it, two turns of the loop before this task could.
        """
        batch = self.batch
        if batch.reached(batch.can_send):
            return
        self._begin_wait()
        try:
            while bulk.stopped is None and not batch.reached(batch.can_send):
                batch.waiting(self.now())
                self._arm()
                self._bulk = bulk
                await bulk.woken()
        finally:
            self._bulk = None
            self._end_wait()

    def _send_on(self, bulk: _Bulk) -> None:
        """Send from `bulk`, whose task waits; wake the task unless the window is full again."""
        batch = self.batch
        if not bulk.is_waiting:  # it was cancelled or woken: nothing more may be taken from its source
            return
        if self.bulk_can_send:
            batch.set_max_payload(self.connection.max_payload)
            sent = bulk.send_for_task()
            if sent and bulk.stopped is None and batch.state is State.OPEN and not batch.has_room:
                if self._waiters == 1:
                    batch.not_waiting()
                batch.waiting(self.now())  # another wait
                return
        bulk.wake()

    def _check_ended(self) -> None:
        if self._ended.is_set():
            self.batch.check_open()

    async def _when_sendable(self, began: float, message: BatchMessage | None = None) -> None:
        await self.wait_ready(self.batch.can_send, message, began)
        while not self.connection.has_room and not self._ended.is_set():
            await self._wait_buffer(began)
            await self.wait_ready(self.batch.can_send)

    async def wait_to_commit(self) -> None:
        """Wait until the batch can be committed, after all calls that were made before."""
        if self._turns.queue:
            await self._turns.wait(self._check_ended)
        await self.wait_ready(self.batch.can_ask)

    async def _wait_buffer(self, began: float) -> None:
        batch, connection, state = self.batch, self.connection, self.batch.state
        timeout = batch.ack_timeout if batch.sent else self._must_open_by(began) - self.now()
        try:
            await connection.wait_room(timeout, over=lambda: batch.state is not state)
        except RequestTimeoutError:
            if not batch.sent:
                raise self._not_sent(began, f"no {ROOM}") from None
            self.deliver(batch.write_timed_out(self.now()))
        except nats.errors.Error:
            self._disconnected()

    async def wait_ready(self, goal: Callable[[], bool], first: BatchMessage | None = None, began: float = 0.0) -> None:
        """Wait for `goal` on a usable connection; open the batch for its message `first`, added at `began`, if it is new.

        Returns as well when the batch is committed: then the caller's next step returns, or raises BatchClosedError.
        """
        while True:
            await self.wait(goal)
            if self._ended.is_set():
                return
            if self._inbox is None:
                assert first is not None
                await self._open(first, began)
            elif self.connection.usable:
                self.batch.set_max_payload(self.connection.max_payload)
                return
            elif not self.batch.sent:
                self.connection.check_usable()
            else:
                self._disconnected()  # nats-py has noticed the loss, but its reader task has not ended yet

    async def wait(self, goal: Callable[[], bool]) -> None:
        """Wait for `goal`, or raise what ended the batch; the batch's timers bound the wait."""
        batch = self.batch
        if batch.reached(goal):
            return
        self._begin_wait()
        try:
            while True:
                batch.waiting(self.now())
                self._arm()
                await self._changed.wait()
                if batch.reached(goal):
                    return
        finally:
            self._end_wait()

    def _begin_wait(self) -> None:
        self._waiters += 1
        _WAITED_FOR.add(self)

    def _end_wait(self) -> None:
        self._waiters -= 1
        if not self._waiters:
            self.batch.not_waiting()
            _WAITED_FOR.discard(self)

    async def wait_closed(self) -> EndReason:
        """Wait for the end of the batch without sending anything."""
        self._context.check_client()
        try:
            await self.connection.bounded(self._ended.wait(), math.inf, "the end of the batch")
        except nats.errors.Error:  # nothing tells an unused batch about its connection
            self._disconnected()
        assert self.batch.end_reason is not None
        return self.batch.end_reason

    def write(self, data: bytes, messages: int, size: int) -> None:
        """Write bytes of the batch; if that ends the batch, raise its error."""
        try:
            self.connection.write_nowait(data, messages, size)
        except nats.errors.Error:
            self._disconnected()  # the messages have their sequences but were not sent: for the batch they are lost
            self.batch.check_open()
        if self.batch.sent % self.batch.window.flow < messages:
            # The server acknowledges about here: let it begin while the next messages are encoded.
            self.connection.push()
        if self._timer is None:
            self._arm()  # writing only postpones what is due, so a timer that is set fires early enough

    async def _find_stream(self, subject: str, timeout: float) -> None:
        """Ask which stream stores `subject`; raise BadSubjectError if it is another one than the batch's."""
        asking = known_stream_name(self._context, subject, timeout)
        try:
            stream = await self.connection.bounded(asking, math.inf, "the stream", over=self._ended.is_set)
        except Over:
            self.batch.check_open()
            raise
        self.batch.check_stream(subject, stream)

    # -- the connection -------------------------------------------------------------------------------------------

    def _not_sent(self, began: float, why: str) -> RequestTimeoutError:
        waited = self.now() - began
        return RequestTimeoutError(
            f"batch {self.batch.batch_id}: the first message was not sent within {waited:.3g} s: {why}"
        )

    def _must_open_by(self, began: float) -> float:
        """Return when the first message, which was added at `began`, must be sent: the rest is for the first reply."""
        return began + (1 - _REPLY_SHARE) * self.batch.ack_timeout

    async def _open(self, first: BatchMessage, began: float) -> None:
        connection, deadline = self._context.connection, self._must_open_by(began)
        connection.check_usable()
        if self.now() >= deadline:
            raise self._not_sent(began, "the calls before it have not ended")
        leader = self.leader = await lookup_leader(
            self._context, first.subject, first.stream, max(0.0, deadline - self.now()), FAST_INGEST
        )
        if not FAST_INGEST.at(leader.api_level):
            raise FAST_INGEST.unsupported(
                server_version=leader.server_version, api_level=leader.api_level, detail="nothing was sent"
            )
        if leader.stream is not None:
            leader.stream.check_acks()
        handler = InboxHandler(weakly(self._receive), weakly(self._disconnected), weakly(self._reconnected))
        tail = f".{self.batch.batch_id}.>"
        inbox = await connection.inbox(handler, tail=tail, timeout=deadline - self.now())
        try:
            if self.now() >= deadline:
                raise self._not_sent(began, "no answer to the lookups")
            while not connection.has_room and not self._ended.is_set():
                try:
                    await connection.wait_room(deadline - self.now(), over=self._ended.is_set)
                except RequestTimeoutError:
                    raise self._not_sent(began, f"no {ROOM}") from None
            # A stream that does not store the subject was named by the caller: perhaps accounts map subjects.
            stream = leader.stream if leader.stream is not None and leader.stream.stores(first.subject) else None
            self.batch.target = self._context.target(None if stream is None else stream.name)
            self._is_refused = connection.refusals([first.subject])
            self.batch.open(inbox.subject, self.now() - began, stream if self._one_stream else None)
        except BaseException:
            inbox.close()
            raise
        self.batch.no_jetstream = why_no_jetstream(self._context)
        self.batch.set_max_payload(connection.max_payload)
        self.batch.set_max_msg_size(None if leader.stream is None else leader.stream.max_msg_size)
        self.now = asyncio.get_running_loop().time
        self._inbox = inbox
        self._turns.wake()

    def _receive(self, frames: list[Frame]) -> None:
        self.deliver(*self.batch.receive(frames, self.now()))

    def _disconnected(self) -> None:
        nc = self.connection.nc
        for_good = self.connection.end is not None or nc.is_draining
        how = "was closed" if nc.is_closed else "is draining" if nc.is_draining else "was lost"
        self.deliver(self.batch.disconnected(self.now(), for_good=for_good, why=f"the connection {how}"))

    def _reconnected(self) -> None:
        self.batch.set_max_payload(self.connection.max_payload)
        self.deliver([], self.batch.reconnected(self.now()))

    # -- events and timers ----------------------------------------------------------------------------------------

    def deliver(self, events: list[Event], out: bytes = b"") -> None:
        """Send `out`, call the handlers of `events`, send from a bulk that waits, wake the waiters."""
        if out:
            try:
                self.connection.write_nowait(out, 1, 0)
            except nats.errors.Error:
                pass  # the connection calls `_disconnected`
        if events and telemetry.observer is not None:
            self._count(telemetry.observer, events)
        for event in events:
            if isinstance(event, UnrecognisedReply):
                _log.warning("batch %s: ignored an unrecognised reply: %.200r", self.batch.batch_id, event.payload)
            elif isinstance(event, Ended):
                self._ended.set()
                self._turns.wake()
                if self._inbox is not None:
                    self._inbox.close()
            elif (handler := self._handlers.get(type(event))) is not None:
                self._call(handler, event)
        self._changed.set()
        self._changed.clear()
        if self._bulk is not None:
            self._send_on(self._bulk)
        self._arm()

    def _count(self, observer: telemetry.Observer, events: list[Event]) -> None:
        acked = self.batch.acked
        # Not with each ack: a metric costs about as much as sending ten messages.
        if acked - self._counted >= _COUNTED_AT_ONCE or (acked > self._counted and isinstance(events[-1], Ended)):
            observer.count(telemetry.Count.ACKNOWLEDGED, acked - self._counted, stream=self._stream_facts()[0])
            self._counted = acked
        for event in events:
            if isinstance(event, BatchFlowGap):
                stream, _ = self._stream_facts()
                observer.count(telemetry.Count.GAPS, 1, stream=stream)
                observer.count(telemetry.Count.LOST, event.seq - event.first_lost, stream=stream)
            elif isinstance(event, BatchFlowError):
                error, (stream, _) = type(event.error).__qualname__, self._stream_facts()
                observer.count(telemetry.Count.REFUSED, 1, stream=stream, error=error)

    def _call(self, handler: Callable[[Any], object], event: Event) -> None:
        try:
            result = handler(event)
        except (Exception, asyncio.CancelledError) as error:  # no suspension here: the handler itself raised it
            self._results.failed(error)
        else:
            if inspect.isawaitable(result):
                self._results.add(result)

    async def end_handlers(self, timeout: float) -> None:
        """Wait for the coroutine handlers for up to `timeout` seconds, then cancel them."""
        await self._results.end(timeout)

    def _arm(self) -> None:
        due = self.batch.next_timer()
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return  # it fires early, finds nothing due and is armed again; that is cheaper than moving it each time
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def __del__(self) -> None:
        if self._inbox is not None:
            then = [self._results.cancel]
            if self._timer is not None:
                then.append(self._timer.cancel)
            self._inbox.owner_dropped(f"FastPublisher {self.batch.batch_id}", then)

    def _timer_fired(self) -> None:
        self._timer = None
        self.batch.silence = self.connection.why_silent([self.batch.first_subject])
        starting = self.batch.state is State.STARTING
        events, out = self.batch.handle_timer(self.now())
        self.not_permitted = starting and self.batch.state is State.ENDED and self._is_refused()
        if events or out:
            self.deliver(events, out)
        else:
            self._arm()


class _Bulk:
    """The messages of one `add_many`, sent by its task, or, while that waits for room, where acknowledgements arrive.

    Their source notices no difference: it runs as part of the task, in its context.
    """

    def __init__(self, session: FastSession, trace: TraceContext | None = None) -> None:
        self.entries: Iterator[Entry] = iter(())
        self.trace: TraceContext | None = trace  # what every message gets
        self.sent: int = 0  # how many messages were sent
        self.stopped: BaseException | None = None
        """What the source raised (StopIteration at its end), a message's refusal, or what ended the batch."""
        self._session = session
        self._task = asyncio.current_task()
        self._waiter: asyncio.Future[None] | None = None

    def take_one(self) -> list[Entry]:
        """Return the next message of the source, or nothing at its end."""
        return list(islice(self.entries, 1))

    def send_for_task(self) -> bool:
        """As `send`, while the task waits; return False if it must send itself."""
        return call_as(self._task, self._waiter, self.send)

    def send(self) -> None:
        """Send until the source stops, the window or the write buffer is full, or another caller waits for a turn."""
        session = self._session
        try:
            while True:
                data, count, size, self.stopped = session.batch.add_many(self.entries, session.now(), self.trace)
                if count:
                    self.sent += count
                    session.write(data, count, size)
                if self.stopped is not None or not session.bulk_can_send:
                    break
        except Exception as error:  # what ended the batch
            self.stopped = error

    # -- the wait of its task -------------------------------------------------------------------------------------

    async def woken(self) -> None:
        """Wait for `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    @property
    def is_waiting(self) -> bool:
        return self._waiter is not None and not self._waiter.done()  # a cancellation of the task ends it at once

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Results:
    """What the coroutine handlers of a batch returned: awaited one at a time, in a task that does not hold the session."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self._waiting: deque[Awaitable[object]] = deque()  # oldest first
        self._task: asyncio.Task[None] | None = None
        self._is_behind = False

    def add(self, result: Awaitable[object]) -> None:
        if len(self._waiting) == KEPT_REPORTS:
            self._drop_oldest()
            if not self._is_behind:
                self._is_behind = True
                text = "batch %s: a coroutine handler is behind by %d events; the oldest are dropped"
                _log.warning(text, self._batch_id, KEPT_REPORTS)
        self._waiting.append(result)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._await_all())

    def _drop_oldest(self) -> None:
        result = self._waiting.popleft()
        if inspect.iscoroutine(result):
            result.close()  # it has not begun

    async def _await_all(self) -> None:
        while self._waiting:
            try:
                await self._waiting.popleft()
            except (Exception, asyncio.CancelledError) as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Report what a handler raised."""
        message = f"batch {self._batch_id}: a callback (on_flow, on_gap or on_error) raised"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    def cancel(self) -> None:
        """Cancel the handler that runs, and drop those that wait."""
        while self._waiting:
            self._drop_oldest()
        if self._task is not None:
            self._task.cancel()

    async def end(self, timeout: float) -> None:
        """Wait for the handlers for up to `timeout` seconds, then cancel them."""
        try:
            if self._task is not None and timeout > 0:
                await asyncio.wait({self._task}, timeout=timeout)
        finally:
            self.cancel()
            if self._task is not None:
                await cancel(self._task, _CANCEL_TIMEOUT)
