"""Connections of a worker process: one per way to connect, kept between tasks.

Spark reuses its Python workers across tasks and queries, and ends them without telling anyone. So connections belong
to the process and not to a task. They live on an event loop in a thread of its own, which answers the server's PINGs
while Spark is busy elsewhere or has no task for this worker. One that nobody has used for a minute is closed; one
whose task did not come to a proper end is dropped, because answers to that task may still be on their way.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import nats.errors

from jetstream_ext.spark.connect import RefusedError, WorkerConnection
from jetstream_ext.spark.options import ConnectionOptions

IDLE_SECONDS: Final = 60.0

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class Lease:
    """A connection lent to one task, and the way to run coroutines where it lives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: WorkerConnection) -> None:
        self.connection = connection
        self._loop = loop
        self._started: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether what was started last is still running."""
        return self._started is not None and not self._started.done()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the connection's loop; return its result.

        Raises:
            RefusedError: It timed out, and the server had refused permission for something meanwhile.
        """
        return self.start(coroutine)()

    def start(self, coroutine: Coroutine[Any, Any, _Result]) -> Callable[[], _Result]:
        """Start a coroutine on the connection's loop; return what waits for its result, as `run` does."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._started = future

        def wait() -> _Result:
            try:
                return _wait(future)
            except nats.errors.TimeoutError as error:
                if self.connection.refusal is None:
                    raise
                raise RefusedError(f"{error}; the server said: {self.connection.refusal}") from error

        return wait

    def abandon(self) -> None:
        """Cancel what was started last, and wait for its end, whatever that is."""
        if self._started is not None:
            self._started.cancel()
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()

    def iterate(self, items: AsyncGenerator[_Item, None]) -> Iterator[_Item]:
        """Iterate over an async generator, which makes one item while the caller is busy with the last."""
        ahead = _Ahead(items)
        try:
            while (item := self.run(ahead.next())) is not None:
                yield item
        finally:
            self.run(ahead.close())


class _Ahead(Generic[_Item]):
    """Runs an async generator one item ahead. Used on the loop only."""

    def __init__(self, items: AsyncGenerator[_Item, None]) -> None:
        self._items = items
        self._coming: asyncio.Task[_Item | None] | None = None

    async def next(self) -> _Item | None:
        """Return the next item, None after the last."""
        item = await (self._coming or self._advance())
        self._coming = None if item is None else asyncio.get_running_loop().create_task(self._advance())
        return item

    async def _advance(self) -> _Item | None:
        return await anext(self._items, None)

    async def close(self) -> None:
        """End the generator."""
        if self._coming is not None:
            self._coming.cancel()
            # Whatever it ends with, nobody wants that item any more.
            await asyncio.gather(self._coming, return_exceptions=True)
        await self._items.aclose()


class _Shared:
    """A connection and how many use it. Touched on the loop only."""

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.connection = WorkerConnection(options)
        self.opening = asyncio.Lock()
        self.opened = False
        self.users = 0
        self.expiry: asyncio.TimerHandle | None = None


class Connections:
    """The connections of one process.

    Args:
        idle: Seconds after which an unused connection is closed.
    """

    def __init__(self, *, idle: float = IDLE_SECONDS) -> None:
        self._idle = idle
        self._shared: dict[ConnectionOptions, _Shared] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        # A daemon: Spark's workers end without a word, and the end of the process closes the sockets.
        self._thread = threading.Thread(target=self._loop.run_forever, name="jetstream-ext", daemon=True)
        self._thread.start()

    @contextmanager
    def lend(self, options: ConnectionOptions, name: str) -> Iterator[Lease]:
        """Lend the connection for `options`, connected; one whose block raised is not lent again.

        Args:
            options: How to connect.
            name: The name of a new connection in the server's list.

        Raises:
            ConnectError: No server could be reached, or it refused the credentials.
            OptionError: A file or variable that an option names is not there.
        """
        shared = _run(self._loop, self._take(options, name))
        finished = False
        try:
            yield Lease(self._loop, shared.connection)
            finished = True
        finally:
            _run(self._loop, self._give_back(shared, finished))

    def close(self) -> None:
        """Close all connections and end the thread."""
        _run(self._loop, self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _take(self, options: ConnectionOptions, name: str) -> _Shared:
        shared = self._shared.get(options)
        if shared is not None and shared.opened and not shared.connection.usable:
            self._forget(shared)
            shared = None
        if shared is None:
            shared = self._shared[options] = _Shared(options)
        if shared.expiry is not None:
            shared.expiry.cancel()
            shared.expiry = None
        shared.users += 1
        try:
            async with shared.opening:
                if not shared.opened:
                    await shared.connection.open(name)
                    shared.opened = True
        except BaseException:
            await self._give_back(shared, finished=False)
            raise
        shared.connection.refusal = None
        return shared

    async def _give_back(self, shared: _Shared, finished: bool) -> None:
        shared.users -= 1
        if not finished:
            self._forget(shared)
        elif shared.users == 0 and self._shared.get(shared.options) is shared:
            shared.expiry = self._loop.call_later(self._idle, self._forget, shared)
        else:
            self._close_unused(shared)

    def _forget(self, shared: _Shared) -> None:
        if self._shared.get(shared.options) is shared:
            del self._shared[shared.options]
        self._close_unused(shared)

    def _close_unused(self, shared: _Shared) -> None:
        if shared.users == 0 and self._shared.get(shared.options) is not shared:
            task = self._loop.create_task(shared.connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_all(self) -> None:
        for shared in list(self._shared.values()):
            if shared.expiry is not None:
                shared.expiry.cancel()
            shared.users = 0
            self._forget(shared)
        if self._closing:
            await asyncio.wait(self._closing)


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    return _wait(asyncio.run_coroutine_threadsafe(coroutine, loop))


def _wait(future: Future[_Result]) -> _Result:
    try:
        return future.result()
    except BaseException:  # an interrupt of this thread, too
        future.cancel()
        raise


_of_process: dict[int, Connections] = {}
_guard = threading.Lock()


def connections() -> Connections:
    """Return the connections of this process."""
    # By process: a fork has a copy of its parent's, without the thread.
    with _guard:
        pid = os.getpid()
        if pid not in _of_process:
            _of_process[pid] = Connections()
        return _of_process[pid]
