"""A member of a group, from its joining to its leaving: the I/O of `protocol.membership`.

::

    renew        store the member's key, every `heartbeat` seconds ──────────────┐
    view         what the bucket has: members, owners of the partitions ─────────┤
                                                                                 ▼
                                 `Membership` decides ──► claim, revoke, release, lose
                                                            │
    read         one `LogReader` for all partitions ──► `Dispatcher` ──► the iteration, or a task for each partition
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import inspect
import math
import os
import socket
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final

import nats.errors
from nats.nuid import NUID

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.base_connection import cancel, mark_retrieved
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.table import Table
from jetstream_ext.log.group_plan import Plan
from jetstream_ext.log.group_store import GroupStore, MemberRecord, PartitionRecord, Settings
from jetstream_ext.log.group_view import GroupView
from jetstream_ext.log.held import BLOCK, Held
from jetstream_ext.log.lane import Lane
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.membership import Claim, Lose, Membership, Owner, Release, Revoke
from jetstream_ext.protocol.options import check_int, check_seconds
from jetstream_ext.text import get_logger

Callback = Callable[[tuple[int, ...]], Awaitable[None] | None]

_log = get_logger()

# The partitions that the callback which is running may commit.
_in_callback: ContextVar[tuple[int, ...] | None] = ContextVar("in_callback", default=None)

_RETRY: Final = 0.1
_BREATHE_EVERY: Final = 0.05
_LEAVE_TIMEOUT: Final = 1.0  # for each step, after an error or a cancellation
_COMMITS_IN_FLIGHT: Final = 64
# So many partitions without messages may store that their positions have moved, each time that positions are committed.
_IDLE_COMMITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What a member was asked to do; see `Group.join`."""

    label: str | None = None
    on_assigned: Callback | None = None
    on_revoked: Callback | None = None
    on_partitions_lost: Callback | None = None
    auto_commit: bool = True
    every: int = 1000
    seconds: float = 5.0
    revoke_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.label is not None and not (isinstance(self.label, str) and self.label.isprintable() and self.label):
            raise ValueError(f"label must be printable text, not {self.label!r}")
        for name in ("on_assigned", "on_revoked", "on_partitions_lost"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise TypeError(f"{name} must be a function or None, not {given!r}")
        if not isinstance(self.auto_commit, bool):
            raise TypeError(f"auto_commit must be True or False, not {self.auto_commit!r}")
        check_int(self.every, "every")
        check_seconds(self.seconds, "seconds")
        check_seconds(self.revoke_timeout, "revoke_timeout")


class Session:
    """A member from its joining to its leaving. `work` serves a partition, unless the caller iterates."""

    def __init__(self, group: Plan, options: JoinOptions, output: tuple[str, str] | None = None) -> None:
        self.group: Plan = group
        self.store: GroupStore = group.store
        self.id: str = NUID().next().decode()
        self.label: str = options.label or f"{socket.gethostname()}-{os.getpid()}"
        self.settings: Settings
        self.error: BaseException | None = None
        self.held: dict[int, Held] = {}
        self.closed: bool = False
        self.work: Callable[[Held], Coroutine[Any, Any, None]] | None = None
        self._options = options
        self._output = output
        self._machine = Membership(self.id, group.partitions, ttl=group.ttl, margin=group.margin)
        self._table: Table | None = None
        self._view: GroupView
        self._lanes: dict[int | None, Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: list[asyncio.Task[None]] = []
        self._coordination: asyncio.Task[None]
        self._changed = asyncio.Event()  # for `_coordinate`
        self._idle = asyncio.Event()  # every partition is given back
        self.ready: asyncio.Event = asyncio.Event()  # for the iteration
        self._callbacks = asyncio.Lock()
        self._final: dict[int, int] = {}  # the positions to release partitions at
        self._records = 0  # so far, of all partitions
        self.current: Held | None = None  # of the message that the iteration has returned last
        self._loop: asyncio.AbstractEventLoop
        self._breathed = 0.0  # when other tasks could last run
        self._gate = asyncio.Event()  # closed while the key is being renewed
        self._gate.set()
        self._leaving = False
        self._stopping = False  # asked to leave, perhaps before it has joined
        self._failures = 0  # to renew the key, one after the other

    # -- joining and leaving ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._main or self.closed:
            raise RuntimeError(f"group {self.group.name!r}: a member can be entered once; call join() again")
        self._loop = asyncio.get_running_loop()
        try:
            self.settings = await self.group.prepare(self._output)
            self._view = GroupView(self.group, self.settings, self._output, member=self.what)
            table = self._table = await Retry(self.store.patience, transient=is_transient_read).call(self._open_table)
            await Retry(self.store.patience).call(self._renew)
        except BaseException:
            self.closed = True
            await self._end()
            raise
        self._coordination = self._start(self._coordinate(), "coordination")
        self._main = [
            self._coordination,
            self._start(self._follow(table), "view"),
            self._start(self._renew_often(), "heartbeats"),
        ]
        if self._options.auto_commit and self._output is None:
            self._main.append(self._start(self._commit_often(), "commits"))
        if self._stopping:
            self.stop()

    async def _open_table(self) -> Table:
        table = Table(self.store.kv, [f"{self.store.prefix}>"], timeout=self.store.timeout)
        await table.__aenter__()
        return table

    async def close(self, *, clean: bool) -> None:
        """Leave the group; in a hurry, unless `clean`."""
        if self.closed:
            return
        if self.current is not None:
            self.current.done.set()  # it stays in hand: only the caller knows whether it is handled
        hurry = not clean or self.error is not None
        try:
            if self.store.context.connection.usable:
                await self._give_back(_LEAVE_TIMEOUT if hurry else self.store.patience)
        finally:
            self.closed = True
            await self._end()

    async def _give_back(self, seconds: float) -> None:
        """Hand the partitions over, for up to so many seconds."""
        self._leaving = True
        self._machine.leave()
        self._changed.set()
        waiting = asyncio.ensure_future(self._idle.wait())
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(nats.errors.Error):
                    await self._renew()  # the others share its partitions from now on
                await asyncio.wait({waiting, self._coordination}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            _log.debug("%s could not hand over all its partitions in time", self.what)
        finally:
            waiting.cancel()

    async def _end(self) -> None:
        first, self._main = self._main, []
        try:
            await asyncio.gather(*(cancel(task, _LEAVE_TIMEOUT) for task in first))  # they start the others
            rest = [*self._tasks, *(lane.task for lane in self._lanes.values() if lane.task)]
            rest += [held.task for held in self.held.values() if held.task]
            await asyncio.gather(*(cancel(task, _LEAVE_TIMEOUT) for task in rest))
            if first:
                await self._delete_key()  # now that nothing runs, others may take what could not be handed over
        finally:
            self.held.clear()
            self.ready.set()
            if self._table is not None:
                await self._table.__aexit__(None, None, None)

    async def _delete_key(self) -> None:
        if not self.store.context.connection.usable:
            return
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await self.store.delete_member(self.id, self.group.ttl, self.store.timeout)
        except Exception as error:
            _log.debug("%s: its key could not be deleted: %r", self.what, error)

    def dropped(self) -> None:
        """Close, from the owner's ``__del__`` and so perhaps from another thread, if it was left open; warn if so."""
        if self.closed or not self._main:
            return
        self.closed = True

        def close() -> None:
            task = asyncio.ensure_future(self._end())
            task.add_done_callback(mark_retrieved)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._main[0].get_loop().call_soon_threadsafe(close)
        warnings.warn(f"{self.what} was dropped while it was open; use `async with`", ResourceWarning, stacklevel=3)

    @property
    def what(self) -> str:
        return f"group {self.group.name!r}: member {self.label!r}"

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                failure = RuntimeError(f"{self.what}: {what}: a handler or callback raised CancelledError")
                failure.__cause__ = error
                self.fail(failure)

        task = asyncio.create_task(run(), name=f"jetstream_ext {what} of {self.what}")
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        task = self._start(work, what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._changed.set())

    def fail(self, error: Exception) -> None:
        """End the member: the caller gets this error."""
        if self.error is None:
            _log.debug("%s ends: %r", self.what, error)
            self.error = error
        for held in self.held.values():
            held.end()
        self.ready.set()
        self._machine.leave()
        self._changed.set()
        if not self._leaving and self._main:
            self._leaving = True  # the others take over, also while the caller does not come back to this member
            self._spawn(self._renew_soon(), "renewal")

    async def _renew_soon(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # the next renewal says it, too
            await self._renew()

    def check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.closed or not self._main:
            raise RuntimeError(f"{self.what} is {'closed' if self.closed else 'not open; enter it with `async with`'}")

    # -- being alive --------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        sent = self._loop.time()
        record = MemberRecord(self.label, self._leaving, self.group.ttl)
        await self.store.put_member(self.id, record, min(self.store.timeout, self.group.heartbeat))
        self._machine.renewed(sent, self._loop.time())
        self._changed.set()
        if self._main:
            self.step()  # before a message is returned of a partition that was lost

    async def _renew_often(self) -> None:
        while True:
            begun = self._loop.time()
            pause = self.group.heartbeat
            self._gate.clear()
            try:
                await self._renew()
                self._failures = 0
            except Exception as error:
                if not is_transient(error):
                    raise
                if not self._failures:
                    _log.warning("%s cannot renew its key, and tries again: %s", self.what, error)
                self._failures += 1
                pause = min(_RETRY, pause)
            finally:
                self._gate.set()
            await asyncio.sleep(max(0.0, begun + pause - self._loop.time()) if not self._failures else pause)

    # -- partitions ---------------------------------------------------------------------------------------------------

    async def _coordinate(self) -> None:
        while True:
            self._changed.clear()
            self.step()
            if self._leaving and self._machine.idle:
                self._idle.set()
                self.ready.set()
            until = self._machine.wake_at(self._loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await self._changed.wait()

    def step(self) -> None:
        """Look at the bucket, and do what is due."""
        now = self._loop.time()
        view = self._view
        self._machine.see(view.alive, view.leaving, view.owners, view.revision)
        claims: list[Claim] = []
        releases: list[Release] = []
        for action in self._machine.due(now):
            match action:
                case Claim():
                    claims.append(action)
                case Revoke(attempts):
                    self._spawn(self._in_time(attempts, partial(self._revoke, attempts)), "revocation")
                case Release():
                    releases.append(action)
                case Lose(numbers):
                    self._lose(numbers)
        if claims:
            self._spawn(self._claim(claims), "claims")
        if releases:
            self._spawn(self._release_all(releases), "releases")

    async def _follow(self, table: Table) -> None:
        """Note what changes in the bucket."""
        view, changes = self._view, table.changes()
        for key, entry in table.items():
            view.note(key, entry)
        view.revision = table.revision
        self._changed.set()
        async for change in changes:
            if view.note(change.key, change.new):
                self._changed.set()
            view.revision = max(view.revision, change.revision)
        self.fail(RuntimeError(f"{self.what}: the table of its bucket was closed"))

    async def _claim(self, claims: list[Claim]) -> None:
        claimed = [it for it in await gather_bounded(self._claim_one, claims, limit=_COMMITS_IN_FLIGHT) if it]
        if not claimed:
            return
        async with self._callbacks:
            owned = tuple(
                sorted(it.partition for it, writer, _ in claimed if self._machine.holds(it.partition, writer.fence))
            )
            _log.debug("%s owns partitions %s", self.what, owned)
            await _call(self._options.on_assigned, owned, ())
            for claim, writer, position in claimed:
                if self._machine.holds(claim.partition, writer.fence):
                    self._hold(claim, writer, position)
            lost = tuple(number for number in owned if number not in self.held)  # while the callback was running
            await _call(self._options.on_partitions_lost or self._options.on_revoked, lost, lost)

    async def _claim_one(self, claim: Claim) -> tuple[Claim, FencedWriter, int] | None:
        number, attempt = claim.partition, claim.attempt
        writer = self.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self.settings.of_this_epoch(self.store.decode(PartitionRecord, found))
            owner = None if record is None or found is None else Owner(record.owner, found.seq)
            if not self._machine.may_store(claim):
                return None
            if not self._machine.may_claim(owner):
                self._machine.failed(number, attempt, self._loop.time())
                return None
            position = self.settings.start if record is None else record.seq
            if record is None or record.owner == self.id:  # another program may have deleted the record
                position = max(position, self._final.get(number, 0))
            ack = await writer.store([], self._record(self.id, position))
        except Exception as error:
            self._note_failure(claim, error)
            return None
        if not self._machine.claimed(number, attempt, ack.seq, self._loop.time()):
            return None
        self._final.pop(number, None)
        return claim, writer, position

    def _note_failure(self, action: Claim | Release, error: Exception) -> None:
        """Let the machine try again, or raise the error."""
        try_again = self._machine.failed(action.partition, action.attempt, self._loop.time())
        if isinstance(error, RecordMovedError):
            return
        if not (try_again and is_transient(error)):
            raise error
        what = "claim" if isinstance(action, Claim) else "release"
        _log.warning("%s could not %s partition %d, and tries again: %s", self.what, what, action.partition, error)

    def _hold(self, claim: Claim, writer: FencedWriter, position: int) -> None:
        number = claim.partition
        if number in self.held:
            self._lose([number])
        lane = self._lane_of(number)
        held = self.held[number] = Held(number, claim.attempt, lane, writer, position, last=position)
        if self._output is None:
            held.begin()  # else its worker looks its position up first
        if self.work is not None:
            held.task = self._start(self._serve(held, self.work), f"partition {number}")

    async def serve(self, work: Callable[[Held], Coroutine[Any, Any, None]]) -> None:
        """Run `work` for each partition as long as the member owns it, until the member fails; `close` ends what runs then."""
        self.check()
        self.work = work
        try:
            for held in self.held.values():
                if not held.ending and held.task is None:
                    held.task = self._start(self._serve(held, work), f"partition {held.number}")
            while self.error is None and not self.closed and not self._idle.is_set():
                self.ready.clear()
                await self.ready.wait()
            self.check()
        finally:
            self.work = None

    def stop(self) -> None:
        """Hand everything over as soon as what is in hand is handled; `serve` and the iteration end then."""
        self._stopping = True
        if self._main and not self.closed and not self._leaving:
            self._leaving = True
            self._machine.leave()
            for held in self.held.values():
                held.end()
            self._changed.set()
            self._spawn(self._stop_in_time(), "stop")

    async def _stop_in_time(self) -> None:
        """Wait until everything is handed over, or could not be, because no server answers."""
        seconds = self._options.revoke_timeout + self.store.patience
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                await self._renew_soon()  # the others share its partitions from now on
                await self._idle.wait()
        self._idle.set()
        self.ready.set()

    @property
    def is_stopped(self) -> bool:
        """Whether the member has nothing to do any more."""
        return self._idle.is_set()

    def abort(self) -> None:
        """Cancel what `serve` runs, for good: what is in hand is not handled."""
        if self.error is None:
            self.fail(RuntimeError(f"{self.what}: run() has ended; leave the member, and join again"))
        for held in self.held.values():
            if held.task is not None:
                held.task.cancel()
                held.done.set()

    async def _serve(self, held: Held, work: Callable[[Held], Coroutine[Any, Any, None]]) -> None:
        try:
            await work(held)
        except FencedError as error:
            if error.seq is None:  # its position was removed: it would start again
                raise
            _log.debug("%s: %s", self.what, error)
            self._fenced(held)

    def _lane_of(self, number: int) -> Lane:
        which = None if self.group.token is None else number
        lane = self._lanes.get(which)
        if lane is None:
            lane = self._lanes[which] = self.group.new_lane(which, self.settings)
            lane.task = self._start(self._read(lane), "reading")
        return lane

    async def _read(self, lane: Lane) -> None:
        """Read for the partitions, also after a suspension or an outage that was longer than the reader's patience.

        Then the key was not renewed meanwhile, or has ended. Otherwise the servers answer, and the error is one of the reading.
        """
        while True:
            try:
                await lane.read(self._given)
            except Exception as error:
                begun = self._loop.time() - self.store.patience
                if not is_transient(error) or (self.is_valid() and self._machine.was_renewed_since(begun)):
                    raise
                _log.warning("%s cannot read, and tries again: %s", self.what, error)
                await asyncio.sleep(_RETRY)

    def _given(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            held = self.held.get(number)
            if held is not None:
                held.given.set()
                self.ready.set()

    async def _revoke(self, attempts: Mapping[int, int]) -> None:
        async with self._callbacks:  # a claim of these partitions may wait for its callback
            found = self._claimed_by(attempts)
        for held in found:
            held.end()
        for number in attempts.keys() - {held.number for held in found}:
            self._machine.revoked(number, attempts[number])
        for held in found:
            if held.is_busy:
                self._spawn(self._in_time({held.number: held.attempt}, partial(self._revoke_later, held)), "revocation")
        ready = [held for held in found if not held.is_busy]
        if ready:
            owned = {held.number: held.attempt for held in ready}
            self._spawn(self._in_time(owned, partial(self._hand_over, ready)), "revocation")

    def _claimed_by(self, attempts: Mapping[int, int]) -> list[Held]:
        """Return what the member still holds of these partitions by these attempts."""
        return [held for number in attempts if (held := self.held.get(number)) and held.attempt == attempts[number]]

    async def _in_time(self, attempts: Mapping[int, int], revocation: Callable[[], Awaitable[None]]) -> None:
        """Let a revocation end within `revoke_timeout`: what is not handed over then is lost."""
        seconds = self._options.revoke_timeout
        limit = asyncio.timeout(None if seconds == math.inf else seconds)
        try:
            async with limit:
                await revocation()
        except TimeoutError:
            if not limit.expired():
                raise
            _log.warning(
                "%s: partitions %s were to be handed over %g s ago, and a message is still being handled, or a callback has not "
                "returned; they are given up, and their next owner goes on behind the last commit",
                self.what,
                tuple(sorted(attempts)),
                seconds,
            )
            held = self._claimed_by(attempts)
            self._final |= {it.number: it.committed for it in held}
            self._lose([it.number for it in held])
            for number, attempt in attempts.items():
                self._machine.revoked(number, attempt)

    async def _revoke_later(self, held: Held) -> None:
        if held.in_hand is not None:
            await held.done.wait()
        if held.task is not None:
            await asyncio.wait({held.task})
        async with held.lock:  # a commit may be on its way
            pass
        await self._hand_over([held])

    async def _hand_over(self, revoked: list[Held]) -> None:
        async with self._callbacks:
            mine = [held for held in revoked if self.held.get(held.number) is held]
            numbers = tuple(held.number for held in mine)
            await _call(self._options.on_revoked, numbers, numbers)
            for held in mine:
                if self.held.get(held.number) is held:  # it may have been lost meanwhile
                    if self._output is None:
                        self._final[held.number] = held.handled if self._options.auto_commit else held.committed
                    self._drop(held)
                    self._machine.revoked(held.number, held.attempt)

    async def _release_all(self, releases: list[Release]) -> None:
        await gather_bounded(self._release, releases, limit=_COMMITS_IN_FLIGHT)

    async def _release(self, release: Release) -> None:
        number, attempt = release.partition, release.attempt
        writer = self.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self.settings.of_this_epoch(self.store.decode(PartitionRecord, found))
            if not self._machine.may_store(release):
                return
            if record is None or record.owner != self.id:
                self._machine.released(number, attempt, 0 if found is None else found.seq)
                return
            position = max(record.seq, self._final.get(number, 0))
            ack = await writer.store([], self._record("", position))
        except Exception as error:
            self._note_failure(release, error)
            return
        self._final.pop(number, None)
        _log.debug("%s has released partition %d at %d", self.what, number, position)
        self._machine.released(number, attempt, ack.seq)

    def _lose(self, numbers: Iterable[int]) -> None:
        lost = [self.held[number] for number in numbers if number in self.held]
        for held in lost:
            held.end()
            if held.task is not None and held.task is not asyncio.current_task():
                self._spawn(cancel(held.task, _LEAVE_TIMEOUT), "end")
            self._drop(held)
        if lost:
            lost_numbers = tuple(held.number for held in lost)
            _log.warning("%s has lost partitions %s", self.what, lost_numbers)
            self._spawn(self._call_lost(lost_numbers), "loss")

    async def _call_lost(self, numbers: tuple[int, ...]) -> None:
        async with self._callbacks:
            await _call(self._options.on_partitions_lost or self._options.on_revoked, numbers, numbers)

    def _fenced(self, held: Held) -> None:
        """Another member has stored a record of this partition."""
        if self.held.get(held.number) is held:
            self._machine.fenced(held.number, held.writer.fence, self._loop.time())
            self._final[held.number] = held.committed
            self._lose([held.number])
            self._changed.set()

    def _drop(self, held: Held) -> None:
        held.end()
        held.done.set()
        del self.held[held.number]
        if self.group.token is not None:
            lane = self._lanes.pop(held.number)
            if lane.task is not None:
                self._spawn(cancel(lane.task, _LEAVE_TIMEOUT), "end")

    def _record(self, owner: str, position: int) -> bytes:
        self._records += 1
        return PartitionRecord(owner, position, self.settings.epoch, self.id, self._records).encode()

    # -- positions ----------------------------------------------------------------------------------------------------

    async def commit(self) -> list[int]:
        """Store the positions that the caller may store now (see `Member.commit`); return those that others own."""
        of = _in_callback.get()
        return await self._commit(in_hand=self.work is None and of is None, of=of)

    async def _commit(self, *, in_hand: bool = False, of: Iterable[int] | None = None) -> list[int]:
        async def attempt(held: Held) -> int | None:
            return None if await self._store_position(held, in_hand=in_hand) else held.number

        wanted = set(self.held if of is None else of)
        held = [self.held[number] for number in wanted if number in self.held]
        found = await gather_bounded(attempt, held, limit=_COMMITS_IN_FLIGHT)
        return sorted({number for number in found if number is not None} | wanted - {it.number for it in held})

    def _to_commit(self) -> list[int]:
        """Return the partitions with handled messages, and those of the others whose positions are the furthest behind."""
        moved = [held for held in self.held.values() if held.handled > held.committed]
        idle = heapq.nsmallest(_IDLE_COMMITS, [it for it in moved if not it.uncommitted], key=attrgetter("committed"))
        return [held.number for held in moved if held.uncommitted] + [held.number for held in idle]

    def pause_between_commits(self, seconds: float) -> float:
        """Return after how many seconds a partition without messages should store its position: later if there are many."""
        return seconds * max(1.0, len(self.held) / _IDLE_COMMITS)

    async def _store_position(self, held: Held, *, in_hand: bool = False) -> bool:
        """Store the position of a partition; return False if another member owns it."""
        async with held.lock:
            position = held.position if in_hand else held.handled
            if position <= held.committed or self.held.get(held.number) is not held:
                return True
            uncommitted = held.uncommitted
            try:
                ack = await held.writer.store([], self._record(self.id, position))
            except RecordMovedError:
                self._fenced(held)
                return False
            held.committed = position
            held.uncommitted -= uncommitted
            self._machine.stored(held.number, ack.seq)
            return True

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(self._options.seconds)
            try:
                await self._commit(of=self._to_commit())
            except Exception as error:
                if not is_transient(error):
                    raise
                _log.warning("%s could not commit its positions, and tries again: %s", self.what, error)

    async def put_down(self, held: Held) -> None:
        """Note that a message is handled, and commit if it is time."""
        held.put_down()
        held.uncommitted += 1
        if self._options.auto_commit and held.uncommitted >= self._options.every:
            await self._store_position(held)

    # -- messages -----------------------------------------------------------------------------------------------------

    def pick_up(self) -> StoredMsg | None:
        """Return a message of any partition, a block of one after a block of another."""
        held = self.current
        if held is None or not held.queue:
            held = self.current = self._next_block()
        return None if held is None else held.pick_up()

    def _next_block(self) -> Held | None:
        for which, lane in tuple(self._lanes.items()):
            taken = lane.dispatcher.take_any()
            if taken is not None:
                number, message = taken
                held = self.held[number]
                held.queue.append(message)
                held.queue.extend(lane.dispatcher.take(number, BLOCK - 1))
                self._lanes[which] = self._lanes.pop(which)  # the next block is another lane's
                return held
        return None

    async def breathe(self) -> None:
        """Let the key be renewed, between two messages: handlers that never await would keep the event loop from it."""
        if self._loop.time() - self._breathed > _BREATHE_EVERY:
            await asyncio.sleep(0)
            self._breathed = self._loop.time()
        if not self._gate.is_set():
            await self._gate.wait()

    def is_valid(self) -> bool:
        return self._machine.is_valid(self._loop.time())

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(sorted(number for number, held in self.held.items() if not held.ending))


async def _call(callback: Callback | None, partitions: tuple[int, ...], committable: tuple[int, ...]) -> None:
    if callback is not None and partitions:
        token = _in_callback.set(committable)
        try:
            result = callback(partitions)
            if inspect.isawaitable(result):
                await result
        finally:
            _in_callback.reset(token)
