"""Fixtures of the key-value tests: buckets, and bulk writes of keys."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.client import direct_reader

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


@pytest.fixture
def mirrored() -> Callable[..., Awaitable[str]]:
    """Create a mirror of a bucket's stream, wait until it has `wait` messages, and return its name."""

    async def mirrored(kv: KeyValue, name: str, wait: int, **config: Any) -> str:
        source = {key: config.pop(key) for key in ("filter_subject", "opt_start_seq") if key in config}
        stream = f"{kv._name}_{name}"
        await kv._js.add_stream(name=stream, mirror=StreamSource(name=kv._stream, **source), **config)
        async with asyncio.timeout(60):
            while (await kv._js.stream_info(stream)).state.messages < wait:
                await asyncio.sleep(0.02)
        return stream

    return mirrored


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let a mirror answer all direct gets from a stream, as one does that is nearer than the stream."""
    send = direct_reader._Inboxes.send

    def near(stream: str, mirror: str) -> None:
        async def only_to_the_mirror(self: Any, sent: Any, api: str, *arguments: Any) -> None:
            await send(self, sent, api.replace(f".DIRECT.GET.{stream}", f".DIRECT.GET.{mirror}"), *arguments)

        monkeypatch.setattr(direct_reader._Inboxes, "send", only_to_the_mirror)

    return near
