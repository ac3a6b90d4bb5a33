"""What passes by itself, and how long a sink waits for it."""

from __future__ import annotations

import asyncio
from typing import Final

import nats.errors
from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

from jetstream_ext.errors import (
    AtomicPublishIncompleteError,
    BatchError,
    JetStreamExtError,
    ServerError,
)

# Seconds of trouble without anything getting through: an election, a restart.
PATIENCE: Final = 30.0
_PAUSES: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
_PASSING: Final = (
    AtomicPublishIncompleteError,
    NoStreamResponseError,
    ServiceUnavailableError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
)


class SinkError(JetStreamExtError):
    """Rows could not be stored. Spark tries the task again."""


def passes(error: Exception) -> bool:
    """Return whether the same call may succeed a little later: no leader, no connection, no answer, too busy."""
    if isinstance(error, _PASSING):
        return True
    if isinstance(error, ServerError):
        return error.retryable
    return isinstance(error, BatchError)


class Patience:
    """Waits between tries, and gives up.

    Args:
        what: What is being done, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tries = 0
        self._since: float | None = None

    def reset(self) -> None:
        """Note that something got through."""
        self._tries, self._since = 0, None

    async def after(self, error: Exception) -> None:
        """Wait a little after `error`.

        Raises:
            SinkError: For too long nothing got through.
        """
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
        if now - self._since >= PATIENCE:
            raise SinkError(f"{self._what}: nothing could be stored for {PATIENCE:g} s: {error}") from error
        await asyncio.sleep(_PAUSES[min(self._tries, len(_PAUSES) - 1)])
        self._tries += 1
