"""The connection of a redrive through a proxy, which shows the letters that are handed back, and where the call may die."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.js import JetStreamContext

sys.path.append(str(Path(__file__).parents[1] / "safety_net"))

from frame_proxy import Frame, FrameProxy

__all__ = ["Die", "Frame", "FrameProxy", "Wire", "Wires", "headers_of", "send"]

Before = Callable[[int], Awaitable[Any]]


@dataclass
class Wire:
    """A connection through a proxy, and the copies of letters that are sent over it.

    `before` is awaited before each copy with its number, from 1; if it returns False, the copy is lost. Requests to subjects
    that end with a text of `lost` are lost.
    """

    js: JetStreamContext
    proxy: FrameProxy
    before: Before | None = None
    lost: tuple[str, ...] = ()
    copies: list[Frame] = field(default_factory=list)

    async def see(self, frame: Frame) -> Frame | None:
        if b"\r\nNats-Msg-Id: redrive:" in frame.header:
            self.copies.append(frame)
            if self.before is not None and await self.before(len(self.copies)) is False:
                return None
        return None if self.lost and frame.subject.endswith(self.lost) else frame

    async def until_lost(self, subject: str, call: Awaitable[Any], number: int = 1) -> None:
        """Kill a call before its n-th message on a subject that ends so, or with number 0 before its first copy."""
        reached, count = asyncio.Event(), 0

        async def stop(frame: Frame) -> Frame | None:
            nonlocal count
            count += frame.subject.endswith(subject)
            passed = await self.see(frame)
            if (count == number and frame.subject.endswith(subject)) or (not number and self.copies):
                reached.set()
            return None if reached.is_set() else passed

        self.proxy.on_publish = stop
        task = asyncio.ensure_future(call)
        await asyncio.wait(
            [task, waiting := asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.wait([task, waiting])


Wires = Callable[..., Awaitable[Wire]]
Die = Callable[..., Awaitable[Wire]]


def headers_of(frame: Frame) -> dict[str, str]:
    lines = frame.header.decode().split("\r\n")[1:-2]
    return dict(line.split(": ", 1) for line in lines)


async def send(js: JetStreamContext, frame: Frame) -> None:
    """Let a copy that was lost arrive."""
    await js.publish(frame.subject, frame.payload, headers=headers_of(frame))
