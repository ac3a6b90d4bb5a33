"""The pytest fixture `nats_server`."""

import subprocess
import sys
from pathlib import Path


def test_the_fixture_is_one_real_server_for_the_session(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["jetstream_ext.testing.pytest_plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import socket\n"
        "ports = set()\n"
        "def test_first(nats_server):\n"
        "    ports.add(nats_server.port)\n"
        "    socket.create_connection(('127.0.0.1', nats_server.port), timeout=10).close()\n"
        "def test_second(nats_server):\n"
        "    ports.add(nats_server.port)\n"
        "    assert len(ports) == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
