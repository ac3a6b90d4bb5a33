"""A server does not outlive the process that started it."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from probes import answers, closed_by_peer, dialled, on_linux, on_posix, refused


def run_script(script: str, *, code: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


@on_linux
def test_the_server_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = """
        import asyncio, sys
        from jetstream_ext.testing import NatsServer

        async def main():
            async with NatsServer() as server:
                print(server.url, flush=True)
                await asyncio.to_thread(sys.stdin.read)

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # the killed process cannot remove the store
    )
    with parent:
        assert parent.stdout is not None
        with dialled(parent.stdout.readline().strip()) as sock:
            assert answers(sock)
            parent.kill()
            assert closed_by_peer(sock)


@on_linux
def test_the_server_survives_the_thread_that_started_it() -> None:
    server = NatsServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    try:
        deadline = time.monotonic() + 10
        while task.exists():  # join() returns a little before the system's thread ends
            assert time.monotonic() < deadline
        with dialled(server.url) as sock:
            assert answers(sock)
    finally:
        server.stop()


def test_an_exit_without_stop_ends_the_server() -> None:
    script = """
        import atexit
        from jetstream_ext.testing import NatsServer

        server = NatsServer().start()
        atexit.register(lambda: print(server.running))
        print(server.url, server.store_dir, flush=True)
    """
    line, running = run_script(script, code=0).splitlines()
    url, store = line.split(maxsplit=1)
    assert running == "True"
    assert refused(url)
    assert not Path(store).parent.exists()


@on_posix
def test_exit_of_a_forked_process_does_not_end_the_server() -> None:
    script = """
        import os, sys, warnings
        from jetstream_ext.testing import NatsServer

        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from Python 3.12
        with NatsServer() as server:
            if os.fork() == 0:
                with NatsServer():
                    sys.exit()
            _, status = os.wait()
            assert status == 0 and server.running and server.store_dir.exists()
    """
    run_script(script, code=0)


@on_posix
def test_ctrl_c_interrupts_the_test_but_not_the_server() -> None:
    script = """
        import os, signal, sys
        from jetstream_ext.testing import NatsServer

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
        try:
            with NatsServer() as server:
                os.killpg(os.getpgid(0), signal.SIGINT)
                signal.pause()
        except KeyboardInterrupt:
            assert 'Trapped "interrupt"' not in server.log
            print("stopped" if not server.running else "running")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        start_new_session=True,
    )
    assert done.stdout == "stopped\n"
