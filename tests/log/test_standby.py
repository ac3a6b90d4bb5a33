"""Replicas of one worker: a standby waits for the lease, and workers that are restarted do not stop each other repeatedly."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, NotFoundError

from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.connection import open_bucket
from jetstream_ext.client.fenced_write import RecordMovedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.log import Last, LogReader, OffsetStore, Processed, exactly_once, lease, takeover, worker
from jetstream_ext.log.lease import Lease
from jetstream_ext.testing import NatsServer, ReferenceServer, VirtualClock

sys.path.insert(0, str(Path(__file__).parent))

from group_members import replace_publish

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
async def offsets(js: JetStreamContext, stream_name: Callable[[], str], request: pytest.FixtureRequest) -> OffsetStore:
    """A bucket for leases; parametrized indirectly with False, it does not allow TTLs."""
    name = stream_name()
    if getattr(request, "param", True):
        return await OffsetStore(js, name).create()
    await js.add_stream(name=f"KV_{name}", subjects=[f"$KV.{name}.>"], max_msgs_per_subject=1)
    return OffsetStore(js, name)


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


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Callable[[str], Awaitable[JetStreamContext]]]:
    """Open a connection whose inboxes have a prefix."""
    opened: list[Client] = []

    async def connect(prefix: str) -> JetStreamContext:
        opened.append(await nats.connect(server.url, inbox_prefix=prefix, connect_timeout=10))
        return opened[-1].jetstream(timeout=30)

    yield connect
    for nc in opened:
        await nc.close()


TTL_OR_NOT = pytest.mark.parametrize("offsets", [True, False], indirect=True, ids=["with TTLs", "without TTLs"])


def lease_key(target: str) -> str:
    return f"leases.{target}.{target}.at.w"


async def lease_of(js: JetStreamContext, offsets: OffsetStore, target: str) -> dict[str, Any] | None:
    """Return the lease of the worker "w", or None if it is not held."""
    try:
        return json.loads((await (await js.key_value(offsets.bucket)).get(lease_key(target))).value or b"")
    except KeyNotFoundError:
        return None


async def until_lease(
    js: JetStreamContext, offsets: OffsetStore, target: str, holds: Callable[[dict[str, Any]], bool]
) -> None:
    async with asyncio.timeout(60):
        while (found := await lease_of(js, offsets, target)) is None or not holds(found):
            await asyncio.sleep(0.02)


async def outputs(js: JetStreamContext, target: str, last: int) -> list[int]:
    """Return the outputs once the one of the input `last` is stored."""
    reader = LogReader(js, target, subject=f"{target}.out", tail=True, poll=0.02)
    found: list[int] = []
    async with asyncio.timeout(60):
        while last not in found:
            found.append(int((await anext(reader)).data))
    return found


@TTL_OR_NOT
async def test_a_standby_takes_over_at_once_when_the_other_worker_is_stopped(
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 3600)
    active = start(standby=True)
    await more(start.source, 1, 3)
    await active.handles(3)
    standby = start(standby=True)
    await more(start.source, 4, 6)
    await active.handles(6)
    await active.stop()
    await more(start.source, 7, 9)
    assert await outputs(js, start.target, 9) == list(range(1, 10))
    assert active.handled == list(range(1, 7))
    assert set(standby.handled) >= {7, 8, 9}
    await standby.stop()
    assert await lease_of(js, offsets, start.target) is None


PROGRAM = """
import asyncio, sys
import nats
from jetstream_ext.log import LogReader, OffsetStore, exactly_once, lease

lease.SECONDS = 3

async def main(url, source, target, bucket):
    js = (await nats.connect(url)).jetstream(timeout=30)
    reader = LogReader(js, source, tail=True, poll=0.01, offsets=OffsetStore(js, bucket))
    handle = lambda message: (target + ".out", message.data)
    await exactly_once(reader, target, handle, name="w", prefix=target + ".at", standby=True)

asyncio.run(main(*sys.argv[1:]))
"""


@TTL_OR_NOT
async def test_a_standby_takes_over_when_the_other_worker_dies(
    js: JetStreamContext, server: NatsServer, start: Any, more: More, offsets: OffsetStore, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 3)
    arguments = [server.url, start.source, start.target, offsets.bucket]
    active = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments)
    try:
        await more(start.source, 1, 3)
        assert await outputs(js, start.target, 3) == [1, 2, 3]
        standby = start(standby=True)
        # It renews its lease, while it works and while it has nothing to do.
        await until_lease(js, offsets, start.target, lambda it: it["renewal"] > 2)
        await more(start.source, 4, 4)
        assert await outputs(js, start.target, 4) == [1, 2, 3, 4]
        assert not standby.handled
    finally:
        active.kill()
        await active.wait()
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
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 1)
    monkeypatch.setattr(worker, "_IDLE", 0.1)
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    taken = {"v": 1, "worker": "another", "seconds": 3600, "renewal": 1}
    await (await js.key_value(offsets.bucket)).put(lease_key(start.target), json.dumps(taken).encode())
    with pytest.raises(errors.FencedError, match="has taken its lease"):
        await asyncio.wait_for(active.task, 60)
    assert await lease_of(js, offsets, start.target) == taken, "the lease of the other worker stays"


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
    assert found["worker"] == held["worker"]
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


async def test_a_foreign_value_of_the_key_is_refused(js: JetStreamContext, start: Any, offsets: OffsetStore) -> None:
    await (await js.key_value(offsets.bucket)).put(lease_key(start.target), b"hello")
    with pytest.raises(ValueError, match="not the lease of a worker"):
        await asyncio.wait_for(start(standby=True).task, 60)


@pytest.mark.parametrize("standby", [False, True])
async def test_a_fenced_worker_that_is_started_again_waits_while_the_other_one_is_alive(
    js: JetStreamContext, start: Any, connect: Any, more: More, monkeypatch: pytest.MonkeyPatch, standby: bool
) -> None:
    """Each start has an inbox prefix of its own; one of them may pass ``standby=True``."""
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.3)
    first, last = start(js=await connect("_INBOX_1")), 0

    async def store() -> int:
        nonlocal last
        last += 1
        await more(start.source, last, last)
        return last

    await first.handles(await store())
    second = start(js=await connect("_INBOX.user.2"), standby=standby)
    async with asyncio.timeout(60):
        while not first.task.done():
            await store()
            await asyncio.sleep(0.05)
    with pytest.raises(errors.FencedError):
        first.task.result()
    again = start(js=await connect("_INBOX_3"))
    for _ in range(10):
        await second.handles(await store())
        await asyncio.sleep(0.1)
    assert not again.handled
    await second.stop()
    await again.handles(await store())
    assert await outputs(js, start.target, last) == list(range(1, last + 1))


ID = "A1b2C3d4E5f6G7h8I9j0K1"


FORGED: list[tuple[str, Any]] = [
    *(("inbox", inbox) for inbox in (
        "$JS.API.STREAM.DELETE.{}", f"$JS.API.STREAM.PURGE.{ID}", f"$JS._INBOX.{ID}", f"{{}}.{ID}", f"{{}}._INBOX.{ID}",
        f"_INBOX.{ID}.reply", f"_INBOX.*.{ID}", f"_INBOX..{ID}", f"_INBOX.a b.{ID}", f"_INBOX.\u00e9.{ID}",
        f"_INBOX.\r\nPUB {{}} 0\r\n.{ID}", f"_INBOX.{ID}\n", f"_INBOX.{'x' * 5000}.{ID}", "a b\r\nPUB {} 0\r\n", ">",
        "", 7,
    )),
    ("took_over", "lately"), ("took_over", None),
]  # fmt: skip


async def test_a_worker_sends_nothing_to_a_subject_that_another_program_has_chosen(
    js: JetStreamContext, nc: Client, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.05)
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 0.0)
    failures: list[str] = []
    sent: list[str] = []

    async def look(message: Any) -> None:
        if not message.data:
            sent.append(message.subject)

    await nc.subscribe(">", cb=look)
    for number, (field, value) in enumerate((("v", 1), *FORGED), 1):
        if number > 1:
            (found,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()
            forged = value.format(start.source) if isinstance(value, str) else value
            await js.publish(found.subject, json.dumps(json.loads(found.data) | {field: forged}).encode())
        sent.clear()
        worker = start()
        await more(start.source, number, number)
        await worker.handles(number)
        await worker.stop()
        await nc.flush()
        if field == "inbox" and any(isinstance(value, str) and it in forged for it in sent):
            failures.append(f"{field}={value!r}: {sent}")
    assert not failures, "\n".join(failures)
    assert (await js.stream_info(start.source)).state.messages == 1 + len(FORGED)


async def test_the_wait_of_a_restarted_worker_is_bounded(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 1.0)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.3)
    replicas = []
    for _ in range(3):
        replicas.append(start())
        async with asyncio.timeout(60):
            while not replicas[-1].handled:
                count = (await js.stream_info(start.source)).state.last_seq
                await more(start.source, count + 1, count + 1)
                await asyncio.sleep(0.05)
    for fenced in replicas[:-1]:
        with pytest.raises(errors.FencedError):
            await asyncio.wait_for(fenced.task, 60)


async def test_a_worker_does_not_wait_for_one_that_has_ended(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
    for n in range(1, 6):
        replica = start()
        await more(start.source, n, n)
        await replica.handles(n)
        await replica.stop()


async def test_a_newcomer_takes_over_from_a_worker_that_commits_in_every_round_trip(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.1)
    monkeypatch.setattr(takeover, "_YIELD_SECONDS", 1.0)
    newcomer, publish, stored = js._nc.jetstream(timeout=29), js.publish, asyncio.Event()

    async def commit(subject: str, *arguments: Any, **options: Any) -> Any:
        ack = await publish(subject, *arguments, **options)
        stored.set()
        return ack

    async def claim(subject: str, *arguments: Any, **options: Any) -> Any:
        """Arrive behind another commit, unless the other worker makes room."""
        stored.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stored.wait(), 0.3)
        return await publish(subject, *arguments, **options)

    async def none(message: StoredMsg) -> None:
        handled.append(message.seq)
        await asyncio.sleep(0.01)

    def work(js: JetStreamContext) -> asyncio.Task[Processed]:
        reader = LogReader(js, start.source)
        running = exactly_once(reader, start.target, none, name="w", prefix=f"{start.target}.at", max_messages=1)
        return asyncio.ensure_future(running)

    handled: list[int] = []
    replace_publish(monkeypatch, js, commit)
    replace_publish(monkeypatch, newcomer, claim)
    await more(start.source, 1, 1000)
    active, other = work(js), None
    try:
        async with asyncio.timeout(120):
            while len(handled) < 5:
                await asyncio.sleep(0.01)
            other = work(newcomer)
            with pytest.raises(errors.FencedError):
                await active
        assert len(handled) < 1000, "it ended before its input did"
    finally:
        running = [task for task in (active, other) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.wait(running)


class Leases:
    """Two workers, whose leases of an hour only the test renews, and the server's clock; `standby` waits for `alive`."""

    def __init__(self, js: JetStreamContext, clock: VirtualClock, patch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.looks = 0  # of the standby at the bucket
        self.alive, self.standby = (self.lease(js, holder, patch) for holder in "ab")
        self.look = self.standby._bucket.unchecked_state
        patch.setattr(self.standby._bucket, "unchecked_state", self.counted)

    @staticmethod
    def lease(js: JetStreamContext, holder: str, patch: pytest.MonkeyPatch) -> Lease:
        bucket = Bucket(open_bucket(js, "B"), 30)
        lease = Lease(bucket, "leases.k", holder=holder, name=holder, patience=30, seconds=3600)
        patch.setattr(lease, "_renew", lambda writer: asyncio.Event().wait())
        return lease

    async def counted(self) -> Any:
        self.looks += 1
        return await self.look()

    async def renew(self) -> None:
        """Renew the lease of `alive`, as its task does."""
        assert self.alive._writer is not None
        try:
            await self.alive._writer.store([], self.alive._encode())
        except RecordMovedError:
            assert await self.alive._take(self.alive._writer)

    async def looked(self) -> None:
        """Return when the standby has looked at the bucket after this call."""
        until = self.looks + 3
        async with asyncio.timeout(60):
            while self.looks < until:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def two_leases(monkeypatch: pytest.MonkeyPatch, own_ttls: bool) -> AsyncIterator[Leases]:
    clock = VirtualClock()
    async with ReferenceServer(clock=clock) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="KV_B", subjects=["$KV.B.>"], max_msgs_per_subject=1, allow_msg_ttl=own_ttls)
        found = Leases(js, clock, monkeypatch)
        try:
            await found.alive.acquire()
            yield found
        finally:
            await found.standby.release()
            await found.alive.release()
            await nc.close()


async def lease_that_ended(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counted = leases.clock, leases.counted
    waits, back = asyncio.Event(), asyncio.Event()
    back.set()

    async def look() -> Any:
        if not back.is_set():
            waits.set()
            await back.wait()
        return await counted()

    monkeypatch.setattr(leases.standby._bucket, "unchecked_state", look)
    waiting = asyncio.ensure_future(leases.standby.acquire())
    await leases.looked()
    back.clear()
    await asyncio.wait_for(waits.wait(), 60)
    clock.advance(5000)
    back.set()
    await leases.looked()
    assert not waiting.done(), "the standby took over from a worker that could not renew its lease"
    clock.advance(1100)
    await leases.looked()
    assert not waiting.done()
    await leases.renew()
    for seconds in (0, 2500, 1000):
        clock.advance(seconds)
        await leases.looked()
        assert not waiting.done()
    clock.advance(200)
    await asyncio.wait_for(waiting, 60)


async def test_a_lease_that_ended_while_the_server_was_away_can_be_renewed_first() -> None:
    for own_ttls in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            async with two_leases(patch, own_ttls) as leases:
                await lease_that_ended(leases, patch)
