"""Where the server's time comes from: the machine, or the test."""

import time
from collections.abc import Callable
from typing import Protocol

from .times import SECOND

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Tells the time, and may say when it jumped."""

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        ...


class SystemClock:
    """The machine's own time."""

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        return time.time_ns()


class VirtualClock:
    """Time that stands still until a test moves it.

    Example::

        clock = VirtualClock()
        async with ReferenceServer(clock=clock) as server:
            ...
            clock.advance(3600)  # every TTL of up to an hour is over now
    """

    def __init__(self, start: int = 1_800_000_000 * SECOND) -> None:
        self._now = start
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time, and let the server do what is due by then.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += round(seconds * SECOND)
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every move."""
        self._listeners.append(listener)
