"""`snapshot`: a bucket at one point in time, on a real server."""

import asyncio
import pickle
from datetime import UTC, datetime, timedelta

import pytest
from nats.js.errors import InvalidKeyError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError
from jetstream_ext.kv import present


def values(snap: kvx.KeyValueSnapshot) -> dict[str, bytes]:
    return {key: entry.value for key, entry in snap.items()}


async def users(make_bucket) -> tuple[object, list[datetime]]:
    """Return the bucket of ADR-31's worked example, and when each of its revisions was stored."""
    kv = await make_bucket(history=5)
    for key, value in [
        ("1234.name", b"Bob"),
        ("1234.surname", b"Smith"),
        ("1234.address", b"1 Main Street"),
        ("1234.address", b"10 Oak Lane"),
    ]:
        await kv.put(key, value)
        await asyncio.sleep(0.002)
    stored = await jsx.DirectGet(kv._js, kv._stream).scan().to_list()
    return kv, [message.time for message in stored]


NOW = {"1234.name": b"Bob", "1234.surname": b"Smith", "1234.address": b"10 Oak Lane"}
THEN = {**NOW, "1234.address": b"1 Main Street"}


async def test_worked_example_of_adr_31(make_bucket) -> None:
    kv, times = await users(make_bucket)
    now = await kvx.snapshot(kv, ["1234.>"])
    assert (values(now), now.revision, now.time) == (NOW, 4, times[3])
    then = await kvx.snapshot(kv, ["1234.>"], at=3)
    assert (values(then), then.revision, then.time) == (THEN, 3, times[2])
    assert then.complete
    assert then.unavailable == ()
    assert values(await kvx.snapshot(kv, ["1234.name", "1234.address"], at=2)) == {"1234.name": b"Bob"}


async def test_time_selects_the_last_revision_stored_by_then(make_bucket) -> None:
    kv, times = await users(make_bucket)
    microsecond = timedelta(microseconds=1)
    assert values(await kvx.snapshot(kv, at=times[3])) == NOW
    before = await kvx.snapshot(kv, at=times[3] - microsecond)
    assert (values(before), before.revision, before.time) == (THEN, 3, times[3] - microsecond)
    assert values(await kvx.snapshot(kv, at=times[2])) == THEN
    assert len(await kvx.snapshot(kv, at=times[0] - microsecond)) == 0
    assert len(await kvx.snapshot(kv, at=datetime(1970, 1, 1, tzinfo=UTC))) == 0
    zone = times[2].astimezone(tz=datetime.fromisoformat("2026-01-01T00:00:00+05:30").tzinfo)
    assert values(await kvx.snapshot(kv, at=zone)) == THEN


async def test_time_slightly_in_the_future_is_awaited(make_bucket) -> None:
    """With what is stored meanwhile."""
    kv, _ = await users(make_bucket)
    soon = datetime.now(UTC) + timedelta(seconds=0.5)
    waiting = asyncio.ensure_future(kvx.snapshot(kv, at=soon))
    await asyncio.sleep(0.1)
    await kv.put("later", b"1")
    snap = await waiting
    assert datetime.now(UTC) > soon
    now = await kvx.snapshot(kv)
    assert (snap.time, dict(snap)) == (soon, {key: entry for key, entry in now.items() if entry.created <= soon})
    with pytest.raises(ValueError, match="future"):
        await kvx.snapshot(kv, at=datetime.now(UTC) + timedelta(hours=1), timeout=5)


async def test_snapshot_is_an_immutable_picklable_mapping(make_bucket) -> None:
    kv, _ = await users(make_bucket)
    snap = await kvx.snapshot(kv)
    assert snap["1234.name"].value == b"Bob"
    assert "1234.name" in snap
    assert "other" not in snap
    assert snap.get("other") is None
    assert len(snap) == 3
    assert set(snap) == set(snap.keys()) == set(NOW)
    assert {entry.key for entry in snap.values()} == set(NOW)
    assert "3 keys at revision 4" in repr(snap)
    with pytest.raises(KeyError):
        snap["other"]
    with pytest.raises(AttributeError):
        snap.revision = 7  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(snap))
    assert (dict(again), again.revision, again.time) == (dict(snap), snap.revision, snap.time)
    assert hash(snap["1234.name"]) == hash(again["1234.name"])
    with pytest.raises(AttributeError):
        snap["1234.name"].value = b"x"  # type: ignore[misc]


async def test_snapshot_of_an_empty_bucket_has_its_last_revision(make_bucket) -> None:
    kv = await make_bucket()
    snap = await kvx.snapshot(kv)
    assert (len(snap), snap.revision) == (0, 0)
    assert abs(snap.time - datetime.now(UTC)) < timedelta(minutes=1)
    for key in ("a", "b"):
        await kv.put(key, b"1")
    await kv._js.purge_stream(kv._stream)
    snap = await kvx.snapshot(kv)
    assert (len(snap), snap.revision) == (0, 2)


async def test_filters_select_keys(make_bucket, load) -> None:
    for count in (3, 1_500):
        kv = await make_bucket()
        await load(kv, {f"{name}.{n}.x": b"%d" % n for name in "abc" for n in range(count)})
        await load(kv, {"a": b"", "a.b": b"", "q": b""})
        last = 3 * count + 3
        for filters, at, found in (
            (None, None, last),
            (["a.>"], None, count + 1),
            (["a.*.x", "b.>"], None, 2 * count),
            (["*", "a.1.x", "c.2.x", "none"], None, {"a", "q", "a.1.x", "c.2.x"}),
            (["*.*.x", "q"], None, 3 * count + 1),
            (["none.>"], None, 0),
            ([f"b.{n}.x" for n in range(count)], None, count),
            (["a.*.x", "b.>"], last, 2 * count),
            (["a.*.x", "b.>"], count, count),
        ):
            snap = await kvx.snapshot(kv, filters, at=at)
            assert (set(snap) if isinstance(found, set) else len(snap)) == found, (filters, at)
        assert (await kv._js.stream_info(kv._stream)).state.consumer_count == 0


async def test_invalid_filters_are_refused(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    with pytest.raises(InvalidKeyError):
        await kvx.snapshot(kv, ["a.>.b"])
    with pytest.raises(TypeError):
        await kvx.snapshot(kv, "a.>")
    with pytest.raises(ValueError, match="filters must not be empty"):
        await kvx.snapshot(kv, [])


async def test_overwritten_key_raises_or_is_listed_as_unavailable(make_bucket) -> None:
    kv = await make_bucket(history=2)
    await kv.put("hot", b"1")
    await kv.put("cold", b"2")
    for n in range(3, 7):
        await kv.put("hot", b"%d" % n)
    assert set(await kvx.snapshot(kv, at=5)) == {"hot", "cold"}
    with pytest.raises(HistoryUnavailableError) as caught:
        await kvx.snapshot(kv, at=4)
    assert caught.value.keys == ("hot",)
    assert "revision 4" in str(caught.value)
    loose = await kvx.snapshot(kv, at=4, strict=False)
    assert (values(loose), loose.unavailable) == ({"cold": b"2"}, ("hot",))
    assert "1 unavailable" in repr(loose)


async def test_bucket_with_a_higher_first_sequence(js, stream_name) -> None:
    name = stream_name()
    await js.add_stream(
        name=f"KV_{name}", subjects=[f"$KV.{name}.>"], max_msgs_per_subject=1, allow_direct=True, first_seq=100
    )
    kv = await js.key_value(name)
    assert await kv.put("a", b"1") == 100
    assert await kv.put("b", b"1") == 101
    assert len(await kvx.snapshot(kv, at=99)) == 0
    then = await kvx.snapshot(kv, at=100)
    assert (set(then), then.complete) == ({"a"}, True)


async def test_stored_wildcard_subject_is_one_entry(make_bucket, load, monkeypatch) -> None:
    """No client accepts it as a key, but servers store it."""
    monkeypatch.setattr(present, "_DEEP", 0)
    kv = await make_bucket(history=2)
    await load(kv, {f"k{n}": b"1" for n in range(1_100)})
    await kv._js.publish(f"{kv._pre}*", b"star")
    snap = await kvx.snapshot(kv)
    assert len(snap) == 1_101
    assert snap["*"].value == b"star"
    assert len(await kvx.snapshot(kv, ["*"])) == 1_101
