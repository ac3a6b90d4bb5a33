"""Read, process, write: each input counted exactly once.

::

    claim     read the newest record of this name: its position, or the reader's start
              store it again as this start's own ────────────────── moved ─► read it again
    process   read messages, call the handler
    commit    store the outputs and a record of the new position ── moved ─► FencedError

`client.fenced_write` stores, and finds out what a commit did whose answer was lost.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from nats.nuid import NUID

from jetstream_ext.client.api import stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.client.retry import Retry
from jetstream_ext.errors import AtomicPublishTooLargeError, BadSubjectError, FencedError
from jetstream_ext.log.output import Record, check_output
from jetstream_ext.log.positions import StoredOffset
from jetstream_ext.log.reader import LogReader
from jetstream_ext.protocol.options import check_message
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.protocol.subjects import check_name, check_subject
from jetstream_ext.types import NEVER, BatchMessage

Outputs = BatchMessage | Iterable[BatchMessage] | AsyncIterable[BatchMessage] | None
"""What a handler makes of its input."""
Handler = Callable[[StoredMsg], Outputs | Awaitable[Outputs]]
"""Takes one message."""
GroupHandler = Callable[[list[StoredMsg]], Outputs | Awaitable[Outputs]]
"""Takes the messages of one commit."""

# Seconds without input after which a position is stored that has moved over what does not match the reader's filter.
_IDLE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Processed:
    """What `exactly_once` has done.

    Attributes:
        inputs: Messages read and handled.
        outputs: Messages stored.
        commits: Atomic batches stored, the claim at the start included.
        position: The next sequence to read.
    """

    inputs: int
    outputs: int
    commits: int
    position: int


async def exactly_once(
    reader: LogReader,
    output_stream: str,
    handler: Handler | GroupHandler,
    *,
    name: str,
    prefix: str,
    max_messages: int = 100,
    grouped: bool = False,
    position_may_vanish: bool = False,
    timeout: float | None = None,
    patience: float = 30.0,
) -> Processed:
    """Turn the messages of one stream into messages of another, each counted exactly once.

    The outputs and the reader's new position are stored by one atomic batch. The position is a message of the output
    stream on ``<prefix>.<name>``, and every batch expects the one before it there: a worker that is killed at any
    moment and started again goes on where its last commit ended, and of two workers with one name the one that was
    started last goes on, while the other one's next commit stores nothing and raises `FencedError`.

    ::

        async def handle(msg):
            return BatchMessage("totals." + msg.subject, b"...")

        await exactly_once(LogReader(js, "ORDERS", tail=True), "TOTALS", handle, name="sums", prefix="totals-at")

    What a handler does besides its outputs can happen more than once. A message without outputs moves the position too.

    Args:
        reader: What to read. Its start counts the first time only; then the stored position does.
        output_stream: The stream that the outputs and the position go to.
        handler: Called with a `StoredMsg`, returns its outputs: a `BatchMessage`, an iterable or async iterable of
            them, or None; or an awaitable of that. An output with an expectation of its own needs ``max_messages=1`` as
            soon as two outputs go to its subject. What it raises ends the worker; the inputs that were not committed
            are handled again the next time.
        name: The worker's name; one for each input stream and purpose. Tokens of a subject.
        prefix: The position's subject is ``<prefix>.<name>``; one of the output stream's subjects must match it.
        max_messages: Inputs in one commit at most, from 1. If their outputs are more messages than the server takes in
            a batch (1000 by default), they are split into several commits.
        grouped: `handler` is called with the list of all inputs of one commit instead. Its outputs cannot be split.
        position_may_vanish: Allow an output stream whose limits can remove the position (see Raises). A worker whose
            position is gone begins at the reader's start again.
        timeout: Seconds to wait for an answer of the output stream; None is the context's own.
        patience: Seconds that transient errors of the output stream (an election, a restart, a lost connection) may
            last.

    Returns:
        What was done, when a reader without ``tail=True`` has come to the end. With it, this ends by cancellation only.

    Raises:
        FencedError: Another worker of this name was started; this one must stop, and can store nothing more.
        StreamConfigMismatchError: The output stream lacks ``allow_atomic`` or a subject for the position, stores that
            under another one (``subject_transform``), or its limits can remove it: ``max_age`` (without
            ``allow_msg_ttl``), ``max_msgs`` or ``max_bytes`` (with discard ``old``), or a retention other than
            ``limits``. Raised before anything is read.
        PositionLostError, StreamRecreatedError: As for the reader: what the position says is gone.
        BadSubjectError: An output's subject is not one of the output stream's, or is the position's.
        AtomicPublishTooLargeError: The outputs of one input (or of a group) are more than the server takes in a batch.
        BatchError, ServerError: The server refused an output. Nothing of the batch is stored.
        UnsupportedFeatureError: The output stream's server is older than 2.12.1.
        ValueError: The stored position is that of a worker on another stream; or a number is out of range.
        TypeError: The handler returned something else.
        Exception: What the handler raises; a transient error that lasted longer than `patience`.

    Cancellation: Safe at every point, as a crash is: a commit that was sent is stored whole or not at all. Nothing is
        left behind.

    Requires: nats-server 2.12.1 and ``allow_atomic`` on the output stream (ADR-50); what the reader requires;
        permission for the output subjects, and for ``STREAM.INFO`` and ``STREAM.MSG.GET`` of the output stream.
    """
    if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
        raise ValueError(f"max_messages must be an integer from 1 up, not {max_messages!r}")
    for what, value in (("timeout", timeout), ("patience", patience)):
        if value is not None and (isinstance(value, bool) or not value > 0):
            raise ValueError(f"{what} must be a number of seconds over 0, not {value!r}")
    check_name(output_stream, "stream name")
    subject = f"{prefix}.{name}"
    check_subject(subject)
    output = _Output(reader, output_stream, subject, name, timeout, patience, may_vanish=position_may_vanish)
    return await _Worker(reader, output, handler, max_messages, grouped=grouped).run()


class _Worker:
    """One start of a worker: what it reads, and what its handler makes of that."""

    def __init__(
        self, reader: LogReader, output: _Output, handler: Handler | GroupHandler, most: int, *, grouped: bool
    ) -> None:
        self._reader = reader
        self._output = output
        self._handler = cast("Callable[[Any], Outputs | Awaitable[Outputs]]", handler)
        self._most = most
        self._grouped = grouped
        self._inputs = 0
        self._outputs = 0
        # Outputs that a batch may have, once the server has found one too large.
        self._limit: int | None = None

    async def run(self) -> Processed:
        """Work until the reader ends."""
        reader, output = self._reader, self._output
        await output.claim()
        while True:
            messages = await reader.read(self._most, _IDLE if reader.tail else 0)
            position = await reader.open()
            if messages:
                await self._store(await self._handle(messages, position))
                self._inputs += len(messages)
                continue
            if position != output.position:
                await output.commit([], position)
            if not reader.tail:
                return Processed(self._inputs, self._outputs, output.commits, position)

    async def _handle(self, messages: list[StoredMsg], position: int) -> list[tuple[list[BatchMessage], int]]:
        """Return outputs, and the position behind the input that they belong to."""
        if self._grouped:
            return [(await self._made_of(messages), position)]
        done = [(await self._made_of(message), message.seq + 1) for message in messages]
        done[-1] = (done[-1][0], position)
        return done

    async def _made_of(self, given: StoredMsg | list[StoredMsg]) -> list[BatchMessage]:
        made = self._handler(given)
        if inspect.isawaitable(made):
            made = await made
        if made is None:
            return []
        if isinstance(made, BatchMessage):
            outputs = [made]
        elif isinstance(made, AsyncIterable):
            outputs = [message async for message in made]
        else:
            outputs = list(made)
        for message in outputs:
            check_message(message)
            await self._output.check_subject(message.subject)
        return outputs

    async def _store(self, parts: list[tuple[list[BatchMessage], int]]) -> None:
        """Commit all of it, in as few batches as the server takes."""
        while parts:
            count = self._fitting(parts)
            outputs = [message for made, _ in parts[:count] for message in made]
            try:
                await self._output.commit(outputs, parts[count - 1][1])
            except AtomicPublishTooLargeError:
                if count == 1 or not outputs:
                    raise
                self._limit = len(outputs) // 2
            else:
                self._outputs += len(outputs)
                del parts[:count]

    def _fitting(self, parts: Sequence[tuple[list[BatchMessage], int]]) -> int:
        """Return how many of `parts` go into the next batch, 1 at least."""
        if self._limit is None:
            return len(parts)
        total = 0
        for count, (made, _) in enumerate(parts):
            total += len(made)
            if total > self._limit:
                return max(1, count)
        return len(parts)


class _Output:
    """The outputs and the position of one start of a worker."""

    def __init__(
        self,
        reader: LogReader,
        stream: str,
        subject: str,
        name: str,
        timeout: float | None,
        patience: float,
        *,
        may_vanish: bool,
    ) -> None:
        self._reader = reader
        self._context = Context(reader.context)
        self._stream = stream
        self._subject = subject
        self._name = name
        self._timeout = self._context.timeout if timeout is None else float(timeout)
        self._patience = float(patience)
        self._may_vanish = may_vanish
        self._worker = NUID().next().decode()
        self._state: StreamState | None = None
        self._writer: FencedWriter | None = None
        self.position = 0
        """The position of the newest record."""
        self.commits = 0
        """How many records this start has stored."""

    async def claim(self) -> None:
        """Take the name over: go to the stored position, and store it again as this start's own."""
        version = self._context.connection.server_version
        retention = check_output(await self._look(), self._subject, version, may_vanish=self._may_vanish)
        self._writer = FencedWriter(
            self._context,
            self._stream,
            self._subject,
            name=f"worker {self._name!r}",
            timeout=self._timeout,
            patience=self._patience,
            rollup=retention.rollup,
            msg_ttl=NEVER if retention.never else None,
        )
        while True:
            stored = await self._writer.read()
            if stored is not None:
                record = Record.decode(stored)
                self._reader.seek(StoredOffset(self._name, record.stream, record.created, record.seq))
            try:
                await self.commit([], await self._reader.open())
                return
            except FencedError:
                continue  # a worker has committed since, or another one is starting: the last one to claim goes on

    async def commit(self, outputs: Sequence[BatchMessage], position: int) -> None:
        """Store outputs and a position, all or nothing."""
        reader = self._reader
        assert reader.created is not None
        assert self._writer is not None
        record = Record(reader.stream, reader.created, position, self._worker, self.commits)
        try:
            await self._writer.store(outputs, record.encode())
        except RecordMovedError as moved:
            raise self._fenced(moved.record) from moved
        self.position = position
        self.commits += 1

    async def check_subject(self, subject: str) -> None:
        """Refuse the subject of an output that would not be part of the batch."""
        if subject == self._subject:
            raise BadSubjectError(
                f"subject {subject!r} is that of the worker's position; nothing else may be stored there"
            )
        if self._state is None or not self._state.stores(subject):
            state = await self._look()
            if not state.stores(subject):
                raise BadSubjectError(f"subject {subject!r} is not one of the output stream {self._stream!r}")

    async def _look(self) -> StreamState:
        retry = Retry(self._patience)
        while True:
            try:
                self._state = await stream_state(self._context, self._stream, self._timeout)
                return self._state
            except Exception as error:
                await retry.pause(error)

    def _fenced(self, stored: StoredMsg | None) -> FencedError:
        what = f"worker {self._name!r} on stream {self._stream!r}"
        if stored is None:
            return FencedError(f"{what}: its position was removed from {self._subject!r}", name=self._name)
        seq = Record.decode(stored).seq
        return FencedError(
            f"{what}: another worker of this name was started and is at {seq}; this one must stop, and can store nothing "
            "more",
            name=self._name,
            seq=seq,
        )
