"""Bounded concurrency, and the bounded end of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from jetstream_ext.client.base_connection import mark_retrieved

_CANCEL_AGAIN: Final = 0.5

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


async def cancel(task: asyncio.Task[Any], timeout: float) -> None:
    """Cancel a task until it ends, for up to `timeout` seconds; its error is ignored.

    Before Python 3.12, a call of nats-py swallows a cancellation that arrives with its answer.
    """
    task.add_done_callback(mark_retrieved)
    deadline = asyncio.get_running_loop().time() + timeout
    while not task.done() and (remaining := deadline - asyncio.get_running_loop().time()) > 0:
        task.cancel()
        await asyncio.wait({task}, timeout=min(remaining, _CANCEL_AGAIN))
