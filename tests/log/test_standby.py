"""Replicas of one worker: a standby waits for the lease, and workers that are restarted do not stop each other repeatedly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from jetstream_ext import BatchMessage, StoredMsg, errors
from jetstream_ext.client.api import get_at_leader
from jetstream_ext.client.connection import Context, open_bucket
from jetstream_ext.client.fenced_write import FencedWriter, RecordMovedError
from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.log import Last, LogReader, OffsetStore, Processed, exactly_once, lease, takeover, worker
from jetstream_ext.log.lease import Lease, lease_key
from jetstream_ext.testing import NatsServer, ReferenceServer, VirtualClock

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


async def lease_of(offsets: OffsetStore, target: str) -> StoredMsg | None:
    bucket = Bucket(open_bucket(offsets.context, offsets.bucket))
    return await bucket.get_at_leader(last_by_subj=bucket.subject(lease_key(target, f"{target}.at.w")))


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
    found = await lease_of(offsets, start.target)
    assert found is None or found.headers["KV-Operation"] in ("DEL", "PURGE")


@TTL_OR_NOT
async def test_a_standby_takes_over_when_the_other_worker_dies(
    start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 1)
    active = start(standby=True)
    await more(start.source, 1, 3)
    await active.handles(3)
    standby = start(standby=True)

    async def die(self: Lease) -> None:
        assert self._renewing is not None
        self._renewing.cancel()

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "release", die)
        await active.stop()
    await more(start.source, 4, 4)
    await standby.handles(4)


@TTL_OR_NOT
async def test_a_worker_renews_its_lease_while_its_handler_works(
    start: Any, more: More, offsets: OffsetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 1)
    renewed = asyncio.Event()

    async def slow(message: StoredMsg) -> None:
        await renewed.wait()

    active = start(standby=True, handler=slow)
    await more(start.source, 1, 1)
    await active.handles(1)
    async with asyncio.timeout(60):
        while not ((found := await lease_of(offsets, start.target)) and json.loads(found.data)["renewal"] > 4):
            await asyncio.sleep(0.02)
    renewed.set()
    await more(start.source, 2, 2)
    await active.handles(2)


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
        start(standby=True, name="v"),
        Replica(js, start.source, other, offsets, standby=True),
    ]
    await more(start.source, 1, 1)
    for replica in replicas:
        await replica.handles(1)
    await replicas[-1].stop()


async def test_a_worker_whose_lease_was_taken_stops(
    start: Any, more: More, offsets: OffsetStore, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 1)
    monkeypatch.setattr(worker, "_IDLE", 0.1)
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    kv = open_bucket(offsets.context, offsets.bucket)
    taken = json.dumps({"v": 1, "worker": "another", "seconds": 3600, "renewal": 1}).encode()
    await kv.put(lease_key(start.target, f"{start.target}.at.w"), taken)
    with pytest.raises(errors.FencedError, match="has taken its lease"):
        await asyncio.wait_for(active.task, 60)
    found = await lease_of(offsets, start.target)
    assert found is not None
    assert found.data == taken, "the lease of the other worker stays"


async def test_a_deleted_lease_is_stored_again(start: Any, more: More, offsets: OffsetStore, monkeypatch: Any) -> None:
    monkeypatch.setattr(lease, "SECONDS", 1)
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    kv = open_bucket(offsets.context, offsets.bucket)
    await kv.delete(lease_key(start.target, f"{start.target}.at.w"))
    async with asyncio.timeout(60):
        while not ((found := await lease_of(offsets, start.target)) and found.data):
            await asyncio.sleep(0.02)
    assert not active.task.done()


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


@pytest.fixture(params=[True, False], ids=["with TTLs", "without TTLs"])
async def leases(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Leases]:
    clock = VirtualClock()
    async with ReferenceServer(clock=clock) as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        js = nc.jetstream(timeout=30)
        await js.add_stream(name="KV_B", subjects=["$KV.B.>"], max_msgs_per_subject=1, allow_msg_ttl=request.param)
        found = Leases(js, clock, monkeypatch)
        await found.alive.acquire()
        yield found
        await found.standby.release()
        await found.alive.release()
        await nc.close()


async def test_only_the_clock_of_the_server_ends_a_lease(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a slow answer nor local time does."""
    clock, counted = leases.clock, leases.counted

    async def slow() -> Any:
        state = await counted()
        if leases.looks <= 2:
            clock.advance(3000)
            await leases.renew()
            clock.advance(500)
        return state

    monkeypatch.setattr(leases.standby._bucket, "unchecked_state", slow)
    waiting = asyncio.ensure_future(leases.standby.acquire())
    async with asyncio.timeout(60):
        while leases.looks < 2:
            await asyncio.sleep(0.01)
    await leases.looked()
    assert not waiting.done(), "the lease is 500 s old"
    for seconds in (2000, 1099):
        clock.advance(seconds)
        await leases.looked()
        assert not waiting.done()
    clock.advance(101)
    await asyncio.wait_for(waiting, 60)


async def test_a_lease_that_ended_while_the_server_was_away_can_be_renewed_first(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_cancelling_a_standby_leaves_nothing(
    js: JetStreamContext, start: Any, more: More, offsets: OffsetStore, leak_check: Any
) -> None:
    active = start(standby=True)
    await more(start.source, 1, 1)
    await active.handles(1)
    held = await lease_of(offsets, start.target)
    for steps in range(0, 60, 3):
        standby = start(standby=True)
        for _ in range(steps):
            await asyncio.sleep(0.002)
        await standby.stop()
    await more(start.source, 2, 2)
    await active.handles(2)
    found = await lease_of(offsets, start.target)
    assert held is not None
    assert found is not None
    assert json.loads(found.data)["worker"] == json.loads(held.data)["worker"]
    await active.stop()
    await leak_check.assert_clean()


async def test_a_worker_cancelled_at_any_moment_leaves_no_lease(
    js: JetStreamContext, start: Any, more: More, leak_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SECONDS", 600)
    await more(start.source, 1, 40)
    for steps in range(0, 120, 3):
        replica = start(standby=True, max_messages=5)
        for _ in range(steps):
            await asyncio.sleep(0)
        await replica.stop()
        await leak_check.assert_clean()
    start(standby=True)
    assert await outputs(js, start.target, 40) == list(range(1, 41))


async def test_the_bucket_is_created(js: JetStreamContext, make_stream: Make, stream_name: Callable[[], str]) -> None:
    source, target, bucket = await make_stream(3), await make_stream(), stream_name()
    reader = LogReader(js, source, offsets=OffsetStore(js, bucket))
    await exactly_once(reader, target, lambda _: None, name="w", prefix=f"{target}.at", standby=True)
    assert (await js.stream_info(f"KV_{bucket}")).config.allow_msg_ttl
    plain = LogReader(js, source, offsets=OffsetStore(js, stream_name()))
    await exactly_once(plain, target, lambda _: None, name="w", prefix=f"{target}.at")
    with pytest.raises(NotFoundError):
        await js.stream_info(f"KV_{plain.offsets.bucket}")


async def test_a_foreign_value_of_the_key_is_refused(start: Any, offsets: OffsetStore) -> None:
    kv = open_bucket(offsets.context, offsets.bucket)
    await kv.put(lease_key(start.target, f"{start.target}.at.w"), b"hello")
    with pytest.raises(ValueError, match="not the lease of a worker"):
        await asyncio.wait_for(start(standby=True).task, 60)


def test_keys_of_leases_are_valid_and_distinct() -> None:
    assert lease_key("S", "s.at.w") == "leases.S.s.at.w"
    assert lease_key("S", "s.$a.é=") == "leases.S.s.=24a.=C3=A9=3D"


async def holder(js: JetStreamContext, target: str) -> str:
    (found,) = await LogReader(js, target, subject=f"{target}.at.w", start=Last()).read()
    return str(json.loads(found.data)["worker"])


@pytest.mark.parametrize(
    ("prefix", "standby"),
    [("_INBOX", ""), ("_INBOX", "13"), ("_INBOX", "2"), ("_INBOX_{}", ""), ("_INBOX.user.{}", ""), ("REPLICA_{}", "")],
)
async def test_a_fenced_worker_that_is_started_again_waits_while_the_other_one_is_alive(
    js: JetStreamContext,
    start: Any,
    connect: Any,
    more: More,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    standby: str,
) -> None:
    """The three starts have inbox prefixes of their own, or one; `standby` says which of them pass ``standby=True``."""
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.3)
    options = [{"js": await connect(prefix.format(n)), "standby": n in standby} for n in "123"]
    first = start(**options[0])
    await more(start.source, 1, 1)
    await first.handles(1)
    second = start(**options[1])
    async with asyncio.timeout(60):
        while not first.task.done():
            count = (await js.stream_info(start.source)).state.last_seq
            await more(start.source, count + 1, count + 1)
            await asyncio.sleep(0.05)
    with pytest.raises(errors.FencedError):
        first.task.result()
    took_over = await holder(js, start.target)
    again = start(**options[2])
    last = (await js.stream_info(start.source)).state.last_seq
    for n in range(last + 1, last + 11):
        await more(start.source, n, n)
        await second.handles(n)
        await asyncio.sleep(0.1)
    assert await holder(js, start.target) == took_over
    assert not again.handled
    if prefix.startswith("REPLICA"):
        return  # no convention says that it is an inbox: nothing is sent there, and it counts as alive
    await second.stop()
    await more(start.source, last + 11, last + 11)
    await again.handles(last + 11)
    assert await outputs(js, start.target, last + 11) == list(range(1, last + 12))


ID = "A1b2C3d4E5f6G7h8I9j0K1"


@pytest.mark.parametrize(
    "forged",
    [
        {"inbox": "$JS.API.STREAM.DELETE.{}"},
        {"inbox": f"$JS.API.STREAM.PURGE.{ID}"},
        {"inbox": f"$JS._INBOX.{ID}"},
        {"inbox": f"{{}}.{ID}"},
        {"inbox": f"{{}}._INBOX.{ID}"},
        {"inbox": f"_INBOX.{ID}.reply"},
        {"inbox": f"_INBOX.*.{ID}"},
        {"inbox": f"_INBOX..{ID}"},
        {"inbox": f"_INBOX.a b.{ID}"},
        {"inbox": f"_INBOX.\u00e9.{ID}"},
        {"inbox": f"_INBOX.\r\nPUB {{}} 0\r\n.{ID}"},
        {"inbox": f"_INBOX.{ID}\n"},
        {"inbox": f"_INBOX.{'x' * 5000}.{ID}"},
        {"inbox": "a b\r\nPUB {} 0\r\n"},
        {"inbox": ">"},
        {"inbox": ""},
        {"inbox": 7},
        {"took_over": "lately"},
        {"took_over": None},
    ],
    ids=lambda forged: repr(forged)[:60],
)
async def test_a_worker_sends_nothing_to_a_subject_that_another_program_has_chosen(
    js: JetStreamContext, nc: Client, start: Any, more: More, forged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.1)
    first = start()
    await more(start.source, 1, 1)
    await first.handles(1)
    await first.stop()
    (found,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()
    values = {key: value.format(start.source) if key == "inbox" and isinstance(value, str) else value
              for key, value in forged.items()}  # fmt: skip
    await js.publish(found.subject, json.dumps(json.loads(found.data) | values).encode())
    sent: list[str] = []

    async def look(message: Any) -> None:
        if message.data in (b"", takeover._YIELD) and not message.subject.startswith("$JS.API.STREAM.INFO."):
            sent.append(message.subject)

    await nc.subscribe(">", cb=look)
    overtaken = 3
    save = worker.Worker._save

    async def save_late(self: Any, *arguments: Any) -> None:
        """The first attempts are refused, so that the worker has a reason to ask the other one to wait."""
        nonlocal overtaken
        if overtaken:
            overtaken -= 1
            (newest,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()
            await js.publish(newest.subject, newest.data)
        await save(self, *arguments)

    monkeypatch.setattr(worker.Worker, "_save", save_late)
    second = start()
    await more(start.source, 2, 2)
    await second.handles(2)
    await second.stop()
    await nc.flush()
    assert not overtaken
    assert (await js.stream_info(start.source)).state.messages == 2
    inbox = values.get("inbox")
    assert not [subject for subject in sent if isinstance(inbox, str) and subject in inbox]


async def test_the_wait_of_a_restarted_worker_is_bounded(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3.0)
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


@pytest.mark.parametrize("version", ["now", "earlier"])
async def test_a_worker_does_not_wait_for_one_that_has_ended(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
    if version == "earlier":
        encode = worker.encode_position
        monkeypatch.setattr(
            worker,
            "encode_position",
            lambda *position, inbox, took_over, **record: encode(*position, **record),
        )
    for n in range(1, 6):
        replica = start()
        await more(start.source, n, n)
        await replica.handles(n)
        await replica.stop()


async def test_a_worker_does_not_wait_for_one_without_an_inbox(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of a group's partition has none: its group decides who works."""
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 3600.0)
    first = start()
    await more(start.source, 1, 1)
    await first.handles(1)
    await first.stop()
    (found,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()
    record = json.loads(found.data) | {"inbox": "", "took_over": 1 << 40}
    await js.publish(found.subject, json.dumps(record).encode())
    second = start()
    await more(start.source, 2, 2)
    await second.handles(2)
    await second.stop()


def partition_worker(js: JetStreamContext, source: str, target: str, handle: Any, **options: Any) -> worker.Worker:
    context = Context(js)
    values: dict[str, Any] = {
        "reader": LogReader(js, source, tail=True),
        "handler": handle,
        "name": "w",
        "context": context,
        "stream": target,
        "subject": f"{target}.at.w",
        "max_messages": 1,
        "grouped": False,
        "standby": False,
        "may_vanish": False,
        "timeout": context.resolve_timeout(None),
        "patience": 30.0,
        "takeover": None,
    }
    return worker.Worker(**values | options)


async def test_a_worker_without_courtesy_takes_over_at_once_and_stops_behind_its_commit(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 3600.0)
    first = start()
    await more(start.source, 1, 3)
    assert await outputs(js, start.target, 3) == [1, 2, 3]

    async def handle(message: StoredMsg) -> BatchMessage:
        member.stop()
        return BatchMessage(f"{start.target}.out", message.data)

    member = partition_worker(js, start.source, start.target, handle)
    working = asyncio.create_task(member.run())
    async with asyncio.timeout(60):
        while await holder(js, start.target) != member.id:
            await asyncio.sleep(0.01)
    await more(start.source, 4, 20)
    done = await asyncio.wait_for(working, 60)
    assert (done.inputs, done.position) == (1, 5)
    with pytest.raises(errors.FencedError):
        await asyncio.wait_for(first.task, 60)
    assert await outputs(js, start.target, 4) == [1, 2, 3, 4]
    (found,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()
    assert (json.loads(found.data)["inbox"], json.loads(found.data)["took_over"]) == ("", 0)


async def overtaken(self: FencedWriter, patience: float) -> None:
    """Wait until another writer has stored a record that this one does not know."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            while True:
                found = await get_at_leader(self.context, self.stream, {"last_by_subj": self.subject})
                if found is not None and found.seq > self.fence:
                    return
                await asyncio.sleep(0.01)


NEWCOMER = 29.0  # its timeout, by which the tests know its writer


async def busy(start: Any, more: More, monkeypatch: pytest.MonkeyPatch, wait: float, js: JetStreamContext) -> Replica:
    """Start a worker that commits between each read, or refusal, and store of the newcomer if it does so within `wait`."""
    store = FencedWriter.store

    async def store_late(self: FencedWriter, messages: Any, record: bytes) -> Any:
        if self.timeout == NEWCOMER and not messages:
            await overtaken(self, wait)
        return await store(self, messages, record)

    monkeypatch.setattr(FencedWriter, "store", store_late)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.3)

    async def handle(message: StoredMsg) -> None:
        await asyncio.sleep(0.01)

    await more(start.source, 1, 3000)
    active = start(js=js, handler=handle, max_messages=1)
    await active.handles(5)
    return active


async def test_a_newcomer_takes_over_from_a_worker_that_commits_in_every_round_trip(
    js: JetStreamContext, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = await busy(start, more, monkeypatch, 0.5, js)
    newcomer = start(timeout=NEWCOMER)
    with pytest.raises(errors.FencedError):
        await asyncio.wait_for(active.task, 60)
    assert len(active.handled) < 3000, "it ended before its input did"
    assert await outputs(js, start.target, 3000) == list(range(1, 3001))
    await newcomer.stop()


async def test_a_claim_is_given_up_if_it_cannot_ask_the_other_worker_to_wait(
    js: JetStreamContext, start: Any, connect: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = await busy(start, more, monkeypatch, 60, await connect("REPLICA"))
    newcomer = start(timeout=NEWCOMER, patience=0.5)
    with pytest.raises(errors.RequestTimeoutError, match="before each attempt to take over"):
        await asyncio.wait_for(newcomer.task, 60)
    assert not active.task.done()
    assert not newcomer.handled


async def test_the_wait_begins_again_when_yet_another_worker_takes_over(
    js: JetStreamContext, nc: Client, start: Any, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    await more(start.source, 1, 1)
    await first.handles(1)
    await first.stop()
    (found,) = await LogReader(js, start.target, subject=f"{start.target}.at.w", start=Last()).read()

    async def take_over() -> None:
        inbox = await nc.subscribe(nc.new_inbox())
        await nc.flush()
        record = json.loads(found.data) | {"inbox": inbox.subject, "took_over": 1 << 40}
        await js.publish(found.subject, json.dumps(record).encode())

    asked, go_on = 0, asyncio.Event()
    may_take_over = takeover.Takeover._may_take_over

    async def ask(self: Any, *arguments: Any) -> bool:
        nonlocal asked
        answer = await may_take_over(self, *arguments)
        asked += 1
        await go_on.wait()
        return answer

    monkeypatch.setattr(takeover.Takeover, "_may_take_over", ask)
    monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 0.1)
    monkeypatch.setattr(takeover, "_ALIVE_AFTER", 0.1)
    await take_over()
    second = start()
    async with asyncio.timeout(60):
        while not asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the wait for the first one is over now
        monkeypatch.setattr(takeover, "TAKEOVER_PAUSE", 3600.0)
        await take_over()
        await more(start.source, 2, 2)
        go_on.set()
        while asked < 5:
            if second.task.done():
                second.task.result()
            assert not second.handled
            await asyncio.sleep(0.01)
    await second.stop()


async def test_a_standby_works_with_the_options_that_the_streams_have_when_it_takes_over(
    js: JetStreamContext,
    start: Any,
    more: More,
    offsets: OffsetStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = start.target, f"KV_{offsets.bucket}"
    for name in streams:
        config = (await js.stream_info(name)).config
        await js.update_stream(config.evolve(allow_rollup_hdrs=True, deny_purge=False))
    kv = open_bucket(offsets.context, offsets.bucket)
    key = lease_key(start.target, f"{start.target}.at.w")
    await kv.put(key, json.dumps({"v": 1, "worker": "another", "seconds": 3600, "renewal": 1}).encode())
    caplog.set_level("DEBUG", "jetstream_ext")
    standby = start(standby=True)
    async with asyncio.timeout(60):
        while "stands by" not in caplog.text:
            await asyncio.sleep(0.01)
    for name in streams:
        config = (await js.stream_info(name)).config
        await js.update_stream(config.evolve(allow_rollup_hdrs=False))
    await kv.delete(key)
    await more(start.source, 1, 1)
    await standby.handles(1)
    await standby.stop()


async def test_a_lease_in_a_bucket_that_was_created_again_is_taken_or_lost(
    js: JetStreamContext, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = stream_name()

    async def acquire(holder: str, seconds: int) -> Lease:
        made = Lease(Bucket(open_bucket(js, name), 30), "k", holder=holder, name=holder, patience=30, seconds=seconds)
        await made.acquire()
        return made

    await js.create_key_value(bucket=name)
    mine = await acquire("mine", 3)
    others: list[Lease] = []

    async def recreate(*_: Any) -> Any:
        monkeypatch.undo()
        await js.delete_key_value(name)
        await js.create_key_value(bucket=name)
        others.append(await acquire("other", 3600))
        raise errors.RequestTimeoutError("the answer was lost")

    assert mine._writer is not None
    monkeypatch.setattr(mine._writer, "_publish", recreate)
    async with asyncio.timeout(60):
        while not mine.lost:
            await asyncio.sleep(0.05)
    assert not others[0].lost
    found = await others[0]._bucket.get_at_leader(last_by_subj=others[0]._bucket.subject("k"))
    assert found is not None
    assert others[0]._decode(found)[0] == "other"
    for each in (mine, *others):
        await each.release()
