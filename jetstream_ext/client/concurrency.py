"""Bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


async def gather_bounded(
    work: Callable[[_Item], Awaitable[_Result]], items: Iterable[_Item], *, limit: int
) -> list[_Result]:
    """Await `work` of every item, at most `limit` at a time, and return the results in the order of the items.

    The first failure cancels the rest and is raised as it is.

    Cancellation: All of them are cancelled and have ended when this returns.
    """
    waiting = list(items)
    results: list[_Result | None] = [None] * len(waiting)
    remaining = iter(enumerate(waiting))

    async def worker() -> None:
        for index, item in remaining:
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(waiting))):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return results  # type: ignore[return-value]  # every place is filled once the group has ended
