"""What connects a `protocol.fast.FastBatch` to a connection: its replies, its timer, its waiters, its handlers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats.errors

from jetstream_ext.client.base_connection import BaseConnection, InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.client.lookup import api_level
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.fast import Ended, Event, FastBatch
from jetstream_ext.protocol.fast_wire import Encoded, UnrecognisedReply
from jetstream_ext.protocol.feature_table import FAST_INGEST
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchMessage, EndReason

_log = logging.getLogger("jetstream_ext.fast")

EventHandler = Callable[[Any], Awaitable[None] | None]


class FastSession:
    """Delivers what the batch, the connection and the callers say to each other. It decides nothing: the batch does.

    Args:
        context: The caller's context.
        handlers: What to call with events, by their type.
        batch: The keywords of `FastBatch`.
    """

    def __init__(self, context: Context, handlers: Mapping[type[Event], EventHandler | None], **batch: Any) -> None:
        self.batch: FastBatch = FastBatch(**batch)
        self.now: Callable[[], float]
        """The time that the batch goes by, once it is open."""
        self._context = context
        self._handlers = handlers
        self._connection: BaseConnection | None = None
        self._inbox: InboxSubscription | None = None
        self._turn = asyncio.Lock()
        self._senders = 0  # that wait for their turn
        self._waiters = 0  # for anything
        self._changed = asyncio.Event()  # a pulse: set and cleared at once
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: set[asyncio.Task[None]] = set()

    # -- callers --------------------------------------------------------------------------------------------------

    @property
    def clear(self) -> bool:
        """Whether a message can be sent without a wait."""
        connection = self._connection
        return not self._senders and connection is not None and connection.usable and self.batch.has_room

    def encode(self, message: BatchMessage) -> Encoded:
        """As `FastBatch.encode`, with the limits of the connection."""
        if self._connection is None:
            self.batch.set_max_payload(self._context.connection.max_payload)
        return self.batch.encode(message)

    async def turn(self) -> None:
        """Wait until a message can be sent; callers take their turns in the order of their calls.

        Raises:
            UnsupportedFeatureError: The server is too old; nothing was sent.
            BatchError: The batch has ended.
        """
        self._senders += 1
        try:
            async with self._turn:
                await self.ready(self.batch.can_send)
        finally:
            self._senders -= 1

    async def ready(self, goal: Callable[[], bool]) -> None:
        """Wait for `goal` on a connection that takes what is written; open the batch if it is new."""
        while True:
            await self.wait(goal)
            connection = self._connection
            if connection is None:
                await self._open()
            elif connection.usable:
                return
            elif not self.batch.sent:
                connection.check_usable()
            else:
                self._disconnected()  # nats-py knows it already; the end of its reader task is still to come

    async def wait(self, goal: Callable[[], bool]) -> None:
        """Wait for `goal`, as long as the batch's timers allow.

        Raises:
            BatchError: The batch has ended, with the server's final ack.
        """
        batch = self.batch
        if batch.reached(goal):
            return
        self._waiters += 1
        try:
            while True:
                batch.waiting(self.now())
                self._arm()
                await self._changed.wait()
                if batch.reached(goal):
                    return
        finally:
            self._waiters -= 1
            if not self._waiters:
                batch.not_waiting()

    async def closed(self) -> EndReason:
        """Wait for the end of the batch, without asking the server for anything."""
        while self.batch.end_reason is None:
            await self._changed.wait()
        return self.batch.end_reason

    async def write(self, data: bytes, messages: int, size: int) -> None:
        """Write what the batch gave; raise what ended the batch if that failed."""
        assert self._connection is not None
        batch = self.batch
        try:
            await self._connection.write(data, messages, size, timeout=batch.ack_timeout)
        except RequestTimeoutError:
            self.deliver(batch.write_timed_out(self.now()))
            batch.check_open()
        except nats.errors.Error as error:
            # The bytes have their sequences and were not sent: for the batch they are lost.
            for_good = not isinstance(error, nats.errors.ConnectionReconnectingError)
            self.deliver(batch.disconnected(self.now(), for_good=for_good))
            batch.check_open()
        if self._timer is None:
            self._arm()  # a timer that is set is early enough: writing only puts off what is due

    # -- the connection -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        connection = self._context.connection
        connection.check_usable()
        level = await api_level(self._context)
        if not FAST_INGEST.at(level):
            raise FAST_INGEST.unsupported(
                server_version=connection.server_version, api_level=level, detail="nothing was sent"
            )
        handler = InboxHandler(self._receive, self._disconnected, self._reconnected)
        tail = f".{self.batch.batch_id}.>"
        self._inbox = await connection.inbox(handler, tail=tail, timeout=self.batch.ack_timeout)
        try:
            self.batch.open(self._inbox.subject)
        except BaseException:
            self._inbox.close()
            raise
        self.batch.set_max_payload(connection.max_payload)
        self.now = asyncio.get_running_loop().time
        self._connection = connection

    def _receive(self, frames: list[Frame]) -> None:
        self.deliver(*self.batch.receive(frames, self.now()))

    def _disconnected(self) -> None:
        assert self._connection is not None
        for_good = self._connection.closed or self._connection.draining
        self.deliver(self.batch.disconnected(self.now(), for_good=for_good))

    def _reconnected(self) -> None:
        assert self._connection is not None
        self.batch.set_max_payload(self._connection.max_payload)
        self.deliver([], self.batch.reconnected(self.now()))

    # -- what follows ---------------------------------------------------------------------------------------------

    def deliver(self, events: list[Event], out: bytes = b"") -> None:
        """Send what the batch wants sent, call the handlers, wake the waiters."""
        if out:
            assert self._connection is not None
            try:
                self._connection.write_nowait(out, 1, 0)
            except nats.errors.Error:
                pass  # the connection reports its loss by itself
        for event in events:
            if isinstance(event, UnrecognisedReply):
                _log.warning("batch %s: ignored an unrecognised reply: %r", self.batch.batch_id, event.payload)
            elif isinstance(event, Ended):
                if self._inbox is not None:
                    self._inbox.close()
            elif (handler := self._handlers.get(type(event))) is not None:
                self._call(handler, event)
        self._changed.set()
        self._changed.clear()
        self._arm()

    def _call(self, handler: EventHandler, event: Event) -> None:
        try:
            result = handler(event)
        except (Exception, asyncio.CancelledError) as error:  # nothing here suspends: the cancellation is the handler's
            self._handler_failed(error)
        else:
            if inspect.isawaitable(result):
                task = asyncio.get_running_loop().create_task(self._finish(result))
                self._callbacks.add(task)
                task.add_done_callback(self._callbacks.discard)

    async def _finish(self, result: Awaitable[None]) -> None:
        try:
            await result
        except Exception as error:
            self._handler_failed(error)

    def _handler_failed(self, error: BaseException) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a handler of batch {self.batch.batch_id} failed", "exception": error}
        )

    def _arm(self) -> None:
        due = self.batch.next_timer()
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return  # it fires early, finds nothing due and is armed again: cheaper than moving it every time
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        events, out = self.batch.handle_timer(self.now())
        if events or out:
            self.deliver(events, out)
        else:
            self._arm()
