"""Mirrors and replicas answer as well. Those that hold less or more than the bucket, or lag, are not trusted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.js.api import StreamSource, SubjectTransform
from nats.js.errors import BadBucketError
from nats.js.kv import KeyValue

import jetstream_ext.kv as kvx
from jetstream_ext.errors import MirrorAnswersError, NoStreamError
from jetstream_ext.testing import NatsCluster

KEYS = [f"k{n % 600}.{n % 3}" for n in range(600)]


async def test_partial_mirrors_are_not_trusted(make_bucket, mirrored, load) -> None:
    kv = await make_bucket(history=2)
    await load(kv, dict.fromkeys(KEYS, b"1"))
    await load(kv, dict.fromkeys(KEYS, b"2"))
    await mirrored(kv, "FILTERED", 400, filter_subject=f"$KV.{kv._name}.*.0")
    await mirrored(kv, "LATE", 400, opt_start_seq=801)
    for _ in range(4):
        assert len(await kvx.snapshot(kv)) == 600
        assert len(await kvx.snapshot(kv, ["*.1"])) == 200
        assert len(await kvx.get_many(kv, KEYS)) == 600
        assert await kvx.get_many(kv, ["nothing", "else"]) == {}
        past = await kvx.snapshot(kv, at=600)
        assert (len(past), {entry.value for entry in past.values()}) == (600, {b"1"})
        assert len(await kvx.get_many(kv, KEYS[:20], at=600)) == 20


async def test_mirrors_that_keep_removed_messages_are_not_trusted(make_bucket, mirrored, load) -> None:
    kv = await make_bucket()
    await load(kv, {"stays": b"1", "goes": b"1"})
    stream = await mirrored(kv, "ARCHIVE", 2)
    await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}goes")
    for _ in range(10):
        assert set(await kvx.snapshot(kv)) == {"stays"}
        assert set(await kvx.get_many(kv, ["stays", "goes"])) == {"stays"}
    await kv._js.delete_stream(stream)


async def test_read_of_a_bucket_beside_a_near_mirror_names_it(make_bucket, load, mirrored, near) -> None:
    kv = await make_bucket(history=2)
    await load(kv, dict.fromkeys(KEYS, b"1"))
    mirror = await mirrored(kv, "NEAR", 600, allow_direct=True)
    near(kv._stream, mirror)
    for read in (
        kvx.snapshot(kv, timeout=2),
        kvx.get_many(kv, KEYS, timeout=2),
        kvx.snapshot(kv, at=300, strict=False, timeout=2),
    ):
        with pytest.raises(MirrorAnswersError, match=mirror):
            await read


@pytest.fixture
async def open_mirror(make_bucket) -> Callable[..., Awaitable[tuple[KeyValue, KeyValue]]]:
    """A bucket and its mirror, as nats.go and nats.js create it: the keys have the other bucket's name."""

    async def open_mirror(**config: Any) -> tuple[KeyValue, KeyValue]:
        kv = await make_bucket(history=2)
        for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c.d", b"4")):
            await kv.put(key, value)
        await kv.delete("b")
        source = {"subject_transforms": config.pop("transforms", None), "filter_subject": config.pop("only", None)}
        await kv._js.add_stream(
            name=f"KV_{kv._name}_M",
            mirror=StreamSource(name=kv._stream, **source),
            **{"max_msgs_per_subject": 2, "allow_direct": True, **config},
        )
        return kv, await kv._js.key_value(f"{kv._name}_M")

    return open_mirror


async def caught_up(mirror: KeyValue, last: int) -> None:
    async with asyncio.timeout(60):
        while (await mirror._js.stream_info(mirror._stream)).state.last_seq < last:
            await asyncio.sleep(0.02)


async def test_bucket_that_is_a_mirror_is_read(open_mirror) -> None:
    kv, mirror = await open_mirror()
    await caught_up(mirror, 5)
    for filters in (None, ["a", "b"], ["c.>"]):
        there, here = await kvx.snapshot(kv, filters), await kvx.snapshot(mirror, filters)
        assert (here.revision, {key: entry.value for key, entry in here.items()}) == (
            there.revision, {key: entry.value for key, entry in there.items()},
        )  # fmt: skip
    found = await kvx.get_many(mirror, ["a", "b", "c.d", "e"])
    assert {key: (entry.value, entry.revision) for key, entry in found.items()} == {"a": (b"3", 3), "c.d": (b"4", 4)}
    past = await kvx.get_many(mirror, ["a", "b", "c.d"], at=2)
    assert {key: entry.value for key, entry in past.items()} == {"a": b"1", "b": b"2"}
    assert (await kvx.snapshot(mirror, at=3))["a"].value == b"3"


async def test_mirror_of_a_mirror_and_mirror_with_a_filter_are_read(open_mirror) -> None:
    kv, mirror = await open_mirror()
    for name, source, last, found in (
        (f"{mirror._name}_2", {"name": mirror._stream}, 5, {"a", "c.d"}),
        (f"{kv._name}_P", {"name": kv._stream, "filter_subject": f"{kv._pre}a"}, 3, {"a"}),
    ):
        options = {"max_msgs_per_subject": 2, "allow_direct": True}
        await kv._js.add_stream(name=f"KV_{name}", mirror=StreamSource(**source), **options)
        second = await kv._js.key_value(name)
        await kvx.snapshot(second)  # perhaps still empty
        await caught_up(second, last)
        assert set(await kvx.snapshot(second)) == found
        assert set(await kvx.get_many(second, ["a", "b"])) == {"a"}


async def test_mirror_with_other_subjects_is_refused(open_mirror) -> None:
    transform = SubjectTransform(src="$KV.>", dest="x.>")
    kv, mirror = await open_mirror(transforms=[transform])
    for read in (kvx.snapshot(mirror), kvx.get_many(mirror, ["a"]), kvx.snapshot(mirror, at=1)):
        with pytest.raises(BadBucketError, match=f"{kv._stream}.*transformed"):
            await read


async def put(tx: kvx.Transaction) -> None:
    tx.put("a", b"9")


async def create(tx: kvx.Transaction) -> None:
    tx.create("new", b"9")


async def get_and_put(tx: kvx.Transaction) -> None:
    await tx.get("a")
    tx.put("a", b"9")


async def get_several_and_put(tx: kvx.Transaction) -> None:
    await tx.get_many(["a", "b", "c"])
    tx.put("a", b"9")


async def get_missing(tx: kvx.Transaction) -> None:
    await tx.get("missing")


async def commit(kv: KeyValue, fn: Callable[[kvx.Transaction], Awaitable[None]]) -> None:
    async with kvx.transaction(kv) as tx:
        await fn(tx)


async def test_writes_to_a_mirror_are_refused_at_once(open_mirror) -> None:
    """Also if the keys have the mirror's own subjects, so that reads of its leader find them."""
    kv, plain = await open_mirror()
    name = f"{kv._name}_T"
    own = SubjectTransform(src=f"{kv._pre}>", dest=f"$KV.{name}.>")
    source = StreamSource(name=kv._stream, subject_transforms=[own])
    await kv._js.add_stream(name=f"KV_{name}", mirror=source, max_msgs_per_subject=2, allow_direct=True)
    for mirror in (plain, await kv._js.key_value(name)):
        await caught_up(mirror, 5)
        refused = pytest.raises(BadBucketError, match=f"is a mirror of stream '{kv._stream}'")
        async with asyncio.timeout(15):  # `retry_transaction` alone would take 30 s
            for key in ("a", "missing"):
                with refused:
                    await kvx.touch(mirror, key, 60)
            for fn in (put, create, get_and_put, get_several_and_put, get_missing):
                with refused:
                    await commit(mirror, fn)
                with refused:
                    await kvx.retry_transaction(mirror, fn)
    assert (await kvx.snapshot(kv)).revision == 5


async def test_write_that_no_stream_takes_is_an_error_at_once(make_bucket) -> None:
    kv = await make_bucket()
    await kv.put("a", b"1")
    config = (await kv._js.stream_info(kv._stream)).config
    await kv._js.update_stream(config.evolve(subjects=[f"{kv._name}.elsewhere"]))
    async with asyncio.timeout(15):
        with pytest.raises(NoStreamError, match="nothing was written"):
            await kvx.touch(kv, "a", 60)
        with pytest.raises(NoStreamError, match="nothing was written"):
            await commit(kv, put)


async def test_reads_wait_for_lagging_replicas(wait_for_interest: Any) -> None:
    """Also for a purge of the stream, which has no revision: a replica that has a later message has applied it."""
    async with NatsCluster() as cluster, await nats.connect(cluster.urls, connect_timeout=10) as nc:
        js = nc.jetstream(timeout=30)
        kv = await kvx.enable(await js.create_key_value(bucket="B", replicas=3, history=2))
        await wait_for_interest(js, "$KV.B.a")
        for n in range(30):
            revision = await kv.put("a", b"%d" % n)
            assert (await kvx.get_many(kv, ["a"]))["a"].value == b"%d" % n
            snap = await kvx.snapshot(kv)
            assert (snap["a"].value, snap.revision) == (b"%d" % n, revision)
            if n:
                past = await kvx.get_many(kv, ["a"], at=revision - 1)
                assert past["a"].value == b"%d" % (n - 1)
        for n in range(20):
            await kv.put("a", b"%d" % n)
            await js.purge_stream("KV_B", subject="$KV.B.a")
            await kv.put("b", b"%d" % n)
            assert set(await kvx.get_many(kv, ["a", "b"])) == {"b"}
            assert set(await kvx.snapshot(kv)) == {"b"}
