"""Atomic batches for nats-py users: the shell around `protocol.atomic` (ADR-50)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import Final, Literal, Self, Unpack

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.connection import Inbox, JetStream, Sink
from jetstream_ext.client.levels import api_level
from jetstream_ext.errors import BatchClosedError, EmptyBatchError, UnsupportedFeatureError
from jetstream_ext.protocol.atomic import ATOMIC_LEVEL, AtomicBatchMachine, State, Step
from jetstream_ext.protocol.frames import Frame, parts
from jetstream_ext.protocol.options import check_batch_id
from jetstream_ext.types import BatchAck, BatchMessage, PublishOptions

BatchState = Literal["open", "committed", "discarded", "failed", "unknown"]


_PUBLIC_STATES: Final[dict[State, BatchState]] = {
    State.OPEN: "open",
    State.COMMITTING: "open",
    State.COMMITTED: "committed",
    State.DISCARDED: "discarded",
    State.FAILED: "failed",
    State.UNKNOWN: "unknown",
}


class AtomicBatch:
    """Store many messages of one stream all at once, or none of them (ADR-50).

    Use it as an async context manager: a clean exit commits and leaves the server's ack in `ack`, an exception (and a
    cancellation) discards. Without ``async with``, end it by `commit`, `commit_eob` or `discard`. The server drops a
    batch that is idle for 10 s, and by default takes 1000 messages per batch and 50 open batches per stream.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None makes one.
        ack_first: Wait for the server's reply to the first message, which is where most refusals show.
        ack_every: Wait for a reply to every n-th message, too.
        timeout: Seconds to wait for a reply; None is the context's timeout.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """

    def __init__(
        self,
        js: JetStreamContext,
        *,
        batch_id: str | None = None,
        ack_first: bool = True,
        ack_every: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self._js = JetStream(js)
        self._batch_id = check_batch_id(NUID().next().decode() if batch_id is None else batch_id)
        self._ack_first = ack_first
        if ack_every is not None and (isinstance(ack_every, bool) or not isinstance(ack_every, int) or ack_every < 1):
            raise ValueError(f"ack_every must be an integer from 1 up, not {ack_every!r}")
        self._ack_every = ack_every
        self._timeout = self._js.timeout if timeout is None else float(timeout)
        if not self._timeout > 0:
            raise ValueError(f"timeout must be over 0 seconds, not {timeout!r}")
        self._machine: AtomicBatchMachine | None = None
        self._inbox: Inbox | None = None
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._opening = asyncio.Lock()
        self._discarded = False

    def __repr__(self) -> str:
        return f"<AtomicBatch batch_id={self._batch_id!r} size={self.size} state={self.state!r}>"

    @property
    def batch_id(self) -> str:
        """The batch's id; the stored messages keep it in ``Nats-Batch-Id``."""
        return self._batch_id

    @property
    def size(self) -> int:
        """How many messages the batch will store."""
        return self._machine.size if self._machine else 0

    @property
    def state(self) -> BatchState:
        """``"open"``, ``"committed"``, ``"discarded"``, ``"failed"`` (nothing stored) or ``"unknown"``."""
        if self._machine is None:
            return "discarded" if self._discarded else "open"
        return _PUBLIC_STATES[self._machine.state]

    @property
    def ack(self) -> BatchAck | None:
        """The server's ack once the batch is committed."""
        return self._machine.ack if self._machine else None

    async def add(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        ack: bool | None = None,
        **options: Unpack[PublishOptions],
    ) -> None:
        """Add one message; it is stored when the batch is committed.

        Everything that can be checked here is, before the message takes a sequence: a refused call changes nothing.
        Expectations are checked by the server, at commit.

        Args:
            subject: Where it will be stored.
            payload: Its bytes.
            ack: Wait for the server's reply to this message, or do not; None follows `ack_first` and `ack_every`.
            options: As for `BatchMessage`. `expected_last_seq` may be on the first message only, and
                `expected_last_subject_seq` not on a subject written earlier in the batch. `msg_id` needs 2.12.1.

        Raises:
            BatchError: The server refused, or the batch had ended.
            UnsupportedFeatureError: The server is older than 2.12.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: The message is on the wire and part of the batch; the batch stays usable.
        """
        message = BatchMessage(subject, payload, **options)
        await self.add_message(message, ack=ack)

    async def add_message(self, message: BatchMessage, *, ack: bool | None = None) -> None:
        """Add one `BatchMessage`; otherwise as `add`."""
        machine = self._machine or await self._open(message)
        machine.check_open()
        self._js.connection.check_usable()
        step = machine.add(message, ack)
        if step is not None:
            await self._send([step])

    async def commit(
        self,
        subject: str,
        payload: bytes = b"",
        **options: Unpack[PublishOptions],
    ) -> BatchAck:
        """Add a last message, commit, and return the server's ack.

        Raises:
            BatchOutcomeUnknownError: The answer was lost; the batch is either stored whole or not at all.
            BatchError: The server refused, or the batch had ended; nothing is stored.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: The commit is on the wire; `state` is ``"unknown"``.
        """
        message = BatchMessage(subject, payload, **options)
        return await self._commit(message)

    async def commit_eob(self) -> BatchAck:
        """Commit what was added and return the server's ack.

        Raises:
            EmptyBatchError: Nothing was added.
            BatchOutcomeUnknownError, BatchError: As for `commit`.

        Cancellation: The commit is on the wire; `state` is ``"unknown"``.
        """
        return await self._commit(None)

    async def _commit(self, message: BatchMessage | None) -> BatchAck:
        if message is None and self._machine is None and not self._discarded:
            raise EmptyBatchError("there is nothing to commit", batch_id=self._batch_id, outcome="not_stored")
        machine = self._machine or await self._open(message)
        machine.check_open()
        self._js.connection.check_usable()
        steps = machine.commit(message)
        try:
            await self._send(steps)
        except asyncio.CancelledError:
            machine.discard()
            self._settle()
            raise
        assert machine.ack is not None
        return machine.ack

    async def discard(self) -> None:
        """Give the batch up; nothing of it is stored."""
        self._discarded = True
        if self._machine is not None:
            self._machine.discard()
            self._settle()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        machine = self._machine
        if kind is not None or machine is None:
            await self.discard()
        elif machine.state is State.OPEN:
            if not machine.size:
                await self.discard()
                return
            try:
                await self.commit_eob()
            finally:
                await self.discard()  # a refused commit leaves nothing open behind the block
        elif machine.state not in (State.COMMITTED, State.DISCARDED):
            machine.check_open()

    # -- the shell ----------------------------------------------------------------------------------------------

    async def _open(self, first: BatchMessage | None) -> AtomicBatchMachine:
        """Return the machine; where there is none yet, refuse a bad `first` message before anything is open."""
        async with self._opening:
            if self._machine is not None:
                return self._machine
            self._check_discarded()
            connection = self._js.connection
            connection.check_usable()
            if first is not None:
                self._new_machine(ATOMIC_LEVEL, connection.max_payload).add(first)
            level = await api_level(self._js)
            if level < ATOMIC_LEVEL:
                raise UnsupportedFeatureError(
                    f"atomic batches need nats-server 2.12 (API level {ATOMIC_LEVEL}); this is "
                    f"{connection.server_version} (level {level}); nothing was sent",
                    feature="atomic batch",
                    required_api_level=ATOMIC_LEVEL,
                    server_version=connection.server_version,
                )
            inbox = await connection.inbox(Sink(self._frames, self._disconnected), tail=".*")
            try:
                self._check_discarded()
            except BatchClosedError:
                inbox.close()
                raise
            self._inbox = inbox
            self._machine = self._new_machine(level, connection.max_payload)
            return self._machine

    def _check_discarded(self) -> None:
        if self._discarded:
            raise BatchClosedError(
                f"batch {self._batch_id} has ended (discarded)", batch_id=self._batch_id, outcome="not_stored"
            )

    def _new_machine(self, level: int, max_payload: int) -> AtomicBatchMachine:
        return AtomicBatchMachine(
            batch_id=self._batch_id,
            api_level=level,
            max_payload=max_payload,
            ack_first=self._ack_first,
            ack_every=self._ack_every,
        )

    async def _send(self, steps: list[Step]) -> None:
        """Send `steps` in one write; wait for the reply to the last of them if it wants one."""
        machine, inbox = self._machine, self._inbox
        assert machine is not None
        assert inbox is not None
        last = steps[-1]
        waiter: asyncio.Future[None] | None = None
        if last.wants_reply:
            waiter = self._waiters[last.seq] = asyncio.get_running_loop().create_future()
        data = b"".join(step.encode(f"{inbox.subject}.{step.seq}" if step.wants_reply else "") for step in steps)
        try:
            await self._js.connection.write(data, len(steps), sum(len(step.payload) for step in steps))
            if waiter is not None:
                async with asyncio.timeout(self._timeout):
                    await waiter
        except TimeoutError:
            machine.lost(f"no answer within {self._timeout:g} s")
        finally:
            self._waiters.pop(last.seq, None)
            self._settle()
        if machine.state is State.COMMITTING and last.seq < machine.sent:
            return  # an `add` whose message is part of the commit that is under way
        if machine.state is not State.COMMITTED:
            machine.check_open()

    def _frames(self, frames: list[Frame]) -> None:
        """Take replies (called by the connection)."""
        machine = self._machine
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
                if refusal is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(refusal)
            elif refusal is not None:
                machine.unheard(refusal)
        self._settle()

    def _disconnected(self) -> None:
        """Take the loss of the connection (called by the connection)."""
        # Only a reply that is waited for is lost by it: the server keeps a batch by its id, not by its connection.
        if self._machine is not None and self._waiters:
            self._machine.lost("the connection was lost before the answer came")
            self._settle()

    def _settle(self) -> None:
        """Drop the inbox and wake everybody once the batch is over."""
        machine = self._machine
        if machine is None or machine.state in (State.OPEN, State.COMMITTING):
            return
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)
        if self._inbox is not None:
            self._inbox.close()


async def publish_atomic(
    js: JetStreamContext,
    messages: Iterable[BatchMessage] | AsyncIterable[BatchMessage],
    *,
    batch_id: str | None = None,
    timeout: float | None = None,
) -> BatchAck:
    """Store all `messages`, or none of them, and return the server's ack.

    Args:
        js: nats-py's JetStream context.
        messages: At least one `BatchMessage`, from an iterable or an async iterable. If it raises, nothing is stored.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None makes one.
        timeout: Seconds to wait for a reply; None is the context's timeout.

    Raises:
        EmptyBatchError: There were no messages.
        BatchOutcomeUnknownError: The answer was lost; the batch is either stored whole or not at all.
        BatchError: The server refused; nothing is stored.
        UnsupportedFeatureError: The server is older than 2.12.

    Cancellation: Nothing is stored, unless the commit was on its way already.

    Requires: nats-server 2.12 and ``allow_atomic`` on the stream.
    """
    batch = AtomicBatch(js, batch_id=batch_id, timeout=timeout)
    async with batch:
        if isinstance(messages, AsyncIterable):
            async for message in messages:
                await batch.add_message(message)
        else:
            for message in messages:
                await batch.add_message(message)
        return await batch.commit_eob()
