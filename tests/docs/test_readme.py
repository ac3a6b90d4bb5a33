"""The README can be read on PyPI: its links are absolute, and lead to what this repository has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
LINK = re.compile(r"\]\(([^)]*)\)")


def test_every_link_is_absolute_and_leads_to_a_page_or_file() -> None:
    pages, files = f"{URLS['Documentation']}/en/latest/", f"{URLS['Source']}/blob/main/"
    others = {"https://github.com/nats-io/nats.py", URLS["Source"], URLS["Issues"]}
    links = LINK.findall(README)
    assert len(links) > 20
    for link in links:
        if link.startswith(pages):
            page = link.removeprefix(pages).partition("#")[0]
            assert page.endswith(".html"), link
            assert (ROOT / "docs" / page).with_suffix(".md").is_file(), link
        elif link.startswith(files):
            assert (ROOT / link.removeprefix(files)).is_file(), link
        else:
            assert link in others


def test_nothing_of_the_readme_needs_files_beside_it() -> None:
    assert "![" not in README
    assert "<!--" not in README
    assert not re.search(r"<(img|a)\b|^\[[^\]]+\]:", README, re.MULTILINE)
