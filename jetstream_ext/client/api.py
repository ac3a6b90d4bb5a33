"""Requests to the JetStream API, and the state and messages of a stream as its leader knows them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import nats.errors
import orjson
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.base_connection import mark_retrieved
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ResponseError, ServerError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_answer
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState, parse_stream_state

LAG_PAUSE: Final = 0.05
"""Seconds between two checks whether a leader, a replica or a mirror has caught up."""

# Seconds before an unanswered request is repeated: the next leader does not know the requests of one that died.
_REPEAT_AFTER: Final = 1.0

_T = TypeVar("_T")


class Api:
    """The JetStream API for one call of this library; all its requests share the deadline of `timeout` seconds."""

    def __init__(self, context: Context, timeout: float | None = None) -> None:
        self.context = context
        self.timeout: float = context.resolve_timeout(timeout)
        self._deadline = asyncio.get_running_loop().time() + self.timeout

    @property
    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - asyncio.get_running_loop().time()

    async def ask(
        self, what: str, body: Mapping[str, Any] | None = None, *, prefix: str | None = None, repeat: bool = False
    ) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            what: The subject without its prefix, such as ``STREAM.INFO.ORDERS``.
            body: The request; None is an empty payload.
            prefix: The API prefix, if not the context's.
            repeat: Repeat the request while there is no answer; only for requests that change nothing.

        Raises:
            NotFoundError, ServiceUnavailableError: nats-py's: no such thing; no server answers on the subject.
            ServerError: Any other refusal.
            RequestTimeoutError, ResponseError: No answer in time; a malformed answer.
        """
        subject = f"{prefix or self.context.prefix}.{what}"
        payload = b"" if body is None else orjson.dumps(body)

        async def send() -> Msg:
            return await self.context.connection.request(subject, payload, max(0.0, self.remaining))

        try:
            reply = await (_first_answer(send) if repeat else send())
        except RequestTimeoutError:
            raise RequestTimeoutError(f"no answer on {subject} within {self.timeout:.4g} s") from None
        except nats.errors.NoRespondersError as error:
            raise ServiceUnavailableError(code=503, description=f"no server answers on {subject}") from error
        try:
            return parse_answer(subject, reply.data)
        except ServerError as refusal:
            if refusal.code != 404:
                raise
            raise NotFoundError(code=404, err_code=refusal.err_code, description=refusal.description) from refusal

    async def level(self) -> int:
        """Return the API level of the JetStream that answers (0: before 2.11); raises as `ask` does."""
        account = (await self.ask("INFO")).get("api")
        level = account.get("level") if isinstance(account, dict) else None
        return level if isinstance(level, int) else 0


async def _first_answer(send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Send a request repeatedly; return the first answer, or raise when the first request times out."""
    asked: set[asyncio.Task[_T]] = set()
    try:
        while True:
            asked.add(asyncio.create_task(send()))
            done, _ = await asyncio.wait(asked, timeout=_REPEAT_AFTER, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done.pop().result()
    finally:
        for task in asked:
            if not task.cancel():
                mark_retrieved(task)


async def stream_state(context: Context, stream: str, timeout: float | None = None) -> StreamState:
    """Return the state of `stream` as its leader reports it; raises as `Api.ask` does."""
    return parse_stream_state(await Api(context, timeout).ask(f"STREAM.INFO.{stream}", repeat=True), stream)


async def wait_for_sequence(context: Context, stream: str, seq: int, timeout: float) -> None:
    """Wait until the leader's last sequence is at least `seq`; raise RequestTimeoutError after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while (await stream_state(context, stream, timeout)).last_seq < seq:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(LAG_PAUSE)
    except TimeoutError:
        raise RequestTimeoutError(f"stream {stream!r} did not reach sequence {seq} within {timeout:.4g} s") from None


async def get_at_leader(
    context: Context, stream: str, request: Mapping[str, Any], timeout: float | None = None
) -> StoredMsg | None:
    """Return the message that a ``STREAM.MSG.GET`` request finds at the leader, or None; raises as `Api.ask` does."""
    try:
        answer = await Api(context, timeout).ask(f"STREAM.MSG.GET.{stream}", request, repeat=True)
    except NotFoundError as error:
        if error.err_code == ErrorCode.MESSAGE_NOT_FOUND:
            return None
        raise
    with reading(f"a message of stream {stream!r}"):
        found = answer["message"]
        block = base64.b64decode(found["hdrs"]) if found.get("hdrs") else b""
        return StoredMsg(
            stream=stream,
            subject=str(found["subject"]),
            seq=int(found["seq"]),
            data=base64.b64decode(found.get("data") or ""),
            headers=h.decode_stored(block),
            time_ns=h.parse_time_ns(h.to_utc(str(found["time"]))),
        )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise ResponseError if the block finds a field of the answer about `what` missing or malformed."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise ResponseError(f"the server's answer about {what} is malformed: {error!r}") from error
