"""Fast ingest (ADR-50): the public `FastPublisher`, and the session that connects its batch to the connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Final, Self, Unpack

import nats.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import find_server
from jetstream_ext.client.base_connection import (
    BaseConnection,
    InboxHandler,
    InboxSubscription,
    cancel,
    never,
    weakly,
)
from jetstream_ext.client.connection import Context, connection_of
from jetstream_ext.client.turns import Turn, queued
from jetstream_ext.errors import BadSubjectError, RequestTimeoutError, StreamRecreatedError
from jetstream_ext.protocol.api import StreamState, recreated
from jetstream_ext.protocol.fast import KEPT_REPORTS, Ended, Event, FastBatch, State
from jetstream_ext.protocol.fast_wire import BatchFlowError, UnrecognisedReply
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import as_message, check_function, check_messages
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

_CANCEL_TIMEOUT: Final = 1.0  # seconds for a handler to end after its cancellation

_LOOK_EVERY: Final = 0.1  # seconds between two looks whether the server has refused the first message

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
        timeout: Seconds that a wait may last without progress by the server; None is the context's timeout. After the
            connection is lost, `GapMode.OK` waits this long for the next one, and again for the server's answer on it.
        keepalive: Seconds without traffic after which a ping keeps an idle batch alive (the server drops it after 10 s).
            An idle batch notices after `keepalive` + `timeout` that the server does not answer. 0 or None sends no
            pings: then it does not notice while idle.
        on_gap: Called with every `BatchFlowGap`.
        on_error: Called with every `BatchFlowError`: a message was refused, and the batch continues.
        on_flow: Called with every `BatchFlowAck`.

    The handlers may be plain or coroutine functions. They run on the loop after the batch's state is updated. Their
    exceptions go to the loop's exception handler. Coroutine functions run one at a time, in the order of the events. At
    most 1000 events wait for them; then the oldest are dropped, with one warning in the log. The end of the ``async
    with`` block waits for them for what is left of `timeout`, and then cancels them; if the block is cancelled, at once.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """

    def __init__(
        self,
        js: JetStreamContext,
        *,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        timeout: float | None = None,
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
            handlers={BatchFlowGap: on_gap, BatchFlowError: on_error, BatchFlowAck: on_flow},
            batch_id=NUID().next().decode(),
            flow=flow,
            max_outstanding_acks=max_outstanding_acks,
            gap=gap,
            timeout=context.resolve_timeout(timeout),
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
        return list(self._batch.reports.gaps)

    @property
    def gap_count(self) -> int:
        """How many gaps were reported."""
        return self._batch.reports.gap_count

    @property
    def errors(self) -> list[BatchFlowError]:
        """The newest refused messages (at most 1000 are kept; `error_count` counts all)."""
        return list(self._batch.reports.errors)

    @property
    def error_count(self) -> int:
        """How many messages were refused."""
        return self._batch.reports.error_count

    @property
    def in_doubt(self) -> list[InDoubt]:
        """Messages neither acknowledged nor reported lost, because the connection was lost (`GapMode.OK` only)."""
        return list(self._batch.reports.in_doubt)

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
            RequestTimeoutError: The connection took nothing for `timeout` before the first message, which was not sent.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message cannot be sent. (A server
                refuses a message for another stream than the batch's: `GapMode.FAIL` ends the batch.)

        Cancellation: While the call waits for room or for the connection, nothing is sent and the message has no
        sequence (`batch_seq` does not count it). After that the message is sent and counted. The batch stays usable.
        """
        session, batch = self._session, self._batch
        if telemetry.observer is not None or not session.can_send:
            message = BatchMessage(subject, payload, **options)
            batch.wire.encode(message)  # a call that is refused opens nothing and waits for nothing
            return await session.send_all(iter((message,)), subject)
        if options:
            command = batch.add(BatchMessage(subject, payload, **options), session.now())
        else:
            command = batch.add_plain(subject, payload, session.now())
        seq = batch.sent
        session.write(command, 1, len(payload))
        if batch.state is not State.OPEN:  # the write has found out that the connection is lost
            await session.wait(batch.started)
        return FastPubAck(seq, batch.window.acked)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> FastPubAck:
        """Publish many messages, with one write for as many as the window has room for.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or
                an async iterable. It is consumed as the window allows, so it may be endless. An async iterable is read in a
                task of its own, which is cancelled if the batch ends while it waits.

        Returns:
            As for `add`, when all messages are sent and at most a window of them is unacknowledged.

        Raises:
            BatchError, UnsupportedFeatureError, StreamConfigMismatchError: As for `add`.
            Exception: What `messages` raises, or the error of a message that cannot be sent. Everything before it was
                sent; the batch stays usable.

        Cancellation: The batch stays usable. `batch_seq` counts what was sent; the last message that was taken from
            `messages` may not be.
        """
        check_messages(messages)
        if not isinstance(messages, AsyncIterable):
            return await self._session.send_all(iter(messages))
        pump = Pump(messages)
        try:
            return await self._session.send_all(pump)
        finally:
            await pump.aclose()

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
        await session.wait_to_ask()
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
        await session.wait_to_ask()
        before = batch.window.pongs
        session.write(batch.ping(session.now()), 1, 0)
        await session.wait(lambda: batch.window.pongs > before)
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
        await self._session.commit()
        return self._batch.result()

    async def discard(self) -> None:
        """End the batch without a commit, on the server too. What was sent stays stored.

        Cancellation: Cannot occur: the call never suspends.
        """
        self._session.discard()

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
        deadline = session.now() + batch.clock.timeout
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
            await session.handlers.end(0.0 if cancelled else deadline - session.now())


class FastSession:
    """Carries messages, replies, timers and events between the callers, the batch and the connection.

    `batch` are the arguments of `FastBatch`, which makes every decision; `handlers` are called with events of their type.
    """

    _inbox: InboxSubscription | None = None

    def __init__(
        self,
        context: Context,
        *,
        handlers: Mapping[type[Event], Callable[[Any], object] | None],
        **batch: Any,
    ) -> None:
        self._context = context
        self.connection: BaseConnection = connection_of(context.nc)
        self.batch: FastBatch = FastBatch(
            max_payload=self.connection.max_payload,
            inbox_size=self.connection.inbox_size,
            prefix=context.prefix,
            **batch,
        )
        self.now: Callable[[], float] = lambda: asyncio.get_running_loop().time()  # `_open` sets a faster one
        self.handlers: _Handlers = _Handlers(handlers, self.batch.batch_id)
        self.senders: deque[Sender] = deque()  # the first one sends; one that sends at once overtakes those that wait
        self._waiters = 0  # callers that wait for the server
        self._changed = asyncio.Event()  # set and cleared at once, to wake all callers in `wait`
        self._ended = asyncio.Event()
        self._fire = weakly(self._timer_fired)
        self._timer: asyncio.TimerHandle | None = None
        self._counted = 0  # messages that an observer was told are acknowledged
        self._is_refused: Callable[[], bool] = never  # whether the server has refused a message to the first subject
        # Whether the batch ended because the user may not publish its first message: then nothing is stored.
        self.not_permitted: bool = False
        self.one_stream: StreamState | None = None  # the only one that the batch may be for; None: any

    # -- what an observer is told ---------------------------------------------------------------------------------

    @property
    def _stream(self) -> StreamState | None:
        return self.batch.server.stream

    def call(self, kind: telemetry.Kind, subject: str | None = None) -> telemetry.Call:
        """Begin a call on the batch, about one message of `subject` or any number of messages."""
        return telemetry.Call(kind, self.connection, self.batch.batch_id, lambda: self._stream, subject=subject)

    @property
    def largest(self) -> int:
        """How many bytes a message with its headers may have, as far as it is known."""
        limit, room = None if self._stream is None else self._stream.max_msg_size, self.connection.max_payload
        return room if limit is None else min(room, limit)

    def _count(self, observer: telemetry.Observer, events: list[Event]) -> None:
        stream, acked = None if self._stream is None else self._stream.name, self.batch.acked
        # Not with each ack: a metric costs about as much as sending ten messages.
        if acked - self._counted >= _COUNTED_AT_ONCE or (acked > self._counted and isinstance(events[-1], Ended)):
            observer.count(telemetry.Count.ACKNOWLEDGED, acked - self._counted, stream=stream)
            self._counted = acked
        for event in events:
            if isinstance(event, BatchFlowGap):
                observer.count(telemetry.Count.GAPS, 1, stream=stream)
                observer.count(telemetry.Count.LOST, event.seq - event.first_lost, stream=stream)
            elif isinstance(event, BatchFlowError):
                observer.count(telemetry.Count.REFUSED, 1, stream=stream, error=type(event.error).__qualname__)

    # -- sending --------------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether a message can be sent without waiting."""
        # The connection is asked first: where nats-py is not known, only that tells the batch of a reconnect.
        return not self.senders and self.connection.ready and self.batch.has_room

    @property
    def opened(self) -> bool:
        """Whether the batch has its inbox."""
        return self._inbox is not None

    async def send(self, sender: Sender, entries: Iterator[Entry]) -> None:
        """Send from `entries` when it is the turn of `sender`, as the window and the write buffer have room."""
        sender.begin(entries)
        try:
            with queued(self.senders, sender):
                while await self._has_turn(sender):
                    sender.send()
                    self.senders.rotate(-1)  # after a block it is the turn of the next caller
                    self.senders[0].wake()
        finally:
            self._wake()
        if (stopped := sender.stopped) is not None and not isinstance(stopped, StopIteration):
            raise stopped

    async def send_each(self, sender: Sender, source: Pump) -> None:
        """Send each message of a source by itself: a slow one must not wait for a full block."""
        source.wake = self._wake
        while True:
            # Before a message is taken, so that a cancelled call rarely loses one. The first one opens the batch.
            if self.opened and not self.batch.has_room:
                await self.wait(self.batch.can_send)
            await self._next_of(source)
            try:
                entry = source.take()
            except StopAsyncIteration:
                return
            await self.send(sender, iter((entry,)))

    async def send_all(self, messages: Iterator[Entry] | Pump, subject: str | None = None) -> FastPubAck:
        """Send messages as the window allows, all of `subject` if it is given; after an error, another batch can go on."""
        batch = self.batch
        with self.call(telemetry.Kind.SEND, subject) as call:
            sender = Sender(self, call.trace)
            try:
                if isinstance(messages, Pump):
                    await self.send_each(sender, messages)
                else:
                    await self.send(sender, messages)
            finally:
                call.messages = sender.sent
        if batch.sent and batch.state is not State.OPEN:
            await self.wait(batch.started)
        return FastPubAck(sender.newest or batch.sent, batch.acked)

    async def commit(self) -> None:
        """End the batch after all calls that were made before; `batch.result` has the final ack."""
        batch = self.batch
        with self.call(telemetry.Kind.COMMIT) as call:
            try:
                await self.wait_to_commit()
                self.write(batch.commit(self.now()), 1, 0)
                await self.wait(batch.committed)
            except asyncio.CancelledError:
                if batch.state is State.COMMITTING:
                    self.discard()
                raise
            finally:
                call.messages = batch.sent

    def discard(self) -> None:
        self.deliver(*self.batch.discard())

    async def _next_of(self, source: Pump) -> None:
        """Wait until a source has a message or has stopped, or raise what ended the batch or the connection."""
        ready = source.ready
        source.want()
        if not self.opened and not ready.is_set():  # nothing tells an unused batch about its connection
            await self.connection.bounded(ready.wait(), math.inf, "a message")
        if ready.is_set():
            return
        with self._waiting():
            while not ready.is_set() and not self.batch.reached(never):
                await self._changed.wait()

    async def _has_turn(self, sender: Sender) -> bool:
        """Return True when it is the sender's turn, and the batch takes a message; False when it is stopped.

        A message takes its sequence only while the write buffer has room, so the buffer bounds the memory of a window.
        """
        batch, connection, senders, began = self.batch, self.connection, self.senders, self.now()
        deadline = began + batch.clock.timeout
        try:
            while sender.stopped is None:
                if batch.state is State.DRAINING:
                    await self.wait(never)  # for the final ack, which belongs on the error
                batch.check_open()
                if senders[0] is not sender:
                    await sender.wait(math.inf if self.opened else deadline)
                elif not self.opened:
                    if (message := sender.first()) is not None:
                        await self._open(message, began, deadline)
                elif not batch.reached(batch.can_send):
                    await self._wait_window(sender)
                elif not connection.usable:
                    self._lost()
                elif not connection.has_room:
                    await self._wait_buffer(deadline)
                else:
                    batch.wire.max_payload = connection.max_payload
                    return True
        except RequestTimeoutError as late:
            if batch.sent:
                raise
            text = f"batch {batch.batch_id}: the first message was not sent within {self.now() - began:.3g} s: {late}"
            raise RequestTimeoutError(text) from late
        return False

    async def _wait_window(self, sender: Sender) -> None:
        """Wait until the window has room."""
        batch = self.batch
        with self._waiting():
            while sender.stopped is None and not batch.reached(batch.can_send):
                batch.waiting(self.now())
                self._arm()
                await sender.wait()

    async def _wait_buffer(self, deadline: float) -> None:
        batch, state = self.batch, self.batch.state
        timeout = batch.clock.timeout if batch.sent else max(0.0, deadline - self.now())
        try:
            await self.connection.wait_room(timeout, over=lambda: batch.state is not state)
        except RequestTimeoutError:
            if not batch.sent:
                raise
            self.deliver(batch.give_up(self.now()))
        except nats.errors.Error:
            self._disconnected()

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

    # -- waiting --------------------------------------------------------------------------------------------------

    async def wait_to_ask(self) -> None:
        """Wait until a ping or the commit can be sent on a usable connection."""
        while True:
            await self.wait(self.batch.can_ask)
            if self._ended.is_set() or self.connection.usable:
                return
            self._lost()

    async def wait_to_commit(self) -> None:
        """Wait until the batch can be committed, after all calls that were made before."""
        before = tuple(self.senders)
        await self.wait(lambda: not any(sender in self.senders for sender in before))
        await self.wait_to_ask()

    def _lost(self) -> None:
        """Take the loss of the connection that nats-py has noticed, although its reader task has not ended yet."""
        if not self.batch.sent:
            self._context.connection.check_usable()
        else:
            self._disconnected()

    async def wait(self, goal: Callable[[], bool]) -> None:
        """Wait for `goal`, or raise what ended the batch; the batch's timers bound the wait."""
        batch = self.batch
        if batch.reached(goal):
            return
        with self._waiting():
            while not batch.reached(goal):
                batch.waiting(self.now())
                self._arm()
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waiters += 1
        _WAITED_FOR.add(self)
        try:
            yield
        finally:
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

    # -- the connection -------------------------------------------------------------------------------------------

    async def _open(self, first: BatchMessage, began: float, deadline: float) -> None:
        """Open the batch for its first message, unless the connection has no room for it any more."""
        context, connection, batch = self._context, self._context.connection, self.batch
        connection.check_usable()
        server = await find_server(context, first.subject, first.stream, max(0.0, deadline - self.now()), FAST_INGEST)
        FAST_INGEST.check(server.api_level, server.version, "nothing was sent")
        stream = server.stream
        if stream is not None:
            if self.one_stream is not None and self.one_stream.name != stream.name:
                raise BadSubjectError(
                    f"subject {first.subject!r} is stored by stream {stream.name!r}, those of earlier messages by "
                    f"{self.one_stream.name!r}; all messages must be of one stream, so the message was not sent"
                )
            if self.one_stream is not None and recreated(self.one_stream.created, stream.created):
                text = f"stream {stream.name!r} was created again, or its server was restarted; nothing was sent"
                raise StreamRecreatedError(text, stream=stream.name)
            stream.check_acks()
        handler = InboxHandler(weakly(self._receive), weakly(self._disconnected), weakly(self._reconnected))
        inbox = await connection.inbox(handler, tail=f".{batch.batch_id}.>", timeout=max(0.0, deadline - self.now()))
        try:
            if self.now() >= deadline:
                raise RequestTimeoutError("no answer to the lookups")
            self._is_refused = connection.refusals(first.subject)
            batch.open(inbox.subject, server, self.now() - began)
        except BaseException:
            inbox.close()
            raise
        self.now = asyncio.get_running_loop().time
        self._inbox = inbox

    def _receive(self, frames: list[Frame]) -> None:
        self.deliver(*self.batch.receive(frames, self.now()))

    def _disconnected(self) -> None:
        nc = self.connection.nc
        for_good = self.connection.end is not None or nc.is_draining
        how = "was closed" if nc.is_closed else "is draining" if nc.is_draining else "was lost"
        self.deliver(self.batch.disconnected(self.now(), for_good=for_good, why=f"the connection {how}"))

    def _reconnected(self) -> None:
        self.batch.wire.max_payload = self.connection.max_payload
        self.deliver([], self.batch.reconnected(self.now()))

    # -- events and timers ----------------------------------------------------------------------------------------

    def deliver(self, events: list[Event], out: bytes = b"") -> None:
        """Send `out`, call the handlers of `events`, wake the waiters and the first sender."""
        if out:
            self.connection.write_if_usable(out)  # otherwise the connection calls `_disconnected`
        if events and telemetry.observer is not None:
            self._count(telemetry.observer, events)
        for event in events:
            if isinstance(event, UnrecognisedReply):
                _log.warning("batch %s: ignored an unrecognised reply: %.200r", self.batch.batch_id, event.payload)
            elif isinstance(event, Ended):
                self._ended.set()
                for sender in self.senders:
                    sender.wake()
                if self._inbox is not None:
                    self._inbox.close()
            else:
                self.handlers.call(event)
        self._wake()
        if self.senders:
            self.senders[0].wake()
        self._arm()

    def _arm(self) -> None:
        due = self.batch.next_timer()
        if due is not None and self.batch.state is State.STARTING:
            due = min(due, self.now() + _LOOK_EVERY)
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return  # it fires early, finds nothing due and is armed again; that is cheaper than moving it each time
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _timer_fired(self) -> None:
        self._timer = None
        batch, now = self.batch, self.now()
        silence = self.connection.why_silent([batch.first_subject])
        self.not_permitted = batch.state is State.STARTING and self._is_refused()
        events, out = (batch.give_up(now, silence), b"") if self.not_permitted else batch.handle_timer(now, silence)
        if events or out:
            self.deliver(events, out)
        else:
            self._arm()

    def __del__(self) -> None:
        if self._inbox is not None:
            then: list[Callable[[], object]] = [
                self.handlers.cancel,
                partial(self.connection.write_if_usable, self.batch.discard()[1]),
            ]
            if self._timer is not None:
                then.append(self._timer.cancel)
            self._inbox.owner_dropped(f"FastPublisher {self.batch.batch_id}", then)


class Sender(Turn):
    """The messages of one call."""

    def __init__(self, session: FastSession, trace: TraceContext | None) -> None:
        self.entries: Iterator[Entry] = iter(())
        self.sent: int = 0  # how many messages were sent, and the batch sequence of the newest
        self.newest: int = 0
        # What the source raised (StopIteration at its end), a message's refusal, or what ended the batch.
        self.stopped: BaseException | None = None
        self._session = session
        self._trace = trace  # what every message gets

    def begin(self, entries: Iterator[Entry]) -> None:
        self.entries, self.stopped = entries, None

    def first(self) -> BatchMessage | None:
        """Return the first message, checked, which stays the next one to be sent; None at the end of the source."""
        for entry in self.entries:
            message = as_message(entry)
            self._session.batch.wire.encode(message)
            self.entries = chain((message,), self.entries)
            return message
        self.stopped = StopIteration()
        return None

    def send(self) -> None:
        """Send until the source stops, the window or the write buffer is full, or another caller waits for a turn."""
        session, entries, trace = self._session, self.entries, self._trace
        if trace is not None:
            entries = (trace.carried_by(entry, session.largest) for entry in entries)
        try:
            while True:
                data, count, size, self.stopped = session.batch.add_many(entries, session.now())
                if count:
                    self.sent, self.newest = self.sent + count, session.batch.sent
                    session.write(data, count, size)
                if self.stopped is not None or len(session.senders) > 1:
                    break
                if not (session.connection.ready and session.batch.has_room):
                    break
        except Exception as error:  # what ended the batch
            self.stopped = error


class Pump:
    """Reads an async source in a task of its own: a batch that ends need not wait for its next message."""

    def __init__(self, source: AsyncIterable[Entry]) -> None:
        self.wake: Callable[[], object] = lambda: None  # tells who waits for a message
        self.ready: asyncio.Event = asyncio.Event()  # `take` returns or raises
        self._next: list[Entry] = []
        self._stopped: BaseException | None = None
        self._wanted = asyncio.Event()
        self._task = asyncio.create_task(self._read(source))

    async def _read(self, source: AsyncIterable[Entry]) -> None:
        try:
            await self._wanted.wait()
            async for entry in source:
                self._wanted.clear()
                self._next.append(entry)
                self._tell()
                await self._wanted.wait()
            self._stopped = StopAsyncIteration()
        except BaseException as error:
            self._stopped = error
        self._tell()

    def _tell(self) -> None:
        self.ready.set()
        self.wake()

    def want(self) -> None:
        """Begin to read the next message, unless that has begun."""
        if not self.ready.is_set():
            self._wanted.set()

    def take(self) -> Entry:
        """Return the next message, or raise what the source has raised: StopAsyncIteration at its end."""
        if not self._next:
            assert self._stopped is not None
            raise self._stopped
        self.ready.clear()
        return self._next.pop()

    async def aclose(self) -> None:
        await cancel(self._task, _CANCEL_TIMEOUT)


class _Handlers:
    """Calls the handlers of events; what coroutine functions return is awaited in one task, which does not hold the session."""

    def __init__(self, handlers: Mapping[type[Event], Callable[[Any], object] | None], batch_id: str) -> None:
        self._handlers = {kind: handler for kind, handler in handlers.items() if handler is not None}
        self._batch_id = batch_id
        self._waiting: deque[Awaitable[object]] = deque()  # oldest first
        self._task: asyncio.Task[None] | None = None
        self._is_behind = False

    def call(self, event: Event) -> None:
        result = None
        try:
            if (handler := self._handlers.get(type(event))) is not None:
                result = handler(event)
        except (Exception, asyncio.CancelledError) as error:  # no suspension here: the handler itself raised it
            self._failed(error)
        if not inspect.isawaitable(result):
            return
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
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
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
