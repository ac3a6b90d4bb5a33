"""A mirror answers direct gets of its origin; a bucket is read completely, whatever its mirror holds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamSource
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx

KEYS = [f"k{n}" for n in range(100)]
# Each request has a random responder. A mirror that answers half of them answers none of 60 once in 2**60 runs.
TRIALS = 60

Mirrored = Callable[..., Awaitable[KeyValue]]


@pytest.fixture
def mirrored(js: JetStreamContext, stream_name: Callable[[], str]) -> Mirrored:
    """Create a bucket of 100 keys and a mirror that differs from it only in `options`."""

    async def create(*, ready: int, **options: Any) -> KeyValue:
        name = stream_name()
        kv = await kvx.enable(await js.create_key_value(bucket=name), atomic=True)
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"$KV.{name}.{key}", b"1") for key in KEYS])
        mirror = StreamConfig(
            name=f"{name}_MIRROR",
            mirror=StreamSource(name=f"KV_{name}"),
            max_msgs_per_subject=1,
            allow_msg_ttl=True,
            allow_direct=True,
            mirror_direct=True,
        )
        await js.add_stream(mirror.evolve(**options))
        async with asyncio.timeout(60):
            while True:
                state = (await js.stream_info(f"{name}_MIRROR")).state
                if state.messages >= ready and state.last_seq == len(KEYS):
                    return kv
                await asyncio.sleep(0.02)

    return create


LIMITS = pytest.mark.parametrize("limit", [{"max_msgs": 10}, {"max_bytes": 700}], ids=["max_msgs", "max_bytes"])


@LIMITS
async def test_snapshot_is_whole_beside_a_mirror_with_a_limit(mirrored: Mirrored, limit: dict[str, int]) -> None:
    kv = await mirrored(ready=5, **limit)
    for _ in range(TRIALS):
        assert set(await kvx.snapshot(kv)) == set(KEYS)


@LIMITS
async def test_get_many_is_whole_beside_a_mirror_with_a_limit(mirrored: Mirrored, limit: dict[str, int]) -> None:
    kv = await mirrored(ready=5, **limit)
    for _ in range(TRIALS):
        assert set(await kvx.get_many(kv, KEYS)) == set(KEYS)


async def test_snapshot_never_brings_back_what_was_purged_from_the_bucket(
    mirrored: Mirrored, js: JetStreamContext
) -> None:
    kv = await mirrored(ready=len(KEYS))
    name = (await kv.status()).bucket
    await js.purge_stream(f"KV_{name}", subject=f"$KV.{name}.k7")
    for _ in range(TRIALS):
        assert "k7" not in await kvx.snapshot(kv)


async def test_get_many_never_brings_back_what_was_purged_from_the_bucket(
    mirrored: Mirrored, js: JetStreamContext
) -> None:
    kv = await mirrored(ready=len(KEYS))
    name = (await kv.status()).bucket
    await js.purge_stream(f"KV_{name}", subject=f"$KV.{name}.k7")
    for _ in range(TRIALS):
        assert "k7" not in await kvx.get_many(kv, KEYS)
