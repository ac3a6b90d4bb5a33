"""Direct-get requests on the wire and the loop that drives a read plan over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import nats.errors

from jetstream_ext.client.api import LAG_PAUSE
from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.errors import DirectGetDisabledError, JetStreamExtError, MessagesLostError, RequestTimeoutError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.direct import Block, ReplyDecoder
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.plans import Ask, Plan


class Reply:
    """One request on the wire: the sink of its reply, and the decoder.

    Args:
        stream: The stream that is asked.
        start: The first sequence that it is asked for.
    """

    def __init__(self, stream: str, *, start: int = 1) -> None:
        self.decoder: ReplyDecoder = ReplyDecoder(stream, start=start)
        self._stream = stream
        self._inbox: InboxSubscription | None = None
        self._received: list[Frame] = []
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None

    async def send(self, js: Context, subject: str, payload: bytes, timeout: float) -> None:
        """Send the request; its reply comes to an inbox of its own.

        Raises:
            MaxPayloadError: The request is over the server's limit, which would cost the connection.
            ConnectionClosedError, ConnectionDrainingError, ConnectionReconnectingError: Nothing was sent.
        """
        connection = js.connection
        connection.check_usable()
        self.decoder.server_version = connection.server_version
        frames.check_size(b"", payload, connection.max_payload)
        self._inbox = await connection.inbox(InboxHandler(self._frames, self._disconnected), timeout=timeout)
        command = frames.pub(subject.encode(), self._inbox.subject.encode(), b"", payload)
        await connection.write(command, 1, len(payload), timeout=timeout)

    def _frames(self, frames: list[Frame]) -> None:
        if self._received:
            self._received += frames
        else:
            self._received = frames
        self._wake()

    def _disconnected(self) -> None:
        self._gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout: float) -> list[Frame]:
        """Return what has come, at least one frame."""
        if not self._received and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._waiter
            except TimeoutError:
                raise RequestTimeoutError(self._silence(timeout)) from None
            finally:
                self._waiter = None
        received, self._received = self._received, []
        if not received:
            raise MessagesLostError(
                f"stream {self._stream!r}: the connection was lost while a direct get was being answered",
                expected=self.decoder.last_seq,
            )
        return received

    def _silence(self, timeout: float) -> str:
        if not self.decoder.count:
            return f"stream {self._stream!r}: no answer to a direct get within {timeout:.4g} s"
        return (
            f"stream {self._stream!r}: the answer to a direct get stopped after {self.decoder.count} messages, and "
            f"nothing came for {timeout:.4g} s (an API imported from another account has to be exported with "
            "response_type stream)"
        )

    def close(self) -> None:
        """Stop listening."""
        if self._inbox is not None:
            self._inbox.close()


async def read_blocks(js: Context, stream: str, plan: Plan, timeout: float) -> AsyncGenerator[Block, None]:
    """Drive `plan`: yield its rows as they come, retrying once from the last good row wherever that is stateless.

    A reply that only goes silent counts as progress when it ends, and not before: who always lets one message through
    would make the read take a timeout for each of them. Where somebody answered before, nobody to ask (503) is taken
    for a server that went down or a leader that is being elected, and asked again for `timeout` seconds.
    """
    subject = f"{js.prefix}.DIRECT.GET.{stream}"
    loop = asyncio.get_running_loop()
    replies: dict[Ask, Reply] = {}
    retried = silent = answered = False
    deadline = 0.0
    rows = Block()

    def finished() -> bool:
        return plan.done

    try:
        while True:
            failure: JetStreamExtError | nats.errors.Error | None = None
            away = False
            try:
                while (ask := plan.next_request()) is not None:
                    reply = replies[ask] = Reply(stream, start=ask.request.seq or 1)
                    await reply.send(js, subject, ask.request.encode(), timeout)
            except (MessagesLostError, nats.errors.ConnectionReconnectingError) as error:
                failure = error
            # Only now, so that the server has something to do while the reader has.
            if rows.seqs:
                ready, rows = rows, Block()
                yield ready
            if finished():
                return
            if failure is None:
                oldest = plan.oldest
                assert oldest is not None
                reply = replies[oldest]
                decoder = reply.decoder
                try:
                    block = decoder.feed(await reply.take(timeout))
                except (MessagesLostError, RequestTimeoutError) as error:
                    failure = error
                except DirectGetDisabledError as error:
                    failure = error
                    deadline = deadline or loop.time() + timeout
                    away = answered and loop.time() < deadline
                    if not away:
                        raise
                else:
                    deadline = 0.0
                    if block.seqs:
                        answered = True
                        rows = plan.accept(oldest, block, decoder.size, block.pending(-1))
                        retried = retried and not rows.seqs
                    failure = decoder.broken
                    if decoder.end is not None:
                        silent = False
                        for void in [oldest, *plan.finish(oldest, decoder.end)]:
                            replies.pop(void).close()
            if failure is not None:
                if rows.seqs:
                    ready, rows = rows, Block()
                    yield ready
                voids = plan.retry()
                if finished():
                    return
                if voids is None or ((retried or silent) and not away):
                    raise failure
                if away:
                    await asyncio.sleep(LAG_PAUSE)
                else:
                    retried, silent = True, isinstance(failure, RequestTimeoutError)
                for void in voids:
                    replies.pop(void).close()
                await js.connection.wait_usable(timeout)
    finally:
        for reply in replies.values():
            reply.close()
