"""The order of callers that wait to send a message of one batch."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from jetstream_ext.errors import RequestTimeoutError


class Turn:
    """The place of one caller in the queue; the caller looks again after each `wake`."""

    stopped: BaseException | None = None  # why it needs no turn any more
    _waiter: asyncio.Future[None] | None = None

    async def wait(self, until: float = math.inf) -> None:
        """Wait for `wake`; raise RequestTimeoutError at the time `until`."""
        self._waiter = asyncio.get_running_loop().create_future()
        if until == math.inf:
            return await self._waiter
        try:
            async with asyncio.timeout_at(until):
                await self._waiter
        except TimeoutError:
            raise RequestTimeoutError("the calls before it have not ended") from None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_T = TypeVar("_T", bound=Turn)


@contextmanager
def queued(queue: deque[_T], turn: _T) -> Iterator[_T]:
    """Join the queue; the first one in it sends. The block ends when the caller has sent or gives up."""
    queue.append(turn)
    try:
        yield turn
    finally:
        queue.remove(turn)
        if queue:
            queue[0].wake()
