"""The JetStream API level of the server that answers (ADR-44)."""

from __future__ import annotations

import nats.errors
import nats.js.errors

from jetstream_ext.client.connection import JetStream

_DEFAULT_PREFIX = "$JS.API"


async def api_level(js: JetStream) -> int:
    """Return the API level of the JetStream behind `js` (0: a server before 2.11).

    The greeting of the connected server has it for free from 2.12 on. Behind a domain or another prefix the JetStream
    is another server's, so that one is asked; where it may not be asked, the connected server's word has to do.
    """
    greeted = js.connection.api_level or 0
    if js.prefix == _DEFAULT_PREFIX:
        return greeted
    try:
        account = await js.context.account_info()
    except (nats.errors.Error, nats.js.errors.APIError):
        return greeted
    return int(getattr(account.api, "level", 0) or 0)
