"""Buckets of many keys are read whole, in a bounded time, whatever else is stored or written."""

import sys
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import RequestTimeoutError, TooManySubjectsError
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import Frame, FrameProxy

ISSUE = "Key-value and log: no guess, no hole"


async def put_all(js: JetStreamContext, name: str, count: int, value: bytes) -> None:
    for begin in range(0, count, 500):
        keys = range(begin, min(begin + 500, count))
        await jsx.publish_atomic(js, [jsx.BatchMessage(f"$KV.{name}.k{n}", value) for n in keys])


@pytest.mark.xfail(
    strict=True,
    raises=TooManySubjectsError,
    reason=f"{ISSUE}: an oldest message with a wildcard in its subject makes get_many fail",
)
async def test_get_many_reads_many_keys_beside_a_message_with_a_wildcard_in_its_subject(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await js.publish(f"$KV.{name}.*", b"anybody can store this")
    await put_all(js, name, 1100, b"1")
    keys = [f"k{n}" for n in range(1100)]
    assert list(await kvx.get_many(kv, keys)) == keys


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason=f"{ISSUE}: a snapshot never catches up with a faster writer, without bound",
)
async def test_snapshot_ends_when_a_writer_is_faster(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, keys, most = stream_name(), 100, 12
    await kvx.enable(await js.create_key_value(bucket=name, storage="memory"))
    await put_all(js, name, keys, bytes(120_000))
    rounds = 0

    async def write_first(frame: Frame) -> Frame:
        nonlocal rounds
        if ".DIRECT.GET." in frame.subject and rounds < most:
            rounds += 1
            await put_all(js, name, keys, bytes(120_000))  # more than one reply holds
        return frame

    async with FrameProxy(server.port, write_first) as proxy:
        nc = await nats.connect(proxy.url)
        try:
            await kvx.snapshot(await nc.jetstream().key_value(name), timeout=0.5)
        except RequestTimeoutError:
            pass  # giving up in time is right, too
        finally:
            await nc.close()
    assert rounds < most, "the snapshot ended only because the writer did"
