"""A server that speaks with a client as an honest one would, until it is told to attack."""

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Self

from attacks import Attack
from frame_proxy import Frame

_ASKED_KEPT = 100
_LINE_LIMIT = 1 << 20


class HostileProxy:
    """Stands between a client and an honest server on 127.0.0.1, and lies to the client.

    Args:
        port: The port of the honest server.
        attack: What it says instead of the honest server.
        armed: Whether it attacks from the beginning; otherwise after `arm`.
    """

    def __init__(self, port: int, attack: Attack, *, armed: bool = False) -> None:
        self.attack = attack
        self.armed = armed
        self.received: list[bytes] = []
        """Every line that clients sent."""
        self.links: list[_Link] = []
        self._port = port
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_LINE_LIMIT)
        self.place = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        self.url = f"nats://{self.place}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.wait_closed()

    @property
    def fed(self) -> int:
        """How many bytes clients were sent."""
        return sum(link.fed for link in self.links)

    @property
    def frozen(self) -> bool:
        return self.armed

    def arm(self) -> None:
        """Attack from now on."""
        self.armed = True
        for link in self.links:
            self._start(link)

    def _start(self, link: "_Link") -> None:
        async def start() -> None:
            with contextlib.suppress(ConnectionError):
                await self.attack.start(link)

        task = asyncio.create_task(start())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link, upstream = _Link(writer), None
        try:
            back, upstream = await asyncio.open_connection("127.0.0.1", self._port, limit=_LINE_LIMIT)
            self.links.append(link)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up(reader, upstream, link))
                group.create_task(self._down(back, link))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # one side has closed the connection, or this proxy ends
        finally:
            self._tasks.discard(task)
            for each in filter(None, (writer, upstream)):
                each.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, link: "_Link") -> None:
        while line := await reader.readline():
            self.received.append(line)
            words = line.decode(errors="replace").split()
            operation = words[0].upper() if words else ""
            if operation == "SUB":
                link.subscriptions[words[-1]] = words[1]
            elif operation == "UNSUB" and len(words) == 2:
                link.subscriptions.pop(words[1], None)
            elif operation in ("PUB", "HPUB"):
                line += await reader.readexactly(int(words[-1]) + 2)
                names = words[1 : -2 if operation == "HPUB" else -1]
                if len(names) > 1:
                    link.asked[names[1]] = names[0]
                    if len(link.asked) > _ASKED_KEPT:
                        del link.asked[next(iter(link.asked))]
            upstream.write(line)
            await upstream.drain()
        raise ConnectionResetError("the client has closed the connection")

    async def _down(self, reader: asyncio.StreamReader, link: "_Link") -> None:
        while line := await reader.readline():
            words = line.decode().split()
            operation = words[0].upper() if words else ""
            if operation in ("MSG", "HMSG"):
                total = int(words[-1])
                body = (await reader.readexactly(total + 2))[:total]
                size = int(words[-2]) if operation == "HMSG" else 0
                names = words[1 : -2 if operation == "HMSG" else -1]
                frame = Frame(names[0], names[2] if len(names) > 2 else "", body[:size], body[size:], names[1])
                if self.armed:
                    await self.attack.message(link, frame)
                else:
                    await link.send(frame.delivery())
            elif operation == "INFO" and self.armed and not link.fed:
                await link.send(await self.attack.info(line))
                self._start(link)
            else:
                await link.send(line)
        raise ConnectionResetError("the server has closed the connection")


class _Link:
    """One connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.subscriptions: dict[str, str] = {}
        self.asked: dict[str, str] = {}
        self.fed = 0
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self.fed += len(data)
        self._writer.write(data)
        await self._writer.drain()
        await asyncio.sleep(0)  # `drain` may return at once, also when the connection is lost
        if self._writer.is_closing():
            raise ConnectionResetError("the connection has ended")

    def cut(self) -> None:
        self._writer.transport.abort()

    def sid_of(self, subject: str) -> str | None:
        words = subject.split(".")
        for sid, pattern in self.subscriptions.items():
            parts = pattern.split(".")
            fits = len(parts) == len(words) or (parts[-1] == ">" and len(parts) <= len(words))
            if fits and all(part in (word, "*", ">") for part, word in zip(parts, words, strict=False)):
                return sid
        return None
