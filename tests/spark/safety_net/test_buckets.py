"""Buckets as tables: every key, whichever replica or mirror replies, and a plan that does not grow with the keys."""

from __future__ import annotations

import asyncio
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource


def test_a_partial_mirror_that_answers_hides_no_key(
    cell: Any, make_stream: Any, stream_name: Any, bucket_read: Any, with_js: Any
) -> None:
    def check(newest: str) -> None:
        bucket, mirror = stream_name(), stream_name()
        make_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1)

        async def fill(js: JetStreamContext) -> None:
            await js.publish(f"$KV.{bucket}.other.first")
            for number in range(20):
                await js.publish(f"$KV.{bucket}.key.{number}", b"value")
            if newest == "in the mirror, too":
                await js.publish(f"$KV.{bucket}.other.last")
            only_others = StreamSource(name=f"KV_{bucket}", filter_subject=f"$KV.{bucket}.other.>")
            await js.add_stream(StreamConfig(name=mirror, mirror=only_others, mirror_direct=True, allow_direct=True))
            # The server chooses the responder: wait until the mirror is chosen sometimes.
            async with asyncio.timeout(60):
                while True:
                    answer = await js._nc.request(f"$JS.API.DIRECT.GET.KV_{bucket}", b'{"seq":1}', timeout=30)
                    if answer.headers["Nats-Stream"] == mirror:
                        return
                    await asyncio.sleep(0.01)

        with_js(fill)
        counts = {len(bucket_read(bucket, keys="key.>").rows()) for _ in range(30)}
        with_js(lambda js: js.delete_stream(mirror))
        assert counts == {20}

    for newest in ["in the bucket only", "in the mirror, too"]:
        with cell(newest):
            check(newest)
