"""The JetStream API: one JSON request, one typed answer; and what only the leader of a stream knows."""

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

from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ResponseError, ServerError
from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import parse_answer
from jetstream_ext.protocol.stored_msg import StoredMsg
from jetstream_ext.protocol.stream_state import StreamState, parse_stream_state

LAG_PAUSE: Final = 0.05
"""Seconds before looking again whether a leader, a replica or a mirror has caught up."""

# A leader that dies with a request in its hands never answers it, and the next leader does not know of it. So a question
# without an answer is asked again after so many seconds.
_ASK_AGAIN: Final = 1.0

_T = TypeVar("_T")


def check_timeout(timeout: float | None, default: float) -> float:
    """Return `timeout` in seconds, or `default` for None.

    Raises:
        ValueError: It is not over 0.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds over 0, not {timeout!r}")
    return float(timeout)


class Api:
    """The API behind one JetStream context, for the length of one call of this library.

    Args:
        context: The context: its prefix and its default timeout.
        timeout: Seconds that all requests together may take; None is the context's own.

    Raises:
        ValueError: `timeout` is not over 0.
    """

    def __init__(self, context: Context, timeout: float | None = None) -> None:
        self.context = context
        self.timeout: float = check_timeout(timeout, context.timeout)
        self._deadline = asyncio.get_running_loop().time() + self.timeout

    @property
    def remaining(self) -> float:
        """Seconds until the time is over."""
        return self._deadline - asyncio.get_running_loop().time()

    async def ask(
        self, what: str, body: Mapping[str, Any] | None = None, *, prefix: str | None = None, repeat: bool = False
    ) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            what: The subject without its prefix, such as ``STREAM.INFO.ORDERS``.
            body: The request; None is an empty payload.
            prefix: Another API prefix than the context's, such as that of a domain.
            repeat: Send the request again while there is no answer; only for requests that change nothing.

        Raises:
            NotFoundError: nats-py's: there is no such stream, consumer or message.
            ServiceUnavailableError: nats-py's: no server answers on the subject (JetStream is off, or away).
            ServerError: Any other refusal.
            RequestTimeoutError: No answer in time.
            ConnectionClosedError: nats-py's: the connection is closed, or was while waiting.
            ResponseError: The answer is malformed.
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
        """Return the API level of the JetStream that answers (0: older than 2.11).

        Raises:
            NotFoundError, ServiceUnavailableError, ServerError, RequestTimeoutError, ResponseError: As for `ask`.
        """
        account = (await self.ask("INFO")).get("api")
        level = account.get("level") if isinstance(account, dict) else None
        return level if isinstance(level, int) else 0


async def _first_answer(send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Return the first answer to a request that is sent again and again until there is one or the first times out."""
    asked: set[asyncio.Task[_T]] = set()
    try:
        while True:
            asked.add(asyncio.create_task(send()))
            done, _ = await asyncio.wait(asked, timeout=_ASK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done.pop().result()
    finally:
        for task in asked:
            if not task.cancel() and not task.cancelled():
                task.exception()  # retrieved, though another answer came first


async def stream_state(context: Context, stream: str, timeout: float | None = None) -> StreamState:
    """Return what the leader of `stream` says of it.

    Raises:
        NotFoundError: nats-py's: there is no such stream.
        ServiceUnavailableError, ServerError, RequestTimeoutError, ResponseError: As for `Api.ask`.
    """
    return parse_stream_state(await Api(context, timeout).ask(f"STREAM.INFO.{stream}", repeat=True), stream)


async def wait_for_sequence(context: Context, stream: str, seq: int, timeout: float) -> None:
    """Wait until the leader's last sequence is at least `seq`.

    Raises:
        RequestTimeoutError: It was not within `timeout` seconds.
        NotFoundError, ServerError, ResponseError: As for `stream_state`.
    """
    try:
        async with asyncio.timeout(timeout):
            while (await stream_state(context, stream, timeout)).last_seq < seq:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(LAG_PAUSE)
    except TimeoutError:
        raise RequestTimeoutError(f"stream {stream!r} did not reach sequence {seq} within {timeout:.4g} s") from None


async def get_at_leader(
    context: Context, stream: str, request: Mapping[str, Any], timeout: float | None = None
) -> StoredMsg | None:
    """Return the message that a ``STREAM.MSG.GET`` request finds at the leader, or None.

    Raises:
        ServiceUnavailableError, ServerError, RequestTimeoutError, ResponseError: As for `Api.ask`.
        NotFoundError: nats-py's: there is no such stream.
    """
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
    """Raise `ResponseError` for a field of an answer that is missing or malformed, where it is read in this block."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise ResponseError(f"the server's answer about {what} is malformed: {error!r}") from error
