"""The JetStream API: one JSON question, one typed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import nats.errors
import orjson
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.connection import JetStream
from jetstream_ext.errors import RequestTimeoutError, ResponseError
from jetstream_ext.protocol.acks import parse_refusal

_LOOK_AGAIN: Final = 0.1
"""Seconds between two looks at whether the connection is closed."""


async def request(js: JetStream, subject: str, payload: bytes, timeout: float) -> Msg:
    """Ask and return the answer, as nats-py's own does, but end with the connection: nats-py would wait on.

    Raises:
        TimeoutError, NoRespondersError: nats-py's.
        ConnectionClosedError: nats-py's: the connection is closed, or was while waiting.
    """
    asked = asyncio.ensure_future(js.nc.request(subject, payload, timeout=timeout))
    asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits any more
    try:
        while not (await asyncio.wait({asked}, timeout=_LOOK_AGAIN))[0]:
            if js.connection.closed:
                raise nats.errors.ConnectionClosedError
        return asked.result()
    finally:
        asked.cancel()


class Api:
    """The API behind one JetStream context, for the length of one call of this library.

    Args:
        js: The context: its prefix and its default timeout.
        timeout: Seconds that all questions together may take; None is the context's own.

    Raises:
        ValueError: `timeout` is not over 0.
    """

    def __init__(self, js: JetStream, timeout: float | None = None) -> None:
        if timeout is not None and (isinstance(timeout, bool) or not timeout > 0):
            raise ValueError(f"timeout must be over 0 seconds, not {timeout!r}")
        self.js = js
        self.timeout: float = js.timeout if timeout is None else float(timeout)
        self._end = asyncio.get_running_loop().time() + self.timeout

    async def ask(
        self, what: str, body: Mapping[str, Any] | None = None, *, prefix: str | None = None
    ) -> dict[str, Any]:
        """Ask and return the answer.

        Args:
            what: The subject without its prefix, such as ``STREAM.INFO.ORDERS``.
            body: The question; None is an empty payload.
            prefix: Another API than the context's, such as that of a domain.

        Raises:
            NotFoundError: nats-py's: there is no such stream, consumer or message.
            ServiceUnavailableError: nats-py's: nobody answers on the subject (JetStream is off, or away).
            ServerError: Any other refusal.
            RequestTimeoutError: No answer in time.
            ConnectionClosedError: nats-py's: the connection is closed, or was while waiting.
            ResponseError: The answer is not one of the JetStream API.
        """
        subject = f"{prefix or self.js.prefix}.{what}"
        left = self._end - asyncio.get_running_loop().time()
        try:
            if left <= 0:
                raise nats.errors.TimeoutError
            reply = await request(self.js, subject, b"" if body is None else orjson.dumps(body), left)
        except nats.errors.NoRespondersError as error:
            raise ServiceUnavailableError(code=503, description=f"nobody answers on {subject}") from error
        except nats.errors.TimeoutError as error:
            raise RequestTimeoutError(f"no answer on {subject} within {self.timeout:g} s") from error
        try:
            answer = orjson.loads(reply.data)
        except orjson.JSONDecodeError as error:
            raise ResponseError(f"the answer on {subject} is not JSON", frame=reply.data) from error
        if not isinstance(answer, dict):
            raise ResponseError(f"the answer on {subject} is not a JSON object", frame=reply.data)
        if "error" in answer:
            refusal = parse_refusal(answer["error"], reply.data)
            if refusal.code == 404:
                raise NotFoundError(code=404, err_code=refusal.err_code, description=refusal.description) from refusal
            raise refusal
        return answer

    async def level(self) -> int:
        """Return the API level of the JetStream that answers (0: older than 2.11), as it says itself.

        Raises:
            NotFoundError, ServiceUnavailableError, ServerError, RequestTimeoutError, ResponseError: As for `ask`.
        """
        account = (await self.ask("INFO")).get("api")
        level = account.get("level") if isinstance(account, dict) else None
        return level if isinstance(level, int) else 0


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `ResponseError` for what an answer lacks, or has of another type, where it is read in this block."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResponseError(f"the server's information on {what} makes no sense") from error


def answering_server(config: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return version and API level of the server that leads a stream or consumer, from its echoed configuration.

    From 2.11 on a leader writes both into the metadata of every answer; no metadata is an older server.
    """
    metadata = config.get("metadata") or {}
    level = str(metadata.get("_nats.level", ""))
    return metadata.get("_nats.ver"), int(level) if level.isdecimal() else 0
