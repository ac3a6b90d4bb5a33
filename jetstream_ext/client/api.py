"""Requests to the JetStream API: a stream's state and messages at its leader, a cache of them, bounded concurrency."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from jetstream_ext.client.base_connection import NotPermittedError, mark_retrieved
from jetstream_ext.client.connection import Context
from jetstream_ext.client.retry import Retry, has_no_leader
from jetstream_ext.errors import (
    ErrorCode,
    RequestTimeoutError,
    ResponseError,
    ServerError,
    Status,
    StreamRecreatedError,
)
from jetstream_ext.protocol.api import (
    Server,
    StreamState,
    parse_answer,
    parse_message,
    parse_stream_state,
    parsing,
    recreated,
)
from jetstream_ext.protocol.direct import Request, StoredMsg
from jetstream_ext.protocol.feature_table import START_TIME_LEVEL, Feature
from jetstream_ext.protocol.numbers import json_number
from jetstream_ext.protocol.options import reads_subject, rfc3339
from jetstream_ext.protocol.subjects import bucket_stream, check_filter, check_name
from jetstream_ext.types import BatchAck

LAG_PAUSE: Final = 0.05  # seconds between two checks whether a leader, a replica or a mirror has caught up
NO_JETSTREAM: Final = "the server runs without JetStream, or the JetStream domain differs"
SETTLE: Final = 3.0  # seconds that a new leader may take to apply what its predecessor had acknowledged

# Seconds before an unanswered request is repeated: a new leader does not know the requests to a leader that died.
_REPEAT_AFTER: Final = 1.0
# How long a cached answer or refusal is used, in seconds. It bounds how much `AtomicBatch.resolve` may have to read.
_CACHE_TTL: Final = 30.0
LOOKUP_TIMEOUT: Final = 2.0  # seconds that a call waits at most for what it can do without
_NO_TIME: Final = 0.001

_NONE_ON_THE_SERVER: Final = "the server has no JetStream"
_NOT_ENABLED: Final[dict[int, str]] = {
    ErrorCode.NOT_ENABLED_FOR_ACCOUNT: "the account has no JetStream",
    ErrorCode.NOT_ENABLED: _NONE_ON_THE_SERVER,
}

_T = TypeVar("_T")
_Item = TypeVar("_Item")


class Api:
    """The JetStream API for one call of this library; all its requests share the deadline of `timeout` seconds.

    A `lookup` asks what the call can do without. The server logs every request that it refuses, so a lookup does not send
    one again for a while. `what` is the stream as refusals call it; without it they have the names in the subject.
    """

    def __init__(self, context: Context, timeout: float | None = None, *, lookup: bool = False, what: str = "") -> None:
        self.context = context
        self._what = what
        self._lookup = lookup
        self._timeout = context.resolve_timeout(timeout)
        self._deadline = asyncio.get_running_loop().time() + self._timeout

    async def ask(
        self, what: str, body: Mapping[str, Any] | None = None, *, prefix: str | None = None, repeat: bool = False
    ) -> dict[str, Any]:
        """Send a request to the subject `what` below `prefix` (default: the context's) and return the answer.

        `repeat` repeats the request while there is no answer or no leader; only for requests that change nothing.

        Raises:
            NotFoundError, ServiceUnavailableError: nats-py's: no such thing; no server answers on the subject.
            ServerError: Any other refusal.
            NotPermittedError: The client may not send the request.
            RequestTimeoutError, ResponseError: No answer or (with `repeat`) no leader in time; a malformed answer.
            BadSubjectError: The subject is invalid; nothing was sent.
        """
        subject = f"{prefix or self.context.prefix}.{what}"
        check_filter(subject)  # it may have a name or prefix that another program wrote
        payload = b"" if body is None else orjson.dumps(body)
        connection = self.context.connection
        cache = _cache(self.context, prefix)
        clock = asyncio.get_running_loop().time
        now = clock()
        if self._lookup and now - cache.refused.get(subject, -math.inf) < _CACHE_TTL:
            raise NotPermittedError(subject)
        again, timeout = _REPEAT_AFTER if repeat else math.inf, self._timeout
        retry: Retry | None = None
        while True:
            left = max(0.0, self._deadline - clock())
            try:
                _, reply, size = await connection.request(subject, payload, left, again=again)
                answer = parse_answer(subject, reply[size:], self._what or _object_of(what))
                cache.no_jetstream = ""
                return answer
            except NotPermittedError:
                if self._lookup:
                    recent = {name: when for name, when in cache.refused.items() if now - when < _CACHE_TTL}
                    cache.refused = recent | {subject: now}
                raise
            except RequestTimeoutError:  # it names the seconds that were left
                why = connection.why_silent(())
                raise RequestTimeoutError(f"no answer on {subject} within {timeout:.4g} s{why}") from None
            except nats.errors.ConnectionReconnectingError as error:
                raise RequestTimeoutError(f"no answer on {subject}: the connection was lost") from error
            except nats.errors.NoRespondersError as error:
                own = subject.startswith(f"{DEFAULT_PREFIX}.") and not connection.has_jetstream
                cache.no_jetstream = _NONE_ON_THE_SERVER if own else f"no server answers on {subject}"
                text = f"no server answers on {subject}: {NO_JETSTREAM}"
                raise ServiceUnavailableError(Status.UNAVAILABLE, text) from error
            except ServerError as error:
                cache.no_jetstream = _NOT_ENABLED.get(error.err_code or 0, "")
                if error.code == Status.NOT_FOUND:
                    raise NotFoundError(error.code, _missing(what, error), error.err_code) from error
                if not (repeat and has_no_leader(error)):
                    raise
                late = RequestTimeoutError(f"no leader answered on {subject} within {timeout:.4g} s")
                late.__cause__ = error
                retry = retry or Retry(max(0.0, self._deadline - clock()), first_pause=LAG_PAUSE)
                await retry.pause_until_deadline(late)

    async def stream(
        self, name: str, body: Mapping[str, Any] | None = None, prefix: str | None = None
    ) -> dict[str, Any]:
        """Return the answer of a stream's leader to ``STREAM.INFO``; raise as `ask` does."""
        return await self.ask(f"STREAM.INFO.{name}", body, prefix=prefix, repeat=True)

    async def level(self) -> int:
        """Return the API level of the JetStream that answers (0: before 2.11); raise as `ask` does."""
        answer = await self.ask("INFO")
        with malformed_as_error("the account"):
            return json_number((answer.get("api") or {}).get("level") or 0, "level")


def _object_of(request: str) -> str:
    """Return the consumer or stream that the subject of a request names, or ""."""
    match request.split("."):
        case ["CONSUMER", _, stream, consumer, *_]:
            return f"consumer {consumer!r} of stream {stream!r}"
        case ["STREAM", _, *_, stream]:
            return f"stream {stream!r}"
    return ""


def _missing(request: str, refusal: ServerError) -> str:
    """Return the refusal's text, or a better one with the name that the subject of the request has, if that is missing."""
    match refusal.err_code, request.split("."):
        case ErrorCode.STREAM_NOT_FOUND, ["STREAM", *_, stream] | ["CONSUMER", _, stream, *_]:
            return f"stream {stream!r} does not exist"
        case ErrorCode.CONSUMER_NOT_FOUND, ["CONSUMER", _, stream, consumer, *_]:
            return f"stream {stream!r} has no consumer {consumer!r}"
    return refusal.message


async def gather_bounded(work: Callable[[_Item], Awaitable[_T]], items: Iterable[_Item], *, limit: int) -> list[_T]:
    """Await ``work(item)`` for every item, at most `limit` at a time; return the results in the order of the items.

    The first failure or a cancellation cancels all others. When this returns or raises, all have ended, also if it is
    cancelled again.
    """
    todo = list(items)
    if len(todo) == 1:
        return [await work(todo[0])]
    results: list[_T | None] = [None] * len(todo)
    remaining = iter(enumerate(todo))

    async def worker() -> None:
        for index, item in remaining:
            results[index] = await work(item)

    # Not a TaskGroup: after a failure, that of Python 3.11 leaves the caller's `Task.cancelling` at 1, and then a timeout
    # around the call ends as a cancellation.
    workers = [asyncio.ensure_future(worker()) for _ in range(min(limit, len(todo)))]
    running = set(workers)
    try:
        while running:  # not `gather`, which passes on a second cancellation to those that clean up
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in workers:
            task.add_done_callback(mark_retrieved)
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while running := {task for task in workers if not task.done()}:
            try:
                await asyncio.wait(running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
    return results  # type: ignore[return-value]  # complete once the workers have ended


def _api(where: Context | Api, timeout: float | None) -> Api:
    return where if isinstance(where, Api) else Api(where, timeout)


async def stream_state(where: Context | Api, stream: str, timeout: float | None = None) -> StreamState:
    """Return the state of `stream` as its leader reports it; raise as `Api.ask` does.

    The subjects of a bucket do not count that of `reads_subject`.
    """
    apart = {"subjects_filter": reads_subject(stream)} if stream.startswith(bucket_stream("")) else None
    return parse_stream_state(await _api(where, timeout).stream(stream, apart), stream)


async def check_same_stream(
    where: Context | Api, before: StreamState, now: StreamState | None = None, timeout: float | None = None
) -> StreamState:
    """Return the state of a stream now, or raise StreamRecreatedError if it is another stream than `before`.

    Some servers change `StreamState.created` of a stream that stays the same (2.12 up to 2.12.15 and 2.14 up to 2.14.5,
    when they restart after an update of its configuration or when its creation was repeated). So if that differs, the last
    or the first message of `before` must still be stored, at the same sequence and with the same time. If both were removed
    meanwhile, the streams count as different ones. If `created` is the same, this sends no request for a message, unless it
    is a stream in memory in a cluster, which is empty after a restart of its servers and keeps its `created`. A stream that
    was restored from an older copy counts as the same one. Raises as `Api.ask` does as well.
    """
    if now is None:
        now = await stream_state(where, before.name, timeout)
    may_be_same = not recreated(before.created, now.created)
    if (may_be_same and not now.volatile) or not set(before.ends).isdisjoint(now.ends):
        return now
    why = "the messages that would show whether it is the same stream are gone, so it counts as another one"
    for seq, time in before.ends:
        stored = await still_stores(where, now, (seq, time), timeout)
        if stored:
            return now
        if stored is not None:
            why = f"it was deleted and created again, or lost everything, because its message {seq} was stored at another time"
            break
    else:
        # A new leader of several servers may still have to apply what its predecessor acknowledged.
        if may_be_same and (now.replicated or now.last_seq >= before.last_seq):
            return now
    raise StreamRecreatedError(
        f"stream {before.name!r}: its creation time was {before.created} and is {now.created}, and {why}; what was read "
        "before does not belong to it",
        stream=before.name,
        expected=before.created,
        found=now.created,
    )


async def still_stores(
    where: Context | Api, state: StreamState, witness: tuple[int, datetime], timeout: float | None = None
) -> bool | None:
    """Return whether a stream has a message at a sequence that was stored at a time; None if it has none there any more."""
    if witness in state.ends:
        return True
    seq, time = witness
    found = await get_at_leader(where, state.name, {"seq": seq}, timeout)
    return None if found is None else found.time == time


async def settled_state(
    look: Callable[[], Awaitable[StreamState]], seq: int, timeout: float | None = None
) -> StreamState:
    """Return what `look` says once it has the sequence `seq`, or after `timeout` seconds (None: `SETTLE`)."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (SETTLE if timeout is None else timeout)
    while (state := await look()).last_seq < seq and loop.time() + LAG_PAUSE < deadline:  # noqa: ASYNC110 - no event
        await asyncio.sleep(LAG_PAUSE)
    return state


async def wait_for_sequence(
    context: Context, stream: str, seq: int, timeout: float, *, up_to: int | None = None
) -> StreamState:
    """Wait until the leader's last sequence is at least `seq`, and return the stream's state.

    Raises RequestTimeoutError after `timeout` seconds, and as `StreamState.check_sequences` does, because what the caller
    then reads at the leader, up to the sequence `up_to`, proves nothing.
    """
    api = Api(context, timeout)
    state = await settled_state(lambda: stream_state(api, stream), seq, timeout)
    state.check_sequences(up_to)
    if state.last_seq < seq:
        raise RequestTimeoutError(f"the leader of stream {stream!r} did not reach sequence {seq} in {timeout:.4g} s")
    return state


async def get_at_leader(
    where: Context | Api, stream: str, request: Mapping[str, Any], timeout: float | None = None
) -> StoredMsg | None:
    """Return the message that a ``STREAM.MSG.GET`` request finds at the leader, or None; raise as `Api.ask` does."""
    try:
        answer = await _api(where, timeout).ask(f"STREAM.MSG.GET.{stream}", request, repeat=True)
    except NotFoundError as error:
        if error.err_code == ErrorCode.MESSAGE_NOT_FOUND:
            return None
        raise
    return parse_message(stream, answer)


async def newest_up_to(
    find: Callable[[Request], Awaitable[StoredMsg | None]], seq: int, first: int, *, subject: str = ">"
) -> StoredMsg | None:
    """Return the newest message of a subject or filter from sequence `first` to `seq`, or None; `find` does single gets."""
    if seq < first:
        return None
    newest = await find(Request(seq=seq)) if subject == ">" else None
    if newest is not None:
        return newest
    low, high = first, seq
    while low <= high:
        middle = (low + high + 1) // 2
        found = await find(Request(seq=middle, next_by_subj=subject))
        if found is None or found.seq > seq:
            high = middle - 1
        else:
            newest, low = found, found.seq + 1
    return newest


async def first_since(
    where: Context | Api, state: StreamState, when: datetime, timeout: float | None = None, *, subject: str = ">"
) -> int:
    """Return the first sequence stored at `when` or later on `subject`, or else the next sequence of the stream.

    `state` is from just before the call, so that no message stored meanwhile is skipped; its last sequence is the last
    one. The stored times are taken as ascending. The leader is asked, because a replica may lag: at most once more than
    it takes to bisect the sequences, each time for up to `timeout` seconds. With an `Api`, all requests share its
    deadline. Raises as `Api.ask` does.
    """
    end = state.last_seq + 1
    if state.last_time < when:
        return end

    async def ask(**request: object) -> StoredMsg | None:
        return await get_at_leader(where, state.name, {**request, "next_by_subj": subject}, timeout)

    if state.api_level >= START_TIME_LEVEL:
        found = await ask(start_time=rfc3339(when, "time"))
        if found is None or found.time >= when:
            return end if found is None else min(found.seq, end)
    return await bisect_time(lambda seq: ask(seq=seq), state.first_seq, end, when)


async def bisect_time(find: Callable[[int], Awaitable[StoredMsg | None]], first: int, end: int, when: datetime) -> int:
    """Return the first sequence from `first` on that was stored at `when` or later, or `end`.

    `find` returns the first message from a sequence on. The stored times are taken as ascending.
    """
    low, high, first = first, end, end
    while low < high:
        middle = (low + high) // 2
        found = await find(middle)
        if found is not None and found.time < when:
            low = found.seq + 1
        else:
            high, first = middle, end if found is None else found.seq
    return min(first, end)


def malformed_as_error(what: str) -> AbstractContextManager[None]:
    """Raise ResponseError if the block finds a field of the answer about `what` missing or malformed."""
    return parsing(f"the server's answer about {what}")


@dataclass(slots=True)
class _Cache:
    """The cached answers of the JetStream behind one prefix, for one session of one connection."""

    session: int
    # By name: when the leader was asked, what it answered, and the last sequence that is known.
    streams: dict[str, tuple[float, StreamState, int]] = field(default_factory=dict)
    # When the server refused a lookup, by the subject of its request.
    refused: dict[str, float] = field(default_factory=dict)
    level: tuple[float, int] = (-math.inf, 0)
    # Why perhaps there is no JetStream, as the newest answer says; "" if one answered, None if none was asked.
    no_jetstream: str | None = None


_caches: WeakKeyDictionary[Client, dict[str, _Cache]] = WeakKeyDictionary()


def _cache(context: Context, prefix: str | None = None) -> _Cache:
    by_prefix, session = _caches.setdefault(context.nc, {}), context.connection.session
    cache = by_prefix.get(prefix or context.prefix)
    if cache is None or cache.session != session:
        cache = by_prefix[prefix or context.prefix] = _Cache(session)
    return cache


def why_no_jetstream(context: Context) -> str:
    """Return why perhaps no JetStream answers, to append to what else may be why a message has no responders; or ""."""
    why = _cache(context).no_jetstream
    if why is None and not context.connection.has_jetstream:
        why = _NONE_ON_THE_SERVER
    return f", or {why}" if why else ""


async def find_server(context: Context, subject: str, stream: str | None, timeout: float, feature: Feature) -> Server:
    """Return which server stores `subject` (the stream's name may be given), to learn whether it has `feature`.

    In a cluster of mixed versions, or over a leaf node, the connected server is another one than the stream's leader. A
    cached answer without the feature is not used, because the server may have been upgraded since. The lookups take at
    most half of `timeout`.
    """
    seconds = min(timeout / 2, LOOKUP_TIMEOUT)
    if context.prefix != DEFAULT_PREFIX:
        seconds /= 2  # for each of the two lookups
    owner = await lookup_stream(context, subject, stream, seconds)
    if owner is not None and not feature.at(owner[0].api_level):
        forget_stream(context, owner[0].name)
        owner = await lookup_stream(context, subject, stream, seconds) or owner
    state, last_seq = owner or (None, 0)
    if state is None:
        level, version = await api_level(context, seconds), context.connection.server_version
    else:
        level, version = state.api_level, state.server_version or "older"
    # A stream that does not store the subject was named by the caller: perhaps accounts map subjects.
    target = context.target(state.name if state is not None and state.stores(subject) else None)
    return Server(level, version, state, last_seq, target, why_no_jetstream(context))


async def lookup_stream(
    context: Context, subject: str, stream: str | None, timeout: float
) -> tuple[StreamState, int] | None:
    """Return the stream that stores `subject` (its name may be given), and a sequence that it has already reached.

    None: there is no such stream, no server answered, or the client may not ask.
    """
    cache, now = _cache(context), asyncio.get_running_loop().time()
    for asked_at, state, last_seq in cache.streams.values():
        if now - asked_at < _CACHE_TTL and (state.name == stream if stream else state.stores(subject)):
            return state, last_seq
    try:
        api = Api(context, max(_NO_TIME, min(timeout, LOOKUP_TIMEOUT)), lookup=True)
        if (name := stream or await stream_name(api, subject)) is None:
            return None
        asked = await stream_state(api, name)
    except (RequestTimeoutError, APIError, ResponseError):
        return None  # no answer now, no such stream, or the server's refusal of the batch will say more
    cache.streams = {name: known for name, known in cache.streams.items() if now - known[0] < _CACHE_TTL}
    cache.streams[asked.name] = now, asked, asked.last_seq
    return asked, asked.last_seq


def forget_stream(context: Context, name: str | None = None) -> None:
    """Forget what is cached about a stream (None: about all)."""
    streams = _cache(context).streams
    if name is None:
        streams.clear()
    else:
        streams.pop(name, None)


async def stream_name(where: Context | Api, subject: str, timeout: float | None = None) -> str | None:
    """Return the name of the stream that stores messages on `subject`, or None; raise as `Api.ask` does."""
    names = await stream_names(_api(where, timeout), subject)
    return names[0] if names else None


async def stream_names(api: Api, subject: str | None = None) -> list[str]:
    """Return the names of the streams that store messages on `subject`, a filter or not (None: all streams).

    Raises as `Api.ask` does.
    """
    wanted = {} if subject is None else {"subject": subject}
    names: dict[str, None] = {}
    while True:
        known = len(names)
        page = await api.ask("STREAM.NAMES", {**wanted, "offset": known} if known else wanted)
        with malformed_as_error("the names of streams"):
            found, total = list(page.get("streams") or ()), json_number(page.get("total") or 0, "total")
            for name in found:
                check_name(name, "stream name")  # it becomes part of the subjects of requests
        names |= dict.fromkeys(found)
        if len(names) == known or len(names) >= total:
            return list(names)


def remember_ack(context: Context, ack: BatchAck) -> None:
    """Note that a stream has reached the sequence of `ack`."""
    streams = _cache(context).streams
    if ack.stream in streams:
        asked_at, state, last_seq = streams[ack.stream]
        streams[ack.stream] = asked_at, state, max(last_seq, ack.seq)


async def api_level(context: Context, timeout: float) -> int:
    """Return the API level of the JetStream behind `context` (0: a server before 2.11; ADR-44).

    A server's ``INFO`` has it from 2.12. Behind a domain or another prefix, the JetStream of another server is asked; if
    that does not answer, the ``INFO`` is used.
    """
    info_level = context.connection.api_level or 0
    if context.prefix == DEFAULT_PREFIX:
        return info_level
    cache, now = _cache(context), asyncio.get_running_loop().time()
    if now - cache.level[0] < _CACHE_TTL:
        return cache.level[1]
    try:
        level = await Api(context, max(_NO_TIME, timeout), lookup=True).level()
    except (nats.errors.Error, APIError):
        return info_level
    cache.level = now, level
    return level
