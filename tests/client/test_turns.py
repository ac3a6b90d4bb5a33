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
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.connection import connection_of

MakeStream = Callable[..., Awaitable[str]]
KINDS = [jsx.AtomicBatch, jsx.FastPublisher]


@pytest.fixture
def room(nc: Client, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set while the connection has room in its write buffer."""
    room = asyncio.Event()
    room.set()

    async def flushed(_: BaseConnection) -> None:
        await room.wait()

    kind = type(connection_of(nc))
    monkeypatch.setattr(kind, "has_room", property(lambda _: room.is_set()))
    monkeypatch.setattr(kind, "_flushed", flushed)
    return room


async def lookups(js: JetStreamContext, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Awaitable[None]]) -> None:
    """Await `answer` before every lookup of a subject's stream on the connection."""
    connection = connection_of(js._nc)
    request = connection.request

    async def replaced(subject: str, payload: bytes, timeout: float, **options: Any) -> Any:
        if subject.endswith("STREAM.NAMES"):
            try:
                async with asyncio.timeout(timeout):
                    await answer()
            except TimeoutError:
                raise errors.RequestTimeoutError(subject) from None
        return await request(subject, payload, timeout, **options)

    monkeypatch.setattr(connection, "request", replaced)


async def subjects(js: JetStreamContext, stream: str) -> list[str]:
    return [message.subject for message in await jsx.DirectGet(js, stream).scan(confirm=True).to_list()]


def with_timeout(kind: Any, js: JetStreamContext, timeout: float) -> Any:
    return kind(js, **{"timeout" if kind is jsx.AtomicBatch else "ack_timeout": timeout})


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
async def test_a_later_call_does_not_overtake_one_that_asks_for_its_stream(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream, answer = await make_stream(), asyncio.Event()
    async with kind(js) as batch:
        await batch.add(f"{stream}.a")
        config = (await js.stream_info(stream)).config
        await js.update_stream(config, subjects=[f"{stream}.>", f"{stream}-new.>"])
        await lookups(js, monkeypatch, answer.wait)
        adding = [asyncio.ensure_future(batch.add(name)) for name in (f"{stream}-new.b", f"{stream}.c")]
        await settle()
        assert not any(call.done() for call in adding)
        answer.set()
        await asyncio.gather(*adding)
    assert await subjects(js, stream) == [f"{stream}.a", f"{stream}-new.b", f"{stream}.c"]


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
            batch.add(f"{stream}.b"), batch.add(f"{stream}.c", ack=True), batch.commit(f"{stream}.d"), batch.commit_eob(),
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
        with pytest.raises(errors.BadSubjectError, match=f"'{one}.a' is stored by stream '{one}'"):
            await batch.add(f"{one}.a")
    assert (await subjects(js, one), await subjects(js, two)) == ([], [f"{two}.a"])


@each("kind", KINDS)
async def test_many_calls_that_ask_in_vain_end_within_their_timeout(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream = await make_stream()
    async with with_timeout(kind, js, 6.0) as batch:
        await batch.add(f"{stream}.a")
        with monkeypatch.context() as patch:
            await lookups(js, patch, asyncio.Event().wait)
            async with asyncio.timeout(30):
                ended = await asyncio.gather(*(batch.add("other.a") for _ in range(30)), return_exceptions=True)
        assert {type(error) for error in ended} == {errors.RequestTimeoutError}
        assert "which stream stores 'other.a' is unknown" in str(ended[0])
    assert batch.ack.batch_size == 1


@each("kind", KINDS)
async def test_an_ended_batch_ends_the_calls_behind_one_that_asks(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream = await make_stream()
    batch = kind(js)
    await batch.add(f"{stream}.a")
    with monkeypatch.context() as patch:
        await lookups(js, patch, asyncio.Event().wait)
        patch.setattr("jetstream_ext.client.api._LOOKUP_TIMEOUT", 15.0)
        calls = [batch.add("other.a"), *(batch.add(f"{stream}.a") for _ in range(20)), batch.commit_eob()]
        if kind is jsx.FastPublisher:
            calls.append(batch.add_many([(f"{stream}.a", b"")]))
        waiting = [asyncio.ensure_future(call) for call in calls]
        await settle()
        await batch.discard()
        waiting += [asyncio.ensure_future(call) for call in (batch.add(f"{stream}.a"), batch.commit_eob())]
        async with asyncio.timeout(10):  # less than a lookup
            ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in ended} == {errors.BatchClosedError}


async def test_the_opening_counts_for_the_calls_that_wait_for_it(
    own_server: Any, own_js: JetStreamContext, own_stream: MakeStream
) -> None:
    stream, clock = await own_stream(allow_atomic=True), asyncio.get_running_loop().time
    batch = jsx.AtomicBatch(own_js, ack_first=False, timeout=6)
    await asyncio.to_thread(own_server.pause)
    try:
        began = clock()
        first, second = await asyncio.gather(
            batch.add(f"{stream}.a"), batch.add(f"{stream}.b", ack=True), return_exceptions=True
        )
        assert clock() - began < 10.0
        assert first is None
        assert isinstance(second, errors.BatchAbandonedError)
    finally:
        await asyncio.to_thread(own_server.resume)


@each("kind", KINDS)
async def test_first_messages_of_two_streams_are_not_one_batch(
    js: JetStreamContext, make_stream: MakeStream, kind: Any
) -> None:
    one, two = await make_stream(), await make_stream()
    async with kind(js) as batch:
        first, second = await asyncio.gather(batch.add(f"{one}.a"), batch.add(f"{two}.a"), return_exceptions=True)
        assert not isinstance(first, Exception)
        assert isinstance(second, errors.BadSubjectError)
        await batch.add(f"{one}.b")
    assert (await subjects(js, one), await subjects(js, two)) == ([f"{one}.a", f"{one}.b"], [])


async def test_each_call_has_its_own_timeout(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, timeout = await make_stream(), 30.0
    left: dict[int, float] = {}
    reply = AtomicSession._reply

    async def noted(self: AtomicSession, seq: int, waiter: Any, deadline: float) -> None:
        left[seq] = deadline - asyncio.get_running_loop().time()
        await reply(self, seq, waiter, deadline)

    monkeypatch.setattr(AtomicSession, "_reply", noted)
    async with jsx.AtomicBatch(js, timeout=timeout) as batch:
        await batch.add(f"{stream}.1")
        room.clear()
        waiting = asyncio.ensure_future(batch.add(f"{stream}.2", ack=True))
        await asyncio.sleep(4)
        room.set()
        later = asyncio.ensure_future(batch.add(f"{stream}.3", ack=True))
        await asyncio.gather(waiting, later)
    assert left[2] <= timeout - 3.9, "its wait for room and the reply share the timeout"
    assert left[3] > timeout - 3.9, "it has not waited for room"
