"""What keeps a `protocol.fast.FastBatch` going on a connection: its replies, its timers, its waiters, its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import nats.errors

from jetstream_ext.client.base_connection import BaseConnection, InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.client.lookup import api_level
from jetstream_ext.errors import BatchClosedError
from jetstream_ext.protocol.fast import FastBatch
from jetstream_ext.protocol.fast_endings import FAST_LEVEL, unsupported
from jetstream_ext.protocol.fast_record import Ended, Event, State
from jetstream_ext.protocol.fast_replies import UnknownReply
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchFlowAck, BatchFlowError, BatchFlowGap, BatchMessage, EndReason

_log = logging.getLogger("jetstream_ext")

GapHandler = Callable[[BatchFlowGap], Awaitable[None] | None]
ErrorHandler = Callable[[BatchFlowError], Awaitable[None] | None]
FlowHandler = Callable[[BatchFlowAck], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the user wants to be told."""

    gap: GapHandler | None = None
    error: ErrorHandler | None = None
    flow: FlowHandler | None = None


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class FastDriver:
    """Opens one batch on first use and runs it. It decides nothing: the machine does.

    Args:
        js: The context.
        batch_id: The batch.
        new_machine: Makes the machine, given the inbox and the server's limit for a message.
        handlers: What to call.
    """

    def __init__(
        self, js: Context, batch_id: str, new_machine: Callable[[str, int], FastBatch], handlers: Handlers
    ) -> None:
        self.machine: FastBatch | None = None
        self.discarded: bool = False
        self.now: Callable[[], float] = _loop_time
        """The time that the machine goes by."""
        self._js = js
        self._batch_id = batch_id
        self._new_machine = new_machine
        self._handlers = handlers
        self._connection: BaseConnection | None = None
        self._inbox: InboxSubscription | None = None
        self._opening = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._stalled = 0
        self._timer: asyncio.TimerHandle | None = None
        self._callbacks: set[asyncio.Task[None]] = set()

    @property
    def open_machine(self) -> FastBatch | None:
        """The machine, if it takes a message right now: what `ready` would return without a wait."""
        machine = self.machine
        if machine is None or machine.state is not State.OPEN:
            return None
        assert self._connection is not None
        return machine if self._connection.usable else None

    async def open(self, first: BatchMessage | None = None) -> FastBatch:
        """Return the machine; where there is none yet, refuse a bad `first` message before anything is open.

        Raises:
            UnsupportedFeatureError: The server is too old; nothing was sent.
        """
        async with self._opening:
            if self.machine is not None:
                return self.machine
            self._check_discarded()
            connection = self._js.connection
            connection.check_usable()
            if first is not None:
                self._new_machine("", connection.max_payload).add(first, 0.0)
            if await api_level(self._js) < FAST_LEVEL:
                raise unsupported(connection.server_version)
            sink = InboxHandler(self._frames, self._disconnected, self._reconnected)
            inbox = await connection.inbox(sink, tail=f".{self._batch_id}.>", timeout=self._js.timeout)
            try:
                self._check_discarded()
            except BatchClosedError:
                inbox.close()
                raise
            self._connection, self._inbox = connection, inbox
            self.now = asyncio.get_running_loop().time  # without a look-up for every message
            self.machine = self._new_machine(inbox.subject, connection.max_payload)
            return self.machine

    def _check_discarded(self) -> None:
        if self.discarded:
            raise BatchClosedError(
                f"batch {self._batch_id} has ended (discarded)", batch_id=self._batch_id, outcome="not_stored"
            )

    async def ready(self, first: BatchMessage | None = None) -> FastBatch:
        """Return the machine when it can take a message, or raise what ended it, with the server's final ack."""
        machine = self.machine or await self.open(first)
        connection = self._connection
        assert connection is not None
        while True:
            if not machine.ready:
                with self._stalling(machine):
                    while not machine.ready:
                        await self._event(machine)
            if machine.state is not State.OPEN:
                machine.check_open()
            if connection.usable:
                return machine
            if machine.state is State.NEW:
                connection.check_usable()
            self._disconnected()  # nats-py knows it already; the end of its reader is still to come

    async def write(self, data: bytes, messages: int, size: int) -> None:
        """Write what the machine gave."""
        assert self._connection is not None
        assert self.machine is not None
        try:
            await self._connection.write(data, messages, size, timeout=self._js.timeout)
        except nats.errors.Error as error:
            # The bytes have their sequences and did not leave: to the batch they are lost.
            for_good = not isinstance(error, nats.errors.ConnectionReconnectingError)
            self.happened(self.machine.disconnected(self.now(), for_good=for_good))
            self.machine.check_open()
        if self._timer is None:
            self._arm()  # a timer that is set already comes early enough: writing only moves what is due

    async def wait(self, done: Callable[[], bool]) -> None:
        """Wait for `done`, as long as the machine's timers allow and the batch lives; raise what ended it otherwise."""
        machine = self.machine
        assert machine is not None
        with self._stalling(machine):
            while machine.state is not State.ENDED:
                if machine.state is not State.DRAINING and done():
                    return
                await self._event(machine)
        if machine.end_reason is not EndReason.COMMITTED:
            machine.check_open()

    @contextlib.contextmanager
    def _stalling(self, machine: FastBatch) -> Iterator[None]:
        """Let the machine's stall timers run: one wait, however often its waiter is woken for nothing."""
        self._stalled += 1
        try:
            yield
        finally:
            self._stalled -= 1
            if not self._stalled:
                machine.not_waiting()

    async def _event(self, machine: FastBatch) -> None:
        """Wait until something happens."""
        if self._stalled:
            machine.waiting(self.now())
            self._arm()
        await self._woken()

    async def _woken(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def ended(self) -> EndReason:
        """Wait for the end of the batch without asking the server for anything."""
        # Nothing is opened for it: whoever gives the waiting up would leave that behind.
        while (machine := self.machine) is None or machine.end_reason is None:
            if machine is None and self.discarded:
                return EndReason.DISCARDED
            await self._woken()
        return machine.end_reason

    def discard(self) -> None:
        """End the batch here and now."""
        self.discarded = True
        if self.machine is not None:
            self.happened(self.machine.discard())
        else:
            self._wake()

    # -- what the connection says -------------------------------------------------------------------------------

    def _frames(self, frames: list[Frame]) -> None:
        if self.machine is not None:
            events, out = self.machine.receive(frames, self.now())
            self.happened(events, out)

    def _disconnected(self) -> None:
        if self.machine is not None:
            assert self._connection is not None
            reconnecting = not self._connection.closed and not self._connection.draining
            self.happened(self.machine.disconnected(self.now(), for_good=not reconnecting))

    def _reconnected(self) -> None:
        if self.machine is not None:
            events, out = self.machine.reconnected(self.now())
            self.happened(events, out)

    # -- what follows -------------------------------------------------------------------------------------------

    def happened(self, events: list[Event], out: bytes = b"") -> None:
        """Send what the machine wants sent, tell the handlers, wake the waiters."""
        if out:
            assert self._connection is not None
            try:
                self._connection.write_nowait(out, 1, 0)
            except nats.errors.Error:
                pass  # the connection reports its loss itself
        for event in events:
            if isinstance(event, UnknownReply):
                _log.warning("batch %s: ignored a reply that is none: %r", self._batch_id, event.payload)
            elif isinstance(event, Ended):
                self._close()
            else:
                self._call(event)
        self._wake()
        self._arm()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _call(self, event: Event) -> None:
        handlers = self._handlers
        try:
            result: Awaitable[None] | None = None
            if isinstance(event, BatchFlowAck):
                result = handlers.flow(event) if handlers.flow else None
            elif isinstance(event, BatchFlowGap):
                result = handlers.gap(event) if handlers.gap else None
            elif isinstance(event, BatchFlowError):
                result = handlers.error(event) if handlers.error else None
        except (Exception, asyncio.CancelledError) as error:  # the latter is not ours: nothing here suspends
            self._handler_failed(error)
        else:
            if inspect.isawaitable(result):
                task = asyncio.get_running_loop().create_task(self._finish_handler(result))
                self._callbacks.add(task)
                task.add_done_callback(self._callbacks.discard)

    async def _finish_handler(self, result: Awaitable[None]) -> None:
        try:
            await result
        except Exception as error:
            self._handler_failed(error)

    def _handler_failed(self, error: BaseException) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"a handler of batch {self._batch_id} failed", "exception": error}
        )

    def _timer_fired(self) -> None:
        self._timer = None
        assert self.machine is not None
        events, out = self.machine.handle_timer(self.now())
        if events or out:
            self.happened(events, out)
        else:
            self._arm()

    def _arm(self) -> None:
        due = self.machine.next_timer() if self.machine is not None else None
        if self._timer is not None:
            if due is not None and self._timer.when() <= due:
                return  # it fires early, finds nothing due and is armed anew: cheaper than moving it for every message
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._timer_fired)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._inbox is not None:
            self._inbox.close()
