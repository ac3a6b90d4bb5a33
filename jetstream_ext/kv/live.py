"""What follows a stream for a live table.

::

    OPENING ── load ──► FOLLOWING ──► ENDED
                          │   ▲
       removed without    ▼   │ loaded anew
       a trace, limits   RELOADING
       changed

It reads the newest messages as a snapshot does, and from there the log. Each step reads on to an end that no reply has
passed, looks at the leader's state, and commits: the content is then that of one revision. Between two steps it waits until
a message is published (a core subscription, where the client may have one), a caller waits for a revision, a value expires,
or a pause is over. Only the log says what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from nats.js.api import DEFAULT_PREFIX

from jetstream_ext.client.api import LAG_PAUSE, settled_state
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription, mark_retrieved
from jetstream_ext.client.retry import is_transient_read
from jetstream_ext.errors import RequestTimeoutError, ResponseError, StreamRecreatedError
from jetstream_ext.kv.checkpoint import Checkpoint, Saved
from jetstream_ext.kv.entries import EVERYTHING, update_of, updates_of
from jetstream_ext.kv.keyed_stream import KeyedStream
from jetstream_ext.kv.limits import limits_of
from jetstream_ext.kv.present import (
    empty_content,
    last_of_keys,
    proved_reader,
    read_now,
    read_under_the_same_limits,
    stored_keys,
)
from jetstream_ext.kv.proved_read import ProvedReader
from jetstream_ext.protocol.api import StreamState, parsing
from jetstream_ext.protocol.direct import Block, StoredMsg
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.options import check_function, check_not_coroutine, check_seconds, check_sequence
from jetstream_ext.protocol.subjects import covering, matcher
from jetstream_ext.protocol.table import Change, Content, Record, Watcher
from jetstream_ext.text import counted, get_logger, log_state

_E = TypeVar("_E")
_C = TypeVar("_C")

_log = get_logger("kv")

LONGEST_PAUSE: Final = 1.0
"""The longest pause between two steps, in seconds, with a subscription that ends it."""
LONGEST_POLL: Final = 0.25
"""Without one."""

# The shortest time from one step to the next, unless a caller waits: a table of a busy bucket asks so often at most.
_INTERVAL: Final = 0.004
# After a message was published, how soon it may be stored, and for how long that is looked for with growing pauses.
_STORED_SOON: Final = 0.001
# With more published messages between two steps, the table reads without pauses, and the subscription only costs.
_BUSY: Final = 16
# After so many of the longest pauses without an exact state, delete markers may have come and gone.
_AWAY: Final = 1.9
_MOST_STEPS: Final = 5  # to compare a checkpoint with what is stored
_COMPARE_EVERY: Final = 5.0  # seconds, at most, because published messages did not arrive
_LOOK_AGAIN: Final = timedelta(seconds=0.25)  # at a message that has expired and is still stored
_MOST_WATCHED: Final = 8  # subjects
_SAVE_EVERY: Final = 1.0  # how old a checkpoint may be, in seconds
# Pauses after an error.
_FIRST_RETRY: Final = 0.02
_LONGEST_RETRY: Final = 1.0


class _VanishedError(Exception):
    """Something was removed without a trace, or the limits were changed: only another load shows what is stored."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is stored of what a table has at a revision."""

    revision: int
    newest: int  # the sequence of the newest message up to that revision
    keys: set[str] | None  # all keys of a table of some keys that have a message, and had one when the stream ended …
    up_to: int  # … at this sequence


class Phase(enum.Enum):
    """Where a table is; see the module."""

    OPENING = "opening"
    FOLLOWING = "following"
    RELOADING = "reloading"
    ENDED = "ended"


class Live:
    """The content of a table, kept current by a task from `open` to `close`."""

    def __init__(self, source: KeyedStream, patterns: list[str], checkpoint: Path | None = None) -> None:
        self.source = source
        self._checkpoint: Checkpoint | None = None
        if checkpoint is not None:
            identity = {"stream": source.stream, "prefix": source.prefix, "keys": sorted(patterns)}
            self._checkpoint = Checkpoint(checkpoint, identity)
        self._anew = True  # the checkpoint must be written anew
        self._saved_revision = 0
        self._saving: asyncio.Task[None] | None = None
        self.content: Content = Content()
        self.error: Exception | None = None
        """Why the table has ended."""
        self.closed: bool = False
        self.leader_seq: int = 0
        """The leader's last sequence, when it was asked last."""
        self._phase = Phase.OPENING
        self._log_source = f"table of {source.what}"
        self._patterns = patterns
        self._whole = patterns == [EVERYTHING]
        self._task: asyncio.Task[None] | None = None
        self._kick = asyncio.Event()
        self._urgent = asyncio.Event()  # a caller waits
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap; some may have been cancelled
        self._waiters = 0
        self._numbers = itertools.count()
        self._called: set[Watcher] = set()  # those of `call`
        self._trouble: Exception | None = None  # of the last step; None if it succeeded
        self._state: StreamState | None = None
        self._heard = 0.0  # when the leader's state was received
        self._position = 0  # what is staged or committed
        self._dense = True  # and nothing is missing between the two
        self._doubtful = (
            False  # what it has must be compared with what is stored, because something may have been missed
        )
        self._suspicious = False  # the same, on weak evidence
        self._exact_at = 0.0  # when it was last known to have everything, by the event loop's clock
        self._compared_at = 0.0
        self._session = 0  # of the connection, when it was last known to have everything
        # No message of the table was stored after this time, by the leader's clock.
        self._committed_at = datetime.min.replace(tzinfo=UTC)
        self._filter: str | None = None  # for the server; None reads the whole stream
        self._subjects = source.subjects()
        self._watched: list[str] = []  # the subjects to subscribe to, to be woken
        self._inboxes: list[InboxSubscription] = []
        self._published = 0  # how many messages have arrived there since the last step
        self._late = 0  # how many of them were not read yet: perhaps they are not stored yet
        self._late_until = 0.0  # how long they are looked for
        self._next_pause = _INTERVAL

    async def open(self) -> None:
        if self._task is not None or self.closed:
            raise RuntimeError(f"{self.source.what}: a table can be entered once")
        try:
            with self.source.not_found():
                if self._checkpoint is None or not await self._restore(await self._checkpoint.open()):
                    await self._load()
        except BaseException as error:
            self.closed = True
            self._enter(Phase.ENDED, error)
            if self._checkpoint is not None:
                self._checkpoint.abandon()
            raise
        self._enter(Phase.FOLLOWING)
        what = self.source.what
        self._task = asyncio.create_task(self._run(), name=f"jetstream_ext table of {what}")
        if self._checkpoint is not None:
            self._saving = asyncio.create_task(self._save_often(), name=f"jetstream_ext checkpoint of {what}")

    async def close(self) -> None:
        """End the tasks, and store the checkpoint; callers that wait get an error."""
        self.closed = True
        tasks = [task for task in (self._task, self._saving) if task is not None]
        self._task = self._saving = None
        try:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self._end()
            if self._checkpoint is not None and tasks and self.error is None:
                try:
                    await self._save()
                except (sqlite3.Error, OSError) as error:
                    _log.warning("checkpoint of %s could not be written at the end: %s", self.source.what, error)
                await self._checkpoint.close()
        finally:
            self._end()
            if self._checkpoint is not None:
                self._checkpoint.abandon()

    def owner_dropped(self, what: str) -> None:
        """Close, from the owner's ``__del__`` and so perhaps from another thread, if it was left open; warn if so."""
        task = self._task
        if task is None or task.done():
            return

        def close() -> None:
            self.closed = True
            for each in (task, self._saving):
                if each is not None:
                    each.cancel()
            self._end()
            if self._checkpoint is not None:
                self._checkpoint.abandon()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            task.get_loop().call_soon_threadsafe(close)
        # At last, because it may raise.
        text = f"a {what} of {self.source.what} was dropped while it was open; use `async with`"
        warnings.warn(text, ResourceWarning, stacklevel=3)

    def _enter(self, phase: Phase, why: object = "") -> None:
        before, self._phase = self._phase, phase
        if phase is not before:
            change = f"{before.name} -> {phase.name}"
            log_state(
                _log, self._log_source, change, why, revision=self.content.revision, keys=len(self.content.values)
            )

    def _end(self) -> None:
        self._enter(Phase.ENDED, self.error or "")
        self._disarm()
        for _, _, future in self._waiting:
            if not future.done():
                future.set_exception(self.reason())
                mark_retrieved(future)
        self._waiting.clear()
        for watcher in tuple(self.content.watchers):
            watcher.push([])

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
        if self.content.revision >= revision:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (revision, next(self._numbers), future))
        self._waiters += 1
        self._kick.set()
        self._urgent.set()
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            why = "" if self._trouble is None else f"; the last read failed: {self._trouble}"
            raise RequestTimeoutError(
                f"{self.source.what}: the table did not reach revision {revision} within {timeout:.4g} s; it has "
                f"{self.content.revision}, and the leader had {self.leader_seq}{why}"
            ) from self._trouble
        finally:
            future.cancel()
            self._waiters -= 1
            if len(self._waiting) > 2 * self._waiters + 64:
                self._waiting = [entry for entry in self._waiting if not entry[2].done()]
                heapq.heapify(self._waiting)

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

    # -- the task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = loads = 0  # one after the other
        try:
            while True:
                was_stale = self._phase is Phase.RELOADING
                published, self._published = self._published, 0
                self._kick.clear()
                self._urgent.clear()
                try:
                    with self.source.not_found():
                        read = await self._go_on()
                except _VanishedError as why:
                    _log.warning("%s: the table is loaded again, because %s", self.source.what, why)
                    self._enter(Phase.RELOADING, why)
                    await asyncio.sleep(min(_FIRST_RETRY * 2**loads, _LONGEST_RETRY) if loads else 0)
                    loads = min(loads + 1, 16)
                    continue
                except Exception as error:
                    if not is_transient_read(error):
                        raise
                    self._doubtful = True
                    if self._trouble is None:
                        _log.warning("%s: the table is not current, and tries again: %s", self.source.what, error)
                    self._trouble = error
                    await asyncio.sleep(min(_FIRST_RETRY * 2**failures, _LONGEST_RETRY))
                    failures = min(failures + 1, 16)
                    continue
                if self._trouble is not None:
                    _log.warning("%s: the table is current again", self.source.what)
                self._trouble, failures, loads = None, 0, loads if was_stale else 0
                await self._pause(read, published)
        except Exception as error:
            self.error = error
            self._end()

    async def _go_on(self) -> int:
        """Make the table current; return how many messages were read."""
        if self._phase is Phase.RELOADING:
            await self._load()
            self._enter(Phase.FOLLOWING)
            return 1
        read = await self._step()
        if self._watched and not self._inboxes and not read:
            await self._arm()
            read = await self._step()  # what was stored before the server had the subscription
        return read

    async def _pause(self, read: int, published: int) -> None:
        """Wait until there may be something to read, after a step that has read so many messages."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        armed = bool(self._inboxes)
        self._late = max(0, self._late + published - read) if armed else 0
        if published:
            self._late_until = now + LONGEST_PAUSE
        if read or published:
            self._next_pause = _STORED_SOON if armed else _INTERVAL
        if armed and not self._late:
            pause = self._longest_pause
        else:
            pause = self._next_pause
            self._next_pause = min(2 * pause, LONGEST_POLL)
            if armed and now > self._late_until:
                # The server has refused these messages, or they are gone already.
                self._late, pause, self._suspicious = 0, self._longest_pause, not self._whole
        if self._waiters:
            pause = min(pause, LAG_PAUSE)
        if (expiry := self.content.next_expiry()) is not None:
            pause = min(pause, max(0.0, (expiry - self._leader_time()).total_seconds()))
        await _wait(self._kick, now + pause)
        await _wait(self._urgent, now + _INTERVAL)

    @property
    def _longest_pause(self) -> float:
        """In seconds. A delete marker may be gone after a second, and only the number of all subjects would show it."""
        expiring = self._state is not None and self._state.config.get("allow_msg_ttl")
        return LONGEST_PAUSE / 2 if expiring and not self._whole else LONGEST_PAUSE

    def _leader_time(self) -> datetime:
        """Return what the leader's clock shows now, or a little less."""
        assert self._state is not None
        return self._state.now + timedelta(seconds=asyncio.get_running_loop().time() - self._heard)

    async def _load(self) -> None:
        """Read what is stored now, and tell the watchers what has changed."""
        before = self._state

        async def look() -> StreamState:
            state = await settled_state(self.source.readable_state, self.content.revision)
            if before is not None:
                await self.source.check_same(before, state)
            if state.last_seq < self.content.revision:
                raise self._behind(state)
            return state

        read = await read_under_the_same_limits(
            self.source, look, lambda state: read_now(self.source, self._patterns, state)
        )
        self._begin(read.content, read.state)
        self._anew = True
        self._wake_waiting()

    def _begin(self, content: Content, state: StreamState) -> None:
        """Follow a content from its revision on."""
        before = self.content
        self.content, self._position, self._dense = content, content.revision, True
        self._subjects = self.source.subjects(matcher(self._patterns))
        if not self._whole:
            self._filter = covering([self.source.subject(pattern) for pattern in self._patterns])
        self._disarm()
        self._watched = self._subjects_to_watch(state)
        self._note(state)
        self._doubtful, self._exact_at, self._committed_at = False, self._heard, max(state.now, state.last_time)
        self._session = self.source.context.connection.session
        content.succeed(before)

    def _behind(self, state: StreamState) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{self.source.what}: its leader ends at sequence {state.last_seq}, and the table has revision "
            f"{self.content.revision}: the leader still has to catch up, or has lost its last messages"
        )

    def _was_away(self) -> bool:
        """Whether delete markers may have come and gone since the table was known to have everything."""
        since = max(self._exact_at, self._compared_at)
        return asyncio.get_running_loop().time() > since + _AWAY * self._longest_pause

    async def _step(self) -> int:
        """Read on to an end that no reply has passed, and commit; return how many messages were read."""
        assert self._state is not None
        now, session = asyncio.get_running_loop().time(), self.source.context.connection.session
        self._doubtful = (
            self._doubtful
            or session != self._session  # the server may have been restarted, without its last messages
            or self._was_away()
            or (self._suspicious and now > self._compared_at + _COMPARE_EVERY)
        )
        stored = await self._compare() if self._doubtful else None
        reader, count = proved_reader(self.source, self._state), 0
        async with aclosing(reader.follow(self._position, subject=self._filter)) as pieces:
            async for piece in pieces:
                if len(piece):
                    self._stage(piece.found)
                    count += len(piece)
                if session != self.source.context.connection.session or (stored is None and self._was_away()):
                    self._doubtful = True
                    break
                if piece.exact:
                    await self._commit_all(reader, stored)
                    self._session = session
                elif self._dense and piece.whole and self.content.staged:
                    await self._commit(self._position)
        return count

    def _stage(self, found: Block | list[StoredMsg]) -> None:
        if isinstance(found, list):
            seqs, size = [message.seq for message in found], sum(len(message.data) for message in found)
        else:
            seqs, size = found.seqs, found.size
        missing = seqs[-1] - self._position - len(seqs)
        self._dense = self._dense and not missing
        # With a filter, most of what is missing are messages of others.
        self.content.stage(updates_of(found, self._subjects), size, 0 if self._filter else missing)
        self._position = seqs[-1]

    async def _commit_all(self, reader: ProvedReader, stored: _Stored | None) -> None:
        """Commit after the last piece of the log; with it, the table has all that was stored when `reader.end` was asked."""
        content, end = self.content, reader.end
        if end.last_seq < content.revision:
            self._doubtful = True  # the leader has yet to learn of the last messages, or they are lost
            return
        if self._whole and content.has_more_than(end.num_subjects, end.first_seq, end.last_seq, end.now):
            raise _VanishedError("keys were removed without delete markers")
        if stored is not None:
            if content.has_lost(stored.newest, stored.revision, end.first_seq, end.now):
                raise _VanishedError("messages were lost, or removed without delete markers")
            if stored.keys is not None:
                content.keep_only(stored.keys, stored.up_to)
        await self._commit(max(self._position, end.last_seq), end)
        self._doubtful = not self._whole and stored is not None and self._was_away()  # that took long, too
        self._exact_at = self._heard
        again = end.now + _LOOK_AGAIN
        if unclear := content.expire(end.now):
            content.expose(unclear, await last_of_keys(self.source, reader, unclear), again)
        content.drop_below(end.first_seq)

    async def _commit(self, revision: int, end: StreamState | None = None) -> None:
        """Show what is staged, as the state of a revision; `end` is what the leader said last, if nothing was read since."""
        assert self._state is not None
        unread = end is not None and self._position == self.content.revision
        state = end if end is not None and unread else await self.source.readable_state()
        self._check_limits(await self.source.check_same(self._state, state))
        elsewhere = state.leader != self._state.leader
        self._note(state)
        self._position, self._dense, self._committed_at = revision, True, max(state.now, state.last_time)
        self.content.commit(revision)
        self._suspicious = self._suspicious or elsewhere
        self._wake_waiting()

    async def _compare(self) -> _Stored:
        """Return what is stored of what the table has; raise an error if the stream is not what it was."""
        assert self._state is not None
        self._suspicious, self._compared_at = False, asyncio.get_running_loop().time()
        revision = self.content.revision
        state = await self.source.check_same(self._state, await self.source.readable_state())
        if state.last_seq < revision:
            raise self._behind(state)
        log_state(_log, self._log_source, "compared", revision=revision, last_seq=state.last_seq)
        reader = proved_reader(self.source, state)
        newest = await reader.newest_up_to(revision, state.first_seq)
        if newest is not None and newest.time > self._committed_at:
            raise _VanishedError("messages were lost, and others have their sequences")
        keys = None if self._whole else await stored_keys(self.source, reader, self._patterns)
        return _Stored(revision, 0 if newest is None else newest.seq, keys, state.last_seq)

    def _check_limits(self, state: StreamState) -> None:
        assert self._state is not None
        if _limits(self._state) != _limits(state):
            self._state = state
            raise _VanishedError("its limits were changed")

    def _note(self, state: StreamState) -> None:
        self._state, self._heard = state, asyncio.get_running_loop().time()
        self.leader_seq = max(self.leader_seq, state.last_seq)

    def _wake_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.content.revision:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    async def _restore(self, saved: Saved | None) -> bool:
        """Begin with what a checkpoint has, and read what came since; return False if it cannot be used."""
        if saved is None:
            return False
        try:
            with parsing("its note"):
                before, revision = _state_of(self.source.stream, saved.note), int(saved.note["revision"])
            state = await settled_state(self.source.readable_state, revision)
            await self.source.check_same(before, state)
            if _limits(before) != _limits(state):
                raise _VanishedError("its limits were changed")
            if state.last_seq < revision:
                raise _VanishedError(f"the stream ends at sequence {state.last_seq}, before revision {revision}")
            content = empty_content(state)
            self._begin(content, state)

            def feed() -> None:
                content.feed([update_of(self._subjects, key, record) for key, record, _ in saved.rows])

            await asyncio.to_thread(feed)
            content.dirty, content.revision, self._position = set(), revision, revision
            self._doubtful, self._committed_at = True, max(before.now, before.last_time)
            for _ in range(_MOST_STEPS):  # more than one if the connection is lost meanwhile
                if self._doubtful:
                    await self._step()
        except (StreamRecreatedError, ResponseError, _VanishedError) as why:
            _log.warning("checkpoint of %s is rebuilt, because %s", self.source.what, why)
            self.content, self._state = Content(), None
            return False
        self._anew = False
        log_state(_log, self._log_source, "checkpoint restored", revision=revision, keys=len(saved.rows))
        return True

    async def _save(self) -> None:
        """Store what has changed since the last time."""
        assert self._checkpoint is not None
        assert self._state is not None
        content, anew = self.content, self._anew
        dirty, content.dirty = content.dirty or set(), set()
        if anew:
            values, deleted, gone = content.values.copy(), content.deleted.copy(), list[str]()
        elif dirty or content.revision != self._saved_revision:
            values = {key: content.values[key] for key in dirty if key in content.values}
            deleted = {key: content.deleted[key] for key in dirty if key in content.deleted}
            gone = [key for key in dirty if key not in values and key not in deleted]
        else:
            return
        revision = content.revision
        note = _note_of(self._state) | {"revision": revision, "count": len(content)}
        try:
            await self._checkpoint.save(values, deleted, gone, note, anew=anew)
        except BaseException:
            if content.dirty is not None:
                content.dirty |= dirty
            raise
        self._saved_revision, self._anew = revision, self._anew and content is not self.content
        log_state(_log, self._log_source, "checkpoint saved", revision=revision, keys=len(values), anew=anew)

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

    # -- wake-ups -----------------------------------------------------------------------------------------------------

    def _subjects_to_watch(self, state: StreamState) -> list[str]:
        """Return the subjects on which the messages of the table are published; none if that is not known."""
        by_others = state.origin or not state.contiguous or state.config.get("subject_transform")
        if by_others or self.source.context.prefix != DEFAULT_PREFIX:
            return []
        subjects = list(state.subjects) if self._filter is None else [self._filter]
        # This client's own requests and their answers must not wake it.
        if len(subjects) > _MOST_WATCHED or any(each.startswith((">", "*", "$JS", "_INBOX")) for each in subjects):
            return []
        return subjects

    async def _arm(self) -> None:
        """Subscribe to what is published for the keys."""
        connection = self.source.context.connection
        handler = InboxHandler(self._noticed, self._lost, self._kick.set, self._not_permitted)
        for subject in self._watched:
            self._inboxes.append(await connection.inbox(handler, subject=subject, timeout=self.source.timeout))
        log_state(_log, self._log_source, "subscribed", subjects=len(self._watched))
        if not self._watched:  # the server has refused one of them meanwhile
            self._disarm()

    def _noticed(self, frames: list[Frame]) -> None:
        self._published += len(frames)
        self._kick.set()
        if self._published > _BUSY:
            self._disarm()

    def _lost(self) -> None:
        self._doubtful = True
        self._disarm()
        self._kick.set()

    def _not_permitted(self, _: Exception) -> None:
        self._watched = []  # the table polls instead
        self._disarm()
        self._kick.set()

    def _disarm(self) -> None:
        inboxes, self._inboxes = self._inboxes, []
        if inboxes:
            log_state(_log, self._log_source, "unsubscribed", published=self._published)
        for inbox in inboxes:
            inbox.close()


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
        return max(0, self._live.leader_seq - self._live.content.revision)

    async def wait_for(self, revision: int, timeout: float | None = None) -> None:
        """Wait until the table has a revision, such as that of a write that was acknowledged to any client.

        Args:
            revision: A revision (stream sequence), from 1; also one of a key that is not in the table.
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
        check_sequence(revision, "revision")
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


def _limits(state: StreamState) -> dict[str, Any]:
    return limits_of(state.config) | {"allow_msg_ttl": bool(state.config.get("allow_msg_ttl"))}


_NUMBERS: Final = "first_seq", "last_seq", "messages"
_TIMES: Final = "first_time", "last_time", "now"


def _note_of(state: StreamState) -> dict[str, Any]:
    """Return what a checkpoint notes of a stream."""
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    times = {name: getattr(state, name).isoformat() for name in _TIMES}
    return {"created": state.created, "config": _limits(state)} | numbers | times


def _state_of(stream: str, note: dict[str, Any]) -> StreamState:
    return StreamState(
        stream,
        str(note["created"]),
        dict(note["config"]),
        first_seq=int(note["first_seq"]),
        last_seq=int(note["last_seq"]),
        messages=int(note["messages"]),
        first_time=datetime.fromisoformat(note["first_time"]),
        last_time=datetime.fromisoformat(note["last_time"]),
        now=datetime.fromisoformat(note["now"]),
    )


async def _wait(event: asyncio.Event, until: float) -> None:
    try:
        async with asyncio.timeout_at(until):
            await event.wait()
    except TimeoutError:
        pass
