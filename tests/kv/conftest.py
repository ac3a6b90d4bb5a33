"""Fixtures of the key-value tests: buckets, and bulk writes of keys."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx

MakeBucket = Callable[..., Awaitable[KeyValue]]


@pytest.fixture
def make_bucket(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeBucket:
    """Create a bucket as nats-py does, and turn on what this package needs (unless `allow=False`)."""

    async def make(*, allow: bool = True, **config: Any) -> KeyValue:
        kv = await js.create_key_value(bucket=stream_name(), **config)
        if allow:
            kv = await kvx.enable(kv)
            found = (await js.stream_info(kv._stream)).config
            await js.update_stream(found.evolve(allow_batched=True))
        return kv

    return make


@pytest.fixture
def load() -> Callable[..., Awaitable[None]]:
    """Put many keys at once."""

    async def put(kv: KeyValue, entries: dict[str, bytes]) -> None:
        async with jsx.FastPublisher(kv._js, flow=500) as publisher:
            await publisher.add_many((f"{kv._pre}{key}", value) for key, value in entries.items())

    return put
