"""A proxy that understands the NATS protocol, so that a test can act between two frames of a real conversation."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Frame:
    """A message in transit: a publish of the client, or a delivery of the server."""

    subject: str
    reply: str
    header: bytes
    payload: bytes
    sid: str = ""

    def with_header(self, old: bytes, new: bytes) -> Self:
        """Return the frame with a part of its header replaced."""
        assert old in self.header
        return replace(self, header=self.header.replace(old, new))

    def publish(self) -> bytes:
        """Return the client's command for it."""
        return self._encode(b"PUB", b"HPUB", self.subject)

    def delivery(self) -> bytes:
        """Return the server's command for it."""
        return self._encode(b"MSG", b"HMSG", f"{self.subject} {self.sid}")

    def _encode(self, plain: bytes, with_header: bytes, words: str) -> bytes:
        if self.reply:
            words += f" {self.reply}"
        total = len(self.header) + len(self.payload)
        line = f"{words} {len(self.header)} {total}" if self.header else f"{words} {total}"
        return (with_header if self.header else plain) + f" {line}\r\n".encode() + self.header + self.payload + b"\r\n"


Hook = Callable[[Frame], Awaitable[Frame | None]]


async def unchanged(frame: Frame) -> Frame | None:
    """Pass a frame on."""
    return frame


@dataclass
class FrameProxy:
    """A proxy between a client and a server on 127.0.0.1.

    `on_publish` sees every message of the client before the server does, `on_delivery` every message of the server before
    the client does. Each returns the frame to pass on, or None to drop it, and may wait.
    """

    port: int
    on_publish: Hook = unchanged
    on_delivery: Hook = unchanged
    url: str = ""
    _links: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._listener.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            back, upstream = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:  # the server is restarting; the client tries again
            self._links.discard(link)
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream, lambda frame: self.on_publish(frame)))
                group.create_task(self._pump(back, writer, lambda frame: self.on_delivery(frame)))
        except (asyncio.CancelledError, ExceptionGroup):
            pass  # one side has closed the connection
        finally:
            self._links.discard(link)
            writer.transport.abort()
            upstream.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hook: Hook) -> None:
        while line := await reader.readline():
            words = line.split()
            operation = words[0].upper() if words else b""
            if operation not in (b"PUB", b"HPUB", b"MSG", b"HMSG"):
                writer.write(line)
            else:
                total = int(words[-1])
                body = (await reader.readexactly(total + 2))[:total]
                size = int(words[-2]) if operation.startswith(b"H") else 0
                names = [word.decode() for word in words[1 : -2 if size or operation.startswith(b"H") else -1]]
                sid = names.pop(1) if operation in (b"MSG", b"HMSG") else ""
                reply = names[1] if len(names) > 1 else ""
                frame = await hook(Frame(names[0], reply, body[:size], body[size:], sid))
                if frame is not None:
                    writer.write(frame.delivery() if sid else frame.publish())
            await writer.drain()
        raise ConnectionResetError("one side closed")


def before_request(n: int, matching: str, action: Callable[[], Awaitable[Any]]) -> Hook:
    """Return a hook for `on_publish` that awaits `action` before the n-th request (from 1) whose subject matches."""
    count = 0

    async def hook(frame: Frame) -> Frame | None:
        nonlocal count
        if re.search(matching, frame.subject):
            count += 1
            if count == n:
                await action()
        return frame

    return hook
