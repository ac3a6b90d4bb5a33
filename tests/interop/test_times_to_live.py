"""Times to live in a bucket that is shared with nats.js. (Debian's nats.go does not support them.)"""

import asyncio
from collections.abc import Callable

import pytest
from nats.js import JetStreamContext
from peers import TheirBucket

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError

pytestmark = pytest.mark.parametrize("theirs", ["nats.js"], indirect=True)


async def test_expiry_is_the_same_for_both(
    js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    bucket = theirs(stream_name())
    await bucket.make(marker_ttl=3600)
    kv = await kvx.enable(await js.key_value(bucket._name))
    await bucket.watch()
    assert await bucket.put("stays", b"0") == 1
    assert await bucket.create("theirs", b"1", ttl=5) == 2
    async with kvx.transaction(kv) as tx:
        tx.create("ours", b"2", ttl=5)
    seen = [await bucket.next() for _ in range(5)]
    assert [(entry.key, entry.operation) for entry in seen[:3]] == [
        ("stays", "PUT"),
        ("theirs", "PUT"),
        ("ours", "PUT"),
    ]
    assert {(entry.key, entry.operation) for entry in seen[3:]} == {("theirs", "PURGE"), ("ours", "PURGE")}
    markers = {entry.key: entry.revision for entry in seen[3:]}

    assert (await kvx.snapshot(kv)).keys() == {"stays"}
    assert (await kvx.get_many(kv, ["ours", "theirs", "stays"])).keys() == {"stays"}
    shown = await kvx.snapshot(kv, ["ours", "theirs"], include_deletes=True)
    assert {key: entry.revision for key, entry in shown.items()} == markers
    assert {(entry.operation, entry.reason) for entry in shown.values()} == {("PURGE", "MaxAge")}
    with pytest.raises(HistoryUnavailableError) as gone:
        await kvx.snapshot(kv, at=3)
    assert gone.value.keys == ("ours", "theirs")

    # Either client can create an expired key again.
    async with kvx.transaction(kv) as tx:
        assert await tx.get("theirs") is None
        tx.create("theirs", b"3")
    revision = await bucket.create("ours", b"4")
    found = await kvx.get_many(kv, ["ours", "theirs"])
    assert {key: entry.value for key, entry in found.items()} == {"ours": b"4", "theirs": b"3"}
    assert found["ours"].revision == revision


async def test_purge_markers_that_expire(
    js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    bucket = theirs(stream_name())
    await bucket.make(marker_ttl=1)
    kv = await kvx.enable(await js.key_value(bucket._name))
    for key in ("ours", "theirs"):
        await bucket.put(key, b"1")
    await bucket.purge("theirs", ttl=1)
    async with kvx.transaction(kv) as tx:
        tx.purge("ours", ttl=1)
    assert await kvx.snapshot(kv) == {}
    async with asyncio.timeout(30):
        while await kvx.snapshot(kv, include_deletes=True):
            await asyncio.sleep(0.05)
    assert [await bucket.get(key) for key in ("ours", "theirs")] == [None, None]


async def test_other_clients_read_a_touched_key(
    js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    bucket = theirs(stream_name())
    await bucket.make(marker_ttl=1)
    kv = await js.key_value(bucket._name)
    await bucket.watch("other")
    await bucket.create("session", b"1", ttl=5)
    revision = await kvx.touch(kv, "session", 3600)
    await bucket.create("other", b"2", ttl=5)
    # Without the touch, the first key would have expired when the second one has.
    assert [(await bucket.next()).operation for _ in range(2)] == ["PUT", "PURGE"]
    entry = await bucket.get("session")
    assert entry is not None
    assert (entry.value, entry.revision, entry.operation) == (b"1", revision, "PUT")
    assert (await kvx.snapshot(kv)).keys() == {"session"}


async def test_the_stored_messages_are_the_same(
    js: JetStreamContext, stream_name: Callable[[], str], theirs: Callable[[str], TheirBucket]
) -> None:
    """Only the form of a TTL differs: servers treat 60s and 60 alike."""
    written = []
    for ours in (True, False):
        bucket = theirs(stream_name())
        await bucket.make(marker_ttl=60)
        kv = await kvx.enable(await js.key_value(bucket._name))
        if ours:
            async with kvx.transaction(kv) as tx:
                tx.create("a", b"1", ttl=60)
                tx.purge("b", ttl=60)
        else:
            await bucket.create("a", b"1", ttl=60)
            await bucket.purge("b", ttl=60)
        messages = await jsx.DirectGet(js, kv._stream).scan().to_list()
        written.append(
            [
                {
                    name: text.removesuffix("s") if name == "Nats-TTL" else text
                    for name, text in message.headers.items()
                    if not name.startswith("Nats-Batch-")
                }
                for message in messages
            ]
        )
    assert written[0] == written[1]
    assert len(written[0]) == 2
