"""What redrive does if the target has lost its last messages, and has stored others at their sequences since."""

import asyncio
import contextlib
import shutil
import sys
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
from jetstream_ext.log import OffsetStore, Redriven, dead_letters, redrive
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from redrive_wire import Die, send

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


async def test_a_target_that_lost_its_last_messages_and_has_grown_since(
    server: NatsServer, js: JetStreamContext, bury: Bury, offsets: OffsetStore, die: Die, tmp_path: Path
) -> None:
    """The letter is below the sequence where the look begins, or was lost with the others; that is not known."""
    for copies in (0, 1):  # the letter is lost with the others, or it arrives when they are lost
        stream, dead, source = await bury(3, duplicate_window=0.1)
        (folder,) = server.store_dir.glob(f"**/streams/{source}")
        created = (await js.stream_info(source)).created
        seq = [letter.message.seq async for letter in dead_letters(js, stream, dead)][1]
        server.kill()
        shutil.copytree(folder, tmp_path / source)
        await restart(server, js, source)
        for _ in range(4):
            await js.publish(f"{source}.0", b"lost")
        wire = await die(stream, dead, copies, seqs=[seq])
        server.kill()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / source, folder)
        await restart(server, js, source)
        if not copies:
            await send(js, wire.copies[0])
        for _ in range(6):
            await js.publish(f"{source}.0", b"new")
        for _ in range(2):
            with pytest.raises(errors.HistoryUnavailableError, match="may have lost its last messages"):
                await redrive(js, stream, dead, offsets=offsets, seqs=[seq])
        assert (await js.stream_info(source)).created == created
        assert (await payloads(js, source)).count(b"1") == 2 - copies
        await asyncio.sleep(0.3)  # the server forgets the message ids
        assert await redrive(js, stream, dead, offsets=offsets, again=True) == Redriven(sent=3, found=0, left=0)
