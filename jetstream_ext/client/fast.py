"""Fast ingest for nats-py users (ADR-50). `protocol.fast` decides; `fast_session` connects it to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self, Unpack

from nats.js import JetStreamContext
from nats.nuid import NUID

from jetstream_ext.client.context import Context
from jetstream_ext.client.fast_session import FastSession
from jetstream_ext.protocol.fast_wire import BatchFlowError
from jetstream_ext.types import (
    BatchAck,
    BatchFlowAck,
    BatchFlowGap,
    BatchMessage,
    EndReason,
    Entry,
    FastPubAck,
    GapMode,
    InDoubt,
    PublishOptions,
)

GapHandler = Callable[[BatchFlowGap], Awaitable[None] | None]
ErrorHandler = Callable[[BatchFlowError], Awaitable[None] | None]
FlowHandler = Callable[[BatchFlowAck], Awaitable[None] | None]


class FastPublisher:
    """Publish into a stream with one acknowledgement for many messages.

    One instance is one batch (ADR-50, fast ingest). The server stores messages as they arrive, in order, and says how
    many may be unacknowledged: the window is `flow` times `max_outstanding_acks` messages. Use it as an async context
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
            loss of the connection `GapMode.OK` waits so long for another one, and then so long for the server's answer.
        stall_ping: Seconds of waiting after which the server is asked for its position.
        keepalive: Seconds without traffic after which an idle batch is kept alive by a ping (the server drops it after
            10 s); 0 is never.
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
        self._session = FastSession(
            context,
            {BatchFlowGap: on_gap, BatchFlowError: on_error, BatchFlowAck: on_flow},
            batch_id=NUID().next().decode() if batch_id is None else batch_id,
            flow=flow,
            max_outstanding_acks=max_outstanding_acks,
            gap=gap,
            ack_timeout=context.resolve_timeout(ack_timeout, "ack_timeout"),
            stall_ping=stall_ping,
            keepalive=keepalive or 0.0,
        )
        self._batch = self._session.batch

    def __repr__(self) -> str:
        return f"<FastPublisher batch_id={self.batch_id!r} sent={self.batch_seq} acked={self.ack_seq}>"

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self._batch.batch_id

    @property
    def batch_seq(self) -> int:
        """The batch sequence of the newest message sent."""
        return self._batch.sent

    @property
    def ack_seq(self) -> int:
        """The highest batch sequence that the server acknowledged."""
        return self._batch.acked

    @property
    def flow(self) -> int:
        """Messages per acknowledgement, as the server last set it."""
        return self._batch.window.flow

    @property
    def ack(self) -> BatchAck | None:
        """The server's final ack, also on a batch that it ended itself; None until then.

        Its ``batch_size`` is the highest batch sequence, not the number of messages stored.
        """
        return self._batch.ack

    @property
    def gaps(self) -> list[BatchFlowGap]:
        """The newest gap reports (at most 1000 are kept; `gap_count` counts all)."""
        return list(self._batch.gaps)

    @property
    def gap_count(self) -> int:
        """How many gaps were reported."""
        return self._batch.gap_count

    @property
    def errors(self) -> list[BatchFlowError]:
        """The newest refused messages (at most 1000 are kept; `error_count` counts all)."""
        return list(self._batch.errors)

    @property
    def error_count(self) -> int:
        """How many messages were refused."""
        return self._batch.error_count

    @property
    def in_doubt(self) -> list[InDoubt]:
        """Messages whose reports were lost with a connection that the batch survived (`GapMode.OK` only)."""
        return list(self._batch.in_doubt)

    @property
    def end_reason(self) -> EndReason | None:
        """Why the batch ended; None while it is open. Known without another call, also while idle."""
        return self._batch.end_reason

    # -- publishing ---------------------------------------------------------------------------------------------

    async def add(
        self,
        subject: str,
        payload: bytes = b"",
        **options: Unpack[PublishOptions],
    ) -> FastPubAck:
        """Publish one message, once the window has room for it.

        The message is checked before it takes a sequence: a refused call changes nothing. Concurrent calls send in the
        order in which they were made. The first call also waits for the server's first reply.

        Args:
            subject: Where it is stored.
            payload: Its bytes.
            options: As for `BatchMessage`.

        Returns:
            The message's batch sequence, and up to where the server has acknowledged.

        Raises:
            BatchError: The batch has ended; the error says why, what is stored, and holds the server's final ack.
            UnsupportedFeatureError: The server is older than 2.14. Nothing was sent; where the library could not know
                beforehand, the error says that this one message was stored as an ordinary one.
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message cannot be sent.

        Cancellation: A call that waits for room or for the connection has sent nothing, and its message has no sequence
        (`batch_seq` tells). Later the message is sent and counted. The batch stays usable.
        """
        if options:
            return await self.add_message(BatchMessage(subject, payload, **options))
        session = self._session
        if not session.clear:
            return await self.add_message(BatchMessage(subject, payload))
        return await self._publish(self._batch.add_plain(subject, payload, session.now()), len(payload))

    async def add_message(self, message: BatchMessage) -> FastPubAck:
        """Publish one `BatchMessage`; arguments, errors, result and cancellation as for `add`."""
        session = self._session
        encoded = session.encode(message)
        if not session.clear:
            await session.turn()
        return await self._publish(self._batch.add(encoded, session.now()), len(encoded.payload))

    async def _publish(self, command: bytes, size: int) -> FastPubAck:
        batch, session = self._batch, self._session
        seq = batch.sent
        await session.write(command, 1, size)
        if not batch.started():
            await session.wait(batch.started)
        return FastPubAck(seq, batch.acked)

    async def add_many(self, messages: Iterable[Entry] | AsyncIterable[Entry]) -> FastPubAck:
        """Publish many messages, with one write for as many as the window has room for.

        Args:
            messages: ``(subject, payload)``, ``(subject, payload, headers)`` or `BatchMessage`, from an iterable or
                an async iterable. It is consumed as the window allows, so it may be endless.

        Returns:
            Where the batch stands when all are sent and at most a window of them is unacknowledged.

        Raises:
            BatchError, UnsupportedFeatureError: As for `add`.
            Exception: What `messages` raises, and the refusal of one of them, after everything before it was sent;
                the batch stays usable.

        Cancellation: What was taken from `messages` is sent and counted; the batch stays usable.
        """
        batch, session = self._batch, self._session
        if isinstance(messages, AsyncIterable):
            source = aiter(messages)
            while True:
                if not session.clear:
                    await session.turn()  # before a message is taken: a cancelled call loses none
                try:
                    entry = await anext(source)
                except StopAsyncIteration:
                    return FastPubAck(batch.sent, batch.acked)
                # One write each: nats-py's buffer joins them, and a slow source must not wait for a full block.
                await self.add_message(entry if isinstance(entry, BatchMessage) else BatchMessage(*entry))
        entries = iter(messages)
        stopped: BaseException | None = None
        while stopped is None:
            if not session.clear:
                await session.turn()
            data, count, size, stopped = batch.add_many(entries, session.now())
            if count:
                await session.write(data, count, size)
        if not isinstance(stopped, StopIteration):
            raise stopped
        if batch.sent:
            await session.wait(batch.started)
        return FastPubAck(batch.sent, batch.acked)

    async def flush(self) -> None:
        """Wait until the server has dealt with everything sent so far.

        Servers acknowledge every `flow` messages only. What an acknowledgement covers is stored (in `GapMode.OK`:
        stored, or reported as lost or refused). For the last messages this call uses the answer to a ping, which comes
        after the server took in everything before it, and after the report of any loss. On a stream with one replica
        they are stored then. On a replicated stream they are on their way to the replicas, and only a later
        acknowledgement or the final one proves them stored.

        Raises:
            BatchError: The batch ended first.

        Cancellation: The batch stays usable.
        """
        batch, session = self._batch, self._session
        if not batch.sent:
            return
        await session.ready(batch.can_ask)
        sent = batch.sent
        if not batch.is_settled(sent):
            await session.write(batch.ping(session.now()), 1, 0)
            await session.wait(lambda: batch.is_settled(sent))

    async def ping(self) -> FastPubAck:
        """Ask the server for its position in the batch; return its answer.

        Raises:
            EmptyBatchError: Nothing was sent yet.
            BatchError: The batch has ended.

        Cancellation: The batch stays usable.
        """
        batch, session = self._batch, self._session
        await session.ready(batch.can_ask)
        before = batch.pongs
        await session.write(batch.ping(session.now()), 1, 0)
        await session.wait(lambda: batch.pongs > before)
        return FastPubAck(batch.sent, batch.acked)

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
            BadSubjectError, BadHeaderError, MaxPayloadError, ValueError, TypeError: The message cannot be sent.

        Cancellation: As for `commit_eob`, once the message is sent.
        """
        await self.add(subject, payload, **options)
        return await self.commit_eob()

    async def commit_eob(self) -> BatchAck:
        """End the batch without another message and return the server's final ack.

        Raises:
            EmptyBatchError: Nothing was sent.
            BatchOutcomeUnknownError: The ack did not come; the messages may be stored.
            BatchError: The batch had ended.

        Cancellation: The batch is discarded here; a commit that was sent still ends it on the server.
        """
        batch, session = self._batch, self._session
        await session.ready(batch.can_ask)
        command = batch.commit(session.now())
        try:
            await session.write(command, 1, 0)
            await session.wait(batch.committed)
        except asyncio.CancelledError:
            await self.discard()
            raise
        assert batch.ack is not None
        return batch.ack

    async def discard(self) -> None:
        """End the batch here. What was sent stays stored; the server forgets the batch by itself.

        Cancellation: Not possible: it never suspends.
        """
        self._session.deliver(self._batch.discard())

    async def wait_closed(self) -> EndReason:
        """Wait until the batch ends, and return why it did.

        Cancellation: The batch goes on; nothing is left behind.
        """
        return await self._session.closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batch = self._batch
        if kind is not None or not batch.sent:
            await self.discard()
        elif batch.end_reason is None:
            try:
                await self.commit_eob()
            except BaseException:
                await self.discard()  # a refused or cancelled commit leaves nothing open behind the block
                raise
        elif batch.error is not None:
            batch.check_open()
