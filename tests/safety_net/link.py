"""A TCP proxy that is slow, drops the bytes of one side, or rewrites its greeting."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Link:
    """A proxy between a client and a server on 127.0.0.1.

    Args:
        port: The server's port.
        rate: Bytes per second from the server to the client; None is no limit.
        greeting: Returns the line that replaces the server's first line.
    """

    def __init__(
        self, port: int, *, rate: float | None = None, greeting: Callable[[bytes], bytes] | None = None
    ) -> None:
        self.replies = True
        """Whether the client receives the bytes of the server."""
        self.requests = True
        """Whether the server receives the bytes of the client."""
        self.dropped = b""
        """The bytes of the client that the server did not receive."""
        self.accepting = True
        """Whether new connections are let through."""
        self._port = port
        self.rate: float | None = rate
        self.greeting = greeting
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._listener.wait_closed()

    def cut(self) -> None:
        """Abort every connection; bytes in transit are lost."""
        for link in self._links:
            link.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self.accepting:
                back, upstream = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 16)
                line = await back.readuntil(b"\r\n")
                writer.write(self.greeting(line) if self.greeting else line)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._up(reader, upstream))
                    group.create_task(self._down(back, writer))
        except (asyncio.CancelledError, OSError, ExceptionGroup, asyncio.IncompleteReadError):
            pass  # cut, or one side has closed the connection
        finally:
            self._links.discard(link)
            for each in (writer, upstream):
                if each is not None:
                    each.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.requests:
                writer.write(data)
                await writer.drain()
            else:
                self.dropped += data
        raise ConnectionResetError

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
            if self.replies:
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError
