"""What is remembered for some seconds instead of being asked for every batch: streams by subject, and API levels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import nats.errors
from nats.aio.client import Client
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import APIError, NotFoundError

from jetstream_ext.client.api import Api, stream_state
from jetstream_ext.client.context import Context
from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol.stream_state import StreamState
from jetstream_ext.types import BatchAck

# For so many seconds an answer is used again. It bounds how much `AtomicBatch.resolve` may have to read.
_FRESH: Final = 30.0
# A user without the permission to ask gets no answer, as during an election. That may cost a batch at most so many
# seconds; afterwards nothing is asked for a while, twice as long every time.
_PATIENCE: Final = 2.0
_LONGEST_SILENCE: Final = 3600.0


@dataclass(slots=True)
class _Memory:
    """What is known of the JetStream behind one prefix, for one session of one connection."""

    session: int
    streams: dict[str, tuple[float, StreamState]] = field(default_factory=dict)
    last_seqs: dict[str, int] = field(default_factory=dict)
    ask_streams_at: float = 0.0
    silence: float = _FRESH
    level: tuple[float, int] | None = None


_memories: WeakKeyDictionary[Client, dict[str, _Memory]] = WeakKeyDictionary()


def _memory(context: Context) -> _Memory:
    by_prefix, session = _memories.setdefault(context.nc, {}), context.connection.session
    memory = by_prefix.get(context.prefix)
    if memory is None or memory.session != session:
        memory = by_prefix[context.prefix] = _Memory(session)
    return memory


async def lookup_stream(
    context: Context, subject: str, stream: str | None, timeout: float
) -> tuple[StreamState, int] | None:
    """Return the stream that stores messages on `subject`, and a sequence that it had before this call returned.

    None means that it cannot be known: there is no such stream, or no server answered.

    Args:
        context: The context.
        subject: The subject.
        stream: The stream's name, where it is known.
        timeout: Seconds that asking may take.
    """
    memory, now = _memory(context), asyncio.get_running_loop().time()
    for asked_at, state in memory.streams.values():
        if now - asked_at < _FRESH and (state.name == stream if stream else state.stores(subject)):
            return state, max(state.last_seq, memory.last_seqs.get(state.name, 0))
    if now < memory.ask_streams_at:
        return None
    try:
        async with asyncio.timeout(min(timeout, _PATIENCE)):
            name = stream or await stream_name(context, subject, timeout)
            if name is None:
                return None
            state = await stream_state(context, name, timeout)
    except NotFoundError:
        return None
    except (TimeoutError, RequestTimeoutError):
        memory.ask_streams_at = now + memory.silence
        memory.silence = min(memory.silence * 2, _LONGEST_SILENCE)
        return None
    except (APIError, ResponseError):
        return None  # the server's refusal of the batch itself says more
    memory.silence = _FRESH
    for old in [old for old, (asked_at, _) in memory.streams.items() if now - asked_at >= _FRESH]:
        del memory.streams[old]
        memory.last_seqs.pop(old, None)
    memory.streams[state.name] = now, state
    memory.last_seqs.pop(state.name, None)
    return state, state.last_seq


async def stream_name(context: Context, subject: str, timeout: float) -> str | None:
    """Return the name of the stream that stores messages on `subject`, or None: no stream does.

    Raises:
        ServiceUnavailableError, ServerError, RequestTimeoutError, ResponseError: As for `Api.ask`.
    """
    names = (await Api(context, timeout).ask("STREAM.NAMES", {"subject": subject})).get("streams")
    return str(names[0]) if isinstance(names, list) and names else None


def remember_ack(context: Context, ack: BatchAck) -> None:
    """Note that a stream has the messages that `ack` acknowledges."""
    memory = _memory(context)
    if ack.stream in memory.streams and memory.last_seqs.get(ack.stream, 0) < ack.seq:
        memory.last_seqs[ack.stream] = ack.seq


async def api_level(context: Context) -> int:
    """Return the API level of the JetStream behind `context` (0: a server before 2.11; ADR-44).

    From 2.12 on a server's greeting has it. Behind a domain or another prefix the JetStream is another server's, which
    is asked; where it does not answer, the greeting is used.
    """
    greeted = context.connection.api_level or 0
    if context.prefix == DEFAULT_PREFIX:
        return greeted
    memory, now = _memory(context), asyncio.get_running_loop().time()
    if memory.level is not None and now - memory.level[0] < _FRESH:
        return memory.level[1]
    try:
        level = await Api(context, min(context.timeout, _PATIENCE)).level()
    except RequestTimeoutError:
        level = greeted  # remembered: a user without the permission to ask gets no answer the next time either
    except (nats.errors.Error, APIError):
        return greeted
    memory.level = now, level
    return level
