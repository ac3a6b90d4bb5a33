"""The page on permissions: the permissions of each row are sufficient for the call, and each of them is needed."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import re
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
from jetstream_ext import errors, log
from jetstream_ext import kv as kvx
from jetstream_ext.testing import NatsServer

PAGE = Path(__file__).parents[1] / "docs" / "permissions.md"
NAMES = {
    "<stream>": "S",
    "<subject>": "s.a",
    "<consumer>": "C",
    "<bucket>": "B",
    "<origin>": "O",
    "<output>": "T",
    "<letters>": "dead",
}
WITHOUT_REQUESTS = {"log.partition_of", "ttl_headers", "marker_reason", "with_ttl"}

Call = Callable[[JetStreamContext], Awaitable[Any]]


def rows() -> list[tuple[str, str]]:
    """Return the cells of the table: the calls, and what they need."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    return [(calls, needs) for calls, needs in cells]


def allowed(row: str) -> list[str]:
    """Return what a row allows; `row` is the beginning of its first cell, without the ticks."""
    (found,) = [needs for calls, needs in rows() if calls.replace("`", "") == row]
    quoted = [subject for subject in re.findall(r"`([^`]+)`", found) if not subject.startswith("log.")]
    subjects = [subject for subject in quoted if "." in subject or subject in ("<subject>", "<letters>")]
    return [re.sub(r"<\w+>", lambda match: NAMES[match[0]], subject) for subject in subjects]


async def fast(js: JetStreamContext) -> None:
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add("s.a", b"1")
    await jsx.ingest(js, [("s.a", b"1")], patience=js._timeout)


async def atomic(js: JetStreamContext) -> None:
    async with jsx.AtomicBatch(js) as batch:
        await batch.add("s.a", b"1")
        await batch.add("s.a", b"2")
    await jsx.publish_atomic(js, [jsx.BatchMessage("s.a")])
    await jsx.publish_atomic_many(js, [[jsx.BatchMessage("s.a")]])


async def resolve(js: JetStreamContext) -> None:
    batch = jsx.AtomicBatch(js)
    await batch.add("s.a", b"1")
    task = asyncio.create_task(batch.commit_eob())
    while batch._session.machine.state.value != "committing":  # type: ignore[union-attr]
        await asyncio.sleep(0)
    task.cancel()  # the commit is on its way, and its answer is not heard
    await asyncio.wait([task])
    await js.publish("s.a", b"2")  # so that the batch is not the newest on its subject, and has to be looked for
    assert await batch.resolve() == "stored"


async def singles(js: JetStreamContext) -> None:
    direct, then = jsx.DirectGet(js, "S"), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert (await direct.get(1)).seq == (await direct.get_next("s.*")).seq == (await direct.get_at(then)).seq == 1
    now = datetime.datetime.now(datetime.UTC)
    for batch in (direct.batch(5), direct.multi_last(["s.>"]), direct.scan(), direct.scan(up_to_time=now)):
        assert len(await batch.to_list()) == 2


async def proved(js: JetStreamContext, **options: Any) -> None:
    assert len(await jsx.DirectGet(js, "S").scan(subject="s.a", **options).to_list()) == 1


async def reads(js: JetStreamContext) -> None:
    kv = await js.key_value("B")
    assert await kvx.get_many(kv, ["k"])
    assert await kvx.snapshot(kv)
    assert await kvx.get_many(kv, ["none"]) == {}


async def bucket_table(js: JetStreamContext) -> None:
    async with kvx.Table(await js.key_value("B"), timeout=js._timeout) as table:
        assert table["k"].value == b"1"
    async with kvx.Table(await js.key_value("B"), ["none"], timeout=js._timeout) as table:
        assert not table


async def stream_table(js: JetStreamContext) -> None:
    async with log.Table(js, "S", timeout=js._timeout) as table:
        assert len(table) == 2
    async with log.Table(js, "S", subject="s.none", timeout=js._timeout) as table:
        assert not table


async def transfer(js: JetStreamContext) -> None:
    async def change(tx: kvx.Transaction) -> None:
        await tx.get("k")
        tx.put("k", b"2")

    kv = await js.key_value("B")
    async with kvx.transaction(kv) as tx:
        await change(tx)
    await kvx.retry_transaction(kv, change, patience=js._timeout)


async def enable(js: JetStreamContext) -> None:
    await kvx.enable(await js.key_value("B"))


async def touch(js: JetStreamContext) -> None:
    await kvx.touch(await js.key_value("B"), "k", 60)


def reader(js: JetStreamContext) -> log.LogReader:
    return log.LogReader(js, "S", subject="s.a", patience=js._timeout)


async def read_log(js: JetStreamContext) -> None:
    assert len([message async for message in reader(js)]) == 1


async def read_unconfirmed(js: JetStreamContext) -> None:
    for start in (log.First(), log.Last(), log.Time(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))):
        unconfirmed = log.LogReader(js, "S", start=start, subject="s.a", patience=js._timeout, confirm=False)
        assert len([message async for message in unconfirmed]) == 1


async def offsets(js: JetStreamContext) -> None:
    started = log.LogReader(js, "S", start=log.Seq(1), patience=js._timeout)
    store = await log.OffsetStore(js, "B", patience=js._timeout).create()
    name = uuid.uuid4().hex  # a call that lacks a permission may have stored a position; no other call uses this name
    await store.commit(started, name=name)
    assert (await store.fetch(name)) is not None


async def work(js: JetStreamContext) -> None:
    def handle(message: jsx.StoredMsg) -> jsx.BatchMessage:
        return jsx.BatchMessage("t.out", message.data)

    done = await log.exactly_once(reader(js), "T", handle, name="w", prefix="t.at", patience=js._timeout)
    assert done.inputs == 1


async def work_with_a_state(js: JetStreamContext) -> None:
    """The second worker reads the state of the first one."""

    def count(_: jsx.StoredMsg, state: log.State) -> None:
        state["a"] = state.get("a", b"") + b"1"

    name, options = uuid.uuid4().hex, {"prefix": "t.at", "state": "t.state", "patience": js._timeout}
    for _ in range(2):
        await log.exactly_once(reader(js), "T", count, name=name, **options)


async def work_with_letters(js: JetStreamContext) -> None:
    def fail(_: jsx.StoredMsg) -> None:
        raise ZeroDivisionError

    letters, name = log.DeadLetter("dead", attempts=1), uuid.uuid4().hex
    done = await log.exactly_once(
        reader(js), "T", fail, name=name, prefix="t.at", dead_letter=letters, timeout=js._timeout, patience=js._timeout
    )
    assert done.dead_letters == 1


def new_group(js: JetStreamContext, name: str | None = None) -> log.Group:
    name, wait = name or uuid.uuid4().hex, js._timeout
    return log.Group(
        js, "S", name, partitions=1, subject="s.a", bucket="B", timeout=wait, patience=wait, heartbeat=wait
    )


async def join(js: JetStreamContext) -> None:
    async with new_group(js).join() as member:
        assert (await anext(member)).seq == 1
        await member.commit()


async def process(js: JetStreamContext, name: str | None = None) -> None:
    group = new_group(js, name)
    run = log.exactly_once_group(
        group, "T", lambda message: jsx.BatchMessage("t.out", message.data), prefix="t.at", patience=js._timeout
    )
    working = asyncio.ensure_future(run)
    try:
        while not working.done() and (await group.status()).partitions[0].position == 1:
            await asyncio.sleep(0.05)
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def list_letters(js: JetStreamContext) -> list[int]:
    letters = log.dead_letters(js, "S", "s.dead", patience=js._timeout)
    found = [letter.message.seq async for letter in letters]
    assert found
    return found


async def drop(js: JetStreamContext) -> None:
    [seq, *_] = await list_letters(js)
    assert await log.drop(js, "S", [seq], patience=js._timeout) == 1


redrives = itertools.count()


async def redrive(js: JetStreamContext) -> None:
    letters = await list_letters(js)  # one that no other call has sent: to find a letter takes less
    seqs, offsets = [letters[next(redrives) % len(letters)]], log.OffsetStore(js, "B", patience=js._timeout)
    assert (await log.redrive(js, "S", "s.dead", seqs=seqs, offsets=offsets, patience=js._timeout)).sent == 1


async def status(js: JetStreamContext) -> None:
    assert (await log.Group.open(js, "S", "g", bucket="B", patience=js._timeout)).partitions == 1
    for name in ("g", "x"):
        assert (await new_group(js, name).status()).partitions[0].position == 3


async def reset(js: JetStreamContext) -> None:
    await new_group(js, "g").reset()
    await new_group(js, "x").reset(log.Seq(2))


async def list_groups(js: JetStreamContext) -> None:
    assert await log.list_groups(js, "B", timeout=js._timeout) == [("S", "g"), ("S", "x")]


async def health(js: JetStreamContext) -> None:
    states = [row.state for row in await jsx.source_health(js, "S")]
    assert len(states) == 2
    assert jsx.SourceState.UNREACHABLE not in states


def reset_by_time(js: JetStreamContext) -> Awaitable[Any]:
    return jsx.reset_consumer(js, "S", "C", time=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))


# Each row of the page: what it is called there, and a use of every call that it names.
CALLS: dict[str, Call] = {
    "DirectGet.get_last": lambda js: jsx.DirectGet(js, "S").get_last("s.a"),
    "DirectGet.get, get_next, get_at, batch, multi_last, scan": singles,
    "scan(confirm=True)": lambda js: proved(js, confirm=True),
    "scan(min_seq=)": lambda js: proved(js, min_seq=2),
    "FastPublisher, ingest": fast,
    "AtomicBatch, publish_atomic, publish_atomic_many": atomic,
    "AtomicBatch.resolve": resolve,
    "features": jsx.features,
    "ensure_stream, a new one": lambda js: jsx.ensure_stream(js, name="S", subjects=["s.>"]),
    "ensure_stream, an existing one": lambda js: jsx.ensure_stream(js, name="S", subjects=["s.>"], allow_msg_ttl=True),
    "reset_consumer": lambda js: jsx.reset_consumer(js, "S", "C"),
    "reset_consumer(time=)": reset_by_time,
    "create_source_consumer": lambda js: jsx.create_source_consumer(js, "S", "C", deliver_subject="d"),
    "source_health": health,
    "kv.get_many, kv.snapshot": reads,
    "kv.Table": bucket_table,
    "kv.transaction, kv.retry_transaction": transfer,
    "kv.touch": touch,
    "kv.enable": enable,
    "kv.ensure_bucket, a new one": lambda js: kvx.ensure_bucket(js, "B"),
    "kv.ensure_bucket, an existing one": lambda js: kvx.ensure_bucket(js, "B"),
    "log.LogReader": read_log,
    "log.LogReader(confirm=False)": read_unconfirmed,
    "log.Table": stream_table,
    "log.OffsetStore": offsets,
    "log.exactly_once": work,
    "log.exactly_once(state=)": work_with_a_state,
    "log.exactly_once(dead_letter=)": work_with_letters,
    "log.dead_letters": list_letters,
    "log.drop": drop,
    "log.redrive": redrive,
    "log.Group.join": join,
    "log.exactly_once_group": process,
    "log.Group.open, log.Group.status": status,
    "log.Group.reset": reset,
    "log.list_groups": list_groups,
}
WORKS_WITHOUT = {"features"}  # it falls back to the connected server's INFO
SAME_AND = {
    "reset_consumer(time=)": "reset_consumer",
    "log.exactly_once": "log.LogReader",
    "log.exactly_once(state=)": "log.exactly_once",
    "log.exactly_once(dead_letter=)": "log.exactly_once",
    "log.dead_letters": "log.LogReader",
    "log.drop": "log.dead_letters",
    "log.redrive": "log.drop",
    "log.Group.join": "log.LogReader",
    "log.exactly_once_group": "log.Group.join",
}


def needed(row: str) -> list[str]:
    return [*(needed(SAME_AND[row]) if row in SAME_AND else []), *allowed(row)]


NEEDS = {row: needed(row) for row in CALLS}
_WORKERS = ("log.exactly_once", "log.exactly_once(state=)", "log.exactly_once(dead_letter=)", "log.exactly_once_group")
for _row in (*_WORKERS, "log.redrive"):
    NEEDS[_row] += ["t.>"]
# A bucket that is there is not made, and a reader that reads nothing only looks at its stream.
NEEDS["log.OffsetStore"] += ["$JS.API.STREAM.INFO.S"]
for _row in ("log.OffsetStore", "log.Group.join", "log.exactly_once_group"):
    NEEDS[_row].remove("$JS.API.STREAM.CREATE.KV_B")


async def bury(js: JetStreamContext) -> None:
    """Store dead letters, one for each attempt of a test."""

    def fail(_: jsx.StoredMsg) -> None:
        raise ZeroDivisionError

    for _ in range(20):
        await js.publish("t.in", b"")
    reader, letters = log.LogReader(js, "T", subject="t.in"), log.DeadLetter("s.dead", attempts=1)
    await log.exactly_once(reader, "S", fail, name="w", prefix="s.at", dead_letter=letters)


async def prepare(url: str, row: str) -> None:
    async with await nats.connect(url, user="admin", password="x", connect_timeout=10) as nc:
        js = nc.jetstream(timeout=30)
        options: dict[str, Any] = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
        if row == "source_health":
            await js.add_stream(name="O", subjects=["o.>"])
            entry = await jsx.create_source_consumer(js, "O", "C", deliver_subject="d")
            await js.add_stream(name="P", subjects=["p.>"])
            options["sources"] = [entry, nats.js.api.StreamSource(name="P")]
        if row != "ensure_stream, a new one":
            await js.add_stream(name="S", subjects=["s.>"], **options)
            await js.publish("s.a", b"0")
            await js.publish("s.b", b"0")
        if row.startswith("reset_consumer"):
            await js.add_consumer("S", durable_name="C", ack_policy="explicit")
        letters = row in ("log.dead_letters", "log.drop", "log.redrive")
        if letters or row.startswith(("log.exactly_once", "log.Group", "log.list_groups")):
            await js.add_stream(name="T", subjects=["t.>", "dead"], **options)
        if letters:
            await bury(js)
        if row == "kv.ensure_bucket, a new one":
            return
        kv = await js.create_key_value(bucket="B")
        if row not in ("kv.enable", "kv.ensure_bucket, an existing one"):
            await kvx.enable(kv)
        await kv.put("k", b"1")
        if row in ("log.Group.open, log.Group.status", "log.Group.reset", "log.list_groups"):
            async with new_group(js, "g").join() as member:
                await anext(member)
                await member.commit()
            await process(js, "x")


def user(name: str, publish: list[str]) -> str:
    subjects = ", ".join(f'"{subject}"' for subject in publish)
    return f'{{ user: "{name}", password: x, permissions: {{ publish: [{subjects}], subscribe: "_INBOX.>" }} }}'


async def attempt(url: str, name: str, call: Call, timeout: float, refused: list[str]) -> None:
    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    nc = await nats.connect(url, user=name, password="x", error_cb=on_error, connect_timeout=10)
    try:
        await call(nc.jetstream(timeout=timeout))
    finally:
        await nc.close()


@pytest.mark.parametrize("row", CALLS)
async def test_the_permissions_of_a_row_are_sufficient_and_each_is_needed(row: str) -> None:
    needs = NEEDS[row]
    if row == "source_health":
        needs = ["$JS.API.STREAM.INFO.S", "$JS.API.STREAM.INFO.P", "$JS.API.CONSUMER.INFO.O.C"]
    lacking = {f"without {subject}": [other for other in needs if other != subject] for subject in needs}
    users = [user(name, publish or ["nothing"]) for name, publish in {"some": needs, **lacking}.items()]
    config = f"authorization {{ users: [ {{ user: admin, password: x }}, {', '.join(users)} ] }}"
    async with NatsServer(config=config) as server:
        await prepare(server.url, row)

        async def fails(name: str) -> None:
            refused: list[str] = []
            try:
                await attempt(server.url, name, CALLS[row], 2, refused)
            except (nats.errors.Error, AssertionError):
                subject = name.partition(" ")[2].rstrip(">").lower()
                if not any(subject in error for error in refused):
                    # On a busy machine the time may be over before the request that is refused.
                    with contextlib.suppress(nats.errors.Error, AssertionError):
                        await attempt(server.url, name, CALLS[row], 20, refused)
                assert any(subject in error for error in refused), f"{name}: {refused}"
            else:
                assert row in WORKS_WITHOUT, f"{row} did not need what it was {name}"

        if row == "log.redrive":  # its calls share a note
            for name in lacking:
                await fails(name)
        else:
            async with asyncio.TaskGroup() as group:
                for name in lacking:
                    group.create_task(fails(name))
        refused: list[str] = []
        try:
            await attempt(server.url, "some", CALLS[row], 30, refused)
        except nats.errors.Error as error:
            pytest.fail(f"{error!r}; refused: {refused}")


async def test_confirmed_scan_with_an_end_works_without_the_state_of_the_stream() -> None:
    needs = ["$JS.API.DIRECT.GET.S", "$JS.API.STREAM.MSG.GET.S"]
    refused: list[str] = []

    async def call(js: JetStreamContext) -> None:
        for _ in range(3):
            await proved(js, confirm=True, up_to_seq=2)
        assert len(refused) == 1, "a refused request is not repeated for a while"
        with pytest.raises(errors.RequestTimeoutError, match=r"STREAM\.INFO\.S"):
            await proved(js, confirm=True)

    config = f"authorization {{ users: [ {{ user: admin, password: x }}, {user('some', needs)} ] }}"
    async with NatsServer(config=config) as server:
        await prepare(server.url, "scan(confirm=True)")
        await attempt(server.url, "some", call, 20, refused)


async def test_watching_needs_a_subscription() -> None:
    (row,) = [needs for calls, needs in rows() if calls == "`watch_abandoned`"]
    subject = re.sub(r"<\w+>", "S", row.partition("subscribe to `")[2].strip("`"))
    watcher = f'{{ user: some, password: x, permissions: {{ publish: ["nothing"], subscribe: "{subject}" }} }}'
    batches = "jetstream { limits { batch { timeout: 1s } } }"
    config = f"authorization {{ users: [ {{ user: admin, password: x }}, {watcher} ] }}\n{batches}"
    async with (
        NatsServer(config=config) as server,
        await nats.connect(server.url, user="admin", password="x", connect_timeout=10) as admin,
        await nats.connect(server.url, user="some", password="x", connect_timeout=10) as nc,
    ):
        js = admin.jetstream()
        await js.add_stream(name="S", subjects=["s.>"], allow_atomic=True)
        async with asyncio.timeout(60), jsx.watch_abandoned(nc.jetstream(), "S") as watch:
            batch = jsx.AtomicBatch(js)
            await batch.add("s.a")
            assert (await anext(watch)).batch_id == batch.batch_id


def test_every_call_is_on_the_page() -> None:
    page = " ".join(calls for calls, _ in rows())
    # Functions, and classes that take nats-py's context; the rest are values.
    asks = {name for name in jsx.__all__ if name[0].islower()} | {"DirectGet", "AtomicBatch", "FastPublisher"}
    asks |= {f"kv.{name}" for name in kvx.__all__ if name[0].islower()}
    asks |= {f"log.{name}" for name in log.__all__ if name[0].islower()}
    asks |= {"log.LogReader", "log.OffsetStore", "log.Table"}
    asks |= {f"log.Group.{name}" for name in ("join", "open", "status", "reset")}
    assert {name for name in asks - WITHOUT_REQUESTS if not re.search(rf"\b{re.escape(name)}\b", page)} == set()
    assert {calls.replace("`", "") for calls, _ in rows()} == {*CALLS, "watch_abandoned"}
