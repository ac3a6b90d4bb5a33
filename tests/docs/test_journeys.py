"""The journeys of the page on the design, counted again: none has grown."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (.+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def _rows(text: str) -> dict[str, tuple[int, int]]:
    return {name: (int(modules), int(calls)) for name, modules, calls in _ROW.findall(text)}


def test_no_journey_has_grown() -> None:
    page = (TESTS.parent / "docs" / "design.md").read_text(encoding="utf-8")
    shown = _rows(page.partition("## Journeys\n")[2].partition("\n## ")[0])
    # A process of its own, because the profile counts whatever runs in its process.
    done = subprocess.run([sys.executable, TESTS / "journeys.py"], capture_output=True, text=True, timeout=300)
    counted = _rows(done.stdout)
    assert counted.keys() == shown.keys(), done.stderr
    grown = [
        f"{name}: {modules} modules, {calls} calls; the page has {shown[name]}"
        for name, (modules, calls) in counted.items()
        # The pieces in which replies arrive add a few calls.
        if modules > shown[name][0] or calls > shown[name][1] * 1.1
    ]
    assert not grown, "\n".join(grown)
