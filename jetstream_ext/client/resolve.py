"""Finding out whether an atomic batch is stored whose commit was not answered.

1. Ask the leader for the last message on the batch's last subject: it may be there, and all is said.
2. *Fence* (`atomic_search.fence`): on the connection that carried the commit, so behind it, two messages that are never
   stored. Their refusals prove that the leader has dealt with the commit, and say how far its stream will get.
3. Wait until the leader has applied that much, then read everything since the batch was opened.
4. Look whether the leader is still the same and hears from a majority: only then was nothing read from a server that
   had been replaced without knowing it.

A connection that was replaced in between orders nothing: the commit may still be on its way through the old one. Then
the fence is proof only where the server had acknowledged an earlier message of the batch, because it makes the server
forget those, and a batch cannot begin in the middle.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import nats.errors
import nats.js.errors
import orjson
from nats.js import JetStreamContext

from jetstream_ext.client.api import LAG_PAUSE, get_at_leader, stream_state
from jetstream_ext.client.base_connection import InboxHandler
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.errors import BatchOutcomeUnknownError, JetStreamExtError, RequestTimeoutError, ServerError
from jetstream_ext.protocol import frames
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_refusal
from jetstream_ext.protocol.atomic import AtomicBatchMachine
from jetstream_ext.protocol.atomic_search import Search, ends_batch, fence, reached
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.types import BatchAck

# One question may take so long: during an election nobody answers, and asking again does not wait for the answer that
# will not come.
_QUESTION: Final = 2.0
# After these refusals of the fence's first message the server does not have the batch.
_FORGOTTEN: Final = frozenset({10174, 10176, 10199})


@dataclass(frozen=True, slots=True)
class Question:
    """What was known when the batch was committed.

    Attributes:
        owner: The stream, and a sequence that it had when the batch was opened; None where it could not be found out.
        session: The connection that the commit was written to, by `session_of`.
    """

    owner: tuple[StreamState, int] | None
    session: int


class _NeverKnown(Exception):  # noqa: N818 - a verdict, not an error
    """Trying again cannot help."""


class _NotYet(Exception):  # noqa: N818
    """Trying again may help."""


async def resolve(js: Context, question: Question, machine: AtomicBatchMachine, timeout: float) -> BatchAck | None:
    """Return the ack that the commit should have had, or None: nothing of the batch is stored, nor will be.

    Raises:
        BatchOutcomeUnknownError: It cannot be known.
    """
    why = "no leader answered"
    cause: BaseException | None = machine.error
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return await _attempt(js, question, machine)
                except (
                    _NotYet,
                    JetStreamExtError,
                    nats.js.errors.ServiceUnavailableError,
                    nats.errors.NoRespondersError,
                    nats.errors.ConnectionReconnectingError,
                ) as error:
                    why, cause = str(error) or why, error
                await asyncio.sleep(LAG_PAUSE)
    except TimeoutError:
        why = f"{why} (tried for {timeout:g} s)"
    except (_NeverKnown, nats.errors.Error, nats.js.errors.APIError) as error:
        why = str(error)
    raise BatchOutcomeUnknownError(
        f"batch {machine.batch_id}: whether it is stored cannot be known: {why}",
        batch_id=machine.batch_id,
        sent=machine.sent,
        acked=machine.staged,
        outcome="unknown",
    ) from cause


async def find_earlier(js: Context, question: Question, machine: AtomicBatchMachine, timeout: float) -> BatchAck | None:
    """Return the ack of an earlier batch with the same id and size, if its last message is still there.

    Raises:
        RequestTimeoutError, ResponseError, nats.js.errors.APIError: The stream could not be read.
    """
    if question.owner is None:
        return None
    stream = question.owner[0].name
    try:
        async with asyncio.timeout(timeout):
            return await _earlier(js, stream, machine, timeout)
    except TimeoutError as error:
        raise RequestTimeoutError(
            f"stream {stream!r} was not read to the end within {timeout:g} s: it may have an earlier batch "
            f"{machine.batch_id}"
        ) from error


async def _earlier(js: Context, stream: str, machine: AtomicBatchMachine, timeout: float) -> BatchAck | None:
    subject = machine.last_subject
    facts = await stream_state(js, stream, timeout)
    last = await get_at_leader(js, stream, {"last_by_subj": subject}, timeout)
    if last is not None and ends_batch(machine.batch_id, machine.size, last.headers):
        return _ack(facts, last.seq, machine)
    if facts.allows_direct:
        # Ids are remembered for the duplicate window; a minute more for clocks that differ.
        since = datetime.now(UTC) - (facts.duplicate_window or timedelta()) - timedelta(seconds=60)
        async with _direct(js, stream, timeout).scan(subject=subject, start_time=since) as messages:
            async for message in messages:
                if ends_batch(machine.batch_id, machine.size, message.headers):
                    return _ack(facts, message.seq, machine)
    return None


async def _attempt(js: Context, question: Question, machine: AtomicBatchMachine) -> BatchAck | None:
    if question.owner is None:
        raise _NeverKnown("the stream could not be looked up when the batch was opened")
    opened, after = question.owner
    facts = await _facts(js, opened)
    if facts.last_seq < after:
        raise _NotYet("its leader does not have the messages that it had")
    search = Search(machine.batch_id, machine.size, after, contiguous=facts.contiguous)

    last = await get_at_leader(js, facts.name, {"last_by_subj": machine.last_subject}, _QUESTION)
    if last is not None and last.seq > after:
        seen = Search(machine.batch_id, machine.size, last.seq - 1)
        seen.see(last.seq, last.headers)
        if seen.last_seq is not None:
            return _ack(facts, seen.last_seq, machine)

    session, until = await _fence(js, machine, facts)
    leader, give_up = facts.leader, asyncio.get_running_loop().time() + _QUESTION
    while True:
        facts = await _facts(js, opened)
        if facts.leader != leader:
            raise _NotYet("the stream changed its leader")
        if facts.last_seq >= (until or 0):
            break
        if asyncio.get_running_loop().time() > give_up:
            # It may have refused one of those when it applied them, and then counts anew.
            raise _NotYet("the leader has not applied everything that is on its way")
        await asyncio.sleep(LAG_PAUSE)
    if until is None and facts.replicated:
        raise _NotYet("the leader does not say how far it is")

    await _read(js, facts, search)
    if search.last_seq is not None:
        return _ack(facts, search.last_seq, machine)
    again = await _facts(js, opened)
    if again.leader != leader or not again.leader_is_certain:
        raise _NotYet("the stream's leader does not hear from a majority")
    if search.room:
        raise _NeverKnown("messages were removed from the stream since, and its own may have been among them")
    if session != question.session and not machine.staged:
        raise _NeverKnown("the connection was replaced, and the commit may still be on its way through the old one")
    return None


async def _facts(js: Context, opened: StreamState) -> StreamState:
    try:
        facts = await stream_state(js, opened.name, _QUESTION)
    except nats.js.errors.NotFoundError:
        raise _NeverKnown("the stream no longer exists") from None
    if facts.created != opened.created:
        raise _NeverKnown("the stream was deleted and made again")
    return facts


async def _read(js: Context, facts: StreamState, search: Search) -> None:
    """Show `search` the stream from where it is to the last sequence in `facts`."""
    end = facts.last_seq
    if search.next_seq > end:
        return
    if facts.allows_direct:
        direct = _direct(js, facts.name, _QUESTION)
        async with direct.scan(seq=search.next_seq, up_to_seq=end, confirm=True) as messages:
            async for message in messages:
                search.see(message.seq, message.headers)
    else:
        while search.next_seq <= end:
            found = await get_at_leader(js, facts.name, {"seq": search.next_seq, "next_by_subj": ">"}, _QUESTION)
            if found is None or found.seq > end:
                break
            search.see(found.seq, found.headers)
    search.skip(end)


def _direct(js: Context, stream: str, timeout: float) -> DirectGet:
    assert isinstance(js.js, JetStreamContext)  # only those publish
    return DirectGet(js.js, stream, timeout=timeout)


async def _fence(js: Context, machine: AtomicBatchMachine, facts: StreamState) -> tuple[int, int | None]:
    """Send the fence; return the connection it went through, and the sequence that the leader will reach if known."""
    loop = asyncio.get_running_loop()
    answers: dict[bytes, Frame] = {}
    complete: asyncio.Future[None] = loop.create_future()

    def take(received: list[Frame]) -> None:
        for frame in received:
            answers[frame[0].rpartition(b".")[2]] = frame
        if len(answers) == 2 and not complete.done():
            complete.set_result(None)

    def disconnected() -> None:
        if not complete.done():
            complete.set_exception(nats.errors.ConnectionReconnectingError())

    connection = js.connection
    connection.check_usable()
    inbox = await connection.inbox(InboxHandler(take, disconnected), tail=".*", timeout=_QUESTION)
    try:
        subject, own = machine.last_subject.encode(), inbox.subject.encode()
        kill, mark = fence(machine.batch_id, facts.name)
        data = frames.pub(subject, own + b".kill", kill, b"") + frames.pub(subject, own + b".mark", mark, b"")
        session = js.connection.session
        await connection.write(data, 2, 0, timeout=_QUESTION)
        async with asyncio.timeout(_QUESTION):
            await complete
    except TimeoutError:
        raise RequestTimeoutError(f"stream {facts.name!r}: no answer within {_QUESTION:g} s") from None
    finally:
        inbox.close()
    killed, marked = (_refusal(answers[which], facts.name) for which in (b"kill", b"mark"))
    if killed.err_code not in _FORGOTTEN or marked.code == 503:
        raise _NotYet(f"the stream's leader does not answer for the batch: {killed.description}")
    return session, reached(marked.description or "")


def _refusal(frame: Frame, stream: str) -> ServerError:
    _, header, payload = frames.parts(frame)
    if not payload:
        code, text = (h.parse_status(header) if header else None) or (0, "")
        return ServerError(code=code, description=text or "no responders")
    try:
        reply = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise _NotYet("the answer to a fence is not JSON") from None
    if not isinstance(reply, dict) or reply.get("error") is None:
        raise _NotYet("the server did not refuse what cannot be stored")
    if reply.get("stream", stream) != stream:
        raise _NeverKnown(f"the batch's last subject belongs to stream {reply['stream']!r} by now")
    return parse_refusal(reply["error"], payload)


def _ack(facts: StreamState, last_seq: int, machine: AtomicBatchMachine) -> BatchAck:
    return BatchAck(facts.name, last_seq, machine.batch_id, machine.size)
