"""A transaction's function runs again only after an error of the transaction itself."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import KeyConflictError, NoStreamError, RequestTimeoutError, StreamRecreatedError

Call = Callable[[kvx.Transaction, KeyValue, KeyValue], Awaitable[Any]]
MakeBucket = Callable[[], Awaitable[KeyValue]]


@pytest.fixture
def make_bucket(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeBucket:
    async def make() -> KeyValue:
        return await kvx.enable(await js.create_key_value(bucket=stream_name()))

    return make


async def conflict_in_another_bucket(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    async with kvx.transaction(other) as inner:
        await inner.get("k")
        await other.put("k", b"changed")
        inner.put("k", b"mine")


async def conflict_of_another_transaction_on_the_bucket(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    await conflict_in_another_bucket(tx, other, kv)


async def conflict_of_an_inner_retry(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    async def never(inner: kvx.Transaction) -> None:
        await conflict_in_another_bucket(inner, other, kv)

    await kvx.retry_transaction(kv, never, give_up_after=0.01)


async def another_bucket_that_was_recreated(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    await other.put("k", b"100")
    async with kvx.transaction(other) as inner:
        await inner.get("k")
        await other._js.delete_key_value(other._name)
        again = await kvx.enable(await other._js.create_key_value(bucket=other._name))
        await again.put("k", b"7")
        inner.put("k", b"101")


async def publish_of_the_function(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    await jsx.publish_atomic(kv._js, [jsx.BatchMessage(f"{kv._name}.no.stream", b"1")])


async def busy_server(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    raise RequestTimeoutError("of another call")


async def test_error_of_another_call_in_the_function_ends_the_call(make_bucket: MakeBucket) -> None:
    calls: dict[Call, type[Exception]] = {
        conflict_in_another_bucket: KeyConflictError,
        conflict_of_another_transaction_on_the_bucket: KeyConflictError,
        conflict_of_an_inner_retry: KeyConflictError,
        another_bucket_that_was_recreated: StreamRecreatedError,
        publish_of_the_function: NoStreamError,
        busy_server: RequestTimeoutError,
    }
    for call, error in calls.items():
        kv, other, runs = await make_bucket(), await make_bucket(), 0

        async def fn(tx: kvx.Transaction, call: Call = call, kv: KeyValue = kv, other: KeyValue = other) -> None:
            nonlocal runs
            runs += 1
            await tx.get("own")
            tx.put("own", b"1")
            await call(tx, kv, other)

        with pytest.raises(error):
            await kvx.retry_transaction(kv, fn, give_up_after=60)
        assert runs == 1, call
        assert "own" not in await kvx.snapshot(kv)
