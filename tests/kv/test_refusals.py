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

    async with asyncio.timeout(20):  # less than `give_up_after`
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


NO_ROLLUPS = {}, nothing, ErrorCode.ROLLUP_REFUSED, r"rollup not permitted.*nothing was written; .*--allow-rollup"
SEALED = {"allow_rollup_hdrs": True}, seal, ErrorCode.STREAM_SEALED, r"it is sealed.*nothing was written"
NO_ROOM = FULL, nothing, ErrorCode.STORE_FAILED, r"maximum bytes exceeded.*nothing was written; .*limit"


@pytest.mark.parametrize(
    ("write", "config", "spoil", "code", "text"),
    [
        *((write, *NO_ROLLUPS) for write in (touch, commit, purge, retry)),
        *((write, *SEALED) for write in (touch, commit, purge, retry)),
        *((write, *NO_ROOM) for write in (touch, commit, retry)),  # a purge marker is small enough
    ],
)
async def test_refused_write_names_the_bucket_and_the_reason(
    js: JetStreamContext, make_odd_bucket: Any, config: dict[str, Any], spoil: Any, code: int, text: str, write: Write
) -> None:
    kv = await make_odd_bucket(**config)
    await spoil(kv, js)
    with pytest.raises(BatchServerError, match=rf"^bucket '{kv._name}': .*{text}") as caught:
        await write(kv)
    assert isinstance(caught.value, ServerError)
    assert isinstance(caught.value, APIError), "nats-py's own put raises those"
    assert (caught.value.err_code, caught.value.outcome, caught.value.retryable) == (code, "not_stored", False)
    assert (await kv.get("a")).revision == 1


@pytest.mark.parametrize(
    ("config", "spoil", "code"),
    [({"allow_rollup_hdrs": True}, seal, ErrorCode.STREAM_SEALED), (FULL, nothing, ErrorCode.STORE_FAILED)],
    ids=["sealed", "full"],
)
async def test_refused_commit_of_a_position_names_the_bucket_and_the_reason(
    js: JetStreamContext, stream_name: Callable[[], str], make_odd_bucket: Any, config: Any, spoil: Any, code: int
) -> None:
    stream = stream_name()
    await js.add_stream(name=stream, subjects=[stream], allow_direct=True)
    await js.publish(stream, b"1")
    kv = await make_odd_bucket(**config)
    await spoil(kv, js)
    with pytest.raises(ServerError, match=rf"reader 'r'.*'{kv._stream}'.*nothing was stored") as caught:
        await OffsetStore(js, kv._name, patience=20).commit(LogReader(js, stream), name="r")
    assert (caught.value.err_code, caught.value.retryable) == (code, False)
