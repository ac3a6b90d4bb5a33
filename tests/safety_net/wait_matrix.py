"""The matrix of waits: every public call x every end of a connection x sizes x a full write buffer.

`CALLS` maps every public coroutine, async iterator and function that returns an awaitable to a function that prepares it
on a connection of its own, and returns what starts it. `public_calls` finds their names in the modules, so that a test
can say which is missing. `run_round` runs many cells of the matrix concurrently on one server; each call must end within
its timeout, with an error of nats-py or of this package, and leave no task, timer or subscription.
"""

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import traceback
import typing
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import nats
import nats.errors
import pyarrow as pa
from frame_proxy import Frame, FrameProxy
from nats.aio.client import Client
from waiting import abandon, end_connection

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
import jetstream_ext.log as log
from jetstream_ext import arrow
from jetstream_ext.client.base_connection import FallbackConnection
from jetstream_ext.client.connection import connection_of
from jetstream_ext.client.retry import is_transient
from jetstream_ext.testing import NatsServer

MOMENTS = (0.0, 0.001, 0.03)
SIZES = (0, 100_000, 1_000_000)
PENDING = 4 << 20
TARGETS = 8  # streams to write to: a server keeps the batches of a lost connection for 10 s, up to 50 in a stream
AT_ONCE = 48  # cells in a round
ATTEMPTS = 10  # to prepare a cell on a busy machine
SLACK = 1.0  # seconds that a call may take beyond its timeout
FAULTS = {
    "the server stays": ("close", "drain"),
    "the server is killed": ("kill", "stay away"),
    "the server is stopped": ("stop", "stop and close"),
}
# What waits for an event, and not for an answer, ends only with its connection.
ENDLESS = {
    "AbandonedBatches.__anext__",
    "Changes.__anext__",
    "FastPublisher.wait_closed",
    "FastPublisher.wait_closed (unused)",
    "Member.__anext__ (nothing comes)",
    "Member.run",
    "exactly_once_group",
    "kv.Table.changes",
    "log.Table.changes",
}
# What retries after transient errors: it ends after the `timeout` for an answer and the `patience` (or `ingest`'s own
# `timeout`, or `patience`). The patience is no multiple of the timeout, so that one more wait for an answer shows.
PATIENCE = 1.4  # timeouts
PATIENT = (
    "Committing",
    "Group",
    "LogReader",
    "Member",
    "OffsetStore",
    "dead_letters",
    "drop",
    "exactly_once",
    "from_arrow",
    "ingest",
    "redrive",
    "retry_transaction",
)
ENDS_FOR_GOOD = ("close", "drain", "kill", "stop and close")
_ASYNC = ("__aenter__", "__aexit__", "__anext__", "__await__")


def public_calls() -> set[str]:
    """Return the names of everything public that can be awaited, iterated or entered.

    A name that is public in two modules begins with that of the module.
    """
    modules = {"jsx": jsx, "kv": kvx, "log": log, "arrow": arrow}
    count = Counter(name for module in modules.values() for name in module.__all__)
    things = [
        (name if count[name] == 1 else f"{place}.{name}", getattr(module, name))
        for place, module in modules.items()
        for name in module.__all__
    ]
    classes = {thing for _, thing in things if inspect.isclass(thing)}
    found = set[str]()
    for name, thing in things:
        parts = dir(thing) if thing in classes else [""]
        for part in parts:
            function = getattr(thing, part) if part else thing
            if part == "__await__" or ((part in _ASYNC or part[:1] != "_") and _waits(function)):
                found.add(f"{name}.{part}" if part else name)
            hidden = {each for each in _returned(function) if each.__module__.startswith("jetstream_ext.")} - classes
            assert not hidden or part[:1] == "_", f"{name}.{part} returns {hidden}, which is not public"
    return found


def _returned(function: object) -> set[type]:
    """Return the classes in the return annotation of a function or property."""
    function = function.fget if isinstance(function, property) else function
    ours = inspect.isfunction(function) and not function.__module__.startswith("namedtuple_")
    left = [_hints(function).get("return")] if ours else []
    found = set[type]()
    while left:
        annotation = left.pop()
        left += typing.get_args(annotation)
        found |= {annotation} if inspect.isclass(annotation) else set()
    return found


def _hints(function: object) -> dict[str, Any]:
    return typing.get_type_hints(function, localns={"pa": pa})  # which `kv` imports for type checkers only


def _waits(function: object) -> bool:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return True
    if not inspect.isfunction(function):
        return False
    returned = _hints(function).get("return")
    returned = typing.get_origin(returned) or returned
    return any(hasattr(returned, name) for name in _ASYNC)


# -- the calls --------------------------------------------------------------------------------------------------------


@dataclass
class Try:
    """What one call needs: a connection of its own, a payload and a timeout."""

    nc: Client
    number: int
    size: int
    timeout: float
    undo: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    """What the caller must do with the objects that it has made; nothing of it may wait."""

    def __post_init__(self) -> None:
        self.js = self.nc.jetstream(timeout=self.timeout)
        self.patience = PATIENCE * self.timeout
        self.payload = bytes(self.size)
        self.stream = f"R{self.size}"  # to read from
        self.name = f"n{self.number}"
        self.target = f"W{self.number % TARGETS}"  # to write to
        self.subject = f"w{self.number % TARGETS}.{self.name}"
        self.direct = jsx.DirectGet(self.js, self.stream)

    def entries(self, count: int = 8) -> Iterator[tuple[str, bytes]]:
        return ((self.subject, self.payload) for _ in range(count))

    def table(self) -> pa.Table:
        return pa.table({"subject": [self.subject] * 30, "data": [self.payload] * 30})

    async def bucket(self) -> Any:
        return await self.js.key_value(f"B{self.size}")

    def reader(self) -> log.LogReader:
        return log.LogReader(self.js, self.stream, patience=self.patience)

    def offsets(self, bucket: str = "offsets") -> log.OffsetStore:
        return log.OffsetStore(self.js, bucket, patience=self.patience)


Start = Callable[[], Awaitable[object]]
Call = Callable[[Try], Awaitable[Start]]


def plain(call: Callable[[Try], Awaitable[object]]) -> Call:
    """Return a call that needs no preparation."""

    async def prepare(t: Try) -> Start:
        return lambda: call(t)

    return prepare


def on(opened: Callable[[Try], Awaitable[Any]], call: Callable[[Try, Any], Awaitable[object]]) -> Call:
    """Return a call of an object that `opened` has prepared."""

    async def prepare(t: Try) -> Start:
        prepared = await opened(t)
        return lambda: call(t, prepared)

    return prepare


async def new_batch(t: Try) -> jsx.AtomicBatch:
    batch = jsx.AtomicBatch(t.js)
    t.undo.append(batch.discard)
    return batch


async def open_batch(t: Try) -> jsx.AtomicBatch:
    batch = await new_batch(t)
    await batch.add(t.subject, b"1")
    return batch


async def lost_commit(t: Try) -> jsx.AtomicBatch:
    batch = await open_batch(t)
    await _cancel_once_sent(t, batch.commit_eob())
    assert batch.state == "unknown"
    return batch


async def _cancel_once_sent(t: Try, commit: Awaitable[object]) -> None:
    sent = t.nc.stats["out_msgs"]
    task = asyncio.ensure_future(commit)
    while t.nc.stats["out_msgs"] == sent:
        await asyncio.sleep(0)
    await abandon(task)


async def open_batches(t: Try) -> jsx.AtomicBatches:
    # More than are in flight, and no more: a busy server must answer them within the cell's timeout.
    acks = jsx.publish_atomic_many(t.js, [list(t.entries(1)) for _ in range(6)])
    t.undo.append(acks.aclose)
    await anext(acks)
    return acks


async def new_watch(t: Try) -> jsx.AbandonedBatches:
    watch = jsx.watch_abandoned(t.js, t.target)
    t.undo.append(watch.aclose)
    return watch


async def open_watch(t: Try) -> jsx.AbandonedBatches:
    return await (await new_watch(t)).__aenter__()


def publishers(gap: jsx.GapMode) -> tuple[Callable[[Try], Awaitable[Any]], Callable[[Try], Awaitable[Any]]]:
    async def new(t: Try) -> jsx.FastPublisher:
        publisher = jsx.FastPublisher(t.js, flow=10, gap=gap)
        t.undo.append(publisher.discard)
        return publisher

    async def opened(t: Try) -> jsx.FastPublisher:
        publisher = await new(t)
        await publisher.add(t.subject, b"1")
        return publisher

    return new, opened


def committed(opened: Callable[[Try], Awaitable[Any]]) -> Callable[[Try], Awaitable[Any]]:
    async def committed(t: Try) -> Any:
        batch = await opened(t)
        await batch.commit_eob()
        return batch

    return committed


def fast_calls(gap: jsx.GapMode) -> dict[str, Call]:
    new, opened = publishers(gap)
    return {
        "__aenter__": on(new, lambda t, pub: pub.__aenter__()),
        "__aexit__": on(opened, lambda t, pub: pub.__aexit__(None, None, None)),
        "add": on(opened, lambda t, pub: pub.add(t.subject, t.payload)),
        "add (the first)": on(new, lambda t, pub: pub.add(t.subject, t.payload)),
        "add_many": on(opened, lambda t, pub: pub.add_many(t.entries(30))),
        "commit": on(opened, lambda t, pub: pub.commit(t.subject, t.payload)),
        "commit_eob": on(opened, lambda t, pub: pub.commit_eob()),
        "discard": on(opened, lambda t, pub: pub.discard()),
        "flush": on(opened, lambda t, pub: pub.flush()),
        "ping": on(opened, lambda t, pub: pub.ping()),
        "add (committed)": on(committed(opened), lambda t, pub: pub.add(t.subject, t.payload)),
        "add_many (committed)": on(committed(opened), lambda t, pub: pub.add_many(t.entries(30))),
        "commit_eob (committed)": on(committed(opened), lambda t, pub: pub.commit_eob()),
        "flush (committed)": on(committed(opened), lambda t, pub: pub.flush()),
        "ping (committed)": on(committed(opened), lambda t, pub: pub.ping()),
        "wait_closed": on(opened, lambda t, pub: pub.wait_closed()),
        "wait_closed (unused)": on(new, lambda t, pub: pub.wait_closed()),
    }


async def new_messages(t: Try) -> jsx.MessageBatch:
    messages = t.direct.scan()
    t.undo.append(messages.aclose)
    return messages


async def open_messages(t: Try) -> jsx.MessageBatch:
    messages = t.direct.scan(batch=1)
    t.undo.append(messages.aclose)
    await anext(messages)
    return messages


async def new_record_batches(t: Try) -> arrow.RecordBatches:
    batches = arrow.record_batches(t.js, t.stream)
    t.undo.append(batches.aclose)
    return batches


async def open_record_batches(t: Try) -> arrow.RecordBatches:
    batches = arrow.record_batches(t.js, t.stream, batch=1, batch_rows=1)
    t.undo.append(batches.aclose)
    await anext(batches)
    return batches


async def new_record_batch_reader(t: Try) -> arrow.RecordBatchReader:
    reader = arrow.RecordBatchReader(t.js, t.stream, payload=lambda payloads: payloads, batch=1, batch_rows=1)
    t.undo.append(reader._batches.aclose)
    return reader


async def open_record_batch_reader(t: Try) -> arrow.RecordBatchReader:
    reader = await new_record_batch_reader(t)
    await reader.__aenter__()
    return reader


async def all_record_batches(t: Try) -> None:
    async for _ in arrow.record_batches(t.js, t.stream, confirm=True):
        pass


async def open_transaction(t: Try) -> kvx.Transaction:
    tx = kvx.transaction(await t.bucket())
    t.undo.append(tx.discard)
    await tx.__aenter__()
    tx.put(t.name, t.payload)
    return tx


async def lost_transaction(t: Try) -> kvx.Transaction:
    tx = await open_transaction(t)
    await _cancel_once_sent(t, tx.commit())
    tx._with_id, tx._state = True, "unknown"  # whatever the cancelled commit had reached
    return tx


async def enter_transaction(t: Try, kv: Any) -> None:
    async with kvx.transaction(kv) as tx:
        tx.put(t.name, t.payload)


async def change(tx: kvx.Transaction) -> None:
    await tx.get("a")
    tx.put("a", b"2")


async def new_table(t: Try) -> kvx.Table:
    return kvx.Table(await t.bucket())


async def new_stream_table(t: Try) -> log.Table:
    return log.Table(t.js, t.stream)


async def enter(t: Try, table: Any) -> Any:
    t.undo.append(lambda: table.__aexit__(None, None, None))
    return await table.__aenter__()


def opened(new: Callable[[Try], Awaitable[Any]]) -> Callable[[Try], Awaitable[Any]]:
    async def open_(t: Try) -> Any:
        return await enter(t, await new(t))

    return open_


def table_calls(new: Callable[[Try], Awaitable[Any]]) -> dict[str, Call]:
    return {
        "__aenter__": on(new, enter),
        "__aexit__": on(opened(new), lambda t, table: table.__aexit__(None, None, None)),
        "changes": on(opened(new), lambda t, table: anext(table.changes())),
        "wait_for": on(opened(new), lambda t, table: table.wait_for(1 << 40)),
    }


async def a_bucket(t: Try) -> Any:
    return await t.bucket()


async def open_reader(t: Try) -> log.LogReader:
    reader = t.reader()
    await reader.open()
    return reader


async def new_committing(t: Try) -> log.Committing:
    return t.offsets().committing(t.reader(), name=t.name, every=1)


async def open_committing(t: Try) -> log.Committing:
    committing = await new_committing(t)
    await committing.__aenter__()
    await anext(committing)
    return committing


def exactly_once(t: Try, reader: log.LogReader) -> Awaitable[object]:
    return log.exactly_once(
        reader,
        t.target,
        lambda msg: jsx.BatchMessage(t.subject, t.payload),
        name=t.name,
        prefix=f"w{t.number % TARGETS}.at",
        position_may_vanish=True,
        patience=t.patience,
    )


async def open_worked(t: Try) -> log.LogReader:
    """Let a worker store a state, which the next start reads."""
    await exactly_once_with_a_state(t, await open_reader(t))
    return await open_reader(t)


def exactly_once_with_a_state(t: Try, reader: log.LogReader) -> Awaitable[object]:
    def handle(msg: jsx.StoredMsg, state: log.State) -> None:
        state["a"] = t.payload

    return log.exactly_once(reader, "V", handle, name=t.name, prefix="v.at", state="v.state", patience=t.patience)


def new_group(t: Try, *, partitions: int = 4, **options: Any) -> log.Group:
    return log.Group(
        t.js,
        t.stream,
        t.name,
        partitions=partitions,
        heartbeat=t.timeout,
        timeout=t.timeout,
        patience=t.patience,
        **options,
    )


async def known_group(t: Try) -> log.Group:
    """Return the group "known", which `fill` has created, and which has no members."""
    return await log.Group.open(t.js, t.stream, "known", timeout=t.timeout, patience=t.patience)


async def joined_group(t: Try) -> log.Group:
    """Return a group of this cell that has stored positions, and no members."""
    async with new_group(t).join(auto_commit=False) as member:
        await anext(member)
    return new_group(t)


async def new_member(t: Try) -> log.Member:
    return new_group(t).join()


async def join(t: Try, member: log.Member) -> log.Member:
    async def die() -> None:
        """End as a killed process does, because leaving may wait."""
        membership = member._membership
        membership.group.store.members = None  # type: ignore[assignment]  # its key cannot be deleted
        await membership._end()

    t.undo.append(die)
    return await member.__aenter__()


async def open_member(t: Try) -> log.Member:
    member = await join(t, await new_member(t))
    await anext(member)
    return member


async def idle_member(t: Try) -> log.Member:
    member = await join(t, new_group(t, start=log.New()).join())
    while len(member.partitions) < 4:
        member._membership.check()
        await asyncio.sleep(0.01)
    return member


async def letters(t: Try) -> list[log.DeadLetterMessage]:
    found = log.dead_letters(t.js, t.stream, t.subject, timeout=t.timeout, patience=t.patience)
    return [letter async for letter in found]


def exactly_once_group(t: Try) -> Awaitable[object]:
    return log.exactly_once_group(
        new_group(t),
        t.target,
        lambda msg: jsx.BatchMessage(t.subject, t.payload),
        prefix=f"w{t.number % TARGETS}.at",
        position_may_vanish=True,
        timeout=t.timeout,
        patience=t.patience,
    )


CALLS: dict[str, Call] = {
    # client
    "AbandonedBatches.__aenter__": on(new_watch, lambda t, watch: watch.__aenter__()),
    "AbandonedBatches.__aexit__": on(open_watch, lambda t, watch: watch.__aexit__(None, None, None)),
    "AbandonedBatches.__anext__": on(open_watch, lambda t, watch: anext(watch)),
    "AbandonedBatches.aclose": on(open_watch, lambda t, watch: watch.aclose()),
    "AtomicBatch.__aenter__": on(new_batch, lambda t, batch: batch.__aenter__()),
    "AtomicBatch.__aexit__": on(open_batch, lambda t, batch: batch.__aexit__(None, None, None)),
    "AtomicBatch.add": on(open_batch, lambda t, batch: batch.add(t.subject, t.payload)),
    "AtomicBatch.add (the first)": on(new_batch, lambda t, batch: batch.add(t.subject, t.payload)),
    "AtomicBatch.add (another stream's subject)": on(
        open_batch, lambda t, batch: batch.add(f"w{(t.number + 1) % TARGETS}.{t.name}", t.payload)
    ),
    "AtomicBatch.add_many": on(open_batch, lambda t, batch: batch.add_many(t.entries())),
    "AtomicBatch.commit": on(open_batch, lambda t, batch: batch.commit(t.subject, t.payload)),
    "AtomicBatch.commit_eob": on(open_batch, lambda t, batch: batch.commit_eob()),
    "AtomicBatch.add (committed)": on(committed(open_batch), lambda t, batch: batch.add(t.subject, t.payload)),
    "AtomicBatch.add_many (committed)": on(committed(open_batch), lambda t, batch: batch.add_many(t.entries())),
    "AtomicBatch.commit_eob (committed)": on(committed(open_batch), lambda t, batch: batch.commit_eob()),
    "AtomicBatch.discard": on(open_batch, lambda t, batch: batch.discard()),
    "AtomicBatch.resolve": on(lost_commit, lambda t, batch: batch.resolve(timeout=t.timeout)),
    "AtomicBatches.__anext__": on(open_batches, lambda t, acks: anext(acks)),
    "AtomicBatches.__await__": plain(lambda t: _listed(jsx.publish_atomic_many(t.js, [t.entries()] * 2))),
    "AtomicBatches.aclose": on(open_batches, lambda t, acks: acks.aclose()),
    "AtomicBatches.to_list": on(open_batches, lambda t, acks: acks.to_list()),
    "DirectGet.batch": plain(lambda t: t.direct.batch(10).to_list()),
    "DirectGet.get": plain(lambda t: t.direct.get(1)),
    "DirectGet.get_at": plain(lambda t: t.direct.get_at(datetime(2020, 1, 1, tzinfo=UTC))),
    "DirectGet.get_last": plain(lambda t: t.direct.get_last(f"r{t.size}.1")),
    "DirectGet.get_next": plain(lambda t: t.direct.get_next(f"r{t.size}.>")),
    "DirectGet.multi_last": plain(lambda t: t.direct.multi_last([f"r{t.size}.>"]).to_list()),
    "DirectGet.scan": plain(lambda t: t.direct.scan().to_list()),
    "DirectGet.scan (confirmed)": plain(lambda t: t.direct.scan(confirm=True).to_list()),
    **{f"FastPublisher.{name}": call for name, call in fast_calls(jsx.GapMode.FAIL).items()},
    **{f"FastPublisher.{name} (gaps ok)": call for name, call in fast_calls(jsx.GapMode.OK).items()},
    "MessageBatch.__aenter__": on(new_messages, lambda t, messages: messages.__aenter__()),
    "MessageBatch.__aexit__": on(open_messages, lambda t, messages: messages.__aexit__(None, None, None)),
    "MessageBatch.__anext__": on(open_messages, lambda t, messages: anext(messages)),
    "MessageBatch.aclose": on(open_messages, lambda t, messages: messages.aclose()),
    "MessageBatch.to_list": on(new_messages, lambda t, messages: messages.to_list()),
    "create_source_consumer": plain(
        lambda t: jsx.create_source_consumer(t.js, t.stream, t.name, deliver_subject=f"d.{t.name}")
    ),
    "ensure_stream": plain(lambda t: jsx.ensure_stream(t.js, name=f"E{t.name}", subjects=[f"e{t.name}"])),
    "features": plain(lambda t: jsx.features(t.js)),
    "ingest": plain(lambda t: jsx.ingest(t.js, t.entries(30), flow=10, patience=t.patience)),
    "publish_atomic": plain(lambda t: jsx.publish_atomic(t.js, t.entries())),
    "publish_atomic_many": plain(lambda t: _listed(jsx.publish_atomic_many(t.js, [t.entries()] * 2))),
    "reset_consumer": plain(lambda t: jsx.reset_consumer(t.js, t.stream, "c")),
    "source_health": plain(lambda t: jsx.source_health(t.js, t.stream)),
    "watch_abandoned": on(new_watch, lambda t, watch: watch.__aenter__()),
    # arrow
    "RecordBatches.__aenter__": on(new_record_batches, lambda t, batches: batches.__aenter__()),
    "RecordBatches.__aexit__": on(open_record_batches, lambda t, batches: batches.__aexit__(None, None, None)),
    "RecordBatches.__anext__": on(open_record_batches, lambda t, batches: anext(batches)),
    "RecordBatches.aclose": on(open_record_batches, lambda t, batches: batches.aclose()),
    "RecordBatchReader.__aenter__": on(new_record_batch_reader, lambda t, reader: reader.__aenter__()),
    "RecordBatchReader.__aexit__": on(open_record_batch_reader, lambda t, reader: reader.__aexit__(None, None, None)),
    "from_arrow": plain(lambda t: arrow.from_arrow(t.js, t.table(), flow=10, patience=t.patience)),
    "record_batches": plain(all_record_batches),
    "to_arrow": plain(lambda t: arrow.to_arrow(t.js, t.stream)),
    # kv
    "Changes.__anext__": on(opened(new_table), lambda t, table: anext(table.changes())),
    **{f"kv.Table.{name}": call for name, call in table_calls(new_table).items()},
    "Transaction.__aenter__": on(a_bucket, lambda t, kv: kvx.transaction(kv).__aenter__()),
    "Transaction.__aexit__": on(open_transaction, lambda t, tx: tx.__aexit__(None, None, None)),
    "Transaction.commit": on(open_transaction, lambda t, tx: tx.commit()),
    "Transaction.discard": on(open_transaction, lambda t, tx: tx.discard()),
    "Transaction.get": on(open_transaction, lambda t, tx: tx.get("a")),
    "Transaction.get_many": on(open_transaction, lambda t, tx: tx.get_many(["a", "b"])),
    "Transaction.resolve": on(lost_transaction, lambda t, tx: tx.resolve(timeout=t.timeout)),
    "enable": on(a_bucket, lambda t, kv: kvx.enable(kv, atomic=True)),
    "ensure_bucket": plain(lambda t: kvx.ensure_bucket(t.js, "fresh", spark=True)),
    "get_many": on(a_bucket, lambda t, kv: kvx.get_many(kv, ["a", "b"])),
    "retry_transaction": on(a_bucket, lambda t, kv: kvx.retry_transaction(kv, change, patience=t.patience)),
    "snapshot": on(a_bucket, lambda t, kv: kvx.snapshot(kv)),
    "touch": on(a_bucket, lambda t, kv: kvx.touch(kv, "b", jsx.NEVER)),
    "transaction": on(a_bucket, enter_transaction),
    # log
    "Committing.__aenter__": on(new_committing, lambda t, messages: messages.__aenter__()),
    "Committing.__aexit__": on(open_committing, lambda t, messages: messages.__aexit__(None, None, None)),
    "Committing.__anext__": on(open_committing, lambda t, messages: anext(messages)),
    "Committing.commit": on(open_committing, lambda t, messages: messages.commit()),
    "Group.join": on(new_member, join),
    "Group.open": plain(known_group),
    "Group.reset": on(joined_group, lambda t, group: group.reset(log.Seq(1))),
    "Group.status": on(known_group, lambda t, group: group.status()),
    "LogReader.__anext__": on(open_reader, lambda t, reader: anext(reader)),
    "LogReader.open": plain(lambda t: t.reader().open()),
    "LogReader.read": on(open_reader, lambda t, reader: reader.read()),
    "LogReader.read_for": on(open_reader, lambda t, reader: reader.read_for(0.1)),
    "Member.__aenter__": on(new_member, join),
    "Member.__aexit__": on(open_member, lambda t, member: member.__aexit__(None, None, None)),
    "Member.__anext__": on(open_member, lambda t, member: anext(member)),
    "Member.__anext__ (nothing comes)": on(idle_member, lambda t, member: anext(member)),
    "Member.commit": on(open_member, lambda t, member: member.commit()),
    "Member.run": on(idle_member, lambda t, member: member.run(lambda msg: None)),
    "OffsetStore.commit": on(open_reader, lambda t, reader: t.offsets().commit(reader, name=t.name)),
    "OffsetStore.committing": on(new_committing, lambda t, messages: messages.__aenter__()),
    "LogReader.lag": on(open_reader, lambda t, reader: reader.lag()),
    "OffsetStore.create": plain(lambda t: t.offsets(f"new{t.name}").create()),
    "OffsetStore.fetch": plain(lambda t: t.offsets().fetch("r")),
    "dead_letters": plain(letters),
    "drop": plain(lambda t: log.drop(t.js, t.stream, [1 << 40], timeout=t.timeout, patience=t.patience)),
    "exactly_once": on(open_reader, exactly_once),
    "exactly_once (with a state)": on(open_worked, exactly_once_with_a_state),
    "exactly_once_group": plain(exactly_once_group),
    "redrive": plain(
        lambda t: log.redrive(
            t.js, t.stream, t.subject, offsets=t.offsets(), timeout=t.timeout, patience=t.patience, max_messages=1
        )
    ),
    "list_groups": plain(lambda t: log.list_groups(t.js)),
    **{f"log.Table.{name}": call for name, call in table_calls(new_stream_table).items()},
}


async def _listed(acks: jsx.AtomicBatches) -> object:
    return await acks


async def fill(server: NatsServer) -> None:
    """Create the streams and buckets that the calls use."""
    nc = await nats.connect(server.url, connect_timeout=10)
    js = nc.jetstream(timeout=60)
    flags = {"allow_direct": True, "allow_atomic": True, "allow_batched": True}
    for n in range(TARGETS):
        await js.add_stream(name=f"W{n}", subjects=[f"w{n}.>"], max_bytes=16 << 20, **flags)
    await js.add_stream(name="V", subjects=["v.>"], **flags)
    for size in SIZES:
        await js.add_stream(name=f"R{size}", subjects=[f"r{size}.>"], **flags)
        await js.add_consumer(f"R{size}", durable_name="c")
        kv = await js.create_key_value(bucket=f"B{size}", direct=True, history=2)
        for n in range(3):
            await js.publish(f"r{size}.{n}", bytes(size))
        for key in "ab":
            await kv.put(key, bytes(size))
        await kvx.enable(kv, atomic=True, ttl=60)
    await js.create_key_value(bucket="offsets")
    for size in SIZES:
        async with log.Group(js, f"R{size}", "known", partitions=4).join():
            pass
    await nc.close()


# -- the cells ----------------------------------------------------------------------------------------------------------

NARROW: dict[str, Any] = {"pending_size": 100, "inbox_prefix": f"_INBOX_{'x' * 200}"}
_CELL: contextvars.ContextVar["Cell | None"] = contextvars.ContextVar("cell", default=None)


@dataclass(eq=False)
class Cell:
    """One call and what happens to its connection; `fault` is one of `FAULTS`, or the answer after which all stops."""

    call: str
    fault: str | int
    size: int = 0
    pending: bool = False
    fallback: bool = False
    moment: float = 0.0  # seconds after the start of the call at which its connection ends
    narrow: bool = False  # nats-py's buffer takes less than one SUB line, and inboxes have long names
    wrong: str = ""
    through: Callable[[int], "Fault"] | None = None  # makes the proxy of a server's port that is the fault
    longer: float = 0.0  # seconds that the call may take beyond what its timeout and patience allow
    complete: bool = False  # the call had all its answers before the fault
    took: float = 0.0  # seconds of the round's clock
    failed: list[Exception] = field(default_factory=list)  # why it had to be prepared again

    def __str__(self) -> str:
        fault = self.fault if isinstance(self.fault, str) else f"stop after answer {self.fault}"
        state = "4 MiB pending" if self.pending else "idle"
        when = f" after {self.moment:g} s" if self.moment else ""
        how = ", fallback" * self.fallback + ", a small buffer" * self.narrow
        return f"{self.call}, {fault}{when}, {self.size:,} B, {state}{how}"

    async def note(self, error: Exception) -> None:
        """Note an error that nats-py reports, if this package raised it in a callback and it is not documented."""
        if not isinstance(error, nats.errors.Error):
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
            if any("/jetstream_ext/" in file for file in files):
                self.wrong += f"; a callback raised {error!r:.300}"


class Fault(typing.Protocol):
    """A proxy that spoils a connection once its cell is prepared."""

    url: str

    async def __aenter__(self) -> typing.Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def arm(self) -> None:
        """Spoil the connection from now on."""

    @property
    def frozen(self) -> bool:
        """Whether it has begun."""


class _LoopClock:
    """Seconds in which the loop was able to run: a stall of the machine or of the loop hardly counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            self.seconds += min(loop.time() - before, 0.02)

    async def wait(self, tasks: Iterable[asyncio.Future[Any]], seconds: float) -> None:
        """Wait until the tasks are done, for some seconds of this clock."""
        until, left = self.seconds + seconds, set(tasks)
        while left and self.seconds < until:
            _, left = await asyncio.wait(left, timeout=0.05)

    async def stop(self) -> None:
        await abandon(self._task)


class _Freezer:
    """Hooks of a proxy that stop all traffic after some messages of the server."""

    def __init__(self, answers: int) -> None:
        self.left: float = float("inf")
        self.answers = answers
        self.frozen = False
        self._forever = asyncio.Event()

    def arm(self) -> None:
        self.left = self.answers
        self.frozen = not self.answers

    async def up(self, frame: Frame) -> Frame | None:
        if self.frozen and self.answers:
            await self._forever.wait()
        return frame

    async def down(self, frame: Frame) -> Frame | None:
        if self.left <= 0:
            self.frozen = True
            await self._forever.wait()
        self.left -= 1
        self.frozen = self.left <= 0
        return frame


@dataclass
class _Running:
    """A cell with its connection and its call."""

    cell: Cell
    t: Try
    held: set[int]
    freezer: "_Freezer | Fault | None"
    start: Start
    task: asyncio.Task[object] | None = None


_numbers = itertools.count()


def without_internals(nc: Client) -> None:
    """Make this package use nats-py's public interface only."""
    parse = nc._ps.parse
    nc._ps.parse = lambda data=b"": parse(data)  # type: ignore[method-assign]
    assert isinstance(connection_of(nc), FallbackConnection)


async def _prepare(
    server: NatsServer, cell: Cell, timeout: float, proxies: contextlib.AsyncExitStack
) -> _Running | None:
    """Connect and prepare a call; None if that fails again and again, each time on a connection of its own."""
    for attempt in range(ATTEMPTS):
        nc, freezer = await _connect(server, cell, proxies)
        t = Try(nc, next(_numbers), cell.size, timeout)
        try:
            # This opens nats-py's own subscription for answers. A server that has just started may answer nothing.
            await nc.jetstream(timeout=5).account_info()
            held = set(nc._subs)
            _CELL.set(cell)
            return _Running(cell, t, held, freezer, await CALLS[cell.call](t))
        except (nats.errors.Error, AssertionError) as error:
            failure = error
        finally:
            _CELL.set(None)
        cell.failed.append(failure)
        for undo in t.undo:
            await undo()
        await end_connection(nc)
        if not isinstance(failure, AssertionError) and not is_transient(failure):
            break  # a busy machine is not the reason
        await asyncio.sleep(attempt * timeout)
    cell.wrong, cell.complete = f"could not be prepared: {cell.failed}", True
    return None


async def _connect(
    server: NatsServer, cell: Cell, proxies: contextlib.AsyncExitStack
) -> tuple[Client, _Freezer | Fault | None]:
    """Return a connection and the hooks of its proxy."""
    freezer: _Freezer | Fault | None = None
    url = server.url
    if cell.through is not None:
        freezer = proxy = await proxies.enter_async_context(cell.through(server.port))
        url = proxy.url
    elif isinstance(cell.fault, int):
        freezer = hooks = _Freezer(cell.fault)
        frames = FrameProxy(server.port, on_publish=hooks.up, on_delivery=hooks.down)
        url = (await proxies.enter_async_context(frames)).url
    nc = await nats.connect(
        url,
        allow_reconnect=cell.fault != "kill",
        reconnect_time_wait=0.05,
        max_reconnect_attempts=-1,
        connect_timeout=30,
        drain_timeout=1,
        error_cb=cell.note,
        **NARROW if cell.narrow else {},
    )
    proxies.push_async_callback(end_connection, nc)
    if cell.fallback:
        without_internals(nc)
    return nc, freezer


async def _clog(running: _Running, *, stopped: bool) -> None:
    """Make 4 MiB pending in nats-py's buffer; behind a stopped server, also fill what is in front of it."""
    nc = running.t.nc
    noise = b"PUB noise 1000000\r\n" + bytes(1_000_000) + b"\r\n"
    while nc._pending_data_size < PENDING:
        while nc._pending_data_size < PENDING:
            nc._pending.append(noise)
            nc._pending_data_size += len(noise)
        if stopped:
            await nc._flush_pending()
            await asyncio.sleep(0.05)  # nats-py's flusher takes the buffer if its socket takes bytes


async def run_round(server: NatsServer, cells: list[Cell], *, timeout: float) -> None:
    """Run cells whose faults are of one group of `FAULTS` (or numbers) concurrently, and note what is wrong in each."""
    loop: Any = asyncio.get_running_loop()
    owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Cell | None] = weakref.WeakKeyDictionary()
    uncaught: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        owners[task] = _CELL.get()
        return task

    def caught(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("future", context.get("task"))
        name = _name(task) if isinstance(task, asyncio.Task) else ""
        if not name.startswith(_OF_NATS_PY):
            uncaught.append(f"{context.get('message')} {name} {context.get('exception')!r}")

    loop.set_task_factory(factory)
    loop.set_exception_handler(caught)
    clock = _LoopClock()
    faults = {cell.fault for cell in cells}
    stops = not faults.isdisjoint((*FAULTS["the server is stopped"], *FAULTS["the server is killed"]))
    ends: list[asyncio.Task[Any]] = []
    async with contextlib.AsyncExitStack() as proxies:
        prepared = await asyncio.gather(*(_prepare(server, cell, timeout, proxies) for cell in cells))
        everything = [each for each in prepared if each is not None]
        try:
            if stops:
                server.pause()
            await asyncio.gather(*(_clog(each, stopped=stops) for each in everything if each.cell.pending))
            for running in everything:
                if running.freezer is not None:
                    running.freezer.arm()
                running.task = _start(running)
            closed = [each for each in everything if each.cell.fault in ("close", "stop and close", "drain")]
            ends += [asyncio.create_task(_end(running)) for running in closed]
            await asyncio.sleep(max(cell.moment for cell in cells))
            if not faults.isdisjoint(FAULTS["the server is killed"]):
                server.kill()
            tasks = [each.task for each in everything if each.task is not None]
            await asyncio.gather(*(_watch(running, clock, timeout) for running in everything))
            for task in tasks:
                await abandon(task)
            await asyncio.gather(*(_undo(each, clock) for each in everything))
            await clock.wait([task for task in owners if owners[task] in cells and not task.done()], SLACK)
            for running in everything:
                _check_leaks(running, owners)
        finally:
            for task in ends:
                await abandon(task)
            for running in everything:
                await end_connection(running.t.nc)
            # nats-py can lose track of a task that reconnects. It would open the closed client again.
            for task in [task for task in owners if not task.done() and _name(task).startswith(_OF_NATS_PY)]:
                await abandon(task)
            if not faults.isdisjoint(FAULTS["the server is killed"]):
                await asyncio.to_thread(server.restart)
            elif stops:
                server.resume()
    await clock.stop()
    loop.set_task_factory(None)
    loop.set_exception_handler(None)
    if uncaught:
        cells[0].wrong += f" [in this round: uncaught: {uncaught[0]}]"


_OF_NATS_PY = ("Client.", "Subscription.")


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


def _start(running: _Running) -> asyncio.Task[object]:
    context = contextvars.copy_context()
    context.run(_CELL.set, running.cell)

    async def call() -> object:
        return await running.start()

    return asyncio.get_running_loop().create_task(call(), context=context)


async def _end(running: _Running) -> None:
    await asyncio.sleep(running.cell.moment)
    nc = running.t.nc
    await (nc.drain() if running.cell.fault == "drain" else nc.close())


async def _watch(running: _Running, clock: _LoopClock, timeout: float) -> None:
    """Wait as long as the call may take, and judge it."""
    assert running.task is not None
    start = clock.seconds
    running.task.add_done_callback(lambda _: setattr(running.cell, "took", clock.seconds - start))
    if not _is_endless(running.cell):
        timeouts = 1 + PATIENCE * running.cell.call.startswith(PATIENT)
        await clock.wait([running.task], timeouts * timeout + running.cell.longer + SLACK)
    _judge(running)


def _is_endless(cell: Cell) -> bool:
    return cell.call.removesuffix(" (gaps ok)") in ENDLESS and cell.fault not in ENDS_FOR_GOOD


def _judge(running: _Running) -> None:
    cell, task = running.cell, running.task
    assert task is not None
    frozen = running.freezer is None or running.freezer.frozen
    cell.complete = task.done() and not frozen
    if not task.done():
        if not _is_endless(cell):
            cell.wrong = "still waits: " + _where(task)
    elif task.cancelled():
        cell.wrong = "ended as cancelled"
    elif (error := task.exception()) is not None and not isinstance(error, (nats.errors.Error, StopAsyncIteration)):
        cell.wrong = f"raised {error!r}"


def _where(task: asyncio.Task[Any]) -> str:
    """Return the functions that a task is in, from the outside in."""
    names, awaited = list[str](), task.get_coro()
    while awaited is not None:
        code = getattr(awaited, "cr_code", None) or getattr(awaited, "ag_code", None)
        if code is not None:
            names.append(code.co_qualname)
        inner = getattr(awaited, "cr_await", None)
        awaited = inner if inner is not None else getattr(awaited, "ag_await", None)
    return " > ".join(names[-4:])


async def _undo(running: _Running, clock: _LoopClock) -> None:
    for undo in running.t.undo:
        task = asyncio.ensure_future(undo())
        await clock.wait([task], SLACK)
        if not task.done():
            running.cell.wrong += "; its cleanup waits: " + _where(task)  # type: ignore[arg-type]
        elif not task.cancelled() and (error := task.exception()) is not None:
            running.cell.wrong += f"; its cleanup raised {error!r}"
        await abandon(task)


WRITING = (
    "BaseConnection.bounded > wait",
    "Client._send_publish > ",
    "Client.flush > ",
    "FallbackConnection._publish > ",
)


def _check_leaks(running: _Running, owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Cell | None]) -> None:
    cell, nc = running.cell, running.t.nc
    loop: Any = asyncio.get_running_loop()
    tasks = {_where(task) for task, owner in owners.items() if owner is cell and not task.done()}
    timers = {
        repr(each._callback) for each in loop._scheduled if not each.cancelled() and each._context.get(_CELL) is cell
    }
    subscriptions = {nc._subs[sid]._subject for sid in set(nc._subs) - running.held}
    connection = connection_of(nc)
    if isinstance(connection, FallbackConnection):
        # It holds in tasks what nats-py's buffer does not take, and each ping until its PONG or the end of the connection.
        if connection._queued or "Client.flush > wait_for" in tasks:
            tasks = {where for where in tasks if not where.startswith(WRITING)}
            timers = {timer for timer in timers if "_release_waiter" not in timer}
        if nc.is_closed:  # nats-py then ends no subscription, and its close() may fail before it ends them all
            tasks.discard("Subscription._wait_for_msgs > Queue.get")
            subscriptions.clear()
    for what, left in (("tasks", tasks), ("timers", timers), ("subscriptions", subscriptions)):
        if left:
            cell.wrong += f"; {what} are left: {sorted(left)}"


def matrix(group: str) -> list[Cell]:
    """Return every cell for the faults of a group; the moment of the fault rotates."""
    moments, narrow = itertools.cycle(MOMENTS), itertools.cycle((False, False, True))
    return [
        Cell(call, fault, size, pending, fallback, next(moments), next(narrow))
        for fallback, pending, size, fault, call in itertools.product(
            (False, True), (False, True), SIZES, FAULTS[group], CALLS
        )
    ]


def sample(group: str) -> list[Cell]:
    """Return each call with one fault of the group; together, every fault meets every size, state and connection."""
    ends = list(itertools.product(FAULTS[group], SIZES, (False, True), (False, True)))
    shift = 8 * list(FAULTS).index(group)
    return [
        Cell(call, *ends[(7 * n + shift) % len(ends)], moment=MOMENTS[n % len(MOMENTS)], narrow=(n + shift) % 3 == 0)
        for n, call in enumerate(CALLS)
    ]


async def run_cells(server: NatsServer, cells: list[Cell], *, timeout: float) -> None:
    """Run cells of one group in rounds; the bytes of one round are in memory at once."""
    for start in range(0, len(cells), AT_ONCE):
        await run_round(server, cells[start : start + AT_ONCE], timeout=timeout)


async def freeze_everywhere(server: NatsServer, calls: Iterable[str], *, timeout: float, fallback: bool) -> list[Cell]:
    """Stop each call after 0, 1, 2 ... answers until it completes, and return the cells."""
    done, left = list[Cell](), list(calls)
    for answers in range(100):
        cells = [Cell(call, answers, fallback=fallback) for call in left]
        await run_cells(server, cells, timeout=timeout)
        done += cells
        left = [cell.call for cell in cells if not cell.complete and not _is_endless(cell)]
        if not left:
            return done
    raise AssertionError(f"these calls never complete: {left}")
