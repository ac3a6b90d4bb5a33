"""Every wait ends: within its timeout, and when its connection is closed, drained or lost for good."""

import asyncio
import itertools
import os
import re
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
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

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import errors
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.testing import NatsServer

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


def test_every_call_meets_every_kind_of_end() -> None:
    for group, faults in FAULTS.items():
        cells = sample(group)
        assert {cell.call for cell in cells} == set(CALLS)
        met = {(cell.fault, cell.size, cell.pending, cell.fallback) for cell in cells}
        assert met == set(itertools.product(faults, SIZES, (False, True), (False, True)))


async def _leave_a_timer(t: Try) -> None:
    asyncio.get_running_loop().call_later(1000, print)


async def _leave_a_subscription(t: Try) -> None:
    await t.nc.subscribe("left")


async def _raise(t: Try) -> None:
    raise asyncio.InvalidStateError


async def _cannot_be_prepared(t: Try) -> Callable[[], Awaitable[object]]:
    raise nats.errors.ConnectionClosedError


async def test_the_matrix_finds_what_is_wrong(filled_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[asyncio.Task[None]] = []

    async def leave_a_task(t: Try) -> None:
        left.append(asyncio.create_task(asyncio.sleep(1000)))

    wrong: dict[str, tuple[Callable[[Try], Awaitable[object]], str]] = {
        "waits": (lambda t: asyncio.Event().wait(), "still waits: .*Event.wait"),
        "takes too long": (lambda t: asyncio.sleep(t.timeout + WAIT_SLACK + 60), "still waits: .*sleep"),
        "LogReader that takes too long": (
            lambda t: asyncio.sleep(t.timeout + t.patience + WAIT_SLACK + 60),
            "still waits: .*sleep",
        ),
        "leaves a task": (leave_a_task, "tasks are left: .*sleep"),
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
    for task in left:
        await abandon(task)
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


async def test_a_commit_on_a_draining_connection_is_refused_before_it_is_sent(
    server: NatsServer, js: JetStreamContext, connect: Connect, make_stream: MakeStream, within: Within
) -> None:
    stream = await make_stream()
    nc = await connect(server.url)
    batch = jsx.AtomicBatch(nc.jetstream(timeout=30), timeout=5)
    await batch.add(f"{stream}.a", b"1")
    busy, handled = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        busy.set()
        await handled.wait()

    await nc.subscribe(f"slow.{stream}", cb=slow)
    await nc.publish(f"slow.{stream}", b"")
    await busy.wait()
    draining = asyncio.ensure_future(nc.drain())
    while not nc.is_draining:
        await asyncio.sleep(0)
    try:
        outcome = await within(5 + SLACK, batch.commit_eob())
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
            await batch.add("s.a", bytes(100_000))

    adding = asyncio.ensure_future(add())
    try:
        sent = -1
        while sent < (sent := batch.batch_seq if kind == "fast" else batch.size):
            await asyncio.sleep(0.3)
        assert not adding.done()
        await batch.discard()
        assert isinstance(await within(SLACK, adding), errors.BatchClosedError)
    finally:
        own_server.kill()


@pytest.mark.parametrize("while_it", ["reconnects", "waits for a server that reads nothing"])
async def test_a_close_ends_a_wait(own_server: NatsServer, connect: Connect, within: Within, while_it: str) -> None:
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
        waits: dict[str, Awaitable[Any]] = {
            "flush": publisher.flush(),
            "wait_closed": publisher.wait_closed(),
            "watch_abandoned": anext(watch),
            "scan": jsx.DirectGet(js, "S").scan().to_list(),
        }
        waiting = {name: asyncio.ensure_future(wait) for name, wait in waits.items()}
        await asyncio.sleep(0.1)
        assert [name for name, task in waiting.items() if task.done()] == []
        closing = asyncio.ensure_future(nc.close())
        try:
            for name, task in waiting.items():
                assert isinstance(await within(SLACK, task), (*DOCUMENTED, jsx.EndReason)), name
        finally:
            own_server.kill()
            await abandon(closing)
            await publisher.discard()


async def test_what_waits_ends_when_a_drain_ends(
    own_server: NatsServer, connect: Connect, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc = await connect(own_server.url)
    js = nc.jetstream(timeout=60)
    monkeypatch.setattr(StreamState, "check_acks", lambda _: None)
    await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True, no_ack=True)
    batches: list[Any] = [jsx.AtomicBatch(js), jsx.FastPublisher(js)]
    adding = [asyncio.ensure_future(batch.add("s.a", b"1")) for batch in batches]  # never answered
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in adding)
    await nc.drain()
    for batch, task in zip(batches, adding, strict=True):
        assert isinstance(await within(SLACK, task), DOCUMENTED), batch
        await batch.discard()
