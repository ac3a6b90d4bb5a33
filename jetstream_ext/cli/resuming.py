"""Where an earlier ingest of the same file stopped: the stream itself knows."""

from __future__ import annotations

from typing import Final

from nats.js import JetStreamContext

from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.client.direct import DirectGet
from jetstream_ext.protocol.headers import MSG_ID

_STEP: Final = 5_000


def message_id(run: str, row: int) -> str:
    """Return the id of the message of a row, counted from 0."""
    return f"{run}:{row}"


async def rows_stored(js: JetStreamContext, stream: str, run: str) -> int:
    """Return how many rows of a file the stream holds.

    Rows are stored in order, so it is enough to find the newest message with an id of this file, reading from the end.
    A stream that never had any of them is read whole.

    Args:
        js: The JetStream.
        stream: The stream.
        run: What the ids of the file begin with.

    Raises:
        DirectGetDisabledError: The stream does not allow direct gets.
    """
    state = (await Api(Context(js)).ask(f"STREAM.INFO.{stream}"))["state"]
    first, last = state["first_seq"], state["last_seq"]
    prefix = message_id(run, 0).removesuffix("0")
    while last >= first and last > 0:
        start = max(first, last - _STEP + 1)
        found = 0
        async with DirectGet(js, stream).scan(seq=start, up_to_seq=last, confirm=True) as messages:
            async for message in messages:
                name = message.headers.get(MSG_ID, "")
                if name.startswith(prefix) and name[len(prefix) :].isdecimal():
                    found = max(found, int(name[len(prefix) :]) + 1)
        if found:
            return found
        last = start - 1
    return 0
