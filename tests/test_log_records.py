"""Every state of every machine has its record: the table of what is logged, held against the package and its machines."""

import ast
import asyncio
import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import nats
import orjson
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors
from jetstream_ext import kv as kvx
from jetstream_ext.client import ingest
from jetstream_ext.client.atomic import BatchState
from jetstream_ext.kv import live
from jetstream_ext.log import DeadLetter, Group, LogReader, exactly_once, redrive
from jetstream_ext.protocol import atomic, fast, membership, range_read
from jetstream_ext.protocol.frames import Frame
from jetstream_ext.protocol.reads import Scan
from jetstream_ext.testing import Cut, Drop, Faults, Lose, ReferenceServer
from jetstream_ext.text import Area

PACKAGE = Path(jsx.__file__).parent
SECRET = "hunter2"


@dataclass(frozen=True)
class Machine:
    """What the records of one kind of source say."""

    states: frozenset[str] = frozenset()
    events: frozenset[str] = frozenset()
    rare: frozenset[str] = frozenset()  # not driven here: they need an outage that takes longer than a test should


def machine(states: type[Enum] | tuple[str, ...] = (), events: str = "", rare: str = "") -> Machine:
    names = [each.name for each in states] if isinstance(states, type) else [each.upper() for each in states]
    return Machine(
        frozenset(names), *(frozenset(re.split(r"\s*,\s*", text) if text else ()) for text in (events, rare))
    )


RECORDS: dict[tuple[str, str], Machine] = {
    ("fast", "batch"): machine(
        fast.State,
        "ping sent, commit sent again, flow changed, gap, message refused, messages in doubt",
        "ignored an answer",
    ),
    ("ingest", "run"): machine(
        (),
        "batch begun, batch ended, single publishes begun, single publishes ended, stream searched, ids trusted, "
        "source ended",
    ),
    ("atomic", "batch"): machine(
        atomic.State, "message refused, disconnected, outcome searched, outcome not found", "ignored an answer"
    ),
    ("atomic", "watch"): machine((), "opened, closed, batch abandoned"),
    ("direct", "stream"): machine(range_read.State, "request sent, request repeated, reply ended, closed"),
    ("client", "connection"): machine((), "disconnected, reconnected", "not closed"),
    ("client", "retry"): machine((), "pause"),
    ("client", "worker"): machine((), "store failed"),
    ("kv", "bucket"): machine((), "run begun, run failed"),
    ("kv", "transaction"): machine(get_args(BatchState), "commit begun, attempt, conflict", "commit sent again"),
    ("kv", "table"): machine(
        live.Phase, "subscribed, unsubscribed, compared, checkpoint saved, checkpoint restored"
    ),
    ("log", "reader"): machine((), "start found, messages ready, seek, position committed"),
    ("log", "worker"): machine(
        (),
        "started, position claimed, inputs read, input failed, inputs failed, committed, ended, fenced, "
        "lease held, stands by, lease released",
        "end not stored, lease not deleted, lease lost, lease taken again, waits, takes over, makes room",
    ),
    ("log", "member"): machine((*(each.name for each in membership.Phase), "FREE"), "assigned, leaving"),
    ("log", "group"): machine(
        (),
        "joined, partitions assigned, position committed, leaves, partition released, left, failed",
        "key not deleted, fenced, commit refused in a callback",
    ),
    ("log", "redrive"): machine((), "letters sent", "resumed"),
    # The tests of Spark and of the command line drive these.
    ("spark", "connection"): machine((), "", "opened, lost, closed"),
    ("spark", "bucket"): machine((), "", "read planned, earlier attempts read"),
    ("spark", "read"): machine((), "", "planned"),
    ("spark", "query"): machine((), "", "start found, end of micro-batch, planned, end found"),
    ("spark", "stream"): machine((), "", "task stored, marker moved, committed, rows already stored"),
    ("cli", "stream"): machine((), "", "not looked up"),
}  # fmt: skip


class Records(logging.Handler):
    """Collects, for each area and kind of source, the states and events of the records."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.states: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.events: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.DEBUG:
            self.texts.append(record.getMessage())
        fields = {name: value for name, value in vars(record).items() if name.startswith("jetstream_")}
        if not fields:
            return
        assert record.levelno == logging.DEBUG
        assert all(type(value) in (str, int, float, bool) for value in fields.values()), fields
        key = record.name.removeprefix("jetstream_ext."), fields["jetstream_source"].split(" ")[0]
        before, arrow, after = fields["jetstream_event"].partition(" -> ")
        (self.states if arrow else self.events)[key].update({before, after} if arrow else {before})


@pytest.fixture
def records() -> Iterator[Records]:
    logger, handler = logging.getLogger("jetstream_ext"), Records()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@contextlib.asynccontextmanager
async def reference(*rules: Any, **options: Any) -> AsyncIterator[tuple[ReferenceServer, JetStreamContext]]:
    async def quiet(error: Exception) -> None:
        pass

    async with ReferenceServer(faults=Faults(*rules)) as server:
        nc = await nats.connect(server.url, reconnect_time_wait=0.01, error_cb=quiet, **options)
        try:
            yield server, nc.jetstream(timeout=2)
        finally:
            await nc.close()


async def make(js: JetStreamContext, name: str, **config: Any) -> str:
    await js.add_stream(
        name=name, subjects=[f"{name}.>"], allow_atomic=True, allow_batched=True, allow_direct=True, **config
    )
    return name


# -- the machines without I/O


def drive_fast() -> None:
    def batch(gap: jsx.GapMode = jsx.GapMode.OK, messages: int = 5) -> fast.FastBatch:
        made = fast.FastBatch(batch_id="b1", flow=10, gap=gap)
        made.open("_INBOX.x")
        made.add(message, 0.0)
        made.receive([reply({"type": "ack", "seq": 0, "msgs": 10}, 1, 0)], 0.0)
        for _ in range(messages - 1):
            made.add(message, 0.0)
        return made

    def reply(body: dict[str, Any], seq: int, op: int = 1) -> Frame:
        return b"_INBOX.x.b1.10.ok.%d.%d.$FI" % (seq, op), orjson.dumps(body), 0

    message = jsx.BatchMessage("s.1", SECRET.encode(), headers={"Token": SECRET})
    refusal = {"code": 400, "err_code": 10071, "description": "wrong last sequence"}
    final = {"stream": "S", "seq": 9, "batch": "b1", "count": 5}

    one = batch()
    one.ping(0.0)
    one.receive(
        [reply({"type": "ack", "seq": 2, "msgs": 20}, 2), reply({"type": "gap", "last_seq": 3, "seq": 4}, 4)], 0.0
    )
    one.receive([reply({"type": "err", "seq": 5, "error": refusal}, 5)], 0.0)
    one.disconnected(0.0)
    one.reconnected(0.0)
    one.receive([reply({"type": "ack", "seq": 2, "msgs": 20}, 5, 4)], 0.0)
    one.commit(0.0)
    one.receive([(b"_INBOX.x.b1.10.ok.6.3.$FI", b"NATS/1.0 503\r\n\r\n", 16)], 0.0)
    one.handle_timer(1.5)
    one.receive([reply(final, 6, 3)], 2.0)
    two = batch(jsx.GapMode.FAIL)
    two.receive([reply({"type": "gap", "last_seq": 3, "seq": 5}, 5)], 0.0)
    two.receive([reply({**final, "count": 2}, 5)], 0.0)


def drive_range_read() -> None:
    def rows(first: int, last: int) -> list[Frame]:
        text = "NATS/1.0\r\nToken: {2}\r\nNats-Stream: S\r\nNats-Subject: a\r\nNats-Sequence: {0}\r\n"
        text += "Nats-Time-Stamp: 2025-11-20T21:23:31.2Z\r\nNats-Num-Pending: {1}\r\nNats-Last-Sequence: {3}\r\n\r\n"
        heads = [
            text.format(seq, last - seq, SECRET, seq - 1 if seq > first else 0).encode()
            for seq in range(first, last + 1)
        ]
        end = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: %d\r\n\r\n" % last
        return [(b"_INBOX.x", head + SECRET.encode(), len(head)) for head in heads] + [(b"_INBOX.x", end, len(end))]

    def act() -> Any:
        while isinstance(
            action := read.next_action(now), range_read.SendRequest | range_read.DropReply | range_read.Deliver
        ):
            pass
        return action

    now = 0.0
    plan = Scan(up_to_seq=9, batch=4, max_bytes=1 << 20, prefetch=1)
    read = range_read.RangeRead("S", plan, 5.0, pause=0.05, prove_to=9)
    act()
    read.receive(plan.in_flight[0], rows(1, 4)[:1], now)
    now = act().until
    read.handle_timer(now)  # the reply goes silent, and is asked for again
    act()
    read.receive(plan.in_flight[0], [(b"_INBOX.x", b"NATS/1.0 503\r\n\r\n", 16)], now)
    now = act().until
    read.handle_timer(now)  # after a pause
    assert isinstance(act(), range_read.AwaitConnection)
    read.connected()
    act()
    read.receive(plan.in_flight[0], rows(2, 4), now)
    action = act()
    assert isinstance(action, range_read.AskLeader)
    read.leader_answered([None] * len(action.requests), now)
    assert act() == range_read.Done()


def drive_membership() -> None:
    def due(action: type) -> Any:
        return next(each for each in one.due(1.0) if isinstance(each, action))

    one = membership.Membership("me", 1, ttl=30.0, margin=3.0)
    one.renewed(0.0, 0.0)
    one.see({"me"}, (), {}, 10)
    one.claimed(0, due(membership.Claim).attempt, 11, 1.0)
    one.leave()
    one.revoked(0, due(membership.Revoke).attempts[0])
    one.released(0, due(membership.Release).attempt, 12)


# -- the calls, on servers


async def drive_connection() -> None:
    async with reference() as (server, js):
        name = await make(js, "CUT")
        batch = jsx.AtomicBatch(js)
        await batch.add(f"{name}.a", b"1")
        async with jsx.FastPublisher(js, gap=jsx.GapMode.OK) as publisher:
            await publisher.add(f"{name}.a", b"1")
            server.disconnect_all()
            await publisher.flush()
            await publisher.add(f"{name}.a", b"2")
        await batch.discard()
        publisher = jsx.FastPublisher(js)
        await publisher.add(f"{name}.a", b"1")
        await publisher.discard()


async def drive_ingest() -> None:
    entries = [("I.a", SECRET.encode(), {"Token": SECRET})] * 60
    for share in (ingest._TRUSTED_SHARE, 0.0):  # with 0, message ids are never trusted, so the stream is searched
        async with reference(Lose("I.>", nth=20), Cut("I.>", nth=50)) as (_, js):
            await make(js, "I")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ingest, "_TRUSTED_SHARE", share)
                assert (await jsx.ingest(js, entries, flow=5, ack_timeout=0.5)).stored == 60


async def drive_atomic(js: JetStreamContext, name: str) -> None:
    async with jsx.watch_abandoned(js, name) as abandoned:
        batch = jsx.AtomicBatch(js, ack_first=False)
        await batch.add(f"{name}.a", SECRET.encode(), headers={"Token": SECRET})
        await batch.discard()
        large = jsx.AtomicBatch(js, ack_first=False, batch_id="large")
        for _ in range(1001):
            await large.add(f"{name}.a", b"")
        with pytest.raises(errors.BatchError):
            await large.commit_eob()
        assert (await anext(abandoned)).batch_id == "large"
    refused = jsx.AtomicBatch(js)
    await refused.add(f"{name}.a", b"1")
    with pytest.raises(errors.MessageTooLargeError):
        await refused.add(f"{name}.a", bytes(2000), ack=True)
    await refused.discard()
    await jsx.publish_atomic(js, [(f"{name}.a", b"1"), (f"{name}.b", b"2")])
    async with reference(Drop(kind="pub_ack")) as (_, faulty):
        other = await make(faulty, "LOST")
        lost = jsx.AtomicBatch(faulty, timeout=0.3)
        await lost.add(f"{other}.a", b"1")
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await lost.commit_eob()
        assert await lost.resolve() == "stored"
        gone = jsx.AtomicBatch(faulty, timeout=0.3)
        await gone.add(f"{other}.a", b"1")
        gone._session.machine.commit(None)
        gone._session.machine.lost("no answer")
        await faulty.delete_stream(other)
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await gone.resolve()
        await gone.discard()


async def drive_direct(js: JetStreamContext, name: str) -> None:
    async with jsx.DirectGet(js, name).scan() as messages:
        await anext(messages)


async def drive_kv(js: JetStreamContext, bucket: str, folder: Path) -> None:
    kv = await kvx.ensure_bucket(js, bucket)
    async with kvx.transaction(kv) as tx:
        tx.put("a", SECRET.encode())
    tx = kvx.transaction(kv)
    await tx.discard()
    runs = 0

    async def bump(tx: kvx.Transaction) -> None:
        nonlocal runs
        runs += 1
        await tx.get("a")
        if runs == 1:
            await kv.put("a", b"2")
        tx.put("a", b"3")

    await kvx.retry_transaction(kv, bump)
    for _ in range(2):
        async with kvx.Table(kv, checkpoint=folder / "table") as table:
            await table.wait_for(await kv.put("b", b"1"))
    async with kvx.Table(kv) as table:
        await asyncio.wait_for(subscribed(table), 5)
        config = (await js.stream_info(f"KV_{bucket}")).config
        await js.update_stream(config.evolve(max_msgs_per_subject=5))  # other limits: the table is loaded again
        await table.wait_for(await kv.put("b", b"1"))
    unknown = kvx.transaction(kv)
    unknown.put("a", b"4")

    async def lost(*_: Any, **__: Any) -> Any:
        raise errors.BatchOutcomeUnknownError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsx.AtomicBatch, "commit_eob", lost)
        patch.setattr(jsx.AtomicBatch, "state", "unknown")
        with pytest.raises(errors.BatchOutcomeUnknownError):
            await unknown.commit()


async def subscribed(table: Any) -> None:
    while not table._live._inboxes:
        await asyncio.sleep(0.01)


async def drive_log(js: JetStreamContext, name: str, out: str) -> None:
    for number in range(4):
        await js.publish(f"{name}.a", b"%d" % number, headers={"Token": SECRET})
    reader = LogReader(js, name)
    await reader.read(1)
    await reader.offsets.create()
    await reader.offsets.commit(reader, name="r")
    reader.seek(1)

    def fails_for_2(messages: list[jsx.StoredMsg]) -> jsx.BatchMessage:
        if any(message.data == b"2" for message in messages):
            raise ValueError(SECRET)
        return jsx.BatchMessage(f"{out}.done", SECRET.encode())

    letters = DeadLetter(f"{out}.dead", 2, 0.0)
    await exactly_once(
        LogReader(js, name),
        out,
        fails_for_2,
        name="w",
        prefix=f"{out}.at",
        grouped=True,
        dead_letter=letters,
        standby=True,
    )
    await redrive(js, out, f"{out}.dead")
    started = asyncio.Event()

    async def wait(message: jsx.StoredMsg) -> None:
        started.set()

    options: dict[str, Any] = {"name": "x", "prefix": f"{out}.at"}
    tail = LogReader(js, name, tail=True)
    first = asyncio.create_task(exactly_once(tail, out, wait, **options))
    await started.wait()
    await exactly_once(LogReader(js, name), out, wait, **options)
    await js.publish(f"{name}.a", b"5")
    with pytest.raises(errors.FencedError):
        await first
    standby = {**options, "name": "y", "standby": True}
    holder = asyncio.create_task(exactly_once(LogReader(js, name, tail=True), out, wait, **standby))
    second = asyncio.create_task(exactly_once(LogReader(js, name, tail=True), out, wait, **standby))
    await asyncio.sleep(0.6)
    for each in (holder, second):
        each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await each


async def drive_group(js: JetStreamContext, name: str) -> None:
    group = Group(js, name, "g", partitions=2)
    async with group.join() as member:
        await anext(member)
        await member.commit()
    with pytest.raises(ZeroDivisionError):
        async with group.join() as member:
            await member.run(lambda message: 1 // 0)


async def test_every_machine_logs_its_states_and_what_happens_in_them(
    js: JetStreamContext, stream_name: Any, tmp_path: Path, records: Records
) -> None:
    drive_fast()
    drive_range_read()
    drive_membership()
    source = await make(js, stream_name(), max_msg_size=1000)
    target = await make(js, stream_name())
    await drive_connection()
    await drive_ingest()
    await drive_atomic(js, source)
    await drive_direct(js, source)
    await drive_kv(js, stream_name(), tmp_path)
    await drive_log(js, source, target)
    await drive_group(js, source)
    differences = {
        key: found
        for key, each in RECORDS.items()
        if (found := (each.states ^ records.states[key]) | (each.events ^ (records.events[key] - each.rare)))
    }
    assert not differences
    assert records.events.keys() | records.states.keys() <= RECORDS.keys()
    assert not any(SECRET in text for text in records.texts), "a payload, a header or a handler's error"


async def test_messages_cost_no_check_of_a_level_while_the_loggers_are_off(
    js: JetStreamContext, stream_name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = 0

    def count(logger: logging.Logger, level: int) -> bool:
        nonlocal checks
        checks += logger.name.startswith("jetstream_ext")
        return False

    name = await make(js, stream_name())
    monkeypatch.setattr(logging.Logger, "isEnabledFor", count)
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add_many((f"{name}.a", b"") for _ in range(3000))
        for _ in range(300):
            await publisher.add(f"{name}.a", b"")
    async with jsx.DirectGet(js, name).scan() as messages:
        assert len(await messages.to_list()) == 3300
    assert 4 < checks < 50


def test_the_table_has_every_record_of_the_package() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "log_state(" not in text:
            continue
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        areas = [call.args[0].value for call in calls if ast.unparse(call.func) == "get_logger"]  # type: ignore[attr-defined]
        for call in calls:
            name = ast.unparse(call.func)
            place = {"log_state": 2, "self._log_state": 0}.get(name)
            if place is None or ast.unparse(call.args[place]) == "event":
                continue
            event = call.args[place]
            for each in [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]:
                if isinstance(each, ast.Constant):
                    found[areas[0]].add(each.value)
    for area in get_args(Area):
        known = [each for (where, _), each in RECORDS.items() if where == area]
        states = {event for each in known for event in each.events | each.rare}
        computed = {"message refused", "disconnected"} if area == "atomic" else set()  # the names of inputs
        assert found[area] == states - computed, area
