"""nats-py and this package use one bucket together, in both directions."""

import asyncio

import pytest
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx


async def test_nats_py_reads_what_a_transaction_wrote(make_bucket, found) -> None:
    kv = await make_bucket(history=3)
    await kv.put("gone", b"0")
    watcher = await kv.watchall()
    seen = []
    async with kvx.transaction(kv) as tx:
        tx.put("a.b", b"1")
        tx.create("c", b"2", ttl=3600)
        tx.delete("gone")
        tx.purge("never")
    async with asyncio.timeout(60):
        while len(seen) < 5:
            update = await watcher.updates(timeout=60)
            if update is not None:
                seen.append((update.key, update.value, update.revision, update.operation))
    await watcher.stop()
    assert seen == [
        ("gone", b"0", 1, None),
        ("a.b", b"1", 2, None),
        ("c", b"2", 3, None),
        ("gone", b"", 4, "DEL"),
        ("never", b"", 5, "PURGE"),
    ]
    assert (await kv.get("a.b")).value == b"1"
    assert (await kv.get("c", revision=3)).value == b"2"
    for key in ("gone", "never"):
        with pytest.raises(KeyNotFoundError):
            await kv.get(key)
    assert sorted(await found(kv.keys)) == ["a.b", "c"]
    assert await kv.update("a.b", b"3", last=2) == 6
    assert await kv.create("gone", b"4") == 7
    with pytest.raises(KeyWrongLastSequenceError):
        await kv.update("c", b"5", last=2)


async def test_stored_messages_equal_those_of_nats_py(make_bucket) -> None:
    ours, theirs = await make_bucket(history=5), await make_bucket(history=5)
    await theirs.put("a", b"1")
    await theirs.create("b", b"2")
    await theirs.update("b", b"3", last=2)
    await theirs.delete("a")
    await theirs.purge("b")
    for step in (
        lambda tx: tx.put("a", b"1"),
        lambda tx: tx.create("b", b"2"),
        lambda tx: tx.update("b", b"3", last=2),
        lambda tx: tx.delete("a"),
        lambda tx: tx.purge("b"),
    ):
        async with kvx.transaction(ours) as tx:
            step(tx)
    read = []
    for kv in (ours, theirs):
        messages = await jsx.DirectGet(kv._js, kv._stream).scan().to_list()
        read.append(
            [
                (
                    message.seq,
                    message.subject.removeprefix(kv._pre),
                    message.data,
                    {name: text for name, text in message.headers.items() if name != "Nats-Msg-Id"},
                )
                for message in messages
            ]
        )
    assert read[0] == read[1]
