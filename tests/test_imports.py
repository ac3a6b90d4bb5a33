"""Which modules may import which, and the names that `import jetstream_ext` exports."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

import jetstream_ext
from jetstream_ext import own_client
from jetstream_ext.client import connection

PACKAGE = Path(jetstream_ext.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PROTOCOL = sorted((PACKAGE / "protocol").rglob("*.py"))

IMPURE = {"asyncio", "socket", "time", "random", "secrets", "uuid", "nats", "pyspark", "threading", "os"}
SPARK = {"pyspark", "pyarrow", "pandas", "numpy"}
OWN = {"self", "cls", "other", "copy"}
CONNECTION = PACKAGE / "client" / "connection.py"
OWN_CLIENT = PACKAGE / "own_client.py"

# The names of the contract that exist so far; a new one is added here and in the documentation.
DOCUMENTED = {
    "AbandonedBatch",
    "AbandonedBatches",
    "AtomicBatch",
    "AtomicBatches",
    "BatchAck",
    "BatchFlowAck",
    "BatchFlowError",
    "BatchFlowGap",
    "BatchMessage",
    "DirectGet",
    "EndReason",
    "Entry",
    "FastPubAck",
    "FastPublisher",
    "Features",
    "GapMode",
    "InDoubt",
    "IngestProgress",
    "IngestReport",
    "MessageBatch",
    "NEVER",
    "SourceHealth",
    "SourceState",
    "StoredMsg",
    "TTL",
    "create_source_consumer",
    "ensure_stream",
    "features",
    "marker_reason",
    "ingest",
    "publish_atomic",
    "publish_atomic_many",
    "reset_consumer",
    "source_health",
    "ttl_headers",
    "watch_abandoned",
    "with_ttl",
}


AREAS = {
    name
    for name in ("arrow", "kv", "log", "objects", "otel", "spark")
    if importlib.util.find_spec(f"jetstream_ext.{name}")
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it, as absolute names."""
    package = ("jetstream_ext", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            for alias in node.names:
                yield f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "?"


def tops(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imported(path)}


# Which layer may import which is checked by import-linter (pyproject.toml). These are the rules about other modules.


def test_protocol_modules_use_no_io_clock_or_randomness() -> None:
    assert {name_of(path): tops(path) & IMPURE for path in PROTOCOL if tops(path) & IMPURE} == {}


def test_spark_and_arrow_are_imported_where_they_are_needed_only() -> None:
    outside = [path for path in MODULES if not {"spark", "cli", "arrow"} & set(path.relative_to(PACKAGE).parts)]
    found = {name_of(path): tops(path) & SPARK for path in outside if tops(path) & SPARK}
    # The second only inside of `if TYPE_CHECKING`.
    assert found == {"columns.py": {"pyarrow"}, "kv/entries.py": {"pyarrow"}}
    arrow = [path for path in MODULES if "arrow" in path.relative_to(PACKAGE).parts]
    assert {name for path in arrow for name in tops(path) & SPARK} == {"pyarrow"}


def test_the_library_does_not_import_its_testing_kit() -> None:
    library = [path for path in MODULES if not {"testing", "cli"} & set(path.relative_to(PACKAGE).parts)]
    assert library
    assert [
        name_of(path) for path in library if any(m.startswith("jetstream_ext.testing") for m in imported(path))
    ] == []


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public: the underscore keeps them apart from the fields


def private_accesses(source: str) -> Iterator[str]:
    """Accesses to private attributes, except to those of the module's own classes."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_classes = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "super()")} | NAMED_TUPLE
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            if node.attr not in of_classes and ast.unparse(node.value) not in OWN:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                continue
            of = ast.unparse(node.args[0])
            if name.value.startswith("_") and not name.value.endswith("__") and of not in OWN:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_search_for_private_attributes_finds_them() -> None:
    for source in ("nc._ps", "self._nc._ps", "getattr(nc, '_ps')"):
        assert len(list(private_accesses(source))) == 1, source
    assert not list(private_accesses("self._x, cls._y, x.__class__, x.y"))


def test_only_the_connection_module_touches_private_attributes_of_others() -> None:
    found = {name_of(path): list(private_accesses(path.read_text("utf-8"))) for path in MODULES if path != CONNECTION}
    # A subclass of nats-py's client calls what it overrides.
    found["own_client.py"] = [access for access in found["own_client.py"] if "super()" not in access]
    assert {name: accesses for name, accesses in found.items() if accesses} == {}


# The names under which connection.py and base_connection.py hold nats-py's objects.
HELD = {
    "nc": "client",
    "self.nc": "client",
    "Client": "client",
    "nc._ps": "parser",
    "parser": "parser",
    "self._parser": "parser",
}
GUARDS = {"_required()", "contextlib.suppress(AttributeError)"}


class Uses(ast.NodeVisitor):
    """Which attributes of nats-py's objects a module uses, outside of the blocks that expect an AttributeError."""

    def __init__(self, path: Path) -> None:
        self.of: dict[str, set[str]] = {"client": set(), "parser": set(), "stats": set(), "unknown": set()}
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def visit_With(self, node: ast.With) -> None:
        if GUARDS.isdisjoint(ast.unparse(item.context_expr) for item in node.items):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = ast.unparse(node.value)
        if owner := HELD.get(base):
            self.of[owner].add(node.attr)
        elif node.attr.startswith("_") and not node.attr.endswith("__") and base not in {*OWN, "super()"}:
            self.of["unknown"].add(f"{base}.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "getattr" and (owner := HELD.get(ast.unparse(node.args[0]))):
            self.of[owner] |= {name.value for name in node.args[1:2] if isinstance(name, ast.Constant)}
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if ast.unparse(node.value).endswith("stats"):
            self.of["stats"].add(ast.literal_eval(node.slice))
        self.generic_visit(node)


def test_every_internal_of_nats_py_that_is_used_is_checked() -> None:
    """The fallback needs what base_connection.py uses, so only the rest decides about it."""
    fast, both = Uses(CONNECTION).of, Uses(CONNECTION.with_name("base_connection.py")).of
    assert {
        "client": fast["client"] - both["client"],
        "parser": fast["parser"],
        "stats": fast["stats"] - both["stats"],
        "unknown": fast["unknown"],
    } == {
        "client": set(connection._CLIENT),
        "parser": set(connection._PARSER),
        "stats": connection._STATS,
        "unknown": set(),
    }
    assert not [name for name in both["client"] if name.startswith("_")]


def test_every_internal_that_our_own_client_inherits_is_checked() -> None:
    (own,) = (
        node
        for node in ast.parse(OWN_CLIENT.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "OwnClient"
    )
    inherited, used = set(vars(Client())), {"_transport"}  # of `is_encrypted`

    class Inherited(Uses):
        def visit_Attribute(self, node: ast.Attribute) -> None:
            if ast.unparse(node.value) == "self" and node.attr in inherited:
                used.add(node.attr)
            self.generic_visit(node)

    object.__new__(Inherited).visit(own)
    assert used == set(own_client._TLS)


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, jetstream_ext\n"
        "ours = {name for name in sys.modules if name.startswith('jetstream_ext.')}\n"
        "dir(jetstream_ext)\n"
        "from jetstream_ext import *\n"
        "heavy = {'pyspark', 'pyarrow', 'opentelemetry', 'pandas', 'numpy', 'rich', 'click', 'hypothesis', 'pytest'}\n"
        "OUTER = ('jetstream_ext.spark.', 'jetstream_ext.testing.', 'jetstream_ext.cli.')\n"
        "ours |= {name for name in sys.modules if f'{name}.'.startswith(OUTER)}\n"
        "print(sorted(heavy & set(sys.modules)) + sorted(ours))\n"
    )
    # Its own interpreter: the tests have loaded all of these themselves.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def run(code: str) -> str:
    """Run a program in an interpreter of its own, because the tests have imported everything; return the last line of it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).splitlines()[-1]


def test_a_missing_extra_is_named_where_its_area_is_used() -> None:
    for package, use, text in (
        (
            "pyarrow",
            "jsx.arrow",
            "ImportError: jetstream_ext.arrow needs pyarrow: pip install 'nats-jetstream-ext[arrow]'",
        ),
        (
            "opentelemetry",
            "jsx.otel",
            "ImportError: jetstream_ext.otel needs opentelemetry-api: pip install 'nats-jetstream-ext[otel]'",
        ),
        ("pyspark", "jsx.spark.register(None)", "pip install 'nats-jetstream-ext[spark]'"),
    ):
        missing = f"import sys; sys.modules[{package!r}] = None\nimport jetstream_ext as jsx\njsx.kv, jsx.log\n"
        assert text in run(f"{missing}{use}"), package
        # Help and completion import every name that is listed.
        assert run(f"{missing}import inspect; inspect.getmembers(jsx); print('arrow' in dir(jsx))") == str(
            package != "pyarrow"
        )


def test_an_area_is_an_attribute_and_is_loaded_when_it_is_used() -> None:
    for area in AREAS:
        program = (
            f"import sys, jetstream_ext as jsx; before = 'jetstream_ext.{area}' in sys.modules; jsx.{area}.__all__; "
        )
        assert run(f"{program}print(before, 'jetstream_ext.{area}' in sys.modules, '{area}' in dir(jsx))") == (
            "False True True"
        ), area


def test_only_public_names_are_listed() -> None:
    """Also after internal modules, which become attributes of the package, were imported."""
    names = {module: {name for name in dir(module) if not name.startswith("@")} for module in public_modules()}
    listed = {module.__name__: {name for name in names[module] if not re.fullmatch("__.*__", name)} for module in names}
    assert listed.pop("jetstream_ext") == DOCUMENTED | AREAS | {"errors"}
    assert listed == {module.__name__: set(module.__all__) for module in names if module is not jetstream_ext}


def test_every_error_class_is_exported() -> None:
    errors = jetstream_ext.errors
    defined = {name for name, thing in vars(errors).items() if getattr(thing, "__module__", "") == errors.__name__}
    classes = {name for name in defined if isinstance(getattr(errors, name), type)}
    assert set(errors.__all__) == classes | {"Outcome"}


def test_the_exported_names_are_the_documented_ones() -> None:
    assert set(jetstream_ext.__all__) == DOCUMENTED
    assert len(jetstream_ext.__all__) == len(DOCUMENTED)


def test_nothing_else_is_exported() -> None:
    for name in DOCUMENTED:
        assert getattr(jetstream_ext, name) is not None, name  # each is imported when it is used
    public = {
        name
        for name, value in vars(jetstream_ext).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == DOCUMENTED
    # pytest adds names with an @ to every module of an installed distribution that has a plugin.
    names = {name: value for name, value in vars(jetstream_ext).items() if not name.startswith("@")}
    modules = {name for name, value in names.items() if isinstance(value, types.ModuleType)}
    inside = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()}
    assert modules <= inside, "a foreign module became an attribute of the package"


def public_modules() -> Iterator[types.ModuleType]:
    yield jetstream_ext
    for name in ("errors", "testing", "testing.reference", *sorted(AREAS)):
        yield importlib.import_module(f"jetstream_ext.{name}")


def declared() -> dict[str, str]:
    """The names that a type checker sees in the package, and their modules."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    checking, running = (node for node in tree.body if isinstance(node, ast.If))
    # Pyright takes no other name.
    assert (ast.unparse(checking.test), ast.unparse(running.test)) == ("TYPE_CHECKING", "not TYPE_CHECKING")
    imports = [node for node in checking.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(checking.body)
    return {alias.asname or alias.name: f"{node.module}" for node in imports for alias in node.names}


def test_a_name_is_imported_from_the_module_that_a_type_checker_sees() -> None:
    modules = declared()
    assert {area for area in modules if modules[area] == "jetstream_ext"} == AREAS | {"errors"}
    modules = {name: module for name, module in modules.items() if module != "jetstream_ext"}
    assert modules.keys() == DOCUMENTED
    for name, module in modules.items():
        assert getattr(jetstream_ext, name) is getattr(importlib.import_module(module), name), name
    assert "__version__" in dir(jetstream_ext)


def test_a_type_checker_knows_every_name_that_the_documentation_uses() -> None:
    """Pyright knows a submodule only if the package binds it, and any name if it sees a module's `__getattr__`."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/*.py")]
    used = {name for page in pages for name in re.findall(r"\bjsx\.(\w+)", page.read_text(encoding="utf-8"))}
    assert {"errors", "AtomicBatch"} <= used
    assert used <= {*declared(), "__version__"}


def test_star_import_gives_exactly_all() -> None:
    space: dict[str, object] = {}
    exec("from jetstream_ext import *", space)
    space.pop("__builtins__")
    assert set(space) == DOCUMENTED


def public_things() -> Iterator[tuple[str, type | types.FunctionType]]:
    """The classes and functions that the public modules define."""
    for module in ("", ".arrow", ".errors", ".kv", ".log", ".spark", ".testing"):
        public = importlib.import_module(f"jetstream_ext{module}")
        here = [name for name, thing in vars(public).items() if getattr(thing, "__module__", "") == public.__name__]
        for name in getattr(public, "__all__", here):
            if isinstance(thing := getattr(public, name), (type, types.FunctionType)):
                yield name, thing


def test_every_public_name_has_a_docstring() -> None:
    for name, thing in public_things():
        assert thing.__module__.startswith("jetstream_ext."), name
        assert thing.__name__ == name
        text = inspect.getdoc(thing) or ""
        assert text, name
        for member, value in vars(thing).items():
            if isinstance(value, (types.FunctionType, classmethod, staticmethod)) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"
            elif isinstance(value, property) and not member.startswith("_"):
                assert inspect.getdoc(value) or member in text, f"{name}.{member}"


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert jetstream_ext.__version__ == importlib.metadata.version("nats-jetstream-ext")
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        jetstream_ext.absent  # type: ignore[attr-defined]  # noqa: B018
