"""The partitions of one member: it claims, hands over, loses and releases them, and stores their positions.

`protocol.membership` says what to do, and is told what has become of it. Another member may own a partition from the moment
that this one has released or lost it. What this member still does then changes nothing of the `AssignedPartition` of
a later claim, because each claim makes a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
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


class Assignment:
    """The partitions that a member has claimed, and what is under way for them.

    Attributes:
        partitions: By number, until they are handed over or lost.
        work: Handles the messages of a partition, in a task for each; None: the caller iterates.
        progress: Set when an iteration or `serve` may have something to do.
    """

    def __init__(self, plan: GroupPlan, options: JoinOptions, machine: Membership, tasks: TaskScope) -> None:
        self.plan: GroupPlan = plan
        self.options: JoinOptions = options
        self.callbacks: Callbacks = Callbacks(options, tasks.name)
        self.partitions: dict[int, AssignedPartition] = {}
        self.work: Callable[[AssignedPartition], Coroutine[Any, Any, None]] | None = None
        self.progress: asyncio.Event = asyncio.Event()
        self.settings: Settings
        self.reader: GroupReader
        self._machine = machine
        self._tasks = tasks
        self._records = 0  # stored so far
        self._release_at: dict[int, int] = {}  # the positions of partitions that are not released yet
        self._finished: list[AssignedPartition] = []  # for the next call of `on_revoked`
        self._untold: set[int] = set()  # lost partitions, until `on_partitions_lost` has returned
        self._winding_down: set[int] = set()  # partitions whose cancelled handlers have not ended

    def open(self, settings: Settings) -> None:
        self.settings = settings
        self.reader = GroupReader(self.plan.lanes(settings), self._tasks, self._given, self.is_outage)

    @property
    def active(self) -> tuple[int, ...]:
        """The partitions that the member works on."""
        return tuple(sorted(number for number, assigned in self.partitions.items() if assigned.active))

    @property
    def is_busy(self) -> bool:
        """Whether the member works on a partition, or its callback for lost ones has not returned."""
        return self._machine.working or bool(self._untold)

    def holds(self, assigned: AssignedPartition) -> bool:
        """Return whether a partition is still assigned to the member by the same claim."""
        return self.partitions.get(assigned.number) is assigned

    def is_outage(self, error: Exception) -> bool:
        """Return whether something failed because servers are away, and not while they have answered the member."""
        now = asyncio.get_running_loop().time()
        answered = self._machine.is_valid(now) and self._machine.was_renewed_since(now - self.plan.store.patience)
        return is_transient_read(error) and not answered

    def _given(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            assigned = self.partitions.get(number)
            if assigned is not None:
                assigned.given.set()
                self.progress.set()

    # -- claims -------------------------------------------------------------------------------------------------------

    def carry_out(self, do: Do, numbers: tuple[int, ...]) -> None:
        """Do what the machine says."""
        match do:
            case Do.LOSE:
                self._lose(numbers)
            case Do.REVOKE:
                until = self.options.deadline()
                for number in numbers:
                    assigned = self.partitions[number]
                    assigned.end()
                    self._tasks.start(self._revoke(assigned, until), "revocation")
            case Do.CLAIM:
                self._tasks.start(self._claim(numbers), "claims")
            case Do.RELEASE:
                self._tasks.start(self._release_all(numbers), "releases")

    async def _claim(self, numbers: tuple[int, ...]) -> None:
        found = await gather_bounded(self._claim_one, numbers, limit=_IN_FLIGHT)
        async with self.callbacks.lock:
            owned = [it for it in found if it is not None and self._is_owned(it)]
            for assigned in owned:
                assigned.announced = True
            told = tuple(sorted(it.number for it in owned))
            if told:
                log_state(_log, self._tasks.name, "partitions assigned", partitions=", ".join(map(str, told)))
            await self.callbacks.assigned(told)
            for assigned in filter(self._is_owned, owned):  # others were revoked or lost meanwhile
                assigned.active = True
                if self.settings.output is None:
                    assigned.begin()  # else its worker looks its position up first
                self._begin_work(assigned)

    def _is_owned(self, assigned: AssignedPartition) -> bool:
        return self.holds(assigned) and self._machine.phase(assigned.number) is Phase.OWNED

    async def _claim_one(self, number: int) -> AssignedPartition | None:
        loop, machine = asyncio.get_running_loop(), self._machine
        if number in self._winding_down:
            machine.failed(number, loop.time())
            return None
        writer = self.plan.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self.settings.of_this_epoch(self.plan.store.decode(Record, found))
            owner = None if record is None or found is None else Owner(record.owner or "", found.seq)
            if not machine.may_claim(number, owner):
                machine.failed(number, loop.time())
                return None
            position = self.settings.start if record is None else record.seq
            if record is None or record.owner == machine.me:  # another program may have deleted the record
                position = max(position, self._release_at.get(number, 0))
            failed = None if record is None else record.failed
            ack = await writer.store([], self._record(machine.me, position, failed))
        except BaseException as error:
            self._note_failure("claim", number, error)
            return None
        if not machine.claimed(number, ack.seq, loop.time()):
            return None
        self._release_at.pop(number, None)
        assigned = AssignedPartition(number, self.reader.lanes, writer, position, failed)
        self.partitions[number] = assigned
        return assigned

    def _note_failure(self, what: str, number: int, error: BaseException) -> None:
        """Let the machine try again, or raise the error."""
        self._machine.failed(number, asyncio.get_running_loop().time())
        if isinstance(error, RecordMovedError):
            return
        if not isinstance(error, Exception) or not self.is_outage(error):
            raise error
        _log.warning("%s could not %s partition %d, and tries again: %s", self._tasks.name, what, number, error)

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

    # -- handlers -----------------------------------------------------------------------------------------------------

    def begin_work(self) -> None:
        """Handle the messages of what the member has, and of what it will get, by `work`."""
        for assigned in self.partitions.values():
            if assigned.active:
                self._begin_work(assigned)

    def _begin_work(self, assigned: AssignedPartition) -> None:
        if self.work is not None and assigned.task is None:
            assigned.task = self._tasks.start(self._work(assigned, self.work), f"partition {assigned.number}")

    async def _work(
        self, assigned: AssignedPartition, work: Callable[[AssignedPartition], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await work(assigned)
        except Exception as error:
            if self.holds(assigned):
                raise
            _log.warning(
                "%s: the handler of partition %d, which was lost, has failed: %r",
                self._tasks.name,
                assigned.number,
                error,
            )

    def cancel_work(self) -> None:
        """Cancel all handlers: what is in hand is not handled."""
        for assigned in self.partitions.values():
            if assigned.task is not None:
                assigned.task.cancel()
                assigned.done.set()

    async def _wind_down(self, number: int, task: asyncio.Task[None]) -> None:
        """Cancel the handler of a lost partition; a claim of the partition waits for it, for up to `revoke_timeout`."""
        seconds = self.options.revoke_timeout
        task.cancel()  # once: it may have something to roll back
        done, _ = await asyncio.wait({task}, timeout=None if seconds == math.inf else seconds)
        self._winding_down.discard(number)
        if not done:
            _log.warning(
                "%s: a handler of partition %d still runs, %g s after it was cancelled; its messages are handled again",
                self._tasks.name,
                number,
                seconds,
            )

    # -- hand-overs ---------------------------------------------------------------------------------------------------

    async def _revoke(self, assigned: AssignedPartition, until: float | None) -> None:
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                await assigned.finished()
                await self._hand_over(assigned)
        except TimeoutError:
            if not limit.expired():
                raise
            if self.holds(assigned):
                _log.warning(
                    "%s: partition %d was to be handed over %g s ago, and a message is still being handled, or a callback has not "
                    "returned; it is lost, and its next owner continues after the last commit",
                    self._tasks.name,
                    assigned.number,
                    self.options.revoke_timeout,
                )
                self._let_go(assigned, assigned.committed, lost=True)

    async def _hand_over(self, assigned: AssignedPartition) -> None:
        """Hand a partition over that is not worked on any more, with others for which that holds at the same time."""
        self._finished.append(assigned)
        await asyncio.sleep(0)
        async with self.callbacks.lock:
            mine, self._finished = [it for it in self._finished if self.holds(it)], []
            told, handled, lost = tuple(sorted(it.number for it in mine if it.announced)), False, False
            try:
                await self.callbacks.revoked(told)
                handled = self.options.auto_commit
            except asyncio.CancelledError:  # it took too long
                lost = True
                raise
            finally:
                for it in filter(self.holds, mine):
                    self._let_go(it, it.handled if handled else it.committed, lost=lost)

    def _let_go(self, assigned: AssignedPartition, position: int, *, lost: bool) -> None:
        """Let the next owner continue at a position; a partition that is lost may still be worked on."""
        if self.settings.output is None:
            self._release_at[assigned.number] = position
        if lost:
            self._lose([assigned.number])
        else:
            self._drop(assigned)
        self._machine.handed_over(assigned.number)

    async def _release_all(self, numbers: tuple[int, ...]) -> None:
        await gather_bounded(self._release, numbers, limit=_IN_FLIGHT)

    async def _release(self, number: int) -> None:
        writer = self.plan.store.partition_writer(number)
        try:
            found = await writer.read()
            record = self.settings.of_this_epoch(self.plan.store.decode(Record, found))
            if record is None or record.owner != self._machine.me:
                self._machine.released(number, 0 if found is None else found.seq)
                return
            position = max(record.seq, self._release_at.get(number, 0))
            ack = await writer.store([], self._record("", position, record.failed))
        except BaseException as error:
            self._note_failure("release", number, error)
            return
        self._release_at.pop(number, None)
        log_state(_log, self._tasks.name, "partition released", partition=number, position=position)
        self._machine.released(number, ack.seq)

    def _lose(self, numbers: Iterable[int]) -> None:
        lost = [self.partitions[number] for number in numbers if number in self.partitions]
        if lost:
            _log.warning("%s has lost partitions %s", self._tasks.name, tuple(it.number for it in lost))
        for assigned in lost:
            self._drop(assigned)
            if self._tasks.closing:
                continue
            task = assigned.task
            if task is not None and not task.done() and task is not asyncio.current_task():
                self._winding_down.add(assigned.number)
                self._tasks.start(self._wind_down(assigned.number, task), "end")
            if assigned.announced:
                self._untold.add(assigned.number)
        if self._untold:
            self._tasks.start(self._tell_losses(), "loss")

    async def _tell_losses(self) -> None:
        await asyncio.sleep(0)  # several may be lost one by one
        async with self.callbacks.lock:
            lost = tuple(sorted(self._untold))
            try:
                await self.callbacks.lost(lost)
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
            self._let_go(assigned, assigned.committed, lost=True)

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
                ack = await store_position(assigned.writer, record, self.plan.name, position)
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
            idle = heapq.nsmallest(
                _IDLE_COMMITS, [it for it in moved if not it.uncommitted], key=attrgetter("committed")
            )
            with self._again_if_away():
                await self.commit([it.number for it in moved if it.uncommitted] + [it.number for it in idle])

    def pause_between_commits(self, seconds: float) -> float:
        """Return after how many seconds a partition without messages should store its position: later if there are many."""
        return seconds * max(1.0, len(self.partitions) / _IDLE_COMMITS)

    async def put_down(self, assigned: AssignedPartition) -> None:
        """Note that a message is handled, and commit if it is time."""
        assigned.put_down()
        if self.options.auto_commit and assigned.uncommitted >= self.options.every:
            with self._again_if_away():
                await self.store(assigned)

    @contextlib.contextmanager
    def _again_if_away(self) -> Iterator[None]:
        """Leave what servers do not answer to the next automatic commit."""
        try:
            yield
        except Exception as error:
            if not is_transient(error):
                raise
            _log.warning("%s could not commit its positions, and tries again: %s", self._tasks.name, error)
