"""The tests' own pytest: a failure is reported, whatever fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LARGE = """
from collections import Counter

rows = [b"%d " % number + b"." * 400 for number in range(4000)]


def test_large_collections_are_equal():
    assert Counter(rows + rows[:2000]) == Counter(rows)
"""


RING = """
def test_failure_with_a_ring_of_causes():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first
"""


CONNECTION = """
import asyncio


left = []


class Client:
    async def _read_loop(self):
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass  # lost


async def test_failure_that_leaves_a_connection():
    left.append(asyncio.create_task(Client()._read_loop()))
    await asyncio.sleep(0)
    assert False
"""


@pytest.mark.parametrize(
    "program", [LARGE, RING, CONNECTION], ids=["large collections", "ring of causes", "a connection is left"]
)
def test_a_failure_is_reported_at_once(tmp_path: Path, program: str) -> None:
    (tmp_path / "test_program.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "--confcutdir=/", "-p", "no:cacheprovider", tmp_path]
    conftest = ["--rootdir", tmp_path, "-c", os.devnull, "-o", "asyncio_mode=auto", "-p", "conftest"]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([*command, *conftest], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "1 failed" in done.stdout
