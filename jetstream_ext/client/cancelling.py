"""Cancellations that somebody else's code lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["lost_cancellations"]


def lost_cancellations() -> Callable[[], None]:
    """Return a check that raises `CancelledError` if the task was cancelled since, and goes on nevertheless.

    Before Python 3.12 `asyncio.wait_for` returns the result if that is there when the cancellation comes, and so do
    nats-py's calls, which also lose one while they flush. A loop around a user's function that makes some would go on
    as if nothing had happened.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()

    def check() -> None:
        if task.cancelling() > before:
            raise asyncio.CancelledError

    return check
