"""Collect every message that a user can read into one file, so that the words can be reviewed as a whole.

Error texts, log records and the help texts of the command line, by module, as the source has them: ``{…}`` stands for a
value. ``python docs/_ext/messages.py`` writes ``docs/_generated/messages.txt``; ``--check`` only says, by its exit
status, whether the file is up to date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "_generated" / "messages.txt"
_HELP_KEYWORDS = frozenset({"help", "short_help", "epilog"})
_TAKE_NO_MESSAGE = frozenset({"cast", "status_header"})
# Methods of OpenTelemetry's meters: their texts describe metrics to a backend.
_DESCRIBE_METRICS = frozenset({"create_counter", "create_gauge", "create_histogram"})
_SHORTEST = 12
_VALUE = re.compile("\0(.*?)\0")
"""A value in a text: its expression between two NULs."""
# The other modules of the reference server reproduce the wording of nats-server.
_REFERENCE = ROOT / "jetstream_ext" / "testing" / "reference"
_OWN_WORDING = frozenset(_REFERENCE / name for name in ("faults.py", "releases.py", "server.py"))


def _value(node: ast.expr) -> str:
    return f"\0{ast.unparse(node)}\0"


def _text(node: ast.expr) -> str | None:
    """Return the text of a string expression, with its values as in `_VALUE`, or None for any other expression."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(
                _value(part.value) if isinstance(part, ast.FormattedValue) else _text(part) or "" for part in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = _text(left), _text(right)
            if texts == (None, None):
                return None
            return "".join(
                _value(side) if text is None else text for side, text in zip((left, right), texts, strict=True)
            )
        case ast.IfExp(body=body, orelse=orelse):
            alternatives = [text for text in (_text(body), _text(orelse)) if text]
            # Alternatives without a space are names or formats.
            return " | ".join(alternatives) if " " in _VALUE.sub("", "".join(alternatives)) else None
    return None


def _shown(text: str) -> str:
    return _VALUE.sub(r"{\1}", text)


def _is_message(text: str) -> bool:
    """Return whether a text has several words that are not all values or code; names, subjects and formats have not."""
    own = re.sub("`.*?`", "", _VALUE.sub("", text))
    return len(text) >= _SHORTEST and len(_shown(text).split()) >= 3 and re.search("[A-Za-z]{2}", own) is not None


def _docstrings(tree: ast.Module) -> set[ast.Constant]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(node.value)
    return found


def _is_command(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        ".command(" in text or ".group(" in text for text in map(ast.unparse, node.decorator_list)
    )


def _without_messages(node: ast.AST) -> Sequence[ast.AST]:
    """Return the parts of a node in which no text is a message."""
    match node:
        case ast.FunctionDef(name="__repr__", body=body):
            return body
        case ast.Compare(left=left, comparators=comparators):
            return [each for each in (left, *comparators) if isinstance(each, ast.Constant)]
        case ast.Call(func=func, args=args):
            name = ast.unparse(func)
            if name.rpartition(".")[2] in _DESCRIBE_METRICS:
                return args
            return args if name.startswith("re.") else args[:1] if name in _TAKE_NO_MESSAGE else []
    return []


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every message in a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = _docstrings(tree)
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):  # outermost first
        if node in inside or node in docstrings:
            continue
        if _is_command(node) and (text := ast.get_docstring(node)):  # type: ignore[arg-type]
            yield node.lineno, text  # type: ignore[attr-defined]
        for part in _without_messages(node):
            inside.update(ast.walk(part))
        if isinstance(node, ast.keyword) and node.arg in _HELP_KEYWORDS and (text := _text(node.value)):
            inside.update(ast.walk(node))
            yield node.lineno, text
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp) and (text := _text(node)):
            inside.update(ast.walk(node))
            if _is_message(text) and not text.lstrip().startswith("import "):
                yield node.lineno, text


def render() -> str:
    """Return the whole file."""
    lines = ["Every message of jetstream_ext, by module. Generated by docs/_ext/messages.py; do not edit.\n"]
    for path in sorted((ROOT / "jetstream_ext").rglob("*.py")):
        found = sorted(set(messages(path)))
        if found and (_REFERENCE not in path.parents or path in _OWN_WORDING):
            lines.append(f"\n{path.relative_to(ROOT).as_posix()}\n")
            for _, text in found:
                text = _shown(text)
                shown = text if "\n" in text else textwrap.fill(text, 118, break_on_hyphens=False)
                lines.append(textwrap.indent(shown.strip("\n"), "  ") + "\n")
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


if __name__ == "__main__":
    wanted = render()
    if "--check" in sys.argv[1:]:
        sys.exit(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(wanted, encoding="utf-8")
