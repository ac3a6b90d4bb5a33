"""The tests' own pytest: a failure is reported, whatever fails."""

import os
import subprocess
import sys
from pathlib import Path

LARGE = """
from collections import Counter

rows = [b"%d " % number + b"." * 400 for number in range(4000)]


def test_large_collections_are_equal():
    assert Counter(rows + rows[:2000]) == Counter(rows)
"""


def test_large_collections_that_differ_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_large.py").write_text(LARGE)
    command = [sys.executable, "-m", "pytest", "--confcutdir=/", "-p", "no:cacheprovider", tmp_path]
    conftest = ["--rootdir", tmp_path, "-c", os.devnull, "-p", "conftest"]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([*command, *conftest], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "1 failed" in done.stdout
