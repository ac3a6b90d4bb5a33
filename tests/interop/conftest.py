"""Buckets that this library shares with the clients of other languages."""

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from peers import HERE, Peer, TheirBucket, UnavailableError, build_go, node

MakeTheirs = Callable[[str], TheirBucket]


@pytest.fixture(scope="session")
def nats_js() -> Path:
    """Node, able to import nats.js; the test is skipped with the reason if it cannot be installed."""
    try:
        return node()
    except UnavailableError as reason:
        pytest.skip(f"nats.js: {reason}")


@pytest.fixture(scope="session")
def nats_go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key-value client of nats.go; the test is skipped with the reason if it cannot be built."""
    try:
        return build_go(HERE / "kv_peer.go", tmp_path_factory.mktemp("go"))
    except UnavailableError as reason:
        pytest.skip(f"nats.go: {reason}")


@pytest.fixture(params=["nats.js", "nats.go"])
async def theirs(request: pytest.FixtureRequest, server: NatsServer) -> AsyncIterator[MakeTheirs]:
    """A bucket, by its name, as another client sees it."""
    if request.param == "nats.js":
        command = [request.getfixturevalue("nats_js"), HERE / "kv_peer.mjs"]
    else:
        command = [request.getfixturevalue("nats_go")]
    async with Peer(*command, server.url) as peer:
        yield lambda name: TheirBucket(peer, name)
