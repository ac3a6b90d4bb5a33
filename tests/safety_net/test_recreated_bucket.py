"""A bucket that is deleted and created again is another bucket."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import JetStreamExtError
from jetstream_ext.log import LogReader, OffsetStore
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import FrameProxy, before_request

ISSUE = "Key-value and log: no guess, no hole"
NOT_RAISED: Any = pytest.fail.Exception
OLD = {f"old{n}" for n in range(3000)}
NEW = {f"new{n}" for n in range(3200)}


async def create_bucket(js: JetStreamContext, name: str, keys: set[str]) -> None:
    await kvx.enable(await js.create_key_value(bucket=name))
    messages = [jsx.BatchMessage(f"$KV.{name}.{key}", b"1") for key in sorted(keys)]
    for begin in range(0, len(messages), 1000):
        await jsx.publish_atomic(js, messages[begin : begin + 1000])


async def test_snapshot_never_mixes_a_bucket_with_the_one_created_after_it(
    server: NatsServer, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await create_bucket(js, name, OLD)

    async def recreate() -> None:
        await js.delete_key_value(name)
        await create_bucket(js, name, NEW)

    async with FrameProxy(server.port, before_request(2, r"\.DIRECT\.GET\.", recreate)) as proxy:
        nc = await nats.connect(proxy.url, connect_timeout=10)
        try:
            kv = await nc.jetstream(timeout=60).key_value(name)
            snapshot = await kvx.snapshot(kv)
        except JetStreamExtError:
            return  # the documented error
        finally:
            await nc.close()
    assert set(snapshot) in (OLD, NEW)


@pytest.mark.xfail(
    strict=True, raises=NOT_RAISED, reason=f"{ISSUE}: a transaction commits to a bucket recreated since its reads"
)
async def test_transaction_fails_when_the_bucket_was_recreated_since_its_reads(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")
    tx = kvx.transaction(kv)
    assert (await tx.get("account")) is not None
    await js.delete_key_value(name)
    other = await kvx.enable(await js.create_key_value(bucket=name))
    await other.put("account", b"7")
    tx.put("account", b"101")
    with pytest.raises(JetStreamExtError):
        await tx.commit()


@pytest.mark.xfail(
    strict=True, raises=NOT_RAISED, reason=f"{ISSUE}: a commit overwrites an offset in a bucket recreated since"
)
async def test_offset_commit_fails_when_the_bucket_was_recreated_since_the_last_one(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, bucket = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.publish(name, b"1")
    mine = await OffsetStore(js, bucket).create()
    await mine.commit(LogReader(js, name), name="worker")
    await js.delete_key_value(bucket)
    theirs = await OffsetStore(js, bucket).create()
    await theirs.commit(LogReader(js, name), name="worker", position=2)
    with pytest.raises(JetStreamExtError):
        await mine.commit(LogReader(js, name), name="worker", position=1)
