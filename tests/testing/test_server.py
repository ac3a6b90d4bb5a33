"""`NatsServer` with real processes: start, stop and configuration."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nats.js.errors
import pytest

from jetstream_ext.testing import NatsServer, NatsServerStartError, process

sys.path.insert(0, str(Path(__file__).parent))

from clients import connected
from probes import on_posix, refused

# Starting and stopping


async def test_url_works_with_nats_py_and_jetstream(server: NatsServer, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    async with connected(server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name=name, subjects=[name])
        ack = await js.publish(name, b"payload")
        assert (await js.get_msg(name, ack.seq)).data == b"payload"
        assert nc._server_info["version"] == server.version


@pytest.mark.parametrize("version", ["2.10.26", None])
async def test_stream_can_be_created_right_after_the_last_one_was_deleted(version: str | None) -> None:
    """A server removes the empty folder of all streams with a delay; `NatsServer` must prevent that."""
    with NatsServer(version=version) as server:
        async with connected(server.url) as nc:
            js = nc.jetstream()
            for _ in range(200):
                await js.add_stream(name="S", subjects=["s"])
                await js.delete_stream("S")
            await js.add_stream(name="S", subjects=["s"])
            await js.publish("s", b"payload")
        server.restart()
        async with connected(server.url) as nc:
            assert [info.config.name for info in await nc.jetstream().streams_info()] == ["S"]


def test_listens_on_the_loopback_interface_only(server: NatsServer) -> None:
    assert server.url == f"nats://127.0.0.1:{server.port}"
    assert list(server.endpoints) == ["nats"]


def test_stop_ends_the_process_and_removes_the_store() -> None:
    server = NatsServer()
    with contextlib.suppress(ZeroDivisionError), server:
        store, url = server.store_dir, server.url
        assert store.is_dir()
        assert server.running
        with pytest.raises(RuntimeError, match="already started"):
            server.start()
        raise ZeroDivisionError
    assert not server.running
    assert not store.parent.exists()
    assert refused(url)
    assert "Server is ready" in server.log
    assert "Exiting" in server.log
    with server:  # again, with an empty store
        assert server.store_dir != store
    server.stop()


def test_server_that_is_not_started_is_reported() -> None:
    server = NatsServer()
    assert "stopped" in repr(server)
    for use in (lambda: server.url, lambda: server.port, server.kill, server.restart, server.pause):
        with pytest.raises(RuntimeError, match="not started"):
            use()


def test_stops_a_paused_server_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_STOP_TIMEOUT", 60.0)
    with NatsServer() as server:
        server.pause()
        began = time.monotonic()
    assert time.monotonic() - began < 30


async def test_name_and_port_can_be_chosen() -> None:
    with NatsServer() as first:
        port = first.port
    async with NatsServer(name="chosen", port=port) as server, connected(server.url) as nc:
        assert server.port == port
        assert nc._server_info["server_name"] == "chosen"


def test_port_in_use_is_reported(server: NatsServer) -> None:
    with pytest.raises(NatsServerStartError, match="address already in use"):
        NatsServer(port=server.port).start()


@on_posix
def test_repr_names_the_state(own_server: NatsServer) -> None:
    assert "running" in repr(own_server)
    own_server.pause()
    assert "paused" in repr(own_server)
    own_server.kill()
    assert "killed" in repr(own_server)


# In a coroutine


async def test_async_with_does_not_block_the_event_loop() -> None:
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


async def test_cancelled_start_leaves_no_process() -> None:
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


# Configuration


async def test_config_is_used(tmp_path: Path) -> None:
    (tmp_path / "included.conf").write_text("max_payload: 4096")
    (tmp_path / "server.conf").write_text("include included.conf")
    config = "max_payload: 2048\njetstream { max_mem: 1MB }\nport: 1\n"
    async with NatsServer(config=config) as server, connected(server.url) as nc:
        assert nc.max_payload == 2048
        assert (await nc.jetstream().account_info()).limits is not None
        assert server.port != 1
        assert (server.store_dir / "jetstream").is_dir()
    async with NatsServer(config=tmp_path / "server.conf", jetstream=False) as server, connected(server.url) as nc:
        assert nc.max_payload == 4096
        with pytest.raises(nats.js.errors.ServiceUnavailableError):
            await nc.jetstream().account_info()


def test_bad_config_error_shows_the_log_and_leaves_no_process() -> None:
    server = NatsServer(config="no_such_option: 1")
    with pytest.raises(NatsServerStartError, match=r'exit status 1.*check config(?s:.*)unknown field "no_such_option"'):
        server.start()
    assert not server.running
    assert "no_such_option" in server.log
