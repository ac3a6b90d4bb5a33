"""Clocks: the system's, and a virtual one that a test moves."""

import time
from collections.abc import Callable
from typing import Protocol

from .wire.times import SECOND

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """A source of time for the reference server."""

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        ...


class SystemClock:
    """The system's time."""

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        return time.time_ns()


class VirtualClock:
    """A clock that stands still until a test moves it.

    Example::

        clock = VirtualClock()
        async with ReferenceServer(clock=clock) as server:
            ...
            clock.advance(3600)  # every TTL of up to an hour has now expired
    """

    def __init__(self, start: int = 1_800_000_000 * SECOND) -> None:
        self._now = start
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward, and let the server run everything that is due by then.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot move back, so advance({seconds:g}) is refused")
        self._now += round(seconds * SECOND)
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the time has moved."""
        self._listeners.append(listener)
