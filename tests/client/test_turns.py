"""Many calls on one batch: each in its turn, each with its own timeout, and nothing of a call that did not get that far."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.api import LeaderInfo, lookup_leader
from jetstream_ext.client.atomic_session import AtomicSession
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.connection import connection_of

MakeStream = Callable[..., Awaitable[str]]
KINDS = pytest.mark.parametrize("kind", [jsx.AtomicBatch, jsx.FastPublisher])


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


@KINDS
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


@KINDS
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
        assert not any(each.done() for each in adding)
        answer.set()
        await asyncio.gather(*adding)
    assert await subjects(js, stream) == [f"{stream}.a", f"{stream}-new.b", f"{stream}.c"]


@KINDS
async def test_many_calls_that_ask_in_vain_end_within_their_timeout(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream = await make_stream()
    async with with_timeout(kind, js, 6.0) as batch:
        await batch.add(f"{stream}.a")
        await lookups(js, monkeypatch, asyncio.Event().wait)
        async with asyncio.timeout(30):
            ended = await asyncio.gather(*(batch.add("other.a") for _ in range(30)), return_exceptions=True)
        assert {type(each) for each in ended} == {errors.RequestTimeoutError}
        assert "which stream stores 'other.a' is unknown" in str(ended[0])
    assert batch.ack.batch_size == 1


@KINDS
async def test_calls_that_ask_in_vain_do_not_end_those_between_them(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The others wait for them, because of the order, but not for one after the other."""
    stream = await make_stream()
    async with with_timeout(kind, js, 12.0) as batch:
        await batch.add(f"{stream}.a")
        await lookups(js, monkeypatch, asyncio.Event().wait)
        asking = [batch.add("other.a" if index % 2 else f"{stream}.a") for index in range(30)]
        async with asyncio.timeout(25):
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(each) for each in ended[1::2]} == {errors.RequestTimeoutError}
        assert not any(isinstance(each, Exception) for each in ended[::2])
    assert batch.ack.batch_size == 16


@KINDS
async def test_slow_answers_come_at_the_same_time(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream = await make_stream()
    async with with_timeout(kind, js, 12.0) as batch:
        await batch.add(f"{stream}.a")
        config = (await js.stream_info(stream)).config
        await js.update_stream(config, subjects=[f"{stream}.>", f"{stream}-new.>"])
        await lookups(js, monkeypatch, lambda: asyncio.sleep(0.7))
        names = [f"{stream}-new.{index}" for index in range(20)]
        async with asyncio.timeout(10):
            await asyncio.gather(*(batch.add(name) for name in names))
    assert await subjects(js, stream) == [f"{stream}.a", *names]


@KINDS
async def test_an_ended_batch_ends_the_calls_behind_one_that_asks(
    js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    stream = await make_stream()
    batch = kind(js)
    await batch.add(f"{stream}.a")
    await lookups(js, monkeypatch, asyncio.Event().wait)
    monkeypatch.setattr("jetstream_ext.client.api._LOOKUP_TIMEOUT", 15.0)
    calls = [batch.add("other.a"), *(batch.add(f"{stream}.a") for _ in range(20)), batch.commit_eob()]
    if kind is jsx.FastPublisher:
        calls.append(batch.add_many([(f"{stream}.a", b"")]))
    waiting = [asyncio.ensure_future(call) for call in calls]
    await settle()
    await batch.discard()
    waiting += [asyncio.ensure_future(call) for call in (batch.add(f"{stream}.a"), batch.commit_eob())]
    async with asyncio.timeout(10):  # less than a lookup
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(each) for each in ended} == {errors.BatchClosedError}


@KINDS
@pytest.mark.parametrize("resumed", [False, True])
async def test_first_messages_give_up_together(
    js: JetStreamContext,
    make_stream: MakeStream,
    room: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    resumed: bool,
) -> None:
    """None is sent when its time is over, and they do not ask for the stream one after the other."""
    stream, timeout, asked = await make_stream(), 5.0, 0
    module = "atomic_session" if kind is jsx.AtomicBatch else "fast"

    async def counted(*arguments: Any) -> LeaderInfo:
        nonlocal asked
        asked += 1
        return await lookup_leader(*arguments)

    monkeypatch.setattr(f"jetstream_ext.client.{module}.lookup_leader", counted)
    batch = with_timeout(kind, js, timeout)
    room.clear()
    adding = asyncio.gather(*(batch.add(f"{stream}.a") for _ in range(300)), return_exceptions=True)
    await settle()
    await asyncio.sleep(timeout * 0.8)  # less than a quarter is left for a reply
    if resumed:
        room.set()
    async with asyncio.timeout(30):
        ended = await adding
    assert {type(each) for each in ended} == {errors.RequestTimeoutError}
    assert "not sent" in str(ended[-1]) or "not added" in str(ended[-1])
    assert asked < 100, "of 300 calls, whose time is not over at the same moment"
    room.set()
    await batch.discard()


async def test_an_answer_to_one_call_does_not_end_the_check_of_another(
    js: JetStreamContext, make_stream: MakeStream
) -> None:
    one, two = await make_stream(), await make_stream()
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{one}.a")
        unknown, other = await asyncio.gather(
            batch.add("unknown.a", ack=False), batch.add(f"{two}.a"), return_exceptions=True
        )
        assert unknown is None, "perhaps accounts map subjects"
        assert isinstance(other, errors.BadSubjectError)
        await batch.discard()


@KINDS
async def test_a_commit_follows_the_calls_before_it(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event, kind: Any
) -> None:
    stream = await make_stream()
    batch = kind(js)
    room.clear()
    calls = [asyncio.ensure_future(each) for each in (batch.add(f"{stream}.a"), batch.add(f"{stream}.b"))]
    calls.append(asyncio.ensure_future(batch.commit_eob()))
    await settle()
    assert not any(each.done() for each in calls)
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
        for each in await late:
            assert isinstance(each, errors.RequestTimeoutError), each
        assert (batch.state, batch.size) == ("open", 1)
        room.set()
        await batch.add(f"{stream}.e")
    assert await subjects(js, stream) == [f"{stream}.a", f"{stream}.e"]


async def test_a_commit_whose_turn_comes_late_waits_for_room_too(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event
) -> None:
    stream = await make_stream()
    async with jsx.AtomicBatch(js, timeout=2) as batch:
        await batch.add(f"{stream}.a")
        room.clear()
        late = asyncio.ensure_future(batch.add(f"{stream}.b"))
        await asyncio.sleep(0.5)
        with pytest.raises(errors.RequestTimeoutError, match=r"the commit was not sent within 1\.[5-9]\d* s: no room"):
            await batch.commit_eob()
        with pytest.raises(errors.RequestTimeoutError):
            await late
        assert (batch.state, batch.size) == ("open", 1)
        room.set()
        await batch.commit_eob()
    assert await subjects(js, stream) == [f"{stream}.a"]


async def test_an_empty_batch_does_not_wait_for_room(js: JetStreamContext, room: asyncio.Event) -> None:
    room.clear()
    batch = jsx.AtomicBatch(js, timeout=30)
    for call in (batch.commit_eob(), jsx.publish_atomic(js, [], timeout=30)):
        async with asyncio.timeout(5):
            with pytest.raises(errors.EmptyBatchError):
                await call
    await batch.discard()


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
        assert clock() - began < 8.0
        assert first is None
        assert isinstance(second, errors.BatchAbandonedError)
    finally:
        await asyncio.to_thread(own_server.resume)


@KINDS
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


@KINDS
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


@KINDS
@pytest.mark.parametrize("ended", ["commit_eob", "discard"])
@pytest.mark.parametrize("end", ["close", "drain", "kill"])
async def test_an_ended_batch_takes_every_call_without_a_connection(
    own_server: Any, own_js: JetStreamContext, own_nc: Client, own_stream: MakeStream, kind: Any, ended: str, end: str
) -> None:
    stream = await own_stream()
    batch = kind(own_js)
    await batch.add(f"{stream}.a")
    await getattr(batch, ended)()
    if end == "kill":
        await asyncio.to_thread(own_server.kill)
        while own_nc.is_connected:
            await asyncio.sleep(0.01)
    else:
        await getattr(own_nc, end)()

    async def source() -> AsyncIterator[tuple[str, bytes]]:
        yield f"{stream}.a", b""

    calls = [batch.add(f"{stream}.a"), batch.add_many([(f"{stream}.a", b"")]), batch.add_many(source())]
    calls += [batch.commit(f"{stream}.a"), batch.commit_eob()]
    if kind is jsx.FastPublisher:
        calls += [batch.add(f"{stream}.a", msg_id="1"), batch.ping()]
        flushed = asyncio.ensure_future(batch.flush())
        await asyncio.wait({flushed}, timeout=10)
        assert flushed.exception() is None or isinstance(flushed.exception(), errors.BatchClosedError)
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    expected = errors.BatchClosedError, nats.errors.ConnectionClosedError, nats.errors.ConnectionReconnectingError
    assert all(isinstance(each, expected) for each in outcomes), outcomes


async def test_a_batch_whose_first_call_was_cancelled_is_resolved(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event
) -> None:
    one, two = await make_stream(), await make_stream()
    batch = jsx.AtomicBatch(js)
    room.clear()
    first = asyncio.ensure_future(batch.add(f"{one}.a"))
    await settle()
    first.cancel()
    await asyncio.wait({first})
    room.set()
    await batch.add(f"{two}.a")
    committing = asyncio.ensure_future(batch.commit_eob())
    await settle()
    committing.cancel()
    await asyncio.wait({committing})
    assert await batch.resolve() == "stored"
    assert await subjects(js, two) == [f"{two}.a"]


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
        await asyncio.sleep(1)
        room.set()
        later = asyncio.ensure_future(batch.add(f"{stream}.3", ack=True))
        await asyncio.gather(waiting, later)
    assert left[2] <= timeout - 0.9, "its wait for room and the reply share the timeout"
    assert left[3] > timeout - 0.9, "it has not waited for room"


async def test_calls_that_wait_for_room_end_with_their_batch(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event
) -> None:
    stream = await make_stream()
    batch = jsx.AtomicBatch(js)
    await batch.add(f"{stream}.a")
    room.clear()
    adding = [asyncio.ensure_future(batch.add(f"{stream}.a")) for _ in range(400)]
    await settle()
    await batch.discard()
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*adding, return_exceptions=True)
    assert {type(each) for each in ended} == {errors.BatchClosedError}


async def test_a_first_message_without_room_is_not_sent(
    js: JetStreamContext, make_stream: MakeStream, room: asyncio.Event
) -> None:
    stream = await make_stream()
    batch = jsx.AtomicBatch(js, timeout=0.2)
    room.clear()
    async with asyncio.timeout(5):
        ended = await asyncio.gather(*(batch.add(f"{stream}.a") for _ in range(50)), return_exceptions=True)
    assert {type(each) for each in ended} == {errors.RequestTimeoutError}
    assert "room in the write buffer" in str(ended[0])
    assert (batch.state, batch.size) == ("open", 0)
    await batch.discard()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has eager tasks")
@KINDS
async def test_a_call_that_the_source_makes_has_its_turn_after_the_block(
    js: JetStreamContext, make_stream: MakeStream, kind: Any
) -> None:
    stream = await make_stream()
    calls: list[asyncio.Future[Any]] = []

    def source() -> Iterator[Any]:
        for i in range(300):
            if i % 7 == 3:
                calls.append(asyncio.ensure_future(batch.add(f"{stream}.call", b"%d" % i)))
            yield f"{stream}.source", b"%d" % i

    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    try:
        async with kind(js, **({"flow": 10} if kind is jsx.FastPublisher else {})) as batch:
            await batch.add_many(source())
            await asyncio.gather(*calls)
    finally:
        loop.set_task_factory(None)
    stored = await jsx.DirectGet(js, stream).scan().to_list()
    assert [int(m.data) for m in stored if m.subject.endswith("source")] == list(range(300))
    assert [int(m.data) for m in stored if m.subject.endswith("call")] == list(range(3, 300, 7))
