"""NatsServer and NatsCluster, with real processes."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from jetstream_ext.testing import NatsCluster, NatsServer, NatsServerStartError, process

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(PR_SET_PDEATHSIG) or /proc")
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals or fork")


@contextlib.asynccontextmanager
async def connected(url: str | list[str], **options: Any) -> AsyncIterator[Client]:
    nc = await nats.connect(url, connect_timeout=10, reconnect_time_wait=0.05, max_reconnect_attempts=-1, **options)
    try:
        yield nc
    finally:
        await nc.close()


@contextlib.contextmanager
def dialled(url: str) -> Iterator[socket.socket]:
    """A bare connection, past the server's greeting."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as sock:
        assert sock.recv(4096).startswith(b"INFO ")
        yield sock


def answers(sock: socket.socket) -> bool:
    sock.sendall(b"PING\r\n")
    return b"PONG" in sock.recv(4096)


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


def refused(url: str) -> bool:
    try:
        with dialled(url):
            return False
    except ConnectionRefusedError:
        return True


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """A server that the test may kill."""
    with NatsServer() as server:
        yield server


# Starting and stopping


async def test_url_works_with_nats_py_and_jetstream(server: NatsServer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    async with connected(server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name=name, subjects=[name])
        ack = await js.publish(name, b"payload")
        assert (await js.get_msg(name, ack.seq)).data == b"payload"
        assert nc._server_info["version"] == server.version


def test_listens_on_the_loopback_interface_only(server: NatsServer) -> None:
    assert server.url == f"nats://127.0.0.1:{server.port}"
    assert list(server.endpoints) == ["nats"]


def test_stop_ends_the_process_and_removes_the_store() -> None:
    server = NatsServer().start()
    store, url = server.store_dir, server.url
    assert store.is_dir()
    assert server.running
    server.stop()
    assert not server.running
    assert not store.parent.exists()
    assert refused(url)
    server.stop()


def test_log_is_readable_during_and_after_the_run() -> None:
    with NatsServer() as server:
        assert "Server is ready" in server.log
    assert "Server is ready" in server.log
    assert "Exiting" in server.log


def test_can_be_started_again_with_an_empty_store() -> None:
    server = NatsServer()
    with server:
        first = server.store_dir
    with server:
        assert server.store_dir != first


def test_refuses_to_start_twice(own_server: NatsServer) -> None:
    with pytest.raises(RuntimeError, match="started already"):
        own_server.start()
    assert own_server.running


@pytest.mark.parametrize(
    "use", [lambda s: s.url, lambda s: s.port, lambda s: s.kill(), lambda s: s.restart(), lambda s: s.pause()]
)
def test_using_a_server_that_is_not_started_says_so(use: Callable[[NatsServer], object]) -> None:
    with pytest.raises(RuntimeError, match="not started"):
        use(NatsServer())


def test_stops_when_the_body_raises() -> None:
    with contextlib.suppress(ZeroDivisionError), NatsServer() as server:
        url, folder = server.url, server.store_dir.parent
        raise ZeroDivisionError
    assert refused(url)
    assert not folder.exists()


def test_stops_a_paused_server_without_delay() -> None:
    with NatsServer() as server:
        server.pause()
        began = time.monotonic()
    assert time.monotonic() - began < process._STOP_TIMEOUT


async def test_without_jetstream() -> None:
    async with NatsServer(jetstream=False) as server, connected(server.url) as nc:
        with pytest.raises(nats.js.errors.ServiceUnavailableError):
            await nc.jetstream().account_info()


async def test_name_and_port_can_be_chosen() -> None:
    with NatsServer() as first:
        port = first.port
    async with NatsServer(name="chosen", port=port) as server, connected(server.url) as nc:
        assert server.port == port
        assert nc._server_info["server_name"] == "chosen"


def test_a_port_in_use_is_reported(server: NatsServer) -> None:
    with pytest.raises(NatsServerStartError, match="address already in use"):
        NatsServer(port=server.port).start()


@pytest.mark.parametrize(
    ("server", "state"), [(NatsServer(), "stopped"), (NatsCluster(), "NatsCluster")], ids=["server", "cluster"]
)
def test_repr_before_the_start(server: object, state: str) -> None:
    assert state in repr(server)


@on_posix
def test_repr_names_the_state(own_server: NatsServer) -> None:
    assert "running" in repr(own_server)
    own_server.pause()
    assert "paused" in repr(own_server)
    own_server.kill()
    assert "killed" in repr(own_server)


# Configuration


async def test_config_text() -> None:
    config = "max_payload: 2048\njetstream { max_mem: 1MB }\nport: 1\n"
    async with NatsServer(config=config) as server, connected(server.url) as nc:
        assert nc.max_payload == 2048
        assert (await nc.jetstream().account_info()).limits is not None
        assert server.port != 1
        assert (server.store_dir / "jetstream").is_dir()


async def test_config_file(tmp_path: Path) -> None:
    (tmp_path / "included.conf").write_text("max_payload: 4096")
    (tmp_path / "server.conf").write_text("include included.conf")
    async with NatsServer(config=tmp_path / "server.conf") as server, connected(server.url) as nc:
        assert nc.max_payload == 4096


def test_a_bad_config_shows_the_log_and_leaves_nothing() -> None:
    server = NatsServer(config="no_such_option: 1")
    with pytest.raises(NatsServerStartError, match=r'exit status 1.*check config(?s:.*)unknown field "no_such_option"'):
        server.start()
    assert not server.running
    assert "no_such_option" in server.log


# Crashes and pauses


async def test_kill_and_restart_keep_port_and_data(own_server: NatsServer) -> None:
    port, store = own_server.port, own_server.store_dir
    async with connected(own_server.url) as nc:
        await nc.jetstream().add_stream(name="S", subjects=["s"])
        await nc.jetstream().publish("s", b"kept")
    own_server.kill()
    assert not own_server.running
    assert refused(own_server.url)
    own_server.kill()
    own_server.restart()
    assert own_server.running
    assert (own_server.port, own_server.store_dir) == (port, store)
    async with connected(own_server.url) as nc:
        assert (await nc.jetstream().get_msg("S", 1)).data == b"kept"


async def test_clients_reconnect_after_a_restart(own_server: NatsServer) -> None:
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()

    async with connected(own_server.url, reconnected_cb=reconnected) as nc:
        await asyncio.to_thread(own_server.restart)
        async with asyncio.timeout(10):
            await back.wait()
        await nc.flush(timeout=10)


@on_linux
def test_nobody_gets_the_port_of_a_killed_server(own_server: NatsServer) -> None:
    own_server.kill()
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.1", own_server.port))
    own_server.restart()


@on_posix
def test_pause_and_resume(own_server: NatsServer) -> None:
    with dialled(own_server.url) as sock:
        for _ in range(2):
            own_server.pause()
            assert not own_server.running
            sock.sendall(b"PING\r\n")
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                sock.recv(4096)
            sock.settimeout(10)
            own_server.resume()
            assert own_server.running
            assert b"PONG" in sock.recv(4096)


@on_posix
def test_a_paused_server_can_be_killed_and_restarted(own_server: NatsServer) -> None:
    own_server.pause()
    own_server.kill()
    with pytest.raises(RuntimeError, match="not running"):
        own_server.pause()
    own_server.restart()
    own_server.pause()
    own_server.restart()
    with dialled(own_server.url) as sock:
        assert answers(sock)


# In a coroutine


async def test_async_with_leaves_the_loop_free() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticker = asyncio.create_task(tick())
    async with NatsServer() as server:
        assert ticks > 10
        url = server.url
    ticker.cancel()
    assert refused(url)


async def test_cancelling_the_start_leaves_nothing() -> None:
    server = NatsServer()

    async def use() -> None:
        async with server:
            pytest.fail("the start was cancelled")

    task = asyncio.create_task(use())
    while not server.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.running


# The end of the parent process


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
        env=os.environ | {"TMPDIR": str(tmp_path)},  # nobody is left to remove the store
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
def test_a_forked_process_leaves_the_server_to_its_parent() -> None:
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
def test_ctrl_c_reaches_the_context_manager_and_not_the_server() -> None:
    script = """
        import os, signal, sys
        from jetstream_ext.testing import NatsServer

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


# Clusters


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    with NatsCluster() as cluster:
        yield cluster


def test_a_cluster_elects_a_leader(cluster: NatsCluster) -> None:
    assert len(cluster.servers) == 3
    assert cluster.wait_ready() in cluster.servers
    assert cluster.urls == [server.url for server in cluster.servers]
    assert cluster.url in cluster.urls


async def test_a_stream_with_three_replicas_can_be_made_at_once() -> None:
    async with NatsCluster(config="max_payload: 2048") as cluster, connected(cluster.urls) as nc:
        await nc.jetstream().add_stream(name="S", subjects=["s"], num_replicas=3)
        assert nc.max_payload == 2048


async def test_a_stream_with_three_replicas_survives_a_kill(
    cluster: NatsCluster, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    async with connected(cluster.urls) as nc:
        js = nc.jetstream()
        await js.add_stream(name=name, subjects=[name], num_replicas=3)
        await js.publish(name, b"kept")
        victim = cluster.wait_ready()
        victim.kill()
        assert cluster.wait_ready() is not victim
        assert cluster.url != victim.url
        async with asyncio.timeout(60):
            while True:
                try:
                    await js.publish(name, b"after", timeout=1)
                    break
                except (nats.errors.Error, nats.js.errors.Error):
                    pass  # the stream elects a leader of its own, some time after the meta group
            assert (await js.get_msg(name, 1)).data == b"kept"
    victim.restart()
    cluster.wait_ready()


def test_a_cluster_without_a_leader_is_reported() -> None:
    with NatsCluster(2) as cluster:
        cluster.servers[1].kill()
        with pytest.raises(NatsServerStartError, match=r"cluster of 2 has no JetStream leader(?s:.*)killed"):
            cluster.wait_ready(timeout=0.5)


def test_a_cluster_that_cannot_start_leaves_nothing() -> None:
    cluster = NatsCluster(config="no_such_option: 1")
    with pytest.raises(NatsServerStartError, match="no_such_option"):
        cluster.start()
    with pytest.raises(RuntimeError, match="not started"):
        cluster.servers  # noqa: B018


def test_a_stopped_cluster_can_be_started_again() -> None:
    cluster = NatsCluster(2)
    with cluster:
        urls = cluster.urls
        with pytest.raises(RuntimeError, match="started already"):
            cluster.start()
    assert all(refused(url) for url in urls)
    cluster.stop()
    with cluster:
        assert cluster.wait_ready().running


def test_one_server_is_not_a_cluster() -> None:
    with pytest.raises(ValueError, match="NatsServer"):
        NatsCluster(1)
