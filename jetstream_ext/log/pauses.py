"""Pauses between handlers: those that never await would keep the event loop from all other tasks."""

from __future__ import annotations

import asyncio
from typing import Final

_EVERY: Final = 0.05
_PAUSE: Final = 0.002  # seconds


class Pauses:
    """When the handlers of a member may begin."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._ended = 0.0  # the last pause

    async def breathe(self) -> None:
        """Return when the next handler may begin. Others may run meanwhile, so all handlers wait during a pause."""
        loop = asyncio.get_running_loop()
        if not self._lock.locked() and loop.time() - self._ended <= _EVERY:
            return
        async with self._lock:
            if loop.time() - self._ended > _EVERY:
                await asyncio.sleep(_PAUSE)
                self._ended = loop.time()
