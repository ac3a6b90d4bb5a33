"""Fixtures of the client tests: streams, servers to break, and a check of the event loop."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from clients import close, quiet
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.client import api
from jetstream_ext.protocol.atomic import AtomicBatchMachine
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `client_cells`
sys.path.append(str(Path(__file__).parents[1] / "safety_net"))  # and `frame_proxy`

MakeStream = Callable[..., Awaitable[str]]


@pytest.fixture
def full_transport_pauses_the_writer() -> None:
    """Skip the test on versions of Python whose `writelines` never pauses the writer."""
    if (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2):
        pytest.skip("CVE-2024-12254 of asyncio: a full transport never pauses the writer")


FEATURES = ("allow_direct", "allow_atomic", "allow_batched", "allow_msg_ttl")


def maker(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    async def make(**config: Any) -> str:
        name = stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], **dict.fromkeys(FEATURES, True) | config)
        return name

    return make


@pytest.fixture
def make_stream(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """Create a stream with all features on (or as given); its subjects are ``<name>.>``."""
    return maker(js, stream_name)


@pytest.fixture
async def stream(make_stream: MakeStream) -> str:
    """An empty stream with all features on."""
    return await make_stream()


@pytest.fixture
def version(server: NatsServer) -> tuple[int, ...]:
    """The server's version."""
    return tuple(map(int, server.version.split(".")))


@pytest.fixture
def batches(version: tuple[int, ...]) -> None:
    """Skip tests of batched direct gets on older servers; test_direct_versions.py tests those."""
    if version < (2, 11):
        pytest.skip("this server has no batches")


@pytest.fixture
def make(js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """As `make_stream`, for any server, and with an optional name."""

    async def make(name: str | None = None, **config: Any) -> str:
        name = name or stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], **{"allow_direct": True, **config})
        return name

    return make


@pytest.fixture(autouse=True)
def lookups_are_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give lookups of streams and API levels more time, because a batch continues without an answer that is late."""
    monkeypatch.setattr(api, "LOOKUP_TIMEOUT", 20.0)


@pytest.fixture(autouse=True)
async def loop_is_quiet() -> AsyncIterator[list[dict[str, Any]]]:
    """Fail if the loop's exception handler was called; a test that expects a call removes it from the list."""
    loop = asyncio.get_running_loop()
    heard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: heard.append(context))
    yield heard
    gc.collect(1)  # a dropped task reports its error when it is collected; generation 1 is enough, and faster than all
    await asyncio.sleep(0)
    assert heard == []


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put the clock of the event loop forward, so that a test with a long timeout need not wait for its end."""
    loop = asyncio.get_running_loop()
    clock, passed = loop.time, 0.0

    def pass_time(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(loop, "time", lambda: clock() + passed)
    return pass_time


@pytest.fixture
async def own_nc(own_server: NatsServer) -> AsyncIterator[Client]:
    """A connection to `own_server` that reconnects quickly."""

    nc = await nats.connect(
        own_server.url, connect_timeout=10, reconnect_time_wait=0.02, max_reconnect_attempts=-1, error_cb=quiet
    )
    try:
        yield nc
    finally:
        if not own_server.running:
            nc._transport and nc._transport.close()  # type: ignore[union-attr]
        await close(nc)


@pytest.fixture
def own_js(own_nc: Client) -> JetStreamContext:
    """A JetStream context on `own_server`."""
    return own_nc.jetstream(timeout=30)


@pytest.fixture
def own_stream(own_js: JetStreamContext, stream_name: Callable[[], str]) -> MakeStream:
    """As `make_stream`, on `own_server`."""
    return maker(own_js, stream_name)


@pytest.fixture(params=["marker", "held back"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to commit: by the end-of-batch marker, and with a message, as servers before 2.14 need it."""
    if request.param == "held back":
        monkeypatch.setattr(AtomicBatchMachine, "_holds_back", True)
    return str(request.param)
