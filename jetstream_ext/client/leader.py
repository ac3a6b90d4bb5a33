"""Asking the leader of a stream: what it answers is the truth, where a replica may lag."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import orjson

from jetstream_ext.client import api
from jetstream_ext.client.connection import JetStream
from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol import headers as h
from jetstream_ext.types import StoredMsg

_NO_MESSAGE = 10037

# How long to wait before looking again whether a leader or a replica has caught up.
LAG_PAUSE = 0.05

# Seconds without an answer after which another question is sent.
_ASK_AGAIN = 1.0

_T = TypeVar("_T")


async def _answered(question: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Return the first answer to `question`, which is asked again and again until there is one.

    What a leader was asked that died meanwhile is never answered, and the next leader does not know of it. The first
    question ends it all when its own time is over.
    """
    asked: set[asyncio.Task[_T]] = set()
    try:
        while True:
            asked.add(asyncio.create_task(question()))
            done, _ = await asyncio.wait(asked, timeout=_ASK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done.pop().result()
    finally:
        for task in asked:
            if not task.cancel() and not task.cancelled():
                task.exception()  # seen, though another answer came first


async def get_at_leader(js: JetStream, stream: str, request: dict[str, Any], timeout: float) -> StoredMsg | None:
    """Return the message that a ``STREAM.MSG.GET`` request finds, or None.

    Raises:
        RequestTimeoutError: No answer within `timeout` seconds.
        ConnectionClosedError: nats-py's: the connection is closed, or was while waiting.
        nats.js.errors.APIError: The server refused (no such stream, for one).
        ResponseError: The answer is malformed.
    """
    try:
        subject, payload = f"{js.prefix}.STREAM.MSG.GET.{stream}", orjson.dumps(request)
        msg = await _answered(lambda: api.request(js, subject, payload, timeout))
    except nats.errors.NoRespondersError:
        raise nats.js.errors.ServiceUnavailableError(
            code=503, description=f"JetStream does not answer for stream {stream!r}"
        ) from None
    except nats.errors.TimeoutError:
        raise RequestTimeoutError(f"stream {stream!r}: its leader did not answer within {timeout:.4g} s") from None
    try:
        reply = orjson.loads(msg.data)
        error = reply.get("error")
        if error is not None:
            if error.get("err_code") == _NO_MESSAGE:
                return None
            nats.js.errors.APIError.from_error(error)
        found = reply["message"]
        block = base64.b64decode(found["hdrs"]) if found.get("hdrs") else b""
        return StoredMsg(
            stream=stream,
            subject=str(found["subject"]),
            seq=int(found["seq"]),
            data=base64.b64decode(found.get("data") or ""),
            headers=h.decode_stored(block),
            time_ns=h.parse_time_ns(h.to_utc(str(found["time"]))),
        )
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        raise ResponseError(f"stream {stream!r}: its leader's answer is malformed", frame=msg.data) from None


async def last_at_leader(js: JetStream, stream: str, timeout: float) -> int:
    """Return the last sequence that the leader has given out (0: none).

    Raises:
        nats.js.errors.NotFoundError: No such stream.
        nats.js.errors.ServiceUnavailableError: Nobody answers.
        RequestTimeoutError: No answer within `timeout` seconds.
        ServerError, ResponseError: The leader refused, or its answer is malformed.
    """
    answer = await _answered(lambda: api.Api(js, timeout).ask(f"STREAM.INFO.{stream}"))
    try:
        return int(answer["state"]["last_seq"])
    except (KeyError, TypeError, ValueError):
        raise ResponseError(
            f"stream {stream!r}: its leader's answer is malformed", frame=repr(answer).encode()
        ) from None


async def wait_for_leader(js: JetStream, stream: str, seq: int, timeout: float) -> None:
    """Wait until the leader's last sequence is at least `seq`.

    Raises:
        RequestTimeoutError: It was not within `timeout` seconds.
        nats.js.errors.NotFoundError, ServerError, ResponseError: As for `last_at_leader`.
    """
    try:
        async with asyncio.timeout(timeout):
            while await last_at_leader(js, stream, timeout) < seq:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(LAG_PAUSE)
    except TimeoutError:
        raise RequestTimeoutError(f"stream {stream!r} did not reach sequence {seq} within {timeout:.4g} s") from None
