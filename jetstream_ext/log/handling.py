"""The calls of a worker's handler, and what they return as messages that its output stream can store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from jetstream_ext.client import telemetry
from jetstream_ext.errors import BadSubjectError
from jetstream_ext.log.observed import observed_handling
from jetstream_ext.log.output_stream import OutputStream
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.headers import MSG_ID
from jetstream_ext.protocol.options import ENTRY, as_message, is_bulk, is_one_message, kind_of, payload_bytes
from jetstream_ext.protocol.subjects import check_type
from jetstream_ext.text import numbered
from jetstream_ext.types import BatchMessage, Entry, own_headers

Outputs = Entry | Iterable[Entry] | AsyncIterable[Entry] | None
Handler = Callable[[StoredMsg], Outputs | Awaitable[Outputs]]
GroupHandler = Callable[[list[StoredMsg]], Outputs | Awaitable[Outputs]]


class Handling:
    """Calls the handler of the worker `name`, in the task that made this object.

    With `goes_on`, the worker goes on after errors, so a cancellation of the worker is told from one that the handler has raised.

    Attributes:
        misuse: The error of a handler that returned something else than outputs: it is the program's, and not one of the
            input.
    """

    def __init__(self, handler: Handler | GroupHandler, output: OutputStream, name: str, *, goes_on: bool) -> None:
        self.misuse: TypeError | None = None
        self._handler = cast("Callable[[Any], Any]", handler)
        self._output = output
        self._name = name
        self._goes_on = goes_on
        self._task = asyncio.current_task()
        self._cancelled = self._task.cancelling() if self._task is not None else 0  # before the worker began

    async def try_outputs(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage] | BaseException:
        """Return the outputs of an input or of a list, or the error with which its handling has failed.

        Raises:
            asyncio.CancelledError: The worker was cancelled; with `goes_on`, whatever the handler has made of that.
            KeyboardInterrupt, SystemExit: The handler has raised it.
            Exception: The output stream could not be looked up.
        """
        try:
            observer = telemetry.observer
            outputs = await (self._run(given) if observer is None else self._observed(observer, given))
        except (Exception, asyncio.CancelledError) as error:
            if self._cancelled_by(error):
                raise asyncio.CancelledError from error
            return error
        if self._goes_on and self._cancelled_by(None):
            raise asyncio.CancelledError
        try:
            for message in outputs:
                if not self._is_known(message):
                    await self._check(message, given)
        except (TypeError, ValueError) as error:  # a BadSubjectError is a ValueError
            return error
        return outputs

    def _cancelled_by(self, error: BaseException | None) -> bool:
        if not self._goes_on:
            return isinstance(error, asyncio.CancelledError)
        return self._task is not None and self._task.cancelling() > self._cancelled

    async def _observed(self, observer: telemetry.Observer, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        with observed_handling(observer, self._output.context.connection, self._name, given) as operation:
            outputs = await self._run(given)
            trace = operation.trace if outputs else None
            return outputs if trace is None else [trace.added_to(message, self._output.largest) for message in outputs]

    async def _run(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        made = self._handler(given)
        if type(made) is BatchMessage:
            return [_without_id(made)]
        if inspect.isawaitable(made) or isinstance(made, AsyncIterable):
            # In a task of its own, only a cancellation of the worker counts in `Task.cancelling` of this one. Before Python 3.13,
            # so does a TaskGroup that has failed.
            made = await (asyncio.create_task(_collected(made)) if self._goes_on else _collected(made))
        if made is None:
            return []
        if is_one_message(made):
            entries = [made]
        elif not is_bulk(made):
            raise self._misused(given, kind_of(made))
        else:
            entries = list(made)
        outputs = []
        for index, entry in enumerate(entries):
            try:
                outputs.append(_without_id(as_message(entry)))
            except TypeError:
                item = f"a {type(made).__name__} whose item {index} is {kind_of(entry)}"
                raise self._misused(given, kind_of(entry) if entry is made else item) from None
        return outputs

    def _misused(self, given: StoredMsg | list[StoredMsg], what: str) -> TypeError:
        self.misuse = TypeError(
            f"{self._at(given)}: the handler returned {what}; it must return None, a message ({ENTRY}), or an iterable or async "
            "iterable of messages; nothing of it is stored; correct the handler, and start the worker again"
        )
        return self.misuse

    def _is_known(self, message: BatchMessage) -> bool:
        subject: object = message.subject
        return isinstance(subject, str) and subject in self._output.known and type(message.payload) is bytes

    async def _check(self, message: BatchMessage, given: StoredMsg | list[StoredMsg]) -> None:
        subject = message.subject
        try:
            check_type(subject, "subject")
            payload_bytes(message.payload, "the payload on subject", subject)
        except TypeError as error:
            raise TypeError(f"{self._at(given)}: an output of the handler cannot be stored: {error}") from None
        output = self._output
        if subject == output.record:
            raise BadSubjectError(
                f"subject {subject!r} holds the position of worker {self._name!r}; use another subject"
            )
        if not await output.stores(subject):
            text = f"output stream {output.name!r} does not store subject {subject!r}, so nothing was stored"
            raise BadSubjectError(f"{text}; add the subject to the stream, or use another one")

    def _at(self, given: StoredMsg | list[StoredMsg]) -> str:
        first, last = (given[0], given[-1]) if isinstance(given, list) else (given, given)
        inputs = numbered(first.seq, last.seq, "input")
        return f"worker {self._name!r} on stream {self._output.name!r}: {inputs} of stream {first.stream!r}"


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
