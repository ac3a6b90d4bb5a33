"""One atomic batch on the wire: the shell around `protocol.atomic`, for everything that sends batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

import nats.errors

from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.client.lookup import api_level, lookup_stream, remember_ack
from jetstream_ext.client.resolve import Question, find_earlier, resolve
from jetstream_ext.errors import (
    AtomicPublishDuplicateMessageIDError,
    BatchClosedError,
    BatchError,
    EmptyBatchError,
    JetStreamExtError,
    UnsupportedFeatureError,
)
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.atomic import ATOMIC_LEVEL, AtomicBatchMachine, State, Step
from jetstream_ext.protocol.atomic_messages import Encoder
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.protocol.options import as_message, check_seconds
from jetstream_ext.types import BatchAck, BatchMessage, Entry

# Payload bytes per write of a bulk: the server works on one block while the next is encoded.
_BLOCK: Final = 1 << 15
# How many times the timeout of one reply finding out may take: an election takes longer than a reply.
_RESOLVE_PATIENCE: Final = 4

_Waiter = asyncio.Future[JetStreamExtError | None]
"""Done when there is a reply or the batch is over: with the refusal of this one message, if it was that."""


class AtomicWire:
    """One atomic batch.

    Args:
        js: The context.
        batch_id: A checked id.
        timeout: Seconds to wait for a reply.
        ack_first: As for `AtomicBatchMachine`.
        ack_every: As for `AtomicBatchMachine`.
        hold_back: As for `AtomicBatchMachine`.
    """

    def __init__(
        self,
        js: Context,
        batch_id: str,
        timeout: float,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        hold_back: bool = False,
    ) -> None:
        self.batch_id = batch_id
        self.machine: AtomicBatchMachine | None = None
        """The batch, once there was a message."""
        self.discarded: bool = False
        self._js = js
        self._timeout = timeout
        self._ack_first = ack_first
        self._ack_every = ack_every
        self._hold_back = hold_back
        self._inbox: InboxSubscription | None = None
        self._waiters: dict[int, _Waiter] = {}
        self._commit: _Waiter | None = None
        self._opening = asyncio.Lock()
        self._question = Question(None, js.connection.session)
        self._server_version = ""

    # -- what can be done ---------------------------------------------------------------------------------------

    async def add(self, message: BatchMessage, ack: bool | None) -> None:
        """Send a message; wait for its reply if it wants one."""
        machine = self.machine or await self._open(message)
        machine.check_open()
        self._js.connection.check_usable()
        step = machine.add(message, ack)
        if step is not None:
            await self._send([step])

    async def fill(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> int:
        """Send `messages` in blocks; return the highest sequence among them that asked for a reply, or 0."""
        acked = 0
        if isinstance(messages, AsyncIterable):
            # One write each: nats-py's buffer joins them, and a slow source is not held back by a block.
            async for entry in messages:
                message = as_message(entry)
                machine = self.machine or await self._open(message)
                asked, stopped = await self._block(machine, iter((message,)))
                acked = max(acked, asked)
                if stopped is not None and not isinstance(stopped, StopIteration):
                    raise stopped
            return acked
        source = iter(messages)
        try:
            first = as_message(next(source))
        except StopIteration:
            return 0
        source = chain[Entry]((first,), source)
        machine = self.machine or await self._open(first)
        while True:
            asked, stopped = await self._block(machine, source)
            acked = max(acked, asked)
            if isinstance(stopped, StopIteration):
                return acked
            if stopped is not None:
                raise stopped
            await asyncio.sleep(0)  # nats-py's flusher has its turn

    async def reply_to(self, seq: int) -> None:
        """Wait for the reply to a message that was sent, if it has not come."""
        machine = self.machine
        if machine is not None and seq > machine.staged:
            machine.check_open()
            await self._reply(seq, self._expect(seq))
            self._check_open()

    async def commit(self, message: BatchMessage | None) -> BatchAck:
        """Commit, with a last message or none."""
        await self.send_commit(message)
        return await self.committed()

    async def send_commit(self, message: BatchMessage | None) -> None:
        """Send the commit, with a last message or none; `committed` waits for the answer."""
        if message is None and self.machine is None and not self.discarded:
            raise EmptyBatchError("there is nothing to commit", batch_id=self.batch_id, outcome="not_stored")
        machine = self.machine or await self._open(message)
        machine.check_open()
        self._check_usable()
        steps = machine.commit(message)
        self._question = replace(self._question, session=self._js.connection.session)
        self._commit = self._expect(machine.sent)
        try:
            await self._write(*self._encode(steps))
        except asyncio.CancelledError:
            self._give_up_commit()
            raise

    @property
    def answered(self) -> bool:
        """Whether `committed` will return or raise at once."""
        return self._commit is not None and self._commit.done()

    async def committed(self) -> BatchAck:
        """Wait for the answer to the commit that was sent."""
        machine, waiter = self.machine, self._commit
        assert machine is not None
        assert waiter is not None
        try:
            await self._reply(machine.sent, waiter)
        except asyncio.CancelledError:
            self._give_up_commit()
            raise
        if machine.ack is None:
            machine.check_open()
        assert machine.ack is not None
        remember_ack(self._js, machine.ack)
        return machine.ack

    def discard(self) -> None:
        """Give the batch up."""
        self.discarded = True
        if self.machine is not None:
            self.machine.discard()
            self._settle()

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack that a batch has or should have had, or None: nothing of it is stored."""
        patience = _RESOLVE_PATIENCE * self._timeout if timeout is None else check_seconds(timeout, "timeout")
        machine = self.machine
        if machine is None or machine.state in (State.OPEN, State.COMMITTING):
            if self.discarded:
                return None
            raise BatchError(f"batch {self.batch_id} has not ended: commit or discard it", batch_id=self.batch_id)
        if machine.state is State.UNKNOWN:
            machine.resolved(await resolve(self._js, self._question, machine, patience))
        elif machine.state is State.FAILED:
            if isinstance(machine.error, AtomicPublishDuplicateMessageIDError):
                machine.resolved(await find_earlier(self._js, self._question, machine, patience))
                if machine.ack is None:
                    machine.check_open()
            elif not isinstance(machine.error, BatchError) or machine.error.outcome != "not_stored":
                machine.check_open()
        return machine.ack

    # -- how ----------------------------------------------------------------------------------------------------

    async def _open(self, first: BatchMessage | None) -> AtomicBatchMachine:
        """Return the machine; where there is none yet, refuse a bad `first` message before anything is open."""
        async with self._opening:
            if self.machine is not None:
                return self.machine
            self._check_discarded()
            connection = self._js.connection
            connection.check_usable()
            if first is not None:
                Encoder(self.batch_id, connection.max_payload).encode(first, None, first=True)
            machine = self._new_machine(await self._level(first), connection.max_payload)
            if first is not None:
                machine.check(first)  # once more: now the server is known
            inbox = await connection.inbox(
                InboxHandler(self._frames, self._disconnected), tail=".*", timeout=self._timeout
            )
            try:
                self._check_discarded()
            except BatchClosedError:
                inbox.close()
                raise
            self._inbox, self.machine = inbox, machine
            return machine

    async def _level(self, first: BatchMessage | None) -> int:
        """Return the API level of the server that will take the batch."""
        # A server before 2.12 stores the messages of a batch as ordinary ones. The greeting speaks for the server at
        # the other end of the connection only; the stream's own answer speaks for the one that matters.
        owner = await lookup_stream(self._js, first.subject, first.stream, self._timeout) if first is not None else None
        if owner is None:
            level, version = await api_level(self._js), self._js.connection.server_version
        else:
            level, version = owner[0].api_level, owner[0].server_version or "older"
        if level < ATOMIC_LEVEL:
            raise UnsupportedFeatureError(
                f"atomic batches need nats-server {feature_table.ATOMIC.since} (API level {ATOMIC_LEVEL}); the stream's is "
                f"{version} (level {level}); nothing was sent",
                feature=feature_table.ATOMIC.title,
                required_api_level=ATOMIC_LEVEL,
                server_version=version,
            )
        self._question = Question(owner, self._js.connection.session)
        self._server_version = version
        return level

    def _check_usable(self) -> None:
        """Raise unless something can be written: nats-py's error, or what that means for a batch sent in one go."""
        try:
            self._js.connection.check_usable()
        except nats.errors.ConnectionReconnectingError:
            machine = self.machine
            if self._hold_back and machine is not None and machine.sent:
                # Its caller cannot come back to it when the connection is there again.
                machine.lost("the connection was lost while the batch was being sent")
                self._settle()
                machine.check_open()
            raise

    def _check_discarded(self) -> None:
        if self.discarded:
            raise BatchClosedError(
                f"batch {self.batch_id} has ended (discarded)", batch_id=self.batch_id, outcome="not_stored"
            )

    def _new_machine(self, level: int, max_payload: int) -> AtomicBatchMachine:
        return AtomicBatchMachine(
            batch_id=self.batch_id,
            api_level=level,
            max_payload=max_payload,
            ack_first=self._ack_first,
            ack_every=self._ack_every,
            hold_back=self._hold_back,
            server_version=self._server_version,
        )

    async def _send(self, steps: list[Step]) -> None:
        """Send `steps` in one write; wait for the reply to the last of them if it wants one."""
        last = steps[-1]
        await self._exchange(*self._encode(steps), last.seq if last.wants_reply else 0)

    def _encode(self, steps: list[Step]) -> tuple[bytes, int, int]:
        """Return the commands, how many they are, and how many bytes their payloads have."""
        inbox = self._inbox
        assert inbox is not None
        data = b"".join(step.encode(f"{inbox.subject}.{step.seq}" if step.wants_reply else "") for step in steps)
        return data, len(steps), sum(len(step.payload) for step in steps)

    async def _block(self, machine: AtomicBatchMachine, source: Iterator[Entry]) -> tuple[int, BaseException | None]:
        """Send one block of `source`; return as `Block.acked` and `Block.stopped`."""
        self._check_usable()
        assert self._inbox is not None
        block = machine.add_many(source, f"{self._inbox.subject}.".encode(), _BLOCK)
        if block.messages:
            await self._exchange(block.data, block.messages, block.size, block.ask)
        return block.acked, block.stopped

    async def _exchange(self, data: bytes, messages: int, size: int, ask: int) -> None:
        """Write; wait for the reply to the message with sequence `ask`, unless that is 0."""
        waiter = self._expect(ask) if ask else None
        try:
            await self._write(data, messages, size)
        except asyncio.CancelledError:
            self._forget(ask, waiter)
            raise
        if waiter is not None:
            await self._reply(ask, waiter)
        self._check_open()

    async def _write(self, data: bytes, messages: int, size: int) -> None:
        assert self.machine is not None
        try:
            await self._js.connection.write(data, messages, size, timeout=self._timeout)
        except (nats.errors.Error, OSError) as error:
            self.machine.lost(f"the connection failed while it was written to ({error!r})")
            self._settle()

    def _expect(self, seq: int) -> _Waiter:
        """Return what is done when the message with that sequence is answered."""
        waiter = self._waiters[seq] = asyncio.get_running_loop().create_future()
        return waiter

    def _forget(self, seq: int, waiter: _Waiter | None) -> None:
        if self._waiters.get(seq) is waiter:  # a refused message's sequence may be another one's by now
            self._waiters.pop(seq, None)

    async def _reply(self, seq: int, waiter: _Waiter) -> None:
        """Wait for a reply, and raise if it was the refusal of this one message."""
        refusal: JetStreamExtError | None = None
        try:
            async with asyncio.timeout(self._timeout):
                refusal = await waiter
        except TimeoutError:
            assert self.machine is not None
            self.machine.lost(f"no answer within {self._timeout:g} s")
        finally:
            self._forget(seq, waiter)
            self._settle()
        if refusal is not None:
            raise refusal

    def _check_open(self) -> None:
        """Raise what ended the batch; a commit that is under way takes along what was added before it."""
        assert self.machine is not None
        if self.machine.state not in (State.COMMITTING, State.COMMITTED):
            self.machine.check_open()

    def _give_up_commit(self) -> None:
        assert self.machine is not None
        if self.machine.state is State.COMMITTING:
            self.machine.discard()
            self._settle()

    def _frames(self, frames: list[Frame]) -> None:
        """Take replies (called by the connection)."""
        machine = self.machine
        if machine is None:
            return
        for frame in frames:
            subject, header, payload = parts(frame)
            token = subject.rpartition(b".")[2]
            if not token.isdigit():
                continue  # not a reply subject of ours; whoever sent it, it says nothing about a message
            refusal = machine.receive(int(token), header, payload)
            waiter = self._waiters.pop(int(token), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(refusal)
            elif refusal is not None:
                machine.unheard(refusal)
        self._settle()

    def _disconnected(self) -> None:
        """Take the loss of the connection (called by the connection)."""
        machine = self.machine
        if machine is None:
            return
        if self._waiters:
            machine.lost("the connection was lost before the answer came")
            self._settle()
        else:
            machine.disconnected()

    def _settle(self) -> None:
        """Drop the inbox and wake everybody once the batch is over."""
        machine = self.machine
        if machine is None or machine.state in (State.OPEN, State.COMMITTING):
            return
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        if self._inbox is not None:
            self._inbox.close()
