"""The fixtures of the pytest plugin, in a pytest run of their own."""

import subprocess
import sys
from pathlib import Path

SHARED_SERVER = """
import socket
ports = set()

def test_first(nats_server):
    ports.add(nats_server.port)
    socket.create_connection(('127.0.0.1', nats_server.port), timeout=10).close()

def test_second(nats_server):
    ports.add(nats_server.port)
    assert len(ports) == 1
"""

REFERENCE_SERVER_AND_CLUSTER = """
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
            assert replicas > 1  # the server of this connection does not know the leader yet
            await asyncio.sleep(0.02)
    await nc.close()

def test_first(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_second(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_cluster(nats_cluster):
    asyncio.run(work(nats_cluster.url, 3))
"""


def run_tests(folder: Path, tests: str) -> str:
    """Run tests with the plugin, and return the report."""
    (folder / "conftest.py").write_text('pytest_plugins = ["jetstream_ext.testing.pytest_plugin"]\n')
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", folder / "pytest.ini", folder],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


def test_nats_server_is_one_real_server_for_the_session(tmp_path: Path) -> None:
    report = run_tests(tmp_path, SHARED_SERVER)
    assert "2 passed" in report, report


def test_reference_server_is_empty_for_each_test_and_cluster_has_three_replicas(tmp_path: Path) -> None:
    report = run_tests(tmp_path, REFERENCE_SERVER_AND_CLUSTER)
    assert "3 passed" in report, report
