"""Many calls on one batch: each in its turn, each with its own timeout, and nothing of a call that did not get that far."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.connection import connection_of

MakeStream = Callable[..., Awaitable[str]]
KINDS = [jsx.AtomicBatch, jsx.FastPublisher]


@pytest.fixture
def room(nc: Client, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set while the connection has room in its write buffer."""
    room = asyncio.Event()
    room.set()

    kind = type(connection_of(nc))
    monkeypatch.setattr(kind, "has_room", property(lambda _: room.is_set()))
    return room


async def subjects(js: JetStreamContext, stream: str) -> list[str]:
    return [message.subject for message in await jsx.DirectGet(js, stream).scan(confirm=True).to_list()]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@each("kind", KINDS)
async def test_a_later_call_does_not_overtake_those_that_wait_for_room(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, kind: Any
) -> None:
    stream = await make_stream()
    names = [f"{stream}.{index}" for index in range(30)]
    async with kind(js) as batch:
        await batch.add(names[0])
        room.clear()
        adding = [asyncio.ensure_future(batch.add(name)) for name in names[1:20]]
        await settle()
        room.set()
        for name in names[20:]:  # one in each step of the loop in which those before get their turn
            adding.append(asyncio.ensure_future(batch.add(name)))
            await asyncio.sleep(0)
        await asyncio.gather(*adding)
    assert await subjects(js, stream) == names


@each("kind", KINDS)
async def test_a_commit_follows_the_calls_before_it(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, kind: Any
) -> None:
    stream = await make_stream()
    batch = kind(js)
    room.clear()
    calls = [asyncio.ensure_future(call) for call in (batch.add(f"{stream}.a"), batch.add(f"{stream}.b"))]
    calls.append(asyncio.ensure_future(batch.commit_eob()))
    await settle()
    assert not any(call.done() for call in calls)
    room.set()
    await asyncio.gather(*calls)
    assert await subjects(js, stream) == [f"{stream}.a", f"{stream}.b"]


async def test_a_message_that_finds_no_room_leaves_the_batch_open(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event
) -> None:
    stream = await make_stream()
    async with jsx.AtomicBatch(js, timeout=4) as batch:
        await batch.add(f"{stream}.a")
        room.clear()
        late = asyncio.gather(
            batch.add(f"{stream}.b"), batch.add(f"{stream}.c"), batch.commit(f"{stream}.d"), batch.commit_eob(),
            return_exceptions=True,
        )  # fmt: skip
        async with asyncio.timeout(30):
            ended = await late
        for error in ended:
            assert isinstance(error, errors.RequestTimeoutError), error
        assert (batch.state, batch.size) == ("open", 1)
        room.set()
        await batch.add(f"{stream}.e")
    assert await subjects(js, stream) == [f"{stream}.a", f"{stream}.e"]


@each("kind", KINDS)
async def test_a_cancelled_first_call_leaves_the_batch_for_any_stream(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, kind: Any
) -> None:
    one, two = await make_stream(), await make_stream()
    async with kind(js) as batch:
        room.clear()
        first = asyncio.ensure_future(batch.add(f"{one}.a"))
        await settle()
        first.cancel()
        await asyncio.wait({first})
        room.set()
        await batch.add(f"{two}.a")
    assert (await subjects(js, one), await subjects(js, two)) == ([], [f"{two}.a"])


async def test_the_opening_counts_for_the_calls_that_wait_for_it(
    own_server: Any, own_js: JetStreamContext, own_stream: MakeStream
) -> None:
    stream, clock = await own_stream(allow_atomic=True), asyncio.get_running_loop().time
    batch = jsx.AtomicBatch(own_js, timeout=6)
    await asyncio.to_thread(own_server.pause)
    try:
        began = clock()
        first, second = await asyncio.gather(batch.add(f"{stream}.a"), batch.add(f"{stream}.b"), return_exceptions=True)
        assert clock() - began < 10.0
        assert isinstance(first, errors.BatchAbandonedError)
        assert second is None, "only the first message asks for a reply"
    finally:
        await asyncio.to_thread(own_server.resume)


async def test_first_messages_of_two_streams_are_not_one_batch(js: JetStreamContext, make_stream: MakeStream) -> None:
    one, two = await make_stream(), await make_stream()
    async with jsx.AtomicBatch(js) as batch:
        first, second = await asyncio.gather(batch.add(f"{one}.a"), batch.add(f"{two}.a"), return_exceptions=True)
        assert not isinstance(first, Exception)
        assert isinstance(second, errors.BadSubjectError)
        await batch.add(f"{one}.b")
    assert (await subjects(js, one), await subjects(js, two)) == ([f"{one}.a", f"{one}.b"], [])


@each("kind", KINDS)
async def test_an_ended_batch_ends_the_calls_that_wait(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, kind: Any
) -> None:
    stream = await make_stream()
    batch = kind(js)
    await batch.add(f"{stream}.a")
    room.clear()
    calls = [*(batch.add(f"{stream}.a") for _ in range(20)), batch.add_many([(f"{stream}.a", b"")]), batch.commit_eob()]
    waiting = [asyncio.ensure_future(call) for call in calls]
    await settle()
    await batch.discard()
    waiting += [asyncio.ensure_future(call) for call in (batch.add(f"{stream}.a"), batch.commit_eob())]
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {errors.BatchClosedError}
    room.set()
