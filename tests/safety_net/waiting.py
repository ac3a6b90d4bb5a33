"""End a wait or a connection that does not end by itself."""

import asyncio
from typing import Any

from nats.aio.client import Client


async def abandon(task: asyncio.Future[Any]) -> None:
    """End a task that may lose cancellations, as nats-py's calls do on Python 3.11."""
    for _ in range(100):
        if task.done():
            break
        task.cancel()
        await asyncio.sleep(0.01)
    if task.done() and not task.cancelled():
        task.exception()  # so that asyncio does not log it as never retrieved


async def end_connection(nc: Client) -> None:
    """Close a connection in whatever state a test has left it."""
    writer = getattr(nc._transport, "_io_writer", None)
    if writer is not None and not writer.transport.is_closing():
        writer.transport.abort()  # otherwise close() would wait until the pending bytes are written
        await asyncio.sleep(0)
    # Its close() may fail before it has ended them all.
    callbacks = [subscription._wait_for_msgs_task for subscription in nc._subs.values()]
    closing = asyncio.ensure_future(nc.close())
    await asyncio.wait([closing], timeout=2)
    for task in (closing, *callbacks):
        if task is not None:
            await abandon(task)
