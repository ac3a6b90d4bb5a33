"""A member of a group: the I/O of `protocol.membership`, and the messages of the partitions that it owns.

::

    renew        store the member's key, every `heartbeat` seconds ──────────────┐
    live table   what the bucket has: members, owners of the partitions ─────────┤
                                                                                 ▼
                                 `Membership` decides ──► claim, revoke, release, lose
                                                            │
    read         one `LogReader` for all partitions ──► `Dispatcher` ──► the iteration, or a task for each partition
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import socket
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.base_connection import cancel, mark_retrieved
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.errors import FencedError, StreamConfigMismatchError, StreamRecreatedError
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.kv.table import Table
from jetstream_ext.log.group_plan import Plan
from jetstream_ext.log.group_store import GroupStore, MemberRecord, PartitionRecord, Settings
from jetstream_ext.log.lane import Lane
from jetstream_ext.log.offsets import OffsetStore, StoredOffset
from jetstream_ext.protocol.api import recreated
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.membership import Claim, Lose, Membership, Owner, Release, Revoke
from jetstream_ext.protocol.options import check_int, check_seconds
from jetstream_ext.text import get_logger

_Seen = TypeVar("_Seen", MemberRecord, PartitionRecord)

Callback = Callable[[tuple[int, ...]], Awaitable[None] | None]
MessageHandler = Callable[[StoredMsg], Awaitable[None] | None]

_log = get_logger()

# The partitions that the callback which is running may commit.
_in_callback: ContextVar[tuple[int, ...] | None] = ContextVar("in_callback", default=None)

_RETRY: Final = 0.1
_BLOCK: Final = 64  # messages of one partition, before those of another one
_BREATHE_EVERY: Final = 0.05
_LEAVE_TIMEOUT: Final = 1.0  # for each step, after an error or a cancellation
_COMMITS_IN_FLIGHT: Final = 64
_IDLE: Final = 5.0


@dataclass(eq=False, slots=True)
class Held:
    """A partition that this member works on."""

    number: int
    lane: Lane
    writer: FencedWriter
    committed: int
    uncommitted: int = 0  # messages that were handled since
    queue: deque[StoredMsg] = field(default_factory=deque)  # the next messages for the caller
    in_hand: int | None = None  # the sequence of the message that the caller handles
    ending: bool = False  # no further messages: it is revoked, or lost
    last: int = 0  # the position before it gets messages, and after it has ended
    given: asyncio.Event = field(default_factory=asyncio.Event)  # messages, or the end
    done: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is in hand any more
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the writer
    task: asyncio.Task[None] | None = None
    stop: Callable[[], None] | None = None  # ends the task behind its current commit

    @property
    def position(self) -> int:
        """The next sequence that the caller gets."""
        if self.queue:
            return self.queue[0].seq
        dispatcher = self.lane.dispatcher
        if self.ending or self.number not in dispatcher:
            return self.last
        return dispatcher.position(self.number)

    @property
    def is_busy(self) -> bool:
        """Whether a message is being handled, or a commit is on its way."""
        return self.in_hand is not None or self.lock.locked() or (self.task is not None and not self.task.done())

    @property
    def handled(self) -> int:
        """The sequence behind what the caller has handled."""
        return self.position if self.in_hand is None else self.in_hand

    def begin(self) -> None:
        """Let the caller get messages."""
        if self.number not in self.lane.dispatcher:
            self.lane.dispatcher.add(self.number, self.last)

    def move(self, position: int) -> None:
        """Let the caller get the messages from another position on; `begin` again."""
        if not self.ending:  # otherwise the partition may be in other hands of this member
            self.lane.dispatcher.remove(self.number)
            self.queue.clear()
        self.last = position

    def end(self) -> None:
        """Let the caller get no further message."""
        if self.ending:
            return
        self.last, self.ending = self.position, True
        self.queue.clear()
        self.lane.dispatcher.remove(self.number)
        self.given.set()
        if self.stop is not None:
            self.stop()

    def pick_up(self) -> StoredMsg:
        message = self.queue.popleft()
        self.in_hand = message.seq
        self.done.clear()
        return message

    def put_down(self) -> None:
        self.in_hand = None
        self.done.set()


class PartitionReader:
    """One partition as the input of an exactly-once worker; see `log.worker.Source`."""

    def __init__(self, session: Session, held: Held) -> None:
        group = session.group
        self.name: str | None = None
        self.stream: str = group.stream
        self.subject: str | None = group.subject
        self.context: JetStreamContext = group.context
        self.confirm: bool = True
        self.offsets: OffsetStore = OffsetStore(group.context, group.store.bucket.name)
        self._created = session.settings.created
        self._session = session
        self._held = held

    @property
    def created(self) -> str | None:
        return self._created

    @property
    def position(self) -> int | None:
        return self._held.position

    async def open(self) -> int:
        return self._held.position

    def seek(self, start: StoredOffset | int) -> None:
        if isinstance(start, StoredOffset):
            if start.stream != self.stream or recreated(start.created, self._created):
                raise StreamRecreatedError(
                    f"{self._session.what}: the stored position of partition {self._held.number} is one in stream {start.stream!r} "
                    f"that was created at {start.created}, and the group reads stream {self.stream!r} that was created at "
                    f"{self._created}; nothing is stored; call Group.reset to start again",
                    stream=self.stream,
                    expected=start.created,
                    found=self._created,
                )
            start = start.seq
        self._held.move(start)

    async def read_for(self, seconds: float, max_messages: int = 1000) -> list[StoredMsg] | None:
        """Return messages, an empty list after `seconds` without one, or None once the partition is revoked or lost."""
        held = self._held
        dispatcher = held.lane.dispatcher
        if not held.ending:
            held.begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not held.ending:
                    if not self._session.is_valid():
                        self._session.step()  # see `Member.__anext__`
                        await asyncio.sleep(0)
                        continue
                    if rows := dispatcher.take(held.number, max_messages):
                        return rows
                    held.given.clear()
                    await held.given.wait()
        return None if held.ending else []


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

    def __post_init__(self) -> None:
        if self.label is not None and not (isinstance(self.label, str) and self.label.isprintable() and self.label):
            raise ValueError(f"label must be printable text, not {self.label!r}")
        check_int(self.every, "every")
        check_seconds(self.seconds, "seconds")


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
        # What the bucket has, and the revision of that.
        self._alive: set[str] = set()
        self._departing: set[str] = set()
        self._owners: dict[int, Owner] = {}
        self._known = 0
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
        self._failures = 0  # to renew the key, one after the other

    # -- joining and leaving ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._main or self.closed:
            raise RuntimeError(f"group {self.group.name!r}: a member can be entered once; call join() again")
        self._loop = asyncio.get_running_loop()
        try:
            self.settings = await self.group.prepare(self._output)
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
            until = self._machine.wake_at(self._loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await self._changed.wait()

    def step(self) -> None:
        """Look at the bucket, and do what is due."""
        now = self._loop.time()
        self._machine.see(self._alive, self._departing, self._owners, self._known)
        claims: list[Claim] = []
        releases: list[Release] = []
        for action in self._machine.due(now):
            match action:
                case Claim():
                    claims.append(action)
                case Revoke(numbers):
                    self._spawn(self._revoke(numbers), "revocation")
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
        changes = table.changes()
        for key, entry in table.items():
            self._note(key, entry)
        self._known = table.revision
        self._changed.set()
        async for change in changes:
            self._note(change.key, change.new)
            self._known = max(self._known, change.revision)
        self.fail(RuntimeError(f"{self.what}: the table of its bucket was closed"))

    def _note(self, key: str, entry: KeyValueEntry | None) -> None:
        store = self.store
        if (member := store.member_of(key)) is not None:
            before = member in self._alive, member in self._departing
            self._alive.discard(member)
            self._departing.discard(member)
            if (record := self._decode(MemberRecord, key, entry)) is not None:
                self._alive.add(member)
                if record.leaving:
                    self._departing.add(member)
            if before != (member in self._alive, member in self._departing):
                self._changed.set()
        elif (number := store.partition_of(key)) is not None:
            known = self._owners.pop(number, None)
            found = self._of_this_epoch(self._decode(PartitionRecord, key, entry))
            if found is not None and entry is not None:
                self._owners[number] = Owner(found.owner, entry.revision)
            if known is None or found is None or known.id != found.owner:
                self._changed.set()
        elif key == store.config_key:
            settings = None if entry is None else store.decode_value(Settings, key, entry.value)
            if settings is not None:
                self.group.check_settings(settings, self._output)
            if settings is None or settings.epoch != self.settings.epoch:
                raise StreamConfigMismatchError(
                    f"{self.what} ends, because the group was reset; join it again",
                    diff={"epoch": (self.settings.epoch, None if settings is None else settings.epoch)},
                )

    def _of_this_epoch(self, record: PartitionRecord | None) -> PartitionRecord | None:
        """Return a record, or None if it is from before a reset."""
        return None if record is None or record.epoch != self.settings.epoch else record

    def _decode(self, kind: type[_Seen], key: str, entry: KeyValueEntry | None) -> _Seen | None:
        if entry is None:
            return None
        try:
            return self.store.decode_value(kind, key, entry.value)
        except ValueError as error:
            _log.warning("%s", error)  # a member does not end because of another one's key
            return None

    async def _claim(self, claims: list[Claim]) -> None:
        claimed = [it for it in await gather_bounded(self._claim_one, claims, limit=_COMMITS_IN_FLIGHT) if it]
        if not claimed:
            return
        async with self._callbacks:
            owned = tuple(sorted(number for number, writer, _ in claimed if self._machine.holds(number, writer.fence)))
            _log.debug("%s owns partitions %s", self.what, owned)
            await _call(self._options.on_assigned, owned, ())
            for number, writer, position in claimed:
                if self._machine.holds(number, writer.fence):
                    self._hold(number, writer, position)
            lost = tuple(number for number in owned if number not in self.held)  # while the callback was running
            await _call(self._options.on_partitions_lost or self._options.on_revoked, lost, lost)

    async def _claim_one(self, claim: Claim) -> tuple[int, FencedWriter, int] | None:
        number, attempt = claim.partition, claim.attempt
        writer = self.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self._of_this_epoch(self.store.decode(PartitionRecord, found))
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
            self._machine.failed(number, attempt, self._loop.time())
            if not isinstance(error, RecordMovedError) and not is_transient(error):
                raise
            level = logging.DEBUG if isinstance(error, RecordMovedError) else logging.WARNING
            _log.log(level, "%s could not claim partition %d, and tries again: %s", self.what, number, error)
            return None
        if not self._machine.claimed(number, attempt, ack.seq, self._loop.time()):
            return None
        self._final.pop(number, None)
        return number, writer, position

    def _hold(self, number: int, writer: FencedWriter, position: int) -> None:
        if number in self.held:
            self._lose([number])
        lane = self._lane_of(number)
        held = self.held[number] = Held(number, lane, writer, position, last=position)
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
            while self.error is None and not self.closed:
                self.ready.clear()
                await self.ready.wait()
            self.check()
        finally:
            self.work = None

    def stop(self) -> None:
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
            lane.task = self._start(lane.read(self._given), "reading")
        return lane

    def _given(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            held = self.held.get(number)
            if held is not None:
                held.given.set()
                self.ready.set()

    async def _revoke(self, numbers: tuple[int, ...]) -> None:
        async with self._callbacks:  # a claim of these partitions may wait for its callback
            found = [self.held[number] for number in numbers if number in self.held]
        for number in set(numbers) - {held.number for held in found}:
            self._machine.revoked(number)
        for held in found:
            held.end()
        for held in found:
            if held.is_busy:
                self._spawn(self._revoke_later(held), "revocation")
        await self._hand_over([held for held in found if not held.is_busy])

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
                self._machine.revoked(held.number)

    async def _release_all(self, releases: list[Release]) -> None:
        await gather_bounded(self._release, releases, limit=_COMMITS_IN_FLIGHT)

    async def _release(self, release: Release) -> None:
        number, attempt = release.partition, release.attempt
        writer = self.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self._of_this_epoch(self.store.decode(PartitionRecord, found))
            if not self._machine.may_store(release):
                return
            if record is None or record.owner != self.id:
                self._machine.released(number, attempt, 0 if found is None else found.seq)
                return
            position = max(record.seq, self._final.get(number, 0))
            ack = await writer.store([], self._record("", position))
        except Exception as error:
            self._machine.failed(number, attempt, self._loop.time())
            if not isinstance(error, RecordMovedError) and not is_transient(error):
                raise
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

    async def commit(self, *, in_hand: bool = False, of: tuple[int, ...] | None = None) -> list[int]:
        """Store the positions of all partitions, or those `of` some; return those that others own now.

        With `in_hand` they are behind the message in the caller's hands.
        """

        async def attempt(held: Held) -> int | None:
            return None if await self._store_position(held, in_hand=in_hand) else held.number

        held = self.held if of is None else {number: self.held[number] for number in of if number in self.held}
        found = await gather_bounded(attempt, list(held.values()), limit=_COMMITS_IN_FLIGHT)
        return sorted({number for number in found if number is not None} | set(of or ()) - set(held))

    async def _store_position(self, held: Held, *, in_hand: bool = False) -> bool:
        """Store the position of a partition; return False if another member owns it."""
        async with held.lock:
            position = held.position if in_hand else held.handled
            if position <= held.committed or self.held.get(held.number) is not held:
                return True
            held.uncommitted = 0
            try:
                ack = await held.writer.store([], self._record(self.id, position))
            except RecordMovedError:
                self._fenced(held)
                return False
            held.committed = position
            self._machine.stored(held.number, ack.seq)
            return True

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(self._options.seconds)
            try:
                await self.commit()
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
                held.queue.extend(lane.dispatcher.take(number, _BLOCK - 1))
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


class Member:
    """A member of a group: `Group.join` makes it, ``async with`` joins and leaves.

    Attributes:
        id: The member's id, a random one for each `join`.
        label: Its name for people, in `Group.status`.
    """

    def __init__(self, session: Session) -> None:
        self.id: str = session.id
        self.label: str = session.label
        self._session = session
        self._reading = False

    def __repr__(self) -> str:
        return f"<Member {self.label!r} of group {self._session.group.name!r}: partitions {list(self.partitions)}>"

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close(clean=kind is None)

    def __del__(self) -> None:
        if "_session" in self.__dict__:
            self._session.dropped()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that the member works on now."""
        return self._session.partitions

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMsg:
        """Return the next message of any of the member's partitions; the one before it counts as handled.

        Raises:
            Exception: See `Group.join`.

        Cancellation: Safe: no message is lost.
        """
        session = self._session
        if self._reading:
            raise RuntimeError(f"{session.what}: another task iterates over this member")
        self._reading = True
        try:
            if session.current is not None and session.current.in_hand is not None:
                await session.put_down(session.current)
            await session.breathe()
            while True:
                session.check()
                if not session.is_valid():
                    session.step()  # the process was suspended, or the loop blocked: what has ended must not be returned
                session.ready.clear()
                message = session.pick_up()
                if message is not None:
                    return message
                await session.ready.wait()
        finally:
            self._reading = False

    async def run(self, handler: MessageHandler) -> None:
        """Call `handler` for each message: one after the other for each partition, the partitions at the same time.

        ::

            async with group.join() as member:
                await member.run(handle)            # until it is cancelled

        A message counts as handled when the handler returns. One slow partition does not hold up the others. If a partition
        is lost (see `Group.join`), its handler is cancelled; before it is handed over, its handler may finish.

        Args:
            handler: Called with a `StoredMsg`; may be an async function.

        Raises:
            RuntimeError: Another task reads from this member.
            Exception: What the handler raised: the message is not handled, and the member should be left. Others as for
                iteration.

        Cancellation: The handlers are cancelled; their messages are not handled. Leave the member then.
        """
        if self._reading:
            raise RuntimeError(f"{self._session.what}: another task reads from this member")
        self._reading = True
        try:
            await self._session.serve(partial(_handle_each, self._session, handler))
        finally:
            self._session.stop()
            self._reading = False

    async def commit(self) -> None:
        """Store the positions behind the messages that are handled.

        In the iteration's loop, the last message that it has returned counts as handled. In `on_revoked` the call stores only
        the positions of the partitions that are handed over, of which nothing is being handled any more. In a handler of `run`,
        messages that are still being handled do not count.

        Raises:
            FencedError: Another member owns one of the partitions now; the positions of the others are stored.
            Exception: Transient errors lasted longer than the group's `patience`; the positions may be stored.

        Cancellation: The positions may be stored.
        """
        session = self._session
        session.check()
        of = _in_callback.get()
        lost = await session.commit(in_hand=session.work is None and of is None, of=of)
        if lost:
            raise FencedError(
                f"{session.what}: the positions of partitions {lost} were not stored, because other members own them now and handle "
                "the messages since their last commits again; those of the other partitions are stored",
                name=session.group.name,
            )


async def _handle_each(session: Session, handler: MessageHandler, held: Held) -> None:
    source = PartitionReader(session, held)
    while (found := await source.read_for(_IDLE, _BLOCK)) is not None:
        held.queue.extend(found)
        while held.queue:
            result = handler(held.pick_up())
            if inspect.isawaitable(result):
                await result
            await session.put_down(held)
            await session.breathe()
            if not session.is_valid():
                session.step()


async def _call(callback: Callback | None, partitions: tuple[int, ...], committable: tuple[int, ...]) -> None:
    if callback is not None and partitions:
        token = _in_callback.set(committable)
        try:
            result = callback(partitions)
            if inspect.isawaitable(result):
                await result
        finally:
            _in_callback.reset(token)
