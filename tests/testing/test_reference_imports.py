"""What the reference server may be made of: nothing of the client side, and no clock or socket in the engine."""

import ast
import sys
from pathlib import Path

import pytest

import jetstream_ext.testing.reference as package

MODULES = sorted(Path(package.__path__[0]).glob("*.py"))
SHELL = {"shell.py", "clock.py", "__init__.py"}


def imports(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package.__name__.rsplit(".", node.level - 1)[0] if node.level > 1 else package.__name__
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {f"{base}.{name}" for name in names}
            else:
                found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_it_shares_no_code_with_the_client_side(path: Path) -> None:
    for name in imports(path):
        inside = name.startswith(f"{package.__name__}.")
        assert inside or name.split(".")[0] in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", [path for path in MODULES if path.name not in SHELL], ids=lambda path: path.name)
def test_the_engine_has_no_clock_no_socket_and_no_loop(path: Path) -> None:
    assert not imports(path) & {"asyncio", "socket", "time", "threading", "selectors", "os"}
