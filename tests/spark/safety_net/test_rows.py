"""Rows that become messages and messages that become rows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import RePublish, StreamConfig

from jetstream_ext.errors import JetStreamExtError


def test_a_row_with_a_blank_msg_id_is_refused_or_stored_once(
    cell: Any, make_stream: Any, sink: Any, stored: Any
) -> None:
    for blank in [" ", "\t", "  "]:
        with cell(blank):
            out = make_stream()
            for _ in range(2):
                with contextlib.suppress(JetStreamExtError):
                    sink(out).write([[{"subject": f"{out}.rows", "data": b"row", "msgId": blank}]])
            assert sum(stored(out, f"{out}.rows").values()) <= 1


def test_a_republished_message_keeps_the_headers_that_name_its_origin(
    stream_name: Any, batch_read: Any, with_js: Any
) -> None:
    origin, copy = stream_name(), stream_name()

    async def republish(js: JetStreamContext) -> dict[str, str]:
        await js.add_stream(StreamConfig(name=copy, subjects=[f"{copy}.>"], allow_direct=True))
        to_copy = RePublish(src=f"{origin}.>", dest=f"{copy}.>")
        await js.add_stream(StreamConfig(name=origin, subjects=[f"{origin}.>"], republish=to_copy))
        await js.publish(f"{origin}.a", b"data", headers={"Own": "header"})
        async with asyncio.timeout(60):
            while not (await js.stream_info(copy)).state.messages:
                await asyncio.sleep(0.01)
        return dict((await js.get_msg(copy, 1)).headers or {})

    headers = with_js(republish)
    assert headers["Nats-Stream"] == origin
    [row] = batch_read(copy).rows()
    assert {name: values[0] for name, values in row["headers"]} == headers
