"""Fixtures shared by all tests: one real server per session, one connection per test."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import nats
import pytest
from hypothesis import HealthCheck, settings
from nats.aio.client import Client
from nats.js import JetStreamContext

from jetstream_ext.testing import NatsServer

# How long an example takes says something of the machine, and nothing of what is tested.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    """A server that all tests share: use names of your own, and do not kill, pause or restart it."""
    with NatsServer() as server:
        yield server


@pytest.fixture
async def nc(server: NatsServer) -> AsyncIterator[Client]:
    """A connection of this test's own."""
    nc = await nats.connect(server.url, connect_timeout=10)
    try:
        yield nc
    finally:
        await nc.close()


@pytest.fixture
def js(nc: Client) -> JetStreamContext:
    """A JetStream context on this test's connection."""
    return nc.jetstream()


@pytest.fixture
def stream_name() -> Callable[[], str]:
    """A factory of names that no other stream or bucket of the session has; good as subject tokens too."""
    return lambda: f"T{uuid.uuid4().hex[:12]}"
