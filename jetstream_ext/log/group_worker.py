"""A member that serves its partitions, each in a task of its own: by a handler of messages, or by an exactly-once worker."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.errors import APIError
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import (
    BadHeaderError,
    FencedError,
    MaxPayloadError,
    RequestTimeoutError,
    StreamRecreatedError,
    batch_refusal,
    server_error,
)
from jetstream_ext.log.assigned import BLOCK, AssignedPartition
from jetstream_ext.log.dead_letter import DeadLetter
from jetstream_ext.log.membership import GroupMembership
from jetstream_ext.log.observed import observed_handling
from jetstream_ext.log.offsets import OffsetStore, StoredOffset
from jetstream_ext.log.pauses import Pauses
from jetstream_ext.protocol.api import recreated
from jetstream_ext.protocol.dead_letters import describe, is_too_large, letter_versions, one_line
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.records import Failed
from jetstream_ext.text import counted, get_logger
from jetstream_ext.types import own_headers

_log = get_logger("log")

MessageHandler = Callable[[StoredMsg], Awaitable[None] | None]

_IDLE: Final = 5.0
_NOT_OBSERVED: Final = contextlib.nullcontext()
_LONGEST_NOTE: Final = 200  # bytes of an error in a record
_LONGEST_LOGGED: Final = 1024


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
    """One partition as the input of an exactly-once worker; see `log.worker.Source`."""

    def __init__(self, member: GroupMembership, assigned: AssignedPartition) -> None:
        plan = member.plan
        self.name: str | None = None
        self.stream: str = plan.stream
        self.subject: str | None = plan.subject
        self.context: JetStreamContext = plan.context
        self.confirm: bool = True
        self.offsets: OffsetStore = OffsetStore(plan.context, plan.store.bucket.name)
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
        dispatcher = assigned.lanes.dispatcher
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
                if (
                    assigned.failed is not None
                    and assigned.failed.seq == message.seq
                    and assignment.options.auto_commit
                ):
                    await assignment.store(assigned)  # so that it is not handled again, and its attempts are forgotten
                await self._pauses.breathe()
                self._member.ensure_valid()

    async def _call(self, message: StoredMsg) -> None:
        plan, observer = self._member.plan, telemetry.observer
        observed: contextlib.AbstractContextManager[Any] = _NOT_OBSERVED
        if observer is not None:
            observed = observed_handling(observer, plan.store.context.connection, plan.name, message)
        with observed:
            result = self._handler(message)
            if inspect.isawaitable(result):
                await result

    async def _attempt(
        self, assigned: AssignedPartition, message: StoredMsg, letters: DeadLetter, stopping: asyncio.Event
    ) -> bool:
        """Handle a message until it is handled or a dead letter; return False if the partition is given up before."""
        member, failed = self._member, assigned.failed
        if failed is None or failed.seq != message.seq:
            failed = None
        error = "" if failed is None else failed.error
        while failed is None or failed.attempts < letters.attempts:
            try:
                await self._call(message)
                return True
            except FencedError:  # of a commit in the handler
                raise
            except (Exception, asyncio.CancelledError) as raised:
                if not member.assignment.holds(assigned) or member.error is not None or not member.is_open:
                    raise  # it was cancelled, whatever it has made of that
                error = describe(raised)
            failed = Failed(message.seq, 1 if failed is None else failed.attempts + 1, one_line(error, _LONGEST_NOTE))
            if failed.attempts >= letters.attempts:
                break
            if not await member.assignment.store(assigned, failed):
                return False
            pause = letters.pause_after(failed.attempts)
            _log.warning(
                "%s: the handler failed for sequence %d (attempt %d of %d; the next one follows after %g s): %s",
                member.name,
                message.seq,
                failed.attempts,
                letters.attempts,
                pause,
                one_line(error, _LONGEST_LOGGED),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stopping.wait()
            if stopping.is_set():
                return False
        assert failed is not None
        await self._store_letter(message, failed.attempts, error, letters.subject)
        assigned.failed = failed
        return True

    async def _store_letter(self, message: StoredMsg, attempts: int, error: str, subject: str) -> None:
        plan, tried = self._member.plan, counted(attempts, "attempt")
        what = f"{self._member.name}: sequence {message.seq} of stream {message.stream!r}"
        letter_id = f"dead:{plan.store.bucket.name}:{plan.name}:{message.stream}:{message.seq}:{message.time_ns}"
        refused: Exception | None = None
        for payload, headers in letter_versions(message, attempts=attempts, error=error, worker=plan.name):
            try:
                pairs = list(headers.items())
                ack = await self._publish(subject, payload, own_headers([*pairs, (MSG_ID, letter_id)]))
                if ack.duplicate and not await self._has_letter(ack, subject, letter_id):
                    other_id = f"{letter_id}:{NUID().next().decode()}"  # the letter with that id was deleted since
                    await self._publish(subject, payload, own_headers([*pairs, (MSG_ID, other_id)]))
            except Exception as reason:
                refused = reason
                if not is_too_large(reason):
                    break
            else:
                text = one_line(error, _LONGEST_LOGGED)
                _log.warning("%s was stored as a dead letter on %r after %s: %s", what, subject, tried, text)
                return
        assert refused is not None
        raise _not_stored(
            refused,
            f"{what} failed ({tried}: {one_line(error, _LONGEST_NOTE)}), and its dead letter cannot be stored on {subject!r}: {refused}; the "
            "message stays at the position of its partition",
        ) from refused

    async def _has_letter(self, ack: PubAck, subject: str, letter_id: str) -> bool:
        """Return whether a letter is stored of which the server has said that another one is its duplicate."""
        store = self._member.plan.store
        look = partial(get_at_leader, store.context, ack.stream, {"seq": ack.seq}, store.timeout)
        found = await Retry(store.patience).call(look)
        return found is not None and (found.subject, found.headers.get(MSG_ID)) == (subject, letter_id)

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> PubAck:
        store = self._member.plan.store
        publish = store.context.publish
        return await Retry(store.patience).call(
            lambda: publish(subject, payload, headers, store.timeout, f"the ack of the dead letter on {subject!r}")
        )


def _not_stored(error: Exception, text: str) -> Exception:
    """Return an error of the same kind with another text."""
    if isinstance(error, APIError) and error.err_code:
        refusal = server_error(code=error.code, err_code=error.err_code, description=error.description or "")
        return batch_refusal(refusal, text, outcome="not_stored")
    if isinstance(error, MaxPayloadError | BadHeaderError):
        return type(error)(text)
    return RequestTimeoutError(f"{text}; the dead letter may be stored") if _is_late(error) else error


def _is_late(error: Exception) -> bool:
    return isinstance(error, nats.errors.TimeoutError | APIError)
