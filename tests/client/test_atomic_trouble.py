"""Atomic batches when things go wrong around them: cancellation at any point, servers that die, pause or forget."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]


async def count(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


async def count_after_all(js: JetStreamContext, stream: str) -> int:
    """Count when everything is stored that was on its way: the ack of a message sent after it says so."""
    return (await js.publish(f"{stream}.fence")).seq - 1


async def _cancel_after(ticks: int, work: Awaitable[object]) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("level")
class TestCancellation:
    async def test_of_add_leaves_the_batch_usable(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any
    ) -> None:
        for ticks in range(20):
            stream = await make_stream()
            batch = jsx.AtomicBatch(js, ack_every=1)
            await _cancel_after(ticks, batch.add(f"{stream}.a", b"maybe"))
            assert batch._session._waiters == {}, "nobody waits any more"
            size = batch.size
            assert size in (0, 1)
            await batch.add(f"{stream}.a", b"after")
            ack = await batch.commit_eob()
            assert ack.batch_size == size + 1
            assert await payloads(js, stream) == [b"maybe"] * size + [b"after"]
            await leak_check.assert_clean()

    async def test_of_the_block_stores_all_or_nothing(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any
    ) -> None:
        for ticks in range(1, 60, 2):
            stream = await make_stream()
            batch = jsx.AtomicBatch(js, ack_every=1)

            async def block(batch: jsx.AtomicBatch = batch, stream: str = stream) -> None:
                async with batch:
                    for _ in range(3):
                        await batch.add(f"{stream}.a", b"x")

            await _cancel_after(ticks, block())
            assert (batch.state, await count_after_all(js, stream)) in {
                ("discarded", 0), ("unknown", 0), ("unknown", 3), ("committed", 3),
            }  # fmt: skip
            await leak_check.assert_clean()

    async def test_of_a_commit_says_that_nobody_knows(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any
    ) -> None:
        seen = set()
        for ticks in range(1, 40):
            stream = await make_stream()
            batch = jsx.AtomicBatch(js)
            await batch.add(f"{stream}.a", b"1")
            await _cancel_after(ticks, batch.commit(f"{stream}.a", b"2"))
            seen.add(batch.state)
            outcome = await batch.resolve() if batch.state == "unknown" else batch.state
            await batch.discard()
            assert await count(js, stream) == (2 if outcome in ("stored", "committed") else 0)
            await leak_check.assert_clean()
        assert "unknown" in seen

    async def test_of_publish_atomic(self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any) -> None:
        for ticks in range(0, 40, 2):
            stream = await make_stream()
            await _cancel_after(ticks, jsx.publish_atomic(js, [jsx.BatchMessage(f"{stream}.a")] * 5))
            assert await count_after_all(js, stream) in (0, 5)
            await leak_check.assert_clean()


class TestOddReplies:
    async def test_an_empty_answer_to_the_commit(
        self, js: JetStreamContext, nc: Client, make_stream: MakeStream, leak_check: Any
    ) -> None:
        stream = await make_stream(no_ack=True)  # nobody else will answer
        batch = jsx.AtomicBatch(js, ack_first=False, timeout=30)
        await batch.add(f"{stream}.a", b"1")
        committing = asyncio.ensure_future(batch.commit_eob())
        await asyncio.sleep(0)
        assert batch._session._inbox is not None
        await nc.publish(f"{batch._session._inbox.subject}.2")
        with pytest.raises(errors.BatchOutcomeUnknownError, match="the answer to the commit is empty"):
            await committing
        assert batch.state == "unknown"
        assert await batch.resolve() == "stored"
        await leak_check.assert_clean()

    async def test_an_ack_that_nobody_asked_for(
        self, js: JetStreamContext, nc: Client, make_stream: MakeStream, leak_check: Any
    ) -> None:
        stream = await make_stream()
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{stream}.a", b"1")
        assert batch._session._inbox is not None
        ack = b'{"stream":"%b","seq":1,"batch":"%b","count":1}' % (stream.encode(), batch.batch_id.encode())
        await nc.publish(f"{batch._session._inbox.subject}.1", ack)
        async with asyncio.timeout(5):
            while batch.state == "open":
                await asyncio.sleep(0.001)
        with pytest.raises(errors.BatchOutcomeUnknownError, match="no commit was sent"):
            await batch.commit_eob()
        assert await batch.resolve() == "not_stored"
        await leak_check.assert_clean()

    async def test_a_sequence_that_is_used_again_before_its_refusal_is_heard(
        self, js: JetStreamContext, make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch, leak_check: Any
    ) -> None:
        stream = await make_stream(max_msg_size=300)
        batch = jsx.AtomicBatch(js, timeout=5)
        await batch.add(f"{stream}.a", b"1")
        machine = batch._session.machine
        receive, others = machine.receive, []

        def next_one_at_once(seq: int, header: bytes, payload: bytes) -> errors.JetStreamExtError | None:
            refusal = receive(seq, header, payload)
            if refusal is not None:
                others.append(asyncio.ensure_future(batch.add(f"{stream}.a", b"2", ack=True)))
            return refusal

        monkeypatch.setattr(machine, "receive", next_one_at_once)
        with pytest.raises(errors.MessageTooLargeError):
            await batch.add(f"{stream}.a", bytes(500), ack=True)
        (other,) = others
        await other
        assert (await batch.commit_eob()).batch_size == 2
        await leak_check.assert_clean()


class TestBadConnections:
    async def test_a_commit_that_is_not_answered(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js, timeout=0.2)
        await batch.add(f"{stream}.a", b"1")
        held = set(own_nc._subs)
        own_server.pause()
        async with asyncio.timeout(3):
            with pytest.raises(errors.BatchOutcomeUnknownError) as caught:
                await batch.commit_eob()
        assert (caught.value.outcome, batch.state) == ("unknown", "unknown")
        assert len(set(own_nc._subs) - held) == 0
        own_server.resume()
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await batch.add(f"{stream}.a", b"2")

    async def test_an_add_that_is_not_answered(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        own_server.pause()
        batch = jsx.AtomicBatch(own_js, timeout=0.2)
        async with asyncio.timeout(3):
            with pytest.raises(errors.BatchAbandonedError, match="nothing of the batch is stored"):
                await batch.add(f"{stream}.a", b"1")
        assert batch.state == "failed"
        own_server.resume()

    async def test_a_commit_that_meets_a_dying_server(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js, timeout=60)
        await batch.add(f"{stream}.a", b"1")
        own_server.pause()
        committing = asyncio.ensure_future(batch.commit_eob())
        await asyncio.sleep(0)
        own_server.kill()
        async with asyncio.timeout(5):
            with pytest.raises(errors.BatchOutcomeUnknownError, match="connection was lost"):
                await committing

    async def test_a_batch_outlives_its_connection_and_hears_of_the_next_one_s_end(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js, timeout=60)
        await batch.add(f"{stream}.a", b"1")
        await own_nc.force_reconnect()
        async with asyncio.timeout(10):
            while not (own_nc.is_connected and own_nc.stats["reconnects"]):
                await asyncio.sleep(0.005)
        await batch.add(f"{stream}.a", b"2", ack=True)
        own_server.pause()
        committing = asyncio.ensure_future(batch.commit_eob())
        await asyncio.sleep(0)
        own_server.kill()
        async with asyncio.timeout(5):
            with pytest.raises(errors.BatchOutcomeUnknownError, match="connection was lost"):
                await committing

    async def test_a_closed_connection(self, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream) -> None:
        stream = await own_stream()
        batch = jsx.AtomicBatch(own_js)
        await batch.add(f"{stream}.a", b"1")
        await own_nc.close()
        for call in (batch.add(f"{stream}.a"), batch.commit_eob(), jsx.AtomicBatch(own_js).add("a")):
            with pytest.raises(nats.errors.ConnectionClosedError):
                await call
        await batch.discard()
        assert batch.state == "discarded"

    async def test_discarded_while_it_opens(self, stream_name: Callable[[], str]) -> None:
        # Behind a domain the API level has to be asked for, and that takes a while.
        async with NatsServer(config="jetstream { domain: hub }") as server:
            nc = await nats.connect(server.url)
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
            assert (batch.state, set(nc._subs)) == ("discarded", held)
            assert (await js.stream_info(name)).state.messages == 1
            await nc.close()
