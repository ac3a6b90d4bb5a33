"""The reference server uses nothing of the client side, and its engine has no clock, socket or event loop."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import jetstream_ext.testing.reference as package

ROOT = Path(package.__path__[0])
MODULES = sorted(ROOT.rglob("*.py"))
SHELL = {"server.py", "__init__.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports, anywhere in the file."""
    parents = (*package.__name__.split("."), *path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*parents[: len(parents) - node.level + 1]] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            found |= {".".join([*module, alias.name]) if node.level else ".".join(module) for alias in node.names}
    return found


def modules(path: Path) -> Iterator[str]:
    """Yield the files of the reference server that a file imports."""
    for name in imports(path):
        parts = name.removeprefix(f"{package.__name__}.").split(".")
        if name.startswith(package.__name__):
            for size in range(len(parts), 0, -1):
                file = ROOT.joinpath(*parts[:size])
                if file.with_suffix(".py").is_file():
                    yield name_of(file.with_suffix(".py"))
                    break
                if (file / "__init__.py").is_file():
                    yield name_of(file / "__init__.py")
                    break


def test_the_reference_server_shares_no_code_with_the_client_side() -> None:
    for path in MODULES:
        for name in imports(path):
            inside = name.startswith(f"{package.__name__}.")
            assert inside or name.split(".")[0] in sys.stdlib_module_names, (path, name)


def test_the_engine_has_no_clock_no_socket_and_no_event_loop() -> None:
    for path in MODULES:
        if path.name not in SHELL:
            assert not imports(path) & {"asyncio", "socket", "time", "threading", "selectors", "os"}, path


def test_no_import_cycle() -> None:
    left = {name_of(path): set(modules(path)) for path in MODULES}
    while leaves := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in leaves}
    assert not left, "each of these modules is in an import cycle, or imports one that is"
