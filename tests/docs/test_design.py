"""The page on the design says what the code has: the layers, and the place of each decision."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def test_the_layers_are_those_that_are_checked() -> None:
    (layers,) = (
        each["layers"] for each in CONTRACTS if each["type"] == "layers" and each["containers"] == ["jetstream_ext"]
    )
    (shown,) = re.findall(r"^## Layers\n\n```\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    assert shown.splitlines() == layers


def test_every_place_exists() -> None:
    places = re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", PAGE)
    assert len(places) > 30
    assert [place for place in places if not exists(*place)] == []


def exists(file: str, names: str) -> bool:
    path = next((path for path in (ROOT / file, ROOT / "jetstream_ext" / file) if path.is_file()), None)
    if path is None:
        return False
    text = path.read_text(encoding="utf-8")
    return all(
        re.search(rf"^ *(async def|def|class) {name}\b", text, re.MULTILINE) for name in names.split(".") if names
    )
