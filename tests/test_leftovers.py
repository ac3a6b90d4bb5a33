"""A test that leaves something behind fails itself, at its own end, and the next one is not disturbed."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio
import threading

import leftovers
import nats
import pytest

leftovers.GRACE = 1
kept = []


async def ignore(message):
    pass


async def test_leaves_a_task():
    kept.append(asyncio.create_task(asyncio.Event().wait()))


async def test_leaves_a_client(server):
    kept.append(await nats.connect(server.url))


def test_leaves_a_client_of_its_own_loop(server):
    asyncio.run(nats.connect(server.url))


def test_leaves_a_loop():
    kept.append(asyncio.new_event_loop())


def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_leaves_a_task_of_a_closed_loop():
    loop = asyncio.new_event_loop()
    kept.append(loop.create_task(asyncio.sleep(1)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def test_leaves_nothing(nc, js, own_server):
    await js.account_info()
    lost = await nats.connect(own_server.url, reconnect_time_wait=0.01)
    own_server.kill()
    while not lost.is_reconnecting:
        await asyncio.sleep(0.01)
    await lost.close()


async def test_leaves_a_client_that_is_open_again(own_server, monkeypatch):
    nc = await nats.connect(own_server.url, reconnect_time_wait=0.01)
    connect, begun = nats.NATS._process_connect_init, asyncio.Event()

    async def loses_a_cancellation(self):
        if begun.is_set():
            return await connect(self)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError

    monkeypatch.setattr(nats.NATS, "_process_connect_init", loses_a_cancellation)
    own_server.restart()
    async with asyncio.timeout(30):
        await begun.wait()
        await nc.close()
        while not nc.is_connected:
            await asyncio.sleep(0.01)


def test_leaves_nothing_in_a_loop_of_its_own(server):
    async def run():
        nc = await nats.connect(server.url)
        await nc.subscribe("a", cb=ignore)
        await nc.close()

    asyncio.run(run())


@pytest.fixture
async def cancelled_at_its_end():
    yield
    raise asyncio.CancelledError


async def test_has_a_fixture_that_is_cancelled(monkeypatch, cancelled_at_its_end):
    monkeypatch.setattr(leftovers, "PATCHED", True, raising=False)


async def test_after_a_cancelled_fixture(monkeypatch):
    assert not hasattr(leftovers, "PATCHED")
    monkeypatch.setattr(leftovers, "PATCHED", True, raising=False)


def test_after_two_of_them():
    assert not hasattr(leftovers, "PATCHED")


@pytest.fixture(scope="module")
def shared(server):
    return asyncio.run(nats.connect(server.url))


def test_uses_a_fixture(shared):
    pass


def test_is_the_last_of_a_fixture_that_leaves_a_client(shared):
    pass
"""
LEFT = {
    "test_leaves_a_task": "task Event.wait",
    "test_leaves_a_client": "a client of nats-py that is not closed (Client)",
    "test_leaves_a_client_of_its_own_loop": "a client of nats-py that is not closed (Client)",
    "test_leaves_a_loop": "event loop",
    "test_leaves_a_thread": "thread Thread-",
    "test_leaves_a_task_of_a_closed_loop": "task sleep of a closed event loop",
    "test_has_a_fixture_that_is_cancelled": "CancelledError",
    "test_is_the_last_of_a_fixture_that_leaves_a_client": "the fixture shared left behind: a client of nats-py",
}


def test_what_a_test_leaves_behind_fails_that_test(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--confcutdir=/",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-n",
        "0",
        tmp_path,
    ]
    conftest = ["--rootdir", tmp_path, "-c", os.devnull, "-o", "asyncio_mode=auto", "-p", "conftest", "-rE", "-q"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([*command, *conftest], env=environment, capture_output=True, text=True, timeout=300)
    assert f"14 passed, {len(LEFT)} errors" in done.stdout, done.stdout + done.stderr
    for name, left in LEFT.items():
        report = done.stdout.partition(f"at teardown of {name} _")[2].partition("___ ERROR")[0]
        assert left in report, done.stdout
