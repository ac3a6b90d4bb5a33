"""The work of a worker between its claim and its end: read inputs, have them handled, store what that made.

While a commit is on its way, the next inputs are read and handled, and wait until it is stored. An input that has failed
waits as well: those before it are stored first. If the outputs of an input are refused, what was handled after it is dropped
and handled again, so a handler can be called more often than once for an input.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from jetstream_ext.client.connection import Context
from jetstream_ext.errors import (
    AtomicPublishTooLargeError,
    BadHeaderError,
    BatchServerError,
    MaxPayloadError,
    batch_refusal,
)
from jetstream_ext.log.commits import Commits, OutputsRefusedError, Source
from jetstream_ext.log.dead_letter import DeadLetter, check_dead_letter
from jetstream_ext.log.handling import GroupHandler, Handler, Handling
from jetstream_ext.log.liveness import POLL
from jetstream_ext.log.output_stream import OutputStream
from jetstream_ext.protocol.dead_letters import describe, is_too_large, letter_versions, one_line
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.options import check_function, check_int, check_seconds
from jetstream_ext.protocol.records import Failed
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchMessage

_log = get_logger("log")

# Bytes of an error: in the log, and in a record.
_LONGEST_LOGGED, _LONGEST_NOTED = 1024, 200
# Seconds without input after which a position is stored that has moved over messages that the filter excludes.
_IDLE: Final = 5.0
# After so many inputs, a commit that is on its way may go on.
_IN_A_ROW: Final = 32


@dataclass(slots=True, kw_only=True)
class Job:
    """What a worker does: the options of `exactly_once` that the workers of all partitions of a group have in common.

    Raises:
        BadSubjectError, ValueError, TypeError: An option is out of range, or of another type.
    """

    context: Context
    output_stream: str
    handler: Handler | GroupHandler
    max_messages: int
    grouped: bool
    dead_letter: DeadLetter | None
    position_may_vanish: bool
    timeout: float | None
    patience: float

    def __post_init__(self) -> None:
        check_name(self.output_stream, "stream name")
        check_function(self.handler, "handler")
        check_dead_letter(self.dead_letter)
        check_int(self.max_messages, "max_messages")
        check_seconds(self.patience, "patience")

    def output(self, record: str) -> OutputStream:
        """Return the output stream of the worker with a position on the subject `record`."""
        timeout = self.context.resolve_timeout(self.timeout)
        letters = None if self.dead_letter is None else self.dead_letter.subject
        return OutputStream(
            self.context, self.output_stream, record, letters, self.position_may_vanish, timeout, self.patience
        )


@dataclass(slots=True, eq=False)
class _Made:
    """What a call of the handler has made of its inputs; without inputs, only the position has moved."""

    inputs: list[StoredMsg]
    outputs: list[BatchMessage]
    after: int  # the position behind the inputs


@dataclass(slots=True, eq=False)
class _Failure:
    """An error in the handling of `inputs`, or without them another one."""

    error: BaseException
    inputs: list[StoredMsg] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Step:
    """What was made of the inputs that were read last, and what comes behind them."""

    made: list[_Made] = field(default_factory=list)
    failure: _Failure | None = None
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Inputs:
    """The inputs that were read, and are not handled.

    Attributes:
        position: The position behind them.
        alone: Up to this sequence they are handled one at a time, since the handling of a list has failed.
    """

    position: int
    pending: list[StoredMsg] = field(default_factory=list)
    alone: int = 0

    def behind(self, count: int) -> int:
        """Return the position behind the next `count` inputs."""
        return self.pending[count - 1].seq + 1 if count < len(self.pending) else self.position


class Work:
    """The work of one start; `check` raises if it must end, and `breathe` is called before each call of the handler.

    Attributes:
        inputs: How many inputs are handled and stored, also as dead letters.
        outputs: How many outputs are stored.
        buried: How many inputs are stored as dead letters.
    """

    def __init__(
        self,
        name: str,
        reader: Source,
        handling: Handling,
        commits: Commits,
        output: OutputStream,
        job: Job,
        *,
        stopping: asyncio.Event,
        check: Callable[[], None],
        breathe: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.inputs: int = 0
        self.outputs: int = 0
        self.buried: int = 0
        self._name = name
        self._what = f"worker {name!r}"
        self._reader = reader
        self._handling = handling
        self._commits = commits
        self._output = output
        self._job = job
        self._stopping = stopping
        self._check = check
        self._breathe = breathe
        self._read = _Inputs(commits.position)
        self._batch_limit: int | None = None  # outputs in a batch, once the server has refused a larger one

    async def run(self) -> int:
        """Work until the source ends or `stopping` is set; return the position behind what is done."""
        step = _Step()
        while not step.ended:
            step = await self._advance(step)
        return self._commits.position if self._read.pending else self._read.position

    async def _advance(self, step: _Step) -> _Step:
        """Store what a step has made, and return the next step."""
        self._check()
        following = _Step()
        if step.made and step.failure is None and self._job.max_messages > 1:
            failure, following = await self._store_and_handle(step.made)
        else:
            failure = await self._store(step.made) or step.failure
            if failure is None:
                following = await self._handle_next(_IDLE)
        if failure is None:
            return following
        unstored = [message for made in (*step.made, *following.made) for message in made.inputs]
        self._read.pending = unstored + self._read.pending
        await self._fail(failure)
        return _Step()

    async def _store_and_handle(self, made: list[_Made]) -> tuple[_Failure | None, _Step]:
        """Store what was made, and meanwhile read and handle the next inputs."""
        try:
            async with asyncio.TaskGroup() as tasks:
                storing = tasks.create_task(self._store(made))
                following = await self._handle_next(POLL)
            return storing.result(), following
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
        raise error

    # -- handle ---------------------------------------------------------------------------------------------------

    async def _handle_next(self, seconds: float) -> _Step:
        """Read the next inputs, for some seconds, unless some are pending, and handle them until one has failed."""
        step, read = _Step(), self._read
        try:
            if self._stopping.is_set():
                step.ended = True
            elif read.pending or await self._fill(step, seconds):
                await self._handle(step)
        except Exception as error:  # what was made before it is stored first
            step.failure = _Failure(error)
        return step

    async def _fill(self, step: _Step, seconds: float) -> bool:
        """Read the next inputs; return False if there are none."""
        found = await self._reader.read_for(seconds, self._job.max_messages)
        position = self._read.position = self._reader.position or 1
        if found:
            self._read.pending += found
            log_state(_log, self._what, "inputs read", inputs=len(found), position=position)
        elif found is None:
            step.ended = True
        elif seconds == _IDLE and position != self._commits.position:
            step.made.append(_Made([], [], position))
        return bool(found)

    async def _handle(self, step: _Step) -> None:
        read, failed = self._read, self._commits.failed
        first = read.pending[0].seq
        alone = first <= read.alone or (failed is not None and failed.seq == first)
        count = 1 if alone else min(len(read.pending), self._job.max_messages)
        size = count if self._job.grouped else 1
        done = 0
        try:
            while done < count:
                if done % _IN_A_ROW == 0:
                    await asyncio.sleep(0)
                if self._breathe is not None:
                    await self._breathe()
                inputs = read.pending[done : done + size]
                outputs = await self._handling.try_outputs(inputs if self._job.grouped else inputs[0])
                if isinstance(outputs, BaseException):
                    step.failure = _Failure(outputs, inputs)
                    return
                done += size
                step.made.append(_Made(inputs, outputs, read.behind(done)))
        finally:
            del read.pending[:done]

    # -- store ----------------------------------------------------------------------------------------------------

    async def _store(self, made: list[_Made]) -> _Failure | None:
        """Commit all of it, in as few batches as the server takes; what is stored leaves the list.

        If the outputs of several inputs are refused, those of fewer are tried, and in the end those of one.
        """
        most = len(made)
        while made:
            count = min(most, self._fitting(made))
            outputs = [message for each in made[:count] for message in each.outputs]
            try:
                await self._commits.store(outputs, made[count - 1].after)
            except OutputsRefusedError as refused:
                if count == 1:
                    return _Failure(refused.error, made[0].inputs)
                if isinstance(refused.error, AtomicPublishTooLargeError):
                    self._batch_limit = len(outputs) // 2
                else:
                    most = count // 2
                continue
            self.outputs += len(outputs)
            self.inputs += sum(len(each.inputs) for each in made[:count])
            del made[:count]
        return None

    def _fitting(self, made: list[_Made]) -> int:
        """Return how many of them go into the next batch, at least 1."""
        if self._batch_limit is None:
            return len(made)
        totals = accumulate(len(each.outputs) for each in made)
        return max(1, sum(total <= self._batch_limit for total in totals))

    # -- failures -------------------------------------------------------------------------------------------------

    async def _fail(self, failure: _Failure) -> None:
        """Store that the next input has failed, and pause, or store it as a dead letter; or raise the error."""
        error, letter = failure.error, self._job.dead_letter
        if letter is None or not failure.inputs or error is self._handling.misuse:
            raise error
        if len(failure.inputs) > 1:
            log_state(_log, self._what, "inputs failed", inputs=len(failure.inputs), error=error)
            self._read.alone = failure.inputs[-1].seq
            return
        message, known, text = failure.inputs[0], self._commits.failed, describe(error)
        attempts = known.attempts + 1 if known is not None and known.seq == message.seq else 1
        if attempts >= letter.attempts:
            await self._bury(message, letter.subject, attempts, text)
            return
        failed = Failed(message.seq, attempts, one_line(text, _LONGEST_NOTED))
        await self._commits.store([], message.seq, failed)
        seconds = letter.pause_after(attempts)
        log_state(_log, self._what, "input failed", seq=message.seq, attempts=attempts, seconds=seconds, error=error)
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()

    async def _bury(self, message: StoredMsg, subject: str, attempts: int, error: str) -> None:
        """Store an input as a dead letter, the largest that the stream takes, with the position behind it."""
        read, output = self._read, self._output
        after = read.behind(1)
        what = f"{self._what} on stream {output.name!r}: input {message.seq} of stream {message.stream!r}"
        refused: OutputsRefusedError | None = None
        for data, headers in letter_versions(message, attempts=attempts, error=error, worker=self._name):
            if refused is not None and not is_too_large(refused.error):
                break
            letter = BatchMessage(subject, data, headers=headers, msg_ttl=output.forever)
            try:
                await self._commits.store([letter], after)
            except OutputsRefusedError as refusal:
                refused = refusal
                continue
            del read.pending[0]
            self.inputs += 1
            self.buried += 1
            tried, text = counted(attempts, "attempt"), one_line(error, _LONGEST_LOGGED)
            _log.warning("%s was stored as a dead letter on %r after %s: %s", what, subject, tried, text)
            return
        assert refused is not None
        text = (
            f"{what} failed {counted(attempts, 'time')} ({one_line(error, 200)}), and cannot be stored as a dead letter on {subject!r}: "
            f"{refused.error}; nothing was stored, and the input stays at the position"
        )
        if isinstance(refused.error, BatchServerError):
            raise batch_refusal(refused.error, text, outcome="not_stored") from refused.error
        if isinstance(refused.error, MaxPayloadError | BadHeaderError):
            raise type(refused.error)(text) from refused.error
        raise refused.error
