"""Pauses between handlers: those that never await would keep the event loop from all other tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

_EVERY: Final = 0.05
# Seconds: usually, and while the member is busy with its partitions.
_PAUSE, _LONG_PAUSE = 0.001, 0.005
_LONGEST = 0.25  # seconds that handlers wait until something is done


class Pauses:
    """When the handlers of a member may begin. `busy` tells whether other tasks have more to do than usual."""

    def __init__(self, *, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._ended = 0.0  # the last pause
        self._may_begin = asyncio.Event()  # no pause
        self._may_begin.set()
        self._done = asyncio.Event()  # nothing is waited for any more
        self._done.set()

    @contextlib.asynccontextmanager
    async def until_done(self) -> AsyncIterator[None]:
        """Let no handler begin until the block ends, or has taken long."""
        self._done.clear()
        limit = asyncio.get_running_loop().call_later(_LONGEST, self._done.set)
        try:
            yield
        finally:
            limit.cancel()
            self._done.set()

    async def breathe(self) -> None:
        """Return when the next handler may begin. Others may run meanwhile, so all handlers wait during a pause."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._may_begin.is_set():
                await self._may_begin.wait()
            if loop.time() - self._ended <= _EVERY:
                break
            self._may_begin.clear()
            try:
                await asyncio.sleep(_LONG_PAUSE if self._busy() else _PAUSE)
            finally:
                self._ended = loop.time()
                self._may_begin.set()
            await asyncio.sleep(0)  # those that wait go first
        if not self._done.is_set():
            await self._done.wait()
