"""Calls cancelled at every await: nothing is stored unless it was committed, and nothing is left open."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import StorageType

import jetstream_ext as jsx
from jetstream_ext.client.api import _caches

pytestmark = pytest.mark.usefixtures("level")


async def cancelled_at(ticks: int, call: Awaitable[object]) -> bool:
    """Cancel `call` after `ticks` turns of the loop; return whether it had not ended."""
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
    """Cancel one turn later each time, until two calls in a row end before that."""
    ticks, finished = 0, 0
    while finished < 2:
        finished = 0 if await try_once(ticks) else finished + 1
        ticks += 1 if ticks < 25 else 3
    assert ticks > 3


async def count(js: JetStreamContext, stream: str) -> int:
    await js.publish(f"{stream}.after", b"")  # after everything that is on its way
    return (await js.stream_info(stream)).state.messages - 1


async def emptied(js: JetStreamContext, stream: str) -> None:
    # A new stream each time: abandoned batches count against the server's limit for 10 s.
    await js.delete_stream(stream)
    await js.add_stream(
        name=stream, subjects=[f"{stream}.>"], allow_atomic=True, allow_direct=True, storage=StorageType.MEMORY
    )
    _caches.pop(js._nc, None)  # so that the lookup of the stream is cancelled too


async def test_a_cancelled_add_keeps_the_batch_open(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    async def once(ticks: int) -> bool:
        await emptied(js, stream)
        batch = jsx.AtomicBatch(js)
        cancelled = await cancelled_at(ticks, batch.add(f"{stream}.a", b"maybe"))
        assert batch._session._waiters == {}
        size = batch.size
        await batch.add_many([jsx.BatchMessage(f"{stream}.b", b"after")] * 2)
        assert (await batch.commit_eob()).batch_size == size + 2
        stored = await jsx.DirectGet(js, stream).scan().to_list()
        assert [message.data for message in stored] == [b"maybe"] * size + [b"after"] * 2
        await leak_check.assert_clean()
        return cancelled

    await at_every_point(once)


@each("end", ["commit", "commit_eob", "exit", "exit after add_many", "publish_atomic"])
async def test_a_cancelled_commit_or_block_stores_all_or_nothing(
    js: JetStreamContext, nc: Client, stream: str, leak_check: Any, end: str
) -> None:
    states = set()

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
                        await batch.add_many([entry])

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
            states.add(batch.state)
            if batch.state == "unknown":
                assert await batch.resolve() == ("stored" if stored else "not_stored")
            await batch.discard()
        if not cancelled:
            assert stored == 3
        await leak_check.assert_clean()
        return cancelled

    await at_every_point(once)
    assert not end.startswith("commit") or "unknown" in states
