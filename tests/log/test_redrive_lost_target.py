"""What redrive does if the target has lost its last messages, and has stored others at their sequences since."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from clients import connected
from nats.js import JetStreamContext

from jetstream_ext import errors
from jetstream_ext.log import Redriven
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from redrive_letters import Bury, send

# nats-py leaves the sockets of lost connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")


@pytest.fixture
def server() -> Any:
    with NatsServer() as server:
        yield server


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    async with connected(server.url) as nc:
        yield nc.jetstream(timeout=10)


async def restart(server: NatsServer, js: JetStreamContext, stream: str) -> None:
    await asyncio.to_thread(server.restart)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                await js.stream_info(stream)
                return
            await asyncio.sleep(0.05)


async def test_a_target_that_lost_its_last_messages_and_has_grown_since(
    server: NatsServer, js: JetStreamContext, bury: Bury, tmp_path: Path
) -> None:
    """The letter was lost with the others, which is not known; or it arrives when they are lost, and is found."""
    for copies in (0, 1):
        letters = await bury(3)
        source, seqs = letters.source, (await letters.seqs())[1:2]
        (folder,) = server.store_dir.glob(f"**/streams/{source}")
        server.kill()
        shutil.copytree(folder, tmp_path / source)
        await restart(server, js, source)
        for _ in range(4):
            await js.publish(f"{source}.0", b"lost")
        wire = await letters.die(copies, seqs=seqs)
        server.kill()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / source, folder)
        await restart(server, js, source)
        if not copies:
            await send(js, wire.copies[0])
        for _ in range(6):
            await js.publish(f"{source}.0", b"new")
        if copies:
            for _ in range(2):
                with pytest.raises(errors.HistoryUnavailableError, match="may have lost messages"):
                    await letters.redrive(seqs=seqs)
            await letters.forget_ids()
        assert await letters.redrive(again=True) == Redriven(sent=2 + copies, found=1 - copies, left=0)
        assert sorted(it for it in await letters.redriven() if it != b"new") == [b"0", b"1", b"2"]
