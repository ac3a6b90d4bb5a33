"""`FastPublisher.add_many` while it waits for room: the next messages are sent where the acknowledgement arrives."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors

MakeStream = Callable[..., Awaitable[str]]
VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]


async def test_the_source_runs_as_part_of_the_calling_task(js: JetStreamContext, stream: str) -> None:
    places = set[tuple[Any, str]]()

    def source() -> Iterator[Any]:
        token = VARIABLE.set("inside")
        for i in range(1000):
            places.add((asyncio.current_task(), VARIABLE.get()))
            yield f"{stream}.a", b"%d" % i
        VARIABLE.reset(token)  # an error in any other context
        places.add((asyncio.current_task(), VARIABLE.get()))

    VARIABLE.set("of the caller")
    async with jsx.FastPublisher(js, flow=10) as pub:
        await pub.add_many(source())
        task = asyncio.current_task()
        assert places == {(task, "inside"), (task, "of the caller")}
        assert VARIABLE.get() == "of the caller"
    assert await payloads(js, stream) == [b"%d" % i for i in range(1000)]


@each("failure", [ZeroDivisionError, asyncio.CancelledError, OSError, BaseException, TimeoutError])
async def test_the_source_s_error_reaches_the_caller_and_harms_nothing_else(
    js: JetStreamContext, nc: Client, make_stream: MakeStream, failure: type[BaseException]
) -> None:
    stream = await make_stream()

    def source() -> Iterator[Any]:
        for i in range(500):
            yield f"{stream}.a", b"%d" % i
        raise failure

    async with jsx.FastPublisher(js, flow=7) as pub:
        with pytest.raises(failure):
            await pub.add_many(source())
        assert pub.batch_seq == 500
        assert (await pub.add_many([(f"{stream}.a", b"500")])).batch_seq == 501
    assert await payloads(js, stream) == [b"%d" % i for i in range(501)]
    assert nc.is_connected


async def test_a_refused_message_is_the_last_one_taken(js: JetStreamContext, stream: str) -> None:
    source = iter([(f"{stream}.a" if i % 400 else "a b", b"%d" % i) for i in range(1, 1000)])
    async with jsx.FastPublisher(js, flow=10) as pub:
        for refused in (400, 800):
            with pytest.raises(errors.BadSubjectError):
                await pub.add_many(source)
            assert pub.batch_seq == refused - refused // 400
        await pub.add_many(source)
    assert await payloads(js, stream) == [b"%d" % i for i in range(1, 1000) if i % 400]


@each("inside", [True, False])
async def test_after_a_cancellation_nothing_more_is_taken(
    js: JetStreamContext, make_stream: MakeStream, inside: bool
) -> None:
    stream = await make_stream()
    taken, at_cancel = 0, 0

    def cancel() -> None:
        nonlocal at_cancel
        at_cancel = taken
        adding.cancel()

    def source() -> Iterator[Any]:
        nonlocal taken
        while True:
            taken += 1
            if inside and taken == 1000:
                cancel()
            yield f"{stream}.a", b"x"

    async with jsx.FastPublisher(js, flow=10, on_flow=lambda ack: inside or ack.seq < 990 or cancel()) as pub:
        adding = asyncio.ensure_future(pub.add_many(source()))
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert at_cancel >= 900
        assert taken == pub.batch_seq
        assert taken - at_cancel < 20 if inside else taken == at_cancel  # the block that it was part of
        assert (await pub.add(f"{stream}.a")).batch_seq == taken + 1
    assert len(await payloads(js, stream)) == taken + 1


async def test_the_source_may_end_its_batch(js: JetStreamContext, stream: str) -> None:
    def source() -> Iterator[Any]:
        for i in range(1000):
            if i == 500:
                with pytest.raises(StopIteration):
                    pub.discard().__await__().__next__()  # it never suspends
            yield f"{stream}.a", b"x"

    pub = jsx.FastPublisher(js, flow=10)
    with pytest.raises(errors.BatchClosedError):
        await pub.add_many(source())
    assert pub.end_reason is jsx.EndReason.DISCARDED


async def test_other_callers_get_their_turn(js: JetStreamContext, stream: str) -> None:
    ended = False

    def source() -> Iterator[Any]:
        while not ended:
            yield f"{stream}.a", b"x"

    async with jsx.FastPublisher(js, flow=10) as pub:
        adding = asyncio.ensure_future(pub.add_many(source()))
        for _ in range(20):
            before = pub.batch_seq
            ack = await pub.add(f"{stream}.a")
            assert ack.batch_seq <= before + 40, "two windows"
            await pub.flush()
        ended = True
        await adding
