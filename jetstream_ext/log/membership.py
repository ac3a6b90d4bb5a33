"""A member's part in its group: the I/O of `protocol.membership`, from its joining to its leaving.

::

    renew        store the member's key, every `heartbeat` seconds ─────────┐
    follow       what the bucket has: members, owners of the partitions ────┤
                                                                            ▼
    coordinate                                  `Membership` decides ──► `Assignment` claims, revokes, releases, loses
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import warnings
from collections.abc import AsyncIterator
from typing import Final

from nats.nuid import NUID

from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.kv.table import KeyValueChange, Table
from jetstream_ext.log.assignment import Assignment
from jetstream_ext.log.callbacks import JoinOptions
from jetstream_ext.log.group_plan import GroupPlan
from jetstream_ext.log.group_store import MemberRecord
from jetstream_ext.log.group_view import GroupView
from jetstream_ext.log.task_scope import TaskScope
from jetstream_ext.protocol.membership import Membership
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

_RETRY: Final = 0.1
LEAVE_TIMEOUT: Final = 1.0  # for each step, after an error or a cancellation


class GroupMembership:
    """A member of a group.

    Attributes:
        id: A random one.
        label: The member's name for people.
        assignment: Its partitions.
        error: Why it has failed.
        left: Set when everything is handed over, or cannot be.
    """

    def __init__(self, plan: GroupPlan, options: JoinOptions, output: tuple[str, str] | None = None) -> None:
        self.plan: GroupPlan = plan
        self.id: str = NUID().next().decode()
        self.label: str = options.label or f"{socket.gethostname()}-{os.getpid()}"
        self.name: str = f"group {plan.name!r}: member {self.label!r}"
        self.error: Exception | None = None
        self.left: asyncio.Event = asyncio.Event()
        self._output = output
        self._machine = Membership(self.id, plan.partitions, ttl=plan.ttl, margin=plan.margin)
        self._changed = asyncio.Event()  # for `_coordinate`
        self._tasks = TaskScope(self.name, failed=self.fail, ended=self._changed.set)
        self.assignment: Assignment = Assignment(plan, options, self._machine, self._tasks)
        self._table: Table | None = None
        self._loop: asyncio.AbstractEventLoop
        self._view: GroupView
        self._renew_now = asyncio.Event()
        self._leave_by = math.inf  # finite once it leaves
        self._entered = self._stopping = self._closed = False

    # -- joining ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._entered:
            raise RuntimeError(f"{self.name} can be entered once; call join() again")
        self._entered, self._loop = True, asyncio.get_running_loop()
        patience = self.plan.store.patience
        try:
            settings = await self.plan.prepare(self._output)
            self._view = GroupView(self.plan, settings, self.name)
            self.assignment.open(settings)
            self._table = await Retry(patience, transient=is_transient_read).call(self._open_table)
            await Retry(patience).call(self._renew)
        except BaseException:
            await self._end()
            raise
        log_state(_log, self.name, "joined", member=self.id)
        changes = self._table.changes()
        for key, entry in self._table.items():
            self._view.note(key, entry)
        self._view.revision = self._table.revision
        self._tasks.start(self._coordinate(), "coordination")
        self._tasks.start(self._follow(changes), "view")
        self._tasks.start(self._renew_often(), "heartbeats")
        self._tasks.start(self.assignment.reader.read(), "reading")
        if self.assignment.options.auto_commit and self._output is None:
            self._tasks.start(self.assignment.commit_often(), "commits")
        if self._stopping:
            self._depart()

    async def _open_table(self) -> Table:
        store = self.plan.store
        table = Table(store.kv, [f"{store.prefix}>"], timeout=store.timeout)
        await table.__aenter__()
        return table

    @property
    def is_open(self) -> bool:
        return self._table is not None and not self._closed

    def check(self) -> None:
        """Raise the member's error, or RuntimeError unless it is open."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if not self.is_open:
            raise RuntimeError(f"{self.name} is {'closed' if self._closed else 'not open; enter it with `async with`'}")

    # -- being a member -----------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        store, sent = self.plan.store, self._loop.time()
        record = MemberRecord(self.label, self._machine.leaving, self.plan.ttl)
        await store.put_member(self.id, record, min(store.timeout, self.plan.heartbeat))
        self._machine.renewed(sent, self._loop.time())
        self._changed.set()

    async def _renew_often(self) -> None:
        failing = False
        while True:
            begun = self._loop.time()
            try:
                await self._renew()
                pause, failing = begun + self.plan.heartbeat - self._loop.time(), False
            except Exception as error:
                if not is_transient(error):
                    raise
                if not failing:
                    _log.warning("%s cannot renew its key, and tries again: %s", self.name, error)
                pause, failing = min(_RETRY, self.plan.heartbeat), True
            self.step()  # before a message is returned of a partition that was lost
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await self._renew_now.wait()
            self._renew_now.clear()

    async def _follow(self, changes: AsyncIterator[KeyValueChange]) -> None:
        """Note what changes in the bucket."""
        view = self._view
        async for change in changes:
            if view.note(change.key, change.new):
                self._changed.set()
            view.revision = max(view.revision, change.revision)
        raise RuntimeError(f"{self.name}: the table of its bucket was closed")

    def step(self) -> None:
        """Look at the bucket, and do what is due."""
        view = self._view
        self._machine.see(view.members.keys(), view.leaving, view.owners, view.revision)
        for do, numbers in self._machine.due(self._loop.time()):
            self.assignment.carry_out(do, numbers)

    def ensure_valid(self) -> None:
        """Lose what has ended while the process was suspended or the event loop blocked."""
        if not self._machine.is_valid(self._loop.time()):
            self.step()

    async def _coordinate(self) -> None:
        try:
            while True:
                self._changed.clear()
                self.step()
                self._check_left(self._loop.time())
                until = self._machine.wake_at(self._loop.time())
                if not self.left.is_set():
                    until = min(until, self._leave_by)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(None if until == math.inf else until):
                        await self._changed.wait()
        finally:
            self._note_left()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Hand everything over as soon as what is in hand is handled."""
        self._stopping = True
        if self.is_open:
            self._depart()

    def fail(self, error: Exception) -> None:
        """End the member: the caller gets this error."""
        if self.error is None:
            log_state(_log, self.name, "failed", error=error)
            self.error = error
        elif type(error) is not type(self.error):
            _log.warning("%s has failed while it left: %r", self.name, error)
        self._depart(in_a_hurry=True)  # the others take over, also while the caller does not come back to this member

    def _depart(self, *, in_a_hurry: bool = False) -> None:
        """Begin to leave: no further messages; the others take over what is handed over."""
        for assigned in self.assignment.partitions.values():
            assigned.end()
        if not self._machine.leaving:
            log_state(_log, self.name, "leaves", partitions=len(self.assignment.partitions))
            self._machine.leave()
            self._renew_now.set()  # the others share its partitions from now on
        seconds = self.assignment.options.revoke_timeout + LEAVE_TIMEOUT + self.plan.store.patience
        self._leave_within(2 * LEAVE_TIMEOUT if in_a_hurry else seconds)
        self._changed.set()
        self.assignment.progress.set()

    def _leave_within(self, seconds: float) -> None:
        self._leave_by = min(self._leave_by, self._loop.time() + seconds)

    def _check_left(self, now: float) -> None:
        if not self._machine.leaving or self.left.is_set():
            return
        connection = self.plan.store.context.connection
        if connection.end is not None or connection.nc.is_draining:
            self._leave_within(0.0)
        if self.assignment.is_busy and now < self._leave_by:
            return
        self._leave_within(self.plan.store.patience)
        if self._machine.idle:
            self._note_left()
        elif now >= self._leave_by:
            _log.warning(
                "%s could not hand over all its partitions: no server answers, or the connection is closed; their next owners continue "
                "after the last commits, once the member's key has ended",
                self.name,
            )
            self._note_left()

    def _note_left(self) -> None:
        self.left.set()
        self.assignment.progress.set()

    async def close(self, *, clean: bool) -> None:
        """Leave the group; in a hurry, unless `clean`."""
        if self._closed or not self._entered:
            return
        if self.assignment.callbacks.is_running_here:
            raise RuntimeError(f"{self.name} cannot be left in one of its callbacks; call stop() there")
        try:
            self._depart(in_a_hurry=not clean)
            await self.left.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        """End everything that runs, also if the caller is cancelled meanwhile; each step takes `LEAVE_TIMEOUT` at most."""
        self._closed = True
        self._machine.leave()
        ending = asyncio.create_task(self._end_all(), name=f"jetstream_ext end of {self.name}")
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            mark_retrieved(ending)
            raise cancelled
        ending.result()

    async def _end_all(self) -> None:
        store = self.plan.store
        try:
            await self._tasks.close(LEAVE_TIMEOUT)
            if self._table is not None and store.context.connection.usable:
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await store.delete_member(self.id, self.plan.ttl)  # others may take what could not be handed over
        except Exception as error:
            log_state(_log, self.name, "key not deleted", error, error=error)
        finally:
            self.assignment.partitions.clear()
            self._note_left()
            if self._table is not None:
                await self._table.__aexit__(None, None, None)
            log_state(_log, self.name, "left")

    def dropped(self) -> None:
        """Close, from the owner's ``__del__`` and so perhaps from another thread, if it was left open; warn if so."""
        if not self.is_open:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._loop.call_soon_threadsafe(
                lambda: asyncio.ensure_future(self._end()).add_done_callback(mark_retrieved)
            )
        warnings.warn(f"{self.name} was dropped while it was open; use `async with`", ResourceWarning, stacklevel=3)
