"""The fixtures of the pytest plugin, in pytest runs of their own, which find it by its entry point."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHARED_SERVER = """
import socket
ports = set()

def test_first(nats_server):
    ports.add(nats_server.port)
    socket.create_connection(('127.0.0.1', nats_server.port), timeout=10).close()

def test_second(nats_server):
    ports.add(nats_server.port)
    assert len(ports) == 1
"""

REFERENCE_SERVER_AND_CLUSTER = """
import asyncio, nats, pytest

async def work(url, replicas):
    nc = await nats.connect(url, connect_timeout=10)
    js = nc.jetstream()
    with pytest.raises(nats.js.errors.NotFoundError):
        await js.stream_info("S")
    await js.add_stream(name="S", subjects=["s"], num_replicas=replicas)
    while True:
        try:
            await js.publish("s", b"x")
            break
        except nats.js.errors.NoStreamResponseError:
            assert replicas > 1  # the server of this connection does not know the leader yet
            await asyncio.sleep(0.02)
    await nc.close()

def test_first(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_second(reference_server):
    asyncio.run(work(reference_server.url, 1))

def test_cluster(nats_cluster):
    asyncio.run(work(nats_cluster.url, 3))
"""


ASYNC_TEST = """
import nats, pytest

@pytest.mark.asyncio
async def test_publish(nats_server, reference_server):
    for server in (nats_server, reference_server):
        nc = await nats.connect(server.url, connect_timeout=10)
        await nc.jetstream().add_stream(name="S", subjects=["s"])
        await nc.close()
"""

NOT_USED = """
import sys

def test_nothing_is_imported(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("jetstream_ext.testing.pytest_plugin")
    ours = {name for name in sys.modules if name.partition(".")[0] in ("jetstream_ext", "nats", "orjson")}
    assert ours == {"jetstream_ext", "jetstream_ext.testing", "jetstream_ext.testing.pytest_plugin"}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry points of pyproject.toml, as the installed package has them."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "plugin_of_the_checkout-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-the-checkout\nVersion: 1.0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["pytest11"]
    lines = [f"{name} = {module}" for name, module in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return folder


# Every warning is an error, except pytest-asyncio's about a setting that a project may leave out.
WARNINGS = ["-W", "error", "-W", "ignore:The configuration option"]


def run_pytest(installed: Path, folder: Path, *options: str) -> str:
    """Run the tests in a folder, and return the report."""
    path = os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-m", "pytest", "-q", *WARNINGS, "-p", "no:cacheprovider", *options, str(folder)],
        env=os.environ | {"PYTHONPATH": path}, cwd=installed, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


EXPLICIT = 'pytest_plugins = ["jetstream_ext.testing.pytest_plugin"]\n'


def test_an_explicit_opt_in_does_not_register_the_plugin_twice(installed: Path, tmp_path: Path) -> None:
    write(tmp_path / "conftest.py", EXPLICIT)
    write(tmp_path / "test_it.py", SHARED_SERVER)
    report = run_pytest(installed, tmp_path, "-c", os.devnull, f"--rootdir={tmp_path}")
    assert "2 passed" in report, report


def test_reference_server_is_empty_for_each_test_and_cluster_has_three_replicas(
    installed: Path, tmp_path: Path
) -> None:
    write(tmp_path / "test_it.py", REFERENCE_SERVER_AND_CLUSTER)
    report = run_pytest(installed, tmp_path, "-c", os.devnull, f"--rootdir={tmp_path}")
    assert "3 passed" in report, report


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_the_fixtures_work_in_nested_folders_with_asyncio_and_several_processes(
    installed: Path, tmp_path: Path, mode: str
) -> None:
    write(tmp_path / "elsewhere" / "pytest.ini", f"[pytest]\nasyncio_mode = {mode}\n")
    for name in ("one", "two"):
        write(tmp_path / "project" / name / "conftest.py", "")
        write(tmp_path / "project" / name / f"test_{name}.py", ASYNC_TEST)
    report = run_pytest(
        installed,
        tmp_path / "project",
        "-c",
        str(tmp_path / "elsewhere" / "pytest.ini"),
        "-n",
        "2",
        "--import-mode=importlib",
    )
    assert "2 passed" in report, report


def test_a_project_that_does_not_use_the_fixtures_imports_only_the_plugin(installed: Path, tmp_path: Path) -> None:
    write(tmp_path / "test_it.py", NOT_USED)
    report = run_pytest(installed, tmp_path, "-c", os.devnull, f"--rootdir={tmp_path}")
    assert "1 passed" in report, report


def test_without_autoload_the_explicit_opt_in_works(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    write(tmp_path / "test_it.py", "def test_it(reference_server): assert reference_server.url")
    report = run_pytest(
        installed, tmp_path, "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "jetstream_ext.testing.pytest_plugin"
    )
    assert "1 passed" in report, report
