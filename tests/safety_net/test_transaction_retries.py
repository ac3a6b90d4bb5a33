"""A transaction's function runs again only after an error of the transaction itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import KeyConflictError, NoStreamError, RequestTimeoutError, StreamRecreatedError
from jetstream_ext.kv.bucket import Bucket

Call = Callable[[kvx.Transaction, KeyValue, KeyValue], Awaitable[Any]]
MakeBucket = Callable[[], Awaitable[KeyValue]]


class OwnError(Exception):
    """An error of the function itself."""


@pytest.fixture
def make_bucket(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeBucket:
    async def make() -> KeyValue:
        return await kvx.enable(await js.create_key_value(bucket=stream_name()))

    return make


@pytest.fixture
def fail_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the first reads of a bucket in transactions fail."""
    look_up = Bucket.look_up

    def fail(kv: KeyValue, *failures: Exception) -> None:
        left = list(failures)

        async def failing(bucket: Bucket, keys: Any) -> Any:
            if left and bucket.name == kv._name:
                raise left.pop(0)
            return await look_up(bucket, keys)

        monkeypatch.setattr(Bucket, "look_up", failing)

    return fail


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

    await kvx.retry_transaction(kv, never, patience=0.01)


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
            await kvx.retry_transaction(kv, fn, patience=60)
        assert runs == 1, call
        assert "own" not in await kvx.snapshot(kv)


async def own_error_because_of_a_read(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    try:
        await tx.get("k")
    except RequestTimeoutError as error:
        raise OwnError from error


async def transient_error_because_of_a_read(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    try:
        await tx.get("k")
    except RequestTimeoutError as error:
        raise RequestTimeoutError("the report could not be made") from error


async def transient_error_after_a_failed_read(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    try:
        await tx.get("k")
    except RequestTimeoutError:
        pass
    raise nats.errors.NoRespondersError


async def group_with_another_error(tx: kvx.Transaction, kv: KeyValue, other: KeyValue) -> None:
    async def another() -> None:
        raise RequestTimeoutError("of another call")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tx.get("k"))
        tasks.create_task(another())


async def test_error_that_the_function_makes_of_one_of_the_transaction_ends_the_call(
    make_bucket: MakeBucket, fail_reads: Callable[..., None]
) -> None:
    calls: dict[Call, type[Exception]] = {
        own_error_because_of_a_read: OwnError,
        transient_error_because_of_a_read: RequestTimeoutError,
        transient_error_after_a_failed_read: nats.errors.NoRespondersError,
        group_with_another_error: ExceptionGroup,
    }
    for call, error in calls.items():
        kv, runs = await make_bucket(), 0
        fail_reads(kv, RequestTimeoutError("of the transaction"))

        async def fn(tx: kvx.Transaction, call: Call = call, kv: KeyValue = kv) -> None:
            nonlocal runs
            runs += 1
            tx.put("own", b"1")
            await call(tx, kv, kv)

        with pytest.raises(error):
            await kvx.retry_transaction(kv, fn, patience=60)
        assert runs == 1, call
