"""Cancelled at every single point where a call can be: nothing is stored unless committed, nothing is left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StorageType

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.api import _caches

pytestmark = pytest.mark.usefixtures("level")


async def cancelled_at(ticks: int, call: Awaitable[object]) -> bool:
    """Cancel `call` when the loop went round so many times; return whether that was before its end."""
    task = asyncio.ensure_future(call)
    for _ in range(ticks):
        if task.done():
            break
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def at_every_point(try_once: Callable[[int], Awaitable[bool]]) -> None:
    """Cancel one turn later each time, until a few calls in a row got to their end."""
    ticks, finished = 0, 0
    while finished < 2:
        finished = 0 if await try_once(ticks) else finished + 1
        ticks += 1 if ticks < 25 else 3
    assert ticks > 3


async def count(js: JetStreamContext, stream: str) -> int:
    await js.publish(f"{stream}.after", b"")  # behind whatever is on its way
    return (await js.stream_info(stream)).state.messages - 1


@pytest.fixture
async def stream(make_stream: Any) -> str:
    return await make_stream()


async def emptied(js: JetStreamContext, stream: str) -> None:
    # A new stream each time: abandoned batches count against the server's limit for ten seconds.
    await js.delete_stream(stream)
    await js.add_stream(
        name=stream, subjects=[f"{stream}.>"], allow_atomic=True, allow_direct=True, storage=StorageType.MEMORY
    )
    _caches.pop(js._nc, None)  # so that looking the stream up is among what is cancelled


async def test_add(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    async def once(ticks: int) -> bool:
        await emptied(js, stream)
        batch = jsx.AtomicBatch(js, ack_every=1)
        cancelled = await cancelled_at(ticks, batch.add(f"{stream}.a", b"maybe"))
        size = batch.size
        await batch.add_many([jsx.BatchMessage(f"{stream}.b")] * 2)
        assert (await batch.commit_eob()).batch_size == size + 2
        assert await count(js, stream) == size + 2
        await leak_check.assert_clean()
        return cancelled

    await at_every_point(once)


@pytest.mark.parametrize("end", ["commit", "commit_eob", "exit", "exit after add_many", "publish_atomic"])
async def test_the_end(js: JetStreamContext, nc: Client, stream: str, leak_check: Any, end: str) -> None:
    async def once(ticks: int) -> bool:
        await emptied(js, stream)
        batch = jsx.AtomicBatch(js)
        entries = [jsx.BatchMessage(f"{stream}.a", b"x")] * 3
        if end.startswith("commit"):
            await batch.add_many(entries[:2] if end == "commit" else entries)

        async def block() -> None:
            async with batch:
                if "many" in end:
                    await batch.add_many(entries)
                else:
                    for entry in entries:
                        await batch.add_message(entry)

        cancelled = await cancelled_at(ticks, {
            "commit": lambda: batch.commit(f"{stream}.a", b"x"), "commit_eob": batch.commit_eob,
            "publish_atomic": lambda: jsx.publish_atomic(js, entries),
        }.get(end, block)())  # fmt: skip
        stored = await count(js, stream)
        assert stored in (0, 3)
        if end != "publish_atomic":
            assert (batch.state, stored) in {
                ("discarded", 0), ("unknown", 0), ("unknown", 3), ("committed", 3), ("open", 0),
            }  # fmt: skip
            if batch.state == "unknown":
                assert await batch.resolve() == ("stored" if stored else "not_stored")
            await batch.discard()
        if not cancelled:
            assert stored == 3
        await leak_check.assert_clean()
        return cancelled

    await at_every_point(once)


async def test_resolve(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    async def once(ticks: int) -> bool:
        await emptied(js, stream)
        batch = jsx.AtomicBatch(js)
        await batch.add_many([jsx.BatchMessage(f"{stream}.a", b"x")] * 3)
        machine = batch._session.machine
        machine.commit(None)  # never sent
        machine.lost("nobody sent it")
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await batch.add(f"{stream}.a")
        cancelled = await cancelled_at(ticks, batch.resolve())
        assert batch.state == ("unknown" if cancelled else "failed")
        assert await batch.resolve() == "not_stored"
        batch._session._settle()
        await leak_check.assert_clean()
        return cancelled

    await at_every_point(once)
