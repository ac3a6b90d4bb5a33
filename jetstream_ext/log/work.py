"""One start of a worker, from its checks to its end.

::

    stand by  (standby=True) wait for the lease of this name (`log.liveness`)
    claim     take the name over, and go to the stored position (`log.commits`)
    work      read inputs, have them handled (`log.handling`), store what that made
    release   store that this worker has ended, and release the lease

While a commit is on its way, the next inputs are read and handled, and wait until it is stored. An input that has failed
waits as well: those before it are stored first. If the outputs of an input are refused, what was handled after it is dropped
and handled again, so a handler can be called more often than once for an input.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final

from jetstream_ext.errors import AtomicPublishTooLargeError, FencedError
from jetstream_ext.log.commits import Commits
from jetstream_ext.log.dead_letter import after_failure
from jetstream_ext.log.handling import Handling
from jetstream_ext.log.job import Job, Source, check_unread
from jetstream_ext.log.liveness import POLL, Lease
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.text import get_logger, log_state
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
            position = commits.position
            work = _Work(job, reader, handling, commits, stopping, check, breathe)
            position = await work.run()
            if position != commits.position:
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
        error: Why that cannot be stored. Nothing is handled behind it.
    """

    inputs: list[StoredMsg]
    after: int
    outputs: list[BatchMessage] = field(default_factory=list)
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
    stopping: asyncio.Event
    check: Callable[[], None]
    breathe: Callable[[], Awaitable[None]] | None
    inputs: int = 0
    outputs: int = 0
    letters: int = 0
    _pending: list[StoredMsg] = field(default_factory=list)  # inputs that were read, and are not handled
    _position: int = 0  # behind them
    _alone: int = 0  # up to this sequence they are handled one at a time, since the handling of a list has failed
    _batch_limit: float = math.inf  # outputs in a batch, once the server has refused a larger one

    async def run(self) -> int:
        """Work until the source ends or `stopping` is set; return the position behind what is done."""
        self._position = self.commits.position
        handled: list[_Handled] | None = []
        while handled is not None:
            handled = await self._advance(handled)
        return self.commits.position if self._pending else self._position

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
        self._pending[:0] = [message for each in (*handled, *(following or ())) for message in each.inputs]
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
            elif seconds == _IDLE and self._position != self.commits.position:
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
        pending, failed, job = self._pending, self.commits.failed, self.job
        alone = pending[0].seq <= self._alone or (failed is not None and failed.seq == pending[0].seq)
        count = 1 if alone else min(len(pending), job.max_messages)
        size = count if job.grouped else 1
        for done in range(0, count, size):
            if done % _IN_A_ROW == 0:
                await asyncio.sleep(0)
            if self.breathe is not None:
                await self.breathe()
            inputs = pending[:size]
            made = await self.handling.try_outputs(inputs if job.grouped else inputs[0])
            del pending[:size]
            after = inputs[-1].seq + 1 if pending else self._position
            if isinstance(made, BaseException):
                handled.append(_Handled(inputs, after, error=made))
                return
            handled.append(_Handled(inputs, after, made))

    async def _store(self, handled: list[_Handled]) -> _Handled | None:
        """Commit what was handled, in as few batches as the server takes; what is stored leaves the list.

        If the outputs of several inputs are refused, those of fewer are tried, and in the end those of one.

        Returns:
            The first one that cannot be stored.
        """
        most = len(handled)
        while handled and handled[0].error is None:
            sizes = accumulate(len(each.outputs) for each in handled if each.error is None)
            count = min(most, max(1, sum(size <= self._batch_limit for size in sizes)))
            outputs = [message for each in handled[:count] for message in each.outputs]
            error = await self.commits.store(outputs, handled[count - 1].after)
            if error is None:
                self.outputs += len(outputs)
                self.inputs += sum(len(each.inputs) for each in handled[:count])
                del handled[:count]
            elif count == 1:
                handled[0].error = error
            elif isinstance(error, AtomicPublishTooLargeError):
                self._batch_limit = len(outputs) // 2
            else:
                most = count // 2
        return handled[0] if handled else None

    async def _fail(self, failed: _Handled) -> None:
        """Store that the next input has failed, and pause, or store it as a dead letter; or raise the error."""
        job, error, inputs, commits = self.job, failed.error, failed.inputs, self.commits
        assert error is not None
        letter = job.dead_letter
        if letter is None or not inputs or error is self.handling.misuse:
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
            commits.failed,
            what=job.where,
            worker=job.name,
            note=partial(commits.store, [], inputs[0].seq),
            send=send,
            stopping=self.stopping,
        ):
            del self._pending[0]
            self.inputs += 1
            self.letters += 1
