"""A cancellation that a user's own function loses, as nats-py's calls do before Python 3.12, still ends the call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import errors
from jetstream_ext.client.cancelling import lost_cancellations
from jetstream_ext.log import LogReader, exactly_once

Make = Callable[..., Awaitable[str]]


class Loser:
    """Waits to be cancelled, and goes on."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.waits = 0

    async def wait(self) -> None:
        self.waits += 1
        if self.waits > 1:
            return
        self.waiting.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            pass

    async def entries(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            yield subject, b"x"
            await self.wait()

    async def cancels(self, call: Awaitable[Any]) -> None:
        """Cancel a call that waits here; it must end."""
        task = asyncio.ensure_future(call)
        await asyncio.wait_for(self.waiting.wait(), 30)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30)
        assert done
        assert task.cancelled()


@pytest.fixture
async def stream(js: JetStreamContext, stream_name: Callable[[], str]) -> str:
    name = stream_name()
    await jsx.ensure_stream(
        js, name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_batched=True
    )
    return name


async def test_a_retried_transaction(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name()))
    loser = Loser()

    async def change(tx: kvx.Transaction) -> None:
        tx.put("a", b"1")
        await loser.wait()

    await loser.cancels(kvx.retry_transaction(kv, change))
    assert await kvx.get_many(kv, ["a"]) == {}


async def test_a_transaction_that_never_fits(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=stream_name()))
    loser = Loser()

    async def change(tx: kvx.Transaction) -> None:
        await loser.wait()
        raise errors.KeyConflictError("again", keys=("a",), stale_read=True)

    await loser.cancels(kvx.retry_transaction(kv, change))
    assert loser.waits == 1


async def test_a_worker(js: JetStreamContext, stream: str) -> None:
    await js.publish(f"{stream}.in", b"x")
    loser = Loser()

    async def handle(message: jsx.StoredMsg) -> None:
        await loser.wait()

    reader = LogReader(js, stream, subject=f"{stream}.in", tail=True)
    await loser.cancels(exactly_once(reader, stream, handle, name="w", prefix=f"{stream}.at"))


async def test_add_many(js: JetStreamContext, stream: str) -> None:
    loser = Loser()
    async with jsx.FastPublisher(js) as publisher:
        await loser.cancels(publisher.add_many(loser.entries(f"{stream}.a")))
        assert loser.waits == 1
        await publisher.add(f"{stream}.b", b"usable still")
    assert (await js.stream_info(stream)).state.messages == publisher.batch_seq


async def test_an_atomic_batch(js: JetStreamContext, stream: str) -> None:
    loser = Loser()
    await loser.cancels(jsx.publish_atomic(js, loser.entries(f"{stream}.a")))
    assert loser.waits == 1
    assert (await js.stream_info(stream)).state.messages == 0


async def test_many_batches(js: JetStreamContext, stream: str) -> None:
    loser = Loser()

    async def batches() -> AsyncIterator[list[tuple[str, bytes]]]:
        while True:
            await loser.wait()
            yield [(f"{stream}.a", b"x")]

    async def publish() -> None:
        await jsx.publish_atomic_many(js, batches())

    await loser.cancels(publish())
    assert loser.waits == 1
    assert (await js.stream_info(stream)).state.messages == 0


async def test_ingest(js: JetStreamContext, stream: str) -> None:
    loser = Loser()
    await loser.cancels(jsx.ingest(js, loser.entries(f"{stream}.a")))
    assert loser.waits == 1


async def test_what_was_lost_before_is_not_looked_at() -> None:
    loser = Loser()
    checked = asyncio.Event()

    async def lost_and_over() -> None:
        await loser.wait()
        lost_cancellations()()
        checked.set()

    task = asyncio.ensure_future(lost_and_over())
    await loser.waiting.wait()
    task.cancel()
    await task
    assert checked.is_set()
