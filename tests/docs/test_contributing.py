"""What the page for contributors names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_path_exists() -> None:
    names = set(re.findall(r"`((?:jetstream_ext|tests|examples|docs)/[\w./]*)`", PAGE)) - {
        "docs/_build/html",
        "docs/bench.json",
    }  # written by sessions
    assert len(names) > 12
    assert {name for name in names if not (ROOT / name).exists()} == set()


def test_every_session_exists() -> None:
    sessions = set(re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)\(", NOXFILE, re.MULTILINE))
    named = {word for line in re.findall(r"nox -s ([\w ]+)", PAGE) for word in line.split()}
    assert {"lint", "types", "tests", "docs"} <= named
    assert named <= sessions


def test_what_is_to_be_run_can_be() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("python -m pytest ")]
    paths = [word for line in lines for word in shlex.split(line)[3:] if "/" in word]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
