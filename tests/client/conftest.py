"""What the shell's tests share: streams, and the proof that nothing is left behind."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.client.atomic_wire import AtomicWire
from jetstream_ext.protocol.atomic import AtomicBatchMachine
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """Create a stream with everything turned on (or as given); its subjects are ``<name>.>``."""

    async def make(**config: Any) -> str:
        name = stream_name()
        config = {"allow_direct": True, "allow_atomic": True, "allow_batched": True, "allow_msg_ttl": True, **config}
        await js.add_stream(name=name, subjects=[f"{name}.>"], **config)
        return name

    return make


@pytest.fixture
def version(server: NatsServer) -> tuple[int, ...]:
    """The server's version."""
    return tuple(map(int, server.version.split(".")))


@pytest.fixture
def batches(version: tuple[int, ...]) -> None:
    """For tests of batched direct gets; what older servers do instead is tested in test_direct_versions.py."""
    if version < (2, 11):
        pytest.skip("this server has no batches; see TestBefore211")


@pytest.fixture
def make(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """As `make_stream`, for any server and with a name of the test's own."""

    async def make(name: str | None = None, **config: Any) -> str:
        name = name or stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], **{"allow_direct": True, **config})
        return name

    return make


class Left:
    """What a connection and the loop hold beyond what they held at the beginning."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.before = self._held()

    def _held(self) -> tuple[set[int], set[str], set[str]]:
        loop: Any = asyncio.get_running_loop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        tasks = {task.get_coro().__qualname__ for task in others if not task.done()}  # type: ignore[union-attr]
        timers = {repr(handle._callback) for handle in loop._scheduled if not handle.cancelled()}
        return set(self.nc._subs), tasks, {timer for timer in timers if "jetstream_ext" in timer or "Timeout" in timer}

    def behind(self) -> tuple[set[int], set[str], set[str]]:
        """Subscriptions, tasks and timers that were not there before."""
        return tuple(now - then for now, then in zip(self._held(), self.before, strict=True))  # type: ignore[return-value]

    async def settled(self) -> None:
        """Fail unless nothing is left: subscriptions and timers at once, tasks within a second."""
        subscriptions, _, timers = self.behind()
        assert (subscriptions, timers) == (set(), set())
        async with asyncio.timeout(1):
            while self.behind()[1]:
                await asyncio.sleep(0.001)


@pytest.fixture
async def left(nc: Client, js: JetStreamContext) -> Left:
    """Proof that nothing is left behind on `nc`."""
    await js.account_info()  # nats-py's own response subscription is there from the first request on
    return Left(nc)


@pytest.fixture(autouse=True)
async def loop_is_quiet() -> AsyncIterator[list[dict[str, Any]]]:
    """Fail on what reaches the loop's exception handler; a test that provokes it takes it out of the list."""
    loop = asyncio.get_running_loop()
    heard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: heard.append(context))
    yield heard
    gc.collect(1)  # a task that failed unseen says so when it goes; it is young, and a full collection takes long
    await asyncio.sleep(0)
    assert heard == []


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """A server that the test may kill, pause and restart."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def own_nc(own_server: NatsServer) -> AsyncIterator[Client]:
    """A connection to `own_server` that comes back quickly."""

    async def quiet(error: Exception) -> None:
        pass

    nc = await nats.connect(
        own_server.url, connect_timeout=10, reconnect_time_wait=0.02, max_reconnect_attempts=-1, error_cb=quiet
    )
    try:
        yield nc
    finally:
        if own_server.running:
            await nc.close()
        else:
            nc._transport and nc._transport.close()  # type: ignore[union-attr]
            await nc.close()


@pytest.fixture
def own_js(own_nc: Client) -> JetStreamContext:
    """A JetStream context on `own_server`."""
    return own_nc.jetstream()


@pytest.fixture
def own_stream(own_js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """As `make_stream`, on `own_server`."""

    async def make(**config: Any) -> str:
        name = stream_name()
        config = {"allow_direct": True, "allow_atomic": True, "allow_batched": True, "allow_msg_ttl": True, **config}
        await own_js.add_stream(name=name, subjects=[f"{name}.>"], **config)
        return name

    return make


@pytest.fixture(params=["marker", "held back"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to commit: with the end-of-batch marker, and as servers before 2.14 need it."""
    if request.param == "held back":
        new = AtomicWire._new_machine

        def held_back(self: AtomicWire, level: int, max_payload: int) -> AtomicBatchMachine:
            return new(self, 2, max_payload)

        monkeypatch.setattr(AtomicWire, "_new_machine", held_back)
    return str(request.param)
