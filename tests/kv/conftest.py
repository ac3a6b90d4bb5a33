"""What the key-value tests share: buckets that allow everything."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

MakeBucket = Callable[..., Awaitable[KeyValue]]


@pytest.fixture
def make_bucket(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeBucket:
    """Create a bucket as nats-py does, with direct gets, atomic batches and fast ingest."""

    async def make(*, allow: bool = True, **config: Any) -> KeyValue:
        kv = await js.create_key_value(bucket=stream_name(), **{"direct": True, **config})
        if allow:
            found = (await js.stream_info(f"KV_{kv._name}")).config
            await js.update_stream(found.evolve(allow_atomic=True, allow_batched=True))
        return kv

    return make
