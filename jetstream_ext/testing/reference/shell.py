"""The engine on a TCP port of this machine."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self

from .clock import SystemClock, VirtualClock
from .engine import Engine
from .times import SECOND
from .versions import DIALECTS, Profile
from .wire import Close, Command, Output, Parser, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .clock import Clock
    from .connections import User
    from .faults import Faults
    from .limits import Limits

__all__ = ["ReferenceServer"]

_READ_SIZE = 1 << 18
_THREAD_TIMEOUT = 10.0


class ReferenceServer:
    """A NATS server with JetStream inside this process, for tests: no binary, and time and faults at will.

    It listens on 127.0.0.1 while its `async with` block runs, and holds everything in memory. It behaves
    like one release of nats-server, alone and not in a cluster; `docs/reference-server.md` lists what it
    leaves out. A plain `with` runs it in a thread of its own, for tests that are not coroutines.

    Example::

        async with ReferenceServer(dialect="2.12") as server:
            nc = await nats.connect(server.url)
    """

    def __init__(
        self,
        *,
        dialect: str = "2.15",
        version: str | None = None,
        api_level: int | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        users: Iterable[User] = (),
        token: str | None = None,
        jetstream: bool = True,
        max_payload: int = 1 << 20,
        limits: Limits | None = None,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        """Describe the server; `async with` starts it.

        Args:
            dialect: A release line, `"2.10"` to `"2.15"`, or `"draft"` for the first wording of the ADRs.
            version: An exact release such as `"2.12.0"`, instead of the newest of the dialect.
            api_level: A JetStream API level to claim, instead of the release's own.
            clock: Where time comes from; a `VirtualClock` stands still until it is moved.
            seed: Of its random numbers: server id, queue group choice, faults.
            users: Who may connect; nobody listed means everybody.
            token: A token that lets a client connect.
            jetstream: Whether JetStream is on.
            max_payload: The largest message, in bytes.
            limits: How many batches it takes, and how long they may rest.
            faults: What is to go wrong; see `Faults`.
            port: The port; 0 is a free one.

        Raises:
            ValueError: There is no such dialect or version.
        """
        if dialect not in DIALECTS:
            raise ValueError(f"no dialect {dialect!r}; there are {', '.join(DIALECTS)}")
        profile = Profile.of(version or DIALECTS[dialect], draft=dialect == "draft", api_level=api_level)
        self._clock = clock if clock is not None else SystemClock()
        self._max_payload = max_payload
        self._wanted_port = port
        self.engine: Engine = Engine(
            profile,
            seed=seed,
            users=users,
            token=token,
            jetstream=jetstream,
            max_payload=max_payload,
            limits=limits,
            faults=faults,
        )
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._failure: OSError | None = None

    def __enter__(self) -> Self:
        """Start listening, on an event loop in a thread of its own: for tests that are not coroutines.

        Raises:
            RuntimeError: It did not start in ten seconds.
        """
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(ready)), name="reference-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(_THREAD_TIMEOUT) or self._failure is not None:
            raise RuntimeError("the reference server did not start") from self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop, and end the thread."""
        assert self._loop is not None
        assert self._stop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_THREAD_TIMEOUT)

    async def _run(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        try:
            async with self:
                ready.set()
                await self._stop.wait()
        except OSError as error:
            self._failure = error  # which `__enter__` raises on the other thread
            ready.set()

    async def __aenter__(self) -> Self:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted_port)
        self.engine.set_address("127.0.0.1", self.port)
        if isinstance(self._clock, VirtualClock):
            self._clock.on_advance(self._on_advance)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every connection and stop listening."""
        server, self._server = self._server, None
        assert server is not None
        server.close()
        if self._alarm is not None:
            self._alarm.cancel()
        for writer in self._writers.values():
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()

    @property
    def port(self) -> int:
        """The port it listens on."""
        if self._server is None:
            raise RuntimeError("the server is not started; use `async with ReferenceServer() as server:`")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The URL for `nats.connect`."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def version(self) -> str:
        """The release that it claims to be."""
        return self.engine.profile.version

    @property
    def faults(self) -> Faults:
        """The plan of what goes wrong; rules can be added and removed at any time."""
        return self.engine.injector.faults

    def change_leader(self, stream: str, *, unsaved: int = 0) -> None:
        """Give a stream another leader, now.

        Args:
            stream: Its name.
            unsaved: How many of its newest messages are lost with the old one; see `ChangeLeader`.

        Raises:
            KeyError: There is no such stream.
        """
        self._do(lambda: self.engine.change_leader(stream, self._clock.now(), unsaved=unsaved))

    def disconnect_all(self) -> None:
        """Cut every connection, now."""
        self._do(self.engine.cut_all)

    def _do(self, call: Callable[[], list[Output]]) -> None:
        """Do something with the engine on the loop's thread, and wait until it is done."""
        if self._loop is None or self._server is None:
            raise RuntimeError("the server is not started")
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._send(call())
            return

        async def do() -> None:
            self._send(call())

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(_THREAD_TIMEOUT)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        connection = self._connections
        self._writers[connection] = writer
        parser = Parser(self._max_payload)
        try:
            self._send(self.engine.attach(connection, self._clock.now()))
            while data := await reader.read(_READ_SIZE):
                for command in parser.feed(data):
                    self._handle(connection, command)
                await writer.drain()
        except ConnectionError:
            pass  # the client is gone, which `detach` takes in below
        except asyncio.CancelledError:
            pass  # by __aexit__, which waits for this task
        finally:
            self._tasks.discard(task)
            if self._writers.pop(connection, None) is not None:
                self._send(self.engine.detach(connection, self._clock.now()))
            writer.close()

    def _handle(self, connection: int, command: Command) -> None:
        if connection in self._writers:
            self._send(self.engine.handle(connection, command, self._clock.now()))

    def _send(self, outputs: list[Output]) -> None:
        for output in outputs:
            writer = self._writers.get(output.connection)
            if writer is None:
                continue
            if isinstance(output, Close):
                del self._writers[output.connection]
                writer.close()
            else:
                writer.write(encode(output))
        self._arm()

    def _arm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        when = self.engine.next_timer()
        if when is None or isinstance(self._clock, VirtualClock) or self._server is None:
            return
        delay = max(when - self._clock.now(), 0) / SECOND
        self._alarm = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_advance(self) -> None:
        if self._server is not None:
            self._do(lambda: self.engine.handle_timer(self._clock.now()))

    def _on_timer(self) -> None:
        if self._server is not None:
            self._send(self.engine.handle_timer(self._clock.now()))
