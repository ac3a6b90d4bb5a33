"""The reference has every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md"))]
DIRECTIVE = re.compile(r"^\.\. (?:py:)?(\w+):: (\S+)\n((?: +:.*\n)*)", re.MULTILINE)


def found(page: str) -> set[str]:
    """Return the full names that a page has entries for."""
    names: set[str] = set()
    within = ""
    for kind, name, options in DIRECTIVE.findall(page):
        if kind not in {"currentmodule", "automodule"}:
            names.add(f"{within}.{name}")
            continue
        within = name
        if listed := re.search(r":members:(.*)", options):
            members = listed[1].replace(",", " ").split()
            names |= {
                f"{name}.{member}" for member in members or (m for m, thing in public(name).items() if has_entry(thing))
            }
    return names


def public(module: str) -> dict[str, Any]:
    loaded = importlib.import_module(module)
    return {name: getattr(loaded, name) for name in getattr(loaded, "__all__", None) or defined(loaded)}


def defined(module: ModuleType) -> Iterator[str]:
    """Yield the public names that a module without ``__all__`` defines."""
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.Assign(targets=[ast.Name(id=name)])
            ) if not name.startswith("_"):
                yield name


def has_entry(thing: object) -> bool:
    """Return whether autodoc finds it: it does not find data from another module."""
    return inspect.isclass(thing) or inspect.isfunction(thing)


NAMES = set().union(*map(found, PAGES))


AREAS = ("arrow", "errors", "kv", "log", "spark", "testing", "testing.reference", "testing.pytest_plugin")


def test_every_public_name_has_an_entry() -> None:
    names = {
        f"{module}.{name}"
        for module in ("jetstream_ext", *(f"jetstream_ext.{area}" for area in AREAS))
        for name in public(module)
    }
    # What two modules export has one entry.
    elsewhere = {f"jetstream_ext.testing.reference.{name}" for name in public("jetstream_ext.testing")}
    assert names - NAMES - elsewhere == set()


def test_every_page_is_listed() -> None:
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{path.stem}\n" in index for path in (DOCS / "reference").glob("*.md") if path.stem != "index")


def test_the_table_of_features_says_that_exactly_once_needs_2_12_1() -> None:
    table = runpy.run_path(str(DOCS / "_ext" / "feature_table.py"))["markdown_table"]()
    assert any("2.12.1" in row for row in table.splitlines() if "exactly_once" in row)
