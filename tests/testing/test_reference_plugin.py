"""The pytest fixtures `reference_server` and `nats_cluster`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jetstream_ext.testing import ReferenceServer

TESTS = """
import asyncio, nats, pytest

async def work(url, replicas):
    nc = await nats.connect(url)
    js = nc.jetstream()
    with pytest.raises(nats.js.errors.NotFoundError):
        await js.stream_info("S")
    await js.add_stream(name="S", subjects=["s"], num_replicas=replicas)
    while True:
        try:
            await js.publish("s", b"x")
            break
        except nats.js.errors.NoStreamResponseError:
            assert replicas > 1  # the server that nc is on hears of it a moment later
            await asyncio.sleep(0.02)
    await nc.close()

def test_first(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_second(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_cluster(nats_cluster):
    asyncio.run(work(nats_cluster.url, 3))
"""


def test_the_fixtures_of_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["jetstream_ext.testing.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini", tmp_path],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_port_in_use_is_reported_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = ReferenceServer(port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="did not start"):
            server.__enter__()
