"""The slower connection for versions of nats-py with internals that `connection` does not support."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetstream_ext.client.base_connection import (
    STATE_POLL,
    BaseConnection,
    InboxHandler,
    InboxSubscription,
    mark_retrieved,
    notify_disconnected,
    notify_reconnected,
)
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h

_T = TypeVar("_T")


class FallbackConnection(BaseConnection):
    """Reads and writes only through nats-py's public methods; writing and `drop` go on in background tasks."""

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(nc, server_info)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writing = asyncio.Lock()
        self._handlers: dict[Subscription, InboxHandler] = {}
        self._poller: asyncio.Task[None] | None = None
        self._session = 0
        self._lost = False

    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float
    ) -> InboxSubscription:
        inbox = InboxSubscription(self.drop, subject or self.nc.new_inbox())

        async def deliver(msg: Msg) -> None:
            block = h.rebuild(msg.headers)
            handler.frames([(msg.subject.encode(), block + msg.data, len(block))])

        subscribing = self._spawn(self.nc.subscribe(inbox.subject + tail, cb=deliver))
        try:
            subscription = await self.bounded(_shielded(subscribing), timeout, "the subscription to an inbox")
        except BaseException:
            subscribing.add_done_callback(self._drop_late_subscription)
            raise
        self._check_state()  # an earlier loss does not concern the new handler
        self._handlers[subscription] = handler
        if self._poller is None or self._poller.done():
            self._poller = self._spawn(self._poll_state())
        inbox.subscription = subscription
        return inbox

    def _drop_late_subscription(self, subscribing: asyncio.Task[Subscription]) -> None:
        if not subscribing.cancelled() and subscribing.exception() is None:
            self.drop(subscribing.result())

    async def _poll_state(self) -> None:
        while not self.closed:
            await asyncio.sleep(STATE_POLL)
            self._check_state()

    def _check_state(self) -> None:
        session, connected = self.nc.stats["reconnects"], self.nc.is_connected
        if (session != self._session or not connected) and not self._lost:
            self._lost = True
            notify_disconnected(self._handlers.values())
        if connected and self._lost:
            self._lost, self._session = False, session
            notify_reconnected(self._handlers.values())

    def drop(self, subscription: Subscription) -> None:
        self._handlers.pop(subscription, None)
        if not self._handlers and self._poller is not None:
            self._poller.cancel()
            self._poller = None
        self._spawn(_unsubscribe(subscription))

    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        self.check_usable()
        self._publish_soon(data)

    async def write(self, data: bytes, messages: int, payload_bytes: int, *, timeout: float) -> None:
        self.check_usable()
        await self._flushed(_shielded(self._publish_soon(data)), timeout)

    def _publish_soon(self, data: bytes) -> asyncio.Task[None]:
        task = self._spawn(self._publish(data))
        task.add_done_callback(mark_retrieved)  # a write fails when the connection is lost, which the handlers are told
        return task

    async def _publish(self, data: bytes) -> None:
        async with self._writing:  # keeps the order of the calls
            for command in frames.parse_pubs(data):
                headers = dict(h.parse_lines(command.header)) if command.header else None
                await self.nc.publish(command.subject, command.payload, reply=command.reply, headers=headers)

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _unsubscribe(subscription: Subscription) -> None:
    with contextlib.suppress(  # the subscription of a closed connection has already ended
        nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError, nats.errors.BadSubscriptionError
    ):
        await subscription.unsubscribe()


async def _shielded(task: asyncio.Task[_T]) -> _T:
    return await asyncio.shield(task)
