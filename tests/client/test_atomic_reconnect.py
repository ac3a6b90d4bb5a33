"""A connection that is lost during a batch: the batch continues if the server has all of it, and fails at once if not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client import atomic_session
from jetstream_ext.client.connection import connection_of
from jetstream_ext.testing import NatsServer


async def connected(nc: Client, reconnects: int) -> None:
    async with asyncio.timeout(60):
        while not (nc.is_connected and nc.stats["reconnects"] > reconnects):
            await asyncio.sleep(0.005)


@pytest.fixture
async def stream(own_stream: Any) -> str:
    return await own_stream()


@pytest.mark.parametrize("acked", [True, False])
@pytest.mark.parametrize("bulk", [True, False])
async def test_a_batch_continues_after_a_reconnect(
    own_nc: Client, own_js: JetStreamContext, stream: str, acked: bool, bulk: bool
) -> None:
    batch = jsx.AtomicBatch(own_js, ack_first=acked)
    for _ in range(3):
        await batch.add(f"{stream}.a", b"x", ack=acked)
    await own_nc.flush()
    await own_nc.force_reconnect()
    await connected(own_nc, 0)
    if bulk:
        await batch.add_many([jsx.BatchMessage(f"{stream}.a", b"x")] * 4)
    else:
        for _ in range(4):
            await batch.add(f"{stream}.a", b"x", ack=False)
    assert batch._session.machine.staged >= 4, "the first message after the reconnect was acknowledged"
    assert (await batch.commit_eob()).batch_size == 7


@pytest.mark.parametrize("ends", ["the reply", "close", "kill"])
async def test_what_comes_while_message_1_is_written_is_not_awaited_again(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The server is before 2.14, so `commit` sends message 1, whose reply a batch with an id of the caller awaits."""
    with NatsServer(version="2.12.8") as server:
        nc = await nats.connect(server.url, connect_timeout=10, allow_reconnect=False)
        js = nc.jetstream(timeout=300)
        await js.add_stream(name="S", subjects=["S.>"], allow_atomic=True)
        batch = jsx.AtomicBatch(js, batch_id="mine")
        await batch.add("S.a", b"1")
        machine, write = batch._session.machine, atomic_session.AtomicSession._write

        async def slow(self: Any, block: Any, patience: Any) -> None:
            if ends != "the reply":
                server.pause()
            await write(self, block, patience)
            if ends == "close":
                await nc.close()
            elif ends == "kill":
                server.kill()
            while not (machine.begun or machine.ended):
                await asyncio.sleep(0.001)

        with monkeypatch.context() as patch:
            patch.setattr(atomic_session.AtomicSession, "_write", slow)
            commit = asyncio.ensure_future(batch.commit("S.b", b"2"))
            async with asyncio.timeout(60):
                await asyncio.wait({commit})
        if ends == "the reply":
            assert (await commit).batch_size == 2
        else:
            with pytest.raises(errors.BatchAbandonedError) as caught:
                await commit
            assert caught.value.outcome == "not_stored"
        await nc.close()


@pytest.mark.parametrize("acked", [True, False])
@pytest.mark.parametrize("call", ["add", "add_many", "commit", "exit"])
async def test_a_batch_fails_at_once_after_a_server_restart(
    own_server: NatsServer, own_nc: Client, own_js: JetStreamContext, stream: str, acked: bool, call: str
) -> None:
    batch = jsx.AtomicBatch(own_js, ack_first=acked)
    for _ in range(3):
        await batch.add(f"{stream}.a", b"x")
    await own_nc.flush()
    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.restart)
    await connected(own_nc, 0)
    held = set(own_nc._subs)

    async def leave() -> None:
        async with batch:
            pass

    async with asyncio.timeout(20):
        with pytest.raises(errors.BatchAbandonedError, match="no longer has the whole batch") as caught:
            await {
                "add": lambda: batch.add(f"{stream}.a", b"y", ack=False),
                "add_many": lambda: batch.add_many([jsx.BatchMessage(f"{stream}.a")] * 1000),
                "commit": lambda: batch.commit(f"{stream}.a"),
                "exit": leave,
            }[call]()
    assert (caught.value.outcome, batch.state) == ("not_stored", "failed")
    assert await batch.resolve() == "not_stored"
    assert (await own_js.stream_info(stream)).state.messages == 0
    assert len(held - set(own_nc._subs)) == 1, "its inbox is closed"


async def test_a_connection_lost_while_a_reply_is_awaited_fails_the_batch(
    own_server: NatsServer, own_nc: Client, own_js: JetStreamContext, stream: str
) -> None:
    batch = jsx.AtomicBatch(own_js, timeout=60)
    await batch.add(f"{stream}.a", b"x")
    own_server.pause()
    sent = own_nc.stats["out_msgs"]
    adding = asyncio.ensure_future(batch.add(f"{stream}.a", b"x", ack=True))
    while own_nc.stats["out_msgs"] == sent:
        await asyncio.sleep(0)
    own_server.kill()
    async with asyncio.timeout(20):
        with pytest.raises(errors.BatchAbandonedError, match="connection was lost"):
            await adding
    assert batch.state == "failed"


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("many", [True, False])
async def test_a_connection_lost_during_publish_atomic_fails_the_batch(
    own_server: NatsServer, own_nc: Client, own_js: JetStreamContext, stream: str, many: bool, last: bool
) -> None:
    async def source() -> AsyncIterator[jsx.BatchMessage]:
        for _ in range(3):
            yield jsx.BatchMessage(f"{stream}.a")
        await own_nc.flush()
        await asyncio.to_thread(own_server.kill)
        while own_nc.is_connected:
            await asyncio.sleep(0.001)
        if not last:
            yield jsx.BatchMessage(f"{stream}.a")

    async with asyncio.timeout(20):
        with pytest.raises(errors.BatchAbandonedError, match="while the batch was being sent") as caught:
            await (jsx.publish_atomic_many(own_js, [source()]) if many else jsx.publish_atomic(own_js, source()))
    assert caught.value.outcome == "not_stored"


@pytest.mark.parametrize("error", [nats.errors.ConnectionReconnectingError(), nats.errors.ConnectionClosedError()])
async def test_a_failed_write_ends_the_batch(
    js: JetStreamContext, nc: Client, make_stream: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    name = await make_stream()

    def fails(data: bytes, messages: int, size: int) -> None:
        raise error

    for commit in (False, True):
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{name}.a")
        with monkeypatch.context() as patch:
            patch.setattr(connection_of(nc), "write_nowait", fails)
            expected = errors.BatchOutcomeUnknownError if commit else errors.BatchAbandonedError
            with pytest.raises(expected, match="writing to the connection failed"):
                await (batch.commit(f"{name}.a") if commit else batch.add(f"{name}.a"))
        assert batch.state == ("unknown" if commit else "failed")
        assert await batch.resolve() == "not_stored"
