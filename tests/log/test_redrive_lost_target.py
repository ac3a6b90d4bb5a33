"""What redrive does if the target has lost its last messages, and has stored others at their sequences since."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from clients import quiet
from nats.js import JetStreamContext

from jetstream_ext import DirectGet, errors
from jetstream_ext.log import OffsetStore, Redriven, redrive
from jetstream_ext.log.redriving import _Redriving
from jetstream_ext.testing import NatsServer

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Bury = Callable[..., Awaitable[tuple[str, str, str]]]


@pytest.fixture
def server() -> Any:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:

    nc = await nats.connect(
        server.url, error_cb=quiet, connect_timeout=10, max_reconnect_attempts=-1, reconnect_time_wait=0.05
    )
    yield nc.jetstream(timeout=10)
    await nc.close()


async def restart(server: NatsServer, js: JetStreamContext, stream: str) -> None:
    await asyncio.to_thread(server.restart)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                await js.stream_info(stream)
                return
            await asyncio.sleep(0.05)


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data async for message in DirectGet(js, stream).scan()]


async def die(*_: Any) -> None:
    raise KeyboardInterrupt


async def test_a_target_that_lost_its_last_messages_and_has_grown_since(
    server: NatsServer,
    js: JetStreamContext,
    bury: Bury,
    offsets: OffsetStore,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The letters are below the sequence where the look begins, or were lost with the others; that is not known."""
    for step in ("_send", "_end"):  # before the letters are sent, or after
        stream, dead, source = await bury(3, duplicate_window=0.1)
        (folder,) = server.store_dir.glob(f"**/streams/{source}")
        created = (await js.stream_info(source)).created
        was = getattr(_Redriving, step)

        async def lose(
            self: _Redriving,
            letters: Any,
            source: str = source,
            step: str = step,
            folder: Path = folder,
            was: Any = was,
        ) -> None:
            server.kill()
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / step, folder)
            await restart(server, js, source)
            await was(self, letters)

        server.kill()
        shutil.copytree(folder, tmp_path / step)
        await restart(server, js, source)
        for _ in range(4):
            await js.publish(f"{source}.0", b"lost")
        with monkeypatch.context() as patched:
            patched.setattr(_Redriving, step, lose)
            patched.setattr(_Redriving, "delete", die)
            with pytest.raises(KeyboardInterrupt):
                await redrive(js, stream, dead, offsets=offsets)
        for _ in range(6):
            await js.publish(f"{source}.0", b"new")
        for _ in range(2):
            with pytest.raises(errors.HistoryUnavailableError, match="has lost messages"):
                await redrive(js, stream, dead, offsets=offsets)
        assert (await js.stream_info(source)).created == created
        assert (await payloads(js, source)).count(b"0") == (2 if step == "_send" else 1)
        assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=3, found=0, left=0)
