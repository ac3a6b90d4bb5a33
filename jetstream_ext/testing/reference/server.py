"""The reference server: the engine behind a TCP port on 127.0.0.1, and its clocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Self

from .context import Limits
from .engine import MAX_PAYLOAD, Engine
from .faults import Faults
from .releases import DIALECTS, Profile
from .wire.golang import SECOND
from .wire.protocol import Close, Output, Parser, encode


class VirtualClock:
    """A clock that stands still until a test moves it.

    Example::

        clock = VirtualClock()
        async with ReferenceServer(clock=clock) as server:
            ...
            clock.advance(3600)  # every TTL of up to an hour has now expired
    """

    def __init__(self, start: int = 1_800_000_000 * SECOND) -> None:
        self._now = start
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> int:
        """Return nanoseconds since 1970."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward, and let the server run everything that is due by then.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds:g}): a clock cannot move back")
        self._now += round(seconds * SECOND)
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the time has moved."""
        self._listeners.append(listener)


_READ_SIZE = 1 << 18
_THREAD_TIMEOUT = 10.0
_NOT_STARTED = "the reference server is not started; use `async with ReferenceServer() as server:`"


class ReferenceServer:
    """A NATS server with JetStream inside this process, with a clock and faults that a test controls.

    The server listens on 127.0.0.1 for the length of its `async with` block, and keeps everything in memory. It behaves
    like a single nats-server of one release; `docs/reference-server.md` lists what it does not model. A plain `with`
    runs it in its own thread, for tests that are not coroutines.

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
        clock: VirtualClock | None = None,
        seed: int = 0,
        jetstream: bool = True,
        max_payload: int = MAX_PAYLOAD,
        limits: Limits | None = None,
        faults: Faults | None = None,
        port: int = 0,
    ) -> None:
        """Describe the server; `async with` starts it.

        Args:
            dialect: A release line, `"2.10"` to `"2.15"`, or `"draft"` for the first wording of the ADRs.
            version: An exact release such as `"2.12.0"`; the default is the newest one of the dialect.
            api_level: The JetStream API level to claim; the default is that of the release.
            clock: A clock that stands still until a test moves it; the default is the system's time.
            seed: The seed of the server's random numbers: server id, names, and the choice in queue groups.
            jetstream: Whether to enable JetStream.
            max_payload: The size limit of a message, in bytes.
            limits: How many batches the server accepts, and their timeout.
            faults: The fault plan.
            port: The port; 0 takes a free one.

        Raises:
            ValueError: The dialect or the version is unknown.
        """
        if dialect not in DIALECTS:
            raise ValueError(f"unknown dialect {dialect!r}; the dialects are {', '.join(DIALECTS)}")
        profile = Profile.of(version or DIALECTS[dialect], draft=dialect == "draft", api_level=api_level)
        self._clock = clock
        self._now: Callable[[], int] = time.time_ns if clock is None else clock.now
        self._max_payload = max_payload
        self._wanted_port = port
        self.engine: Engine = Engine(
            profile,
            seed=seed,
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
        """Start listening, with an event loop in a separate thread.

        Raises:
            RuntimeError: The server did not start within ten seconds.
        """
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(ready)), name="reference-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(_THREAD_TIMEOUT) or self._failure is not None:
            raise RuntimeError(f"the reference server did not start within {_THREAD_TIMEOUT:g} s") from self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the server and its thread."""
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
            self._failure = error  # raised by `__enter__` on the other thread
            ready.set()

    async def __aenter__(self) -> Self:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted_port)
        self.engine.address = ("127.0.0.1", self.port)
        if self._clock is not None:
            self._clock.on_advance(self._on_advance)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop listening and close every connection."""
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
        """The port that the server listens on."""
        if self._server is None:
            raise RuntimeError(_NOT_STARTED)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The URL for `nats.connect`."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def version(self) -> str:
        """The release that the server claims to be."""
        return self.engine.profile.version

    @property
    def faults(self) -> Faults:
        """The fault plan; rules can be added and removed at any time."""
        return self.engine.injector.faults

    def change_leader(self, stream: str, *, unsaved: int = 0) -> None:
        """Change the leader of a stream now.

        Args:
            stream: The name of the stream.
            unsaved: How many of its newest messages are lost with the old leader; see `ChangeLeader`.

        Raises:
            KeyError: The stream does not exist.
        """
        self._do(lambda: self.engine.change_leader(stream, self._now(), unsaved=unsaved))

    def disconnect_all(self) -> None:
        """Close every connection now."""
        self._do(self.engine.cut_all)

    def _do(self, call: Callable[[], list[Output]]) -> None:
        """Call the engine on the thread of the event loop, send the outputs, and wait for that."""
        if self._loop is None or self._server is None:
            raise RuntimeError(_NOT_STARTED)
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
            self._send(self.engine.attach(connection, self._now()))
            while data := await reader.read(_READ_SIZE):
                for command in parser.feed(data):
                    if connection in self._writers:
                        self._send(self.engine.handle(connection, command, self._now()))
                await writer.drain()
        except ConnectionError:
            pass  # the client has closed the connection; `detach` follows
        except asyncio.CancelledError:
            pass  # by `__aexit__`, which waits for this task
        finally:
            self._tasks.discard(task)
            if self._writers.pop(connection, None) is not None:
                self._send(self.engine.detach(connection, self._now()))
            writer.close()

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
        if when is None or self._clock is not None or self._server is None:
            return
        delay = max(when - self._now(), 0) / SECOND
        self._alarm = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_advance(self) -> None:
        if self._server is not None:
            self._do(lambda: self.engine.handle_timer(self._now()))

    def _on_timer(self) -> None:
        if self._server is not None:
            self._send(self.engine.handle_timer(self._now()))
