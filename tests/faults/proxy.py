"""A TCP proxy that cuts, stalls and delays connections."""

import asyncio
from types import TracebackType
from typing import Self


class Proxy:
    """A proxy between a client and a server on 127.0.0.1; a test changes its behaviour while it runs."""

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        """Seconds by which bytes are delayed, in each direction."""
        self._server_port = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._accepting = True
        self._turned_away = asyncio.Event()
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

    def cut(self, *, refuse: bool = False) -> None:
        """Abort every connection; bytes in transit are lost. With `refuse`, end new ones at once, until `accept`."""
        self._accepting = not refuse
        for link in self._links:
            link.cancel()

    def accept(self) -> None:
        """Let connections through again."""
        self._accepting = True

    async def turned_away(self) -> None:
        """Wait until a new connection is refused."""
        self._turned_away.clear()
        await self._turned_away.wait()

    def stall(self) -> None:
        """Let no bytes through, in either direction, until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Let bytes through again after `stall`."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        upstream: asyncio.StreamWriter | None = None
        try:
            if self._accepting:
                back, upstream = await asyncio.open_connection("127.0.0.1", self._server_port)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, upstream))
                    group.create_task(self._pump(back, writer))
            else:
                self._turned_away.set()
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            pass  # cut, or one side has closed the connection
        finally:
            self._links.discard(link)
            for each in (writer, upstream):
                if each is not None:
                    each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one side closed")
