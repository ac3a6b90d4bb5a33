"""Replicas of one worker: a standby waits for the lease, and workers that are restarted do not stop each other repeatedly."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue
from workers import MakePair, Pair

import jetstream_ext.kv as kvx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import OffsetStore, Processed
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from proxy import Proxy

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


class Replica:
    """One run of the worker "w", which follows its input, and the sequences that it has handled."""

    def __init__(self, pair: Pair, *, handler: Any = None, **options: Any) -> None:
        self.handled: list[int] = []
        self.handler = handler
        self.pair = pair
        reader = pair.reader(tail=True, poll=0.01, offsets=options.pop("offsets", None))
        self.task: asyncio.Task[Processed] = asyncio.ensure_future(pair.work(self.handle, reader, **options))

    async def handle(self, message: StoredMsg) -> BatchMessage:
        self.handled.append(message.seq)
        if self.handler is not None:
            await self.handler(message)
        return self.pair.out(message)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def handles(self, seq: int) -> None:
        async with asyncio.timeout(60):
            while seq not in self.handled:
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.01)


class Replicas(Pair):
    """The streams of one worker, a bucket for its leases, and its replicas."""

    def __init__(self, pair: Pair, more: More, offsets: OffsetStore) -> None:
        super().__init__(pair.js, pair.source, pair.target)
        self.offsets = offsets
        self.lease_key = f"leases.{pair.target}.{pair.target}.at.w"
        self.started: list[Replica] = []
        self._more = more

    def start(self, pair: Pair | None = None, **options: Any) -> Replica:
        self.started.append(Replica(pair or self, offsets=self.offsets, **options))
        return self.started[-1]

    async def more(self, first: int, last: int) -> None:
        await self._more(self.source, first, last)

    async def active(self, **options: Any) -> Replica:
        """Start a replica, which handles the first input."""
        replica = self.start(**options)
        await self.more(1, 1)
        await replica.handles(1)
        return replica

    async def last(self) -> int:
        return (await self.js.stream_info(self.source)).state.last_seq

    async def bucket(self) -> KeyValue:
        return await self.js.key_value(self.offsets.bucket)

    async def lease(self) -> dict[str, Any] | None:
        """Return the lease of the worker "w", or None if there is none."""
        with contextlib.suppress(KeyNotFoundError):
            return json.loads((await (await self.bucket()).get(self.lease_key)).value or b"")
        return None

    async def record(self) -> dict[str, Any]:
        return (await self.records())[-1]

    async def until_out(self, last: int) -> list[int]:
        """Return the outputs once the one of the input `last` is stored."""
        async with asyncio.timeout(60):
            while last not in (found := await self.outputs()):
                await asyncio.sleep(0.02)
        return found

    async def take_over(self) -> Replica:
        """Let a worker take over from another one, which ends."""
        first = await self.active()
        second = self.start()
        await self.until_fenced(first)
        return second

    async def until_fenced(self, replica: Replica) -> None:
        async with asyncio.timeout(60):
            while not replica.task.done():
                await self.more(0, 0)
                await asyncio.sleep(0.05)
        with pytest.raises(errors.FencedError):
            replica.task.result()


@pytest.fixture
async def group(
    js: JetStreamContext, make_pair: MakePair, more: More, stream_name: Callable[[], str]
) -> AsyncIterator[Replicas]:
    """Replicas of one worker; they are stopped at the end."""
    replicas = Replicas(await make_pair(), more, await OffsetStore(js, stream_name()).create())
    yield replicas
    for replica in replicas.started:
        replica.task.cancel()
    await asyncio.gather(*(replica.task for replica in replicas.started), return_exceptions=True)


async def test_a_standby_takes_over_at_once_when_the_other_worker_is_stopped(group: Replicas) -> None:
    active = await group.active(standby=True)
    standby = group.start(standby=True)
    await group.more(2, 6)
    await active.handles(6)
    await active.stop()
    await group.more(7, 9)
    async with asyncio.timeout(6):  # a lease that is left ends 6.7 s after its last renewal was due
        await standby.handles(9)
    assert await group.until_out(9) == list(range(1, 10))
    assert active.handled == list(range(1, 7))
    assert set(standby.handled) >= {7, 8, 9}
    await standby.stop()
    lease = await group.lease()
    assert lease is not None
    assert lease["released"]
    async with asyncio.timeout(60):
        while await group.lease() is not None:
            await asyncio.sleep(0.1)


PROGRAM = """
import asyncio, sys
import nats
from jetstream_ext.log import LogReader, OffsetStore, exactly_once

async def main(url, source, target, bucket):
    js = (await nats.connect(url)).jetstream(timeout=30)
    reader = LogReader(js, source, tail=True, poll=0.01, offsets=OffsetStore(js, bucket))
    handle = lambda message: (target + ".out", message.data)
    await exactly_once(reader, target, handle, name="w", prefix=target + ".at", standby=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_standby_takes_over_when_the_other_worker_dies(server: NatsServer, group: Replicas) -> None:
    arguments = server.url, group.source, group.target, group.offsets.bucket
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments)
    try:
        await group.more(1, 3)
        assert await group.until_out(3) == [1, 2, 3]
        standby = group.start(standby=True)
        renewed: set[int] = set()  # while it has nothing to do
        async with asyncio.timeout(60):
            while len(renewed) < 3:
                renewed.add((await (await group.bucket()).get(group.lease_key)).revision or 0)
                await asyncio.sleep(0.05)
        await group.more(4, 4)
        assert await group.until_out(4) == [1, 2, 3, 4]
        assert not standby.handled
    finally:
        process.kill()
        await process.wait()
    await group.more(5, 5)
    await standby.handles(5)


async def test_only_one_of_several_standbys_works(group: Replicas) -> None:
    replicas = [group.start(standby=True) for _ in range(4)]
    for n in range(1, 6):
        await group.more(n, n)
        while not any(n in replica.handled for replica in replicas):
            await asyncio.sleep(0.01)
    assert sorted(replica.handled for replica in replicas) == [[], [], [], [1, 2, 3, 4, 5]]
    assert not any(replica.task.done() for replica in replicas)


async def test_workers_of_other_names_and_streams_have_leases_of_their_own(
    js: JetStreamContext, group: Replicas, make_stream: Make
) -> None:
    replicas = [
        group.start(standby=True),
        group.start(standby=True, name="v.$é="),  # not all of this may be in a key
        group.start(Pair(js, group.source, await make_stream()), standby=True),
    ]
    await group.more(1, 1)
    for replica in replicas:
        await replica.handles(1)


async def test_a_worker_whose_lease_was_taken_stops(group: Replicas) -> None:
    active = await group.active(standby=True)
    taken = {"v": 1, "seq": 1, "writer": "another"}
    await (await group.bucket()).put(group.lease_key, json.dumps(taken).encode())
    with pytest.raises(errors.FencedError, match="has taken its lease"):
        await asyncio.wait_for(active.task, 60)
    assert await group.lease() == taken, "the lease of the other worker stays"


async def test_cancelling_a_standby_leaves_nothing(group: Replicas, leak_check: Any) -> None:
    active = await group.active(standby=True)
    held = await group.lease()
    assert held is not None
    for steps in range(0, 40, 3):
        standby = group.start(standby=True)
        for _ in range(steps):
            await asyncio.sleep(0.002)
        await standby.stop()
    await group.more(2, 2)
    await active.handles(2)
    assert await group.lease() == held
    await active.stop()
    await leak_check.assert_clean()


async def test_the_bucket_is_created(js: JetStreamContext, make_pair: MakePair, stream_name: Callable[[], str]) -> None:
    pair, offsets = await make_pair(3), OffsetStore(js, stream_name())
    await pair.work(reader=pair.reader(offsets=offsets))
    with pytest.raises(NotFoundError):
        await js.stream_info(f"KV_{offsets.bucket}")
    await pair.work(reader=pair.reader(offsets=offsets), standby=True)
    assert (await js.stream_info(f"KV_{offsets.bucket}")).config.allow_msg_ttl


async def test_a_bucket_without_ttls_of_keys_is_refused(
    js: JetStreamContext, make_pair: MakePair, stream_name: Callable[[], str]
) -> None:
    pair, bucket = await make_pair(3), stream_name()
    await js.add_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1)
    with pytest.raises(errors.StreamConfigMismatchError, match=r"allow_msg_ttl.*enable") as caught:
        await pair.work(reader=pair.reader(offsets=OffsetStore(js, bucket)), standby=True)
    assert caught.value.diff == {"allow_msg_ttl": (True, False)}
    assert not await pair.outputs()
    await kvx.enable(await js.key_value(bucket), ttl=True)
    assert (await pair.work(reader=pair.reader(offsets=OffsetStore(js, bucket)), standby=True)).inputs == 3


async def test_a_foreign_value_of_the_key_is_refused(group: Replicas) -> None:
    await (await group.bucket()).put(group.lease_key, b"hello")
    with pytest.raises(ValueError, match="not the lease of a worker"):
        await asyncio.wait_for(group.start(standby=True).task, 60)


# -- without a lease ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standby", [False, True])
async def test_a_fenced_worker_that_is_started_again_waits_until_the_take_over_is_old(
    group: Replicas, standby: bool
) -> None:
    second = await group.take_over()
    begun = time.monotonic()
    again = group.start(standby=standby)
    took_over = (await group.record())["took_over"]
    await group.until_fenced(second)
    assert time.monotonic() - begun > 5, "it took over from one that had just done so"
    assert (await group.record())["took_over"] >= took_over + 10
    last = await group.last()
    await again.handles(last)
    inputs = [int(msg.data) async for msg in group.reader()]
    async with asyncio.timeout(60):
        while len(found := await group.outputs()) < len(inputs):
            await asyncio.sleep(0.05)
    assert found == inputs


async def test_a_worker_does_not_wait_for_one_that_has_ended(group: Replicas) -> None:
    """It was stopped, its handler has raised, or it came to the end of its input; also if it had just taken over."""
    second = await group.take_over()
    assert "released" not in await group.record()
    begun = time.monotonic()
    waiting = group.start()
    await asyncio.sleep(0.5)  # it looks again and again
    last = await group.last()
    await second.stop()
    await group.more(last + 1, last + 1)
    await waiting.handles(last + 1)
    assert "took_over" not in await group.record()
    await waiting.stop()

    async def broken(message: StoredMsg) -> None:
        raise ZeroDivisionError

    await group.more(last + 2, last + 2)
    with pytest.raises(ZeroDivisionError):
        await group.start(handler=broken).task
    assert (await group.record())["released"]
    assert (await group.work()).inputs == 1
    assert (await group.record())["released"]
    assert time.monotonic() - begun < 9


@pytest.mark.parametrize(("seconds", "least"), [(-7.0, 1), (5.0, 10), (1e6, 0)])
async def test_the_wait_for_an_old_take_over_is_bounded(group: Replicas, seconds: float, least: float) -> None:
    """Times are those of leaders, whose clocks may differ, and any program may write the record."""
    await group.work()
    await group.forge(released=None, took_over=int(time.time() + seconds))
    begun = time.monotonic()
    await group.active()
    assert least < time.monotonic() - begun < 30
    assert abs((await group.record())["took_over"] - time.time()) < 60


@contextlib.asynccontextmanager
async def busy(group: Replicas) -> AsyncIterator[tuple[asyncio.Task[Processed], list[int]]]:
    """A worker that commits without a pause, and what it has handled."""
    handled: list[int] = []

    async def handle(message: StoredMsg) -> None:
        handled.append(message.seq)

    await group.more(1, 20_000)
    active = asyncio.ensure_future(group.work(handle, max_messages=1))
    while len(handled) < 5:
        await asyncio.sleep(0.01)
    yield active, handled
    active.cancel()
    await asyncio.wait([active])


async def test_a_newcomer_takes_over_from_a_worker_that_commits_without_pause(group: Replicas) -> None:
    async with busy(group) as (active, handled):
        other = group.start()
        with pytest.raises(errors.FencedError):
            await asyncio.wait_for(asyncio.shield(active), 60)
        assert len(handled) < 20_000, "it ended before its input did"
        await other.stop()


async def test_a_newcomer_that_comes_too_late_each_time_says_so(server: NatsServer, group: Replicas) -> None:
    async with (
        busy(group) as (active, _),
        Proxy(int(server.url.rpartition(":")[2])) as proxy,
        await nats.connect(proxy.url, connect_timeout=10) as nc,
    ):
        proxy.delay = 0.3
        reader = group.reader(js=nc.jetstream(timeout=30))
        with pytest.raises(errors.RequestTimeoutError, match="before each attempt to take over"):
            await group.work(reader=reader, patience=3)
        proxy.delay = 0.0
        assert not active.done()
