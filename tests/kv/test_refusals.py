"""Writes that the server refuses: every path raises a `ServerError` that names the bucket and says what to do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy
from nats.js.errors import APIError
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import BatchServerError, ErrorCode, ServerError
from jetstream_ext.log import LogReader, OffsetStore

Write = Callable[[KeyValue], Awaitable[Any]]


async def touch(kv: KeyValue) -> None:
    await kvx.touch(kv, "a", 60)


async def commit(kv: KeyValue) -> None:
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"2" * 100, ttl=60)


async def purge(kv: KeyValue) -> None:
    async with kvx.transaction(kv) as tx:
        tx.purge("a")


async def retry(kv: KeyValue) -> None:
    async def fn(tx: kvx.Transaction) -> None:
        await tx.get("a")
        tx.put("a", b"2" * 100, ttl=60)

    async with asyncio.timeout(20):  # less than `patience`
        await kvx.retry_transaction(kv, fn)


async def nothing(kv: KeyValue, js: JetStreamContext) -> None:
    pass


async def seal(kv: KeyValue, js: JetStreamContext) -> None:
    await js.update_stream((await js.stream_info(kv._stream)).config.evolve(sealed=True))


@pytest.fixture
def make_odd_bucket(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., Awaitable[KeyValue]]:
    async def make(**config: Any) -> KeyValue:
        name = stream_name()
        options = {"allow_direct": True, "allow_atomic": True, "allow_msg_ttl": True, "max_msgs_per_subject": 1}
        await js.add_stream(name=f"KV_{name}", subjects=[f"$KV.{name}.>"], **{**options, **config})
        kv = await js.key_value(name)
        await kv.put("a", b"1" * 100)
        return kv

    return make


FULL = {"max_bytes": 260, "discard": DiscardPolicy.NEW, "allow_rollup_hdrs": True}
SEALED = {"allow_rollup_hdrs": True}


async def test_refused_write_names_the_bucket_and_the_reason(js: JetStreamContext, make_odd_bucket: Any) -> None:
    for config, spoil, writes, code, text in (
        ({}, nothing, (touch, commit, purge, retry), ErrorCode.ROLLUP_REFUSED, "rollup not permitted.*--allow-rollup"),
        (SEALED, seal, (touch, commit, purge, retry), ErrorCode.STREAM_SEALED, "it is sealed"),
        # A purge marker is small enough.
        (FULL, nothing, (touch, commit, retry), ErrorCode.STORE_FAILED, "maximum bytes exceeded.*limit"),
    ):
        kv = await make_odd_bucket(**config)
        await spoil(kv, js)
        for write in writes:
            with pytest.raises(BatchServerError, match=rf"^bucket '{kv._name}': .*{text}") as caught:
                await write(kv)
            error = caught.value
            assert "nothing was written" in str(error)
            assert isinstance(error, ServerError)
            assert isinstance(error, APIError), "nats-py's own put raises those"
            assert (error.err_code, error.outcome, error.retryable) == (code, "not_stored", False), write
        assert (await kv.get("a")).revision == 1


async def test_refused_commit_of_a_position_names_the_bucket_and_the_reason(
    js: JetStreamContext, stream_name: Callable[[], str], make_odd_bucket: Any
) -> None:
    stream = stream_name()
    await js.add_stream(name=stream, subjects=[stream], allow_direct=True)
    await js.publish(stream, b"1")
    for config, spoil, code in ((SEALED, seal, ErrorCode.STREAM_SEALED), (FULL, nothing, ErrorCode.STORE_FAILED)):
        kv = await make_odd_bucket(**config)
        await spoil(kv, js)
        with pytest.raises(ServerError, match=rf"reader 'r'.*'{kv._stream}'.*nothing was stored") as caught:
            await OffsetStore(js, kv._name, patience=20).commit(LogReader(js, stream), name="r")
        assert (caught.value.err_code, caught.value.retryable) == (code, False)
