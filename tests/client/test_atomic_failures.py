"""Atomic batches when the server dies or does not answer."""

import asyncio
from collections.abc import Awaitable, Callable

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


class TestConnections:
    async def test_an_unanswered_commit_leaves_the_outcome_unknown(
        self,
        own_nc: Client,
        own_js: JetStreamContext,
        own_server: NatsServer,
        own_stream: MakeStream,
        has_only: Callable[[Client, set[int]], Awaitable[bool]],
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js)
        await batch.add(f"{stream}.a", b"1")
        held = set(own_nc._subs)
        own_server.pause()
        batch._session._timeout = 0.2
        async with asyncio.timeout(20):
            with pytest.raises(errors.BatchOutcomeUnknownError) as caught:
                await batch.commit_eob()
        assert (caught.value.outcome, batch.state) == ("unknown", "unknown")
        assert await has_only(own_nc, held)
        own_server.resume()
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await batch.add(f"{stream}.a", b"2")

    async def test_an_unanswered_add_fails_the_batch(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        own_server.pause()
        batch = jsx.AtomicBatch(own_js, timeout=0.2)
        async with asyncio.timeout(20):
            with pytest.raises(errors.BatchAbandonedError, match="nothing of the batch is stored"):
                await batch.add(f"{stream}.a", b"1")
        assert batch.state == "failed"
        own_server.resume()

    async def test_a_server_killed_during_the_commit_leaves_the_outcome_unknown(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js, timeout=60)
        await batch.add(f"{stream}.a", b"1")
        own_server.pause()
        committing = asyncio.ensure_future(batch.commit_eob())
        await asyncio.sleep(0)
        own_server.kill()
        async with asyncio.timeout(20):
            with pytest.raises(errors.BatchOutcomeUnknownError, match="connection was lost"):
                await committing

    async def test_a_closed_connection_is_an_error(
        self, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js)
        await batch.add(f"{stream}.a", b"1")
        await own_nc.close()
        for call in (batch.add(f"{stream}.a"), batch.commit_eob(), jsx.AtomicBatch(own_js).add("a")):
            with pytest.raises(nats.errors.ConnectionClosedError):
                await call
        await batch.discard()
        assert batch.state == "discarded"

    async def test_discard_while_the_batch_opens_stores_nothing(
        self, stream_name: Callable[[], str], has_only: Callable[[Client, set[int]], Awaitable[bool]]
    ) -> None:
        # Behind a domain the batch requests the API level before it opens.
        async with (
            NatsServer(config="jetstream { domain: hub }") as server,
            await nats.connect(server.url, connect_timeout=10) as nc,
        ):
            js = nc.jetstream(domain="hub")
            name = stream_name()
            await js.add_stream(name=name, subjects=[f"{name}.>"], allow_atomic=True)
            ack = await jsx.AtomicBatch(js).commit(f"{name}.a", b"1")
            assert ack.domain == "hub"
            held = set(nc._subs)
            batch = jsx.AtomicBatch(js)
            adding = asyncio.ensure_future(batch.add(f"{name}.a", b"1"))
            await asyncio.sleep(0)
            await batch.discard()
            with pytest.raises(errors.BatchClosedError):
                await adding
            assert batch.state == "discarded"
            assert await has_only(nc, held)
            assert (await js.stream_info(name)).state.messages == 1
