"""Advisories about atomic batches that the server dropped."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from typing import Final, Self

from nats.js import JetStreamContext

from jetstream_ext.client.base_connection import InboxHandler, InboxSubscription
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ResponseError
from jetstream_ext.protocol.api import ABANDONED, parse_abandoned
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.types import AbandonedBatch

_log = logging.getLogger("jetstream_ext")
_DOMAIN: Final = re.compile(r"\$JS\.([^.]+)\.API\Z")
_PENDING_LIMIT: Final = 65_536


class AbandonedBatches:
    """The batches of a stream that the server drops, as it announces them; created by `watch_abandoned`.

    Use it as an async context manager and iterate over it inside. The iteration ends with nats-py's
    ``ConnectionClosedError`` when the connection is closed or drained. It continues after a reconnect, without the
    batches that were announced in between.
    """

    def __init__(self, js: JetStreamContext, stream: str) -> None:
        check_name(stream, "stream name")
        self._js = Context(js)
        self._subject = f"{ABANDONED}.{stream}"
        # All domains publish to the same subject; the advisory names its domain.
        domain = _DOMAIN.match(self._js.prefix)
        self._domain = domain[1] if domain else None
        self._inbox: InboxSubscription | None = None
        self._pending: deque[AbandonedBatch] = deque()
        self._changed = asyncio.Event()  # set while a batch is pending, and after the end

    async def __aenter__(self) -> Self:
        if self._inbox is not None:
            raise RuntimeError(f"the watch on {self._subject} is already open; call watch_abandoned() for another one")
        connection, timeout = self._js.connection, self._js.timeout
        connection.check_usable()
        handler = InboxHandler(self._receive, disconnected=lambda: None)
        self._inbox = await connection.inbox(handler, subject=self._subject, timeout=timeout)
        try:
            # nats-py's ping overtakes what is still in its buffer; the second ping follows the subscription.
            for _ in range(2):
                await connection.bounded(self._js.nc.flush(math.ceil(timeout) + 1), timeout, "the server's PONG")
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching; this ends every iteration. Safe to call twice.

        Cancellation: Safe; nothing is left behind.
        """
        inbox, self._inbox = self._inbox, None
        self._changed.set()
        if inbox is not None:
            inbox.close()

    def _receive(self, received: list[Frame]) -> None:
        for _, body, header_size in received:
            try:
                abandoned, domain = parse_abandoned(body[header_size:])
            except ResponseError as error:
                _log.warning(
                    "%s: ignored a malformed advisory: %s", self._subject, error
                )  # any client may publish there
                continue
            if self._domain is not None and domain not in (None, self._domain):
                continue
            if len(self._pending) >= _PENDING_LIMIT:
                _log.warning("%s: dropped an advisory, because %d are unread", self._subject, _PENDING_LIMIT)
                return
            self._pending.append(abandoned)
            self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AbandonedBatch:
        while self._inbox is not None:
            if self._pending:
                return self._pending.popleft()
            self._changed.clear()
            await self._js.connection.bounded(self._changed.wait(), math.inf, "an advisory")
        raise StopAsyncIteration


def watch_abandoned(js: JetStreamContext, stream: str) -> AbandonedBatches:
    """Watch for atomic batches that the server of `stream` drops: messages that were published but not stored.

    The server announces batches that were idle too long, incomplete or too large. It does not announce batches that it
    refuses at the commit, nor batches that are lost with a leader.

    Args:
        js: nats-py's JetStream context. With a domain, only batches of that domain are reported.
        stream: The stream's name.

    Returns:
        An async context manager and async iterator of `AbandonedBatch`.

    Raises:
        BadSubjectError: The name is not a valid stream name.

    Requires: nats-server 2.12, and permission to subscribe to the advisories.
    """
    return AbandonedBatches(js, stream)
