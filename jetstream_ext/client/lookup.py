"""A cache of streams by subject and of API levels, so that batches need not ask for them each time."""

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

# How long an answer is used, in seconds. It bounds how much `AtomicBatch.resolve` may have to read.
_CACHE_TTL: Final = 30.0
# A client without the permission to ask gets no answer, as during an election. A lookup waits at most this long; after
# that, lookups pause, twice as long each time.
_LOOKUP_TIMEOUT: Final = 2.0
_LONGEST_PAUSE: Final = 3600.0


@dataclass(slots=True)
class _Memory:
    """The cached answers of the JetStream behind one prefix, for one session of one connection."""

    session: int
    streams: dict[str, tuple[float, StreamState]] = field(default_factory=dict)
    last_seqs: dict[str, int] = field(default_factory=dict)
    paused_until: float = 0.0
    pause: float = _CACHE_TTL
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
    """Return the stream that stores `subject` (its name may be given), and a sequence that it has already reached.

    None: there is no such stream, or no server answered.
    """
    memory, now = _memory(context), asyncio.get_running_loop().time()
    for asked_at, state in memory.streams.values():
        if now - asked_at < _CACHE_TTL and (state.name == stream if stream else state.stores(subject)):
            return state, max(state.last_seq, memory.last_seqs.get(state.name, 0))
    if now < memory.paused_until:
        return None
    try:
        async with asyncio.timeout(min(timeout, _LOOKUP_TIMEOUT)):
            name = stream or await stream_name(context, subject, timeout)
            if name is None:
                return None
            state = await stream_state(context, name, timeout)
    except NotFoundError:
        return None
    except (TimeoutError, RequestTimeoutError):
        memory.paused_until = now + memory.pause
        memory.pause = min(memory.pause * 2, _LONGEST_PAUSE)
        return None
    except (APIError, ResponseError):
        return None  # the server's refusal of the batch will say more
    memory.pause = _CACHE_TTL
    for old in [old for old, (asked_at, _) in memory.streams.items() if now - asked_at >= _CACHE_TTL]:
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
    """Note that a stream has reached the sequence of `ack`."""
    memory = _memory(context)
    if ack.stream in memory.streams and memory.last_seqs.get(ack.stream, 0) < ack.seq:
        memory.last_seqs[ack.stream] = ack.seq


async def api_level(context: Context) -> int:
    """Return the API level of the JetStream behind `context` (0: a server before 2.11; ADR-44).

    A server's ``INFO`` has it from 2.12. Behind a domain or another prefix, the JetStream of another server is asked; if
    that does not answer, the ``INFO`` is used.
    """
    info_level = context.connection.api_level or 0
    if context.prefix == DEFAULT_PREFIX:
        return info_level
    memory, now = _memory(context), asyncio.get_running_loop().time()
    if memory.level is not None and now - memory.level[0] < _CACHE_TTL:
        return memory.level[1]
    try:
        level = await Api(context, min(context.timeout, _LOOKUP_TIMEOUT)).level()
    except RequestTimeoutError:
        level = info_level  # cached: without the permission to ask, the next request gets no answer either
    except (nats.errors.Error, APIError):
        return info_level
    memory.level = now, level
    return level
