"""A client that was never connected, or that another event loop connected: every call says so, at once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from wait_matrix import CALLS, Try, without_internals

import jetstream_ext as jsx
from jetstream_ext import log
from jetstream_ext.client.base_connection import NotConnectedError
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.testing import NatsServer

# What ends or enters something that needs no server.
LOCAL = {
    "AtomicBatch.__aenter__",
    "FastPublisher.__aenter__",
    "FastPublisher.__aenter__ (gaps ok)",
    "MessageBatch.__aenter__",
    "RecordBatches.__aenter__",
    "RecordBatchReader.__aenter__",
    "Transaction.__aenter__",
    "Transaction.discard",
}
OTHER_LOOP = "the nats-py client was connected in another event loop; connect and use it in one loop"
NOT_CONNECTED = "the client is not connected; await nats.connect(...) first"

_T = TypeVar("_T")


pytestmark = pytest.mark.filterwarnings("ignore:jetstream_ext does not know the internals:RuntimeWarning")


class Unusable(Try):
    async def bucket(self) -> Any:
        return open_bucket(self.js, f"B{self.size}")  # nats-py's own lookup would wait


class OtherLoop:
    """An event loop in a thread of its own, which runs only during `run` or always."""

    def __init__(self, *, runs: bool) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever) if runs else None
        if self._thread is not None:
            self._thread.start()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._thread is None:
            return await asyncio.to_thread(self._loop.run_until_complete, work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def left_connected(url: str) -> Client:
    """Leave a client as `asyncio.run` does, but with its socket closed."""
    nc = await nats.connect(url)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    nc._transport._io_writer.transport.abort()  # type: ignore[union-attr]
    await asyncio.sleep(0)
    assert nc.is_connected
    return nc


@pytest.fixture(params=["closed", "not running", "in another thread"])
async def client_of_another_loop(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[Client]:
    if request.param == "closed":
        yield await asyncio.to_thread(asyncio.run, left_connected(server.url))
        return
    loop = OtherLoop(runs=request.param == "in another thread")
    nc = await loop.run(nats.connect(server.url))
    yield nc
    await loop.run(nc.close())
    loop.close()


@pytest.fixture(params=[False, True], ids=["internals", "fallback"])
def prepared(request: pytest.FixtureRequest) -> Callable[[Client], Client]:
    """Prepare a client for this package as with known or unknown internals of nats-py."""

    def prepare(nc: Client) -> Client:
        if request.param:
            without_internals(nc)
        return nc

    return prepare


async def wrong_calls(nc: Client, kind: type[Exception], text: str) -> list[str]:
    """Return the public calls that do not raise this error at once, or leave a task."""
    wrong, loop_tasks = [], asyncio.all_tasks()
    for number, (name, call) in enumerate(CALLS.items()):
        if name in LOCAL:
            continue
        t = Unusable(nc, number, 0, timeout=300.0)
        error: BaseException | None = None
        try:
            async with asyncio.timeout(30):  # for a busy machine
                await (await call(t))()
        except Exception as raised:
            error = raised
        if type(error) is not kind or str(error) != text:
            wrong.append(f"{name}: {error!r:.300}")
        for undo in t.undo:
            await undo()
        for _ in range(5):
            await asyncio.sleep(0)
        if left := asyncio.all_tasks() - loop_tasks:
            wrong.append(f"{name} leaves {left}")
    return wrong


async def test_every_call_says_that_the_client_was_never_connected(prepared: Callable[[Client], Client]) -> None:
    assert await wrong_calls(prepared(Client()), NotConnectedError, NOT_CONNECTED) == []


async def test_every_call_says_that_another_loop_connected_the_client(
    client_of_another_loop: Client, prepared: Callable[[Client], Client]
) -> None:
    assert await wrong_calls(prepared(client_of_another_loop), RuntimeError, OTHER_LOOP) == []


async def test_an_error_of_a_closed_connection_handles_a_client_that_was_never_connected() -> None:
    with pytest.raises(nats.errors.ConnectionClosedError):
        await jsx.features(Client().jetstream())


async def test_a_client_that_another_loop_has_closed_is_closed(server: NatsServer) -> None:
    async def closed() -> Client:
        nc = await nats.connect(server.url)
        await nc.close()
        return nc

    nc = await asyncio.to_thread(lambda: asyncio.run(closed()))
    with pytest.raises(nats.errors.ConnectionClosedError, match=r"^nats: connection closed$"):
        await jsx.features(nc.jetstream())


def test_what_is_made_outside_of_any_loop_works_in_the_loop_of_its_client(
    server: NatsServer, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    with asyncio.Runner() as runner:
        nc = runner.run(nats.connect(server.url))
        js = nc.jetstream()
        config = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        runner.run(jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], **config))
        direct, fast, reader = jsx.DirectGet(js, name), jsx.FastPublisher(js), log.LogReader(js, name)

        async def use() -> list[bytes]:
            async with fast:
                await fast.add(f"{name}.a", b"1")
            assert (await direct.get(1)).data == b"1"
            return [message.data for message in await reader.read()]

        try:
            assert runner.run(use()) == [b"1"]
        finally:
            runner.run(nc.close())


async def test_what_is_made_before_the_client_is_connected_works(
    server: NatsServer, stream_name: Callable[[], str]
) -> None:
    nc, name = Client(), stream_name()
    js = nc.jetstream()
    batch, direct, fast = jsx.AtomicBatch(js), jsx.DirectGet(js, name), jsx.FastPublisher(js)
    await nc.connect(server.url)
    try:
        config = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        await jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], **config)
        async with batch, fast:
            await batch.add(f"{name}.a", b"1")
            await fast.add(f"{name}.b", b"2")
        assert {(await direct.get(seq)).data for seq in (1, 2)} == {b"1", b"2"}
    finally:
        await nc.close()
