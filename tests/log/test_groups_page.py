"""The page on groups: its code blocks run unchanged, and its figures are those of the code."""

import ast
import asyncio
import contextlib
import inspect
import re
import signal
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.log import group_plan, group_reader, membership
from jetstream_ext.testing import NatsServer

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")
ENDLESS = ("async for msg in member", "member.run(", "exactly_once_group(")


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
async def own() -> Any:
    async with NatsServer() as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        yield nc.jetstream()
        await nc.close()


async def run(code: str, names: dict[str, Any], done: asyncio.Event) -> None:
    """Run code with top-level await; what waits for more messages is cancelled when it has handled those of the stream."""
    result = eval(compile(code, "groups.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if not inspect.iscoroutine(result):
        return
    task = asyncio.ensure_future(result)
    if any(words in code for words in ENDLESS):
        waiting = asyncio.ensure_future(done.wait())
        await asyncio.wait({task, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert done.is_set()
    else:
        await task


async def stop_by_signal() -> None:
    """Send SIGTERM to this process once it is handled; nothing else ends the block."""
    usual = signal.getsignal(signal.SIGTERM)
    async with asyncio.timeout(30):
        while signal.getsignal(signal.SIGTERM) is usual:
            await asyncio.sleep(0.01)
    signal.raise_signal(signal.SIGTERM)


async def test_every_code_block_runs(own: JetStreamContext, capsys: pytest.CaptureFixture[str]) -> None:
    await jsx.ensure_stream(own, name="ORDERS", subjects=["orders.>"], allow_direct=True, allow_batched=True)
    await jsx.ensure_stream(
        own, name="TOTALS", subjects=["totals.>", "totals-at.*.*"], allow_direct=True, allow_atomic=True
    )
    entries = [(f"orders.customer{n % 20}.paid", b"%d" % n) for n in range(200)]
    await jsx.ingest(own, entries)
    handled: list[bytes] = []
    done = asyncio.Event()

    async def handle(msg: jsx.StoredMsg) -> None:
        handled.append(msg.data)
        if len(handled) % 200 == 0:
            done.set()

    async def store(batch: list[jsx.StoredMsg]) -> None:
        for msg in batch:
            await handle(msg)

    async def total() -> None:
        reader = log.LogReader(own, "TOTALS", subject="totals.>", tail=True, poll=0.05)
        for _ in range(200):
            await anext(reader)
        done.set()

    names: dict[str, Any] = {"js": own, "jsx": jsx, "handle": handle, "store": store}
    code = blocks()
    assert len(code) == 8
    for number, block in enumerate(code):
        done.clear()
        handled.clear()
        counting = asyncio.ensure_future(total()) if "exactly_once_group" in block else None
        if number in (1, 2):  # the blocks before have handled everything
            await names["group"].reset(log.First())
        if number == 7:  # which resets it; a block before has made another group
            assert "32" in block
        if "SIGTERM" in block:
            async with asyncio.timeout(60), asyncio.TaskGroup() as both:
                both.create_task(stop_by_signal())
                await eval(compile(block, "groups.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            continue
        await run(block, names, done)
        if counting is not None:
            await counting
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 16, "the group that reads partition tokens has no member"
    assert (await names["group"].status()).partitions[31].position == names["start"]


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    group = inspect.signature(log.Group).parameters
    assert (group["heartbeat"].default, group["buffer"].default, group["poll"].default) == (3.0, 1000, 0.25)
    join = inspect.signature(log.Group.join).parameters
    assert (join["every"].default, join["seconds"].default, join["revoke_timeout"].default) == (1000, 5.0, 60.0)
    assert inspect.signature(log.exactly_once_group).parameters["max_messages"].default == 100
    assert (group_reader.BUFFER_BYTES, membership.LEAVE_TIMEOUT) == (4 << 20, 1.0)


def test_the_times_of_the_page_are_those_of_a_group(js: JetStreamContext) -> None:
    assert group_plan.MARGIN == 0.1
    usual, shortest = (log.Group(js, "S", "g", partitions=1, heartbeat=seconds) for seconds in (3.0, 0.1))
    assert (usual.ttl, shortest.ttl) == (9, 2)


@pytest.mark.parametrize(("key", "hashed"), [([1], "ann"), ([1, 2], "annpaid"), (None, "orders.ann.paid")])
def test_the_keys_of_the_page_are_hashed_as_it_says(key: list[int] | None, hashed: str) -> None:
    assert f"`{hashed}`" in PAGE
    assert log.partition_of("orders.ann.paid", 4096, key) == log.partition_of(hashed, 4096, None)
