"""The benchmarks run, and the pages show the figures of the record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

import render  # noqa: E402 - beside this file
from record import Group, summary  # noqa: E402

MAIN = "docs/performance.md"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a quick run: of two groups here, of all groups in ``nox -s full -- longer``."""
    out = tmp_path_factory.mktemp("bench") / "record.json"
    chosen = [] if os.environ.get("JETSTREAM_EXT_FULL") else ["--only", "publish", "kv"]
    done = subprocess.run(
        [sys.executable, BENCH, "--quick", *chosen, "--out", out],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture
def record(measured: dict[str, Any]) -> dict[str, Any]:
    """The committed record, with the groups that were measured now."""
    committed = json.loads(render.RECORD.read_text(encoding="utf-8"))
    both = {name: committed[name] | measured[name] for name in ("groups", "versions")}
    return measured | both


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A copy of the pages that show figures."""
    for name in render.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(render.ROOT / name, tmp_path / name)
    return tmp_path


def test_a_summary() -> None:
    assert summary([3.0, 1.0, 2.000004]) == {"min": 1.0, "median": 2.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}
    group = Group("name", rounds=2)
    group.note("case", "s", 1.0)
    group.note("case", "s", 2.0)
    assert group.as_json()["conditions"] == {"rounds": 2}
    assert group.as_json()["figures"]["case"]["s"]["median"] == 1.5


def test_the_record_says_where_when_and_what(measured: dict[str, Any]) -> None:
    assert measured["quick"] is True
    assert measured["machine"]["cpu"]
    assert measured["machine"]["cpus"] > 0
    assert measured["machine"]["memory_gib"] > 0
    assert {"python", "nats_server", "nats_py", "jetstream_ext"} <= set(measured["versions"])
    for name, group in measured["groups"].items():
        assert group["figures"], name
        for case, measures in group["figures"].items():
            for measure, found in measures.items():
                assert 0 <= found["min"] <= found["median"] <= found["max"], (name, case, measure)
                assert len(found["runs"]) == 1


def test_the_pages_show_the_record(record: dict[str, Any], pages: Path) -> None:
    with pytest.raises(ValueError, match="quick run"):
        render.write(record, pages)
    full = record | {"quick": False}
    before = {name: (pages / name).read_text() for name in render.PAGES}
    written = render.write(full, pages)
    assert render.stale(full, pages) == []
    for name, text in before.items():
        now = (pages / name).read_text()
        assert render.update(now, render.PAGES[name], full) == now
        # Outside the blocks nothing changes.
        assert [line for line in now.splitlines() if line.startswith("#")][:3] == [
            line for line in text.splitlines() if line.startswith("#")
        ][:3]
    rate = record["groups"]["publish"]["figures"]["add_many"]["messages/s"]["median"]
    assert f"| `FastPublisher.add_many` | {rate:,.0f} |" in (pages / MAIN).read_text()
    drawn = [path for path in written if path.suffix == ".svg"]
    assert len(drawn) == 2
    for path in drawn:
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg")
        texts = {each.text for each in root.iter() if each.text}
        assert {"this library", "nats-py", "bare socket (upper limit)"} <= texts, "the legend"
        assert f"(images/{path.name})" in (pages / MAIN).read_text()
    (pages / MAIN).write_text(before[MAIN])
    assert render.stale(full, pages) == [pages / MAIN]


def test_a_page_without_its_comments_is_refused() -> None:
    blocks = {"x": lambda record: "new"}
    begin, end = "<!-- figures: x -->\n", "<!-- end of figures: x -->\n"
    assert render.update(f"a\n{begin}old\n{end}b\n", blocks, {}) == f"a\n{begin}\nnew\n\n{end}b\n"
    for broken in ("", begin, end, end + begin, (begin + end) * 2):
        with pytest.raises(ValueError, match="figures: x"):
            render.update(broken, blocks, {})


def test_committed_pages_agree_with_the_committed_record() -> None:
    if render.RECORD.is_file():
        assert render.stale(json.loads(render.RECORD.read_text(encoding="utf-8"))) == [], "python tests/bench/render.py"
    else:  # such pages must not have marks of generated text
        assert list((render.ROOT / "docs" / "images").glob("bench-*")) == []
        assert not any("bench-publish.svg" in (render.ROOT / name).read_text(encoding="utf-8") for name in render.PAGES)
