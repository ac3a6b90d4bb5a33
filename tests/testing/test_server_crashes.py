"""`NatsServer`: kill, restart and pause."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from clients import connected
from probes import answers, dialled, on_linux, on_posix, refused


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
        async with asyncio.timeout(60):
            await back.wait()
        await nc.flush(timeout=60)


@on_linux
def test_port_of_a_killed_server_stays_reserved(own_server: NatsServer) -> None:
    own_server.kill()
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind(("127.0.0.1", own_server.port))
    own_server.restart()


@on_posix
def test_paused_server_answers_after_resume(own_server: NatsServer) -> None:
    with dialled(own_server.url) as sock:
        for _ in range(2):
            own_server.pause()
            assert not own_server.running
            sock.sendall(b"PING\r\n")
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                sock.recv(4096)
            sock.settimeout(60)
            own_server.resume()
            assert own_server.running
            assert b"PONG" in sock.recv(4096)


@on_posix
def test_paused_server_can_be_killed_and_restarted(own_server: NatsServer) -> None:
    own_server.pause()
    own_server.kill()
    with pytest.raises(RuntimeError, match="not running"):
        own_server.pause()
    own_server.restart()
    own_server.pause()
    own_server.restart()
    with dialled(own_server.url) as sock:
        assert answers(sock)
