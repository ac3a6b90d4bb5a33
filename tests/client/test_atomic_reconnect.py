"""A connection that is lost during a batch: the batch continues if the server has all of it, and fails at once if not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each, named
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.client.connection import connection_of
from jetstream_ext.testing import NatsServer


async def connected(nc: Client, reconnects: int) -> None:
    async with asyncio.timeout(60):
        while not (nc.is_connected and nc.stats["reconnects"] > reconnects):
            await asyncio.sleep(0.005)


@pytest.fixture
async def stream(own_stream: Any) -> str:
    return await own_stream()


@each("bulk", [True, False])
async def test_a_batch_continues_after_a_reconnect(
    own_nc: Client, own_js: JetStreamContext, stream: str, bulk: bool
) -> None:
    batch = jsx.AtomicBatch(own_js)
    for _ in range(3):
        await batch.add(f"{stream}.a", b"x")
    await own_nc.flush()
    reconnects = own_nc.stats["reconnects"]
    await own_nc.force_reconnect()
    await connected(own_nc, reconnects)
    if bulk:
        await batch.add_many([jsx.BatchMessage(f"{stream}.a", b"x")] * 4)
    else:
        for _ in range(4):
            await batch.add(f"{stream}.a", b"x")
    assert batch._session.machine.staged >= 4, "the first message after the reconnect was acknowledged"
    assert (await batch.commit_eob()).batch_size == 7


async def test_a_batch_fails_at_once_after_a_server_restart(
    own_server: NatsServer, own_nc: Client, own_js: JetStreamContext, stream: str, has_only: Any
) -> None:
    async def leave(batch: jsx.AtomicBatch) -> None:
        async with batch:
            pass

    calls: dict[str, Any] = {
        "add": lambda batch: batch.add(f"{stream}.a", b"y"),
        "add_many": lambda batch: batch.add_many([jsx.BatchMessage(f"{stream}.a")] * 1000),
        "commit": lambda batch: batch.commit(f"{stream}.a"),
        "exit": leave,
    }
    await own_js.account_info()  # the first request creates nats-py's own subscription
    held = set(own_nc._subs)
    batches = {call: jsx.AtomicBatch(own_js) for call in calls}
    for batch in batches.values():
        for _ in range(3):
            await batch.add(f"{stream}.a", b"x")
    await own_nc.flush()
    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.restart)
    await connected(own_nc, 0)
    for call, batch in batches.items():
        with named(call=call):
            async with asyncio.timeout(20):
                with pytest.raises(errors.BatchAbandonedError, match="no longer has the whole batch") as caught:
                    await calls[call](batch)
            assert (caught.value.outcome, batch.state) == ("not_stored", "failed")
            assert await batch.resolve() == "not_stored"
    assert await has_only(own_nc, held), "every inbox is closed"
    assert (await own_js.stream_info(stream)).state.messages == 0


async def test_a_connection_lost_while_a_reply_is_awaited_fails_the_batch(
    own_server: NatsServer, own_nc: Client, own_js: JetStreamContext, stream: str
) -> None:
    await jsx.publish_atomic(own_js, [(f"{stream}.a", b"x")])  # from now on the stream is known
    batch = jsx.AtomicBatch(own_js, timeout=60)
    own_server.pause()
    sent = own_nc.stats["out_msgs"]
    adding = asyncio.ensure_future(batch.add(f"{stream}.a", b"x"))
    while own_nc.stats["out_msgs"] == sent:
        await asyncio.sleep(0)
    own_server.kill()
    async with asyncio.timeout(20):
        with pytest.raises(errors.BatchAbandonedError, match="connection was lost"):
            await adding
    assert batch.state == "failed"


@each("last", [True, False])
@each("many", [True, False])
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
    reconnects = own_nc.stats["reconnects"]
    await asyncio.to_thread(own_server.restart)
    await connected(own_nc, reconnects)


@each("error", [nats.errors.ConnectionReconnectingError(), nats.errors.ConnectionClosedError()])
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
