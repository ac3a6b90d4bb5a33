"""A member that serves its partitions, each in a task of its own: by a handler of messages, or by an exactly-once worker."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import FencedError, StreamRecreatedError
from jetstream_ext.log.assigned import BLOCK, AssignedPartition
from jetstream_ext.log.dead_letter import DeadLetter, after_failure
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.log.observed import observed_handling
from jetstream_ext.log.offsets import OffsetStore, StoredOffset
from jetstream_ext.protocol.api import recreated
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.records import Failed
from jetstream_ext.types import own_headers

MessageHandler = Callable[[StoredMsg], Awaitable[None] | None]

_IDLE: Final = 5.0
# Seconds between two pauses of a member's handlers, and of a pause.
_PAUSE_EVERY, _PAUSE = 0.05, 0.002


async def serve(member: GroupMembership, work: Callable[[AssignedPartition], Coroutine[Any, Any, None]]) -> None:
    """Run `work` for each partition as long as the member owns it, until it has left or fails; `close` ends what runs then."""
    assignment = member.assignment
    assignment.work = work
    assignment.begin_work()
    try:
        while member.error is None and not member.left.is_set():
            assignment.progress.clear()
            await assignment.progress.wait()
        member.check()
    finally:
        assignment.work = None


class PartitionSource:
    """One partition as the input of an exactly-once worker; see `log.job.Source`."""

    def __init__(self, member: GroupMembership, assigned: AssignedPartition) -> None:
        group = member.group
        self.name: str | None = None
        self.stream: str = group.stream
        self.subject: str | None = group.subject
        self.context: JetStreamContext = group.context
        self.confirm: bool = True
        self.offsets: OffsetStore = OffsetStore(group.context, group.store.bucket.name)
        self.created: str = member.assignment.settings.created
        self._member = member
        self._assigned = assigned

    @property
    def position(self) -> int | None:
        return self._assigned.position

    async def open(self) -> int:
        return self._assigned.position

    def seek(self, start: StoredOffset | int) -> None:
        if isinstance(start, StoredOffset):
            if start.stream != self.stream or recreated(start.created, self.created):
                raise StreamRecreatedError(
                    f"{self._member.name}: the stored position of partition {self._assigned.number} is one in stream {start.stream!r} "
                    f"that was created at {start.created}, and the group reads stream {self.stream!r} that was created at "
                    f"{self.created}; nothing is stored; call Group.reset to start again",
                    stream=self.stream,
                    expected=start.created,
                    found=self.created,
                )
            start = start.seq
        self._assigned.move(start)

    async def read_for(self, seconds: float, max_messages: int = 1000) -> list[StoredMsg] | None:
        """Return messages, an empty list after `seconds` without one, or None once the partition is revoked or lost."""
        assigned = self._assigned
        dispatcher = assigned.dispatcher
        seconds = self._member.assignment.pause_between_commits(seconds)
        assigned.begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not assigned.ending:
                    self._member.ensure_valid()
                    if rows := dispatcher.take(assigned.number, max_messages) if assigned.reading else []:
                        return rows
                    assigned.given.clear()
                    if not assigned.ending:
                        await assigned.given.wait()
        return None if assigned.ending else []


class Pauses:
    """When the handlers of a member may begin: those that never await would keep the event loop from all other tasks."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._ended = 0.0  # the last pause

    async def breathe(self) -> None:
        """Return when the next handler may begin. Others may run meanwhile, so all handlers wait during a pause."""
        clock = asyncio.get_running_loop().time
        if not self._lock.locked() and clock() - self._ended <= _PAUSE_EVERY:
            return
        async with self._lock:
            if clock() - self._ended > _PAUSE_EVERY:
                await asyncio.sleep(_PAUSE)
                self._ended = clock()


class GroupWorker:
    """Calls a handler for each message: one after the other for each partition, the partitions at the same time.

    With `dead_letter` a message whose handler fails is handled again after a pause, and is stored aside in the end. Each
    failure is stored in the partition's record before the next attempt.
    """

    def __init__(self, member: GroupMembership, handler: MessageHandler, dead_letter: DeadLetter | None) -> None:
        self._member = member
        self._handler = handler
        self._dead_letter = dead_letter
        self._pauses = Pauses()

    async def work(self, assigned: AssignedPartition) -> None:
        """Handle the messages of a partition until it is revoked or lost."""
        source, assignment = PartitionSource(self._member, assigned), self._member.assignment
        stopping = asyncio.Event()
        assigned.stop = stopping.set
        while (found := await source.read_for(_IDLE, BLOCK)) is not None:
            assigned.queue.extend(found)
            while assigned.queue:
                message = assigned.pick_up()
                if self._dead_letter is None:
                    await self._call(message)
                elif not await self._attempt(assigned, message, self._dead_letter, stopping):
                    assigned.done.set()  # it stays in hand: it is not handled
                    return
                await assignment.put_down(assigned)
                failed = assigned.failed
                if failed is not None and failed.seq == message.seq and assignment.options.auto_commit:
                    await assignment.store(assigned)  # so that it is not handled again, and its attempts are forgotten
                await self._pauses.breathe()
                self._member.ensure_valid()

    async def _call(self, message: StoredMsg) -> None:
        group = self._member.group
        with observed_handling(group.store.context.connection, group.name, message):
            result = self._handler(message)
            if inspect.isawaitable(result):
                await result

    async def _attempt(
        self, assigned: AssignedPartition, message: StoredMsg, letter: DeadLetter, stopping: asyncio.Event
    ) -> bool:
        """Handle a message until it is handled or a dead letter; return False if the partition is given up before."""
        member = self._member
        while not stopping.is_set():
            try:
                await self._call(message)
                return True
            except FencedError:  # of a commit in the handler
                raise
            except (Exception, asyncio.CancelledError) as raised:
                if not member.assignment.holds(assigned) or member.error is not None or not member.is_open:
                    raise  # it was cancelled, whatever it has made of that
                error = raised
            if await after_failure(
                letter,
                message,
                error,
                assigned.failed,
                what=member.name,
                worker=member.group.name,
                note=partial(member.assignment.store, assigned),
                send=partial(self._send, letter.subject, message),
                stopping=stopping,
            ):
                assigned.failed = Failed(message.seq, letter.attempts, "")
                return True
        return False

    async def _send(
        self, subject: str, message: StoredMsg, payload: bytes, headers: dict[str, str]
    ) -> Exception | None:
        """Publish a dead letter under an id of its message; return why it may not be stored."""
        group = self._member.group
        letter_id = f"dead:{group.store.bucket.name}:{group.name}:{message.stream}:{message.seq}:{message.time_ns}"
        try:
            if not await self._publish(subject, payload, headers, letter_id):
                # The letter with that id was deleted since.
                await self._publish(subject, payload, headers, f"{letter_id}:{NUID().next().decode()}")
        except Exception as error:
            return error
        return None

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str], letter_id: str) -> bool:
        """Publish a dead letter; return whether one with its id is stored."""
        store = self._member.group.store
        own, what = own_headers([*headers.items(), (MSG_ID, letter_id)]), f"the ack of the dead letter on {subject!r}"
        publish = partial(store.context.publish, subject, payload, own, store.timeout, what)
        ack = await Retry(store.patience).call(publish)
        if not ack.duplicate:
            return True
        look = partial(get_at_leader, store.context, ack.stream, {"seq": ack.seq}, store.timeout)
        found = await Retry(store.patience).call(look)
        return found is not None and (found.subject, found.headers.get(MSG_ID)) == (subject, letter_id)
