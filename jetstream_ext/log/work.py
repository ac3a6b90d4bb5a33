"""One start of a worker, from its checks to its end.

::

    stand by  (standby=True) wait for the lease of this name (`log.liveness`)
    claim     take the name over, go to the stored position (`log.commits`), and read the state (`log.state`)
    work      read inputs, have them handled (`log.handling`), store what that made
    release   store that this worker has ended, and release the lease

While a commit is on its way, the next inputs are read and handled, and wait until it is stored. An input that has failed
waits as well: those before it are stored first. If the outputs of an input are refused, what was handled after it is undone
and handled again, so a handler can be called more often than once for an input.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from jetstream_ext.errors import AtomicPublishTooLargeError, FencedError, HistoryUnavailableError
from jetstream_ext.log.commits import Commits
from jetstream_ext.log.dead_letter import after_failure
from jetstream_ext.log.handling import Handling
from jetstream_ext.log.job import Job, Source, check_unread
from jetstream_ext.log.liveness import POLL, Lease
from jetstream_ext.log.state import NOTHING, Changes, Step, WorkerState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.records import Total
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchMessage

_log = get_logger("log")

# Seconds without input after which a position is stored that has moved over messages that the filter excludes.
_IDLE: Final = 5.0
# After so many inputs, a commit that is on its way may go on.
_IN_A_ROW: Final = 32


@dataclass(frozen=True, slots=True)
class Processed:
    """What `exactly_once` has done.

    Attributes:
        inputs: Messages read and handled.
        outputs: Messages stored.
        commits: Positions stored, each with its outputs, including those that took the name over and released it.
        position: The next sequence to read.
        dead_letters: Inputs that were stored as dead letters. They count as `inputs`, and not as `outputs`.
    """

    inputs: int
    outputs: int
    commits: int
    position: int
    dead_letters: int = 0


async def run_worker(
    job: Job,
    reader: Source,
    *,
    standby: bool = False,
    epoch: str = "",
    stopping: asyncio.Event,
    breathe: Callable[[], Awaitable[None]] | None = None,
) -> Processed:
    """Claim the position, and work until the source ends, `stopping` is set, or an exception ends it.

    With an `epoch` it is the worker of a group's partition (see `Commits`). `stopping` also ends a pause after a failed attempt;
    a source ends the wait for input itself. `breathe` is called before each call of the handler, which may keep the event loop.

    Cancellation: Safe, as a crash is; the name and the lease are released.
    """
    lease = Lease(job, reader) if standby else None
    handling = Handling(job)
    await _check(job, reader, lease)
    log_state(_log, job.what, "started", stream=reader.stream, output=job.output_stream)
    position = 0
    async with contextlib.AsyncExitStack() as stack:
        try:
            if lease is not None:
                stack.push_async_callback(lease.release)
                await lease.acquire()
                await _check(job, reader, lease)  # that may have taken weeks
            check = (lambda: None) if lease is None else lease.check
            commits = Commits(job, reader, epoch)
            stack.push_async_callback(commits.release)
            await commits.claim(check)
            position = commits.newest.seq
            state = WorkerState(job)
            if commits.newest.state is not None:
                try:
                    await state.load(commits.fence, commits.newest.state)
                except HistoryUnavailableError:
                    await commits.store([], position, commits.newest.failed)  # fails if another worker has taken over
                    raise
                handling.state = state
            work = _Work(job, reader, handling, commits, state, stopping, check, breathe)
            position = await work.run()
            if position != commits.newest.seq:
                await commits.store([], position)
            log_state(_log, job.what, "ended", position=position, inputs=work.inputs)
        except (Exception, asyncio.CancelledError) as error:
            event = "fenced" if isinstance(error, FencedError) else "ended"
            log_state(_log, job.what, event, error=error, position=position)
            raise
    return Processed(work.inputs, work.outputs, commits.count, position, work.letters)


async def _check(job: Job, reader: Source, lease: Lease | None) -> None:
    """Raise an error unless the output stream can be used, and ValueError if the reader would return what is stored."""
    await job.check()
    check = partial(check_unread, reader, job.what, timeout=job.timeout, patience=job.patience)
    await check("position", job.output_stream, job.record)
    if job.keeps_state is not None:
        await check("change of the state", job.output_stream, f"{job.state_prefix}>")
    if job.dead_letter is not None:
        await check("dead letter", job.output_stream, job.dead_letter.subject)
    if lease is not None and lease.bucket.context.prefix == job.context.prefix:
        await check("lease", lease.bucket.stream, lease.subject, where="the stream of the lease's bucket")


@dataclass(slots=True, eq=False)
class _Handled:
    """What a call of the handler has made of its inputs.

    Attributes:
        inputs: Without inputs, only the position has moved, or an error is not that of an input.
        after: The position behind them.
        outputs: What is to be stored with that position.
        step: What it has changed in the state, which is stored, too.
        error: Why that cannot be stored. Nothing is handled behind it.
    """

    inputs: list[StoredMsg]
    after: int
    outputs: list[BatchMessage] = field(default_factory=list)
    step: Step | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Work:
    """The work between claim and end; `check` raises if it must end.

    Attributes:
        inputs: How many inputs are handled and stored, also as dead letters.
        outputs: How many outputs are stored.
        letters: How many inputs are stored as dead letters.
    """

    job: Job
    reader: Source
    handling: Handling
    commits: Commits
    state: WorkerState
    stopping: asyncio.Event
    check: Callable[[], None]
    breathe: Callable[[], Awaitable[None]] | None
    inputs: int = 0
    outputs: int = 0
    letters: int = 0
    _pending: list[StoredMsg] = field(default_factory=list)  # inputs that were read, and are not handled
    _position: int = 0  # behind them
    _alone: int = 0  # up to this sequence they are handled one at a time, since the handling of a list has failed
    _batch_limit: float = math.inf  # outputs and keys in a batch, once the server has refused a larger one

    async def run(self) -> int:
        """Work until the source ends or `stopping` is set; return the position behind what is done."""
        self._position = self.commits.newest.seq
        handled: list[_Handled] | None = []
        while handled is not None:
            handled = await self._advance(handled)
        return self.commits.newest.seq if self._pending else self._position

    async def _advance(self, handled: list[_Handled]) -> list[_Handled] | None:
        """Store what was handled, and return what was handled next, or None at the end."""
        self.check()
        following: list[_Handled] | None = []
        if handled and handled[-1].error is None and self.job.max_messages > 1:
            failed, following = await self._store_and_handle(handled)
        elif (failed := await self._store(handled)) is None:
            following = await self._handle_next(_IDLE)
        if failed is None:
            return following
        dropped = [*handled, *(following or ())]
        self._pending[:0] = [message for each in dropped for message in each.inputs]
        steps = [each.step for each in reversed(dropped) if each.step is not None]
        self.state.undo(steps, self.commits.newest.state or Total())
        await self._fail(failed)
        return []

    async def _store_and_handle(self, handled: list[_Handled]) -> tuple[_Handled | None, list[_Handled] | None]:
        """Store what was handled, and meanwhile read and handle the next inputs."""
        try:
            async with asyncio.TaskGroup() as tasks:
                storing = tasks.create_task(self._store(handled))
                following = await self._handle_next(POLL)
            return storing.result(), following
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
        raise error

    async def _handle_next(self, seconds: float) -> list[_Handled] | None:
        """Read the next inputs, for some seconds, unless some are pending, and handle them until one has failed."""
        handled: list[_Handled] = []
        try:
            if self.stopping.is_set() or not (self._pending or await self._read(seconds)):
                return None
            if self._pending:
                await self._handle(handled)
            elif seconds == _IDLE and self._position != self.commits.newest.seq:
                handled.append(_Handled([], self._position))
        except Exception as error:  # what was handled before is stored first
            handled.append(_Handled([], 0, error=error))
        return handled

    async def _read(self, seconds: float) -> bool:
        """Read the next inputs, if there are any; return False at the end."""
        found = await self.reader.read_for(seconds, self.job.max_messages)
        self._position = self.reader.position or 1
        if found:
            self._pending += found
            log_state(_log, self.job.what, "inputs read", inputs=len(found), position=self._position)
        return found is not None

    async def _handle(self, handled: list[_Handled]) -> None:
        pending, failed, job, state = self._pending, self.commits.newest.failed, self.job, self.state
        await state.keep_time()
        alone = pending[0].seq <= self._alone or (failed is not None and failed.seq == pending[0].seq)
        count = 1 if alone else min(len(pending), job.max_messages)
        size = count if job.grouped else 1
        for done in range(0, count, size):
            if done % _IN_A_ROW == 0:
                await asyncio.sleep(0)
            if self.breathe is not None:
                await self.breathe()
            inputs = pending[:size]
            state.begin()
            made = await self.handling.try_outputs(inputs if job.grouped else inputs[0])
            made = state.misuse or made
            step = state.end(failed=isinstance(made, BaseException))
            del pending[:size]
            after = inputs[-1].seq + 1 if pending else self._position
            if isinstance(made, BaseException):
                handled.append(_Handled(inputs, after, error=made))
                return
            handled.append(_Handled(inputs, after, made, step))

    async def _store(self, handled: list[_Handled]) -> _Handled | None:
        """Commit what was handled, in as few batches as the server takes; what is stored leaves the list.

        If the outputs of several inputs are refused, those of fewer are tried, and in the end those of one.

        Returns:
            The first one that cannot be stored.
        """
        most = len(handled)
        while handled and handled[0].error is None:
            count, outputs, before, changes = self._batch(handled[:most])
            error = await self._commit(outputs, before, changes, handled[count - 1])
            if error is None:
                self.outputs += len(outputs)
                self.inputs += sum(len(each.inputs) for each in handled[:count])
                del handled[:count]
            elif count == 1:
                handled[0].error = error
            elif isinstance(error, AtomicPublishTooLargeError):
                self._batch_limit = (len(outputs) + len(changes)) // 2
            else:
                most = count // 2
        return handled[0] if handled else None

    def _batch(self, handled: list[_Handled]) -> tuple[int, list[BatchMessage], Changes, Changes]:
        """Return how many of these fit into one batch, one at least, their outputs, and what they change in the state."""
        outputs, before, changes = list[BatchMessage](), Changes(), Changes()
        for count, each in enumerate(handled):
            step = each.step or NOTHING
            size = len(outputs) + len(each.outputs) + len(changes) + sum(key not in changes for key in step.after)
            if each.error is not None or (count and size > self._batch_limit):
                return count, outputs, before, changes
            outputs += each.outputs
            for key, was in step.before.items():
                before.setdefault(key, was)
            changes |= step.after
        return len(handled), outputs, before, changes

    async def _commit(
        self, outputs: list[BatchMessage], before: Changes, changes: Changes, last: _Handled
    ) -> Exception | None:
        """Store outputs, changes of the state and the position behind the `last` inputs; as `Commits.store`."""
        if last.step is None or not changes:
            return await self.commits.store(outputs, last.after)
        messages = [*outputs, *self.state.messages(before, changes)]
        error = await self.commits.store(messages, last.after, state=last.step.total)
        if error is None:
            await self.state.stored(changes, self.commits.fence)
            return None
        await self.job.check()  # unless the stream can no longer hold the state, the input is to blame
        error.add_note(
            f"with {counted(len(outputs), 'output')} and {counted(len(changes), 'changed key')} of the state"
        )
        return error

    async def _fail(self, failed: _Handled) -> None:
        """Store that the next input has failed, and pause, or store it as a dead letter; or raise the error."""
        job, error, inputs, commits = self.job, failed.error, failed.inputs, self.commits
        assert error is not None
        letter = job.dead_letter
        if letter is None or not inputs or error in (self.handling.misuse, self.state.misuse):
            raise error
        if len(inputs) > 1:
            log_state(_log, job.what, "inputs failed", inputs=len(inputs), error=error)
            self._alone = inputs[-1].seq
            return

        async def send(data: bytes, headers: dict[str, str]) -> Exception | None:
            message = BatchMessage(letter.subject, data, headers=headers, msg_ttl=job.forever)
            return await commits.store([message], failed.after)

        if await after_failure(
            letter,
            inputs[0],
            error,
            commits.newest.failed,
            what=job.where,
            worker=job.name,
            note=partial(commits.store, [], inputs[0].seq),
            send=send,
            stopping=self.stopping,
        ):
            del self._pending[0]
            self.inputs += 1
            self.letters += 1
