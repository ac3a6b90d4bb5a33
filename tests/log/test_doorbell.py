"""Who waits at the end of a stream is woken: readers here would poll once a minute, and tables and groups are in their own tests."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import nats
import pytest
from clients import connected
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StreamConfig, StreamSource

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
import jetstream_ext.log as log
from jetstream_ext import errors
from jetstream_ext.testing import NatsCluster, NatsServer

NEVER = 60.0
"""A `poll` that is longer than any test here."""
# As the page says: how long a consumer is kept for the next time, and after how long the server deletes one.
KEPT, INACTIVE = 1.0, 5.0


async def add(js: JetStreamContext, name: str, **options: Any) -> None:
    """Make a stream; without other options, its subjects are ``<name>.>``."""
    copies = "mirror" in options or "sources" in options
    subjects = {} if copies else {"subjects": [f"{name}.>"]}
    await js.add_stream(StreamConfig(name=name, allow_direct=True, **{**subjects, **options}))


async def streams(js: JetStreamContext, name: str, **options: Any) -> dict[str, str]:
    """Make a stream, a mirror and a stream that sources it; return the subject to publish on for each."""
    await add(js, name, **options)
    await add(js, f"{name}-M", mirror=StreamSource(name=name), **options)
    await add(js, f"{name}-S", sources=[StreamSource(name=name)], **options)
    return dict.fromkeys((name, f"{name}-M", f"{name}-S"), f"{name}.a.b")


async def until(call: Callable[[], Awaitable[Any]]) -> None:
    """Repeat a call until it succeeds."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.APIError):
                await call()
                return
            await asyncio.sleep(0.05)


class Tail:
    """A task that reads the end of a stream, after it has waited for the first time."""

    def __init__(self, js: JetStreamContext, stream: str, **options: Any) -> None:
        self.reader = log.LogReader(js, stream, start=log.New(), tail=True, **{"poll": NEVER, **options})
        self.found: asyncio.Queue[int] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def _run(self) -> None:
        async for message in self.reader:
            self.found.put_nowait(message.seq)

    async def __aenter__(self) -> Self:
        await self.reader.open()
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def next(self, within: float = 4.0) -> int:
        """Return the sequence of the next message: sooner than the reader looks without a ring."""
        return await asyncio.wait_for(self.found.get(), within)


@pytest.fixture
async def armed(caplog: pytest.LogCaptureFixture) -> Callable[[int], Awaitable[None]]:
    """Wait until a doorbell was armed so often."""
    caplog.set_level("DEBUG", "jetstream_ext.client")

    async def armed(times: int = 1) -> None:
        async with asyncio.timeout(10):
            while sum(": armed;" in record.message for record in caplog.records) < times:
                await asyncio.sleep(0.002)

    return armed


async def bells(js: JetStreamContext, stream: str) -> list[str]:
    """Return the consumers that are doorbells."""
    names = [info.name or "" for info in await js.consumers_info(stream)]
    return [name for name in names if "doorbell" in name]


@pytest.mark.parametrize("version", [None, "2.12.8", "2.11.0"])
async def test_each_kind_of_stream_rings(version: str | None, armed: Callable[[int], Awaitable[None]]) -> None:
    rung = 0
    async with NatsServer(version=version) as server, await nats.connect(server.url) as nc:
        js = nc.jetstream(timeout=20)
        for stream, subject in (await streams(js, "S")).items():
            for wanted in (None, "S.a.*"):
                async with Tail(js, stream, subject=wanted) as tail:
                    for _ in range(4):
                        rung += 1
                        await armed(rung)
                        sent = await js.publish(subject)
                        found = await tail.next()
                        assert stream == "S-S" or found == sent.seq
            await asyncio.sleep(KEPT + 0.5)
            assert await bells(js, stream) == []


async def test_bursts_are_read_completely(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    kinds = await streams(js, name)
    async with contextlib.AsyncExitStack() as stack:
        tails = [await stack.enter_async_context(Tail(js, stream)) for stream in kinds]
        for size in (1, 2, 7, 8, 9, 300, 1):
            for _ in range(size):
                await js.publish(f"{name}.a")
            await asyncio.sleep(0.02)
        for tail in tails:
            assert [await tail.next() for _ in range(328)] == list(range(1, 329))


async def test_a_message_that_was_published_in_vain_does_not_end_the_wait(
    js: JetStreamContext, stream_name: Callable[[], str], armed: Callable[[int], Awaitable[None]]
) -> None:
    name = stream_name()
    await add(js, name)
    async with Tail(js, name) as tail:
        await armed(1)
        requests = js._nc.stats["out_msgs"]
        for _ in range(20):
            with contextlib.suppress(nats.js.errors.APIError):
                await js.publish(f"{name}.a", headers={"Nats-Expected-Last-Sequence": "99"})
        await asyncio.sleep(0.5)
        assert js._nc.stats["out_msgs"] - requests < 120
        await js.publish(f"{name}.a")
        assert await tail.next() == 1


async def test_readers_share_one_doorbell_and_what_they_ask(own_server: NatsServer) -> None:
    """All that 200 readers send is counted: they are as cheap as one."""
    async with await nats.connect(own_server.url) as nc, await nats.connect(own_server.url) as other:
        js = nc.jetstream(timeout=20)
        kinds = await streams(js, "S")
        for stream in ("S", "S-M"):
            async with contextlib.AsyncExitStack() as stack:
                tails = [await stack.enter_async_context(Tail(js, stream)) for _ in range(200)]
                await asyncio.sleep(3)  # the looks after it was armed come soon
                assert len(await bells(other.jetstream(), stream)) == (stream == "S-M")
                sent = nc.stats["out_msgs"]
                await asyncio.sleep(6)
                assert nc.stats["out_msgs"] - sent <= 2
                for _ in range(3):
                    sent = nc.stats["out_msgs"]
                    await other.jetstream().publish(kinds[stream])
                    assert len({await tail.next() for tail in tails}) == 1
                    await asyncio.sleep(0.4)
                    assert nc.stats["out_msgs"] - sent <= 20


async def test_a_marker_that_the_server_stores_rings(
    js: JetStreamContext, stream_name: Callable[[], str], armed: Callable[[int], Awaitable[None]]
) -> None:
    """Nothing is published for it; it may be gone before a reader would look by itself."""
    name = stream_name()
    config = {"subjects": [f"{name}.>"], "allow_direct": True, "allow_msg_ttl": True, "allow_rollup_hdrs": True}
    await jsx.ensure_stream(js, name=name, **config, subject_delete_marker_ttl=1.0)
    async with Tail(js, name) as tail:
        await armed(1)
        await js.publish(f"{name}.a", headers={"Nats-TTL": "3s"})
        assert [await tail.next() for _ in range(2)] == [1, 2]


async def test_messages_that_a_filter_excludes_do_not_cost_the_doorbell(
    js: JetStreamContext, stream_name: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing rings for them, also when a look finds them after a long pause, and that is right."""
    caplog.set_level("DEBUG", "jetstream_ext.client")
    name, seen = stream_name(), asyncio.Queue[int]()
    await add(js, name)
    kv = await js.create_key_value(bucket=name, direct=True)

    async def iterate() -> None:
        group = log.Group(js, name, "g", partitions=2, subject=f"{name}.a", start=log.New(), bucket=f"{name}-groups")
        async with group.join() as member:
            async for message in member:
                seen.put_nowait(message.seq)

    iterating = asyncio.create_task(iterate())
    async with kvx.Table(kv, ["a"]) as table:
        await asyncio.sleep(2)  # all wait
        for _ in range(14):
            await js.publish(f"{name}.b")
            await kv.put("b", b"")
            await asyncio.sleep(0.5)
        assert [record.getMessage() for record in caplog.records if "lost" in record.getMessage()] == []
        await js.publish(f"{name}.a")
        await asyncio.wait_for(seen.get(), 3)
        await table.wait_for(await kv.put("a", b""), timeout=3)
    iterating.cancel()
    await asyncio.wait({iterating})


async def test_a_short_timeout_does_not_wait_for_a_longer_one(own_server: NatsServer) -> None:
    async with await nats.connect(own_server.url) as nc:
        js = nc.jetstream()
        await add(js, "S")
        patient, quick = (log.LogReader(js, "S", timeout=time, patience=time / 2) for time in (8.0, 0.2))
        for reader in (patient, quick):
            assert await reader.read(timeout=0.1) == []
        own_server.pause()
        waiting = asyncio.create_task(patient.read(timeout=0.5))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(4):
            with pytest.raises(errors.RequestTimeoutError):
                await quick.read(timeout=0.5)
        own_server.resume()
        await waiting


async def test_what_ends_leaves_nothing(js: JetStreamContext, stream_name: Callable[[], str], leak_check: Any) -> None:
    name = stream_name()
    kinds = await streams(js, name)
    for stream in kinds:
        for pause in (0.0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.01, 0.05):
            async with Tail(js, stream):
                await asyncio.sleep(pause)
            async with Tail(js, stream) as one, Tail(js, stream) as two:  # the second goes on while the first ends
                await asyncio.sleep(pause)
                assert one.task is not None
                one.task.cancel()
                await js.publish(kinds[stream])
                await two.next()
        async with asyncio.timeout(KEPT + 3):  # the server itself would take longer
            while await bells(js, stream):
                await asyncio.sleep(0.05)
    await leak_check.assert_clean()


PROGRAM = """
import asyncio, sys, nats, jetstream_ext.log as log
async def main():
    nc = await nats.connect(sys.argv[1])
    async for message in log.LogReader(nc.jetstream(), "S-M", start=log.First(), tail=True):
        print(message.seq, flush=True)
asyncio.run(main())
"""


async def test_a_killed_process_leaves_its_consumer_for_some_seconds(own_server: NatsServer) -> None:
    async with await nats.connect(own_server.url) as nc:
        js = nc.jetstream(timeout=20)
        await streams(js, "S")
        await js.publish("S.a")
        with subprocess.Popen([sys.executable, "-c", PROGRAM, own_server.url], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            async with asyncio.timeout(20):
                while not await bells(js, "S-M"):
                    await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(3 * INACTIVE):
            while await bells(js, "S-M"):
                await asyncio.sleep(0.05)


async def test_where_there_may_be_none_the_reader_polls(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await add(js, name, max_consumers=1)
    await add(js, f"{name}-M", mirror=StreamSource(name=name), max_consumers=1)
    await add(js, f"{name}-W", sources=[StreamSource(name=name)], retention=RetentionPolicy.WORK_QUEUE)
    async with (
        Tail(js, name, doorbell=False, poll=0.05) as off,
        Tail(js, f"{name}-M", poll=0.05) as full,
        Tail(js, f"{name}-W", poll=0.05, on_lost="skip") as queue,
    ):
        await asyncio.sleep(0.2)
        assert await bells(js, f"{name}-M") == await bells(js, f"{name}-W") == []
        await js.publish(f"{name}.a")
        assert [await tail.next() for tail in (off, full, queue)] == [1, 1, 1]


async def test_a_user_without_permission_polls_and_is_told_once() -> None:
    users = """
      authorization { users: [
        { user: all, password: p }
        { user: few, password: p, permissions: {
            publish: [ "$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>" ], subscribe: [ "_INBOX.>" ] } } ] }
    """
    reported: list[Exception] = []

    async def report(error: Exception) -> None:
        reported.append(error)

    async with NatsServer(config=users) as server:
        own = {"user": "few", "password": "p", "error_cb": report}
        async with await nats.connect(server.url, user="all", password="p") as nc:
            js = nc.jetstream(timeout=20)
            await add(js, "S")
            async with (
                await nats.connect(server.url, **own) as limited,
                Tail(limited.jetstream(timeout=20), "S", poll=0.05) as tail,
            ):
                for seq in range(1, 6):
                    await asyncio.sleep(0.1)
                    await js.publish("S.a")
                    assert await tail.next() == seq
    assert len(reported) == 2, reported  # the subscription and the consumer


async def test_a_consumer_that_is_deleted_is_replaced(
    js: JetStreamContext, stream_name: Callable[[], str], armed: Callable[[int], Awaitable[None]]
) -> None:
    name = stream_name()
    await streams(js, name)
    async with Tail(js, f"{name}-M") as tail:
        for turn in range(1, 4):
            await armed(2 * turn - 1)
            await asyncio.sleep(1.1)  # one that is lost sooner is not made again at once
            [own] = await bells(js, f"{name}-M")
            await js.delete_consumer(f"{name}-M", own)
            await armed(2 * turn)
            await js.publish(f"{name}.a")
            assert await tail.next() == turn


async def test_after_a_restart_of_the_server(own_server: NatsServer) -> None:
    async with connected(own_server.url) as nc:
        js = nc.jetstream(timeout=20)
        await add(js, "S")
        await add(js, "N", subjects=[f"N.{n}" for n in range(9)])
        for stream, subject in {"S": "S.a", "N": "N.1"}.items():
            async with Tail(js, stream) as tail:
                await asyncio.sleep(0.1)
                own_server.kill()
                own_server.restart()
                await until(lambda: js.publish(subject, timeout=1))  # noqa: B023
                await tail.next(15)
                await asyncio.sleep(0.1)
                await js.publish(subject)
                await tail.next()


async def test_after_a_leader_change(cluster: NatsCluster, cluster_nc: Client, stream_name: Callable[[], str]) -> None:
    js, name = cluster_nc.jetstream(timeout=20), stream_name()
    await add(js, name, num_replicas=3)
    await add(js, f"{name}-M", mirror=StreamSource(name=name), num_replicas=3)
    for stream in (name, f"{name}-M"):
        async with Tail(js, stream) as tail:
            for _ in range(3):
                await asyncio.sleep(0.3)
                await cluster_nc.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", b"", timeout=10)
                await until(lambda: js.publish(f"{name}.a", timeout=1))
                await tail.next(10)
                await js.publish(f"{name}.a")
                await tail.next()


async def test_a_message_that_is_stored_long_after_it_was_published(
    cluster: NatsCluster, stream_name: Callable[[], str]
) -> None:
    """The doorbell rings at once, and the followers store the message later: the reader looks again soon."""
    name = stream_name()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server.url)) for server in cluster.servers]
        js = clients[0].jetstream(timeout=20)
        await add(js, name, num_replicas=3)
        info = (await js.stream_info(name)).cluster
        assert info is not None
        [at] = [n for n, server in enumerate(cluster.servers) if server.name == info.leader]
        followers = [server for server in cluster.servers if server.name != info.leader]
        async with Tail(clients[at].jetstream(timeout=20), name) as tail:
            for seq in (1, 2):
                await asyncio.sleep(1.5)  # the reader looks only once in 5.5 s now
                for server in followers:
                    server.pause()
                try:
                    await clients[at].publish(f"{name}.a", b"")
                    await clients[at].flush()
                    await asyncio.sleep(0.4)
                finally:
                    for server in followers:
                        server.resume()
                assert await tail.next() == seq


@pytest.fixture
async def hub(leaf: NatsServer) -> AsyncIterator[JetStreamContext]:
    """The context of the hub's domain, of a client of the leaf node."""
    async with await nats.connect(leaf.url, connect_timeout=10) as nc:
        js = nc.jetstream(domain="hub", timeout=20)
        await until(js.account_info)
        yield js


async def test_in_a_domain(
    hub: JetStreamContext, stream_name: Callable[[], str], armed: Callable[[int], Awaitable[None]]
) -> None:
    name = stream_name()
    await add(hub, name)
    async with Tail(hub, name) as tail:
        for seq in range(1, 4):
            await armed(seq)
            await hub._nc.publish(f"{name}.a", b"")
            assert await tail.next() == seq
    kv = await kvx.ensure_bucket(hub, name)
    async with kvx.Table(kv) as table:
        await armed(4)
        async with kvx.transaction(kv) as tx:
            tx.put("a", b"1")
        async with asyncio.timeout(4):
            while "a" not in table:
                await asyncio.sleep(0.005)
    with pytest.raises(TypeError, match="doorbell must be True or False"):
        kvx.Table(kv, doorbell=1)  # type: ignore[call-overload]
