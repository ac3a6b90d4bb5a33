"""The order of callers that wait to send a message of one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jetstream_ext.errors import RequestTimeoutError


class Turn:
    """The place of one caller in the queue."""

    def __init__(self, queue: deque[Turn]) -> None:
        self._queue = queue
        self._woken = asyncio.Event()

    @property
    def has_come(self) -> bool:
        return self._queue[0] is self

    def wake(self) -> None:
        self._woken.set()

    async def wait(self, until: float | None) -> None:
        """Wait until the turn has come or `Turns.wake` is called; raise RequestTimeoutError at the time `until`."""
        if until is None:
            await self._woken.wait()
        else:
            try:
                async with asyncio.timeout_at(until):
                    await self._woken.wait()
            except TimeoutError:
                raise RequestTimeoutError("the calls before it have not ended") from None
        self._woken.clear()


class Turns:
    """Lets callers send one at a time, in the order of their calls; what else a caller needs it can do meanwhile."""

    def __init__(self) -> None:
        self.queue: deque[Turn] = deque()  # one that sends now overtakes those in it

    @contextmanager
    def join(self) -> Iterator[Turn]:
        """Join the queue; the block ends when the caller sends or gives up, without an `await` in between."""
        turn, queue = Turn(self.queue), self.queue
        queue.append(turn)
        try:
            yield turn
        finally:
            queue.remove(turn)
            if queue:
                queue[0].wake()

    async def wait(self, check: Callable[[], None], until: float | None = None) -> None:
        """Wait until all callers before this one have sent or given up; raise as `Turn.wait` and `check` do.

        `check` raises the error of a batch that has ended.
        """
        with self.join() as turn:
            while not turn.has_come:
                await turn.wait(until)
                check()

    def wake(self) -> None:
        """Let all callers look again: the batch was opened, or has ended."""
        for turn in self.queue:
            turn.wake()
