"""The partitions of one member: it claims, hands over, loses and releases them, and stores their positions.

`protocol.membership` says what to do, and is told what has become of it. Another member may own a partition from the moment
that this one has released or lost it. What this member still does then changes nothing of the `AssignedPartition` of
a later claim, because each claim makes a new one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, Final

from jetstream_ext.client.api import gather_bounded
from jetstream_ext.client.fenced_write import RecordMovedError
from jetstream_ext.client.retry import is_transient, is_transient_read
from jetstream_ext.log.assigned import AssignedPartition
from jetstream_ext.log.callbacks import Callbacks, JoinOptions
from jetstream_ext.log.group_plan import GroupPlan
from jetstream_ext.log.group_reader import GroupReader
from jetstream_ext.log.group_store import Settings
from jetstream_ext.log.observed import store_position
from jetstream_ext.log.task_scope import TaskScope
from jetstream_ext.protocol.membership import Do, Membership, Owner, Phase
from jetstream_ext.protocol.records import Failed, Record
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

_IN_FLIGHT: Final = 64
# So many partitions without messages may store that their positions have moved, each time that positions are committed.
_IDLE_COMMITS: Final = 64

Work = Callable[[AssignedPartition], Coroutine[Any, Any, None]]


class Assignment:
    """The partitions that a member has claimed, and what is under way for them.

    Attributes:
        partitions: By number, until they are handed over or lost.
        work: Handles the messages of a partition, in a task for each; None: the caller iterates.
        progress: Set when an iteration or `serve` may have something to do.
    """

    def __init__(self, group: GroupPlan, options: JoinOptions, machine: Membership, tasks: TaskScope) -> None:
        self.options: JoinOptions = options
        self.callbacks: Callbacks = Callbacks(group.name)
        self.partitions: dict[int, AssignedPartition] = {}
        self.work: Work | None = None
        self.progress: asyncio.Event = asyncio.Event()
        self.settings: Settings
        self.reader: GroupReader
        self._group = group
        self._machine = machine
        self._tasks = tasks
        self._records = 0  # stored so far
        self._handled: dict[
            int, int
        ] = {}  # the positions of partitions that were handed over, and are not released yet
        self._untold: set[int] = set()  # lost partitions, until the callback for them has returned
        self._handlers: dict[int, asyncio.Task[None]] = {}  # of each partition the newest one that has begun

    def open(self, settings: Settings) -> None:
        self.settings = settings
        self.reader = GroupReader(self._group, settings, self._tasks.name, self._given, self.is_outage)

    @property
    def active(self) -> tuple[int, ...]:
        """The partitions that the member works on."""
        return _numbers(it for it in self.partitions.values() if it.announced and not it.ending)

    @property
    def is_busy(self) -> bool:
        """Whether the member works on a partition, or its callback for lost ones has not returned."""
        return self._machine.working or bool(self._untold)

    def holds(self, assigned: AssignedPartition) -> bool:
        """Return whether a partition is still assigned to the member by the same claim."""
        return self.partitions.get(assigned.number) is assigned

    def is_outage(self, error: Exception) -> bool:
        """Return whether something failed because servers are away, or were in the last `patience` seconds."""
        then = asyncio.get_running_loop().time() - self._group.store.patience
        return is_transient_read(error) and not self._machine.answered_since(then)

    def _given(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            assigned = self.partitions.get(number)
            if assigned is not None:
                assigned.given.set()
                self.progress.set()

    # -- owners -------------------------------------------------------------------------------------------------------

    def carry_out(self, do: Do, numbers: tuple[int, ...]) -> None:
        """Do what the machine says."""
        match do:
            case Do.LOSE:
                self._lose(numbers)
            case Do.REVOKE:
                for number in numbers:
                    self.partitions[number].end()
                    self._tasks.start(self._revoke(self.partitions[number]), "revocation")
            case Do.CLAIM:
                self._tasks.start(self._claim(numbers), "claims")
            case Do.RELEASE:
                self._tasks.start(self._release(numbers), "release")

    async def _claim(self, numbers: tuple[int, ...]) -> None:
        found = await gather_bounded(partial(self._store_owner, owner=self._machine.me), numbers, limit=_IN_FLIGHT)
        async with self.callbacks.lock:
            owned = [it for it in found if it is not None and self._is_in(Phase.OWNED, it)]
            for assigned in owned:
                assigned.announced = True
            if told := _numbers(owned):
                log_state(_log, self._tasks.name, "partitions assigned", partitions=", ".join(map(str, told)))
            await self.callbacks.call(self.options.on_assigned, told)
            for assigned in filter(partial(self._is_in, Phase.OWNED), owned):  # others were revoked or lost meanwhile
                if self.settings.output is None:
                    assigned.begin()  # else its worker looks its position up first
                self._begin_work(assigned)

    def _is_in(self, phase: Phase, assigned: AssignedPartition) -> bool:
        return self.holds(assigned) and self._machine.phase(assigned.number) is phase

    async def _store_owner(self, number: int, owner: str) -> AssignedPartition | None:
        """Claim a partition, or with an empty `owner` release it; if servers are away, the machine tries again."""
        loop, machine, store = asyncio.get_running_loop(), self._machine, self._group.store
        writer = store.partition_writer(number)
        try:
            found = await writer.read()
            record = store.decode(Record, found)
            if record is not None and record.epoch != self.settings.epoch:
                record = None  # from before a reset
            seq = 0 if found is None else found.seq
            if owner and not machine.may_claim(number, None if record is None else Owner(record.owner or "", seq)):
                machine.failed(number, loop.time())
                return None
            if not owner and (record is None or record.owner != machine.me):
                machine.released(number, seq)
                return None
            position = self.settings.start if record is None else record.seq
            if record is not None and record.owner == machine.me:
                position = max(position, self._handled.get(number, 0))
            failed = None if record is None else record.failed
            ack = await writer.store([], self._record(owner, position, failed))
        except RecordMovedError:
            machine.failed(number, loop.time())
            return None
        except BaseException as error:
            machine.failed(number, loop.time())
            if not isinstance(error, Exception) or not self.is_outage(error):
                raise
            what = "claim" if owner else "release"
            _log.warning("%s could not %s partition %d, and tries again: %s", self._tasks.name, what, number, error)
            return None
        self._handled.pop(number, None)
        if owner and machine.claimed(number, ack.seq, loop.time()):
            self.partitions[number] = AssignedPartition(number, self.reader.dispatcher, writer, position, failed)
            return self.partitions[number]
        if not owner:
            log_state(_log, self._tasks.name, "partition released", partition=number, position=position)
            machine.released(number, ack.seq)
        return None

    async def _release(self, numbers: Iterable[int]) -> None:
        await gather_bounded(partial(self._store_owner, owner=""), numbers, limit=_IN_FLIGHT)

    def _record(self, owner: str, position: int, failed: Failed | None) -> bytes:
        self._records += 1
        return Record(
            seq=position,
            writer=self._machine.me,
            number=self._records,
            owner=owner,
            epoch=self.settings.epoch,
            failed=failed if failed is not None and failed.seq >= position else None,
        ).encode()

    async def _revoke(self, assigned: AssignedPartition) -> None:
        """Hand a partition over once it is finished, with others that are by then; after `revoke_timeout` it is lost."""
        limit = self.options.limit()
        try:
            async with limit:
                await assigned.finished()
                await asyncio.sleep(0)  # others may finish at the same time
                async with self.callbacks.lock:
                    revoking = [it for it in self.partitions.values() if self._is_in(Phase.REVOKING, it)]
                    await self._hand_over([it for it in revoking if it is assigned or it.is_finished])
        except TimeoutError:
            if not limit.expired():
                raise
            if self.holds(assigned):
                self._let_go(assigned, assigned.committed, lost=True)

    async def _hand_over(self, finished: list[AssignedPartition]) -> None:
        told, handled, lost = _numbers(it for it in finished if it.announced), False, False
        try:
            await self.callbacks.call(self.options.on_revoked, told)
            handled = self.options.auto_commit and self.settings.output is None
        except asyncio.CancelledError:  # it took too long
            lost = True
            raise
        finally:
            for it in filter(self.holds, finished):
                self._let_go(it, it.handled if handled else it.committed, lost=lost)

    def _let_go(self, assigned: AssignedPartition, position: int, *, lost: bool) -> None:
        """Let the next owner continue at a position; a partition that is lost may still be worked on."""
        if lost:
            self._lose([assigned.number])
        else:
            self._drop(assigned)
        if self._machine.handed_over(assigned.number):
            self._handled[assigned.number] = position
            self._tasks.start(self._release([assigned.number]), "release")

    def _lose(self, numbers: Iterable[int]) -> None:
        lost = [self.partitions[number] for number in numbers if number in self.partitions]
        if lost:
            _log.warning("%s has lost partitions %s", self._tasks.name, _numbers(lost))
        for assigned in lost:
            self._drop(assigned)
            if assigned.task is not None and assigned.task is not asyncio.current_task():
                assigned.task.cancel()  # once: it may have something to roll back
        self._untold.update(it.number for it in lost if it.announced and not self._tasks.closing)
        if self._untold:
            self._tasks.start(self._tell_losses(), "loss")

    async def _tell_losses(self) -> None:
        await asyncio.sleep(0)  # several may be lost one by one
        async with self.callbacks.lock:
            lost, limit = tuple(sorted(self._untold)), self.options.limit()
            try:
                async with limit:
                    callback = self.options.on_partitions_lost or self.options.on_revoked
                    await self.callbacks.call(callback, lost)
            except TimeoutError:
                if not limit.expired():
                    raise
                _log.warning(
                    "%s: the callback for the lost partitions %s took too long, and was cancelled",
                    self._tasks.name,
                    lost,
                )
            finally:
                self._untold.difference_update(lost)

    def _drop(self, assigned: AssignedPartition) -> None:
        assigned.end()
        assigned.done.set()
        del self.partitions[assigned.number]

    def fenced(self, assigned: AssignedPartition) -> None:
        """Give a partition up of which another member has stored a record."""
        if self.holds(assigned):
            self._machine.fenced(assigned.number, asyncio.get_running_loop().time())
            self._lose([assigned.number])

    # -- handlers -----------------------------------------------------------------------------------------------------

    def begin_work(self) -> None:
        """Handle the messages of what the member has, and of what it will get, by `work`."""
        for assigned in self.partitions.values():
            if assigned.reading:
                self._begin_work(assigned)

    def _begin_work(self, assigned: AssignedPartition) -> None:
        if self.work is not None and assigned.task is None:
            work = self._work(assigned, self.work)
            assigned.task = self._tasks.start(work, f"partition {assigned.number}")

    async def _work(self, assigned: AssignedPartition, work: Work) -> None:
        """Handle the messages of a partition, once its cancelled handler of an earlier claim has ended, or for too long not."""
        name, number = self._tasks.name, assigned.number
        try:
            async with self.options.limit():
                if (before := self._handlers.get(number)) is not None:
                    await asyncio.wait({before})
        except TimeoutError:
            _log.warning("%s: a handler of partition %d still runs; its messages are handled again", name, number)
        if (task := assigned.task) is not None:
            self._handlers[number] = task
        try:
            await work(assigned)
        except Exception as error:
            if self.holds(assigned):
                raise
            _log.warning("%s: the handler of partition %d, which was lost, has failed: %r", name, number, error)

    def cancel_work(self) -> None:
        """Cancel all handlers: what is in hand is not handled."""
        for assigned in self.partitions.values():
            if assigned.task is not None:
                assigned.task.cancel()
                assigned.done.set()

    # -- positions ----------------------------------------------------------------------------------------------------

    async def commit(self, numbers: Iterable[int], *, in_hand: bool = False) -> list[int]:
        """Store the positions of partitions, and return those that the member has lost; `in_hand` counts as handled."""

        async def attempt(assigned: AssignedPartition) -> int | None:
            return None if await self.store(assigned, in_hand=in_hand) else assigned.number

        wanted = set(numbers)
        mine = [self.partitions[number] for number in wanted if number in self.partitions]
        found = await gather_bounded(attempt, mine, limit=_IN_FLIGHT)
        return sorted({number for number in found if number is not None} | wanted - {it.number for it in mine})

    async def store(self, assigned: AssignedPartition, failed: Failed | None = None, *, in_hand: bool = False) -> bool:
        """Store the position of a partition if it has moved, or a failure; return False if another member owns it."""
        async with assigned.lock:
            position = assigned.position if in_hand else assigned.handled
            if failed is not None and not self.options.auto_commit:
                position = assigned.committed
            if not self.holds(assigned) or (position <= assigned.committed and failed is None):
                return True
            uncommitted, failed = assigned.uncommitted, failed or assigned.failed
            try:
                record = self._record(self._machine.me, position, failed)
                ack = await store_position(assigned.writer, record, self._group.name, position)
            except RecordMovedError:
                self.fenced(assigned)
                return False
            moved, assigned.committed, assigned.failed = position > assigned.committed, position, failed
            assigned.uncommitted -= uncommitted if moved else 0
            log_state(_log, self._tasks.name, "position committed", partition=assigned.number, position=position)
            self._machine.stored(assigned.number, ack.seq)
            return True

    async def commit_often(self) -> None:
        while True:
            await asyncio.sleep(self.options.seconds)
            moved = [it for it in self.partitions.values() if it.handled > it.committed]
            idle = [it for it in moved if not it.uncommitted]
            due = heapq.nsmallest(_IDLE_COMMITS, idle, key=attrgetter("committed"))
            await self._commit([it for it in moved if it.uncommitted] + due)

    def pause_between_commits(self, seconds: float) -> float:
        """Return after how many seconds a partition without messages should store its position: later if there are many."""
        return seconds * max(1.0, len(self.partitions) / _IDLE_COMMITS)

    async def put_down(self, assigned: AssignedPartition) -> None:
        """Note that a message is handled, and commit if it is time."""
        assigned.put_down()
        if self.options.auto_commit and assigned.uncommitted >= self.options.every:
            await self._commit([assigned])

    async def _commit(self, due: list[AssignedPartition]) -> None:
        """Commit, and leave what servers do not answer to the next time."""
        try:
            await self.commit([it.number for it in due])
        except Exception as error:
            if not is_transient(error):
                raise
            _log.warning("%s could not commit its positions, and tries again: %s", self._tasks.name, error)


def _numbers(partitions: Iterable[AssignedPartition]) -> tuple[int, ...]:
    return tuple(sorted(it.number for it in partitions))
