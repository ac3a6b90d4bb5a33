"""Child processes that cannot outlive this one."""

import functools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import BinaryIO

__all__ = ["spawn"]

# Run by a small Python that then becomes the server, so that nothing of ours runs between fork and exec:
# `preexec_fn` would, and can deadlock when other threads hold locks.
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


def spawn(command: Sequence[str], *, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a child process that is killed when this process ends, however it ends.

    On Linux that includes SIGKILL. Elsewhere it takes a normal exit: see `NatsServer`.

    Args:
        command: The absolute path of the program, and its arguments.
        log: An open file that receives the child's standard output and error.

    Returns:
        The process. It is in a session of its own, so Ctrl-C in the terminal does not reach it.
    """
    parent = os.getpid()
    if sys.platform == "linux" and sys.executable:
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(parent), *command]

    return _parent_thread(parent).start(command, log)


class _ParentThread:
    """Start child processes from one thread that lives until this process ends.

    Linux sends a child its parent-death signal when the *thread* that forked it ends, so a server
    started on a short-lived thread, such as one behind `asyncio.to_thread`, would die with that thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A daemon, because it has to outlive even the atexit handlers, which may still use a server.
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
                child.set_exception(error)  # for the caller, on its thread

        self._jobs.put(job)
        return child.result()

    def _run(self) -> None:
        while True:
            self._jobs.get()()


@functools.cache
def _parent_thread(pid: int) -> _ParentThread:
    # One per process: a forked process has a new pid, and none of the threads.
    return _ParentThread()
