"""Mutate modules of the package, and report the mutants that no given test kills.

python tests/mutations/code.py jetstream_ext/protocol/fast.py --tests tests/protocol tests/client/test_fast.py
python tests/mutations/code.py jetstream_ext/protocol/fast.py --tests tests/protocol --before ../old/tests

A mutant differs from the package in one operator, constant, condition or statement. With `--before`, the same tests of an
older tree run against each survivor: what only they kill is protection that the newer tests have lost, and the exit code
is 1.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
}  # fmt: skip


def _is_unobserved(node: ast.stmt) -> bool:
    """Return whether a statement only documents, logs, raises an error's text, or declares types."""
    text = ast.unparse(node)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or "TYPE_CHECKING" in text or text.startswith(("_logger.", "logger.", "import ", "from ", "__all__"))


def mutate(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each mutant, what changed in it, and its source; the tree is as before in the end."""

    def mutant(node: ast.AST, change: str) -> tuple[int, str, str]:
        return getattr(node, "lineno", 0), change, ast.unparse(tree)

    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        for field, value in ast.iter_fields(node):
            for place, child in enumerate(value) if isinstance(value, list) else [(-1, value)]:
                if not isinstance(child, ast.AST) or (isinstance(child, ast.stmt) and _is_unobserved(child)):
                    continue
                if field in ("annotation", "returns", "decorator_list", "bases", "format_spec"):
                    continue
                if isinstance(child, ast.JoinedStr | ast.Raise):
                    continue
                pending.append(child)
                new: ast.AST | None = None
                if type(child) in SWAPS:
                    new = SWAPS[type(child)]()
                elif isinstance(child, ast.Constant) and type(child.value) is int:
                    new = ast.copy_location(ast.Constant(child.value + 1), child)
                elif isinstance(child, ast.Constant) and isinstance(child.value, bool):
                    new = ast.copy_location(ast.Constant(not child.value), child)
                elif isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
                    new = child.operand
                elif field == "test" and isinstance(node, ast.If | ast.IfExp):
                    new = ast.copy_location(ast.Constant(value=False), child)
                elif isinstance(child, ast.Expr | ast.Assign | ast.AugAssign) and not isinstance(
                    node, ast.Module | ast.ClassDef
                ):
                    new = ast.copy_location(ast.Pass(), child)
                if new is None:
                    continue
                line = child if hasattr(child, "lineno") else node
                change = f"{ast.unparse(child) if type(child) not in SWAPS else type(child).__name__} -> {ast.unparse(new) if type(child) not in SWAPS else type(new).__name__}"
                if place >= 0:
                    value[place] = new
                    yield mutant(line, change)
                    value[place] = child
                else:
                    setattr(node, field, new)
                    yield mutant(line, change)
                    setattr(node, field, child)


def make_tree(folder: Path, tests: Path) -> None:
    """Lay out a copy of the package in `folder`, beside a tree of tests."""
    for name in ("docs", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "noxfile.py"):
        (folder / name).symlink_to(Path(name).absolute())
    for name in ("pyproject.toml", "pyspark_jetstream.py", "pyspark_jetstream_kv.py"):
        shutil.copy(name, folder)
    shutil.copytree("jetstream_ext", folder / "jetstream_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(tests.absolute())


def passes(folder: Path, tests: list[str], seconds: float) -> bool:
    """Return whether no test fails, within a time that an endless loop exceeds; tests that do not exist here kill nothing."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    found = [test for test in tests if (folder / test.split("::")[0]).exists()]
    if not found:
        return True
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-x",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        *found,
    ]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path, help="modules of the package to mutate")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest runs, relative to the project")
    parser.add_argument("--before", type=Path, help="an older folder of tests, for what the newer tests do not kill")
    parser.add_argument("--before-tests", nargs="+", help="what pytest runs of it (default: as --tests)")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants (default: 1)")
    options = parser.parse_args()
    if missing := [test for test in options.tests if not Path(test.split("::")[0]).exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    lost = 0
    with tempfile.TemporaryDirectory() as new, tempfile.TemporaryDirectory() as old:
        trees = [(Path(new), Path("tests"), options.tests)]
        if options.before:
            trees.append((Path(old), options.before, options.before_tests or options.tests))
        limits = []
        for folder, tests, selected in trees:
            make_tree(folder, tests)
            began = time.monotonic()
            if not passes(folder, selected, 3600):
                parser.error(f"the tests of {tests} fail without a mutant")
            limits.append(30 + 4 * (time.monotonic() - began))
        for module in options.modules:
            source = module.read_text(encoding="utf-8")
            mutants = list(mutate(ast.parse(source)))
            chosen = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
            survived = 0
            for line, change, text in sorted(chosen):
                for (folder, _, selected), limit in zip(trees, limits, strict=True):
                    (folder / module).write_text(text, encoding="utf-8")
                    killed = not passes(folder, selected, limit)
                    (folder / module).write_text(source, encoding="utf-8")
                    if killed:
                        break
                if folder == Path(new) and killed:
                    continue
                survived += 1
                lost += killed
                print(
                    f"{module}:{line}: {change[:120]}{': only the older tests kill it' if killed else ''}", flush=True
                )
            print(
                f"{module}: {len(chosen) - survived} of {len(chosen)} mutants killed ({len(mutants)} possible)",
                flush=True,
            )
    print(f"{lost} mutants are killed by the older tests only")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
