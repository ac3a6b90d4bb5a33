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
    """Await ``work(item)`` for every item, at most `limit` at a time; return the results in the order of the items.

    The first failure or a cancellation cancels all others. When this returns or raises, all have ended.
    """
    todo = list(items)
    results: list[_Result | None] = [None] * len(todo)
    remaining = iter(enumerate(todo))

    async def worker() -> None:
        for index, item in remaining:
            results[index] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(todo))):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return results  # type: ignore[return-value]  # complete once the group has ended
