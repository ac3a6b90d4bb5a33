"""Several commits on their way at once."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors


def batch(stream: str, number: int, count: int = 3, **options: Any) -> list[jsx.BatchMessage]:
    return [jsx.BatchMessage(f"{stream}.{number}", b"%d" % i, **options) for i in range(count)]


async def count(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


@pytest.fixture
async def stream(make_stream: Any) -> str:
    return await make_stream()


@pytest.mark.parametrize("in_flight", [1, 2, 4, 40])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_all_are_stored_in_order(
    js: JetStreamContext, stream: str, left: Any, in_flight: int, asynchronous: bool
) -> None:
    async def messages(number: int) -> AsyncIterator[jsx.BatchMessage]:
        for message in batch(stream, number):
            yield message

    async def batches() -> AsyncIterator[AsyncIterator[jsx.BatchMessage]]:
        for number in range(20):
            yield messages(number)

    source: Any = batches() if asynchronous else [batch(stream, number) for number in range(20)]
    acks = await jsx.publish_atomic_many(js, source, in_flight=in_flight)
    assert [(ack.seq, ack.batch_size) for ack in acks] == [(3 * n, 3) for n in range(1, 21)]
    stored = await jsx.DirectGet(js, stream).scan().to_list()
    assert [m.subject for m in stored] == [f"{stream}.{n}" for n in range(20) for _ in range(3)]
    await left.settled()


async def test_the_source_is_read_as_there_is_room(js: JetStreamContext, stream: str, left: Any) -> None:
    taken = 0

    def source() -> Iterator[list[jsx.BatchMessage]]:
        nonlocal taken
        for taken in range(1, 1000):
            yield batch(stream, taken)

    seen = 0
    async with aclosing(jsx.publish_atomic_many(js, source(), in_flight=2)) as acks:
        async for _ in acks:
            seen += 1
            assert taken - seen <= 2
            if seen == 10:
                break
    ack = await js.publish(f"{stream}.after", b"")  # behind whatever is on its way
    assert ack.seq % 3 == 1
    await left.settled()


async def test_one_that_fails(js: JetStreamContext, stream: str, left: Any) -> None:
    batches = [batch(stream, n) for n in range(10)]
    batches[4] = batch(stream, 4, 1, expected_last_seq=77)
    acks: list[jsx.BatchAck] = []

    async def collect() -> None:
        async for ack in jsx.publish_atomic_many(js, batches, in_flight=3):
            acks.append(ack)  # noqa: PERF401 - those before the error are looked at

    with pytest.raises(errors.WrongLastSequenceError) as caught:
        await collect()
    assert [ack.seq for ack in acks] == [3, 6, 9, 12]
    (note,) = caught.value.__notes__
    assert await count(js, stream) == 12 + 3 * note.count("stored")
    with pytest.raises(errors.WrongLastSequenceError):
        await jsx.publish_atomic_many(js, batches, in_flight=3)
    await left.settled()


async def test_a_source_that_fails(js: JetStreamContext, stream: str, left: Any) -> None:
    def messages() -> Iterator[jsx.BatchMessage]:
        yield from batch(stream, 3, 300)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await jsx.publish_atomic_many(js, [batch(stream, 1), batch(stream, 2), messages(), batch(stream, 4)])
    assert await count(js, stream) == 6
    with pytest.raises(errors.EmptyBatchError):
        await jsx.publish_atomic_many(js, [[]])
    await left.settled()


async def test_cancellation(js: JetStreamContext, stream: str, left: Any) -> None:
    await jsx.publish_atomic_many(js, [batch(stream, 0)])
    before = 3
    for ticks in range(0, 60, 3):
        batches = [batch(stream, n) for n in range(6)]
        task = asyncio.ensure_future(jsx.publish_atomic_many(js, batches, in_flight=2).to_list())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        before = (await js.publish(f"{stream}.after", b"")).seq - before - 1  # behind whatever is on its way
        assert before % 3 == 0
        before = await count(js, stream)
        await left.settled()


@pytest.mark.parametrize("in_flight", [0, -1, True, 1.5])
def test_in_flight_is_checked(js: JetStreamContext, in_flight: Any) -> None:
    with pytest.raises(ValueError, match="in_flight"):
        jsx.publish_atomic_many(js, [], in_flight=in_flight)
