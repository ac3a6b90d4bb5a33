"""Connections of a worker process to NATS: one for each way to connect, kept between tasks.

Spark reuses its Python workers across tasks and queries, and ends them without notice. So the connections live on an
event loop in a separate thread, which answers the server's PINGs while Spark runs no task on this worker. References in
options become secrets here, and nowhere earlier.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import nats.errors
from nats.js import JetStreamContext

from jetstream_ext.client.base_connection import cancel
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.own_client import OwnClient, login, may_be_secret, tls_context
from jetstream_ext.spark.options import ConnectionOptions, OptionError
from jetstream_ext.text import get_logger, log_state, printable

_log = get_logger("spark")

_IDLE_SECONDS: Final = 60.0
_ABANDON_TIMEOUT: Final = 5.0

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class ConnectError(JetStreamExtError):
    """None of the servers accepted a connection; the text has the last server's reason."""


class RefusedError(JetStreamExtError):
    """A request got no reply because the credentials have no permission for it."""


@contextmanager
def connected(
    options: ConnectionOptions, role: Literal["driver", "executor"]
) -> Iterator[tuple[Lease, JetStreamContext]]:
    """Lend this process's connection and its JetStream context; raises as `Connections.lend`."""
    with connections().lend(options, connection_name(role, options.application_id)) as lease:
        yield lease, lease.connection.context()


def run_on_driver(
    options: ConnectionOptions, work: Callable[[JetStreamContext], Coroutine[Any, Any, _Result]]
) -> _Result:
    with connected(options, "driver") as (lease, context):
        return lease.run(work(context))


async def ask(timeout: float, request: Callable[[float], Awaitable[_Result]]) -> _Result:
    """Return the reply to a request of the driver, sent again after each transient error for `timeout` seconds.

    `request` is called with the seconds that are left, and must change nothing on the server.
    """
    retry = Retry(timeout, transient=is_transient_read)
    retry.start()
    return await retry.call(lambda: request(retry.remaining))


class Lease:
    """A connection lent to one task, and the way to run coroutines on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: WorkerConnection) -> None:
        self.connection = connection
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._future: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether the coroutine started last is still running."""
        return self._future is not None and not self._future.done()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return self.start(coroutine)()

    def start(self, coroutine: Coroutine[Any, Any, _Result]) -> Callable[[], _Result]:
        """Start a coroutine on the connection's loop, and return a function that waits for its result.

        That function raises RefusedError after a timeout if the server has refused a permission meanwhile.
        """

        async def work() -> _Result:
            self._task = asyncio.current_task()
            return await coroutine

        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        self._future = future

        def wait() -> _Result:
            try:
                return _wait(future)
            except nats.errors.TimeoutError as error:
                if self.connection.client.refusal is None:
                    raise
                raise RefusedError(f"{error}; the server said: {self.connection.client.refusal}") from error

        return wait

    def abandon(self) -> None:
        """Cancel the coroutine started last, and wait until it has ended."""
        _run(self._loop, self._cancel())

    async def _cancel(self) -> None:
        if self._task is not None:
            await cancel(self._task, _ABANDON_TIMEOUT)

    def iterate(self, items: AsyncGenerator[_Item, None]) -> Iterator[_Item]:
        """Iterate over an async generator, which prepares the next item while the caller uses the last one."""
        try:
            wait = self.start(_next(items))
            while (item := wait()) is not None:
                wait = self.start(_next(items))
                yield item
        finally:
            if not self._loop.is_closed():  # or else `Connections.close` has ended them
                self.abandon()  # the item ahead, or its error, is discarded: the caller stopped iterating
                self.run(items.aclose())


async def _next(items: AsyncGenerator[_Item, None]) -> _Item | None:
    return await anext(items, None)


class Connections:
    """The connections of one process; one that is unused for `idle` seconds is closed."""

    def __init__(self, *, idle: float = _IDLE_SECONDS) -> None:
        self._idle = idle
        self._shared: dict[ConnectionOptions, WorkerConnection] = {}
        self._open: set[WorkerConnection] = set()  # also those that are not lent again
        self._closing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        # A daemon: Spark ends its workers without notice, and the end of the process closes the sockets.
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetstream-ext", daemon=True)
        self._thread.start()

    @contextmanager
    def lend(self, options: ConnectionOptions, name: str) -> Iterator[Lease]:
        """Lend the connection for `options`; a new one gets `name` in the server's list of connections.

        A connection whose block raised is not lent again: replies to the failed task may still arrive.

        Raises:
            ConnectError: No server could be reached, or it refused the credentials.
            OptionError: A file or variable that an option names does not exist.
        """
        connection = _run(self._loop, self._take(options, name))
        finished = False
        try:
            yield Lease(self._loop, connection)
            finished = True
        finally:
            if not self._loop.is_closed():
                _run(self._loop, self._give_back(connection, finished))

    def close(self) -> None:
        """Close all connections, also those that are lent, and end what runs on them."""
        if self._loop.is_closed():
            return
        _run(self._loop, self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _take(self, options: ConnectionOptions, name: str) -> WorkerConnection:
        async with self._opening:
            connection = self._shared.get(options)
            if connection is not None and not connection.client.is_connected:
                log_state(_log, "connection", "lost", servers=",".join(options.servers))
                self._forget(connection)
                connection = None
            if connection is None:
                connection = WorkerConnection(options)
                await connection.open(name)
                self._shared[options] = connection
                self._open.add(connection)
                log_state(_log, "connection", "opened", servers=",".join(options.servers))
            if connection.expiry is not None:
                connection.expiry.cancel()
            connection.users += 1
            connection.client.refusal = None
            return connection

    async def _give_back(self, connection: WorkerConnection, finished: bool) -> None:
        connection.users -= 1
        if not finished or self._shared.get(connection.options) is not connection:
            self._forget(connection)
        elif connection.users == 0:
            connection.expiry = self._loop.call_later(self._idle, self._forget, connection)

    def _forget(self, connection: WorkerConnection) -> None:
        """Lend a connection no more, and close it once it has no users."""
        if self._shared.get(connection.options) is connection:
            del self._shared[connection.options]
        if connection.users == 0:
            self._open.discard(connection)
            log_state(_log, "connection", "closed", servers=",".join(connection.options.servers))
            task = self._loop.create_task(connection.client.close_quickly())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        for connection in list(self._open):
            if connection.expiry is not None:
                connection.expiry.cancel()
            connection.users = 0
            self._forget(connection)
        await asyncio.gather(*self._closing)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await cancel(task, _ABANDON_TIMEOUT)
        await self._loop.shutdown_asyncgens()


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    return _wait(asyncio.run_coroutine_threadsafe(coroutine, loop))


def _wait(future: Future[_Result]) -> _Result:
    try:
        return future.result()
    except Exception as error:
        shown = _with_printable_texts(error)
        raise shown from shown.__cause__
    finally:
        future.cancel()  # has an effect only after an interrupt of this thread


def _with_printable_texts(error: BaseException, seen: frozenset[int] = frozenset()) -> BaseException:
    """Return an error whose text, notes and causes are printable, because Spark logs all of them.

    Another library's error with a server's escape sequences is replaced by one of ours, which shows them escaped.
    An error that was raised again while its own consequence was handled is not repeated as a cause.
    """
    seen |= {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    text = str(error)
    shown = error
    if not isinstance(error, JetStreamExtError) and printable(text, keep_lines=True) != text:
        shown = JetStreamExtError(f"{type(error).__name__}: {text}").with_traceback(error.__traceback__)
    if notes := getattr(error, "__notes__", None):
        shown.__notes__ = [printable(note, keep_lines=True) for note in notes]
    shown.__cause__ = None if cause is None or id(cause) in seen else _with_printable_texts(cause, seen)
    return shown


class WorkerConnection:
    """A connection and its users, which are counted on the loop only."""

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.client: OwnClient = OwnClient()
        self.users: int = 0
        self.expiry: asyncio.TimerHandle | None = None

    def context(self) -> JetStreamContext:
        """Return the JetStream context for the domain or the API prefix of the options."""
        options = self.options
        where = {"prefix": options.api_prefix} if options.api_prefix else {"domain": options.domain}
        return self.client.jetstream(timeout=options.timeout, **where)

    async def open(self, name: str) -> None:
        servers, arguments = self.options.servers, _arguments(self.options) | {"name": name}
        try:
            await self.client.open(servers, shown=", ".join(servers), timeout=self.options.timeout, **arguments)
        except JetStreamExtError as error:
            raise ConnectError(str(error)) from error.__cause__


def _arguments(options: ConnectionOptions) -> dict[str, Any]:
    """Return the arguments of nats-py's `Client.connect` for credentials and TLS."""
    arguments: dict[str, Any] = {}
    for option, name in {"credsFile": options.creds_file, "nkeyFile": options.nkey_file}.items():
        if name:
            with _naming(option):
                arguments |= login(_file(option, name), jwt=option == "credsFile")
    if options.user and options.password_env:
        arguments |= {"user": options.user, "password": _secret("passwordEnv", options.password_env)}
    if options.token_env:
        arguments["token"] = _secret("tokenEnv", options.token_env)
    if options.tls_ca or options.tls_cert:
        files = {"tlsCa": options.tls_ca, "tlsCert": options.tls_cert, "tlsKey": options.tls_key}
        with _naming(*files):
            arguments["tls"] = tls_context(*(_file(option, name) if name else None for option, name in files.items()))
    return arguments


@contextmanager
def _naming(*options: str) -> Iterator[None]:
    """Raise an error of the block as an OptionError that names the options."""
    try:
        yield
    except JetStreamExtError as error:
        names = ", ".join(map(repr, options))
        raise OptionError(f"option{'s' * (len(options) > 1)} {names}: {error}") from None


def _secret(option: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        # The name is not repeated, because users may put the secret itself where its name belongs.
        raise OptionError(
            f"option {option!r}: it must name an environment variable that is set on the driver and on every "
            "executor (for executors: spark.executorEnv.<NAME>)"
        )
    return value


def _file(option: str, name: str) -> Path:
    if may_be_secret(name):
        raise OptionError(f"option {option!r}: it holds the secret itself; give the path of the file that holds it")
    path = Path(name)
    if not path.is_file() and path.name == name:
        from pyspark import SparkFiles  # only for files shipped with spark.files or --files

        path = Path(SparkFiles.get(name))
    if not path.is_file():
        raise OptionError(f"option {option!r}: the file {name!r} does not exist on this node; ship it with --files")
    return path


_APPLICATION: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_YARN_CONTAINER: Final = re.compile(r"container_(?:e\d+_)?(\d+_\d+)_\d+_\d+")


def connection_name(role: Literal["driver", "executor"], application: str | None = None) -> str:
    """Return the name of a connection in the server's list: ``spark-<application>-<role>``.

    Without an application that is given or can be found out, it is ``spark-<role>``.
    """
    application = application or application_id()
    return f"spark-{application}-{role}" if application else f"spark-{role}"


def application_id() -> str | None:
    """Return the id of the Spark application, or None where this process cannot know it.

    A task has it in its local properties. The processes that plan for the driver have no task: only Kubernetes, and YARN in
    cluster mode, tell it to them, by environment variables.
    """
    from pyspark import TaskContext  # optional, and slow to import

    task = TaskContext.get()
    container = _YARN_CONTAINER.fullmatch(os.environ.get("CONTAINER_ID", ""))
    for found in (
        task.getLocalProperty("spark.app.id") if task is not None else None,
        os.environ.get("SPARK_APPLICATION_ID"),
        f"application_{container[1]}" if container else None,
    ):
        if found and _APPLICATION.fullmatch(found):
            return found
    return None


_by_process: dict[int, Connections] = {}
_guard = threading.Lock()


def connections() -> Connections:
    """Return the connections of this process."""
    # By process: a fork has a copy of its parent's connections, without the thread.
    with _guard:
        pid = os.getpid()
        if pid not in _by_process:
            _by_process[pid] = Connections()
        return _by_process[pid]
