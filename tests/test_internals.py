"""Tests speak the public API, the wire or the command line; those that reach behind them are listed, until none is left.

The tests of machines, in the folder protocol, use the modules of `jetstream_ext.protocol`. Every other file of tests that
imports a private module, or uses an underscored name of the package, is in internals.toml, under the redesign that will
replace or delete it. Programs in strings are not looked at, nor names that nats-py has as well.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nats

import jetstream_ext

TESTS = Path(__file__).parent
MACHINES = ("protocol",)
PUBLIC = {"", "arrow", "errors", "kv", "log", "otel", "spark", "testing", "testing.pytest_plugin", "testing.reference"}
_NAME = re.compile(
    r"jetstream_ext\.((?:arrow|cli|client|columns|errors|kv|log|otel|own_client|protocol|servers|spark|testing|text|ttl|types|_\w+)(?:\.\w+)*)"
)


def _underscored(source: str) -> set[str]:
    """Return the underscored attributes of `self`, and the underscored functions, of a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return {name for name in found if re.match("_[a-z]", name)}


def _underscored_in(package: ModuleType) -> set[str]:
    paths = Path(str(package.__file__)).parent.rglob("*.py")
    return set().union(*(_underscored(path.read_text(encoding="utf-8")) for path in paths))


OURS = _underscored_in(jetstream_ext) - _underscored_in(nats)


def _is_public(name: str) -> bool:
    """Return whether a dotted name under `jetstream_ext` is a public module, or a name of one."""
    *module, last = name.split(".")
    folder = Path(jetstream_ext.__file__).parent.joinpath(*module, last)
    is_module = folder.is_dir() or folder.with_suffix(".py").is_file()
    return not last.startswith("_") and (name if is_module else ".".join(module)) in PUBLIC


def internals(source: str, conftest: str = "") -> Iterator[str]:
    """Yield what a file of tests, with a conftest beside it, uses that is private."""
    own = _underscored(source) | _underscored(conftest)
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(".") > 1:
            names = [node.value]  # the target of a monkeypatch
        elif isinstance(node, ast.Attribute) and node.attr in OURS - own:
            names = [f"jetstream_ext.{node.attr}"]
        yield from (name for name in names if (found := _NAME.fullmatch(name)) and not _is_public(found[1]))


def uses_internals(path: Path) -> bool:
    conftest = path.parent / "conftest.py"
    helpers = conftest.read_text(encoding="utf-8") if conftest.exists() else ""
    return any(internals(path.read_text(encoding="utf-8"), helpers))


def test_what_is_private_is_found() -> None:
    private = """
from jetstream_ext.client import connection
import jetstream_ext.protocol.fast
from jetstream_ext import text
from jetstream_ext.kv import _secret
monkeypatch.setattr("jetstream_ext.log.reader.LogReader", None)
reader._position
"""
    assert len([line for line in private.splitlines() if list(internals(line))]) == 6 - ("_position" not in OURS)
    public = """
import jetstream_ext as jsx
from jetstream_ext import DirectGet, errors, kv
from jetstream_ext.log import LogReader
from jetstream_ext.testing.reference import Faults
nc._subs
logging.getLogger("jetstream_ext.fast")
"""
    assert not list(internals(public))


def test_every_test_of_internals_is_listed() -> None:
    listed = tomllib.loads((TESTS / "internals.toml").read_text(encoding="utf-8"))
    files = [file for room in listed.values() for file in room["files"]]
    assert len(files) == len(set(files))
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if path.relative_to(TESTS).parts[0] not in MACHINES and uses_internals(path)
    }
    unlisted, gone = sorted(found - set(files)), sorted(set(files) - found)
    assert not unlisted, f"use the public API, the wire or the command line in {', '.join(unlisted)}"
    assert not gone, f"{', '.join(gone)}: no test of internals any more; remove the line from internals.toml"
