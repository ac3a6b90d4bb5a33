"""Hearing of atomic batches that the server gave up."""

from __future__ import annotations

import asyncio
import logging
import re
from types import TracebackType
from typing import Final, Self

from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from jetstream_ext.client.base_connection import unsubscribe
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ResponseError
from jetstream_ext.protocol.api import ABANDONED, parse_abandoned
from jetstream_ext.protocol.subjects import check_name
from jetstream_ext.types import AbandonedBatch

_log = logging.getLogger("jetstream_ext")
_DOMAIN: Final = re.compile(r"\$JS\.([^.]+)\.API\Z")


class AbandonedBatches:
    """The batches that a stream's server gives up, as they come; made by `watch_abandoned`.

    Use it as an async context manager and iterate over it inside. It ends with nats-py's ``ConnectionClosedError``
    when the connection is closed; reconnects are survived, but what is announced in between is not heard.
    """

    def __init__(self, js: JetStreamContext, stream: str) -> None:
        check_name(stream, "stream name")
        self._js = Context(js)
        self._subject = f"{ABANDONED}.{stream}"
        # Advisories go to one subject whatever the domain; streams of one name in two domains are told apart by it.
        domain = _DOMAIN.match(self._js.prefix)
        self._domain = domain[1] if domain else None
        self._subscription: Subscription | None = None
        self._closed: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        if self._subscription is not None:
            raise RuntimeError("this watch is in use already; make another one")
        nc = self._js.nc
        self._js.connection.check_usable()
        self._subscription = await nc.subscribe(self._subject)
        self._closed = asyncio.get_running_loop().create_future()
        try:
            # nats-py's ping overtakes what it has not written yet; the second one is behind the subscription. From its
            # answer on nothing is missed.
            await nc.flush()
            await nc.flush()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening; who waits for a batch hears of no more. Safe to call twice.

        Cancellation: Safe; nothing is left behind.
        """
        subscription, self._subscription = self._subscription, None
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        if subscription is not None:
            await unsubscribe(subscription)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AbandonedBatch:
        while (subscription := self._subscription) is not None:
            assert self._closed is not None
            # nats-py wakes nobody who waits on a subscription when that ends.
            getting = asyncio.ensure_future(subscription.next_msg(timeout=None))
            try:
                await asyncio.wait((getting, self._closed), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    break
                abandoned, domain = parse_abandoned(getting.result().data)
            except ResponseError as error:
                _log.warning("%s: %s", self._subject, error)  # anybody may publish there; the watch goes on
                continue
            finally:
                getting.cancel()
            if self._domain is None or domain in (None, self._domain):
                return abandoned
        raise StopAsyncIteration


def watch_abandoned(js: JetStreamContext, stream: str) -> AbandonedBatches:
    """Hear of the atomic batches that the server of `stream` gives up: somebody's work that was not stored.

    Servers announce batches that were idle too long, incomplete or too large. They do not announce those that are
    refused at commit, nor those that are lost with a leader.

    Args:
        js: nats-py's JetStream context. With a domain, only that domain's batches are heard.
        stream: The stream's name.

    Returns:
        An async context manager and async iterator of `AbandonedBatch`.

    Raises:
        BadSubjectError: The name cannot be a stream's.

    Requires: nats-server 2.12, and permission to subscribe to the advisories.
    """
    return AbandonedBatches(js, stream)
