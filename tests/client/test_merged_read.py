"""Reads of several subject filters from a real server: in order, each message once, and complete."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext.client.connection import Context
from jetstream_ext.client.merged_read import read_merged
from jetstream_ext.protocol.direct import Block
from jetstream_ext.protocol.reads import MAX_IN_FLIGHT
from jetstream_ext.protocol.subjects import matcher

Make = Callable[..., Awaitable[str]]
LAST = 1 << 40


@pytest.fixture
async def mixed(js: JetStreamContext, make_stream: Make) -> tuple[str, list[str]]:
    """A stream and the subjects of its messages: two tokens below its name."""
    name = await make_stream()
    subjects = [f"{name}.{'abcd'[seq % 4]}.{'xyz'[seq % 3]}" for seq in range(1, 3001)]
    subjects[1500] = subjects[1507] = f"{name}.rare.x"
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((subject, b"%d" % seq) for seq, subject in enumerate(subjects, 1))
    return name, subjects


def blocks_of(js: JetStreamContext, stream: str, filters: Sequence[str], **options: Any) -> AsyncGenerator[Block, None]:
    options = {"first": 1, "last": LAST, "timeout": 30, "confirm": True, **options}
    return read_merged(Context(js), stream, filters, **options)


async def read(js: JetStreamContext, stream: str, filters: Sequence[str], **options: Any) -> list[int]:
    """Return the sequences of a merged read, after a check of its rows."""
    found: list[int] = []
    async for block in blocks_of(js, stream, filters, **options):
        assert len(block.seqs) == len(block.bodies) == len(block.header_sizes) > 0
        assert all(int(data) == seq for seq, data in zip(block.seqs, block.datas, strict=True))
        found += block.seqs
    return found


def matching(name: str, subjects: Sequence[str], filters: Sequence[str]) -> list[int]:
    matches = matcher([f"{name}.{each}" for each in filters])
    return [seq for seq, subject in enumerate(subjects, 1) if matches(subject)]


def below(name: str, filters: Sequence[str]) -> list[str]:
    return [f"{name}.{each}" for each in filters]


FILTERS = [
    ["a.x", "b.y"],
    ["a.*", "*.x"],  # they overlap
    ["a.*", "a.x", "a.>", "rare.*"],  # the first two are covered
    ["rare.x", "nothing", "d.>", "nothing.*"],
    ["nothing", "nothing.>"],
    ["a.x"],
    ["a.x", ">"],
    ["*.*", "a.x.*", "rare"],
]


class TestRows:
    @each("confirm", [True, False])
    @each("filters", FILTERS)
    async def test_each_message_that_matches_comes_once_and_in_order(
        self, js: JetStreamContext, mixed: tuple[str, list[str]], filters: list[str], confirm: bool
    ) -> None:
        name, subjects = mixed
        expected = matching(name, subjects, filters)
        for max_bytes in (1, 20_000, 8 << 20) if len(expected) < 100 else (20_000, 8 << 20):
            assert await read(js, name, below(name, filters), confirm=confirm, max_bytes=max_bytes) == expected
        some = [seq for seq in expected if 700 <= seq <= 1508]
        assert await read(js, name, below(name, filters), first=700, last=1508, confirm=confirm) == some
        assert await read(js, name, below(name, filters), first=700, last=699, confirm=confirm) == []


class TestEnds:
    @each("count", [3, 2 * MAX_IN_FLIGHT])
    async def test_cancellation_at_any_point_leaves_nothing_behind(
        self, js: JetStreamContext, mixed: tuple[str, list[str]], leak_check: Any, count: int
    ) -> None:
        name, subjects = mixed
        filters = ["a.*", "*.x", "nothing", *map(str, range(count - 3))]
        ticks, finished = 0, 0
        while finished < 2:
            task = asyncio.ensure_future(read(js, name, below(name, filters), last=200, max_bytes=4000))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await leak_check.assert_clean()
            finished = 0 if task.cancelled() else finished + 1
            ticks += 1 if ticks < 60 else ticks // 10
        assert ticks > 20
        assert await read(js, name, below(name, filters)) == matching(name, subjects, filters)

    async def test_an_error_of_one_read_ends_all_of_them(
        self, js: JetStreamContext, mixed: tuple[str, list[str]], leak_check: Any
    ) -> None:
        name, subjects = mixed
        found: list[int] = []

        async def read_and_delete() -> None:
            async for block in blocks_of(js, name, below(name, ["a.*", "*.x", "b.y"]), max_bytes=5000, timeout=2):
                if not found:
                    await js.delete_stream(name)
                found.extend(block.seqs)

        with pytest.raises(NotFoundError):
            await read_and_delete()
        assert found == matching(name, subjects, ["a.*", "*.x", "b.y"])[: len(found)]
        assert found
        await leak_check.assert_clean()


async def test_a_mirror_that_lags_shortens_no_confirmed_read(
    js: JetStreamContext, mixed: tuple[str, list[str]], stream_name: Callable[[], str]
) -> None:
    """It lacks the last messages, and one in the middle."""
    mirror, (name, subjects) = stream_name(), mixed
    await js.add_stream(name=mirror, mirror=StreamSource(name=name), mirror_direct=True, allow_direct=True)
    async with asyncio.timeout(60):
        while (await js.stream_info(mirror)).state.messages < len(subjects):
            await asyncio.sleep(0.02)
    for seq in (*range(2900, 3001), 1501):
        await js.delete_msg(mirror, seq)
    filters = ["a.*", "*.x", "rare.x", "nothing"]
    expected = matching(name, subjects, filters)
    async with asyncio.timeout(60):  # the server chooses at random who answers
        while await read(js, name, below(name, filters), confirm=False) == expected:
            pass  # without proof, an answer of the mirror looks complete
    for _ in range(5):
        assert await read(js, name, below(name, filters), max_bytes=50_000) == expected
