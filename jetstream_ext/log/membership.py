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
from typing import Final, Literal

from nats.nuid import NUID

from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.retry import Retry, is_transient, is_transient_read
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.kv.table import KeyValueChange, Table
from jetstream_ext.log.assignment import Assignment
from jetstream_ext.log.callbacks import JoinOptions
from jetstream_ext.log.group_plan import MARGIN, GroupPlan
from jetstream_ext.log.group_store import GroupView, MemberRecord, encode
from jetstream_ext.log.liveness import put_key
from jetstream_ext.log.task_scope import TaskScope
from jetstream_ext.protocol.membership import Membership
from jetstream_ext.text import get_logger, log_state

_log = get_logger("log")

_RETRY: Final = 0.1
LEAVE_TIMEOUT: Final = 1.0  # for each step, after an error or a cancellation


class GroupMembership:
    """A member of a group.

    Attributes:
        label: The member's name for people.
        assignment: Its partitions.
        error: Why it has failed.
        left: Set when everything is handed over, or cannot be.
    """

    def __init__(self, group: GroupPlan, options: JoinOptions) -> None:
        self.group: GroupPlan = group
        self.label: str = options.label or f"{socket.gethostname()}-{os.getpid()}"
        self.name: str = f"group {group.name!r}: member {self.label!r}"
        self.error: Exception | None = None
        self.left: asyncio.Event = asyncio.Event()
        self._machine = Membership(NUID().next().decode(), group.partitions, ttl=group.ttl, margin=group.ttl * MARGIN)
        self._changed = asyncio.Event()  # for `_coordinate`
        self._tasks = TaskScope(self.name, failed=self.fail, ended=self._changed.set)
        self.assignment: Assignment = Assignment(group, options, self._machine, self._tasks)
        self._state: Literal["new", "opening", "open", "closed"] = "new"
        self._loop: asyncio.AbstractEventLoop
        self._view: GroupView
        self._table: Table | None = None
        self._renew_now = asyncio.Event()
        self._leave_by = math.inf  # finite once it leaves

    @property
    def id(self) -> str:
        """A random one."""
        return self._machine.me

    # -- joining ------------------------------------------------------------------------------------------------------

    async def open(self, output: tuple[str, str] | None = None) -> None:
        """Join; `output` is that of an exactly-once group."""
        if self._state != "new":
            raise RuntimeError(f"{self.name} can be entered once; call join() again")
        self._state, self._loop = "opening", asyncio.get_running_loop()
        store = self.group.store
        try:
            settings = await self.group.prepare(output)
            self._view = GroupView(store, settings)
            self.assignment.open(settings)
            self._table = await Retry(store.patience, transient=is_transient_read).call(
                lambda: Table(store.kv, [f"{store.prefix}>"], timeout=store.timeout).__aenter__()
            )
            await Retry(store.patience).call(self._renew)
            changes = self._table.changes()
            for key, entry in self._table.items():
                self._note(key, entry)
            self._view.revision = self._table.revision
        except BaseException:
            await self._end()
            raise
        self._state = "open"
        log_state(_log, self.name, "joined", member=self.id)
        self._tasks.start(self._coordinate(), "coordination")
        self._tasks.start(self._follow(changes), "view")
        self._tasks.start(self._renew_often(), "heartbeats")
        self._tasks.start(self.assignment.reader.read(), "reading")
        if self.assignment.options.auto_commit and output is None:
            self._tasks.start(self.assignment.commit_often(), "commits")
        if self._machine.leaving:
            self._depart()

    @property
    def is_open(self) -> bool:
        return self._state == "open"

    def check(self) -> None:
        """Raise the member's error, or RuntimeError unless it is open."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if not self.is_open:
            what = "closed" if self._state == "closed" else "not open; enter it with `async with`"
            raise RuntimeError(f"{self.name} is {what}")

    # -- being a member -----------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        group, store, sent = self.group, self.group.store, self._loop.time()
        record = encode(MemberRecord(self.label, self._machine.leaving, group.ttl))
        await put_key(store.bucket, store.members + self.id, record, group.ttl, min(store.timeout, group.heartbeat))
        self._machine.renewed(sent, self._loop.time())
        self._changed.set()

    async def _renew_often(self) -> None:
        failing = False
        while True:
            begun = self._loop.time()
            try:
                await self._renew()
                pause, failing = begun + self.group.heartbeat - self._loop.time(), False
            except Exception as error:
                if not is_transient(error):
                    raise
                if not failing:
                    _log.warning("%s cannot renew its key, and tries again: %s", self.name, error)
                pause, failing = min(_RETRY, self.group.heartbeat), True
            self.step()  # before a message is returned of a partition that was lost
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await self._renew_now.wait()
            self._renew_now.clear()

    async def _follow(self, changes: AsyncIterator[KeyValueChange]) -> None:
        async for change in changes:
            if self._note(change.key, change.new):
                self._changed.set()
            self._view.revision = max(self._view.revision, change.revision)
        raise RuntimeError(f"{self.name}: the table of its bucket was closed")

    def _note(self, key: str, entry: KeyValueEntry | None) -> bool:
        try:
            return self._view.note(key, entry)
        except ValueError as error:
            _log.warning("%s", error)  # a member does not end because of another one's key
            return True

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
        """Do what is due, until everything is handed over, or cannot be."""
        try:
            self.step()
            while not self._has_left(self._loop.time()):
                until = min(self._machine.wake_at(self._loop.time()), self._leave_by)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(None if until == math.inf else until):
                        await self._changed.wait()
                self._changed.clear()
                self.step()
        finally:
            self._note_left()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Hand everything over as soon as what is in hand is handled."""
        if self.is_open:
            self._depart()
        else:
            self._machine.leave()

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
        if not self._machine.leaving:
            log_state(_log, self.name, "leaves", partitions=len(self.assignment.partitions))
            self._machine.leave()
            self._renew_now.set()  # the others share its partitions from now on
        seconds = self.assignment.options.revoke_timeout + LEAVE_TIMEOUT + self.group.store.patience
        self._leave_within(2 * LEAVE_TIMEOUT if in_a_hurry else seconds)
        if self.is_open:
            self.step()
        self._changed.set()
        self.assignment.progress.set()

    def _leave_within(self, seconds: float) -> None:
        self._leave_by = min(self._leave_by, self._loop.time() + seconds)

    def _has_left(self, now: float) -> bool:
        if not self._machine.leaving:
            return False
        connection = self.group.store.context.connection
        if connection.end is not None or connection.nc.is_draining:
            self._leave_within(0.0)
        if self.assignment.is_busy and now < self._leave_by:
            return False
        self._leave_within(self.group.store.patience)
        if now >= self._leave_by and not self._machine.idle:
            _log.warning(
                "%s could not hand over all its partitions: no server answers, or the connection is closed; their next owners continue "
                "after the last commits, once the member's key has ended",
                self.name,
            )
        return now >= self._leave_by or self._machine.idle

    def _note_left(self) -> None:
        self.left.set()
        self.assignment.progress.set()

    async def close(self, *, clean: bool) -> None:
        """Leave the group; in a hurry, unless `clean`."""
        if not self.is_open:
            return
        if self.assignment.callbacks.partitions_here:
            raise RuntimeError(f"{self.name} cannot be left in one of its callbacks; call stop() there")
        try:
            self._depart(in_a_hurry=not clean)
            await self.left.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        """End everything that runs, also if the caller is cancelled meanwhile; each step takes `LEAVE_TIMEOUT` at most."""
        self._state = "closed"
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
        store = self.group.store
        try:
            await self._tasks.close(LEAVE_TIMEOUT)
            if self._table is not None and store.context.connection.usable:
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    # Others may take what could not be handed over. The marker goes, too: an id is never used again.
                    await put_key(store.bucket, store.members + self.id, None, self.group.ttl, store.timeout)
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
        self._state = "closed"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._loop.call_soon_threadsafe(
                lambda: asyncio.ensure_future(self._end()).add_done_callback(mark_retrieved)
            )
        warnings.warn(f"{self.name} was dropped while it was open; use `async with`", ResourceWarning, stacklevel=3)
