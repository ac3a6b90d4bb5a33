"""Fast ingest against real servers that are killed, paused and restarted, and over a connection that is cut."""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Proxy

Connect = Callable[..., Awaitable[Any]]
Stored = Callable[[Any, str], Awaitable[list[int]]]

# nats-py leaves the sockets of failed connection attempts to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
ACK_TIMEOUT = 2.0  # set after the fault; before it, PATIENT allows for a busy machine
PATIENT = 120.0
BOUND = 60.0  # less than PATIENT
FULL = bool(os.environ.get("JETSTREAM_EXT_FULL"))
FAULTS = [("kill", 10), ("pause", 200), ("restart", 200), ("cut", 10), ("stall", 200)]
if FULL:
    FAULTS += [(fault, 210 - flow) for fault, flow in FAULTS]


async def make_stream(js: JetStreamContext, **config: Any) -> str:
    await js.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True, **config)
    return "S"


def numbers(count: int | None = None) -> Iterator[tuple[str, bytes]]:
    i = 0
    while count is None or i < count:
        yield f"s.{i % 10}", b"%d" % i
        i += 1


@pytest.fixture
async def proxy(victim: NatsServer) -> AsyncIterator[Proxy]:
    async with Proxy(victim.port) as proxy:
        yield proxy


async def publish_until_the_end(pub: jsx.FastPublisher) -> BaseException | None:
    """Add messages until the batch ends; return its error."""
    try:
        await pub.add_many(numbers())
    except errors.BatchError as error:
        return error
    return None


class TestAcknowledgedIsStored:
    """In fail mode every message up to `ack_seq` is stored after any fault, and the batch ends in bounded time."""

    @pytest.mark.parametrize(("fault", "flow"), FAULTS)
    async def test_a_fault_leaves_a_prefix_of_the_messages_stored(
        self, victim: NatsServer, proxy: Proxy, connect: Connect, stored: Stored, fault: str, flow: int
    ) -> None:
        nc = await connect(proxy.url)
        js = nc.jetstream()
        stream = await make_stream(js)
        pub = jsx.FastPublisher(js, flow=flow, timeout=PATIENT)
        pub._batch.clock._ask_every = 0.3
        running = asyncio.create_task(publish_until_the_end(pub))
        while pub.ack_seq < 2000:
            await asyncio.sleep(0.001)
        pub._batch.clock.timeout = ACK_TIMEOUT
        if fault == "kill":
            victim.kill()
        elif fault == "pause":
            victim.pause()
        elif fault == "restart":
            await asyncio.to_thread(victim.restart)
        elif fault == "cut":
            proxy.cut()
        else:
            proxy.stall()
        async with asyncio.timeout(BOUND):
            error = await running
        assert isinstance(error, errors.BatchError)
        assert pub.end_reason in (jsx.EndReason.DISCONNECTED, jsx.EndReason.TIMEOUT, jsx.EndReason.ERROR)
        assert (error.sent, error.acked) == (pub.batch_seq, pub.ack_seq)
        if fault == "pause":
            victim.resume()
        elif fault == "stall":
            proxy.flow()
        elif fault == "kill":
            await asyncio.to_thread(victim.restart)
        got = await stored(victim.url, stream)
        assert got == list(range(len(got)))
        assert pub.ack_seq <= len(got) <= pub.batch_seq

    async def test_a_slow_connection_does_not_end_the_batch(self, proxy: Proxy, connect: Connect) -> None:
        js = (await connect(proxy.url)).jetstream()
        await make_stream(js)
        proxy.delay = 0.05
        async with jsx.FastPublisher(js, timeout=PATIENT) as pub:
            await pub.add_many(numbers(2000))
        assert pub.ack.batch_size == 2000


class TestOkModeContinues:
    """In ok mode a batch survives the loss of its connection, and every message is stored, reported or in doubt."""

    async def test_every_message_is_accounted_for_over_cuts(
        self, victim: NatsServer, proxy: Proxy, connect: Connect, stored: Stored
    ) -> None:
        nc = await connect(proxy.url)
        js = nc.jetstream()
        stream = await make_stream(js)
        pub = jsx.FastPublisher(js, gap=jsx.GapMode.OK, flow=50, timeout=30.0)
        pub._batch.clock._ask_every = 0.3
        done = asyncio.Event()

        async def cutting() -> None:
            for i in range(8 if FULL else 4):
                before = pub.ack_seq
                while pub.ack_seq < before + 500 and pub.end_reason is None:
                    await asyncio.sleep(0.001)
                reconnects = nc.stats["reconnects"]
                proxy.cut(refuse=i % 2 == 0)
                if i % 2 == 0:
                    await proxy.turned_away()
                    proxy.accept()
                while nc.stats["reconnects"] == reconnects:
                    await asyncio.sleep(0.001)
            done.set()

        def source() -> Iterator[tuple[str, bytes]]:
            for entry in numbers():
                if done.is_set():
                    return
                yield entry

        cutter = asyncio.create_task(cutting())
        async with asyncio.timeout(300), pub:
            await pub.add_many(source())
        await cutter
        assert pub.end_reason is jsx.EndReason.COMMITTED
        got = await stored(victim.url, stream)
        assert got == sorted(set(got)), "no message twice, and in order"
        sent = set(range(1, pub.batch_seq + 1))
        lost = {seq for gap in pub.gaps for seq in range(gap.first_lost, gap.seq)}
        doubt = {seq for each in pub.in_doubt for seq in range(each.first, each.last + 1)}
        here = {number + 1 for number in got}
        assert not here & lost, "a message that was reported lost is not stored"
        assert sent - here <= lost | doubt
        assert nc.stats["reconnects"] >= (8 if FULL else 4)

    @pytest.mark.parametrize("how", ["restart", "gone"])
    async def test_ends_in_time_if_the_batch_is_gone(
        self, victim: NatsServer, connect: Connect, stored: Stored, how: str
    ) -> None:
        js = (await connect(victim.url)).jetstream()
        stream = await make_stream(js)
        pub = jsx.FastPublisher(js, gap=jsx.GapMode.OK, flow=10, timeout=PATIENT)
        pub._batch.clock._ask_every = 0.3
        await pub.add_many(numbers(25))
        if how == "restart":
            await asyncio.to_thread(victim.restart)
        else:
            victim.kill()
            pub._batch.clock.timeout = ACK_TIMEOUT
        async with asyncio.timeout(BOUND):
            assert await pub.wait_closed() is jsx.EndReason.DISCONNECTED
            with pytest.raises(errors.BatchAbandonedError) as caught:
                await pub.add("s.1", b"25")
        if how == "restart":
            assert "no longer knows the batch" in str(caught.value)
        else:
            assert "did not answer on a new one" in str(caught.value)
            await asyncio.to_thread(victim.restart)
        assert len(await stored(victim.url, stream)) >= pub.ack_seq

    async def test_waits_while_the_connection_is_away(self, proxy: Proxy, connect: Connect) -> None:
        nc = await connect(proxy.url)
        js = nc.jetstream()
        await make_stream(js)
        pub = jsx.FastPublisher(js, gap=jsx.GapMode.OK, timeout=60.0)
        await pub.add("s.1", b"0")
        proxy.cut(refuse=True)
        while nc.is_connected:
            await asyncio.sleep(0.001)
        adding = asyncio.create_task(pub.add("s.1", b"1"))
        flushing = asyncio.create_task(pub.flush())
        for _ in range(2):
            await proxy.turned_away()
        assert (pub.batch_seq, adding.done(), flushing.done()) == (1, False, False)
        cancelled = asyncio.create_task(pub.add("s.1", b"never"))
        await asyncio.sleep(0)
        cancelled.cancel()
        proxy.accept()
        async with asyncio.timeout(30):
            await adding
            await flushing
            ack = await pub.commit_eob()
        assert (ack.batch_size, pub.batch_seq, pub.gap_count) == (2, 2, 0)


class TestLeaders:
    @pytest.mark.parametrize("mode", list(jsx.GapMode))
    async def test_acknowledged_messages_are_accounted_for_after_a_leader_is_killed(
        self, cluster: NatsCluster, connect: Connect, stored: Stored, wait_for_interest: Any, mode: jsx.GapMode
    ) -> None:
        js = (await connect(cluster.urls)).jetstream()
        stream = await make_stream(js, num_replicas=3)
        await wait_for_interest(js, "s.0")
        # Without a leader there are no acks; one vote takes 4 to 9 s, and a busy cluster may need a second.
        pub = jsx.FastPublisher(js, gap=mode, flow=100, timeout=BOUND)
        pub._batch.clock._ask_every = 0.3
        enough: float = 2000

        async def publish() -> None:
            async with pub:
                await pub.add_many(itertools.takewhile(lambda _: pub.ack_seq < enough, numbers()))

        running = asyncio.create_task(publish())
        enough = float("inf")
        while pub.ack_seq < 1000:
            await asyncio.sleep(0.01)
        name = await _leader(js, stream)
        leader = next(server for server in cluster.servers if server.name == name)
        before = pub.ack_seq
        await asyncio.to_thread(leader.kill)
        async with asyncio.timeout(120):
            while pub.end_reason is None and pub.ack_seq < before + 2000:
                await asyncio.sleep(0.01)
            enough = 0
            (failure,) = await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(leader.restart)
        await asyncio.to_thread(cluster.wait_ready)
        got = {number + 1 for number in await stored(cluster.urls, stream)}
        acked = set(range(1, pub.ack_seq + 1))
        if mode is jsx.GapMode.FAIL:
            assert acked <= got
            assert failure is None or isinstance(failure, errors.BatchError)
            return
        lost = {seq for gap in pub.gaps for seq in range(gap.first_lost, gap.seq)} | {each.seq for each in pub.errors}
        doubt = {seq for each in pub.in_doubt for seq in range(each.first, each.last + 1)}
        assert acked - got <= lost | doubt
        assert pub.end_reason in (jsx.EndReason.COMMITTED, jsx.EndReason.DISCONNECTED), failure


async def _leader(js: JetStreamContext, stream: str) -> str:
    while True:
        try:
            info = await js.stream_info(stream)
        except nats.errors.Error:
            continue
        if info.cluster is not None and info.cluster.leader:
            return info.cluster.leader
        await asyncio.sleep(0.05)
