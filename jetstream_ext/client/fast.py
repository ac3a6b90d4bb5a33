"""Fast ingest for nats-py users: the shell around `protocol.fast.FastBatch` (ADR-50)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import Self, Unpack

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.context import Context
from jetstream_ext.client.fast_driver import ErrorHandler, FastDriver, FlowHandler, GapHandler, Handlers
from jetstream_ext.protocol.fast import FastBatch
from jetstream_ext.protocol.fast_record import State, check_flow, check_outstanding
from jetstream_ext.protocol.options import check_batch_id
from jetstream_ext.types import (
    BatchAck,
    BatchFlowError,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    Entry,
    FastPubAck,
    GapMode,
    InDoubt,
    PublishOptions,
)


class FastPublisher:
    """Publish into a stream as fast as it safely goes, with acknowledgements for whole runs of messages.

    One instance is one batch (ADR-50, fast ingest). Messages are stored as they come, in order, and the server says
    how many may be on their way: the window is `flow` times `max_outstanding_acks` messages. Use it as an async context
    manager: a clean exit ends the batch and leaves its final ack in `ack`; an exception (and a cancellation) leaves
    what was sent as it is. Without ``async with``, end it by `commit`, `commit_eob` or `discard`.

    Args:
        js: nats-py's JetStream context; its prefix, domain and timeout are honoured.
        flow: Messages per acknowledgement to ask for, 1 to 65535; servers grant at most 500, shared by the
            publishers of a stream.
        max_outstanding_acks: Acknowledgements' worth of messages in the window, 1 to 3.
        gap: What happens when messages are lost on their way: `GapMode.FAIL` ends the batch, `GapMode.OK` reports it
            and goes on, also over a reconnect.
        batch_id: 1 to 64 characters of ``[A-Za-z0-9_-]``; None makes one.
        ack_timeout: Seconds without any sign of the server that a wait may last; None is the context's timeout. After a
            loss of the connection `GapMode.OK` waits so long for another one, and then so long for the batch.
        stall_ping: Seconds of waiting after which the server is asked where it is.
        keepalive: Seconds without traffic after which an idle batch is kept alive (the server drops it after 10);
            0 is never.
        on_gap: Called with every `BatchFlowGap`.
        on_error: Called with every `BatchFlowError`: a message that was refused while the batch goes on.
        on_flow: Called with every `BatchFlowAck`.

    The handlers may be plain or coroutine functions. They run on the loop after the batch's state is updated, and what
    they raise goes to the loop's exception handler.

    Requires: nats-server 2.14 and ``allow_batched`` on the stream.
    """

    def __init__(
        self,
        js: JetStreamContext,
        *,
        flow: int = 100,
        max_outstanding_acks: int = 2,
        gap: GapMode = GapMode.FAIL,
        batch_id: str | None = None,
        ack_timeout: float | None = None,
        stall_ping: float = 1.0,
        keepalive: float | None = 5.0,
        on_gap: GapHandler | None = None,
        on_error: ErrorHandler | None = None,
        on_flow: FlowHandler | None = None,
    ) -> None:
        context = Context(js)
        self._flow = check_flow(flow)
        self._outstanding = check_outstanding(max_outstanding_acks)
        self._gap = GapMode(gap)
        self._batch_id = check_batch_id(NUID().next().decode() if batch_id is None else batch_id)
        self._ack_timeout = context.timeout if ack_timeout is None else float(ack_timeout)
        self._stall_ping = float(stall_ping)
        self._keepalive = float(keepalive or 0.0)
        if not (self._ack_timeout > 0 and self._stall_ping > 0 and self._keepalive >= 0):
            raise ValueError("ack_timeout and stall_ping must be over 0 seconds, keepalive 0 or more")
        self._driver = FastDriver(context, self._batch_id, self._new_machine, Handlers(on_gap, on_error, on_flow))

    def _new_machine(self, inbox: str, max_payload: int) -> FastBatch:
        return FastBatch(
            batch_id=self._batch_id,
            inbox=inbox,
            flow=self._flow,
            max_outstanding_acks=self._outstanding,
            gap=self._gap,
            max_payload=max_payload,
            ack_timeout=self._ack_timeout,
            stall_ping=self._stall_ping,
            keepalive=self._keepalive,
        )

    @property
    def _machine(self) -> FastBatch | None:
        return self._driver.machine

    def __repr__(self) -> str:
        return f"<FastPublisher batch_id={self._batch_id!r} sent={self.batch_seq} acked={self.ack_seq}>"

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self._batch_id

    @property
    def batch_seq(self) -> int:
        """The batch sequence of the newest message sent."""
        return self._machine.sent if self._machine else 0

    @property
    def ack_seq(self) -> int:
        """The highest batch sequence that the server acknowledged."""
        return self._machine.acked if self._machine else 0

    @property
    def flow(self) -> int:
        """Messages per acknowledgement, as the server last set it."""
        return self._machine.flow if self._machine else self._flow

    @property
    def ack(self) -> BatchAck | None:
        """The server's final word, also on a batch that it ended itself; None until then.

        Its ``batch_size`` is the highest batch sequence, not the number of messages stored.
        """
        return self._machine.ack if self._machine else None

    @property
    def gaps(self) -> list[BatchFlowGap]:
        """The newest gap reports (at most 1000 are kept; `gap_count` counts all)."""
        return list(self._machine.gaps) if self._machine else []

    @property
    def gap_count(self) -> int:
        """How many gaps were reported."""
        return self._machine.gap_count if self._machine else 0

    @property
    def errors(self) -> list[BatchFlowError]:
        """The newest refused messages (at most 1000 are kept; `error_count` counts all)."""
        return list(self._machine.errors) if self._machine else []

    @property
    def error_count(self) -> int:
        """How many messages were refused."""
        return self._machine.error_count if self._machine else 0

    @property
    def in_doubt(self) -> list[InDoubt]:
        """What nobody knows of after a loss of the connection that the batch survived (`GapMode.OK` only)."""
        return list(self._machine.in_doubt) if self._machine else []

    @property
    def end_reason(self) -> EndReason | None:
        """Why the batch ended; None while it is open. Known without another call, also while idle."""
        if self._machine is not None:
            return self._machine.end_reason
        return EndReason.DISCARDED if self._driver.discarded else None

    # -- publishing ---------------------------------------------------------------------------------------------

    async def add(
        self,
        subject: str,
        payload: bytes = b"",
        **options: Unpack[PublishOptions],
    ) -> FastPubAck:
        """Publish one message; return when the window has room again.

        Everything is checked before the message takes a sequence: a refused
        call changes nothing. The first call waits for the server's first reply.

        Args:
            subject: Where it is stored.
            payload: Its bytes.
            options: As for `BatchMessage`.

        Returns:
            The message's batch sequence, and up to where the server has acknowledged.

        Raises:
            BatchError: The batch has ended; the error says why, what is stored, and holds the server's final ack.
            UnsupportedFeatureError: The server is older than 2.14. Nothing was sent; where that could not be known
                beforehand, the error says that this one message was stored as an ordinary one.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: The message is on the wire and counted, unless the call still waited for the first reply or for the
        connection (`batch_seq` tells); the batch stays usable.
        """
        if options:
            return await self.add_message(BatchMessage(subject, payload, **options))
        driver = self._driver
        machine = driver.open_machine or await driver.ready(None if driver.machine else BatchMessage(subject, payload))
        return await self._sent(machine, machine.add_plain(subject, payload, driver.now()), len(payload))

    async def add_message(self, message: BatchMessage) -> FastPubAck:
        """Publish one `BatchMessage`; arguments, errors, result and cancellation as for `add`."""
        driver = self._driver
        machine = await driver.ready(message)
        return await self._sent(machine, machine.add(message, driver.now()), len(message.payload))

    async def _sent(self, machine: FastBatch, command: bytes, size: int) -> FastPubAck:
        seq = machine.sent
        driver = self._driver
        await driver.write(command, 1, size)
        if machine.room < 0 or machine.state is not State.OPEN:
            # The window is full, or nothing may be sent until the first reply, or the connection, is here.
            await driver.wait(lambda: machine.room >= 0 and machine.state is State.OPEN)
        return FastPubAck(seq, machine.acked)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> FastPubAck:
        """Publish many messages, a window's worth per write: the fast road.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or
                an async iterable. It is consumed as the window allows, so it may be endless.

        Returns:
            Where the batch stands when all are sent and at most a window of them is unacknowledged.

        Raises:
            BatchError, UnsupportedFeatureError: As for `add`.
            Exception: What `messages` raises, and the refusal of one of them, after everything before it was sent;
                the batch stays usable.

        Cancellation: What was taken from `messages` is on the wire and counted; the batch stays usable.
        """
        driver = self._driver
        machine = await driver.ready()
        if isinstance(messages, AsyncIterable):
            # One write each: nats-py's buffer joins them, and a slow source is not held back by a block.
            async for entry in messages:
                await self.add_message(entry if isinstance(entry, BatchMessage) else BatchMessage(*entry))
            return FastPubAck(machine.sent, machine.acked)
        entries = iter(messages)
        stopped: BaseException | None = None
        while stopped is None:
            await driver.ready()
            if machine.room <= 0:
                await driver.wait(lambda: machine.room > 0)
                continue
            data, count, size, stopped = machine.add_many(entries, machine.room, driver.now())
            if count:
                await driver.write(data, count, size)
        if not isinstance(stopped, StopIteration):
            raise stopped
        await driver.wait(lambda: machine.state is not State.STARTING)
        return FastPubAck(machine.sent, machine.acked)

    async def flush(self) -> None:
        """Wait until the server has dealt with everything sent so far.

        Servers acknowledge every `flow` messages only. What an acknowledgement covers is stored (in `GapMode.OK`:
        stored, or reported as lost or refused). For the last messages the answer to a ping has to do, which comes after
        everything before it was taken in, and after the report of any loss: on a stream with one replica they are
        stored, on a replicated one they are on their way to the replicas, and only a later acknowledgement or the final
        one proves them stored.

        Raises:
            BatchError: The batch ended first.

        Cancellation: The batch stays usable.
        """
        machine = self._machine
        if machine is None or machine.state is State.NEW:
            return
        driver = self._driver
        await driver.ready()
        sent = machine.sent
        if not machine.settled:
            await driver.write(machine.ping(driver.now()), 1, 0)
            await driver.wait(lambda: max(machine.acked, machine.received) >= sent)

    async def ping(self) -> FastPubAck:
        """Ask the server where it is; return its answer.

        Raises:
            EmptyBatchError: Nothing was sent yet.
            BatchError: The batch has ended.

        Cancellation: The batch stays usable.
        """
        driver = self._driver
        machine = await driver.ready()
        before = machine.pongs
        await driver.write(machine.ping(driver.now()), 1, 0)
        await driver.wait(lambda: machine.pongs > before)
        return FastPubAck(machine.sent, machine.acked)

    # -- ending -------------------------------------------------------------------------------------------------

    async def commit(
        self,
        subject: str,
        payload: bytes = b"",
        **options: Unpack[PublishOptions],
    ) -> BatchAck:
        """Publish a last message, end the batch and return the server's final ack.

        Args:
            subject: Where the message is stored.
            payload: Its bytes.
            options: As for `BatchMessage`.

        Raises:
            BatchOutcomeUnknownError: The ack did not come; the messages may be stored.
            BatchError: The batch had ended.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message was refused here.

        Cancellation: Once the commit is on the wire the batch ends on the server all the same.
        """
        await self.add(subject, payload, **options)
        return await self.commit_eob()

    async def commit_eob(self) -> BatchAck:
        """End the batch without another message and return the server's final ack.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchOutcomeUnknownError: The ack did not come; the messages may be stored.
            BatchError: The batch had ended.

        Cancellation: Once the commit is on the wire the batch ends on the server all the same.
        """
        driver = self._driver
        machine = await driver.ready()
        command = machine.commit(driver.now())
        try:
            await driver.write(command, 1, 0)
            await driver.wait(lambda: machine.end_reason is EndReason.COMMITTED)
        except asyncio.CancelledError:
            driver.happened(machine.discard())
            raise
        assert machine.ack is not None
        return machine.ack

    async def discard(self) -> None:
        """End the batch here. What was sent stays stored; the server forgets the batch by itself.

        Cancellation: The batch is over all the same.
        """
        self._driver.discard()

    async def wait_closed(self) -> EndReason:
        """Wait until the batch ends, and return why it did.

        Cancellation: The batch goes on; nothing is left behind.
        """
        return await self._driver.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        machine = self._machine
        if kind is not None or machine is None or machine.state is State.NEW:
            await self.discard()
        elif machine.state is not State.ENDED:
            try:
                await self.commit_eob()
            except BaseException:
                await self.discard()  # a refused or cancelled commit leaves nothing open behind the block
                raise
        elif machine.error is not None:
            machine.check_open()
