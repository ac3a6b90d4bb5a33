"""Access to a user's connection: inbox subscriptions, writing, bounded waits, and the connection's state.

`connection.Connection` uses nats-py's internals, `fallback.FallbackConnection` only its public interface.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol.frames import Frame

# Seconds; nats-py has no event for a connection that is closed or connected again.
STATE_POLL: Final = 0.05

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class InboxHandler:
    """The callbacks of one inbox subscription. They are called on the loop and must not block or raise.

    Attributes:
        frames: Takes delivered messages, in order.
        disconnected: The connection is lost, and with it perhaps sent messages and their answers.
        reconnected: nats-py is connected again; it has restored the subscription and written its buffer.
    """

    frames: Callable[[list[Frame]], None]
    disconnected: Callable[[], None]
    reconnected: Callable[[], None] | None = None


class InboxSubscription:
    """A subscription that delivers to an `InboxHandler` until `close`."""

    def __init__(self, drop: Callable[[Subscription], None], subject: str) -> None:
        self.subject = subject
        self.subscription: Subscription | None = None
        self._drop = drop

    def close(self) -> None:
        """Unsubscribe. Never suspends; safe to call twice and on a closed connection."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            self._drop(subscription)


def notify_disconnected(handlers: Iterable[InboxHandler | None]) -> None:
    """Call ``disconnected`` of every handler; the callbacks may add and remove handlers."""
    for handler in list(handlers):
        if handler is not None:
            call_handler(handler.disconnected)


def notify_reconnected(handlers: Iterable[InboxHandler | None]) -> None:
    """Call ``reconnected`` of every handler that has it."""
    for handler in list(handlers):
        if handler is not None and handler.reconnected is not None:
            call_handler(handler.reconnected)


def call_handler(handler: Callable[..., None], *arguments: object) -> None:
    """Call a handler and report its exception to the loop: raised, it would end nats-py's read loop silently."""
    try:
        handler(*arguments)
    except (Exception, asyncio.CancelledError) as error:  # no suspension here: the handler itself raised it
        asyncio.get_running_loop().call_exception_handler(
            {"message": "jetstream_ext: the handler of a server message raised", "exception": error}
        )


class BaseConnection(ABC):
    """Access to the connection `nc`; `server_info` returns the ``INFO`` of the connected server."""

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        self.nc = nc
        self._server_info = server_info

    # -- subscribing and writing ----------------------------------------------------------------------------------

    @abstractmethod
    async def inbox(
        self, handler: InboxHandler, *, subject: str = "", tail: str = "", timeout: float
    ) -> InboxSubscription:
        """Subscribe `handler` to `subject` (default: a new inbox) with `tail` appended, within `timeout` seconds.

        Cancellation: Nothing is subscribed.
        """

    @abstractmethod
    def drop(self, subscription: Subscription) -> None:
        """Unsubscribe without suspending, so that no cancellation can interrupt it."""

    @abstractmethod
    def write_nowait(self, data: bytes, messages: int, payload_bytes: int) -> None:
        """Append encoded commands to nats-py's buffer, or raise as `check_usable` does and write nothing."""

    @abstractmethod
    async def write(self, data: bytes, messages: int, payload_bytes: int, *, timeout: float) -> None:
        """Call `write_nowait`, then wait for up to `timeout` seconds while the buffer is over nats-py's own limit.

        Cancellation: Everything is written: the bytes are in the buffer before the first suspension.
        """

    # -- waiting --------------------------------------------------------------------------------------------------

    async def bounded(self, operation: Coroutine[Any, Any, _T], timeout: float, what: str) -> _T:
        """Await an operation of nats-py until `timeout` seconds have passed or the connection is closed.

        nats-py's own waits (subscribe, flush, request) have no bound, and some swallow a cancellation. The operation
        therefore runs in its own task, which is cancelled if this call ends first. `what` names the awaited thing in the
        RequestTimeoutError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        task = loop.create_task(operation)
        task.add_done_callback(mark_retrieved)
        try:
            while True:
                remaining = deadline - loop.time()
                done, _ = await asyncio.wait({task}, timeout=max(0.0, min(remaining, STATE_POLL)))
                if done:
                    return task.result()
                if self.closed:
                    raise nats.errors.ConnectionClosedError
                if remaining <= 0:
                    raise RequestTimeoutError(f"timed out after {timeout:.4g} s while waiting for {what}")
        finally:
            task.cancel()

    async def _flushed(self, writing: Coroutine[Any, Any, Any], timeout: float) -> None:
        """Await a write of nats-py; raise ConnectionReconnectingError for an error of the socket."""
        try:
            await self.bounded(writing, timeout, "room in the write buffer of the connection")
        except nats.errors.Error:
            raise  # nats-py's timeouts are OSErrors too
        except OSError as error:
            raise nats.errors.ConnectionReconnectingError from error

    async def request(self, subject: str, payload: bytes, timeout: float) -> Msg:
        """Send a request and return the answer, or raise RequestTimeoutError after `timeout` seconds."""
        what = f"the answer on {subject}"
        try:
            return await self.bounded(self.nc.request(subject, payload, timeout=timeout), timeout, what)
        except nats.errors.TimeoutError:
            raise RequestTimeoutError(f"timed out after {timeout:.4g} s while waiting for {what}") from None

    async def wait_usable(self, timeout: float) -> None:
        """Wait until the connection is usable, or raise RequestTimeoutError or nats-py's ConnectionClosedError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not self.usable:
            if self.closed:
                raise nats.errors.ConnectionClosedError
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise RequestTimeoutError(f"the connection was lost and did not come back within {timeout:.4g} s")
            await asyncio.sleep(min(0.02, remaining))

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether bytes written now can reach the server."""
        return bool(self.nc.is_connected) and not self.nc.is_draining_pubs

    @property
    def closed(self) -> bool:
        """Whether the connection is closed for good."""
        return bool(self.nc.is_closed)

    @property
    def session(self) -> int:
        """A number that changes with every reconnect."""
        return int(self.nc.stats["reconnects"])

    @property
    def max_payload(self) -> int:
        """The server's limit for headers and payload together, in bytes."""
        return int(self.nc.max_payload)

    @property
    def server_version(self) -> str:
        """The connected server's version."""
        return str(self._server_info().get("version", ""))

    @property
    def api_level(self) -> int | None:
        """The connected server's JetStream API level (None: a server before 2.12)."""
        level = self._server_info().get("api_lvl")
        return level if isinstance(level, int) else None

    @property
    def domain(self) -> str | None:
        """The connected server's JetStream domain."""
        domain = self._server_info().get("domain")
        return domain if isinstance(domain, str) and domain else None

    def check_usable(self) -> None:
        """Raise nats-py's own error unless bytes written now can reach the server."""
        if self.usable:
            return
        if self.nc.is_closed:
            raise nats.errors.ConnectionClosedError
        if self.nc.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        raise nats.errors.ConnectionReconnectingError


def mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Mark a task's exception as retrieved: asyncio logs it otherwise, although the caller has raised another error."""
    if not task.cancelled():
        task.exception()
