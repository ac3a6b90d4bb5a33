"""Mirrors and replicas answer as well. Those that hold less or more than the bucket, or lag, are not trusted."""

import asyncio
from typing import Any

import nats
import pytest
from nats.js.api import StreamSource
from nats.js.errors import BadBucketError

import jetstream_ext.kv as kvx
from jetstream_ext.client.verified_read import VerifiedReader
from jetstream_ext.errors import NoStreamError, RequestTimeoutError
from jetstream_ext.testing import NatsCluster

KEYS = [f"k{n % 600}.{n % 3}" for n in range(600)]


async def mirrored(kv, name: str, wait: int, **config) -> str:
    source = {key: config.pop(key) for key in ("filter_subject", "opt_start_seq") if key in config}
    stream = f"{kv._name}_{name}"
    await kv._js.add_stream(name=stream, mirror=StreamSource(name=kv._stream, **source), **config)
    async with asyncio.timeout(60):
        while (await kv._js.stream_info(stream)).state.messages < wait:
            await asyncio.sleep(0.02)
    return stream


async def test_partial_mirrors_are_not_trusted(make_bucket, load) -> None:
    kv = await make_bucket(history=2)
    await load(kv, dict.fromkeys(KEYS, b"1"))
    await load(kv, dict.fromkeys(KEYS, b"2"))
    await mirrored(kv, "FILTERED", 400, filter_subject=f"$KV.{kv._name}.*.0")
    await mirrored(kv, "LATE", 400, opt_start_seq=801)
    for _ in range(10):
        assert len(await kvx.snapshot(kv)) == 600
        assert len(await kvx.snapshot(kv, ["*.1"])) == 200
        assert len(await kvx.get_many(kv, KEYS)) == 600
        assert await kvx.get_many(kv, ["nothing", "else"]) == {}
        past = await kvx.snapshot(kv, at=600)
        assert (len(past), {entry.value for entry in past.values()}) == (600, {b"1"})
        assert len(await kvx.get_many(kv, KEYS[:20], at=600)) == 20


async def test_mirrors_that_keep_removed_messages_are_not_trusted(make_bucket, load) -> None:
    kv = await make_bucket()
    await load(kv, {"stays": b"1", "goes": b"1"})
    stream = await mirrored(kv, "ARCHIVE", 2)
    await kv._js.purge_stream(kv._stream, subject=f"{kv._pre}goes")
    for _ in range(10):
        assert set(await kvx.snapshot(kv)) == {"stays"}
        assert set(await kvx.get_many(kv, ["stays", "goes"])) == {"stays"}
    await kv._js.delete_stream(stream)


async def test_mirror_with_the_same_messages_is_trusted(make_bucket, load, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = await make_bucket()
    await load(kv, dict.fromkeys(KEYS, b"1"))
    stream = await mirrored(kv, "SAME", 600, max_msgs_per_subject=1, allow_msg_ttl=True)
    asked: set[str] = set()
    mirrors_all = VerifiedReader._mirrors_all

    async def listen(self, name: str) -> bool:
        asked.add(name)
        return await mirrors_all(self, name)

    monkeypatch.setattr(VerifiedReader, "_mirrors_all", listen)
    for n in range(40):
        await kv.put("k0.0", b"%d" % n)
        assert (await kvx.get_many(kv, ["k0.0"]))["k0.0"].value == b"%d" % n
        assert len(await kvx.snapshot(kv)) == 600
    assert asked == {stream}


async def test_timeout_names_the_untrusted_mirror(make_bucket, load, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = await make_bucket()
    await load(kv, {"a.0": b"1", "b.1": b"1"})
    stream = await mirrored(kv, "FILTERED", 1, filter_subject=f"$KV.{kv._name}.*.0")
    ask = VerifiedReader._ask

    async def near(self, request):
        while (answer := await ask(self, request)) is None or answer.block.stream != stream:
            pass
        return answer

    monkeypatch.setattr(VerifiedReader, "_ask", near)
    timeout, said = 0.25, ""
    while "does not hold the same" not in said:  # the mirror's answer may be late on a busy machine
        timeout *= 2
        with pytest.raises(RequestTimeoutError) as late:
            await kvx.get_many(kv, ["a.0"], timeout=timeout)
        said = str(late.value)
        assert timeout < 30, said


async def test_bucket_that_is_a_mirror_is_refused(make_bucket) -> None:
    """As nats.go and nats.js create it: the keys have the other bucket's name, and nats-py does not find them."""
    kv = await make_bucket()
    await kv.put("a", b"1")
    mirror = f"{kv._name}_M"
    await kv._js.add_stream(
        name=f"KV_{mirror}", mirror=StreamSource(name=kv._stream), max_msgs_per_subject=1, allow_direct=True
    )
    bound = await kv._js.key_value(mirror)
    for read in (kvx.snapshot(bound), kvx.get_many(bound, ["a"]), kvx.snapshot(bound, at=1)):
        with pytest.raises(BadBucketError, match=kv._stream):
            await read
    tx = kvx.transaction(bound)
    assert await tx.get("a") is None
    with pytest.raises(BadBucketError, match=kv._stream):
        await tx.commit()
    tx = kvx.transaction(bound)
    tx.put("a", b"1")
    with pytest.raises(NoStreamError):
        await tx.commit()


async def test_reads_wait_for_lagging_replicas(wait_for_interest: Any) -> None:
    async with NatsCluster() as cluster:
        nc = await nats.connect(cluster.urls, connect_timeout=10)
        try:
            js = nc.jetstream(timeout=30)
            kv = await kvx.enable(await js.create_key_value(bucket="B", replicas=3, history=2))
            await wait_for_interest(js, "$KV.B.a")
            for n in range(150):
                revision = await kv.put("a", b"%d" % n)
                assert (await kvx.get_many(kv, ["a"]))["a"].value == b"%d" % n
                snap = await kvx.snapshot(kv)
                assert (snap["a"].value, snap.revision) == (b"%d" % n, revision)
                if n:
                    past = await kvx.get_many(kv, ["a"], at=revision - 1)
                    assert past["a"].value == b"%d" % (n - 1)
        finally:
            await nc.close()
