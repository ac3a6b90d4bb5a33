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
import math
import os
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, NoReturn

import nats.errors
from nats.nuid import NUID

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.base_connection import cancel, mark_retrieved
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import FencedError
from jetstream_ext.kv.table import KeyValueChange, Table
from jetstream_ext.log.callbacks import Callbacks, JoinOptions
from jetstream_ext.log.group_plan import Plan
from jetstream_ext.log.group_store import GroupStore, MemberRecord, PartitionRecord, Settings
from jetstream_ext.log.group_view import GroupView
from jetstream_ext.log.held import BLOCK, Held
from jetstream_ext.log.lane import Lane
from jetstream_ext.log.observed import store_position
from jetstream_ext.log.pauses import Pauses
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.membership import Claim, Lose, Membership, Owner, Release, Revoke
from jetstream_ext.text import get_logger, log_state, plural

_log = get_logger("log")


_RETRY: Final = 0.1
_LEAVE_TIMEOUT: Final = 1.0  # for each step, after an error or a cancellation
_COMMITS_IN_FLIGHT: Final = 64
# So many partitions without messages may store that their positions have moved, each time that positions are committed.
_IDLE_COMMITS: Final = 64


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
        self._failed = asyncio.Event()
        self._unused = asyncio.Event()  # leaving: no partition is worked on any more
        self._idle = asyncio.Event()  # every partition is given back, or cannot be
        self.ready: asyncio.Event = asyncio.Event()  # for the iteration
        self._callbacks = Callbacks(options, self.what)
        # Revoked partitions, which the next call of `on_revoked` hands over, and until when it may.
        self._finished: dict[Held, float | None] = {}
        self._untold: set[int] = set()  # lost partitions, for the next call of `on_partitions_lost`
        self._telling = 0  # tasks that call it
        self._cancelled: dict[
            int, tuple[asyncio.Task[None], float]
        ] = {}  # handlers of lost partitions; a new one waits
        self._outlasting: set[asyncio.Task[None]] = set()  # those of them that go on
        self._final: dict[int, int] = {}  # the positions to release partitions at
        self._records = 0  # so far, of all partitions
        self.current: Held | None = None  # of the message that the iteration has returned last
        self._loop: asyncio.AbstractEventLoop
        self.pauses: Pauses = Pauses(busy=lambda: bool(self._tasks))
        self._leaving = False
        self._ending = False  # everything is cancelled
        self._stopping = False  # asked to leave, perhaps before it has joined
        self._departure: asyncio.Task[None] | None = None
        self._told = False  # the caller knows the error
        self._has_key = False  # perhaps
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
            self._has_key = True
            await Retry(self.store.patience).call(self._renew)
        except BaseException:
            self.closed = True
            await self._end()
            raise
        log_state(_log, self.what, "joined", member=self.id)
        changes = table.changes()
        for key, entry in table.items():
            self._view.note(key, entry)
        self._view.revision = table.revision
        self._coordination = self._start(self._coordinate(), "coordination")
        self._main = [
            self._coordination,
            self._start(self._follow(changes), "view"),
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
        """Leave the group; in a hurry, unless `clean`. Raises the member's error if the caller does not know it."""
        if self.closed:
            return
        calling = self._callbacks.running
        if calling is not None and calling.task is asyncio.current_task():
            raise RuntimeError(f"{self.what} cannot be left in one of its callbacks; call stop() there")
        if self.current is not None:
            self.current.done.set()  # it stays in hand: only the caller knows whether it is handled
        connection = self.store.context.connection
        try:
            if connection.end is None and not connection.nc.is_draining:
                self._depart()
                if clean and self.error is None and self._departure is not None:
                    await asyncio.wait({self._departure})
                else:
                    await self._hand_over_in_a_hurry()
            elif self.held and clean:
                _log.warning(
                    "%s: the connection was closed before the member left: partitions %s were not handed over; their next owners "
                    "continue after the last commits",
                    self.what,
                    tuple(sorted(self.held)),
                )
        finally:
            self.closed = True
            await self._end()
        if self.error is not None and not self._told:
            if clean:
                self._raise_error()
            _log.warning("%s has failed while it left: %r", self.what, self.error)

    def _depart(self) -> None:
        """Begin to leave: no further messages; the others take over what is handed over."""
        for held in self.held.values():
            held.end()
        self._machine.leave()
        self._changed.set()
        if not self._leaving and self._main:
            self._leaving = True
            log_state(_log, self.what, "leaves", partitions=len(self.held))
            self._spawn(self._renew_soon(), "renewal")  # the others share its partitions from now on
            self._departure = self._spawn(self._hand_over_all(), "departure")

    async def _hand_over_all(self) -> None:
        """Wait until everything is handed over, or cannot be, because the member has failed or no server answers."""
        await self._wait_for(self._unused, self._options.revoke_timeout + _LEAVE_TIMEOUT, unless_failed=True)
        await self._wait_for(self._idle, self.store.patience, unless_failed=True)
        if self._failed.is_set():
            await self._hand_over_in_a_hurry()
        if not self._idle.is_set():
            _log.warning(
                "%s could not hand over all its partitions; their next owners continue after the last commits, once the member's key "
                "has ended",
                self.what,
            )
        self._unused.set()
        self._idle.set()
        self.ready.set()

    async def _hand_over_in_a_hurry(self) -> None:
        await self._wait_for(self._unused, _LEAVE_TIMEOUT)
        await self._wait_for(self._idle, _LEAVE_TIMEOUT)

    async def _wait_for(self, event: asyncio.Event, seconds: float, *, unless_failed: bool = False) -> None:
        """Wait for an event for up to so many seconds, or until nothing sets it any more."""
        events = [event, self._failed] if unless_failed else [event]
        waiting = [asyncio.ensure_future(each.wait()) for each in events]
        try:
            await asyncio.wait(
                {*waiting, self._coordination},
                timeout=None if seconds == math.inf else seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for each in waiting:
                each.cancel()

    async def _end(self) -> None:
        """End everything that runs, also if the caller is cancelled meanwhile; each step takes `_LEAVE_TIMEOUT` at most."""
        self._leaving = self._ending = True
        self._machine.leave()
        running = [*self._main, *self._tasks, *(lane.task for lane in self._lanes.values() if lane.task)]
        running += [held.task for held in self.held.values() if held.task]
        running += self._outlasting
        for task in running:
            task.cancel()
        ending = asyncio.create_task(self._end_all(running), name=f"jetstream_ext end of {self.what}")
        cancelled = False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled and not ending.cancelled():
            mark_retrieved(ending)
            raise asyncio.CancelledError
        ending.result()

    async def _end_all(self, running: Iterable[asyncio.Task[None]]) -> None:
        self._main = []
        try:
            await asyncio.gather(*(cancel(task, _LEAVE_TIMEOUT) for task in running))
            later = {
                *self._tasks,
                *(lane.task for lane in self._lanes.values() if lane.task),
            }  # which these have started
            await asyncio.gather(*(cancel(task, _LEAVE_TIMEOUT) for task in later if not task.done()))
            if self._has_key:
                await self._delete_key()  # now that nothing runs, others may take what could not be handed over
        finally:
            self.held.clear()
            self.ready.set()
            if self._table is not None:
                await self._table.__aexit__(None, None, None)
            log_state(_log, self.what, "left")

    async def _delete_key(self) -> None:
        if not self.store.context.connection.usable:
            return
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await self.store.delete_member(self.id, self.group.ttl, self.store.timeout)
        except Exception as error:
            log_state(_log, self.what, "key not deleted", error, error=error)

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

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = self._start(work, what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def fail(self, error: Exception) -> None:
        """End the member: the caller gets this error."""
        if self.error is None or (self._told and type(error) is not type(self.error)):
            log_state(_log, self.what, "failed", error=error)
            self.error, self._told = error, False
        self._failed.set()
        self.ready.set()
        self._depart()  # the others take over, also while the caller does not come back to this member

    async def _renew_soon(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # the next renewal says it, too
            await self._renew()

    def check(self) -> None:
        if self.error is not None:
            self._raise_error()
        if self.closed or not self._main:
            raise RuntimeError(f"{self.what} is {'closed' if self.closed else 'not open; enter it with `async with`'}")

    def _raise_error(self) -> NoReturn:
        assert self.error is not None
        self._told = True
        raise self.error.with_traceback(None)

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
            try:
                async with self.pauses.until_done():
                    await self._renew()
                self._failures = 0
            except Exception as error:
                if not is_transient(error):
                    raise
                if not self._failures:
                    _log.warning("%s cannot renew its key, and tries again: %s", self.what, error)
                self._failures += 1
                pause = min(_RETRY, pause)
            await asyncio.sleep(max(0.0, begun + pause - self._loop.time()) if not self._failures else pause)

    # -- partitions ---------------------------------------------------------------------------------------------------

    async def _coordinate(self) -> None:
        while True:
            self._changed.clear()
            self.step()
            if self._leaving and not self._machine.working and not self._telling:
                self._unused.set()
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
                    self._spawn(self._revoke(attempts), "revocation")
                case Release():
                    releases.append(action)
                case Lose(numbers):
                    self._lose(numbers)
        if claims:
            self._spawn(self._claim(claims), "claims")
        if releases:
            self._spawn(self._release_all(releases), "releases")

    async def _follow(self, changes: AsyncIterator[KeyValueChange]) -> None:
        """Note what changes in the bucket."""
        view = self._view
        async for change in changes:
            if view.note(change.key, change.new):
                self._changed.set()
            view.revision = max(view.revision, change.revision)
        self.fail(RuntimeError(f"{self.what}: the table of its bucket was closed"))

    async def _claim(self, claims: list[Claim]) -> None:
        claimed = [it for it in await gather_bounded(self._claim_one, claims, limit=_COMMITS_IN_FLIGHT) if it]
        if not claimed:
            return
        async with self._callbacks.lock:
            owned = tuple(
                sorted(it.partition for it, writer, _ in claimed if self._machine.holds(it.partition, writer.fence))
            )
            log_state(_log, self.what, "partitions assigned", partitions=", ".join(map(str, owned)))
            await self._callbacks.assigned(owned)
            for claim, writer, position in claimed:
                if self._machine.holds(claim.partition, writer.fence):
                    self._hold(claim, writer, position)
            lost = tuple(number for number in owned if number not in self.held)  # while the callback was running
            await self._callbacks.lost(lost)

    async def _claim_one(self, claim: Claim) -> tuple[Claim, FencedWriter, int] | None:
        number, attempt = claim.partition, claim.attempt
        if self._still_runs(number):
            self._machine.failed(number, attempt, self._loop.time())
            return None
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

    def _still_runs(self, number: int) -> bool:
        """Return whether the handler of a partition that was lost has not ended yet; it has `revoke_timeout` for that."""
        task, until = self._cancelled.get(number, (None, 0.0))
        if task is None or task.done():
            self._cancelled.pop(number, None)
            return False
        if self._loop.time() < until:
            return True
        del self._cancelled[number]
        _log.warning(
            "%s: a handler of partition %d still runs, %g s after it was cancelled; its messages are handled again",
            self.what,
            number,
            self._options.revoke_timeout,
        )
        return False

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
        if self._main and not self.closed:
            self._depart()

    @property
    def is_stopped(self) -> bool:
        """Whether the member has nothing to do any more."""
        return self._idle.is_set()

    def abort(self) -> None:
        """Cancel what `serve` runs, for good: what is in hand is not handled."""
        if self.error is None:
            self.fail(RuntimeError(f"{self.what}: run() has ended; leave the member, and join again"))
            self._told = True
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
            log_state(_log, self.what, "fenced", error, partition=held.number)
            self._fenced(held)
        except Exception as error:
            if self.held.get(held.number) is held:
                raise
            _log.warning(
                "%s: the handler of partition %d, which was lost, has failed: %r", self.what, held.number, error
            )

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
                if not is_transient_read(error) or (self.is_valid() and self._machine.was_renewed_since(begun)):
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
        """Hand over what these attempts have claimed, within `revoke_timeout`."""
        seconds = self._options.revoke_timeout
        until = None if seconds == math.inf else self._loop.time() + seconds
        self._begin_to_revoke(self._claimed_by(attempts), until)
        rest = {number: attempt for number, attempt in attempts.items() if number not in self.held}
        if rest:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until), self._callbacks.lock:
                    pass  # a claim of these partitions waits for its callback
            self._begin_to_revoke(self._claimed_by(rest), until)
            for number in rest.keys() - self.held.keys():
                self._machine.revoked(number, rest[number])

    def _begin_to_revoke(self, revoked: Iterable[Held], until: float | None) -> None:
        for held in revoked:
            held.end()
            self._spawn(self._revoke_one(held, until), "revocation")

    def _claimed_by(self, attempts: Mapping[int, int]) -> list[Held]:
        """Return what the member still holds of these partitions by these attempts."""
        return [held for number in attempts if (held := self.held.get(number)) and held.attempt == attempts[number]]

    async def _revoke_one(self, held: Held, until: float | None) -> None:
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                await held.finished()
                await self._hand_over(held, until)
        except TimeoutError:
            if not limit.expired():
                raise
            if self.held.get(held.number) is held:
                _log.warning(
                    "%s: partition %d was to be handed over %g s ago, and a message is still being handled, or a callback has not "
                    "returned; it is lost, and its next owner continues after the last commit",
                    self.what,
                    held.number,
                    self._options.revoke_timeout,
                )
            self._give_up(held)

    async def _hand_over(self, held: Held, until: float | None) -> None:
        """Hand a partition over that is not worked on any more, with others for which that holds by then, and the same time."""
        self._finished[held] = until
        await asyncio.sleep(0)
        async with self._callbacks.lock:
            if held not in self._finished:
                return
            finished = [each for each, limit in self._finished.items() if limit == until]
            for each in finished:
                del self._finished[each]
            mine = [each for each in finished if self.held.get(each.number) is each]
            try:
                numbers = tuple(sorted(each.number for each in mine))
                await self._callbacks.revoked(numbers)
            except BaseException as error:
                for each in mine:
                    if isinstance(error, Exception):
                        self._let_go(each, each.committed)
                    else:  # it took too long
                        self._give_up(each)
                raise
            for each in mine:
                self._let_go(each, each.handled if self._options.auto_commit else each.committed)

    def _let_go(self, held: Held, position: int) -> None:
        """Let the next owner of a partition go on at a position, unless the partition was lost meanwhile."""
        if self.held.get(held.number) is held:
            if self._output is None:
                self._final[held.number] = position
            self._drop(held)
        self._machine.revoked(held.number, held.attempt)

    def _give_up(self, held: Held) -> None:
        """Let the next owner of a partition go on behind the last commit, although it may still be worked on."""
        if self.held.get(held.number) is held:
            self._final[held.number] = held.committed
            self._lose([held.number])
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
        log_state(_log, self.what, "partition released", partition=number, position=position)
        self._machine.released(number, attempt, ack.seq)

    def _lose(self, numbers: Iterable[int]) -> None:
        lost = [self.held[number] for number in numbers if number in self.held]
        for held in lost:
            held.end()
            if held.task is not None and not held.task.done():
                self._cancelled[held.number] = held.task, self._loop.time() + self._options.revoke_timeout
                self._outlasting.add(held.task)
                held.task.add_done_callback(self._outlasting.discard)
                held.task.add_done_callback(lambda _: self._changed.set())
                if held.task is not asyncio.current_task():
                    held.task.cancel()  # once: its handler may have something to roll back
            self._drop(held)
        if lost:
            lost_numbers = tuple(held.number for held in lost)
            _log.warning("%s has lost partitions %s", self.what, lost_numbers)
            if not self._ending:
                self._untold.update(lost_numbers)
                self._telling += 1
                self._spawn(self._tell_loss(), "loss")

    async def _tell_loss(self) -> None:
        try:
            await asyncio.sleep(0)  # several may be lost one by one
            async with self._callbacks.lock:
                untold, self._untold = self._untold, set()
                await self._callbacks.lost(tuple(sorted(untold)))
        finally:
            self._telling -= 1

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

    async def commit(self) -> None:
        """Store the positions that the caller may store now; see `Member.commit`."""
        calling = self._callbacks.running
        if calling is not None:
            lost = await self._commit(of=calling.committable)
        else:
            lost = await self._commit(in_hand=self.work is None)
            current = self.current
            if current is not None and current.uncommitted_in_hand and self.held.get(current.number) is not current:
                lost = sorted({*lost, current.number})
        if lost:
            error = FencedError(
                f"{self.what}: the positions of {plural(len(lost), 'partition', 'partitions')} {', '.join(map(str, lost))} were not stored, "
                "because this member has lost them: another one may own them and handle the messages since their last commits "
                "again; the positions of the others are stored",
                name=self.group.name,
            )
            if calling is not None:
                calling.refused = error
            raise error

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
                record = self._record(self.id, position)
                ack = await store_position(held.writer, record, self.group.name, position)
            except RecordMovedError:
                self._fenced(held)
                return False
            held.committed = position
            held.uncommitted -= uncommitted
            log_state(_log, self.what, "position committed", partition=held.number, position=position)
            self._machine.stored(held.number, ack.seq)
            return True

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(self._options.seconds)
            with self._again_if_away():
                await self._commit(of=self._to_commit())

    async def put_down(self, held: Held) -> None:
        """Note that a message is handled, and commit if it is time."""
        held.put_down()
        if self._options.auto_commit and held.uncommitted >= self._options.every:
            with self._again_if_away():
                await self._store_position(held)

    @contextlib.contextmanager
    def _again_if_away(self) -> Iterator[None]:
        """Leave what servers do not answer to the next automatic commit."""
        try:
            yield
        except Exception as error:
            if not is_transient(error):
                raise
            _log.warning("%s could not commit its positions, and tries again: %s", self.what, error)

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

    def is_valid(self) -> bool:
        return self._machine.is_valid(self._loop.time())

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(sorted(number for number, held in self.held.items() if not held.ending))
