"""One `start` and `stop`, usable in `with` and in `async with`."""

import abc
import asyncio
from types import TracebackType
from typing import Self

__all__ = ["Lifecycle"]


class Lifecycle(abc.ABC):
    """Make a context manager, sync and async, of a blocking `start` and `stop`."""

    @abc.abstractmethod
    def start(self) -> Self:
        """Start, and return self; on an error nothing is left running."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop and clean up; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled. `start` ends within its own timeout; what it started must not stay.
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await asyncio.to_thread(self.stop)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)
