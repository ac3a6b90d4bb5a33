"""The JetStream API level of the server that answers (ADR-44)."""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from jetstream_ext.client.connection import JetStream
from jetstream_ext.client.owners import session_of

_DEFAULT_PREFIX: Final = "$JS.API"
# For so many seconds an answer is taken again, and silence, too: who lacks the permission to ask hears nothing.
_FRESH: Final = 30.0
_PATIENCE: Final = 2.0

_known: WeakKeyDictionary[Client, dict[str, tuple[int, float, int]]] = WeakKeyDictionary()


async def api_level(js: JetStream) -> int:
    """Return the API level of the JetStream behind `js` (0: a server before 2.11).

    The greeting of the connected server has it for free from 2.12 on. Behind a domain or another prefix the JetStream
    is another server's, so that one is asked, once in a while; where it may not be asked, the connected server's word
    has to do.
    """
    greeted = js.connection.api_level or 0
    if js.prefix == _DEFAULT_PREFIX:
        return greeted
    by_prefix, session, now = _known.setdefault(js.nc, {}), session_of(js), asyncio.get_running_loop().time()
    asked, at, level = by_prefix.get(js.prefix, (None, 0.0, 0))
    if asked == session and now - at < _FRESH:
        return level
    try:
        async with asyncio.timeout(min(js.timeout, _PATIENCE)):
            account = await js.context.account_info()
        level = int(getattr(account.api, "level", 0) or 0)
    except (TimeoutError, nats.errors.TimeoutError):
        level = greeted
    except (nats.errors.Error, nats.js.errors.APIError):
        return greeted  # there may be an answer the next time
    by_prefix[js.prefix] = session, now, level
    return level
