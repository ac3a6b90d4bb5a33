"""A bucket that is deleted and created again is another bucket."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

import nats
import nats.errors
import pytest
from frame_proxy import FrameProxy, before_request
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchOutcomeUnknownError, FencedError, JetStreamExtError, StreamRecreatedError
from jetstream_ext.log import LogReader, OffsetStore
from jetstream_ext.testing import NatsServer

OLD = {f"old{n}" for n in range(3000)}
NEW = {f"new{n}" for n in range(3200)}


async def create_bucket(js: JetStreamContext, name: str, keys: set[str]) -> None:
    await kvx.enable(await js.create_key_value(bucket=name))
    messages = [jsx.BatchMessage(f"$KV.{name}.{key}", b"1") for key in sorted(keys)]
    for begin in range(0, len(messages), 1000):
        await jsx.publish_atomic(js, messages[begin : begin + 1000])


async def recreate(js: JetStreamContext, name: str) -> KeyValue:
    """Delete a bucket and create it again, with another value at its first revision."""
    await js.delete_key_value(name)
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"7")
    return kv


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


async def test_transaction_that_found_a_key_fails_in_a_recreated_bucket(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    for keys, wrote in itertools.product((("account",), ("account", "other", "third")), (True, False)):
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
        # In an empty bucket the key is at another revision, which is a conflict.
        with pytest.raises(StreamRecreatedError if wrote else JetStreamExtError, match="nothing was written"):
            await tx.commit()
        assert tx.state == "failed", (keys, wrote)
        assert list(await kvx.snapshot(other)) == (["account"] if wrote else []), (keys, wrote)


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


async def test_transaction_that_found_nothing_commits_in_a_recreated_bucket(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")
    tx = kvx.transaction(kv)
    assert await tx.get_many(["missing", "absent"]) == {}
    other = await recreate(js, name)
    tx.put("missing", b"1")
    assert await tx.commit() == {"missing": (await kvx.get_many(other, ["missing"]))["missing"].revision}
    assert list(await kvx.snapshot(other)) == ["account", "missing"]


async def test_retried_transaction_runs_again_in_the_bucket_that_was_recreated_during_a_run(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, values = stream_name(), []
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")

    async def fn(tx: kvx.Transaction) -> None:
        entry = await tx.get("account")
        assert entry is not None
        values.append(entry.value)
        if len(values) == 1:
            await recreate(js, name)
        tx.put("account", entry.value + b"1")

    await kvx.retry_transaction(kv, fn, patience=60)
    assert values == [b"100", b"7"]
    assert (await kv.get("account")).value == b"71"


async def test_retried_transaction_fails_when_the_bucket_is_recreated_during_every_run(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, runs = stream_name(), 0
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")

    async def fn(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("account")
        await recreate(js, name)
        tx.put("account", b"101")

    with pytest.raises(StreamRecreatedError, match="nothing was written"):
        await kvx.retry_transaction(kv, fn, patience=4)
    assert runs > 1
    assert (await kv.get("account")).value == b"7"


async def test_lost_commit_is_resolved_and_not_repeated_in_a_recreated_bucket(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, runs = stream_name(), 0
    kv = await kvx.enable(await js.create_key_value(bucket=name))
    await kv.put("account", b"100")
    commit, states = kvx.Transaction.commit, dict[kvx.Transaction, str]()

    async def lose(tx: kvx.Transaction) -> dict[str, int]:
        if runs > 1:
            return await commit(tx)
        await recreate(js, name)
        states[tx] = "unknown"
        raise BatchOutcomeUnknownError

    async def resolve(tx: kvx.Transaction, *, timeout: float | None = None) -> str:
        states[tx] = "failed"
        return "not_stored"

    async def fn(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        states[tx] = "open"
        entry = await tx.get("account")
        assert entry is not None
        tx.put("account", entry.value + b"1")

    monkeypatch.setattr(kvx.Transaction, "commit", lose)
    monkeypatch.setattr(kvx.Transaction, "resolve", resolve)
    monkeypatch.setattr(kvx.Transaction, "state", property(states.get))
    await kvx.retry_transaction(kv, fn)
    assert runs == 2
    assert (await kv.get("account")).value == b"71"


@contextlib.asynccontextmanager
async def bucket_whose_creation_time_changes() -> AsyncIterator[tuple[NatsServer, JetStreamContext, KeyValue]]:
    """A bucket whose creation time a restart changes after the next update of its configuration."""
    with NatsServer(version="2.12.8") as server:
        async with await nats.connect(server.url, connect_timeout=10) as nc:
            await kvx.enable(await nc.jetstream().create_key_value(bucket="B", history=1))
        server.restart()
        async with await nats.connect(server.url, connect_timeout=10, reconnect_time_wait=0.05) as nc:
            js = nc.jetstream(timeout=10)
            yield server, js, await js.key_value("B")


async def change_creation_time(server: NatsServer, js: JetStreamContext) -> None:
    info = await js.stream_info("KV_B")
    await js.update_stream(info.config.evolve(description="the same bucket"))
    server.restart()
    impatient = js._nc.jetstream(timeout=0.5)  # a request may be lost while the server starts
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(nats.errors.Error):
                if (await impatient.stream_info("KV_B")).created != info.created:
                    return
            await asyncio.sleep(0.05)


async def test_retried_transaction_runs_again_if_the_creation_time_and_every_message_changed() -> None:
    values: list[bytes] = []
    async with bucket_whose_creation_time_changes() as (server, js, kv):
        await kv.put("count", b"1")

        async def fn(tx: kvx.Transaction) -> None:
            entry = await tx.get("count")
            assert entry is not None
            values.append(entry.value)
            if len(values) == 1:
                await change_creation_time(server, js)
                await kv.put("count", b"2")
            tx.put("count", entry.value + b"x")

        await kvx.retry_transaction(kv, fn)
        assert values == [b"1", b"2"]
        assert (await kv.get("count")).value == b"2x"


async def test_transaction_commits_after_a_restart_that_changed_the_creation_time_of_its_bucket() -> None:
    async with bucket_whose_creation_time_changes() as (server, js, kv):
        for key in ("a", "b"):
            await kv.put(key, b"1")
        tx = kvx.transaction(kv)
        await tx.get("a")
        await change_creation_time(server, js)
        await kv.put("b", b"2")  # the last message is gone, the first is left
        tx.put("a", b"2")
        await tx.commit()


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name], allow_direct=True)
    await js.publish(name, b"1")
    return name


async def test_position_that_was_fetched_before_the_bucket_was_recreated_is_not_followed(
    js: JetStreamContext, stream_name: Callable[[], str], stream: str
) -> None:
    bucket = stream_name()
    await (await OffsetStore(js, bucket).create()).commit(LogReader(js, stream), name="worker")
    mine, empty = OffsetStore(js, bucket), OffsetStore(js, bucket)
    assert await mine.fetch("worker") is not None
    for name in ("worker2", "worker3"):
        assert await empty.fetch(name) is None
    await js.delete_key_value(bucket)
    theirs = await OffsetStore(js, bucket).create()
    for name in ("worker", "worker2"):
        await theirs.commit(LogReader(js, stream), name=name)
    for _ in range(2):
        with pytest.raises(StreamRecreatedError, match="nothing of this commit is stored") as caught:
            await mine.commit(LogReader(js, stream), name="worker", position=2)
        assert caught.value.stream == f"KV_{bucket}"
    found = await mine.fetch("worker")
    assert found is not None
    assert found.seq == 1
    assert (await mine.commit(LogReader(js, stream), name="worker", position=2)).seq == 2
    with pytest.raises(FencedError):
        await empty.commit(LogReader(js, stream), name="worker2", position=2)
    assert (await empty.commit(LogReader(js, stream), name="worker3", position=2)).seq == 2, "it follows no position"


async def test_position_is_stored_after_a_restart_that_changed_the_creation_time_of_its_bucket() -> None:
    async with bucket_whose_creation_time_changes() as (server, js, _):
        await js.add_stream(name="S", subjects=["S"], allow_direct=True)
        offsets = OffsetStore(js, "B")
        await offsets.commit(LogReader(js, "S"), name="other")
        for name in ("committed", "fetched"):
            await offsets.fetch(name)
        await offsets.commit(LogReader(js, "S"), name="committed")
        await change_creation_time(server, js)
        for name in ("committed", "fetched"):
            stored = await offsets.commit(LogReader(js, "S"), name=name, position=1)
            assert await OffsetStore(js, "B").fetch(name) == stored, name
