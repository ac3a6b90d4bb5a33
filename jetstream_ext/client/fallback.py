"""The slow road to the server, for a nats-py whose internals are not the ones that `connection` knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetstream_ext.client.base_connection import (
    BaseConnection,
    InboxHandler,
    InboxSubscription,
    notify_disconnected,
    notify_reconnected,
    unsubscribe,
)
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h

# Seconds between two looks whether the connection is there: in public nats-py tells only its user's own callbacks.
_LOOK_AGAIN = 0.05

_T = TypeVar("_T")


class FallbackConnection(BaseConnection):
    """The slow road, with nothing but nats-py's public methods.

    Args:
        nc: The user's connection.
        server_info: Returns the greeting of the server it is connected to.
    """

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(nc, server_info)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()
        self._handlers: dict[Subscription, InboxHandler] = {}
        self._looking: asyncio.Task[None] | None = None
        self._session = 0
        self._lost = False

    async def inbox(self, handler: InboxHandler, *, tail: str = "", timeout: float) -> InboxSubscription:
        """As `BaseConnection.inbox`."""
        inbox = InboxSubscription(self.drop, self.nc.new_inbox())

        async def deliver(msg: Msg) -> None:
            block = h.rebuild(msg.headers)
            handler.frames([(msg.subject.encode(), block + msg.data, len(block))])

        subscribing = self._spawn(self.nc.subscribe(inbox.subject + tail, cb=deliver))
        try:
            subscription = await self.bounded(_shielded(subscribing), timeout, "the subscription of an inbox")
        except BaseException:
            subscribing.add_done_callback(self._unwanted)
            raise
        self._look()  # what happened before is nothing that this handler has lost
        self._handlers[subscription] = handler
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
            notify_disconnected(self._handlers.values())
        if there and self._lost:
            self._lost, self._session = False, session
            notify_reconnected(self._handlers.values())

    def drop(self, subscription: Subscription) -> None:
        """As `BaseConnection.drop`, in the background."""
        self._handlers.pop(subscription, None)
        if not self._handlers and self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._spawn(unsubscribe(subscription))

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """As `BaseConnection.write_nowait`, in the background."""
        self.check_usable()
        self._spawn(self._publish(data)).add_done_callback(_mark_retrieved)

    async def write(self, data: bytes, messages: int, payload_bytes: int, *, timeout: float) -> None:
        """As `BaseConnection.write`."""
        self.check_usable()
        task = self._spawn(self._publish(data))
        task.add_done_callback(_mark_retrieved)
        await self.bounded(_shielded(task), timeout, "room in the buffer of the connection")

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


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    # A failure means that the connection is going; who waits for an answer learns it by its timeout.
    if not task.cancelled():
        task.exception()


async def _shielded(task: asyncio.Task[_T]) -> _T:
    return await asyncio.shield(task)
