"""What passes by itself, and how long it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    BatchAbandonedError,
    BatchOutcomeUnknownError,
    DirectGetDisabledError,
    MessagesLostError,
    PositionLostError,
    RequestTimeoutError,
    ServerError,
)

_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
_PASSING: Final = (
    RequestTimeoutError,
    MessagesLostError,
    DirectGetDisabledError,  # where the leader has said before that direct gets are on, who answers them is away
    BatchAbandonedError,
    BatchOutcomeUnknownError,
    AtomicPublishIncompleteError,
    NoStreamResponseError,
    ServiceUnavailableError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
)
# JetStream is unavailable, cannot handle requests, or the stream is offline: a cluster that is finding itself.
_AWAY: Final = frozenset({10008, 10009, 10118})


def passes(error: Exception) -> bool:
    """Return whether the same call may succeed a little later: no leader, no connection, no answer, too busy."""
    if isinstance(error, PositionLostError):
        return False
    if isinstance(error, APIError) and error.err_code in _AWAY:
        return True
    if isinstance(error, ServerError) and error.retryable:
        return True
    return isinstance(error, _PASSING)


class Patience:
    """Waits between tries, and gives up.

    Args:
        seconds: How long trouble may last without anything getting through.
        passing: What is worth waiting after.
    """

    def __init__(self, seconds: float, passing: Callable[[Exception], bool] = passes) -> None:
        self._seconds = seconds
        self._passing = passing
        self._tries = 0
        self._since: float | None = None

    def reset(self) -> None:
        """Note that something got through."""
        self._tries, self._since = 0, None

    async def after(self, error: Exception) -> None:
        """Wait a little after `error`; raise it if it does not pass, or if it has gone on for too long."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if not self._passing(error) or now - self._since >= self._seconds:
            raise error
        await asyncio.sleep(_PAUSES[min(self._tries, len(_PAUSES) - 1)])
        self._tries += 1
