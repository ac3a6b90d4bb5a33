"""Keys that vanish without a trace and are written again: their earlier state is unavailable."""

import asyncio

import pytest
from nats.js.errors import KeyNotFoundError

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import reads


@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("again", ["put", "create", ""])
async def test_key_removed_by_purge_deletes_is_unavailable(make_bucket, history: int, again: str) -> None:
    """`purge_deletes`, which every client has, leaves no trace of the key."""
    kv = await make_bucket(history=history)
    await kv.put("a", b"1")
    await kv.put("z", b"1")
    await kv.delete("a")
    await kv.purge_deletes(olderthan=-1)
    if again:
        await getattr(kv, again)("a", b"2")
    last = await kv.create("y", b"1")
    for filters in (None, ["*"], ["a"], ["a", "z"]):
        with pytest.raises(HistoryUnavailableError) as gone:
            await kvx.snapshot(kv, filters, at=2)
        assert gone.value.keys in ((), ("a",))
        some = await kvx.snapshot(kv, filters, at=2, strict=False)
        assert "a" not in some
        assert "a" in some.unavailable or not some.complete
    with pytest.raises(HistoryUnavailableError) as gone:
        await kvx.get_many(kv, ["z", "a"], at=2)
    assert gone.value.keys == ("a",)
    assert (await kvx.get_many(kv, ["z"], at=2))["z"].value == b"1"
    assert (await kvx.get_many(kv, ["a", "z"], at=last)).keys() == ({"a", "z"} if again else {"z"})
    assert (await kvx.snapshot(kv, at=last)).keys() == ({"a", "y", "z"} if again else {"y", "z"})


@pytest.mark.parametrize("whole_log", [True, False])
async def test_key_expired_by_the_bucket_ttl_is_unavailable(
    make_bucket, monkeypatch: pytest.MonkeyPatch, whole_log: bool
) -> None:
    if not whole_log:
        monkeypatch.setattr(reads, "_SMALL_LOG", 0)
    kv = await make_bucket(history=5, ttl=3)
    await kv.put("a", b"1")
    second = await kv.put("z", b"1")
    async with asyncio.timeout(30):
        while await exists(kv, "a"):
            await asyncio.sleep(0.05)
    await kv.put("a", b"2")
    for read in (kvx.get_many(kv, ["a"], at=second), kvx.snapshot(kv, ["a"], at=second)):
        with pytest.raises(HistoryUnavailableError) as gone:
            await read
        assert gone.value.keys == ("a",)


async def exists(kv, key: str) -> bool:
    try:
        await kv.get(key)
    except KeyNotFoundError:
        return False
    return True


async def test_key_whose_delete_marker_was_exposed_again_is_unavailable(make_bucket) -> None:
    """Another client has created the key again with a TTL, without replacing its history, and the value has expired."""
    kv = await make_bucket(history=5)
    await kv.put("a", b"1")
    await kv.delete("a")
    await kv.put("z", b"1")
    made = await kv.create("a", b"2", msg_ttl=1)
    async with asyncio.timeout(30):
        while await exists(kv, "a"):
            await asyncio.sleep(0.05)
    await kv.put("y", b"1")
    assert await kvx.get_many(kv, ["a"]) == {}
    with pytest.raises(HistoryUnavailableError) as gone:
        await kvx.get_many(kv, ["a", "z"], at=made)
    assert gone.value.keys == ("a",)
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, at=made)


@pytest.mark.parametrize("removal", ["purge", "expiry"])
async def test_key_that_vanishes_before_a_read_of_what_was_the_newest_revision_is_unavailable(
    make_bucket, monkeypatch: pytest.MonkeyPatch, removal: str
) -> None:
    """The revision is the newest one when the call begins; then another one is written, and the key vanishes."""
    kv = await make_bucket(history=5)
    await kv.put("a", b"1")
    await kv.create("s", b"1", msg_ttl=1 if removal == "expiry" else None)
    newest = await kv.put("z", b"1")
    resolve = reads.resolve_revision

    async def then_vanish(*arguments: object) -> object:
        found = await resolve(*arguments)
        await kv.put("z", b"2")
        if removal == "purge":
            await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}s")
        async with asyncio.timeout(30):
            while await exists(kv, "s"):
                await asyncio.sleep(0.05)
        return found

    monkeypatch.setattr(reads, "resolve_revision", then_vanish)
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, at=newest)
