"""The calls of a worker's handler, and what they return as messages that its output stream can store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from jetstream_ext.client import telemetry
from jetstream_ext.errors import BadSubjectError
from jetstream_ext.log.job import Job
from jetstream_ext.log.observed import observed_handling
from jetstream_ext.log.state import State
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.options import ENTRY, as_message, is_bulk, is_one_message, kind_of, payload_bytes
from jetstream_ext.protocol.subjects import check_type
from jetstream_ext.text import numbered
from jetstream_ext.types import BatchMessage, Entry, own_headers

Outputs = Entry | Iterable[Entry] | AsyncIterable[Entry] | None
Returned = Outputs | Awaitable[Outputs]
Handler = (
    Callable[[StoredMsg], Returned]
    | Callable[[list[StoredMsg]], Returned]
    | Callable[[StoredMsg, State], Returned]
    | Callable[[list[StoredMsg], State], Returned]
)
"""Takes an input or a list of them, and the state if the worker has one."""


_PLAIN: Final = frozenset({type(None), tuple, list})


class Handling:
    """Calls the handler of a worker, in the task that made this object.

    A worker with dead letters goes on after errors, so a cancellation of the worker is told from one that the handler has raised.

    Attributes:
        misuse: The error of a handler that returned something else than outputs: it is the program's, and not one of the
            input.
        state: What the handler gets besides an input, if the worker has a state.
    """

    def __init__(self, job: Job) -> None:
        self.misuse: TypeError | None = None
        self.state: State | None = None
        self._job = job
        self._handler = job.handler
        self._goes_on = job.dead_letter is not None
        self._task = asyncio.current_task()
        self._cancelled = self._task.cancelling() if self._task is not None else 0  # before the worker began

    async def try_outputs(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage] | BaseException:
        """Return the outputs of an input or of a list, or the error with which its handling has failed.

        Raises:
            asyncio.CancelledError: The worker was cancelled; with dead letters, whatever the handler has made of that.
            KeyboardInterrupt, SystemExit: The handler has raised it.
            Exception: The output stream could not be looked up.
        """
        job = self._job
        try:
            outputs = await (self._run(given) if telemetry.observer is None else self._observed(given))
        except (Exception, asyncio.CancelledError) as error:
            if self._cancelled_by(error):
                raise asyncio.CancelledError from error
            return error
        if self._goes_on and self._cancelled_by(None):
            raise asyncio.CancelledError
        try:
            for message in outputs:
                subject: object = message.subject
                if not (isinstance(subject, str) and subject in job.known and type(message.payload) is bytes):
                    await self._check(message, given)
        except (TypeError, ValueError) as error:  # a BadSubjectError is a ValueError
            return error
        return outputs

    async def _observed(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        job = self._job
        with observed_handling(job.context.connection, job.name, given) as operation:
            outputs = await self._run(given)
            trace = operation.trace if operation is not None and outputs else None
            if trace is None:
                return outputs
            most, own = job.context.connection.max_payload, job.state.max_msg_size
            room = most if own is None else min(most, own)
            return [trace.added_to(message, room) for message in outputs]

    def _cancelled_by(self, error: BaseException | None) -> bool:
        if not self._goes_on:
            return isinstance(error, asyncio.CancelledError)
        return self._task is not None and self._task.cancelling() > self._cancelled

    async def _run(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        made = self._handler(given) if self.state is None else self._handler(given, self.state)
        kind = type(made)
        if kind is BatchMessage:
            return [_without_id(made)]
        if kind not in _PLAIN and (inspect.isawaitable(made) or isinstance(made, AsyncIterable)):
            made = await (self._in_a_task(made) if self._goes_on else _collected(made))
        if made is None:
            return []
        one = is_one_message(made)
        if not one and not is_bulk(made):
            raise self._misused(given, kind_of(made))
        outputs = []
        for index, entry in enumerate([made] if one else list(made)):
            try:
                outputs.append(_without_id(as_message(entry)))
            except TypeError:
                item = f"a {type(made).__name__} whose item {index} is {kind_of(entry)}"
                raise self._misused(given, kind_of(made) if one else item) from None
        return outputs

    async def _in_a_task(self, made: Awaitable[Any] | AsyncIterable[Any]) -> Any:
        """Return what was made, so that only a cancellation of the worker counts in `Task.cancelling` of this one.

        Before Python 3.13, so does a TaskGroup that has failed.
        """
        task = asyncio.create_task(_collected(made))
        if inspect.iscoroutine(made):
            task.add_done_callback(lambda _: made.close())  # it may have been cancelled before it began
        return await task

    def _misused(self, given: StoredMsg | list[StoredMsg], what: str) -> TypeError:
        self.misuse = TypeError(
            f"{self._at(given)}: the handler returned {what}; it must return None, a message ({ENTRY}), or an iterable or async "
            "iterable of messages; nothing of it is stored; correct the handler, and start the worker again"
        )
        return self.misuse

    async def _check(self, message: BatchMessage, given: StoredMsg | list[StoredMsg]) -> None:
        job, subject = self._job, message.subject
        try:
            check_type(subject, "subject")
            payload_bytes(message.payload, "the payload on subject", subject)
        except TypeError as error:
            raise TypeError(f"{self._at(given)}: an output of the handler cannot be stored: {error}") from None
        if subject == job.record:
            raise BadSubjectError(f"subject {subject!r} holds the position of {job.what}; use another subject")
        if job.in_state(subject):
            raise BadSubjectError(
                f"subject {subject!r} is among those of state={job.keeps_state!r}; change the state, or use another subject"
            )
        if not await job.stores(subject):
            text = f"output stream {job.output_stream!r} does not store subject {subject!r}, so nothing was stored"
            raise BadSubjectError(f"{text}; add the subject to the stream, or use another one")

    def _at(self, given: StoredMsg | list[StoredMsg]) -> str:
        first, last = (given[0], given[-1]) if isinstance(given, list) else (given, given)
        inputs = numbered(first.seq, last.seq, "input")
        return f"{self._job.where}: {inputs} of stream {first.stream!r}"


async def _collected(made: Awaitable[Any] | AsyncIterable[Any]) -> Any:
    if inspect.isawaitable(made):
        made = await made
    return [entry async for entry in made] if isinstance(made, AsyncIterable) else made


def _without_id(message: BatchMessage) -> BatchMessage:
    """Return a message without an input's message id among its headers, as the fence does that work."""
    headers = message.headers
    if headers is not None and isinstance(headers, Mapping) and MSG_ID in headers:
        return replace(message, headers=own_headers([pair for pair in headers.items() if pair[0] != MSG_ID]))
    return message
