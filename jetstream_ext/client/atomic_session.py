"""One atomic batch on a connection: `protocol.atomic` decides; this module sends, waits and asks for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Any, Final

import nats.errors
from nats.nuid import NUID

from jetstream_ext.client import telemetry
from jetstream_ext.client.api import find_server, forget_stream, remember_ack
from jetstream_ext.client.base_connection import (
    InboxHandler,
    InboxSubscription,
    weakly,
)
from jetstream_ext.client.connection import Context, connection_of
from jetstream_ext.client.outcome import resolve
from jetstream_ext.client.turns import Turn, queued
from jetstream_ext.errors import BadSubjectError, MessageTooLargeError, RequestTimeoutError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.atomic import AtomicBatchMachine, State
from jetstream_ext.protocol.atomic_wire import Block, Encoded
from jetstream_ext.protocol.feature_table import ATOMIC
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.protocol.options import as_message, check_messages, check_seconds
from jetstream_ext.protocol.outcome import Batch
from jetstream_ext.protocol.trace_context import TraceContext
from jetstream_ext.types import BatchAck, BatchMessage, Entry

# Payload bytes per write of `fill`: the server works on one block while the next is encoded.
_BLOCK: Final = 1 << 15
# The default timeout of `resolve`, in timeouts of one reply: an election takes longer than a reply.
_RESOLVE_TIMEOUTS: Final = 4

_END: Final = object()
_Waiter = asyncio.Future[None]
"""Done when the reply has come, or the batch is over."""


class AtomicSession:
    """One atomic batch on a connection.

    A deadline is that of one call, or of one block of a source: until its messages are sent, and their reply has come. A
    batch that is sent `in_one_go` has one, to which the time of its source does not count.
    """

    _inbox: InboxSubscription | None = None

    def __init__(
        self, context: Context, timeout: float | None = None, *, in_one_go: bool = False, quiet: bool = False
    ) -> None:
        self._connection = connection_of(context.nc)
        self.machine: AtomicBatchMachine = AtomicBatchMachine(
            NUID().next().decode(),
            inbox_size=self._connection.inbox_size,
            prefix=context.prefix,
            in_one_go=in_one_go,
            quiet=quiet,
        )
        self._context = context
        self._timeout = context.resolve_timeout(timeout)
        self._until: float | None = None  # the deadline of a batch in one go
        self._in_one_go = in_one_go
        self._queue: deque[Turn] = deque()  # callers that wait; one that sends at once overtakes them
        self._waiters: dict[int, _Waiter] = {}
        self._answer: tuple[_Waiter, float] | None = None  # to the commit, which is awaited until this time
        self._session = 0  # of the connection that the commit was written to

    # -- operations -----------------------------------------------------------------------------------------------

    def call(self, kind: telemetry.Kind, subject: str | None = None, *, observed: bool = True) -> telemetry.Call:
        """Begin a call on the batch, about one message of `subject` or any number of messages."""
        machine = self.machine
        return telemetry.Call(
            kind, self._connection, machine.batch_id, lambda: machine.server.stream, subject=subject, observed=observed
        )

    async def add(self, message: BatchMessage, trace: TraceContext | None = None) -> None:
        """Send a message; wait for its reply if it asks for one."""
        deadline = self._deadline()
        encoded = await self._prepared(message, deadline, trace)
        await self._send(self.machine.add(encoded), deadline)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry], call: telemetry.Call) -> None:
        """Send `messages`, and wait for the last reply that they ask for."""
        asked, deadline = await self.fill(messages, call)
        if asked > self.machine.staged:
            self.machine.check_open()
            await self._reply(asked, self._expect(asked), deadline)
            self.machine.check_added()

    async def fill(self, messages: Iterable[Entry] | AsyncIterable[Entry], call: telemetry.Call) -> tuple[int, float]:
        """Send `messages` in blocks.

        Returns the highest sequence among them that asks for a reply, or 0, and the deadline of the last block.
        """
        check_messages(messages)
        source: Any = aiter(messages) if isinstance(messages, AsyncIterable) else iter(messages)
        is_async, clock = isinstance(messages, AsyncIterable), asyncio.get_running_loop().time
        asked, deadline = 0, 0.0
        while True:
            began = clock()
            entry = await anext(source, _END) if is_async else next(source, _END)
            self.postpone(clock() - began)
            if entry is _END:
                return asked, deadline
            # From an async source one write each: nats-py's buffer joins them, and a slow one must not wait for a full block.
            block, deadline = await self._send_block(iter(()) if is_async else source, entry, call)
            asked = max(asked, block.last_asked)
            if not is_async:
                await asyncio.sleep(0)  # lets nats-py's flusher write

    async def commit(self, message: BatchMessage | None, trace: TraceContext | None = None) -> BatchAck:
        """Commit, with or without a last message."""
        await self.send_commit(message, trace)
        return await self.committed()

    async def send_commit(self, message: BatchMessage | None, trace: TraceContext | None = None) -> None:
        """Send the commit; `committed` waits for the answer."""
        deadline = self._deadline()
        with queued(self._queue, Turn()) as turn:
            last = await self._in_turn(turn, message, deadline, trace)
            block = self.machine.commit(last)
        self._session = self._connection.session
        self._answer = self._expect(block.awaited), deadline
        self._write(block)
        self._connection.push()

    @property
    def answered(self) -> bool:
        """Whether `committed` will return or raise at once."""
        return self._answer is not None and self._answer[0].done()

    async def committed(self) -> BatchAck:
        """Wait for the answer to the commit that was sent."""
        assert self._answer is not None
        try:
            await self._reply(self.machine.sent, *self._answer)
        except asyncio.CancelledError:
            self._abandon_commit()
            raise
        ack = self.machine.result()
        remember_ack(self._context, ack)
        return ack

    def discard(self) -> None:
        self.machine.discard()
        self._settle()

    async def finish(self) -> None:
        """Do what a clean exit of ``async with`` does."""
        if self.machine.finish():
            try:
                await self.commit(None)
            finally:
                self.discard()  # a refused commit must leave nothing open after the block
        self._settle()

    async def resolve(self, timeout: float | None, *, seen: int = 0, of_bucket: bool = False) -> BatchAck | None:
        """Return the ack of the batch if it is stored, or None; the stream had a sequence `seen` before."""
        machine = self.machine
        timeout = _RESOLVE_TIMEOUTS * self._timeout if timeout is None else check_seconds(timeout, "timeout")
        if not machine.check_unresolved():
            return machine.ack
        server, batch_id, size = machine.server, machine.batch_id, machine.size
        write: Batch | None = None
        if server.stream is not None:
            last, staged = machine.last_subject, machine.staged > 0
            after = max(server.last_seq, seen)
            oldest_first = of_bucket and bool(server.stream.config.get("deny_delete"))
            write = Batch(last, size, server.stream, after, batch_id, staged, self._session, oldest_first=oldest_first)
        ack = await resolve(self._context, write, timeout, batch_id=batch_id, size=size, acked=machine.staged)
        machine.resolved(ack)
        return machine.ack

    # -- opening and sending --------------------------------------------------------------------------------------

    def _deadline(self) -> float:
        deadline = asyncio.get_running_loop().time() + self._timeout
        if not self._in_one_go:
            return deadline
        if self._until is None:
            self._until = deadline
        return self._until

    def postpone(self, seconds: float) -> None:
        """Leave out the time that a source took, of this batch or the next one."""
        if self._until is not None:
            self._until += seconds
        if self._answer is not None:
            waiter, deadline = self._answer
            self._answer = waiter, deadline + seconds

    def _encoded(self, message: BatchMessage, trace: TraceContext | None) -> Encoded:
        machine = self.machine
        machine.limit_messages(self._connection.max_payload)
        try:
            return machine.prepare(message if trace is None else trace.added_to(message, machine.largest))
        except (BadSubjectError, MessageTooLargeError):
            self._look_again()
            raise

    def _look_again(self) -> None:
        """Let the next batch look the stream up again: its subjects or its limit may have changed since."""
        if (stream := self.machine.server.stream) is not None:
            forget_stream(self._context, stream.name)

    async def _prepared(self, message: BatchMessage, deadline: float, trace: TraceContext | None) -> Encoded:
        """Check and encode a message; return when it can be added at once, or raise RequestTimeoutError.

        It then is its turn, the connection has room, and the batch is open and has its subject. A message that gives up
        before is not part of the batch, and a batch that it was the first of can still be one of any stream.
        """
        if self.machine.state is State.OPEN and self._connection.ready and not self._queue:
            return self._encoded(message, trace)
        with queued(self._queue, Turn()) as turn:
            encoded = await self._in_turn(turn, message, deadline, trace)
            assert encoded is not None
            return encoded

    async def _in_turn(
        self, turn: Turn, message: BatchMessage | None, deadline: float, trace: TraceContext | None
    ) -> Encoded | None:
        """Do what `_prepared` says, with a turn that the caller keeps; without a message, return when it can commit."""
        machine, connection, clock = self.machine, self._context.connection, asyncio.get_running_loop().time
        began = clock()
        while True:
            encoded = None if message is None else self._encoded(message, trace)
            has_come = self._queue[0] is turn
            if message is None and has_come:
                machine.check_commit(None)
            self._check_usable()
            try:
                if clock() >= deadline:
                    raise RequestTimeoutError("the time is over")
                if not has_come:
                    await turn.wait(deadline)
                elif not connection.has_room:
                    await self._wait_room(deadline - clock())
                elif machine.state is State.NEW and message is not None and encoded is not None:
                    await self._open(encoded, message, deadline)
                else:
                    return encoded
            except RequestTimeoutError as late:
                what = "the commit" if message is None else "a message"
                text = f"batch {machine.batch_id}: {what} was not sent within {clock() - began:.3g} s: {late}"
                raise RequestTimeoutError(text) from late

    async def _wait_room(self, timeout: float) -> None:
        try:
            await self._connection.wait_room(timeout, over=lambda: self.machine.ended)
        except nats.errors.Error as error:
            if isinstance(error, RequestTimeoutError) or self.machine.state is State.NEW:
                raise
            self._write_failed(error)

    async def _open(self, first: Encoded, message: BatchMessage, deadline: float) -> None:
        """Open the batch for its first message, unless the connection has no room for it any more."""
        connection, context, clock = self._connection, self._context, asyncio.get_running_loop().time
        # A server before 2.12 stores the messages of a batch as separate ones.
        server = await find_server(context, message.subject, message.stream, max(0.0, deadline - clock()), ATOMIC)
        handler = InboxHandler(weakly(self._receive), weakly(self._disconnected))
        inbox = await connection.inbox(handler, tail=".*", timeout=max(0.0, deadline - clock()))
        try:
            if not connection.has_room:  # a small buffer is full of the subscription
                await self._wait_room(deadline - clock())
            connection.check_usable()
            if clock() >= deadline:
                raise RequestTimeoutError("no answer to the lookups")
            self.machine.open(first, server, inbox.subject)
            self._inbox = inbox
            self._wake_queue()
        finally:
            if self._inbox is None:
                inbox.close()

    def _wake_queue(self) -> None:
        """Let all callers look again: the batch was opened, or has ended."""
        for turn in self._queue:
            turn.wake()

    def _check_usable(self) -> None:
        """Raise what ended the batch, or nats-py's error if nothing can be written."""
        try:
            self._connection.check_usable()
        except nats.errors.ConnectionReconnectingError:
            self._disconnected()  # nats-py has noticed the loss, although its reader task has not ended yet
            self.machine.check_open()
            raise

    async def _send_block(self, source: Iterator[Entry], entry: object, call: telemetry.Call) -> tuple[Block, float]:
        """Send one block, and return it with its deadline; raise the error that stopped it before the end of `source`."""
        machine, deadline = self.machine, self._deadline()
        first = await self._prepared(as_message(entry), deadline, call.trace)
        before = machine.size
        if (trace := call.trace) is not None:
            source = (trace.carried_by(entry, machine.largest) for entry in source)
        clock = asyncio.get_running_loop().time
        began = clock()
        # In the queue, so that a call that the source makes, in an eager task, has its turn after the block.
        with queued(self._queue, Turn()):
            block = machine.add_many(source, _BLOCK, first)
        self.postpone(clock() - began)
        deadline += clock() - began
        call.messages += machine.size - before
        if block.messages:
            await self._send(block, deadline)
        if block.stopped is not None and not isinstance(block.stopped, StopIteration):
            if isinstance(block.stopped, BadSubjectError | MessageTooLargeError):
                self._look_again()
            raise block.stopped
        return block, deadline

    async def _send(self, block: Block, deadline: float) -> None:
        """Write a block, and wait for the reply that it must await; the next call waits for room in the buffer."""
        self.machine.check_added()  # the source may have ended the batch
        if not block.messages:
            return
        waiter = self._expect(block.awaited) if block.awaited else None
        self._write(block)
        if waiter is not None:
            await self._reply(block.awaited, waiter, deadline)
        self.machine.check_added()

    def _write(self, block: Block) -> None:
        try:
            self._connection.write_nowait(block.data, block.messages, block.size)
        except nats.errors.Error as error:
            self._write_failed(error)

    def _write_failed(self, error: nats.errors.Error) -> None:
        """End the batch, whose error the caller raises."""
        self.machine.lost(f"writing to the connection failed ({error!r})")
        self._settle()

    def _abandon_commit(self) -> None:
        self.machine.commit_cancelled()
        self._settle()

    # -- replies --------------------------------------------------------------------------------------------------

    def _expect(self, seq: int) -> _Waiter:
        waiter = self._waiters[seq] = asyncio.get_running_loop().create_future()
        return waiter

    def _forget(self, seq: int, waiter: _Waiter | None) -> None:
        if self._waiters.get(seq) is waiter:
            self._waiters.pop(seq, None)

    async def _reply(self, seq: int, waiter: _Waiter, deadline: float) -> None:
        """Wait for a reply, or the end of the batch, until `deadline`."""
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            silent = self._connection.why_silent(self.machine.subjects)
            self.machine.lost(f"no answer within {self._timeout:g} s{silent}")
        finally:
            self._forget(seq, waiter)
            self._settle()

    def _receive(self, received: list[Frame]) -> None:
        for frame in received:
            subject, header, payload = frames.parts(frame)
            seq = parse_number(subject.rpartition(b".")[2])
            if seq is None or self.machine.is_of_other(payload):
                continue  # not a reply subject of this batch, or not its stream
            self.machine.receive(seq, header, payload)
            waiter = self._waiters.pop(seq, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._settle()

    def _disconnected(self) -> None:
        self.machine.disconnected(reply_awaited=bool(self._waiters))
        self._settle()

    def __del__(self) -> None:
        if self._inbox is not None:
            self.machine.discard()
            self._inbox.owner_dropped(f"AtomicBatch {self.machine.batch_id}", [self._say_farewell])

    def _say_farewell(self) -> None:
        """End the batch on the server, if it has ended only here."""
        self._connection.write_if_usable(self.machine.farewell())  # otherwise the server ends it after 10 s

    def _settle(self) -> None:
        """Close the inbox and wake every waiter if the batch has ended."""
        if not self.machine.ended:
            return
        self._say_farewell()
        if self.machine.state is State.FAILED:
            self._look_again()
        self._wake_queue()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        if self._inbox is not None:
            self._inbox.close()
