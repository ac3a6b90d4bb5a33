"""Reads of the past return what a key was, or report it as unavailable, even if the bucket's limits have changed."""

import asyncio
from collections.abc import Callable

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError


async def expired(js: JetStreamContext, stream: str) -> None:
    """Wait until the message with sequence 1 is gone."""
    async with asyncio.timeout(60):
        while (await js.stream_info(stream)).state.first_seq == 1:
            await asyncio.sleep(0.05)


async def test_past_before_markers_were_enabled_is_unavailable_for_keys_that_expired_without_one(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await js.create_key_value(bucket=(name := stream_name()), history=1)
    kv = await kvx.enable(kv, ttl=True)
    await js.publish(f"$KV.{name}.session.a", b"1", headers=jsx.ttl_headers(1))
    await js.publish(f"$KV.{name}.session.b", b"2", headers=jsx.ttl_headers(600))
    await kv.put("other", b"3")
    await expired(js, f"KV_{name}")
    await kv.put("other", b"4")
    kv = await kvx.enable(kv, ttl=3600)
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, ["session.*"], at=2)


async def test_past_before_max_age_was_raised_is_unavailable_for_keys_that_expired(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=(name := stream_name()), history=1, ttl=1))
    await kv.put("session.a", b"1")
    await kv.put("other", b"2")
    await expired(js, f"KV_{name}")
    config = (await js.stream_info(f"KV_{name}")).config
    await js.update_stream(config.evolve(max_age=3600))
    await kv.put("other", b"3")
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, ["session.*"], at=1)
