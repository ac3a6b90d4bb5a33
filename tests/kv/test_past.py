"""Reads of the past: what is answered, and for which reasons others are refused."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import DiscardPolicy
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError

PAGE = Path(__file__).parents[2] / "docs" / "key-value.md"

MakeBucket = Callable[..., Awaitable[KeyValue]]


async def update(kv: KeyValue, **changes: Any) -> None:
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(**changes))


async def limits_are_not_recorded(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket(allow=False, direct=True)
    for key in ("a", "b", "a"):
        await kv.put(key, b"1")
    return kv, ["x.*"], 2


async def oldest_messages_are_dropped(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket(history=5)
    await update(kv, max_msgs=2, discard=DiscardPolicy.OLD)
    await kvx.enable(kv)
    for key in ("a", "b", "c", "d", "e"):
        await kv.put(key, b"1")
    return kv, ["x.*"], 4


async def keys_expire(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket(limit_marker_ttl=60)
    for key in ("a", "b", "a"):
        await kv.put(key, b"1")
    return kv, ["x.*"], 2


async def everything_is_rolled_up(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket(history=5)
    for key in ("a", "b"):
        await kv.put(key, b"1")
    await kv._js.publish(f"{kv._pre}c", b"1", headers={"Nats-Rollup": "all"})
    return kv, ["x.*"], 2


async def a_key_is_purged_from_the_stream(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket(history=5)
    for key in ("a", "b", "c"):
        await kv.put(key, b"1")
    await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}a")
    return kv, ["x.*"], 2


async def a_key_is_overwritten(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket()
    for key in ("a", "b", "a"):
        await kv.put(key, b"1")
    return kv, ["a", "b"], 2


async def a_named_key_has_no_message(make_bucket: MakeBucket) -> tuple[KeyValue, list[str], int]:
    kv = await make_bucket()
    for key in ("a", "b", "a"):
        await kv.put(key, b"1")
    return kv, ["b", "x"], 2


REASONS = {
    "it is not recorded that the bucket had its limits then": limits_are_not_recorded,
    "max_msgs or max_bytes may have removed the oldest messages": oldest_messages_are_dropped,
    "messages may have expired": keys_expire,
    "a later message replaced the whole bucket": everything_is_rolled_up,
    "messages are missing that no history accounts for": a_key_is_purged_from_the_stream,
    "newer messages may have replaced it": a_key_is_overwritten,
    "no message of it is stored, and messages were removed": a_named_key_has_no_message,
}


async def test_a_read_is_refused_for_each_reason_of_the_documentation(make_bucket: MakeBucket) -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| the error says that")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|]*?) \|", table, re.MULTILINE) == list(REASONS)
    for reason, prepare in REASONS.items():
        kv, filters, revision = await prepare(make_bucket)
        with pytest.raises(HistoryUnavailableError, match=f"because {reason}"):
            await kvx.snapshot(kv, filters, at=revision)
        loose = await kvx.snapshot(kv, filters, at=revision, strict=False)
        assert loose.unavailable or not loose.complete, reason
        if "*" not in filters[0]:
            with pytest.raises(HistoryUnavailableError, match=f"because {reason}") as caught:
                await kvx.get_many(kv, filters, at=revision)
            assert caught.value.keys == loose.unavailable
            assert len(loose.unavailable) == 1


async def test_ordinary_reads_of_the_past_are_answered(make_bucket: MakeBucket) -> None:
    """Also where the older history of keys that are written often is gone."""
    kv = await make_bucket(history=3)
    for n in range(20):
        await kv.put("hot", b"%d" % n)
        await kv.put(f"once.{n}", b"1")
    for _ in range(2):
        await kv.put("warm", b"1")
    revision = await kv.put("hot", b"then")
    await kv.put("warm", b"2")
    await kv.put("hot", b"2")
    await kv.put("new.1", b"1")
    await kv.delete("once.7")
    await kv.create("new.2", b"1")
    for _ in range(3):
        await kv.put("new.3", b"1")
    await kvx.retry_transaction(kv, write_two)
    then = {"hot", "warm", *(f"once.{n}" for n in range(20))}
    snap = await kvx.snapshot(kv, ["hot", "warm", "once.*", "new.1", "new.2"], at=revision)
    assert (set(snap), snap["hot"].value, snap["warm"].value) == (then, b"then", b"1")
    with pytest.raises(
        HistoryUnavailableError
    ) as caught:  # three values of a key as long as the history: perhaps it was
        await kvx.snapshot(kv, at=revision)
    assert caught.value.keys == ("new.3",)
    assert set(await kvx.get_many(kv, ["hot", "once.7"], at=revision)) == {"hot", "once.7"}
    assert set(await kvx.get_many(kv, ["hot", "new.1", "new.2", "new.4"], at=revision)) == {"hot"}
    newest = (await kvx.snapshot(kv)).revision
    for filters in (None, [">"], ["hot", "none"], ["once.*"]):
        past, now = await kvx.snapshot(kv, filters, at=newest), await kvx.snapshot(kv, filters)
        assert (dict(past), past.complete) == (dict(now), True)


async def write_two(tx: kvx.Transaction) -> None:
    tx.put("new.4", b"1")
    tx.create("new.5", b"1")


async def test_a_bucket_that_never_removed_anything_is_known_at_each_revision(make_bucket: MakeBucket) -> None:
    kv = await make_bucket(allow=False, direct=True, history=5)
    keys = ["a", "b", "a", "c", "b", "a"]
    for key in keys:
        await kv.put(key, b"1")
    for revision in range(1, 7):
        snap = await kvx.snapshot(kv, at=revision)
        assert (set(snap), snap.complete) == (set(keys[:revision]), True)
        assert set(await kvx.get_many(kv, ["c", "a", "none"], at=revision)) == set(keys[:revision]) - {"b"}


async def test_a_time_before_messages_that_were_purged_is_not_the_newest_revision(make_bucket: MakeBucket) -> None:
    kv = await make_bucket(history=5)
    for key in ("a", "b"):
        await kv.put(key, b"1")
    first = (await kvx.snapshot(kv))["a"].created
    await kv._js.purge_stream(kv._stream)
    for filters in (["a"], ["*"], None):
        with pytest.raises(HistoryUnavailableError):
            await kvx.snapshot(kv, filters, at=first)
    assert len(await kvx.snapshot(kv, at=2)) == 0


async def test_messages_on_other_subjects_of_the_stream_are_no_keys(make_bucket: MakeBucket) -> None:
    for events in (3, 1_200):
        kv = await make_bucket(history=3)
        await update(kv, subjects=[f"{kv._pre}>", f"{kv._name}.events.>"])
        async with jsx.FastPublisher(kv._js, flow=500) as publisher:
            await publisher.add_many((f"{kv._name}.events.{n}", b"e") for n in range(events))
        for n in range(4):
            await kv.put("a", b"%d" % n)
            await kv.put(f"b.{n}", b"1")
            await kv._js.publish(f"{kv._name}.events.last", b"e")
        last = events + 12
        everything = {"a", "b.0", "b.1", "b.2", "b.3"}
        now = await kvx.snapshot(kv)
        assert (set(now), now.revision, now["a"].value) == (everything, last, b"3")
        assert set(await kvx.snapshot(kv, ["b.*"])) == everything - {"a"}
        assert set(await kvx.get_many(kv, [*everything, "events.1", "last"])) == everything
        for revision in (last, last - 1, last - 2):
            then = await kvx.snapshot(kv, at=revision)
            assert set(then) == (everything if revision > last - 2 else everything - {"b.3"})
            assert then.unavailable == ()
        assert (await kvx.get_many(kv, ["a"], at=last - 3))["a"].value == b"2"
        assert len(await kvx.snapshot(kv, at=events)) == 0
        async with kvx.Table(kv) as table:
            assert set(table) == everything


async def test_a_strict_read_of_some_keys_is_exact_or_refused_in_a_large_bucket(
    make_bucket: MakeBucket, load: Callable[..., Awaitable[None]]
) -> None:
    """What need not be complete reads only what matches, and says so."""
    kv = await make_bucket(history=3)
    for key in ("x.1", "x.2"):
        revision = await kv.create(key, b"v")
    await load(kv, {f"other.{n}": b"1" for n in range(16_500)})
    await kv.put("x.2", b"w")
    await kv.put("x.3", b"later")
    then = await kvx.snapshot(kv, ["x.*"], at=revision)
    assert ({key: it.value for key, it in then.items()}, then.complete) == ({"x.1": b"v", "x.2": b"v"}, True)
    await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}x.1")
    for keys in (["x.*"], ["x.1"], ["x.*", "x.1"]):
        with pytest.raises(HistoryUnavailableError):
            await kvx.snapshot(kv, keys, at=revision)
    before = kv._js._nc.stats["in_bytes"]
    some = await kvx.snapshot(kv, ["x.*"], at=revision, strict=False)
    assert (list(some), some.complete) == (["x.2"], False)
    assert kv._js._nc.stats["in_bytes"] - before < 100_000
