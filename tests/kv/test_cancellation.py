"""Cancelled calls leave nothing behind, and a cancelled transaction is written completely or not at all."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import jetstream_ext.kv as kvx
from jetstream_ext.client.api import gather_bounded
from jetstream_ext.errors import KeyConflictError

KEYS = [f"k.{n}" for n in range(1_100)]


async def again_if_an_earlier_write_arrived(write: Callable[[], Awaitable[Any]]) -> None:
    """A cancelled call may have sent its write, which can arrive after the next call has read the key."""
    try:
        await write()
    except KeyConflictError:
        await write()


CALLS: list[Callable[[Any], Awaitable[Any]]] = [
    lambda kv: kvx.get_many(kv, KEYS),
    lambda kv: kvx.get_many(kv, KEYS, at=2_000),
    lambda kv: kvx.snapshot(kv),
    lambda kv: kvx.snapshot(kv, ["k.1", "k.2"]),
    lambda kv: kvx.snapshot(kv, at=2_000),
    lambda kv: again_if_an_earlier_write_arrived(lambda: kvx.touch(kv, "k.1", ttl=60)),
    lambda kv: kvx.enable(kv, ttl=True),
]


async def cancelled_everywhere(call: Callable[[], Awaitable[Any]]) -> int:
    """Cancel a call after more and more turns of the loop, until it completes; return how often it was cancelled."""
    turns = 0
    while True:
        task = asyncio.ensure_future(call())
        for _ in range(turns):
            if task.done():
                break
            await asyncio.sleep(0)
        if task.done():
            await task
            return turns
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()  # the answer had arrived: asyncio.wait_for then loses the cancellation
        turns = turns + 1 + turns // 4


async def test_cancelled_call_leaves_nothing_behind(make_bucket, load, leak_check) -> None:
    kv = await make_bucket(history=3)
    await load(kv, dict.fromkeys(KEYS, b"1"))
    await load(kv, dict.fromkeys(KEYS, b"2"))
    for call in CALLS:
        await call(kv)
        assert await cancelled_everywhere(lambda: call(kv)) > 5  # noqa: B023 - called before the next one
        await leak_check.assert_clean()


async def test_cancelled_transaction_is_written_completely_or_not_at_all(make_bucket, leak_check) -> None:
    kv = await make_bucket(storage="memory")
    round_ = 0

    async def write() -> None:
        nonlocal round_
        round_ += 1
        async with kvx.transaction(kv) as tx:
            await tx.get("a")
            tx.put("a", b"%d" % round_)
            tx.put("b", b"%d" % round_)
            tx.put("c", b"%d" % round_)

    assert await cancelled_everywhere(lambda: again_if_an_earlier_write_arrived(write)) > 5
    snap = await kvx.snapshot(kv)
    assert len({entry.value for entry in snap.values()}) == 1
    assert snap.revision % 3 == 0
    await leak_check.assert_clean()


async def test_cancelled_retry_ends(make_bucket, leak_check) -> None:
    kv = await make_bucket()
    runs = 0

    async def never(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("a")
        await kv.put("a", b"%d" % runs)
        tx.put("a", b"mine")

    task = asyncio.create_task(kvx.retry_transaction(kv, never))
    while runs < 3:
        await asyncio.sleep(0.001)
    while not task.done():  # before Python 3.12, nats-py loses a cancellation if the answer has just arrived
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)
    assert task.cancelled()
    await leak_check.assert_clean()


async def test_concurrent_calls_end_with_the_first_failure_or_cancellation() -> None:
    """Also if another cancellation comes while they clean up."""
    for after in ("a failure", "a cancellation"):
        started, cleaning, go_on, running = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0

        async def work(item: int, after: str = after) -> None:
            nonlocal running
            running += 1
            try:
                if item == 2:
                    started.set()  # noqa: B023
                    if after == "a failure":
                        raise KeyError(item)
                await asyncio.sleep(30)
            finally:
                cleaning.set()  # noqa: B023
                if item != 2:
                    await go_on.wait()  # noqa: B023
                running -= 1

        task = asyncio.ensure_future(gather_bounded(work, range(9), limit=3))
        await started.wait()
        if after == "a cancellation":
            task.cancel()
        await cleaning.wait()
        await asyncio.sleep(0)
        assert running == 2
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running == 0

    async def fail(item: int) -> None:
        raise KeyError(item)

    with pytest.raises(KeyError):
        await gather_bounded(fail, range(3), limit=3)
