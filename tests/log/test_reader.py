"""Reading a stream as a log: starts, the position, the end, the tail, and cancellation."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext.log as jslog
from jetstream_ext import DirectGet
from jetstream_ext.log import First, Last, LogReader, New, Seq, Stored, Time, reading

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


async def numbers(reader: LogReader) -> list[int]:
    return [int(msg.data) async for msg in reader]


async def test_a_loop_ends_at_the_end_and_a_later_one_continues(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name, empty = await make_stream(5000), await make_stream()
    reader, of_empty = LogReader(js, name), LogReader(js, empty)
    assert reader.position is None
    assert await numbers(reader) == list(range(1, 5001))
    assert reader.position == 5001
    assert await numbers(reader) == []
    assert (await numbers(of_empty), of_empty.position) == ([], 1)
    await more(name, 5001, 5003)
    assert await numbers(reader) == [5001, 5002, 5003]
    await more(empty, 1, 2)
    assert await numbers(of_empty) == [1, 2]


async def test_each_start_resolves_to_its_first_message(js: JetStreamContext, make_stream: Make, more: More) -> None:
    name = await make_stream(20)
    cases: list[tuple[Any, str | None, int]] = [
        (First(), None, 1),
        (Seq(7), None, 7),
        (Seq(21), None, 21),
        (Last(), None, 20),
        (Last(), "1", 19),
        (Last(), "9", 21),
        (New(), None, 21),
        (Time(datetime(2020, 1, 1, tzinfo=UTC)), None, 1),
    ]
    readers = [LogReader(js, name, start=start, subject=end and f"{name}.{end}") for start, end, _ in cases]
    for reader, (start, subject, first) in zip(readers, cases, strict=True):
        assert await reader.open() == first, (start, subject)
    await more(name, 21, 30)
    for reader, (start, subject, first) in zip(readers, cases, strict=True):
        expected = [n for n in range(first, 31) if subject is None or n % 3 == int(subject)]
        assert await numbers(reader) == expected, (start, subject)
        assert reader.position == 31, "one more than the last sequence, whether or not that message matches"


async def test_last_finds_the_newest_message_that_was_not_deleted(js: JetStreamContext, make_stream: Make) -> None:
    """For the last message of all subjects, servers look only at the last sequence."""
    for kept in ([], [1], [7], [20], [1, 2, 19], [3, 9, 11], list(range(1, 20))):
        name = await make_stream(20)
        for seq in set(range(1, 21)) - set(kept):
            await js.delete_msg(name, seq)
        for subject in (None, ">"):
            assert await LogReader(js, name, start=Last(), subject=subject).open() == max(kept, default=21), kept
        with_filter = LogReader(js, name, start=Last(), subject=f"{name}.1")
        assert await with_filter.open() == max((seq for seq in kept if seq % 3 == 1), default=21), kept


async def test_time_starts_at_the_first_message_of_that_time(
    js: JetStreamContext, make_stream: Make, more: More
) -> None:
    name = await make_stream(5)
    await asyncio.sleep(0.002)  # a datetime has microseconds, the server's clock nanoseconds
    await more(name, 6, 10)
    when = (await DirectGet(js, name).get(6)).time
    assert (await numbers(LogReader(js, name, start=Time(when))))[0] == 6
    assert (await numbers(LogReader(js, name, start=Time(when), subject=f"{name}.1")))[0] == 7


@pytest.mark.parametrize("confirm", [True, False])
async def test_what_comes_before_the_start_is_not_read_for_longer_than_the_timeout(
    make_stream: Make, more: More, wire: Any, monkeypatch: pytest.MonkeyPatch, confirm: bool
) -> None:
    name = await make_stream()
    monkeypatch.setattr(reading, "_GROUP", 10)
    monkeypatch.setattr(reading, "_WIDEST", 10)
    reader = LogReader(wire.js, name, start=Time(datetime.now(UTC) + timedelta(hours=1)), confirm=confirm)
    assert await reader.read() == []
    await more(name, 1, 400)
    wire.before_each("DIRECT.GET", lambda: asyncio.sleep(0.02))
    assert await reader.read(timeout=0.1) == []
    assert reader.position is not None
    assert 1 < reader.position < 401
    assert await reader.read(timeout=0) == []
    assert reader.position == 401, "without a time to wait, it reads to the end"


async def test_the_position_moves_with_every_message(js: JetStreamContext, make_stream: Make) -> None:
    name = await make_stream(10)
    reader = LogReader(js, name)
    assert [msg.seq for msg in await reader.read(3)] == [1, 2, 3]
    assert reader.position == 4
    async for msg in reader:
        if msg.seq == 5:
            break
    assert (reader.position, (await anext(reader)).seq) == (6, 6)
    assert [msg.seq for msg in await reader.read()] == [7, 8, 9, 10]
    assert await reader.read() == await reader.read(timeout=0.05) == []
    filtered = LogReader(js, name, subject=f"{name}.0")
    seen = [(msg.seq, filtered.position) async for msg in filtered]
    # After the last match, the position moves over the messages that do not match.
    assert seen == [(3, 4), (6, 7), (9, 11)]
    reader.seek(2)
    assert reader.position == 2
    assert [msg.seq for msg in await reader.read(2)] == [2, 3]
    for start, count in ((Last(), 1), (First(), 10)):
        reader.seek(start)
        assert len(await numbers(reader)) == count


async def test_tail_waits_for_more(js: JetStreamContext, make_stream: Make, more: More, leak_check: Any) -> None:
    name, seen = await make_stream(2), asyncio.Queue[int]()
    reader = LogReader(js, name, tail=True)

    async def follow() -> None:
        async for msg in reader:
            seen.put_nowait(int(msg.data))

    async def next_ones(count: int) -> list[int]:
        return [await asyncio.wait_for(seen.get(), 60) for _ in range(count)]

    task = asyncio.create_task(follow())
    assert await next_ones(2) == [1, 2]
    await more(name, 3, 4)
    await more(name, 5, 6)
    assert await next_ones(4) == [3, 4, 5, 6]
    with pytest.raises(RuntimeError, match="another task is reading"):
        await reader.read()
    with pytest.raises(RuntimeError, match="another task is reading"):
        reader.seek(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leak_check.assert_clean()
    assert reader.position == 7
    await more(name, 7, 7)
    assert (await anext(reader)).data == b"7"


async def test_cancelled_reads_lose_and_repeat_nothing(
    js: JetStreamContext, make_stream: Make, leak_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_GROUP", 50)
    name = await make_stream(400)
    reader = LogReader(js, name)
    seen: list[int] = []
    steps = 0
    while len(seen) < 400:
        steps += 1
        task = asyncio.create_task(reader.read(50))
        for _ in range(steps % 40):
            await asyncio.sleep(0)
        task.cancel()
        try:
            seen += [msg.seq for msg in await task]
        except asyncio.CancelledError:
            await leak_check.assert_clean()
        if steps % 40 == 0:
            seen += [msg.seq for msg in await reader.read(10)]
    assert seen == list(range(1, 401))


async def test_a_reader_returns_large_messages_and_sparse_matches(js: JetStreamContext, make_stream: Make) -> None:
    """Groups grow and shrink with the messages that they find, which must not change the result."""
    for small in (0, 8000):
        name = await make_stream(small)
        large = [(await js.publish(f"{name}.big", b"%d".ljust(900_000) % i)).seq for i in range(14)]
        assert [msg.seq async for msg in LogReader(js, name)] == [*range(1, small + 1), *large]
        assert [msg.seq async for msg in LogReader(js, name, subject=f"{name}.big")] == large


async def test_arguments_are_checked(js: JetStreamContext, make_stream: Make) -> None:
    cases: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"start": 5}, TypeError),
        ({"start": Stored}, TypeError),
        ({"subject": "a..b"}, ValueError),
        ({"on_lost": "ignore"}, ValueError),
        ({"patience": 0}, ValueError),
        ({"poll": -1}, ValueError),
        ({"timeout": 0}, ValueError),
    ]
    for arguments, error in cases:
        with pytest.raises(error):
            pytest.fail(f"{arguments}: {LogReader(js, 'S', **arguments)}")
    for seq in (0, -1, True, 1.0, 1 << 64):
        with pytest.raises(ValueError, match="stream sequence"):
            Seq(seq)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timezone-aware"):
        Time(datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(nats.js.errors.InvalidKeyError):
        Stored("a b")
    with pytest.raises(TypeError):
        Stored("a", default=Stored("b"))  # type: ignore[arg-type]
    reader = LogReader(js, await make_stream(2))
    for bad in ({"max_messages": 0}, {"timeout": -1}, {"max_messages": True}):
        with pytest.raises(ValueError, match="must be"):
            await reader.read(**bad)  # type: ignore[arg-type]
    for bad in ({"seconds": 0}, {"seconds": -1}, {"seconds": 1, "max_messages": 0}):
        with pytest.raises(ValueError, match="must be"):
            await reader.read_for(**bad)  # type: ignore[arg-type]
    assert len(await reader.read(1)) == 1
    assert len(await reader.read_for(1) or []) == 1
    assert await reader.read_for(1) is None


def test_starts_can_be_pickled_and_hashed() -> None:
    for value in (First(), Seq(3), Time(datetime(2026, 1, 1, tzinfo=UTC)), Last(), New(), Stored("a", default=New())):
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_public_names_are_sorted_and_documented() -> None:
    assert sorted(jslog.__all__) == jslog.__all__
    for name in jslog.__all__:
        thing = getattr(jslog, name)
        assert thing.__doc__
        assert thing.__module__.startswith(("jetstream_ext.log.", "jetstream_ext.protocol."))


async def test_lag_counts_what_is_behind_the_position(js: JetStreamContext, make_stream: Make, more: More) -> None:
    for confirm in (True, False):
        name = await make_stream(messages=10)
        reader = LogReader(js, name, start=Seq(4), confirm=confirm)
        for wanted in (7, 2, 0):
            assert await reader.lag() == wanted
            await reader.read(5)
        await more(name, 11, 13)
        assert await reader.lag() == 3
