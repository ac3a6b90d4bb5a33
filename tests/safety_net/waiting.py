"""End a wait that does not end by itself."""

import asyncio
from typing import Any


async def abandon(task: asyncio.Future[Any]) -> None:
    """End a task that may lose cancellations, as nats-py's calls do on Python 3.11."""
    for _ in range(100):
        if task.done():
            break
        task.cancel()
        await asyncio.sleep(0.01)
    if task.done() and not task.cancelled():
        task.exception()  # so that asyncio does not log it as never retrieved
