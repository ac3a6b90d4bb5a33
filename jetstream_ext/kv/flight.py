"""Several requests in flight, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


async def in_flight(work: Callable[[_Item], Awaitable[None]], items: Iterable[_Item], *, limit: int) -> None:
    """Await `work` of every item, at most `limit` at a time.

    The first failure cancels the rest and is raised as it is.

    Cancellation: All of them are cancelled and over when this returns.
    """
    waiting = list(items)
    left = iter(waiting)

    async def worker() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(waiting))):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
