"""Dead letters for the tests of `redrive`, and its connection through a proxy that shows what is sent, and where it may die."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from clients import quiet
from nats.js import JetStreamContext

from jetstream_ext import DirectGet
from jetstream_ext.log import OffsetStore, Redriven, dead_letters, redrive

sys.path.append(str(Path(__file__).parents[1] / "safety_net"))

from frame_proxy import Frame, FrameProxy

Before = Callable[[int], Awaitable[Any]]


def headers_of(frame: Frame) -> dict[str, str]:
    lines = frame.header.decode().split("\r\n")[1:-2]
    return dict(line.split(": ", 1) for line in lines)


async def send(js: JetStreamContext, frame: Frame) -> None:
    """Let a copy that was lost arrive."""
    await js.publish(frame.subject, frame.payload, headers=headers_of(frame))


@dataclass
class Wire:
    """A connection through a proxy, and the copies of letters that are sent over it.

    `before` is awaited before each copy with its number, from 1; if it returns False, the copy is lost. Requests to subjects
    that end with `lost` are lost.
    """

    js: JetStreamContext
    proxy: FrameProxy
    before: Before | None = None
    lost: str = ""
    copies: list[Frame] = field(default_factory=list)

    async def see(self, frame: Frame) -> Frame | None:
        if b"\r\nNats-Msg-Id: redrive:" in frame.header:
            self.copies.append(frame)
            if self.before is not None and await self.before(len(self.copies)) is False:
                return None
        return None if self.lost and frame.subject.endswith(self.lost) else frame


@dataclass
class Letters:
    """Dead letters of the first `count` messages of `source`, on the subject `dead` of `stream`."""

    js: JetStreamContext
    stack: AsyncExitStack
    port: int
    stream: str
    source: str
    count: int

    @property
    def dead(self) -> str:
        return f"{self.stream}.dead"

    async def redrive(self, js: JetStreamContext | None = None, **options: Any) -> Redriven:
        js = js or self.js
        return await redrive(
            js, self.stream, **{"subject": self.dead, "offsets": OffsetStore(js, self.source), **options}
        )

    async def wire(self, before: Before | None = None) -> Wire:
        proxy = await self.stack.enter_async_context(FrameProxy(self.port))
        nc = await nats.connect(proxy.url, connect_timeout=10, error_cb=quiet)
        self.stack.push_async_callback(nc.close)
        wire = Wire(nc.jetstream(timeout=30), proxy, before)
        proxy.on_publish = wire.see
        return wire

    async def wire_that_loses_the_first(self) -> Wire:
        async def lose_the_first(number: int) -> bool:
            return number > 1

        return await self.wire(lose_the_first)

    async def die(self, copies: int, **options: Any) -> Wire:
        """Kill a call when so many copies are stored, and all of their letters but the last one are deleted."""
        wire, reached, deletes = await self.wire(), asyncio.Event(), 0

        async def stop(frame: Frame) -> Frame | None:
            nonlocal deletes
            is_delete = frame.subject.endswith(f"STREAM.MSG.DELETE.{self.stream}")
            deletes += is_delete
            passed = await wire.see(frame)
            if (is_delete and deletes == copies) or (not copies and wire.copies):
                reached.set()
            return None if reached.is_set() else passed

        wire.proxy.on_publish = stop
        task = asyncio.ensure_future(self.redrive(wire.js, **options))
        await asyncio.wait(
            [task, waiting := asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.wait([task, waiting])
        return wire

    async def forget_ids(self) -> None:
        """Wait until the server has forgotten the message ids of a stream with the window of these."""
        await asyncio.sleep(0.3)

    async def seqs(self) -> list[int]:
        """Return the sequences of the letters that are left."""
        return [letter.message.seq async for letter in dead_letters(self.js, self.stream, self.dead)]

    async def redriven(self, stream: str = "") -> list[bytes]:
        """Return what the target has stored behind the inputs, or what another one has stored."""
        first = 1 if stream else self.count + 1
        return [it.data async for it in DirectGet(self.js, stream or self.source).scan(seq=first)]

    async def update(self, **config: Any) -> None:
        """Change the configuration of the source."""
        await self.js.update_stream((await self.js.stream_info(self.source)).config.evolve(**config))

    async def move_subjects(self, **config: Any) -> str:
        """Let another stream store the subjects of the source, and return its name."""
        await self.update(subjects=[f"{self.source}.unused"])
        name = f"{self.source}_new"
        await self.js.add_stream(
            name=name, subjects=[f"{self.source}.{n}" for n in (0, 1)], allow_direct=True, **config
        )
        return name


Bury = Callable[..., Awaitable[Letters]]
