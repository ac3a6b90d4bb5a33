"""What a page lets the reader run works with the extras of the package that the page has named by then."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "how-to").glob("*.md"))]
BLOCK = re.compile(r"^```[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"nats-jetstream-ext\[([\w,-]+)\]")
NEEDS = {
    r'^jetstream-ext |"jetstream-ext"': "cli",
    r"^(jetstream-ext serve|nats-server)": "server",
    r"^jetstream-ext demo": "demo",
    r"^jetstream-ext .*\.(parquet|zst)\b": "arrow",
    r"^(import|from) pyspark": "spark",
    r"^(import|from) (pyarrow|jetstream_ext\.arrow)|^from jetstream_ext import .*\barrow\b": "arrow",
    r"^(import|from) opentelemetry": "otel",
}


def extras(text: str) -> set[str]:
    """Return the extras that a text names, with those that they include."""
    found = {name for names in NAMED.findall(text) for name in names.split(",")}
    return found.union(*(extras(requirement) for name in found for requirement in EXTRAS[name]))


def needed(code: str) -> set[str]:
    return {extra for pattern, extra in NEEDS.items() if re.search(pattern, code, re.MULTILINE)}


def test_a_page_names_the_extras_of_what_it_runs() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # The index of the how-to guides says what to install for all of them.
        before = (DOCS / "how-to" / "index.md").read_text(encoding="utf-8") if page.parent.name == "how-to" else ""
        for block in BLOCK.finditer(text):
            if not block[0].startswith("```{"):  # a directive, such as a warning
                assert needed(block[0]) <= extras(before + text[: block.end()]), f"{page.name}: {block[0]}"


def test_a_row_about_a_command_names_all_of_its_extras() -> None:
    rows = [
        line for line in (DOCS / "command-line.md").read_text(encoding="utf-8").splitlines() if "pip install" in line
    ]
    rows = [row for row in rows if row.startswith("|")]
    assert len(rows) > 1
    assert [row for row in rows if "cli" not in extras(row)] == []
