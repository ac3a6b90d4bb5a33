"""What a road to the server offers: subscriptions that deliver to sinks, and what nats-py says in public.

There are two roads: `connection.Connection` through nats-py's internals and `public_connection.PublicConnection`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from jetstream_ext.protocol.frames import Frame

# A sink does not suspend, so a cancellation out of one is not nats-py's: what it looked at was cancelled.
_SINK_FAILURES = (Exception, asyncio.CancelledError)


@dataclass(frozen=True, slots=True)
class Sink:
    """Who takes what comes to one subscription. All are called on the loop and must not block or raise."""

    frames: Callable[[list[Frame]], None]
    """Take delivered messages, in order."""
    disconnected: Callable[[], None]
    """Learn that the connection is gone: what was sent may be lost, what was asked may go unanswered."""
    reconnected: Callable[[], None] | None = None
    """Learn that another connection is there, with the subscription on it and what was unsent on its way."""


class Inbox:
    """A subscription on an inbox of its own, delivering to a `Sink`. Close it with `close`."""

    def __init__(self, drop: Callable[[Subscription], None], subject: str) -> None:
        self.subject = subject
        self.subscription: Subscription | None = None
        self._drop = drop

    def close(self) -> None:
        """Drop the subscription; safe to call twice and on a closed connection. Never suspends."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            self._drop(subscription)


async def unsubscribe(subscription: Subscription) -> None:
    """End a subscription in public, if it is still there: it goes with its connection."""
    with contextlib.suppress(
        nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError, nats.errors.BadSubscriptionError
    ):
        await subscription.unsubscribe()


def tell_disconnected(sinks: Iterable[Sink | None]) -> None:
    """Tell all of them that the connection is gone; they may come and go meanwhile."""
    for sink in list(sinks):
        if sink is not None:
            call(sink.disconnected)


def tell_reconnected(sinks: Iterable[Sink | None]) -> None:
    """Tell those that want to know that another connection is there."""
    for sink in list(sinks):
        if sink is not None and sink.reconnected is not None:
            call(sink.reconnected)


def call(what: Callable[..., None], *arguments: object) -> None:
    """Call a sink.

    Whatever is wrong with it, the one who calls must go on: nats-py's read loop would end without a word, and never
    reconnect.
    """
    try:
        what(*arguments)
    except _SINK_FAILURES as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "jetstream_ext could not take what the server sent", "exception": error}
        )


class Door:
    """What both roads share: everything that nats-py offers in public.

    Args:
        nc: The user's connection.
        server_info: Returns the greeting of the server it is connected to.
    """

    def __init__(self, nc: Client, server_info: Callable[[], Mapping[str, Any]]) -> None:
        self.nc = nc
        self._server_info = server_info

    @property
    def usable(self) -> bool:
        """Whether what is written now can reach the server it is meant for."""
        return bool(self.nc.is_connected) and not self.nc.is_draining_pubs

    @property
    def closed(self) -> bool:
        """Whether the connection is gone for good."""
        return bool(self.nc.is_closed)

    @property
    def draining(self) -> bool:
        """Whether the user is ending the connection in an orderly way."""
        return bool(self.nc.is_draining)

    @property
    def max_payload(self) -> int:
        """The server's limit for headers and payload together, in bytes."""
        return int(self.nc.max_payload)

    @property
    def server_version(self) -> str:
        """The connected server's version, from its greeting."""
        return str(self._server_info().get("version", ""))

    @property
    def api_level(self) -> int | None:
        """The connected server's JetStream API level, from its greeting (None: a server before 2.12)."""
        level = self._server_info().get("api_lvl")
        return level if isinstance(level, int) else None

    @property
    def domain(self) -> str | None:
        """The connected server's JetStream domain, from its greeting."""
        domain = self._server_info().get("domain")
        return domain if isinstance(domain, str) and domain else None

    def check_usable(self) -> None:
        """Raise nats-py's own error unless what is written now can reach the server."""
        if self.usable:
            return
        if self.nc.is_closed:
            raise nats.errors.ConnectionClosedError
        if self.nc.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        raise nats.errors.ConnectionReconnectingError
