"""The process behind a test server: its folder, its log, its ports, and every way to end it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from .child import spawn
from .errors import NatsServerStartError
from .ports import HeldPort

__all__ = ["ServerProcess"]

_STOP_TIMEOUT = 5.0
_KILL_TIMEOUT = 10.0
_POLL_INTERVAL = 0.005
_LOG_TAIL_BYTES = 64 * 1024
_LOG_LINES_IN_ERRORS = 20


class ServerProcess:
    """Keep one nats-server's folder and port from its first launch to `discard`, over any number of launches."""

    def __init__(self, binary: Path, version: str) -> None:
        """Make the server's folder; nothing runs yet.

        Args:
            binary: The path of the nats-server binary.
            version: The version it reports.
        """
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
        """The client port; 0 before the first launch succeeded."""
        return urlsplit(self.endpoints["nats"][0]).port or 0 if self.endpoints else 0

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not ended; a paused one counts."""
        return bool(self._children) and self._children[-1].poll() is None

    def launch(self, arguments: Sequence[str], *, port: int, timeout: float) -> None:
        """Start a process and wait until clients can connect to it.

        Args:
            arguments: The command line, without the program, the port and the log.
            port: The client port; -1 lets the server take a free one.
            timeout: How long to wait, in seconds.

        Raises:
            NatsServerStartError: It ended, or was not ready in time; nothing is left running.
        """
        ports_dir = self.folder / "ports"
        if ports_dir.exists():
            shutil.rmtree(ports_dir)
        ports_dir.mkdir()
        command = [str(self.binary), *arguments, "--port", str(port), "--ports_file_dir", str(ports_dir)]
        if self._held_port is not None:
            self._held_port.make_way()
        # What is wrong with a configuration goes to standard error, before the log is open.
        with self._log_file.open("ab") as log:
            child = spawn([*command, "--log", str(self._log_file)], log=log)
        self._children[:] = [child]
        self.paused = False
        try:
            self.endpoints = self._wait_until_ready(child, ports_dir, timeout)
        except BaseException:
            self.kill()
            raise
        self._let_go_of_port()

    def _wait_until_ready(
        self, child: subprocess.Popen[bytes], ports_dir: Path, timeout: float
    ) -> Mapping[str, Sequence[str]]:
        deadline = time.monotonic() + timeout
        # nats-server writes the ports file last: JetStream has recovered, and every port listens.
        while (endpoints := _read_endpoints(ports_dir)) is None:
            try:
                status = child.wait(_POLL_INTERVAL)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise self._start_error(
                        f"was not ready within {timeout:g} s; if it only needs longer, raise start_timeout"
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
        """End the process at once, as a crash would, and keep its port from others."""
        for child in self._children:
            child.kill()
            child.wait(_KILL_TIMEOUT)
        self._hold_port()

    def terminate(self) -> None:
        """Let the process shut down in order, or kill it if that takes too long; keep its port from others."""
        for child in self._children:
            child.terminate()
            if sys.platform != "win32":
                child.send_signal(signal.SIGCONT)  # a paused process would not see the first signal
            try:
                child.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass  # kill() follows
        self.kill()

    def pause(self) -> None:
        """Freeze the process, and return when it is frozen."""
        child = self._running_child()
        if sys.platform == "win32":
            raise RuntimeError("Windows cannot pause a process")
        child.send_signal(signal.SIGSTOP)
        self.paused = True
        if sys.platform != "darwin":  # no waitid there before Python 3.13
            # The signal is only on its way so far: a thread may still be in the middle of an answer.
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen process go on."""
        child = self._running_child()
        if sys.platform == "win32":
            raise RuntimeError("Windows cannot pause a process")
        child.send_signal(signal.SIGCONT)
        self.paused = False

    def log(self) -> str:
        """Return the end of the log, of all launches so far."""
        if not self._log_file.exists():
            return ""
        with self._log_file.open("rb") as file:
            file.seek(max(0, self._log_file.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """End the process, and remove its folder; calling it again does nothing."""
        try:
            self.terminate()
        finally:
            self._let_go_of_port()
            self.discard()

    def _running_child(self) -> subprocess.Popen[bytes]:
        if not self.alive:
            raise RuntimeError("the server is not running")
        return self._children[-1]

    def _hold_port(self) -> None:
        if self._held_port is None and self.port:
            try:
                self._held_port = HeldPort(self.port)
            except OSError:
                pass  # somebody was faster; if they still have the port at the next launch, the server says so

    def _let_go_of_port(self) -> None:
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None


def _read_endpoints(ports_dir: Path) -> Mapping[str, Sequence[str]] | None:
    for path in ports_dir.glob("*.ports"):
        try:
            endpoints: Mapping[str, Sequence[str]] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # the server is in the middle of writing it
        return endpoints
    return None


def _discard(children: Sequence[subprocess.Popen[bytes]], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the owner ends; the server is not its own
    for child in children:
        child.kill()
        child.wait(_KILL_TIMEOUT)
    shutil.rmtree(folder)
