"""The slow road to the server, for a nats-py whose internals are not the ones that `connection` knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetstream_ext.client.sinks import Door, Inbox, Sink, tell_disconnected, tell_reconnected, unsubscribe
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h

# Seconds between two looks whether the connection is there: in public nats-py tells only its user's own callbacks.
_LOOK_AGAIN = 0.05

_T = TypeVar("_T")


class PublicConnection(Door):
    """The slow road, with nothing but nats-py's public methods.

    Args:
        nc: The user's connection.
        server_info: Returns the greeting of the server it is connected to.
    """

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(nc, server_info)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()
        self._sinks: dict[Subscription, Sink] = {}
        self._looking: asyncio.Task[None] | None = None
        self._session = 0
        self._lost = False

    async def inbox(self, sink: Sink, *, tail: str = "") -> Inbox:
        """As `Connection.inbox`."""
        inbox = Inbox(self.drop, self.nc.new_inbox())

        async def deliver(msg: Msg) -> None:
            block = h.rebuild(msg.headers)
            sink.frames([(msg.subject.encode(), block + msg.data, len(block))])

        subscribing = self._spawn(self.nc.subscribe(inbox.subject + tail, cb=deliver))
        try:
            subscription = await asyncio.shield(subscribing)
        except asyncio.CancelledError:
            subscribing.add_done_callback(self._unwanted)
            raise
        self._look()  # what happened before is nothing that this sink has lost
        self._sinks[subscription] = sink
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._keep_looking())
        inbox.subscription = subscription
        return inbox

    def _unwanted(self, subscribing: asyncio.Task[Subscription]) -> None:
        if not subscribing.cancelled() and subscribing.exception() is None:
            self.drop(subscribing.result())

    async def _keep_looking(self) -> None:
        while not self.closed:
            await asyncio.sleep(_LOOK_AGAIN)
            self._look()

    def _look(self) -> None:
        session, there = self.nc.stats["reconnects"], self.nc.is_connected
        if (session != self._session or not there) and not self._lost:
            self._lost = True
            tell_disconnected(self._sinks.values())
        if there and self._lost:
            self._lost, self._session = False, session
            tell_reconnected(self._sinks.values())

    def drop(self, subscription: Subscription) -> None:
        """As `Connection.drop`, in the background."""
        self._sinks.pop(subscription, None)
        if not self._sinks and self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._spawn(unsubscribe(subscription))

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """As `Connection.write_nowait`, in the background."""
        self.check_usable()
        self._spawn(self._publish(data)).add_done_callback(_seen)

    async def write(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """As `Connection.write`."""
        self.check_usable()
        task = self._spawn(self._publish(data))
        task.add_done_callback(_seen)
        await asyncio.shield(task)

    async def _publish(self, data: bytes) -> None:
        async with self._writing:  # in the order of the calls: batches are numbered
            for command in frames.parse_pubs(data):
                headers = dict(h.parse_lines(command.header)) if command.header else None
                await self.nc.publish(command.subject, command.payload, reply=command.reply, headers=headers)

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _seen(task: asyncio.Task[None]) -> None:
    # A failure means that the connection is going; who waits for an answer learns it by its timeout.
    if not task.cancelled():
        task.exception()
