"""The order of callers that wait to send a message of one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from jetstream_ext.errors import RequestTimeoutError


class Turns:
    """Lets callers in one at a time, in the order of their calls."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.callers: int = 0  # that have the turn or wait for it; one that sends now overtakes them
        self._silent_since: float | None = None

    @asynccontextmanager
    async def take(self) -> AsyncGenerator[float, None]:
        """Wait for the turn. The value is how many seconds of the wait are a part of the caller's timeout.

        They are those since a RequestTimeoutError ended a turn, if no other one has succeeded: otherwise each of many
        callers would wait for its whole timeout, one after the other.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        self.callers += 1
        try:
            async with self._lock:
                turn = clock()
                try:
                    yield 0.0 if self._silent_since is None else turn - max(began, self._silent_since)
                except RequestTimeoutError:
                    if self._silent_since is None:
                        self._silent_since = turn
                    raise
                self._silent_since = None
        finally:
            self.callers -= 1
