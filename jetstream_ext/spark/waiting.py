"""How a query waits for new messages: the time when to look for some is decided by doorbells, where they can be had.

Spark asks for the end of the next micro-batch every 10 ms while a query is idle. A call waits until a doorbell has rung, or for a
second at most, and looks then: its answer has what was stored before the call (`processAllAvailable` relies on that).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.connection import Context
from jetstream_ext.client.doorbell import Waiter, shared
from jetstream_ext.protocol.api import StreamState

# Without doorbells, the server is asked less and less often: the first pause in seconds, and the longest one.
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 1.0
_MOST_DOORBELLS: Final = 8


class Waiting:
    """The wait of a query for new messages of its streams, those on `subject` if it is given."""

    def __init__(self, subject: str | None) -> None:
        self._subject = subject
        self._task: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._waiters: dict[str, Waiter] = {}
        self._connection: BaseConnection | None = None  # of the doorbells; a query may get another one

    async def until_due(self) -> None:
        """Return when there is a reason to look for new messages, after `_LONGEST_PAUSE` at the latest."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_LONGEST_PAUSE)

    def begin(self, context: JetStreamContext, streams: Sequence[StreamState], most: float, looked: float) -> None:
        """Wait, after a look at the time `looked` that has found no new messages in `streams`.

        If there are no doorbells, that takes up to `most` seconds.
        """
        self._pause = min(max(_FIRST_PAUSE, self._pause * 1.5), _LONGEST_PAUSE)
        if 0 < len(streams) <= _MOST_DOORBELLS:
            waiters = [self._waiter(context, state.name) for state in streams]
            for waiter in waiters:
                waiter.looked(looked)
            pairs = zip(waiters, streams, strict=True)
            pauses = [waiter.pause(state, state.last_seq + 1) for waiter, state in pairs]
        else:
            pauses = [asyncio.sleep(min(self._pause, most))]
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(_first_of(pauses))

    def found(self, streams: Sequence[str]) -> None:
        """Note that these streams had new messages."""
        self._pause = 0.0
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for name in streams:
            if name in self._waiters:
                self._waiters[name].found()

    def end(self) -> None:
        """End the wait, and leave nothing behind; any thread may ask for it."""
        if self._task is not None and not (loop := self._task.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._leave, self._task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        task.add_done_callback(lambda _: self._leave_doorbells())

    def _leave_doorbells(self) -> None:
        for waiter in self._waiters.values():
            waiter.leave()

    def _waiter(self, context: JetStreamContext, stream: str) -> Waiter:
        js = Context(context)
        if self._connection is not js.connection:
            self._leave_doorbells()
            self._connection, self._waiters = js.connection, {}
        if stream not in self._waiters:
            self._waiters[stream] = Waiter(shared(js, stream, self._subject), poll=_LONGEST_PAUSE)
        return self._waiters[stream]


async def _first_of(pauses: Sequence[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(pause) for pause in pauses]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
