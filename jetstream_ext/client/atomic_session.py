"""Delivers for one atomic batch: what `protocol.atomic` wants to send, and what the server replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Iterator
from typing import Final

import nats.errors
from nats.nuid import NUID

from jetstream_ext.client import atomic_resolve
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.client.lookup import api_level, lookup_stream, remember_ack
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.protocol.atomic import AtomicBatchMachine, Doubt, State
from jetstream_ext.protocol.atomic_resolve import Commit
from jetstream_ext.protocol.atomic_wire import Block, Encoded
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.protocol.options import as_message, check_seconds
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.types import BatchAck, BatchMessage, Entry

# Payload bytes per write of a bulk: the server works on one block while the next is encoded.
_BLOCK: Final = 1 << 15
# An election takes longer than a reply: so many times the timeout of a reply is what resolving may take.
_RESOLVE_TIMEOUTS: Final = 4

_Waiter = asyncio.Future[JetStreamExtError | None]
"""Done when the reply has come, with the refusal if only this message was refused, or when the batch is over."""


class AtomicSession:
    """One atomic batch on a connection.

    Args:
        context: The context.
        batch_id: The batch's id; None makes one.
        timeout: Seconds to wait for a reply; None is the context's own.
        ack_first: As for `AtomicBatchMachine`.
        ack_every: As for `AtomicBatchMachine`.
        in_one_go: As for `AtomicBatchMachine`.

    Raises:
        ValueError, TypeError: The batch id or the timeout is out of range.
    """

    def __init__(
        self,
        context: Context,
        batch_id: str | None = None,
        timeout: float | None = None,
        *,
        ack_first: bool = True,
        ack_every: int | None = None,
        in_one_go: bool = False,
    ) -> None:
        self.machine: AtomicBatchMachine = AtomicBatchMachine(
            NUID().next().decode() if batch_id is None else batch_id,
            ack_first=ack_first,
            ack_every=ack_every,
            in_one_go=in_one_go,
        )
        self._context = context
        self._timeout = context.timeout if timeout is None else check_seconds(timeout, "timeout")
        self._opening = asyncio.Lock()
        self._inbox: InboxSubscription | None = None
        self._waiters: dict[int, _Waiter] = {}
        self._commit_waiter: _Waiter | None = None
        # For `resolve`: the stream when the batch was opened, a sequence that it had, and what carried the commit.
        self._opened: tuple[StreamState | None, int] = None, 0
        self._session = 0

    # -- what can be done ---------------------------------------------------------------------------------------

    async def add(self, message: BatchMessage, ack: bool | None) -> None:
        """Send a message; wait for its reply if it wants one."""
        encoded = await self._open(message, ack)
        self._check_usable()
        await self._send(self.machine.add(encoded))

    async def fill(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> int:
        """Send `messages` in blocks; return the highest sequence among them that asked for a reply, or 0."""
        asked = 0
        if isinstance(messages, AsyncIterable):
            # One write each: nats-py's buffer joins them, and a slow source is not held back by a block.
            async for entry in messages:
                first = await self._open(as_message(entry))
                asked = max(asked, (await self._send_block(iter(()), first)).last_asked)
            return asked
        source = iter(messages)
        for entry in source:
            block = await self._send_block(source, await self._open(as_message(entry)))
            asked = max(asked, block.last_asked)
            while block.stopped is None:
                await asyncio.sleep(0)  # nats-py's flusher has its turn
                block = await self._send_block(source)
                asked = max(asked, block.last_asked)
            break
        return asked

    async def reply_to(self, seq: int) -> None:
        """Wait for the reply to a message that was sent, if it has not come."""
        if seq > self.machine.staged:
            self.machine.check_open()
            await self._reply(seq, self._expect(seq))
            self.machine.check_added()

    async def commit(self, message: BatchMessage | None) -> BatchAck:
        """Commit, with a last message or none."""
        await self.send_commit(message)
        return await self.committed()

    async def send_commit(self, message: BatchMessage | None) -> None:
        """Send the commit, with a last message or none; `committed` waits for the answer."""
        last = None if message is None else await self._open(message)
        self._check_usable()
        block = self.machine.commit(last)
        self._session = self._context.connection.session
        self._commit_waiter = self._expect(block.awaited)
        try:
            await self._write(block)
        except asyncio.CancelledError:
            self._abandon_commit()
            raise

    @property
    def answered(self) -> bool:
        """Whether `committed` will return or raise at once."""
        return self._commit_waiter is not None and self._commit_waiter.done()

    async def committed(self) -> BatchAck:
        """Wait for the answer to the commit that was sent."""
        assert self._commit_waiter is not None
        try:
            await self._reply(self.machine.sent, self._commit_waiter)
        except asyncio.CancelledError:
            self._abandon_commit()
            raise
        ack = self.machine.result()
        remember_ack(self._context, ack)
        return ack

    def discard(self) -> None:
        """Give the batch up."""
        self.machine.discard()
        self._settle()

    async def leave(self) -> None:
        """Do what a clean exit of the block does."""
        if self.machine.leave():
            try:
                await self.commit(None)
            finally:
                self.discard()  # a refused commit leaves nothing open behind the block
        self._settle()

    async def resolve(self, timeout: float | None) -> BatchAck | None:
        """Return the ack that a batch has or should have had, or None: nothing of it is stored."""
        machine = self.machine
        patience = _RESOLVE_TIMEOUTS * self._timeout if timeout is None else check_seconds(timeout, "timeout")
        doubt = machine.doubt()
        commit = Commit(
            machine.batch_id, machine.size, machine.staged, machine.last_subject, *self._opened, self._session
        )
        if doubt is Doubt.COMMIT:
            machine.resolved(await atomic_resolve.resolve(self._context, commit, patience, machine.error))
        elif doubt is Doubt.EARLIER:
            machine.resolved(await atomic_resolve.find_earlier(self._context, commit, patience))
            machine.result()
        return machine.ack

    # -- how ----------------------------------------------------------------------------------------------------

    async def _open(self, message: BatchMessage, ack: bool | None = None) -> Encoded:
        """Check and encode a message, and open the batch for it if it is the first."""
        machine, connection = self.machine, self._context.connection
        machine.limit_messages(connection.max_payload)
        encoded = machine.prepare(message, ack)
        if machine.state is State.NEW:
            async with self._opening:
                if machine.state is State.NEW:
                    connection.check_usable()
                    await self._open_for(encoded, message)
        return encoded

    async def _open_for(self, first: Encoded, message: BatchMessage) -> None:
        connection = self._context.connection
        # A server before 2.12 stores the messages of a batch as ordinary ones. The greeting speaks for the server at
        # the other end of the connection only; the stream's own answer speaks for its leader.
        owner = await lookup_stream(self._context, message.subject, message.stream, self._timeout)
        if owner is None:
            level, version = await api_level(self._context), connection.server_version
        else:
            level, version = owner[0].api_level, owner[0].server_version or "older"
            self._opened = owner
        inbox = await connection.inbox(InboxHandler(self._frames, self._disconnected), tail=".*", timeout=self._timeout)
        try:
            self.machine.open(first, api_level=level, server_version=version, reply=inbox.subject)
        except BaseException:
            inbox.close()
            raise
        self._inbox = inbox

    def _check_usable(self) -> None:
        """Raise what ended the batch, or nats-py's error where nothing can be written."""
        try:
            self._context.connection.check_usable()
        except nats.errors.ConnectionReconnectingError:
            self.machine.cannot_send()
            self._settle()
            self.machine.check_open()
            raise

    async def _send_block(self, source: Iterator[Entry], first: Encoded | None = None) -> Block:
        """Send one block; raise what stopped it before the end of `source`."""
        self._check_usable()
        block = self.machine.add_many(source, _BLOCK, first)
        if block.messages:
            await self._send(block)
        if block.stopped is not None and not isinstance(block.stopped, StopIteration):
            raise block.stopped
        return block

    async def _send(self, block: Block) -> None:
        """Send a block, and wait for the reply that has to be awaited."""
        waiter = self._expect(block.awaited) if block.awaited else None
        try:
            if block.messages:
                await self._write(block)
        except asyncio.CancelledError:
            self._forget(block.awaited, waiter)
            raise
        if waiter is not None:
            await self._reply(block.awaited, waiter)
        self.machine.check_added()

    async def _write(self, block: Block) -> None:
        try:
            await self._context.connection.write(block.data, block.messages, block.size, timeout=self._timeout)
        except (nats.errors.Error, OSError) as error:
            self.machine.lost(f"the connection failed while it was written to ({error!r})")
            self._settle()

    def _abandon_commit(self) -> None:
        self.machine.commit_unheard()
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
            self.machine.lost(f"no answer within {self._timeout:g} s")
        finally:
            self._forget(seq, waiter)
            self._settle()
        if refusal is not None:
            raise refusal

    def _frames(self, frames: list[Frame]) -> None:
        """Take replies (called by the connection)."""
        for frame in frames:
            subject, header, payload = parts(frame)
            token = subject.rpartition(b".")[2]
            if not token.isdigit():
                continue  # not a reply subject of this batch
            refusal = self.machine.receive(int(token), header, payload)
            waiter = self._waiters.pop(int(token), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(refusal)
            elif refusal is not None:
                self.machine.refused_unheard(refusal)
        self._settle()

    def _disconnected(self) -> None:
        """Take the loss of the connection (called by the connection)."""
        self.machine.disconnected(reply_awaited=bool(self._waiters))
        self._settle()

    def _settle(self) -> None:
        """Drop the inbox and wake every waiter once the batch is over."""
        if not self.machine.ended:
            return
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        if self._inbox is not None:
            self._inbox.close()
