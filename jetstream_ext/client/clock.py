"""A clock that also counts the time while the machine is suspended."""

from __future__ import annotations

import time
from typing import Final

# Linux's monotonic clock stops while the machine is suspended; macOS's runs on.
_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def elapsed() -> float:
    """Return the seconds since some fixed moment.

    Use it to bound how long ago something happened on a server, which does not stop with this machine. The loop's clock
    is right for waits.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
