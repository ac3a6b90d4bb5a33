"""`publish_atomic_many`: batches with several commits in flight."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer


def batch(stream: str, number: int, count: int = 3, **options: Any) -> list[jsx.BatchMessage]:
    return [jsx.BatchMessage(f"{stream}.{number}", b"%d" % i, **options) for i in range(count)]


async def count(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


@each("in_flight", [1, 2, 4, 40])
@each("asynchronous", [False, True])
async def test_all_batches_are_stored_in_order(
    js: JetStreamContext, make_stream: Any, leak_check: Any, in_flight: int, asynchronous: bool
) -> None:
    stream = await make_stream()

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
    await leak_check.assert_clean()


async def test_the_acks_can_be_awaited_once(js: JetStreamContext, stream: str) -> None:
    acks = jsx.publish_atomic_many(js, [batch(stream, 0)])
    assert len(await acks) == 1
    with pytest.raises(RuntimeError, match="already"):
        await acks
    assert await count(js, stream) == 3


async def test_the_source_is_read_at_most_in_flight_batches_ahead(
    js: JetStreamContext, stream: str, leak_check: Any
) -> None:
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
    ack = await js.publish(f"{stream}.after", b"")  # after everything that is on its way
    assert ack.seq % 3 == 1
    await leak_check.assert_clean()


async def test_a_failed_batch_names_the_commits_in_flight(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    batches = [batch(stream, n) for n in range(10)]
    batches[4] = batch(stream, 4, 1, expected_last_seq=77)
    acks: list[jsx.BatchAck] = []

    async def collect() -> None:
        async for ack in jsx.publish_atomic_many(js, batches, in_flight=3):
            acks.append(ack)  # noqa: PERF401 - the acks before the error are checked

    with pytest.raises(errors.WrongLastSequenceError) as caught:
        await collect()
    assert [ack.seq for ack in acks] == [3, 6, 9, 12]
    (note,) = caught.value.__notes__
    assert await count(js, stream) == 12 + 3 * note.count("stored")
    with pytest.raises(errors.WrongLastSequenceError):
        await jsx.publish_atomic_many(js, batches, in_flight=3)
    await leak_check.assert_clean()


async def test_unanswered_commits_are_named_in_the_error(
    own_server: NatsServer,
    own_nc: Client,
    own_js: JetStreamContext,
    own_stream: Any,
    has_only: Callable[[Client, set[int]], Awaitable[bool]],
) -> None:
    name = await own_stream()
    await jsx.publish_atomic(own_js, batch(name, 0))
    held = set(own_nc._subs)
    own_server.pause()
    async with asyncio.timeout(20):
        with pytest.raises(errors.BatchOutcomeUnknownError, match="no answer") as caught:
            await jsx.publish_atomic_many(own_js, [batch(name, n) for n in range(9)], in_flight=4, timeout=0.3)
    (note,) = caught.value.__notes__
    assert note.count("BatchOutcomeUnknownError") == 3
    assert await has_only(own_nc, held)
    own_server.resume()
    assert (await own_js.publish(f"{name}.after")).seq == 3 * 5 + 1


async def test_the_batch_of_a_failing_source_is_not_stored(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    def messages() -> Iterator[jsx.BatchMessage]:
        yield from batch(stream, 3, 300)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await jsx.publish_atomic_many(js, [batch(stream, 1), batch(stream, 2), messages(), batch(stream, 4)])
    assert await count(js, stream) == 6
    with pytest.raises(errors.EmptyBatchError):
        await jsx.publish_atomic_many(js, [[]])
    await leak_check.assert_clean()


async def test_cancellation_stores_only_whole_batches(js: JetStreamContext, stream: str, leak_check: Any) -> None:
    await jsx.publish_atomic_many(js, [batch(stream, 0)])
    before = 3
    for ticks in range(0, 60, 3):
        batches = [batch(stream, n) for n in range(6)]
        task = asyncio.ensure_future(jsx.publish_atomic_many(js, batches, in_flight=2).to_list())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        before = (await js.publish(f"{stream}.after", b"")).seq - before - 1  # after everything that is on its way
        assert before % 3 == 0
        before = await count(js, stream)
        await leak_check.assert_clean()


@each("in_flight", [0, -1, True, 1.5])
def test_in_flight_is_checked(js: JetStreamContext, in_flight: Any) -> None:
    with pytest.raises(ValueError, match="in_flight"):
        jsx.publish_atomic_many(js, [], in_flight=in_flight)


@each("timeout, error", [(0, ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_the_other_arguments_are_checked_at_the_call(js: Any, nc: Any, timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout"):
        jsx.publish_atomic_many(js, [], timeout=timeout)
    with pytest.raises(TypeError, match="JetStream context"):
        jsx.publish_atomic_many(nc, [])
