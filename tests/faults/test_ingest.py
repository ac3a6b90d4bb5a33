"""`ingest` stores every message once and in order through faults of the server and the connection."""

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext.testing import NatsCluster, NatsServer

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Proxy

# nats-py leaves the sockets of failed connection attempts to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored .*<function (StreamWriter|_SelectorTransport)")
Connect = Callable[..., Awaitable[Any]]
Stored = Callable[[Any, str], Awaitable[list[int]]]
PATIENCE = 0.5
LONGER = 0.8  # longer than the publisher waits, so that delayed messages meet their second copies


def numbers(count: int) -> Iterator[tuple[str, bytes]]:
    return ((f"s.{i % 10}", b"%d" % i) for i in range(count))


async def make_stream(js: JetStreamContext, **config: Any) -> None:
    await js.add_stream(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True, **config)


class Milestones:
    """Lets a test wait until a share of the messages is stored."""

    def __init__(self, total: int) -> None:
        self.stored = 0
        self.most = 0
        self._total = total

    def __call__(self, progress: jsx.IngestProgress) -> None:
        assert progress.stored >= self.stored
        self.stored = progress.stored
        self.most = max(self.most, progress.window)

    async def until(self, share: float) -> None:
        while self.stored < share * self._total:
            await asyncio.sleep(0.002)


async def test_ingest_stores_everything_once_through_kills(
    victim: NatsServer, connect: Connect, stored: Stored, full: bool
) -> None:
    count, kills = (1_000_000, 5) if full else (20_000, 2)
    js = (await connect(victim.url)).jetstream()
    await make_stream(js)
    done = Milestones(count)

    async def kill() -> None:
        for i in range(kills):
            await done.until((i + 1) / (kills + 1))
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(victim.restart)

    killing = asyncio.create_task(kill())
    report = await jsx.ingest(js, numbers(count), on_progress=done, progress_every=0.0, flow=100)
    await killing
    assert await stored(victim.url, "S") == list(range(count)), "every message once, and in order"
    assert (report.stored, done.stored) == (count, count)
    assert 2 <= report.batches <= kills + 1  # the last messages may be sent again without a batch
    assert 0 <= report.duplicates + report.resent <= kills * 200 + report.batches
    assert done.most <= 201


@pytest.mark.parametrize("fault", ["cut", "refuse", "stall", "pause"])
async def test_ingest_stores_everything_once_through_a_bad_connection(
    victim: NatsServer, connect: Connect, stored: Stored, full: bool, fault: str
) -> None:
    count, times = (20_000, 4) if full else (8_000, 2)
    async with Proxy(victim.port) as proxy:
        nc = await connect(proxy.url)
        js = nc.jetstream(timeout=PATIENCE)
        await make_stream(nc.jetstream(timeout=30))
        done = Milestones(count)

        async def break_it() -> None:
            for i in range(times):
                await done.until((i + 1) / (times + 1))
                if fault in ("cut", "refuse"):
                    reconnects = nc.stats["reconnects"]
                    proxy.cut(refuse=fault == "refuse")
                    if fault == "refuse":
                        await proxy.turned_away()
                        proxy.accept()
                    while nc.stats["reconnects"] == reconnects:
                        await asyncio.sleep(0.001)
                elif fault == "stall":
                    proxy.stall()
                    await asyncio.sleep(LONGER)
                    proxy.flow()
                else:
                    victim.pause()
                    await asyncio.sleep(LONGER)
                    victim.resume()

        breaking = asyncio.create_task(break_it())
        report = await jsx.ingest(js, numbers(count), on_progress=done, progress_every=0.0)
        await breaking
        assert await stored(victim.url, "S") == list(range(count))
        assert report.stored == count
        await nc.close()


async def test_ingest_stores_everything_once_through_overload(connect: Connect, stored: Stored) -> None:
    # The queue holds five messages, so nearly every window overflows it.
    with NatsServer(config="jetstream { max_buffered_msgs: 5 }") as server:
        nc = await connect(server.url)
        js = nc.jetstream()
        await make_stream(js)
        report = await jsx.ingest(js, numbers(1000), flow=50)
        assert await stored(server.url, "S") == list(range(1000))
        assert report.stored == 1000
        await nc.close()


async def test_ingest_stores_everything_once_while_another_batch_fills_the_server(
    connect: Connect, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "jetstream_ext")
    # The server allows one batch, and another publisher holds it: `ingest` waits for its end.
    with NatsServer(config="jetstream { limits { batch { max_inflight_per_stream: 1 } } }") as server:
        nc = await connect(server.url)
        js = nc.jetstream()
        await make_stream(js)
        other = jsx.FastPublisher(js)
        await other.add("s.1", b"0")
        ingesting = asyncio.create_task(jsx.ingest(js, itertools.islice(numbers(3001), 1, None)))
        async with asyncio.timeout(30):
            while caplog.text.count("too many inflight") < 3:
                await asyncio.sleep(0.01)
        await other.commit_eob()
        report = await ingesting
        assert await stored(server.url, "S") == list(range(3001))
        assert (report.stored, report.batches) == (3000, 1)
        await nc.close()


async def test_stored_message_with_an_expectation_is_not_refused_when_sent_again(
    victim: NatsServer, connect: Connect, stored: Stored
) -> None:
    watcher = (await connect(victim.url)).jetstream()
    await make_stream(watcher)
    async with Proxy(victim.port) as proxy:
        nc = await connect(proxy.url)

        async def source() -> AsyncIterator[jsx.BatchMessage]:
            for i in range(30):
                if i == 20:  # stored but not acknowledged: servers acknowledge every `flow` messages
                    async with asyncio.timeout(30):
                        while (await watcher.stream_info("S")).state.messages < i:
                            await asyncio.sleep(0.01)
                    proxy.cut()
                if i % 2:
                    yield jsx.BatchMessage(f"s.{i % 4}", b"%d" % i, expected_last_seq=i)
                else:
                    yield jsx.BatchMessage(f"s.{i}", b"%d" % i, expected_last_subject_seq=0)

        report = await jsx.ingest(nc.jetstream(), source(), flow=100)
        assert await stored(victim.url, "S") == list(range(30))
        assert (report.stored, report.duplicates) == (30, 20)
        await nc.close()


async def test_ingest_stores_everything_once_through_leader_kills(
    cluster: NatsCluster, connect: Connect, stored: Stored, full: bool
) -> None:
    count, kills = (300_000, 4) if full else (10_000, 1)
    js = (await connect(cluster.urls)).jetstream()
    await make_stream(js, num_replicas=3)
    done = Milestones(count)

    async def leader(*, other_than: str = "") -> str:
        while True:
            try:
                info = await js.stream_info("S")
                if info.cluster and info.cluster.leader not in (None, other_than):
                    return info.cluster.leader
            except (nats.errors.Error, nats.js.errors.APIError):
                pass  # an election is in progress
            await asyncio.sleep(0.05)

    async def kill() -> None:
        for i in range(kills):
            await done.until((i + 1) / (kills + 1))
            name = await leader()
            victim = next(server for server in cluster.servers if server.name == name)
            await asyncio.to_thread(victim.kill)
            await leader(other_than=name)
            await asyncio.to_thread(victim.restart)
            await asyncio.to_thread(cluster.wait_ready)

    killing = asyncio.create_task(kill())
    report = await jsx.ingest(js, numbers(count), on_progress=done, progress_every=0.0)
    await killing
    got = await stored(cluster.urls, "S")
    assert sorted(got) == list(range(count)), "every message once"
    assert got == sorted(got), "in order"
    assert report.stored == count


async def test_ends_with_an_error_when_the_server_stays_away(victim: NatsServer, connect: Connect) -> None:
    js = (await connect(victim.url)).jetstream(timeout=30)
    await make_stream(js)
    done = Milestones(10**9)

    async def endless() -> AsyncIterator[tuple[str, bytes]]:
        for entry in numbers(10**9):
            yield entry

    async def kill() -> None:
        while done.stored < 1000:
            await asyncio.sleep(0.002)
        victim.kill()

    killing = asyncio.create_task(kill())
    async with asyncio.timeout(60):
        with pytest.raises(jsx.errors.IngestError) as caught:
            await jsx.ingest(js, endless(), patience=4.0, timeout=4.0, on_progress=done, progress_every=0.0)
    await killing
    assert caught.value.index == done.stored >= 1000
    assert caught.value.report is not None
    assert caught.value.report.stored == done.stored
    await asyncio.to_thread(victim.restart)
