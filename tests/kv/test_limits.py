"""The record of the time since which a bucket's limits hold."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js.api import DiscardPolicy
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError, RequestTimeoutError
from jetstream_ext.kv.limits import RECORD, known_since, with_record
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.testing import NatsServer

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = {"name": "KV_B", "max_age": 5, "max_bytes": -1, "max_msgs_per_subject": 3, "subject_delete_marker_ttl": 0}


def state(config: dict[str, Any]) -> StreamState:
    return StreamState("KV_B", "2026-01-01T00:00:00Z", config)


async def since_of(kv: KeyValue) -> datetime | None:
    bucket = kvx.bucket.Bucket(kv)
    return known_since(await bucket.unchecked_state())


def test_record_holds_as_long_as_the_limits_do() -> None:
    recorded = with_record(CONFIG, SINCE)
    assert known_since(state(recorded)) == SINCE
    assert known_since(state({**recorded, "allow_direct": True})) == SINCE
    for no_limit in ({"subject_delete_marker_ttl": None}, {"max_bytes": 0}, {"max_msgs": -1}):
        assert known_since(state({**recorded, **no_limit})) == SINCE, no_limit
    for changed in ({"max_age": 6}, {"max_age": 0}, {"max_bytes": 9}, {"max_msgs_per_subject": 2}, {"discard": "new"}):
        assert known_since(state({**recorded, **changed})) is None, changed
    assert with_record({"metadata": {"owner": "me"}}, SINCE)["metadata"].keys() == {"owner", RECORD}
    others = ("", "{}", "[]", "3", "not JSON", '{"since":3,"limits":{}}', '{"since":"x"}')
    naive = '{"since":"2026-01-01T00:00:00","limits":{}}'
    configs: list[dict[str, Any]] = [{"metadata": {RECORD: text}} for text in (*others, naive)]
    for config in (*configs, {}, {"metadata": None}, {"metadata": {}}, {"metadata": []}):
        assert known_since(state(config)) is None, config


async def test_enable_records_since_when_the_limits_hold(make_bucket) -> None:
    """The creation if nothing was removed yet; else the time of the call, also after it has changed a limit."""
    kv = await make_bucket(allow=False, history=1)
    await kv.put("a", b"1")
    await kvx.enable(kv)
    assert await since_of(kv) == (await kvx.bucket.Bucket(kv).unchecked_state()).created_at
    kv = await make_bucket(allow=False, history=1)
    await kv.put("a", b"1")
    await kv.put("a", b"2")
    before = datetime.now(UTC)
    await kvx.enable(kv)
    since = await since_of(kv)
    assert since is not None
    assert before - timedelta(seconds=1) < since < datetime.now(UTC) + timedelta(seconds=1)
    for _ in range(2):
        await kvx.enable(kv, ttl=60)
        second = await since_of(kv)
        assert second is not None
        assert second > since
        since = second - timedelta(microseconds=1)  # the second call changes nothing


async def test_enable_without_permission_to_update_returns_the_bucket(caplog: pytest.LogCaptureFixture) -> None:
    denied = '{publish: {deny: ["$JS.API.STREAM.UPDATE.>"]}}'
    users = f"{{user: all, password: p}}, {{user: some, password: p, permissions: {denied}}}"
    with NatsServer(config=f"authorization {{users: [{users}]}}") as server:
        async with (
            await nats.connect(server.url, user="all", password="p", connect_timeout=10) as owner,
            await nats.connect(server.url, user="some", password="p", error_cb=ignore, connect_timeout=10) as reader,
        ):
            await owner.jetstream(timeout=30).add_stream(
                name="KV_B", subjects=["$KV.B.>"], max_msgs_per_subject=1, allow_direct=True, allow_atomic=True,
                allow_rollup_hdrs=True, discard=DiscardPolicy.NEW,
            )  # fmt: skip
            kv = await reader.jetstream(timeout=30).key_value("B")
            with caplog.at_level(logging.WARNING, logger="jetstream_ext"):
                await kvx.enable(kv)
            assert "may not update" in caplog.text
            assert await since_of(kv) is None
            await kvx.enable(await owner.jetstream(timeout=30).key_value("B"))
            assert await since_of(kv) is not None


async def ignore(_: Exception) -> None: ...


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
    kv = await make_bucket(history=1, ttl=1)
    revisions = [await kv.put(f"k{n}", b"1") for n in range(5)]
    config = (await kv._js.stream_info(kv._stream)).config

    async def raise_ttl() -> None:
        await kv._js.update_stream(config.evolve(max_age=3600.0))
        await asyncio.sleep(1.2)

    change_after_the_first_look(monkeypatch, raise_ttl)
    assert [entry.revision for entry in (await kvx.snapshot(kv)).values()] == revisions


async def test_limits_that_change_during_every_read_are_an_error(make_bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = await make_bucket(history=1)
    await kv.put("a", b"1")
    await kv.put("a", b"2")
    config = (await kv._js.stream_info(kv._stream)).config
    look, looks = kvx.bucket.Bucket.readable_state, 0

    async def look_and_change(bucket: kvx.bucket.Bucket) -> StreamState:
        nonlocal looks
        looks += 1
        state = await look(bucket)
        await kv._js.update_stream(config.evolve(max_msgs_per_subject=1 + looks))
        return state

    monkeypatch.setattr(kvx.bucket.Bucket, "readable_state", look_and_change)
    with pytest.raises(RequestTimeoutError, match="limits"):
        await kvx.snapshot(kv, at=1, timeout=4)
