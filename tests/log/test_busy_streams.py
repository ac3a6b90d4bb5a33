"""Reads of a stream that others write as fast as it is read: they end, and positions are stored meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

from jetstream_ext.log import LogReader, OffsetStore, Stored, exactly_once, reading
from jetstream_ext.log import work as work_module

Make = Callable[..., Awaitable[str]]
Store = Callable[..., Awaitable[OffsetStore]]


@pytest.fixture
async def busy(js: JetStreamContext, wire: Any, make_stream: Make) -> str:
    """A stream on whose other subjects a message is stored before each answer of its leader and each direct get."""
    name = await make_stream(3)
    for kind in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET"):
        wire.before_each(kind, lambda: js.publish(f"{name}.other"))
    return name


async def test_a_read_ends_while_other_subjects_are_written(js: JetStreamContext, busy: str, wire: Any) -> None:
    for matching, wanted in (("mine", []), ("2", [2])):
        async with asyncio.timeout(60):
            reader = LogReader(wire.js, busy, subject=f"{busy}.{matching}")
            assert [message.seq for message in await reader.read(timeout=0)] == wanted
            assert await reader.read(timeout=0) == []
            assert await reader.read_for(30) is None
            assert [message.seq async for message in LogReader(wire.js, busy, subject=f"{busy}.{matching}")] == wanted


async def test_a_read_returns_what_was_stored_before_it(js: JetStreamContext, busy: str, wire: Any) -> None:
    """The end of the stream that an earlier call saw is not the end for this one."""
    reader = LogReader(wire.js, busy, subject=f"{busy}.mine")
    for n in range(5):
        ack = await js.publish(f"{busy}.mine", b"%d" % n)
        assert [message.seq for message in await reader.read(timeout=0)] == [ack.seq]
        assert await reader.read(timeout=0) == []


async def test_a_waiting_read_ends_in_time_while_other_subjects_are_written(
    js: JetStreamContext, busy: str, wire: Any
) -> None:
    """And pauses at the end: about 14 times a second, each time for about 5 requests; the test publishes for some of them."""
    loop = asyncio.get_running_loop()
    reader = LogReader(wire.js, busy, subject=f"{busy}.mine", tail=True, poll=0.1)
    began, before = loop.time(), wire.js._nc.stats["out_msgs"]
    async with asyncio.timeout(60):
        assert await reader.read(timeout=0.5) == []
        assert await reader.read_for(0.5) == [], "with tail=True the stream has no end"
    assert loop.time() - began >= 1.0
    assert wire.js._nc.stats["out_msgs"] - before < 300


async def test_a_worker_ends_while_other_subjects_are_written(
    js: JetStreamContext, busy: str, wire: Any, make_stream: Make, make_store: Store
) -> None:
    """And so does a loop that commits its position."""
    output, store = await make_stream(), await make_store()
    reader = LogReader(wire.js, busy, subject=f"{busy}.mine", start=Stored("r"), offsets=store)
    async with asyncio.timeout(60):
        done = await exactly_once(reader, output, lambda _: None, name="w", prefix=f"{output}.at")
        assert done.position == reader.position
        async with store.committing(reader) as messages:
            assert [message.seq async for message in messages] == []
    assert messages.committed == reader.position


@pytest.fixture
def slow_groups(monkeypatch: pytest.MonkeyPatch, wire: Any) -> None:
    """Groups of ten sequences, each of which takes a while."""
    monkeypatch.setattr(reading, "_GROUP", 10)
    monkeypatch.setattr(reading, "_WIDEST", 10)
    wire.before_each("DIRECT.GET", lambda: asyncio.sleep(0.02))


@pytest.mark.usefixtures("slow_groups")
@pytest.mark.parametrize("tail", [False, True])
async def test_a_worker_stores_its_position_while_nothing_matches(
    js: JetStreamContext, make_stream: Make, wire: Any, monkeypatch: pytest.MonkeyPatch, tail: bool
) -> None:
    monkeypatch.setattr(work_module, "_IDLE", 0.1)
    name, output = await make_stream(400), await make_stream()
    reader = LogReader(wire.js, name, subject=f"{name}.mine", tail=tail)
    working = asyncio.create_task(exactly_once(reader, output, lambda _: None, name="w", prefix=f"{output}.at"))
    positions: set[int] = set()
    async with asyncio.timeout(60):
        while len(positions) < 4:
            position = reader.position
            state = (await js.stream_info(output)).state
            if state.last_seq > len(positions):
                positions.add(state.last_seq)
            await asyncio.sleep(0.01)
    assert position is not None
    assert 1 < position < 401, "positions are stored before the reader is at the end"
    working.cancel()
    await asyncio.wait([working])


@pytest.mark.usefixtures("slow_groups")
@pytest.mark.parametrize("tail", [False, True])
async def test_committing_commits_while_nothing_matches(
    make_stream: Make, make_store: Store, wire: Any, tail: bool
) -> None:
    name, store = await make_stream(400), await make_store()
    reader = LogReader(wire.js, name, subject=f"{name}.mine", start=Stored("r"), offsets=store, tail=tail)

    async def follow() -> None:
        async with store.committing(reader, seconds=0.1) as messages:
            committing.append(messages)
            async for _ in messages:
                pass

    committing: list[Any] = []
    task = asyncio.create_task(follow())
    async with asyncio.timeout(60):
        while not committing or committing[0].committed in (None, 1):
            await asyncio.sleep(0.01)
    assert 1 < committing[0].committed < 401
    task.cancel()
    await asyncio.wait([task])
