"""Sending messages that are never stored; `protocol.fence` says what their refusals prove."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import nats.errors

from jetstream_ext.client.base_connection import InboxHandler, NotPermittedError, refused_message
from jetstream_ext.client.connection import Context
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.frames import Frame


async def send_fence(
    context: Context, subject: str, messages: Sequence[bytes], timeout: float
) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Send messages of headers only in one write; return the connection's session and the replies, header and payload.

    Raises ConnectionReconnectingError if the connection is lost meanwhile, and NotPermittedError as soon as the server
    refuses the messages.
    """
    replies: dict[bytes, tuple[bytes, bytes]] = {}
    complete: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    numbers = [b"%d" % number for number in range(len(messages))]

    def receive(received: list[Frame]) -> None:
        for frame in received:
            name, header, payload = frames.parts(frame)
            replies[name.rpartition(b".")[2]] = header, payload
        if replies.keys() >= set(numbers) and not complete.done():
            complete.set_result(True)

    def disconnected() -> None:
        if not complete.done():
            complete.set_result(False)

    connection, to = context.connection, subject.encode()
    connection.check_usable()
    inbox = await connection.inbox(InboxHandler(receive, disconnected), tail=".*", timeout=timeout)
    try:
        reply = inbox.subject.encode()
        data = b"".join(
            frames.pub(to, b"%b.%b" % (reply, number), header, b"")
            for number, header in zip(numbers, messages, strict=True)
        )
        session = connection.session
        await connection.write(data, len(messages), 0, timeout=timeout)
        what, refused = f"the answers on {subject}", NotPermittedError(subject, refused_message(subject))
        if not await connection.answered(complete, timeout, what, subject, subject, refused):
            raise nats.errors.ConnectionReconnectingError
    finally:
        inbox.close()
    return session, [replies[number] for number in numbers]
