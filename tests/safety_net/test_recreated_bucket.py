"""A bucket that is deleted and created again is another bucket."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchOutcomeUnknownError, JetStreamExtError, StreamRecreatedError
from jetstream_ext.log import LogReader, OffsetStore
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from frame_proxy import FrameProxy, before_request

ISSUE = "Key-value and log: no guess, no hole"
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


@pytest.mark.parametrize("wrote", [True, False])
@pytest.mark.parametrize("keys", [("account",), ("missing",), ("account", "other", "third")])
async def test_transaction_fails_in_a_recreated_bucket_whatever_it_has_read(
    js: JetStreamContext, stream_name: Callable[[], str], keys: tuple[str, ...], wrote: bool
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")
    tx = kvx.transaction(kv)
    await tx.get_many(keys)
    await js.delete_key_value(name)
    other = await kvx.enable(await js.create_key_value(bucket=name))
    if wrote:
        await other.put("account", b"7")
    tx.put("result", b"101")
    with pytest.raises(JetStreamExtError):
        await tx.commit()
    assert tx.state == "failed"
    assert list(await kvx.snapshot(other)) == (["account"] if wrote else [])


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
    with pytest.raises(StreamRecreatedError, match="nothing was written") as caught:
        await tx.commit()
    assert caught.value.stream == f"KV_{name}"
    assert caught.value.found > caught.value.expected
    assert (await other.get("account")).value == b"7"


async def test_transaction_that_only_reads_fails_when_the_bucket_was_recreated_between_its_reads(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    for key in ("a", "b"):
        await kv.put(key, b"1")
    tx = kvx.transaction(kv)
    await tx.get("a")
    await js.delete_key_value(name)
    other = await kvx.enable(await js.create_key_value(bucket=name))
    for key in ("a", "b"):
        await other.put(key, b"2")
    await tx.get("b")
    with pytest.raises(StreamRecreatedError):
        await tx.commit()


async def test_retried_transaction_fails_when_the_bucket_was_recreated_during_a_run(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, runs = stream_name(), 0
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")

    async def fn(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("account")
        await js.delete_key_value(name)
        await (await kvx.enable(await js.create_key_value(bucket=name))).put("account", b"7")
        tx.put("account", b"101")

    with pytest.raises(StreamRecreatedError):
        await kvx.retry_transaction(kv, fn)
    assert runs == 1


async def test_lost_commit_is_not_repeated_in_a_recreated_bucket(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")

    async def lose(tx: kvx.Transaction) -> None:
        tx._batch_id, tx._messages, tx._state = "lost", tx._staging.messages(msg_id="lost"), "unknown"
        await js.delete_key_value(name)
        await (await kvx.enable(await js.create_key_value(bucket=name))).put("account", b"7")
        raise BatchOutcomeUnknownError(batch_id="lost")

    async def fn(tx: kvx.Transaction) -> None:
        await tx.get("account")
        tx.put("account", b"101")

    monkeypatch.setattr(kvx.Transaction, "commit", lose)
    with pytest.raises(BatchOutcomeUnknownError) as caught:
        await kvx.retry_transaction(kv, fn)
    assert isinstance(caught.value.__cause__, StreamRecreatedError)
    assert (await kv.get("account")).value == b"7"


async def test_transaction_commits_after_a_restart_that_changed_the_creation_time_of_its_bucket() -> None:
    with NatsServer(version="2.12.8") as server:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            await kvx.enable(await nc.jetstream().create_key_value(bucket="B", history=1))
        server.restart()
        async with await nats.connect(server.url, connect_timeout=10, reconnect_time_wait=0.05) as nc:
            js = nc.jetstream(timeout=10)
            kv = await js.key_value("B")
            for key in ("a", "b"):
                await kv.put(key, b"1")
            created = (await js.stream_info("KV_B")).created
            tx = kvx.transaction(kv)
            await tx.get("a")
            await kvx.enable(kv, ttl=60)
            server.restart()
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(nats.errors.Error):
                        if (await js.stream_info("KV_B")).created != created:
                            break
                    await asyncio.sleep(0.05)
            await kv.put("b", b"2")  # the last message is gone, the first is left
            tx.put("a", b"2")
            await tx.commit()


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


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.publish(name, b"1")
    return name


@pytest.mark.parametrize("stored", [True, False])
async def test_position_that_was_fetched_before_the_bucket_was_recreated_is_not_followed(
    js: JetStreamContext, stream_name: Callable[[], str], stream: str, stored: bool
) -> None:
    bucket = stream_name()
    other = await OffsetStore(js, bucket).create()
    if stored:
        await other.commit(LogReader(js, stream), name="worker")
    mine = OffsetStore(js, bucket)
    assert (await mine.fetch("worker") is not None) == stored
    await js.delete_key_value(bucket)
    theirs = await OffsetStore(js, bucket).create()
    if stored:
        await theirs.commit(LogReader(js, stream), name="worker")
    for _ in range(2):
        with pytest.raises(StreamRecreatedError, match=r"call fetch\(\) before the next commit") as caught:
            await mine.commit(LogReader(js, stream), name="worker", position=2)
        assert caught.value.stream == f"KV_{bucket}"
    found = await mine.fetch("worker")
    assert (found is not None) == stored
    assert found is None or found.seq == 1
    assert (await mine.commit(LogReader(js, stream), name="worker", position=2)).seq == 2


@pytest.mark.parametrize("committed", [True, False])
async def test_position_is_stored_after_a_restart_that_changed_the_creation_time_of_its_bucket(committed: bool) -> None:
    with NatsServer(version="2.12.8") as server:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            js = nc.jetstream(timeout=10)
            await js.add_stream(name="S", subjects=["S"], allow_direct=True)
            await (await OffsetStore(js).create()).commit(LogReader(js, "S"), name="other")
        server.restart()
        async with await nats.connect(server.url, connect_timeout=10, reconnect_time_wait=0.05) as nc:
            js = nc.jetstream(timeout=10)
            offsets = OffsetStore(js)
            await offsets.fetch("worker")
            if committed:
                await offsets.commit(LogReader(js, "S"), name="worker")
            info = await js.stream_info("KV_offsets")
            await js.update_stream(info.config.evolve(description="the same bucket"))
            server.restart()
            stored = await offsets.commit(LogReader(js, "S"), name="worker", position=1)
            assert (await js.stream_info("KV_offsets")).created != info.created
            assert await OffsetStore(js).fetch("worker") == stored
