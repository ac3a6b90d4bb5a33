"""Asks the questions of `protocol.outcome`, until it is known what a write did or the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from jetstream_ext.client.api import get_at_leader, settled_state, stream_state
from jetstream_ext.client.base_connection import InboxHandler, NotPermittedError
from jetstream_ext.client.connection import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.client.retry import Retry, is_transient_read
from jetstream_ext.errors import BatchOutcomeUnknownError, RequestTimeoutError
from jetstream_ext.protocol import frames, outcome
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.outcome import Batch, Messages, Question, Unknown, Verdict
from jetstream_ext.protocol.subjects import addressed
from jetstream_ext.text import counted, get_logger, log_state
from jetstream_ext.types import BatchAck

Found = TypeVar("Found")

_log: Final = get_logger("client")

# Seconds to wait for one answer. During an election no server answers, and the search starts again.
_ANSWER_TIMEOUT: Final = 2.0


async def find_out(context: Context, write: Batch | Messages, timeout: float, source: str) -> Verdict:
    """Return what a write did; `source` names it in the log.

    Raises:
        Unknown: It cannot be known, or was not found out within `timeout` seconds; its cause is the last error.
        NotPermittedError: The client may not ask.
    """
    retry = Retry(timeout, transient=may_be_known_later)
    retry.start()
    last: Exception | None = None
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return await search(context, outcome.find(write), source)
                except Exception as error:
                    last = error
                    log_state(_log, source, "outcome not found", error, error=error)
                    await retry.pause_if_transient(error)
    except NotPermittedError:
        raise
    except (TimeoutError, Unknown, nats.errors.Error) as error:
        if isinstance(error, Unknown) and not error.later:
            raise
        if not isinstance(error, TimeoutError) and not may_be_known_later(error):
            raise
        why = str(last or "") or "the stream's leader did not answer"
        raise Unknown(f"{why} (tried for {timeout:g} s)", later=True) from last


async def resolve(
    context: Context, write: Batch | Messages | None, timeout: float, *, batch_id: str, size: int, acked: int = 0
) -> BatchAck | None:
    """Return the ack of a write whose answer was lost, or None if nothing of it is stored; `write` is None if it cannot be found.

    Raises BatchOutcomeUnknownError if that is not known.
    """
    try:
        if write is None:
            raise Unknown("the state of the stream could not be read before the write")
        verdict = await find_out(context, write, timeout, f"batch {batch_id}")
        if verdict.doubt:
            raise Unknown(verdict.doubt)
    except (Unknown, NotPermittedError) as unknown:
        text = f"batch {batch_id}: the outcome is unknown: {unknown}; its {counted(size, 'message')} may be stored"
        raise BatchOutcomeUnknownError(text, batch_id=batch_id, sent=size, acked=acked, outcome="unknown") from (
            unknown.__cause__ or unknown
        )
    return BatchAck(write.before.name, verdict.seq, batch_id, size) if verdict.stored else None


def may_be_known_later(error: BaseException) -> bool:
    return error.later if isinstance(error, Unknown) else is_transient_read(error)


async def search(
    context: Context, searching: Generator[Question, Any, Found], source: str, timeout: float = _ANSWER_TIMEOUT
) -> Found:
    """Answer the questions of one search, each within `timeout` seconds; return what it found."""
    answer = None
    try:
        while True:
            question = searching.send(answer)
            log_state(_log, source, "outcome searched", question=type(question).__name__)
            context.connection.check_usable()  # nats-py would keep every question for the next connection
            answer = await _ask(context, question, timeout)
    except StopIteration as end:
        found: Found = end.value
        return found


async def _ask(context: Context, question: Question, timeout: float) -> Any:
    match question:
        case outcome.AskState(stream, seq):
            try:
                return await settled_state(lambda: stream_state(context, stream, timeout), seq)
            except nats.js.errors.NotFoundError:
                return None
        case outcome.AskMessage(stream, request):
            try:
                return await get_at_leader(context, stream, request, timeout)
            except nats.js.errors.NotFoundError:
                return None  # the question after it is about the stream
        case outcome.AskRange(stream, first, last, see):
            assert isinstance(context.js, JetStreamContext)  # only those publish
            direct, subject = DirectGet(context.js, stream, timeout=timeout), f"{context.prefix}.DIRECT.GET.{stream}"
            is_refused = context.connection.refusals(subject)
            try:
                async with direct.scan(seq=first, up_to_seq=last, confirm=True) as messages:
                    async for message in messages:
                        see(message)
            except RequestTimeoutError as late:
                if is_refused():
                    raise NotPermittedError(subject) from late
                raise
        case outcome.AskFence(subject, messages):
            return await send_fence(context, subject, messages, timeout)
    return None


async def send_fence(
    context: Context, subject: str, messages: Sequence[bytes], timeout: float
) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Send messages of headers only in one write; return the connection's session and the replies, header and payload.

    Raises ConnectionReconnectingError if the connection is lost meanwhile, and NotPermittedError as soon as the server
    refuses the messages.
    """
    replies: dict[bytes, tuple[bytes, bytes]] = {}
    loop = asyncio.get_running_loop()
    complete: asyncio.Future[Any] = loop.create_future()
    numbers = [b"%d" % number for number in range(len(messages))]

    def receive(received: list[Frame]) -> None:
        for frame in received:
            name, header, payload = frames.parts(frame)
            replies[name.rpartition(b".")[2]] = header, payload
        if replies.keys() >= set(numbers) and not complete.done():
            complete.set_result(True)

    def disconnected() -> None:
        if not complete.done():
            complete.set_result(connection.end or nats.errors.ConnectionReconnectingError())

    connection, to = context.connection, addressed(subject, context.prefix).encode()
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
        if await connection.reply(complete, loop.time() + timeout, subject) is None:
            raise RequestTimeoutError(f"timed out after {timeout:.4g} s while waiting for the answers on {subject}")
    finally:
        inbox.close()
    return session, [replies[number] for number in numbers]
