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

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.log import LogReader, OffsetStore, Processed, exactly_once
from jetstream_ext.testing import NatsServer

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from proxy import Proxy

Make = Callable[..., Awaitable[str]]
More = Callable[[str, int, int], Awaitable[None]]


class Replica:
    """One run of the worker "w", which follows its input, and the sequences that it has handled."""

    def __init__(
        self,
        js: JetStreamContext,
        source: str,
        target: str,
        offsets: OffsetStore,
        *,
        handler: Any = None,
        **options: Any,
    ) -> None:
        self.handled: list[int] = []
        self.handler = handler
        self.target = target
        reader = LogReader(js, source, tail=True, poll=0.01, offsets=offsets)
        options = {"name": "w", "prefix": f"{target}.at", **options}
        self.task: asyncio.Task[Processed] = asyncio.ensure_future(exactly_once(reader, target, self.handle, **options))

    async def handle(self, message: StoredMsg) -> BatchMessage:
        self.handled.append(message.seq)
        if self.handler is not None:
            await self.handler(message)
        return BatchMessage(f"{self.target}.out", message.data)

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


@pytest.fixture
async def offsets(js: JetStreamContext, stream_name: Callable[[], str]) -> OffsetStore:
    """A bucket for leases."""
    return await OffsetStore(js, stream_name()).create()


@pytest.fixture
async def start(js: JetStreamContext, make_stream: Make, offsets: OffsetStore) -> AsyncIterator[Callable[..., Replica]]:
    """Start replicas of one worker; they are stopped at the end. The function has its streams' names."""
    source, target = await make_stream(), await make_stream()
    started: list[Replica] = []

    def start(js: JetStreamContext = js, **options: Any) -> Replica:
        started.append(Replica(js, source, target, offsets, **options))
        return started[-1]

    start.source, start.target = source, target  # type: ignore[attr-defined]
    yield start
    for replica in started:
        replica.task.cancel()
    await asyncio.gather(*(replica.task for replica in started), return_exceptions=True)


def lease_key(target: str) -> str:
    return f"leases.{target}.{target}.at.w"


async def lease_of(js: JetStreamContext, offsets: OffsetStore, target: str) -> KeyValue.Entry | None:
    """Return the lease of the worker "w", or None if it is not held."""
    try:
        return await (await js.key_value(offsets.bucket)).get(lease_key(target))
    except KeyNotFoundError:
        return None


async def record_of(js: JetStreamContext, target: str) -> dict[str, Any]:
    """Return the newest record of the worker "w"."""
    return json.loads((await jsx.DirectGet(js, target).get_last(f"{target}.at.w")).data)


async def outputs(js: JetStreamContext, target: str, last: int) -> list[int]:
    """Return the outputs once the one of the input `last` is stored."""
    reader = LogReader(js, target, subject=f"{target}.out", tail=True, poll=0.02)
    found: list[int] = []
    async with asyncio.timeout(60):
        while last not in found:
            found.append(int((await anext(reader)).data))
    return found


async def test_a_standby_takes_over_at_once_when_the_other_worker_is_stopped(
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore
) -> None:
    active = start(standby=True)
    await more(start.source, 1, 3)
    await active.handles(3)
    standby = start(standby=True)
    await more(start.source, 4, 6)
    await active.handles(6)
    await active.stop()
    await more(start.source, 7, 9)
    async with asyncio.timeout(6):  # a lease that is left ends 6.7 s after its last renewal was due
        await standby.handles(9)
    assert await outputs(js, start.target, 9) == list(range(1, 10))
    assert active.handled == list(range(1, 7))
    assert set(standby.handled) >= {7, 8, 9}
    await standby.stop()
    assert await lease_of(js, offsets, start.target) is None


PROGRAM = """
import asyncio, sys
import nats
from jetstream_ext.log import LogReader, OffsetStore, exactly_once

async def main(url, source, target, bucket, standby):
    js = (await nats.connect(url)).jetstream(timeout=30)
    reader = LogReader(js, source, tail=True, poll=0.01, offsets=OffsetStore(js, bucket))
    handle = lambda message: (target + ".out", message.data)
    await exactly_once(reader, target, handle, name="w", prefix=target + ".at", standby=standby == "True")

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def killed_at_the_end(*arguments: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def test_a_standby_takes_over_when_the_other_worker_dies(
    js: JetStreamContext, server: NatsServer, start: Any, more: More, offsets: OffsetStore
) -> None:
    async with killed_at_the_end(server.url, start.source, start.target, offsets.bucket, "True"):
        await more(start.source, 1, 3)
        assert await outputs(js, start.target, 3) == [1, 2, 3]
        standby = start(standby=True)
        # It renews its lease while it has nothing to do.
        renewed: set[int] = set()
        async with asyncio.timeout(60):
            while len(renewed) < 3:
                found = await lease_of(js, offsets, start.target)
                assert found is not None
                renewed.add(found.revision or 0)
                await asyncio.sleep(0.05)
        await more(start.source, 4, 4)
        assert await outputs(js, start.target, 4) == [1, 2, 3, 4]
        assert not standby.handled
    await more(start.source, 5, 5)
    await standby.handles(5)


async def test_only_one_of_several_standbys_works(start: Any, more: More) -> None:
    replicas = [start(standby=True) for _ in range(4)]
    for n in range(1, 6):
        await more(start.source, n, n)
        while not any(n in replica.handled for replica in replicas):
            await asyncio.sleep(0.01)
    assert sorted(replica.handled for replica in replicas) == [[], [], [], [1, 2, 3, 4, 5]]
    assert not any(replica.task.done() for replica in replicas)


async def test_workers_of_other_names_and_streams_have_leases_of_their_own(
    js: JetStreamContext, start: Any, make_stream: Make, offsets: OffsetStore, more: More
) -> None:
    other = await make_stream()
    replicas = [
        start(standby=True),
        start(standby=True, name="v.$é="),  # not all of this may be in a key
        Replica(js, start.source, other, offsets, standby=True),
    ]
    await more(start.source, 1, 1)
    for replica in replicas:
        await replica.handles(1)
    await replicas[-1].stop()


async def test_a_worker_whose_lease_was_taken_stops(
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore
) -> None:
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    taken = json.dumps({"v": 1, "worker": "another"}).encode()
    await (await js.key_value(offsets.bucket)).put(lease_key(start.target), taken)
    with pytest.raises(errors.FencedError, match="has taken its lease"):
        await asyncio.wait_for(active.task, 60)
    found = await lease_of(js, offsets, start.target)
    assert found is not None
    assert found.value == taken, "the lease of the other worker stays"


async def test_cancelling_a_standby_leaves_nothing(
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore, leak_check: Any
) -> None:
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    held = await lease_of(js, offsets, start.target)
    assert held is not None
    for steps in range(0, 40, 3):
        standby = start(standby=True)
        for _ in range(steps):
            await asyncio.sleep(0.002)
        await standby.stop()
    await more(start.source, 2, 2)
    await active.handles(2)
    found = await lease_of(js, offsets, start.target)
    assert found is not None
    assert found.value == held.value
    await active.stop()
    await leak_check.assert_clean()


async def test_the_bucket_is_created(js: JetStreamContext, make_stream: Make, stream_name: Callable[[], str]) -> None:
    source, target, bucket = await make_stream(3), await make_stream(), stream_name()
    reader = LogReader(js, source, offsets=OffsetStore(js, bucket))
    await exactly_once(reader, target, lambda _: None, name="w", prefix=f"{target}.at", standby=True)
    assert (await js.stream_info(f"KV_{bucket}")).config.allow_msg_ttl
    plain = LogReader(js, source, offsets=OffsetStore(js, stream_name()))
    await exactly_once(plain, target, lambda _: None, name="w", prefix=f"{target}.at")
    with pytest.raises(NotFoundError):
        await js.stream_info(f"KV_{plain.offsets.bucket}")


async def test_a_bucket_without_ttls_of_keys_is_refused(
    js: JetStreamContext, make_stream: Make, stream_name: Callable[[], str]
) -> None:
    source, target, bucket = await make_stream(3), await make_stream(), stream_name()
    await js.add_stream(name=f"KV_{bucket}", subjects=[f"$KV.{bucket}.>"], max_msgs_per_subject=1)
    handled: list[StoredMsg] = []

    def work() -> Awaitable[Processed]:
        reader = LogReader(js, source, offsets=OffsetStore(js, bucket))
        return exactly_once(reader, target, handled.append, name="w", prefix=f"{target}.at", standby=True)

    with pytest.raises(errors.StreamConfigMismatchError, match=r"allow_msg_ttl.*enable") as caught:
        await work()
    assert caught.value.diff == {"allow_msg_ttl": (True, False)}
    assert not handled
    await kvx.enable(await js.key_value(bucket), ttl=True)
    assert (await work()).inputs == 3


async def test_a_foreign_value_of_the_key_is_refused(js: JetStreamContext, start: Any, offsets: OffsetStore) -> None:
    await (await js.key_value(offsets.bucket)).put(lease_key(start.target), b"hello")
    with pytest.raises(ValueError, match="not the lease of a worker"):
        await asyncio.wait_for(start(standby=True).task, 60)


# -- without a lease ------------------------------------------------------------------------------------------------


async def take_over(js: JetStreamContext, start: Any, more: More) -> tuple[Replica, Replica]:
    """Let a worker take over from another one, which ends; the first message has the sequence 1."""
    first = start()
    await more(start.source, 1, 1)
    await first.handles(1)
    second = start()
    async with asyncio.timeout(60):
        while not first.task.done():
            await more(start.source, 0, 0)
            await asyncio.sleep(0.05)
    with pytest.raises(errors.FencedError):
        first.task.result()
    return first, second


@pytest.mark.parametrize("standby", [False, True])
async def test_a_fenced_worker_that_is_started_again_waits_until_the_take_over_is_old(
    js: JetStreamContext, start: Any, more: More, standby: bool
) -> None:
    _, second = await take_over(js, start, more)
    begun = time.monotonic()
    again = start(standby=standby)
    took_over = (await record_of(js, start.target))["took_over"]
    async with asyncio.timeout(60):
        while not second.task.done():
            await more(start.source, 0, 0)
            await asyncio.sleep(0.1)
    with pytest.raises(errors.FencedError):
        second.task.result()
    assert time.monotonic() - begun > 5, "it took over from one that had just done so"
    found = await record_of(js, start.target)
    assert found["took_over"] >= took_over + 10
    last = (await js.stream_info(start.source)).state.last_seq
    await again.handles(last)
    assert await outputs_are_those_of_inputs(js, start)


async def outputs_are_those_of_inputs(js: JetStreamContext, start: Any) -> bool:
    inputs = [msg.data async for msg in LogReader(js, start.source)]
    while True:
        found = [msg.data async for msg in LogReader(js, start.target, subject=f"{start.target}.out")]
        if len(found) >= len(inputs):
            return found == inputs
        await asyncio.sleep(0.05)


async def test_a_worker_does_not_wait_for_one_that_has_ended(js: JetStreamContext, start: Any, more: More) -> None:
    """It was stopped, its handler has raised, or it came to the end of its input; also if it had just taken over."""

    _, second = await take_over(js, start, more)
    assert "released" not in await record_of(js, start.target)
    last = (await js.stream_info(start.source)).state.last_seq
    begun = time.monotonic()
    await second.stop()
    for n in range(last + 1, last + 4):
        replica = start()
        await more(start.source, n, n)
        await replica.handles(n)
        assert "took_over" not in await record_of(js, start.target)
        await replica.stop()

    async def broken(message: StoredMsg) -> None:
        raise ZeroDivisionError

    await more(start.source, last + 4, last + 4)
    with pytest.raises(ZeroDivisionError):
        await start(handler=broken).task
    assert (await record_of(js, start.target))["released"]
    done = await exactly_once(
        LogReader(js, start.source), start.target, lambda _: None, name="w", prefix=f"{start.target}.at"
    )
    assert done.inputs == 1
    assert (await record_of(js, start.target))["released"]
    assert time.monotonic() - begun < 9


async def test_a_release_is_noticed_by_one_that_waits(js: JetStreamContext, start: Any, more: More) -> None:
    _, second = await take_over(js, start, more)
    begun = time.monotonic()
    again = start()
    await asyncio.sleep(0.5)
    last = (await js.stream_info(start.source)).state.last_seq
    await second.stop()
    await more(start.source, last + 1, last + 1)
    await again.handles(last + 1)
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize("seconds", [-7.0, 1e6])
async def test_the_wait_for_an_old_take_over_is_bounded(
    js: JetStreamContext, start: Any, more: More, seconds: float
) -> None:
    """Times are those of leaders, whose clocks may differ, and any program may write the record."""
    await exactly_once(LogReader(js, start.source), start.target, lambda _: None, name="w", prefix=f"{start.target}.at")
    record = await record_of(js, start.target)
    del record["released"]
    record["took_over"] = int(time.time() + seconds)
    await js.publish(f"{start.target}.at.w", json.dumps(record).encode())
    begun = time.monotonic()
    replica = start()
    await more(start.source, 1, 1)
    await replica.handles(1)
    assert 1 < time.monotonic() - begun < 30
    assert abs((await record_of(js, start.target))["took_over"] - time.time()) < 60


async def test_a_newcomer_takes_over_from_a_worker_that_commits_without_pause(
    js: JetStreamContext, start: Any, more: More
) -> None:
    async def none(message: StoredMsg) -> None:
        handled.append(message.seq)

    def work() -> asyncio.Task[Processed]:
        running = exactly_once(
            LogReader(js, start.source), start.target, none, name="w", prefix=f"{start.target}.at", max_messages=1
        )
        return asyncio.ensure_future(running)

    handled: list[int] = []
    await more(start.source, 1, 20_000)
    active = work()
    while len(handled) < 5:
        await asyncio.sleep(0.01)
    other = work()
    try:
        with pytest.raises(errors.FencedError):
            await asyncio.wait_for(active, 60)
        assert len(handled) < 20_000, "it ended before its input did"
    finally:
        for task in (active, other):
            task.cancel()
        await asyncio.wait([active, other])


async def test_a_newcomer_that_comes_too_late_each_time_says_so(
    js: JetStreamContext, server: NatsServer, start: Any, more: More
) -> None:
    async def none(message: StoredMsg) -> None:
        handled.append(message.seq)

    handled: list[int] = []
    await more(start.source, 1, 20_000)
    options: dict[str, Any] = {"name": "w", "prefix": f"{start.target}.at", "max_messages": 1}
    active = asyncio.ensure_future(exactly_once(LogReader(js, start.source), start.target, none, **options))
    async with (
        Proxy(int(server.url.rpartition(":")[2])) as proxy,
        await nats.connect(proxy.url, connect_timeout=10) as nc,
    ):
        while len(handled) < 5:
            await asyncio.sleep(0.01)
        proxy.delay = 0.3
        reader = LogReader(nc.jetstream(timeout=30), start.source)
        with pytest.raises(errors.RequestTimeoutError, match="before each attempt to take over"):
            await exactly_once(reader, start.target, none, patience=3, **options)
        proxy.delay = 0.0
    assert not active.done()
    active.cancel()
    await asyncio.wait([active])
