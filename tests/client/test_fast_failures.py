"""Fast ingest when calls are cancelled, or the server dies or does not answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import nats.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsServer

MakeStream = Callable[..., Awaitable[str]]


async def payloads(js: JetStreamContext, stream: str) -> list[bytes]:
    return [message.data for message in await jsx.DirectGet(js, stream).scan().to_list()]


class TestCancellation:
    @each("call", ["add", "add_many", "flush", "ping"])
    async def test_cancelled_calls_leave_the_batch_usable(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any, call: str
    ) -> None:
        for ticks in (*range(12), 14, 17, 20, 24):
            stream = await make_stream()
            pub = jsx.FastPublisher(js, flow=3, max_outstanding_acks=1)
            if call in ("flush", "ping"):
                await pub.add(f"{stream}.a", b"0")
            work: Any = {
                "add": lambda: pub.add(f"{stream}.a", b"x"),  # noqa: B023 - called in this round
                "add_many": lambda: pub.add_many((f"{stream}.a", b"%d" % i) for i in range(20)),  # noqa: B023
                "flush": pub.flush, "ping": pub.ping,
            }[call]  # fmt: skip
            await _cancel_after(ticks, work())
            sent = pub.batch_seq
            await pub.add_many((f"{stream}.a", b"after") for _ in range(5))
            ack = await pub.commit_eob()
            assert ack.batch_size == pub.batch_seq == sent + 5
            assert (await js.stream_info(stream)).state.messages == sent + 5
            await leak_check.assert_clean()

    async def test_commit_cancelled_before_it_is_sent_leaves_the_batch_usable(
        self, own_server: NatsServer, own_js: JetStreamContext, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        await jsx.FastPublisher(own_js).commit(f"{stream}.a", b"0")  # from here on the stream is known
        pub = jsx.FastPublisher(own_js)
        own_server.pause()
        sent = own_js._nc.stats["out_msgs"]
        adding = asyncio.create_task(pub.add(f"{stream}.a", b"1"))
        while own_js._nc.stats["out_msgs"] == sent:
            await asyncio.sleep(0)
        await _cancel_after(5, pub.commit_eob())
        own_server.resume()
        await adding
        assert pub.end_reason is None
        assert (await pub.commit(f"{stream}.a", b"2")).batch_size == 2
        assert await payloads(own_js, stream) == [b"0", b"1", b"2"]

    @each("call", ["commit", "block"])
    async def test_cancelled_commit_leaves_nothing_open(
        self, js: JetStreamContext, make_stream: MakeStream, leak_check: Any, call: str
    ) -> None:
        for ticks in range(25):
            stream = await make_stream()
            pub = jsx.FastPublisher(js, flow=3)

            async def block(stream: str = stream, pub: jsx.FastPublisher = pub) -> None:
                async with pub:
                    for _ in range(10):
                        await pub.add(f"{stream}.a", b"x")

            await _cancel_after(ticks, block() if call == "block" else pub.commit(f"{stream}.a", b"x"))
            if pub.end_reason is None and call == "commit":
                await pub.discard()  # it was cancelled before the commit
            assert pub.end_reason is not None or pub.batch_seq == 0
            assert (await js.stream_info(stream)).state.messages <= 10
            await leak_check.assert_clean()

    async def test_wait_closed_opens_nothing(self, js: JetStreamContext, stream: str) -> None:
        pub = jsx.FastPublisher(js)
        before = len(js._nc._subs)
        waiters = [asyncio.create_task(pub.wait_closed()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.wait(waiters[:1])
        assert len(js._nc._subs) == before
        await pub.add(f"{stream}.a", b"x")
        await pub.commit_eob()
        assert await asyncio.gather(*waiters[1:]) == [jsx.EndReason.COMMITTED] * 2, "a cancelled wait ends no batch"
        unused = jsx.FastPublisher(js)
        waiter = asyncio.create_task(unused.wait_closed())
        await asyncio.sleep(0)
        await unused.discard()
        assert await waiter is jsx.EndReason.DISCARDED

    async def test_cancelled_wait_closed_keeps_the_batch_open(
        self, js: JetStreamContext, stream: str, leak_check: Any
    ) -> None:
        pub = jsx.FastPublisher(js)
        await pub.add(f"{stream}.a", b"1")
        await _cancel_after(3, pub.wait_closed())
        assert (await pub.commit_eob()).batch_size == 1
        await leak_check.assert_clean()


async def _cancel_after(ticks: int, work: Awaitable[object]) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class TestConnections:
    @each("mode", jsx.GapMode)
    async def test_a_lost_connection_ends_the_batch_with_the_exact_range(
        self,
        own_nc: Client,
        own_js: JetStreamContext,
        own_server: NatsServer,
        own_stream: MakeStream,
        mode: jsx.GapMode,
    ) -> None:
        stream = await own_stream()
        pub = jsx.FastPublisher(own_js, gap=mode, flow=10)
        for i in range(1, 26):
            await pub.add(f"{stream}.a", b"%d" % i)
        await pub.flush()
        acked = pub.ack_seq
        own_server.pause()
        for i in range(26, 28):
            await pub.add(f"{stream}.a", b"%d" % i)
        closing = asyncio.create_task(pub.wait_closed())
        own_server.kill()
        pub._batch.clock.timeout = 1.0  # in ok mode, the batch waits this long for another connection
        async with asyncio.timeout(20):
            assert await closing is jsx.EndReason.DISCONNECTED
        with pytest.raises(
            errors.BatchAbandonedError, match=f"messages {acked + 1} to 27 are not acknowledged"
        ) as caught:
            await pub.add(f"{stream}.a", b"28")
        assert (caught.value.sent, caught.value.acked, caught.value.outcome) == (27, acked, "unknown")
        own_server.restart()
        assert [int(data) for data in await _read_after_restart(own_js, stream)][:acked] == list(range(1, acked + 1))

    async def test_a_wait_ends_when_the_connection_does(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        pub = jsx.FastPublisher(own_js, flow=1, max_outstanding_acks=1, timeout=60)
        await pub.add(f"{stream}.a", b"1")
        own_server.pause()

        async def kill() -> None:
            while pub.batch_seq < 2:
                await asyncio.sleep(0.001)
            own_server.kill()

        async with asyncio.timeout(20):
            adding, _ = await asyncio.gather(
                pub.add_many((f"{stream}.a", b"x") for _ in range(100)), kill(), return_exceptions=True
            )
        assert isinstance(adding, errors.BatchAbandonedError)
        assert pub.end_reason is jsx.EndReason.DISCONNECTED

    async def test_an_unanswered_commit_leaves_the_outcome_unknown(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        pub = jsx.FastPublisher(own_js)
        await pub.add(f"{stream}.a", b"1")
        own_server.pause()
        pub._batch.clock.timeout = 0.2
        async with asyncio.timeout(20):
            with pytest.raises(errors.BatchOutcomeUnknownError) as caught:
                await pub.commit_eob()
        own_server.resume()
        assert (caught.value.outcome, pub.end_reason) == ("unknown", jsx.EndReason.TIMEOUT)

    async def test_an_unanswered_first_message_leaves_the_outcome_unknown(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        own_server.pause()
        async with asyncio.timeout(20):
            with pytest.raises(errors.BatchOutcomeUnknownError, match="first message"):
                await jsx.FastPublisher(own_js, timeout=3).add(f"{stream}.a", b"1")
        own_server.resume()

    async def test_a_closed_connection_is_an_error(
        self, own_nc: Client, own_js: JetStreamContext, own_stream: MakeStream
    ) -> None:
        stream = await own_stream()
        used, unused = jsx.FastPublisher(own_js), jsx.FastPublisher(own_js)
        await used.add(f"{stream}.a", b"1")
        await own_nc.close()
        async with asyncio.timeout(20):
            assert await used.wait_closed() is jsx.EndReason.DISCONNECTED
        with pytest.raises(errors.BatchAbandonedError):
            await used.add(f"{stream}.a", b"2")
        with pytest.raises(nats.errors.ConnectionClosedError):
            await unused.add(f"{stream}.a", b"2")

    @pytest.mark.usefixtures("full_transport_pauses_the_writer")
    async def test_a_timeout_around_a_blocked_write_takes_effect(
        self, own_nc: Client, own_js: JetStreamContext, own_server: NatsServer, own_stream: MakeStream
    ) -> None:
        # nats-py swallows the cancellation while its buffer is full.
        stream = await own_stream()
        pub = jsx.FastPublisher(own_js, timeout=30)
        await pub.add(f"{stream}.a", b"1")
        own_server.pause()
        try:
            began = asyncio.get_running_loop().time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await pub.add_many((f"{stream}.a", bytes(500_000)) for _ in range(100))
            assert asyncio.get_running_loop().time() - began < 20  # timeout is 30 s
        finally:
            own_server.resume()  # closing a connection waits until its buffer is sent
        sent = pub.batch_seq
        assert sent > 1
        assert (await pub.commit_eob()).batch_size == sent


async def _read_after_restart(js: JetStreamContext, stream: str) -> list[bytes]:
    async with asyncio.timeout(60):
        while not js._nc.is_connected:
            await asyncio.sleep(0.005)
    return await payloads(js, stream)


async def test_a_batch_on_a_draining_connection_says_so(server: NatsServer, stream: str) -> None:
    nc = await nats.connect(server.url)
    pub = jsx.FastPublisher(nc.jetstream(timeout=30))
    await pub.add(f"{stream}.a", b"x")
    await pub.flush()
    draining = asyncio.ensure_future(nc.drain())
    while not nc.is_draining:
        await asyncio.sleep(0)
    with pytest.raises(errors.BatchAbandonedError, match="the connection is draining"):
        await pub.commit_eob()
    assert pub.end_reason is jsx.EndReason.DISCONNECTED
    await draining


async def test_discard_while_the_batch_opens_sends_nothing(
    stream_name: Callable[[], str], has_only: Callable[[Client, set[int]], Awaitable[bool]]
) -> None:
    # Behind a domain the batch requests the API level before it opens.
    async with NatsServer(config="jetstream { domain: hub }") as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(domain="hub")
        name = stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_batched=True)
        assert (await jsx.FastPublisher(js).commit(f"{name}.a", b"1")).domain == "hub"
        await nc.close()  # the API level is cached
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(domain="hub")
        await js.stream_info(name)
        held = set(nc._subs)
        pub = jsx.FastPublisher(js)
        adding = asyncio.ensure_future(pub.add(f"{name}.a", b"1"))
        await asyncio.sleep(0)
        await pub.discard()
        with pytest.raises(errors.BatchClosedError):
            await adding
        assert pub.end_reason is jsx.EndReason.DISCARDED
        assert await has_only(nc, held)
        assert (await js.stream_info(name)).state.messages == 1
        await nc.close()
