"""The tasks of a member, in one place that ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jetstream_ext.client.base_connection import cancel


class TaskScope:
    """Tasks that end when the scope is closed.

    It is no `asyncio.TaskGroup`. When a task fails, that cancels its caller, here in the middle of the user's loop, and the
    other tasks, here those that hand partitions over; and it waits without end for a handler that ignores its cancellation.

    Args:
        name: Whose tasks they are.
        failed: Called with the error of a task.
        ended: Called whenever a task has ended.
    """

    def __init__(self, name: str, *, failed: Callable[[Exception], None], ended: Callable[[], None]) -> None:
        self.name: str = name
        self.closing: bool = False
        self._failed = failed
        self._ended = ended
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(work, what), name=f"jetstream_ext {what} of {self.name}")
        self._running.add(task)

        def end(_: asyncio.Task[None]) -> None:
            self._running.discard(task)
            work.close()  # it may have been cancelled before it began
            self._ended()

        task.add_done_callback(end)
        return task

    async def _run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except Exception as error:
            self._failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            failure = RuntimeError(f"{self.name}: {what}: a handler or callback raised CancelledError")
            failure.__cause__ = error
            self._failed(failure)

    async def close(self, seconds: float) -> None:
        """Cancel all tasks, also those that they start meanwhile, and wait until they have ended, for up to so many seconds."""
        self.closing, loop = True, asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._running and (remaining := deadline - loop.time()) > 0:
            await asyncio.gather(*(cancel(task, remaining) for task in tuple(self._running)))
