"""A server in a container behaves like one on this machine; only its ports and network come from the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import kv as kvx


@pytest.fixture
async def js(container_url: str) -> AsyncIterator[JetStreamContext]:
    """A context on the server in the container."""
    nc = await nats.connect(container_url, connect_timeout=10, max_reconnect_attempts=3)
    try:
        yield nc.jetstream()
    finally:
        await nc.close()


async def test_fast_in_and_proved_out(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], allow_batched=True, allow_direct=True)
    report = await jsx.ingest(js, ((f"{name}.{n % 5}", b"%d" % n) for n in range(2_000)))
    assert report.stored == 2_000
    async with jsx.DirectGet(js, name).scan(confirm=True) as messages:
        assert [int(message.data) async for message in messages] == list(range(2_000))
    assert len(await jsx.DirectGet(js, name).multi_last([f"{name}.*"]).to_list()) == 5


async def test_all_or_nothing(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], allow_atomic=True)
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{name}.a", b"1")
        await batch.add(f"{name}.b", b"2")
    assert (batch.ack.seq, batch.ack.batch_size) == (2, 2)
    refused = [jsx.BatchMessage(f"{name}.c", b"3"), jsx.BatchMessage(f"{name}.a", b"4", expected_last_subject_seq=0)]
    with pytest.raises(jsx.errors.WrongLastSequenceError):
        await jsx.publish_atomic(js, refused)
    assert (await js.stream_info(name)).state.messages == 2


async def test_a_bucket_then_and_now(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name(), history=5))
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"1")
        tx.put("b", b"2")
    await kv.put("a", b"3")
    assert {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()} == {"a": b"3", "b": b"2"}
    assert (await kvx.snapshot(kv, at=2))["a"].value == b"1"
