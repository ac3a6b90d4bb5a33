"""How much memory a process needs beyond what it had."""

import asyncio
import gc
import os
from pathlib import Path
from types import TracebackType
from typing import Self

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class MemoryWatch:
    """Watches how much memory is needed while it is open."""

    def __init__(self) -> None:
        self.growth = 0
        """The most that was needed so far beyond the beginning, in bytes."""

    async def __aenter__(self) -> Self:
        gc.collect()
        self._before = resident()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        self._task.cancel()

    def _look(self) -> None:
        self.growth = max(self.growth, resident() - self._before)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.005)
