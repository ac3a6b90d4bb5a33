"""Buckets whose limits, purges and changes remove messages before or during a read."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from nats.js.api import DiscardPolicy
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.protocol.api import StreamState


async def test_past_of_a_bucket_without_a_record_is_unavailable_if_messages_are_missing(make_bucket) -> None:
    for history in (1, 5):
        kv = await make_bucket(allow=False, history=history, direct=True)
        for n in range(history + 1):
            await kv.put("a", b"%d" % n)
            await kv.put("b", b"%d" % n)
        last = await kv.put("c", b"1")
        revision = last - 2  # the newest of a
        with pytest.raises(HistoryUnavailableError, match="records that for later reads"):
            await kvx.snapshot(kv, ["x.*", "a"], at=revision)
        some = await kvx.snapshot(kv, at=revision, strict=False)
        assert not some.complete
        assert "a" in some
        assert (await kvx.get_many(kv, ["a"], at=revision))["a"].revision == revision
        assert set(await kvx.snapshot(kv, at=last)) == {"a", "b", "c"}, "the newest revision"
        await kvx.enable(kv)
        later = await kv.put("d", b"1")
        await kv.create("e", b"1")
        assert set(await kvx.snapshot(kv, at=later)) == {"a", "b", "c", "d"}


async def test_key_removed_by_purge_deletes_is_unavailable(make_bucket) -> None:
    """`purge_deletes`, which every client has, leaves no trace of the key."""
    for history in (1, 5):
        for again in ("put", "create", ""):
            kv = await make_bucket(history=history)
            await kv.put("a", b"1")
            await kv.put("z", b"1")
            await kv.delete("a")
            async with asyncio.timeout(60):  # nats-py's call sometimes finds no key
                while (await kv._js.stream_info(kv._stream, subjects_filter=f"{kv._pre}a")).state.subjects:
                    await kv.purge_deletes(olderthan=-1)
            if again:
                await getattr(kv, again)("a", b"2")
            last = await kv.create("y", b"1")
            for filters in (None, ["*"], ["a"], ["a", "z"]):
                with pytest.raises(HistoryUnavailableError) as gone:
                    await kvx.snapshot(kv, filters, at=2)
                assert gone.value.keys in ((), ("a",))
                some = await kvx.snapshot(kv, filters, at=2, strict=False)
                assert "a" in some.unavailable or not some.complete
            with pytest.raises(HistoryUnavailableError) as gone:
                await kvx.get_many(kv, ["z", "a"], at=2)
            assert gone.value.keys == ("a",)
            assert (await kvx.get_many(kv, ["z"], at=2))["z"].value == b"1"
            assert (await kvx.snapshot(kv, at=last)).keys() == ({"a", "y", "z"} if again else {"y", "z"})


async def test_past_of_a_bucket_that_drops_its_oldest_messages_is_unavailable(make_bucket) -> None:
    kv = await make_bucket(history=1)
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(max_msgs=3, discard=DiscardPolicy.OLD))
    await kvx.enable(kv)
    for n in range(5):
        await kv.put(f"k{n}", b"1")
        await kv.put("other", b"1")
    last = (await kv._js.stream_info(kv._stream)).state.last_seq
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, ["k.*"], at=last - 1)
    assert not (await kvx.snapshot(kv, ["k.*"], at=last - 1, strict=False)).complete


async def test_snapshot_has_no_key_that_a_limit_or_a_purge_removed_during_the_read(
    make_bucket, found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvx.present, "_CHUNK", 2)
    read = kvx.present.read_by_name
    for limit, purged_up_to in (({"max_msgs": 6}, 0), ({"max_bytes": 300}, 0), ({}, 3)):
        kv = await make_bucket(history=1)
        config = (await kv._js.stream_info(kv._stream)).config
        await kv._js.update_stream(config.evolve(discard=DiscardPolicy.OLD, **limit))
        for n in range(6):
            await kv.put(f"old{n}", b"1")

        async def read_and_write(*arguments: Any, kv: KeyValue = kv, up_to: int = purged_up_to, **options: Any) -> None:
            await read(*arguments, **options)
            for n in range(3):
                await kv.put(f"new{n}", b"1")
            if up_to:
                await kv._js.purge_stream(kv._stream, seq=up_to + 1)

        with monkeypatch.context() as patch:
            patch.setattr(kvx.present, "read_by_name", read_and_write)
            snapshot = await kvx.snapshot(kv, ["*", "x", "y"])
        assert "old0" not in snapshot, limit
        assert set(snapshot) == set(await found(kv.keys)), limit
        assert snapshot.revision == 9


async def test_snapshot_has_a_key_that_was_replaced_after_its_last_reply(
    make_bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is below the first sequence of the stream by then, as if a limit had removed it."""
    monkeypatch.setattr(kvx.present, "_CHUNK", 2)
    kv = await make_bucket(history=1)
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(discard=DiscardPolicy.OLD, max_msgs=100))
    for n in range(6):
        await kv.put(f"k{n}", b"1")
    check = kvx.present.check_end

    async def write_and_check(*arguments: Any) -> StreamState:
        await kv.put("k0", b"2")
        return await check(*arguments)

    monkeypatch.setattr(kvx.present, "check_end", write_and_check)
    snapshot = await kvx.snapshot(kv)
    assert snapshot.revision == 6
    assert {entry.revision for entry in snapshot.values()} == {1, 2, 3, 4, 5, 6}


def change_after_the_first_look(monkeypatch: pytest.MonkeyPatch, change: Callable[[], Awaitable[Any]]) -> None:
    """Let another client change a bucket right after a read has asked for the bucket's state."""
    look, changed = kvx.bucket.Bucket.readable_state, False

    async def look_and_change(bucket: kvx.bucket.Bucket) -> StreamState:
        nonlocal changed
        state = await look(bucket)
        if not changed:
            changed = True
            await change()
        return state

    monkeypatch.setattr(kvx.bucket.Bucket, "readable_state", look_and_change)


async def test_history_that_is_shortened_during_a_read_of_the_past_hides_no_key(
    make_bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = await make_bucket(history=5)
    for _ in range(8):
        await kv.put("a", b"1")
    await kv.purge("b")  # which accounts for every message that is missing
    for _ in range(3):
        await kv.put("a", b"2")
    config = (await kv._js.stream_info(kv._stream)).config
    change_after_the_first_look(monkeypatch, lambda: kv._js.update_stream(config.evolve(max_msgs_per_subject=3)))
    snapshot = await kvx.snapshot(kv, ["a", "b"], at=1, strict=False)
    assert snapshot.unavailable == ("a", "b")


async def test_ttl_that_is_raised_during_a_snapshot_ends_no_key(make_bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvx.present, "_CHUNK", 2)
    kv = await make_bucket(history=1, ttl=5)
    revisions = [await kv.put(f"k{n}", b"1") for n in range(5)]
    config = (await kv._js.stream_info(kv._stream)).config

    async def raise_ttl() -> None:
        await kv._js.update_stream(config.evolve(max_age=3600.0))
        await asyncio.sleep(5.2)

    change_after_the_first_look(monkeypatch, raise_ttl)
    assert [entry.revision for entry in (await kvx.snapshot(kv)).values()] == revisions
