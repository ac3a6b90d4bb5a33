"""Every wait ends: within its timeout, and when its connection is closed, drained or lost for good."""

import asyncio
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
import jetstream_ext.log as log
from jetstream_ext import errors
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from wait_matrix import (
    CALLS,
    FAULTS,
    SIZES,
    Cell,
    Try,
    fill,
    freeze_everywhere,
    matrix,
    plain,
    public_calls,
    run_cells,
    sample,
)
from wait_matrix import SLACK as WAIT_SLACK
from waiting import abandon

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
TIMEOUT = 0.2
SLACK = 9.0  # for a busy machine; less than the ten seconds after which nats-py's own flush times out
HANGS = 1.0  # a call that has not ended by then counts as hanging
DOCUMENTED = (errors.JetStreamExtError, nats.errors.Error)


Connect = Callable[..., Awaitable[Client]]
Within = Callable[[float, Awaitable[Any]], Awaitable[Any]]
MakeStream = Callable[..., Awaitable[str]]
Clog = Callable[[Client, NatsServer], Awaitable[None]]


FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
# More than the matrix's slack, so that a call which waits once more shows; in `full`, so does half of another wait.
CELL_TIMEOUT = 3.0 if FULL else 1.5


def failures(cells: list[Cell]) -> list[str]:
    """Return what is wrong in each cell."""
    return [f"{cell}: {cell.wrong}" for cell in cells if cell.wrong]


@pytest.fixture
async def filled_server(own_server: NatsServer) -> NatsServer:
    await fill(own_server)
    return own_server


def test_every_public_call_is_in_the_matrix() -> None:
    found = public_calls()
    assert {name.partition(" ")[0] for name in CALLS} == found
    assert found > {"publish_atomic", "publish_atomic_many", "DirectGet.scan", "MessageBatch.__anext__", "transaction"}


def test_a_new_public_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def function() -> None: ...

    async def source() -> AsyncIterator[int]:
        yield 1

    def awaitable() -> Awaitable[int]: ...  # type: ignore[empty-body]

    class Batch:
        def __aiter__(self) -> AsyncIterator[int]: ...  # type: ignore[empty-body]
        async def __anext__(self) -> int: ...  # type: ignore[empty-body]
        async def _private(self) -> None: ...
        def plain(self) -> int: ...  # type: ignore[empty-body]

    before = public_calls()
    made: dict[str, object] = {"function": function, "source": source, "awaitable": awaitable, "Batch": Batch}
    for module, (name, thing) in zip(itertools.cycle((jsx, kvx, log)), made.items(), strict=False):
        monkeypatch.setattr(module, name, thing, raising=False)
        monkeypatch.setattr(module, "__all__", [*module.__all__, name])
    monkeypatch.setattr(jsx.AtomicBatch, "method", function, raising=False)
    found = {"function", "source", "awaitable", "Batch.__anext__", "AtomicBatch.method"}
    assert public_calls() - before == found

    class Hidden:
        __module__ = "jetstream_ext.client.hidden"

    def hidden() -> Hidden: ...  # type: ignore[empty-body]

    hidden.__annotations__["return"] = Hidden
    monkeypatch.setattr(jsx.AtomicBatch, "method", hidden)
    with pytest.raises(AssertionError, match=r"AtomicBatch\.method returns .*Hidden"):
        public_calls()


def test_every_call_meets_every_kind_of_end() -> None:
    for group, faults in FAULTS.items():
        cells = sample(group)
        assert {cell.call for cell in cells} == set(CALLS)
        met = {(cell.fault, cell.size, cell.pending, cell.fallback) for cell in cells}
        assert met == set(itertools.product(faults, SIZES, (False, True), (False, True)))


async def _leave_a_task(t: Try) -> None:
    t.left = asyncio.create_task(asyncio.sleep(1000))  # type: ignore[attr-defined]


async def _leave_a_timer(t: Try) -> None:
    asyncio.get_running_loop().call_later(1000, print)


async def _leave_a_subscription(t: Try) -> None:
    await t.nc.subscribe("left")


async def _raise(t: Try) -> None:
    raise asyncio.InvalidStateError


async def _cannot_be_prepared(t: Try) -> Callable[[], Awaitable[object]]:
    raise nats.errors.ConnectionClosedError


async def test_the_matrix_finds_what_is_wrong(filled_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: dict[str, tuple[Callable[[Try], Awaitable[object]], str]] = {
        "waits": (lambda t: asyncio.Event().wait(), "still waits: .*Event.wait"),
        "takes too long": (lambda t: asyncio.sleep(t.timeout + WAIT_SLACK + 2), "still waits: .*sleep"),
        "LogReader that takes too long": (
            lambda t: asyncio.sleep(t.timeout + t.patience + WAIT_SLACK + 2),
            "still waits: .*sleep",
        ),
        "leaves a task": (_leave_a_task, "tasks are left: .*sleep"),
        "leaves a timer": (_leave_a_timer, "timers are left: .*print"),
        "leaves a subscription": (_leave_a_subscription, "subscriptions are left: .*left"),
        "raises": (_raise, "raised InvalidStateError"),
        "is right": (lambda t: asyncio.sleep(0), "$"),
    }
    for name, (call, _) in wrong.items():
        monkeypatch.setitem(CALLS, name, plain(call))
    wrong["cannot be prepared"] = (_raise, "could not be prepared: .*ConnectionClosedError")
    monkeypatch.setitem(CALLS, "cannot be prepared", _cannot_be_prepared)
    cells = [Cell(name, "stop") for name in wrong]
    await run_cells(filled_server, cells, timeout=0.5)
    for cell in cells:
        assert re.search(wrong[cell.call][1], cell.wrong), str(cell)
    assert [cell.call for cell in cells if not cell.wrong] == ["is right"]


@pytest.mark.filterwarnings("ignore:jetstream_ext does not know the internals:RuntimeWarning")
@pytest.mark.parametrize("group", FAULTS)
async def test_every_call_ends_with_its_connection_or_in_time(filled_server: NatsServer, group: str) -> None:
    """A part of the matrix; `nox -s full -- waits` runs every cell."""
    cells = matrix(group) if FULL else sample(group)
    await run_cells(filled_server, cells, timeout=CELL_TIMEOUT)
    assert failures(cells) == []


@pytest.mark.filterwarnings("ignore:jetstream_ext does not know the internals:RuntimeWarning")
@pytest.mark.parametrize("fallback", [False, True] if FULL else [False])
async def test_every_call_ends_if_the_server_stops_between_two_answers(
    filled_server: NatsServer, fallback: bool
) -> None:
    if FULL:
        cells = await freeze_everywhere(filled_server, CALLS, timeout=CELL_TIMEOUT, fallback=fallback)
    else:
        cells = [Cell(call, n % 4) for n, call in enumerate(CALLS)]
        await run_cells(filled_server, cells, timeout=CELL_TIMEOUT)
    assert failures(cells) == []


async def test_a_write_behind_pending_bytes_ends_in_time(
    own_server: NatsServer, connect: Connect, within: Within, clog: Clog, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc = await connect(own_server.url)
    kv = await nc.jetstream(timeout=30).create_key_value(bucket="B", direct=True)
    await kv.put("a", b"1")
    read = Bucket.get_at_leader

    async def read_and_clog(bucket: Bucket, **request: object) -> Any:
        found = await read(bucket, **request)
        await clog(nc, own_server)
        return found

    monkeypatch.setattr(Bucket, "get_at_leader", read_and_clog)
    assert isinstance(await within(1 + SLACK, kvx.touch(kv, "a", jsx.NEVER, timeout=1)), DOCUMENTED)
    own_server.kill()


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_adding_large_messages_ends_when_the_server_stops_reading(
    own_server: NatsServer, connect: Connect, within: Within, kind: str
) -> None:
    js = (await connect(own_server.url)).jetstream(timeout=30)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    options = {"ack": False} if kind == "atomic" else {}
    await batch.add("s.a", b"1")
    if kind == "atomic":
        batch._session._timeout = TIMEOUT
    else:
        batch._batch.ack_timeout = TIMEOUT

    async def add() -> None:
        while True:
            await batch.add("s.a", bytes(1_000_000), **options)

    own_server.pause()
    try:
        assert isinstance(await within(TIMEOUT + SLACK + 0.5, add()), DOCUMENTED)
    finally:
        own_server.kill()
        await batch.discard()


async def test_adding_large_messages_ends_when_the_connection_is_closed(
    own_server: NatsServer, connect: Connect, within: Within
) -> None:
    admin = (await connect(own_server.url)).jetstream()
    await admin.add_stream(name="S", subjects=["s.>"], storage="memory", max_msgs=10, allow_atomic=True)

    async def add(batch: jsx.AtomicBatch) -> None:
        while True:
            await batch.add("s.a", bytes(250_000), ack=False)

    for _ in range(20):  # the result depends on the write that is in progress
        nc = await connect(own_server.url)
        batch = jsx.AtomicBatch(nc.jetstream(timeout=30), ack_every=10_000)
        adding = asyncio.ensure_future(add(batch))
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(nc.close())
        await asyncio.wait([closing], timeout=1)
        await abandon(closing)
        assert isinstance(await within(SLACK, adding), DOCUMENTED)
        await batch.discard()


async def test_watching_for_abandoned_batches_ends_when_the_connection_is_drained(
    server: NatsServer, connect: Connect, make_stream: MakeStream, within: Within
) -> None:
    stream = await make_stream()
    nc = await connect(server.url)
    async with jsx.watch_abandoned(nc.jetstream(), stream) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        await nc.drain()
        assert isinstance(await within(SLACK, waiting), nats.errors.ConnectionClosedError)


async def test_a_watch_that_timed_out_leaves_the_connection_usable(own_server: NatsServer, connect: Connect) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=30)
    await js.add_stream(name="S", subjects=["s.>"])
    own_server.pause()
    try:
        with pytest.raises(errors.RequestTimeoutError):
            await jsx.watch_abandoned(nc.jetstream(timeout=0.2), "S").__aenter__()
    finally:
        own_server.resume()
    answered = asyncio.ensure_future(js.account_info())
    await asyncio.wait([answered, nc._reading_task], return_when=asyncio.FIRST_COMPLETED)
    ended = nc._reading_task.done()
    await abandon(answered)
    assert not ended


async def test_waiting_for_the_end_of_an_unused_publisher_ends_with_the_connection(
    server: NatsServer, connect: Connect, within: Within
) -> None:
    nc = await connect(server.url)
    waiting = asyncio.ensure_future(jsx.FastPublisher(nc.jetstream()).wait_closed())
    await asyncio.sleep(0.01)
    await nc.close()
    await within(HANGS, waiting)


async def test_a_commit_on_a_draining_connection_is_refused_before_it_is_sent(
    server: NatsServer, js: JetStreamContext, connect: Connect, make_stream: MakeStream, within: Within
) -> None:
    stream = await make_stream()
    nc = await connect(server.url)
    batch = jsx.AtomicBatch(nc.jetstream(timeout=30))
    await batch.add(f"{stream}.a", b"1")
    batch._session._timeout = 1.0
    busy, handled = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        busy.set()
        await handled.wait()

    await nc.subscribe(f"slow.{stream}", cb=slow)
    await nc.publish(f"slow.{stream}", b"")
    await busy.wait()
    draining = asyncio.ensure_future(nc.drain())
    await asyncio.sleep(0.05)
    assert nc.is_draining
    try:
        outcome = await within(1 + SLACK, batch.commit_eob())
        stored = (await js.stream_info(stream)).state.messages
    finally:
        handled.set()
        await draining
    assert isinstance(outcome, DOCUMENTED)
    assert (getattr(outcome, "outcome", "not_stored"), stored) == ("not_stored", 0)


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_a_write_that_waits_for_room_ends_with_its_batch(
    own_server: NatsServer, connect: Connect, clog: Clog, within: Within, kind: str
) -> None:
    js = (await connect(own_server.url)).jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    await batch.add("s.a", b"1")
    await clog(js._nc, own_server)

    async def add() -> None:
        while True:  # nats-py may still write some of it
            await batch.add("s.a", bytes(100_000), **({"ack": False} if kind == "atomic" else {}))

    adding = asyncio.ensure_future(add())
    try:
        sent = -1
        while sent < (sent := batch._batch.sent if kind == "fast" else batch.size):
            await asyncio.sleep(0.3)
        assert not adding.done()
        await batch.discard()
        assert isinstance(await within(SLACK, adding), errors.BatchClosedError)
    finally:
        own_server.kill()


@pytest.mark.parametrize("call", ["flush", "wait_closed", "watch_abandoned", "scan"])
@pytest.mark.parametrize("while_it", ["reconnects", "waits for a server that reads nothing"])
async def test_a_close_ends_a_wait(
    own_server: NatsServer, connect: Connect, within: Within, call: str, while_it: str
) -> None:
    nc = await connect(own_server.url, reconnect_time_wait=30)
    js = nc.jetstream(timeout=60)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True, allow_direct=True)
    publisher = jsx.FastPublisher(js, gap=jsx.GapMode.OK)
    await publisher.add("s.a", b"1")
    async with jsx.watch_abandoned(js, "S") as watch:
        if while_it == "reconnects":
            own_server.kill()
            while not nc.is_reconnecting:
                await asyncio.sleep(0.01)
        else:
            own_server.pause()
        waits: dict[str, Callable[[], Awaitable[Any]]] = {
            "flush": publisher.flush,
            "wait_closed": publisher.wait_closed,
            "watch_abandoned": lambda: anext(watch),
            "scan": jsx.DirectGet(js, "S").scan().to_list,
        }
        waiting = asyncio.ensure_future(waits[call]())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        closing = asyncio.ensure_future(nc.close())
        try:
            assert isinstance(await within(SLACK, waiting), (*DOCUMENTED, jsx.EndReason))
        finally:
            own_server.kill()
            await abandon(closing)
            await publisher.discard()


@pytest.mark.parametrize("kind", ["atomic", "fast"])
async def test_what_waits_ends_when_a_drain_ends(
    own_server: NatsServer, connect: Connect, within: Within, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=60)
    monkeypatch.setattr(StreamState, "check_acks", lambda _: None)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True, no_ack=True)
    batch: Any = jsx.AtomicBatch(js) if kind == "atomic" else jsx.FastPublisher(js)
    adding = asyncio.ensure_future(batch.add("s.a", b"1"))  # never answered
    await asyncio.sleep(0.2)
    assert not adding.done()
    await nc.drain()
    assert isinstance(await within(SLACK, adding), DOCUMENTED)
    await batch.discard()
