"""A bucket that this package shares with nats.js or nats.go, in both directions."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.api import RePublish
from nats.js.errors import InvalidKeyError
from nats.js.kv import KeyValue
from peers import PeerError, TheirBucket, TheirEntry

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import AtomicPublishDisabledError, HistoryUnavailableError, KeyConflictError

Shared = Callable[..., Awaitable[tuple[KeyValue, TheirBucket]]]
WRONG_LAST = (10071, 10164)


@pytest.fixture
def shared(js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]) -> Shared:
    """Let the other client create a bucket, and enable the options that it lacks."""

    async def make(**config: Any) -> tuple[KeyValue, TheirBucket]:
        bucket = theirs(stream_name())
        await bucket.make(**config)
        return await kvx.enable(await js.key_value(bucket._name)), bucket

    return make


def pair(entry: TheirEntry | None) -> tuple[bytes, int] | None:
    return None if entry is None else (entry.value, entry.revision)


def event(entry: TheirEntry) -> tuple[str, bytes, int, str]:
    return entry.key, entry.value, entry.revision, entry.operation


async def test_other_clients_read_what_a_transaction_wrote(shared: Shared) -> None:
    kv, bucket = await shared(history=5)
    await bucket.watch()
    assert await bucket.put("gone", b"0") == 1
    async with kvx.transaction(kv) as tx:
        tx.put("a.b", bytes(range(256)))
        tx.create("c/d=e_f-g", b"")
        tx.delete("gone")
        tx.purge("never")
    expected = [
        ("gone", b"0", 1, "PUT"),
        ("a.b", bytes(range(256)), 2, "PUT"),
        ("c/d=e_f-g", b"", 3, "PUT"),
        ("gone", b"", 4, "DEL"),
        ("never", b"", 5, "PURGE"),
    ]
    assert [event(await bucket.next()) for _ in expected] == expected
    assert pair(await bucket.get("a.b")) == (bytes(range(256)), 2)
    assert pair(await bucket.get("a.b", revision=2)) == (bytes(range(256)), 2)
    assert [event(entry) for entry in await bucket.history("gone")] == [expected[0], expected[3]]
    assert await bucket.keys() == {"a.b", "c/d=e_f-g"}
    assert await bucket.keys("a.*") == {"a.b"}
    assert await bucket.update("a.b", b"3", last=2) == 6
    assert await bucket.create("gone", b"4") == 7
    assert await bucket.create("never", b"5") == 8
    with pytest.raises(PeerError) as refused:
        await bucket.update("c/d=e_f-g", b"6", last=2)
    assert refused.value.code in WRONG_LAST
    with pytest.raises(PeerError):
        await bucket.create("a.b", b"7")


async def test_other_clients_do_not_see_the_records_of_the_spark_sink(shared: Shared, js: JetStreamContext) -> None:
    """The sink stores them in the bucket's stream, on a subject that belongs to no key."""
    kv, bucket = await shared(history=3)
    await kvx.enable(kv, spark=True)
    await bucket.watch()
    stream = f"KV_{bucket._name}"
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"$KV.{bucket._name}.a", b"1")
        await batch.add(f"_spark.{stream}.query._position", b"{}")
    await js.publish(f"_spark.{stream}.query.0.0", b"{}")
    assert await bucket.put("b", b"2") == 4
    assert [event(await bucket.next()) for _ in range(2)] == [("a", b"1", 1, "PUT"), ("b", b"2", 4, "PUT")]
    assert await bucket.keys() == {"a", "b"}
    await bucket.delete("a")
    await bucket.purge_deletes()
    assert await bucket.keys() == {"b"}
    assert (await js.stream_info(stream, subjects_filter="_spark.>")).state.subjects == {
        f"_spark.{stream}.query._position": 1,
        f"_spark.{stream}.query.0.0": 1,
    }


async def test_other_clients_do_not_see_events(shared: Shared, js: JetStreamContext) -> None:
    """Nor the messages that carry the conditions of a transaction."""
    kv, bucket = await shared(history=3)
    topic = bucket._name
    await kvx.enable(kv, events=[f"{topic}.>"])
    await bucket.watch()
    await bucket.put("a", b"1")
    async with kvx.transaction(kv) as tx:
        await tx.get_many(["a", "x", "y", "z"])
        tx.publish(f"{topic}.made", b"event")
        tx.put("b", b"2")
    assert [event(await bucket.next())[:2] for _ in range(2)] == [("a", b"1"), ("b", b"2")]
    assert await bucket.keys() == {"a", "b"}
    await bucket.delete("a")
    await bucket.purge_deletes()
    assert await bucket.keys() == {"b"}
    stored = [message.data async for message in jsx.DirectGet(js, kv._stream).scan(subject=f"{topic}.>")]
    assert stored == [b"event"]


async def test_a_transaction_continues_from_writes_of_other_clients(shared: Shared) -> None:
    kv, bucket = await shared(history=3)
    revision = await bucket.put("a", b"1")
    for key in ("b", "c"):
        await bucket.put(key, b"1")
    await bucket.delete("b")
    await bucket.purge("c")
    async with kvx.transaction(kv) as tx:
        assert await tx.get("b") is None
        tx.update("a", b"2", last=revision)
        tx.create("b", b"2")
        tx.create("c", b"2")
    assert await bucket.keys() == {"a", "b", "c"}
    tx = kvx.transaction(kv)
    found = await tx.get("a")
    assert found is not None
    await bucket.put("a", b"theirs")
    tx.put("b", b"from " + found.value)
    with pytest.raises(KeyConflictError) as conflict:
        await tx.commit()
    assert conflict.value.keys == ("a",)
    assert pair(await bucket.get("b")) == (b"2", 7)


async def test_reads_return_the_writes_of_other_clients(shared: Shared) -> None:
    kv, bucket = await shared(history=10)
    first = await bucket.create("a.1", b"1")
    await bucket.put("a.2", b"2")
    await bucket.update("a.1", b"3", last=first)
    await bucket.delete("a.2")
    await bucket.put("b", b"4")
    await bucket.create("a.2", b"5")
    await bucket.delete("b", last=5)
    states = [
        {"a.1": b"1"},
        {"a.1": b"1", "a.2": b"2"},
        {"a.1": b"3", "a.2": b"2"},
        {"a.1": b"3"},
        {"a.1": b"3", "b": b"4"},
        {"a.1": b"3", "a.2": b"5", "b": b"4"},
        {"a.1": b"3", "a.2": b"5"},
    ]
    for revision, state in enumerate(states, start=1):
        snapshot = await kvx.snapshot(kv, at=revision)
        assert {key: entry.value for key, entry in snapshot.items()} == state
        many = await kvx.get_many(kv, ["a.1", "a.2", "b"], at=revision)
        assert {key: entry.value for key, entry in many.items()} == state
    now = await kvx.snapshot(kv, include_deletes=True)
    assert now["b"].operation == "DEL"
    for key in ("a.1", "a.2"):
        theirs = await bucket.get(key)
        assert theirs is not None
        assert (now[key].value, now[key].revision) == pair(theirs)
        assert now[key].created.timestamp() == pytest.approx(theirs.created, abs=0.001)
        assert (await kvx.snapshot(kv, at=now[key].created))[key] == now[key]
    assert (await kvx.get_many(kv, ["b", "a.2"])).keys() == {"a.2"}
    await bucket.purge("a.1")
    assert (await kvx.snapshot(kv)).keys() == {"a.2"}
    with pytest.raises(HistoryUnavailableError) as gone:
        await kvx.snapshot(kv, at=7)
    assert gone.value.keys == ("a.1",)


async def test_the_stored_messages_are_the_same(shared: Shared) -> None:
    kv, theirs = await shared(history=5)
    ours, _ = await shared(history=5)
    await theirs.put("a", b"1")
    await theirs.create("b", b"2")
    await theirs.update("b", b"3", last=2)
    await theirs.delete("a", last=1)
    await theirs.create("a", b"4")
    await theirs.delete("a")
    await theirs.purge("b")
    await theirs.create("b", b"5")
    for step in (
        lambda tx: tx.put("a", b"1"),
        lambda tx: tx.create("b", b"2"),
        lambda tx: tx.update("b", b"3", last=2),
        lambda tx: tx.delete("a", last=1),
        lambda tx: tx.create("a", b"4"),
        lambda tx: tx.delete("a"),
        lambda tx: tx.purge("b"),
        lambda tx: tx.create("b", b"5"),
    ):
        async with kvx.transaction(ours) as tx:
            step(tx)
    assert await _stored(ours) == await _stored(kv)


async def _stored(kv: KeyValue) -> list[tuple[int, str, bytes, dict[str, str]]]:
    messages = await jsx.DirectGet(kv._js, kv._stream).scan().to_list()
    return [
        (
            message.seq,
            message.subject.removeprefix(kv._pre),
            message.data,
            # What identifies a commit, should its answer be lost.
            {
                name: text
                for name, text in message.headers.items()
                if not name.startswith(("Nats-Batch-", "Nats-Msg-Id"))
            },
        )
        for message in messages
    ]


async def test_all_clients_accept_the_same_keys(shared: Shared) -> None:
    kv, bucket = await shared()
    for key in ("a", "A.1", "-", "_", "=", "a/b/c", "x.-_/=.9"):
        await bucket.put(key, b"theirs")
        async with kvx.transaction(kv) as tx:
            tx.put(key, b"ours")
        entry = await bucket.get(key)
        assert entry is not None
        assert entry.value == b"ours"
        assert (await kvx.get_many(kv, [key]))[key].value == b"ours"
    for key in ("", ".", ".a", "a.", "a..b", "a b", "a\n", "ä", "a*", "*", ">", "a.>", "a:b", "a\\b", "$a"):
        with pytest.raises(PeerError):
            await bucket.put(key, b"theirs")
        with pytest.raises(InvalidKeyError):
            await kvx.get_many(kv, [key])
        with pytest.raises(InvalidKeyError):
            kvx.transaction(kv).put(key, b"ours")


async def test_history_purged_by_another_client_is_unavailable(shared: Shared) -> None:
    kv, bucket = await shared(history=5)
    await bucket.put("a", b"1")
    await bucket.put("b", b"1")
    await bucket.delete("a")
    await bucket.put("b", b"2")
    await bucket.purge_deletes()
    assert (await kvx.snapshot(kv, include_deletes=True)).keys() == {"b"}
    assert await kvx.get_many(kv, ["a"]) == {}
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, at=2)
    with pytest.raises(HistoryUnavailableError) as gone:
        await kvx.get_many(kv, ["a", "b"], at=2)
    assert gone.value.keys == ("a",)


async def test_a_bucket_created_by_another_client_works(
    js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    bucket = theirs(stream_name())
    await bucket.make(history=4)
    kv = await js.key_value(bucket._name)
    await bucket.put("a", b"1")
    tx = kvx.transaction(kv)
    tx.put("a", b"2")
    tx.put("b", b"2")  # one key would need no batch
    with pytest.raises(AtomicPublishDisabledError, match="enable"):
        await tx.commit()
    assert {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()} == {"a": b"1"}
    before = (await js.stream_info(kv._stream)).config
    kv = await kvx.enable(kv)
    after = (await js.stream_info(kv._stream)).config
    # The server adds the metadata: the API level that the stream needs.
    assert before.subjects is not None
    subjects = [*before.subjects, f"_reads.{kv._stream}"]  # for keys that a transaction only reads
    assert after.evolve(metadata=None) == before.evolve(metadata=None, allow_atomic=True, subjects=subjects)
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"2")
    await bucket.open()
    assert pair(await bucket.get("a")) == (b"2", 2)


async def test_snapshots_while_both_write(
    js: JetStreamContext, nc: Any, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    """Every snapshot equals the bucket at its revision, as a log of all stored messages shows it."""
    name = stream_name()
    log: dict[int, tuple[str, bytes, bool]] = {}

    async def take(message: Any) -> None:
        headers = message.headers
        key = message.subject.removeprefix(f"log.{name}.")
        log[int(headers["Nats-Sequence"])] = key, message.data, "KV-Operation" in headers

    await nc.subscribe(f"log.{name}.>", cb=take)
    republish = RePublish(src=f"$KV.{name}.>", dest=f"log.{name}.>")
    kv = await kvx.enable(await js.create_key_value(bucket=name, history=3, republish=republish))
    bucket = theirs(name)
    await bucket.open()
    keys = [f"k.{n}" for n in range(50)]
    writing = asyncio.create_task(bucket.write_many(keys, 2_000))
    rng = random.Random(1)
    snapshots = []
    while not writing.done():

        async def change(tx: kvx.Transaction) -> None:
            one, two, three = rng.sample(keys, 3)
            found = await tx.get(one)
            tx.put(two, b"ours" if found is None else found.value)
            tx.delete(three)

        await kvx.retry_transaction(kv, change)
        snapshots.append(await kvx.snapshot(kv))
    await writing
    last = await kvx.snapshot(kv)
    async with asyncio.timeout(30):
        while len(log) < last.revision:
            await asyncio.sleep(0.01)
    for snapshot in [*snapshots, last]:
        state: dict[str, tuple[bytes, int]] = {}
        for seq in range(1, snapshot.revision + 1):
            key, value, deleted = log[seq]
            if deleted:
                state.pop(key, None)
            else:
                state[key] = value, seq
        assert {key: (entry.value, entry.revision) for key, entry in snapshot.items()} == state
    assert await bucket.keys() == last.keys()
    many = await kvx.get_many(kv, keys)
    assert many == dict(last)
    for key, entry in many.items():
        assert pair(await bucket.get(key)) == (entry.value, entry.revision)
