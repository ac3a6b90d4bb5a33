"""Asks what `protocol.atomic_resolve` wants to know about a batch whose commit was not answered."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from jetstream_ext.client.api import LAG_PAUSE, get_at_leader, stream_state
from jetstream_ext.client.base_connection import InboxHandler
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import BatchOutcomeUnknownError, JetStreamExtError, RequestTimeoutError
from jetstream_ext.protocol import atomic_resolve as questions
from jetstream_ext.protocol import frames
from jetstream_ext.protocol.atomic_resolve import Commit, FenceReplies, NeverKnown, NotYetKnown, Plan, Question
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.types import BatchAck

# During an election no server answers, so a question waits no longer than this before everything is asked again.
_QUESTION_TIMEOUT: Final = 2.0

_WORTH_ANOTHER_ATTEMPT: Final = (
    NotYetKnown,
    JetStreamExtError,
    nats.js.errors.ServiceUnavailableError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionReconnectingError,
)


async def resolve(context: Context, commit: Commit, timeout: float, cause: BaseException | None) -> BatchAck | None:
    """Return the ack that a commit should have had, or None: nothing of the batch is stored, nor will be.

    Args:
        context: The context.
        commit: What is known of it.
        timeout: Seconds that it may take.
        cause: Why the outcome is unknown.

    Raises:
        BatchOutcomeUnknownError: It cannot be known.
    """
    why = "no leader answered"
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return await _follow(context, questions.find_commit(commit), _QUESTION_TIMEOUT)
                except _WORTH_ANOTHER_ATTEMPT as error:
                    why, cause = str(error) or why, error
                await asyncio.sleep(LAG_PAUSE)
    except TimeoutError:
        why = f"{why} (tried for {timeout:g} s)"
    except (NeverKnown, nats.errors.Error, nats.js.errors.APIError) as error:
        why = str(error)
    raise BatchOutcomeUnknownError(
        f"batch {commit.batch_id}: whether it is stored cannot be known: {why}",
        batch_id=commit.batch_id,
        sent=commit.size,
        acked=commit.staged,
        outcome="unknown",
    ) from cause


async def find_earlier(context: Context, commit: Commit, timeout: float) -> BatchAck | None:
    """Return the ack of an earlier batch with the same id and size, if its last message is still stored.

    Raises:
        RequestTimeoutError, ResponseError, nats.js.errors.APIError: The stream could not be read.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _follow(context, questions.find_earlier(commit, datetime.now(UTC)), timeout)
    except TimeoutError as error:
        stream = commit.opened.name if commit.opened else ""
        raise RequestTimeoutError(
            f"stream {stream!r} was not read to the end within {timeout:g} s: it may have an earlier batch "
            f"{commit.batch_id}"
        ) from error


async def _follow(context: Context, plan: Plan, timeout: float) -> BatchAck | None:
    """Answer the questions of a plan until it has its verdict."""
    answer: object = None
    while True:
        try:
            question = plan.send(answer)
        except StopIteration as verdict:
            ack: BatchAck | None = verdict.value
            return ack
        answer = await _ask(context, question, timeout)


async def _ask(context: Context, question: Question, timeout: float) -> Any:
    match question:
        case questions.AskState(stream):
            try:
                return await stream_state(context, stream, timeout)
            except nats.js.errors.NotFoundError:
                return None
        case questions.AskMessage(stream, request):
            return await get_at_leader(context, stream, request, timeout)
        case questions.AskRange(stream, search, options):
            assert isinstance(context.js, JetStreamContext)  # only those publish
            async with DirectGet(context.js, stream, timeout=timeout).scan(**options) as messages:
                async for message in messages:
                    search.see(message.seq, message.headers)
        case questions.AskFence(subject, kill, mark):
            return await _send_fence(context, subject.encode(), kill, mark, timeout)
        case questions.Pause():
            await asyncio.sleep(questions.PAUSE)
    return None


async def _send_fence(context: Context, subject: bytes, kill: bytes, mark: bytes, timeout: float) -> FenceReplies:
    replies: dict[bytes, tuple[bytes, bytes]] = {}
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(received: list[Frame]) -> None:
        for frame in received:
            name, header, payload = frames.parts(frame)
            replies[name.rpartition(b".")[2]] = header, payload
        if replies.keys() >= {b"kill", b"mark"} and not complete.done():
            complete.set_result(None)

    def disconnected() -> None:
        if not complete.done():
            complete.set_exception(nats.errors.ConnectionReconnectingError())

    connection = context.connection
    connection.check_usable()
    inbox = await connection.inbox(InboxHandler(receive, disconnected), tail=".*", timeout=timeout)
    try:
        reply = inbox.subject.encode()
        data = frames.pub(subject, reply + b".kill", kill, b"") + frames.pub(subject, reply + b".mark", mark, b"")
        session = connection.session
        await connection.write(data, 2, 0, timeout=timeout)
        async with asyncio.timeout(timeout):
            await complete
    except TimeoutError:
        raise RequestTimeoutError(f"no answer on {subject.decode()} within {timeout:g} s") from None
    finally:
        inbox.close()
    return session, replies[b"kill"], replies[b"mark"]
