"""Which stream a subject belongs to, and what its leader says of it; asked once in a while, not for every batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from jetstream_ext.client.api import Api
from jetstream_ext.client.connection import JetStream
from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol.stream_facts import StreamFacts, parse_stream_info
from jetstream_ext.types import BatchAck

# For so many seconds an answer is taken again. It bounds how much `AtomicBatch.resolve` may have to read.
_FRESH: Final = 30.0
# A user may lack the permission to ask, which looks like silence (as an election does): it must not cost a batch its
# whole timeout, nor every batch anything. After silence nothing is asked for a while, twice as long every time.
_PATIENCE: Final = 2.0
_LONGEST_SILENCE: Final = 3600.0


@dataclass(slots=True)
class _Known:
    """What is known of the streams behind one prefix, on one connection to one server."""

    session: int
    streams: dict[str, tuple[float, StreamFacts]] = field(default_factory=dict)
    last_seq: dict[str, int] = field(default_factory=dict)
    ask_at: float = 0.0
    silence: float = _FRESH


_known: WeakKeyDictionary[Client, dict[str, _Known]] = WeakKeyDictionary()


def session_of(js: JetStream) -> int:
    """Return a number that is another one after every reconnect."""
    return int(js.nc.stats["reconnects"])


def _memory(js: JetStream) -> _Known:
    by_prefix = _known.setdefault(js.nc, {})
    known = by_prefix.get(js.prefix)
    if known is None or known.session != session_of(js):
        known = by_prefix[js.prefix] = _Known(session_of(js))
    return known


async def find_owner(js: JetStream, subject: str, stream: str | None, timeout: float) -> tuple[StreamFacts, int] | None:
    """Return the stream that stores messages on `subject`, and a sequence that it had before this call returned.

    None is not to be known: there is no such stream, or nobody answered the question.

    Args:
        js: The context.
        subject: The subject.
        stream: The stream's name, where it is known.
        timeout: Seconds that asking may take.
    """
    memory, now = _memory(js), asyncio.get_running_loop().time()
    for at, facts in memory.streams.values():
        if now - at < _FRESH and (facts.name == stream if stream else facts.takes(subject)):
            return facts, max(facts.last_seq, memory.last_seq.get(facts.name, 0))
    if now < memory.ask_at:
        return None
    try:
        async with asyncio.timeout(min(timeout, _PATIENCE)):
            name = stream or await _name(js, subject, timeout)
            if name is None:
                return None
            facts = await stream_facts(js, name, timeout)
    except nats.js.errors.NotFoundError:
        return None
    except (TimeoutError, RequestTimeoutError):
        memory.ask_at = now + memory.silence
        memory.silence = min(memory.silence * 2, _LONGEST_SILENCE)
        return None
    except (nats.js.errors.APIError, ResponseError):
        return None  # the server's refusal of the batch itself says more
    memory.silence = _FRESH
    for old in [old for old, (at, _) in memory.streams.items() if now - at >= _FRESH]:
        del memory.streams[old]
        memory.last_seq.pop(old, None)
    memory.streams[facts.name] = now, facts
    memory.last_seq.pop(facts.name, None)
    return facts, facts.last_seq


def remember(js: JetStream, ack: BatchAck) -> None:
    """Take it that a stream has the messages that `ack` speaks of."""
    memory = _memory(js)
    if ack.stream in memory.streams and memory.last_seq.get(ack.stream, 0) < ack.seq:
        memory.last_seq[ack.stream] = ack.seq


async def stream_facts(js: JetStream, stream: str, timeout: float) -> StreamFacts:
    """Return what the leader of `stream` says of it.

    Raises:
        RequestTimeoutError: No answer within `timeout` seconds.
        NotFoundError: nats-py's: there is no such stream.
        nats.js.errors.APIError: The server refused, or nobody answers for JetStream.
        ConnectionClosedError: nats-py's: the connection is closed, or was while waiting.
        ResponseError: The answer is malformed.
    """
    reply = await Api(js, timeout).ask(f"STREAM.INFO.{stream}")
    try:
        return parse_stream_info(reply)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ResponseError(f"stream {stream!r}: what its leader says of it is malformed") from None


async def _name(js: JetStream, subject: str, timeout: float) -> str | None:
    reply = await Api(js, timeout).ask("STREAM.NAMES", {"subject": subject})
    names = reply.get("streams")
    return str(names[0]) if isinstance(names, list) and names else None
