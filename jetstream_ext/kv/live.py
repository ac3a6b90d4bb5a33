"""A live table: the tasks that keep it current and save it, and the calls that read it, wait for it and watch it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from jetstream_ext.client.api import LAG_PAUSE
from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.retry import is_transient_read
from jetstream_ext.errors import RequestTimeoutError, ResponseError, StreamRecreatedError
from jetstream_ext.kv.checkpoint import Changed, Checkpoint, Saved
from jetstream_ext.kv.follower import INTERVAL, DoubtedError, Follower
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.protocol.api import parsing
from jetstream_ext.protocol.following import Doubt, Event, mark_of
from jetstream_ext.protocol.options import (
    check_bool,
    check_function,
    check_not_coroutine,
    check_seconds,
    check_sequence,
)
from jetstream_ext.protocol.table import Content
from jetstream_ext.protocol.updates import Change, Record, Watcher
from jetstream_ext.text import counted, get_logger, log_state

_E = TypeVar("_E")
_C = TypeVar("_C")

_log = get_logger("kv")

_SAVE_EVERY: Final = 1.0  # how old a checkpoint may be, in seconds
# Pauses after an error.
_FIRST_RETRY: Final = 0.02
_LONGEST_RETRY: Final = 1.0


class Live:
    """The content of a table, kept current by a task from `open` to `close`."""

    def __init__(
        self, source: KeyedStream, patterns: list[str], checkpoint: Path | None = None, *, doorbell: bool = True
    ) -> None:
        check_bool(doorbell, "doorbell")
        self.source = source
        self.error: Exception | None = None
        """Why the table has ended."""
        self.closed: bool = False
        self._patterns = patterns
        self._rings = doorbell
        self._hurried = asyncio.Event()  # a caller waits
        self._checkpoint: Checkpoint | None = None
        if checkpoint is not None:
            identity = {"stream": source.stream, "prefix": source.prefix, "keys": sorted(patterns)}
            self._checkpoint = Checkpoint(checkpoint, identity)
        self._complete = True  # the checkpoint must be written completely
        self._saved_revision = 0
        self._follower = self._new_follower()
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Future[None], int] = {}  # the revisions that callers wait for
        self._called: set[Watcher] = set()  # those of `call`
        self._trouble: Exception | None = None  # of the last step; None if it succeeded

    def _new_follower(self) -> Follower:
        follower = Follower(self.source, self._patterns, self._wake_waiting, rings=self._rings)
        follower.content.dirty = None if self._checkpoint is None else set()
        return follower

    @property
    def content(self) -> Content:
        return self._follower.content

    @property
    def lag(self) -> int:
        return max(0, self._follower.leader_seq - self.content.revision)

    async def open(self) -> None:
        if self._task is not None or self.closed:
            raise RuntimeError(f"{self.source.what}: a table can be entered once")
        try:
            with self.source.not_found():
                if self._checkpoint is None or not await self._restore(await self._checkpoint.open()):
                    await self._follower.load()
        except BaseException as error:
            self.closed = True
            self._end(error)
            raise
        self._task = asyncio.create_task(self._run(), name=f"jetstream_ext table of {self.source.what}")

    async def close(self) -> None:
        """End the task, and store the checkpoint; callers that wait get an error."""
        self.closed = True
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                if self._checkpoint is not None and self.error is None:
                    try:
                        await self._save()
                    except (sqlite3.Error, OSError) as error:
                        _log.warning("checkpoint of %s could not be written at the end: %s", self.source.what, error)
                    await self._checkpoint.close()
        finally:
            self._end()

    def owner_dropped(self, what: str) -> None:
        """Close, from the owner's ``__del__`` and so perhaps from another thread, if it was left open; warn if so."""
        task = self._task
        if task is None or task.done():
            return

        def close() -> None:
            self.closed = True
            task.cancel()
            self._end()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            task.get_loop().call_soon_threadsafe(close)
        # At last, because it may raise.
        text = f"a {what} of {self.source.what} was dropped while it was open; use `async with`"
        warnings.warn(text, ResourceWarning, stacklevel=3)

    def _end(self, why: object = "") -> None:
        self._follower.enter(Event.ENDED, why)
        self._follower.waiter.leave()
        for future in self._waiting:
            if not future.done():
                future.set_exception(self.reason())
                mark_retrieved(future)
        for watcher in tuple(self.content.watchers):
            watcher.push([])
        if self._checkpoint is not None:
            self._checkpoint.abandon()

    @property
    def values(self) -> Mapping[str, Record]:
        """The table, also after it was closed; raises the error with which it has ended, or if it was never entered."""
        if self.error is not None or not (self.closed or self._task):
            raise self.reason()
        return self.content.values

    def reason(self) -> Exception:
        """Return the error of a call on a table that has ended."""
        state = "closed" if self.closed else "not open; enter it with `async with`"
        if self.error is not None:
            return self.error.with_traceback(None)  # or it would grow with every call that raises it
        return RuntimeError(f"{self.source.what}: the table is {state}")

    # -- callers ------------------------------------------------------------------------------------------------------

    async def wait_for(self, revision: int, timeout: float | None) -> None:
        timeout = self.source.timeout if timeout is None else timeout
        if self.error is not None or self._task is None:
            raise self.reason()
        if self._follower.current and self.content.revision >= revision:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = revision
        self._hurried.set()
        self._follower.waiter.wake()
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            why = "" if self._trouble is None else f"; the last read failed: {self._trouble}"
            raise RequestTimeoutError(
                f"{self.source.what}: the table did not reach revision {revision} within {timeout:.4g} s; it has "
                f"{self.content.revision}, and the leader had {self._follower.leader_seq}{why}"
            ) from self._trouble
        finally:
            del self._waiting[future]

    def _wake_waiting(self) -> None:
        if self._follower.current:
            for future, revision in self._waiting.items():
                if revision <= self.content.revision and not future.done():
                    future.set_result(None)

    def watch(self, wake: Callable[[], None]) -> Watcher:
        """Return a watcher of what changes from now on; it counts as long as the caller keeps it."""
        if self.error is not None or self._task is None:
            raise self.reason()
        watcher = Watcher(wake)
        self.content.watchers.add(watcher)
        return watcher

    def call(self, function: Callable[[Change], object]) -> Callable[[], None]:
        """Call a function with every change from now on; return a function that ends this."""

        def drain() -> None:
            while watcher in self._called and (change := watcher.pop()) is not None:
                try:
                    check_not_coroutine(function(change), "on_change: the function")
                except Exception as error:
                    context = {"message": f"{self.source.what}: on_change failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)

        watcher = self.watch(drain)
        self._called.add(watcher)

        def stop() -> None:
            self._called.discard(watcher)
            self.content.watchers.discard(watcher)

        return stop

    # -- the tasks ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                if self._checkpoint is not None:
                    group.create_task(self._save_often())
                await self._follow()
        except ExceptionGroup as errors:
            self.error = errors.exceptions[0]
            self._end(self.error)

    async def _follow(self) -> None:
        failures, what, clock = 0, self.source.what, asyncio.get_running_loop().time
        while True:
            self._hurried.clear()
            try:
                with self.source.not_found():
                    read = await self._follower.step()
            except DoubtedError as why:
                if why.doubt is Doubt.LOST:
                    _log.warning("%s: the table is loaded again, because %s", what, why)
                continue
            except Exception as error:
                if not is_transient_read(error):
                    raise
                self._follower.enter(Event.UNSURE, error)
                if self._trouble is None:
                    _log.warning("%s: the table is not current, and tries again: %s", what, error)
                self._trouble = error
                await asyncio.sleep(min(_FIRST_RETRY * 2**failures, _LONGEST_RETRY))
                failures = min(failures + 1, 16)
                continue
            if self._trouble is not None:
                _log.warning("%s: the table is current again", what)
            self._trouble, failures = None, 0
            waiter, mark, now = self._follower.waiter, self._follower.mark, clock()
            if read:
                waiter.found()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(now + INTERVAL):
                        await self._hurried.wait()
            else:
                longest = self._follower.longest_pause()
                until = now + (min(longest, LAG_PAUSE) if self._waiting else longest)
                await waiter.pause(None if mark is None else mark.state, self.content.revision + 1, until)

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    async def _restore(self, saved: Saved | None) -> bool:
        """Begin with what a checkpoint has, and read what came since; return False if it cannot be used."""
        if saved is None:
            return False
        try:
            with parsing("its note"):
                mark, revision = mark_of(self.source.stream, saved.note), int(saved.note["revision"])
            await self._follower.restore(saved.rows, revision, mark)
        except (StreamRecreatedError, ResponseError, DoubtedError) as why:
            if not isinstance(why, DoubtedError) or why.doubt is Doubt.LOST:
                _log.warning("checkpoint of %s is rebuilt, because %s", self.source.what, why)
            self._follower = self._new_follower()
            return False
        self._complete = False
        return True

    async def _save(self) -> None:
        """Store what has changed since the last time."""
        assert self._checkpoint is not None
        assert self._follower.mark is not None
        content, complete = self.content, self._complete
        dirty, content.dirty = content.dirty or set(), set()
        revision = content.revision
        if not complete and not dirty and revision == self._saved_revision:
            return
        values = content.values.copy() if complete else {key: it for key in dirty if (it := content.values.get(key))}
        deleted = content.deleted.copy() if complete else {key: it for key in dirty if (it := content.deleted.get(key))}
        gone = [] if complete else [key for key in dirty if key not in values and key not in deleted]
        note = self._follower.mark.note() | {"revision": revision, "count": len(content)}
        try:
            await self._checkpoint.save(Changed(values, deleted, gone, note, complete))
        except BaseException:
            if content.dirty is not None:
                content.dirty |= dirty
            raise
        self._saved_revision, self._complete = revision, False
        fields = {"revision": revision, "keys": len(values), "complete": complete}
        log_state(_log, f"table of {self.source.what}", "checkpoint saved", **fields)

    async def _save_often(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(_SAVE_EVERY)
            try:
                await self._save()
                failed = False
            except (sqlite3.Error, OSError) as error:
                if not failed:
                    _log.warning("checkpoint of %s cannot be written, and is tried again: %s", self.source.what, error)
                failed = True


class Changes(Generic[_C]):
    """The changes of a table from the call of `changes` on: an asynchronous iterator. Dropping it ends it.

    Attributes:
        skipped: How many changes were left out so far, because this iterator was slow.
    """

    def __init__(self, live: Live, convert: Callable[[Change], _C]) -> None:
        self.skipped: int = 0
        self._live = live
        self._convert = convert
        self._event = asyncio.Event()
        self._watcher = live.watch(self._event.set)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _C:
        while (change := self._watcher.pop()) is None:
            if self._live.error is not None:
                raise self._live.reason()
            if self._live.closed:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()
        self.skipped += change.skipped
        return self._convert(change)


class LiveMapping(Mapping[str, _E], Generic[_E, _C]):
    """What `kvx.Table` and `log.Table` have in common; `entry` and `change` return what callers get.

    Neither may refer to the table. The task keeps them, so a table that nobody uses any more would stay open.
    """

    def __init__(self, live: Live, entry: Callable[[str, Record], _E], change: Callable[[Change], _C]) -> None:
        self._live = live
        self._entry = entry
        self._change = change

    async def __aenter__(self) -> Self:
        await self._live.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._live.close()

    def __del__(self) -> None:
        if "_live" in self.__dict__:
            self._live.owner_dropped(type(self).__name__)

    def __repr__(self) -> str:
        live = self._live
        state = "closed" if live.closed else "failed" if live.error else counted(len(live.content.values), "key")
        return f"<{type(self).__name__} of {live.source.what}: {state} at revision {self.revision}>"

    def __getitem__(self, key: str) -> _E:
        return self._entry(key, self._live.values[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.values)

    def __len__(self) -> int:
        return len(self._live.values)

    def __contains__(self, key: object) -> bool:
        return key in self._live.values

    @property
    def revision(self) -> int:
        """The revision (stream sequence) whose state the table has. Every message up to it counts."""
        return self._live.content.revision

    @property
    def lag(self) -> int:
        """How many sequences the stream had beyond `revision` when its leader was asked last."""
        return self._live.lag

    async def wait_for(self, revision: int, timeout: float | None = None) -> None:
        """Wait until the table has a revision, such as that of a write that was acknowledged to any client.

        Args:
            revision: A revision (stream sequence); also one of a key that is not in the table. With 0, the call waits only
                until the table knows that it is current.
            timeout: Seconds to wait; None is the table's own.

        Raises:
            RequestTimeoutError: The table did not reach the revision in time. The text says what it has, and which error the
                last read had, if any.
            StreamRecreatedError: The stream was deleted and created again.
            RuntimeError: The table is closed, or was not entered with ``async with``.
            ValueError, TypeError: A number is out of range, or of another type.
            Exception: The table has ended with this error.

        Cancellation: Safe; nothing is left behind.
        """
        check_sequence(revision, "revision", low=0)
        await self._live.wait_for(revision, check_seconds(timeout, "timeout") if timeout is not None else None)

    def changes(self) -> Changes[_C]:
        """Return an asynchronous iterator of the changes from now on.

        Several may be used at once. Each gets the changes in order. One that does not keep up (65,536 changes, or 64 MiB of
        values) gets the newest state of each key instead. `skipped` says how many changes are missing before a change: those,
        and in a table of everything also those whose messages the stream had replaced before the table read them. An iterator
        never delays the table. It ends when the table is closed, after what it has yet to return, and raises the error of a
        table that fails.

        Raises:
            RuntimeError: The table is closed, or was not entered with ``async with``.
            Exception: The table has ended with this error.

        Cancellation: ``__anext__`` may be cancelled; no change is lost.
        """
        return Changes(self._live, self._change)

    def on_change(self, function: Callable[[_C], object]) -> Callable[[], None]:
        """Call `function` with every change from now on, on the event loop; return a function that ends this.

        The table already has the revision of the change, or a later one. `function` must not block. An exception that it
        raises goes to the loop's exception handler, and the table continues. It is not an async function, but may start
        tasks; a task that iterates over `changes` gets the changes one after the other. Raises as `changes` does.
        """
        check_function(function, "on_change", awaited=False)
        convert = self._change
        return self._live.call(lambda change: function(convert(change)))
