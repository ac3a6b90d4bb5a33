"""A bucket as a live table: what callers use, and the tasks that keep it current and save it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, overload

from nats.js.kv import KeyValue

from jetstream_ext.client.api import LAG_PAUSE
from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.retry import is_transient_read
from jetstream_ext.errors import ConversionError, RequestTimeoutError, ResponseError, StreamRecreatedError
from jetstream_ext.kv.bucket import Bucket, KeyedStream
from jetstream_ext.kv.checkpoint import Checkpoint
from jetstream_ext.kv.entries import KeyValueEntry, T, check_filters, entry_of_record
from jetstream_ext.kv.follower import INTERVAL, DoubtedError, Follower
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
from jetstream_ext.protocol.updates import MOST_CHANGES, Change, Record, Watcher
from jetstream_ext.text import counted, get_logger

_E = TypeVar("_E")
_C = TypeVar("_C")

_log = get_logger("kv")

_SAVE_EVERY: Final = 1.0  # how old a checkpoint may be, in seconds
# Pauses after an error.
_FIRST_RETRY: Final = 0.02
_LONGEST_RETRY: Final = 1.0


@dataclass(frozen=True, slots=True)
class KeyValueChange(Generic[T]):
    """A change of one key.

    Attributes:
        key: The key.
        old: The entry that the watcher saw last; None if the key did not exist.
        new: The entry that it has now; None if it was deleted or purged, or has expired.
        revision: The revision of the message that changed it. For a removal without a message (an expiry without a delete
            marker, a purge of the stream), the table's revision.
        skipped: How many changes are missing before this one (see `changes`).
    """

    key: str
    old: KeyValueEntry[T] | None
    new: KeyValueEntry[T] | None
    revision: int
    skipped: int = 0


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
    """What `kvx.Table` and `log.Table` have in common; `entry` and `kind` make what callers get.

    Neither may refer to the table. The task keeps them, so a table that the application has dropped would stay open.
    """

    def __init__(self, live: Live, entry: Callable[[str, Record], _E], kind: Callable[..., _C]) -> None:
        def change(made: Change) -> _C:
            key, old, new, revision, skipped = made
            before = None if old is None else entry(key, old)
            return kind(key, before, None if new is None else entry(key, new), revision, skipped)

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


class Table(LiveMapping[KeyValueEntry[T], KeyValueChange[T]], Generic[T]):
    """A bucket, or a part of it, as a live dictionary: for those who read often (ADR-8, ADR-31).

    ::

        async with kvx.Table(kv, ["flags.>"]) as flags:     # loads the keys, and follows every later change
            flags["flags.checkout"].value                   # a lookup in memory
            revision = await kv.put("flags.checkout", b"on")
            await flags.wait_for(revision)                  # read your own write, or that of another process

    The table is always a state that the bucket had: with `revision` R, every key is as it was at R. It never goes back to an
    earlier one, whichever replica or mirror answers.

    It follows changes within milliseconds: a doorbell wakes it (see `log.LogReader`). Where there can be none it asks every
    0.25 s. A change for which the doorbell did not ring is seen after 5.5 s at most, and `wait_for` asks at once. An idle table
    sends one request in 5.5 s.

    While the servers do not answer, the table keeps what it has, logs a warning to the logger ``jetstream_ext.kv``,
    and tries again indefinitely. It fails, with an error for every call that waits and every later read, if the bucket is
    deleted or created again, or the connection is closed. If the servers have lost messages (a stream that was restored from
    an older copy), it waits until they have its revision again, and loads what is stored then.

    Values that expire by a TTL, or that a purge of the stream or a limit of it removes, leave the table as well, also where
    the server leaves no delete marker. If messages vanish without a trace (`purge_deletes`, ``STREAM.PURGE`` with a filter,
    ``STREAM.MSG.DELETE``), the table notices it within 6 s, from the leader's numbers, and loads again. In a stream that
    limits the messages per subject, writes at the same time can hide that from a table of more than 1,000 keys, unless it is
    one of the whole bucket with a history of 1.

    The memory is that of the keys and values, and of the delete markers that the bucket keeps. After its block, a table still
    has its last state.

    Args:
        kv: nats-py's bucket; also one that is a mirror, which then is read alone.
        keys: Keys and patterns of keys (``*`` for a token, ``>`` for the rest); None is the whole bucket. With several, the
            server sends what matches their common prefix.
        decode: Makes the ``value`` of each entry from its bytes, such as ``json.loads``; None leaves the bytes. It is called on
            the event loop when an entry is asked for first, once for each message. If it raises, the table goes on, and
            `value` raises ConversionError.
        checkpoint: A file that keeps the table (SQLite), so that another start reads only later messages. It is of one
            table and one process at a time, is at most a second old, and is written by a thread. A file that is damaged, of
            another table or written by another version is rebuilt, with a warning; one that is no checkpoint is an error.
        timeout: Seconds to wait for each answer, and for `wait_for`; None is the context's own.
        doorbell: As for `log.LogReader`; without it the table asks four times a second.

    Raises:
        nats.js.errors.InvalidKeyError, ValueError, TypeError: As for `snapshot`.
        RuntimeError: On entering: the table was entered before.
        ValueError: On entering: the file of `checkpoint` is not one of a table. It is left as it is.
        BlockingIOError, OSError: On entering: another table uses that file, or it cannot be opened.
        Exception: On entering: as for `snapshot`.

    Cancellation: Entering and leaving may be cancelled; nothing is left behind. If leaving is cancelled, the checkpoint may
        lack the last second.

    Requires: As for `snapshot`; for the doorbell, permission to subscribe to the keys' subjects (``$KV.<bucket>.>``).
    """

    @overload
    def __init__(
        self: Table[bytes],
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: None = None,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None: ...

    @overload
    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: Callable[[bytes], T],
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None: ...

    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        decode: Callable[[bytes], Any] | None = None,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        doorbell: bool = True,
    ) -> None:
        patterns = check_filters(keys)
        bucket = Bucket(kv, timeout)
        live = Live(bucket, patterns, None if checkpoint is None else Path(checkpoint), doorbell=doorbell)
        entry: Callable[[str, Record], KeyValueEntry[Any]] = partial(entry_of_record, bucket.name)
        if decode is not None:
            check_function(decode, "decode", awaited=False)
            entry = _Decoding(bucket.name, decode, live)
        super().__init__(live, entry, KeyValueChange)


class _Undecodable(KeyValueEntry[Any]):
    """An entry whose value could not be decoded: asking for the value raises."""

    __slots__ = ("_cause",)
    _cause: Exception
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, entry: KeyValueEntry, cause: Exception) -> None:
        for field in fields(entry):
            if field.name != "value":
                object.__setattr__(self, field.name, getattr(entry, field.name))
        object.__setattr__(self, "_cause", cause)

    @property
    def value(self) -> Any:
        text = f"bucket {self.bucket!r}: the value of key {self.key!r} (revision {self.revision}) cannot be decoded"
        raise ConversionError(f"{text}: {self._cause!r:.200}") from self._cause

    def __repr__(self) -> str:
        return f"<{self.key!r} at revision {self.revision}: its value cannot be decoded>"


class _Decoding:
    """Makes entries of records, and decodes the value of each message once."""

    def __init__(self, bucket: str, decode: Callable[[bytes], Any], live: Live) -> None:
        self._bucket = bucket
        self._decode = decode
        self._live = live
        self._made: dict[int, tuple[Record, KeyValueEntry[Any]]] = {}  # by sequence

    def __call__(self, key: str, record: Record) -> KeyValueEntry[Any]:
        made = self._made.get(record[0])
        if made is None or made[0] != record:  # a stream that has lost messages can use a sequence again
            made = self._made[record[0]] = record, self._decoded(entry_of_record(self._bucket, key, record))
            stored = self._live.content.values
            if len(self._made) > 2 * len(stored) + MOST_CHANGES:
                self._made = {it[0]: self._made[it[0]] for it in stored.values() if it[0] in self._made}
        return made[1]

    def _decoded(self, entry: KeyValueEntry) -> KeyValueEntry[Any]:
        try:
            value = self._decode(entry.value)
            check_not_coroutine(value, "decode")
        except Exception as error:
            return _Undecodable(entry, error)
        return replace(entry, value=value)


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
            self._checkpoint = Checkpoint(checkpoint, source.what, identity)
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
                if self._checkpoint is None or not await self._restore(self._checkpoint):
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
                        await self._save(self._checkpoint)
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
                    group.create_task(self._save_often(self._checkpoint))
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

    async def _restore(self, checkpoint: Checkpoint) -> bool:
        """Begin with what a checkpoint has, and read what came since; return False if it cannot be used."""
        if (saved := await checkpoint.open()) is None:
            return False
        records, note = saved
        try:
            with parsing("its note"):
                mark, revision = mark_of(self.source.stream, note), int(note["revision"])
            await self._follower.restore(records, revision, mark)
        except (StreamRecreatedError, ResponseError, DoubtedError) as why:
            if not isinstance(why, DoubtedError) or why.doubt is Doubt.LOST:
                _log.warning("checkpoint of %s is rebuilt, because %s", self.source.what, why)
            self._follower = self._new_follower()
            return False
        checkpoint.adopt(revision)
        return True

    async def _save(self, checkpoint: Checkpoint) -> None:
        assert self._follower.mark is not None
        await checkpoint.save(self.content, self._follower.mark.note())

    async def _save_often(self, checkpoint: Checkpoint) -> None:
        failed = False
        while True:
            await asyncio.sleep(_SAVE_EVERY)
            try:
                await self._save(checkpoint)
                failed = False
            except (sqlite3.Error, OSError) as error:
                if not failed:
                    _log.warning("checkpoint of %s cannot be written, and is tried again: %s", self.source.what, error)
                failed = True
