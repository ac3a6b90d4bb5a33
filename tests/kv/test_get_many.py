"""`get_many`: many keys in few requests."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.js.errors import BucketNotFoundError, InvalidKeyError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import DirectGetDisabledError, RequestTimeoutError
from jetstream_ext.testing import NatsServer


async def test_existing_keys_come_in_the_order_of_the_request(make_bucket) -> None:
    kv = await make_bucket()
    for n, key in enumerate(["a", "b.c", "d", "e"], 1):
        assert await kv.put(key, b"%d" % n) == n
    await kv.delete("d")
    await kv.purge("e")
    found = await kvx.get_many(kv, ["b.c", "never", "e", "a", "d", "a"])
    assert list(found) == ["b.c", "a"]
    entry = found["a"]
    assert (entry.bucket, entry.key, entry.value, entry.revision) == (kv._name, "a", b"1", 1)
    assert (entry.operation, entry.reason) == ("PUT", None)
    assert abs(entry.created - datetime.now(UTC)) < timedelta(minutes=1)
    assert (await kv.get("a")).value == entry.value
    assert await kvx.get_many(kv, []) == {}
    assert await kvx.get_many(kv, (key for key in ["a"])) == {"a": entry}


async def test_more_keys_than_one_request_takes(make_bucket, load) -> None:
    kv = await make_bucket()
    there = {f"k.{n}": b"%d" % n for n in range(10_000)}
    await load(kv, there)
    await kv.delete("k.17")
    del there["k.17"]
    asked = [f"k.{n}" for n in range(9_999, -2_000, -1)]
    found = await kvx.get_many(kv, asked)
    assert {key: entry.value for key, entry in found.items()} == there
    assert list(found) == [key for key in asked if key in there]


async def test_requests_fit_a_small_max_payload() -> None:
    with NatsServer(config="max_payload: 16384") as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            kv = await kvx.enable(await nc.jetstream(timeout=30).create_key_value(bucket="B"), atomic=False)
            keys = [f"{'x' * 100}.{n}" for n in range(400)]
            await asyncio.gather(*(kv.put(key, b"v") for key in keys))
            assert len(await kvx.get_many(kv, keys)) == 400
            assert len(await kvx.snapshot(kv, keys)) == 400
            assert len(await kvx.snapshot(kv)) == 400
        finally:
            await nc.close()


async def test_invalid_keys_are_refused_before_any_request(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    for key in ("", "a b", "a..b", ".a", "a.", "a.*", ">", "é", "a\n"):
        with pytest.raises(InvalidKeyError):
            await kvx.get_many(kv, ["good", key])


async def test_bucket_without_direct_gets_names_enable(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    await kv.put("a", b"1")
    for read in (kvx.get_many(kv, ["a"]), kvx.snapshot(kv), kvx.snapshot(kv, ["a"], at=1)):
        with pytest.raises(DirectGetDisabledError, match="enable") as caught:
            await read
        assert caught.value.stream == kv._stream


async def test_deleted_bucket_raises_bucket_not_found(make_bucket) -> None:
    kv = await make_bucket()
    await kv._js.delete_key_value(kv._name)
    with pytest.raises(BucketNotFoundError, match=kv._name):
        await kvx.get_many(kv, ["a"])


async def test_invalid_arguments_are_refused(make_bucket) -> None:
    kv = await make_bucket()
    await kv.put("a", b"1")
    with pytest.raises(TypeError, match="nats-py bucket"):
        await kvx.get_many("bucket", ["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a list of keys"):
        await kvx.get_many(kv, "a")
    for options, error, text in (
        ({"at": 0}, ValueError, "stream sequence from 1"),
        ({"at": 2}, ValueError, "no revision 2 yet"),
        ({"at": "now"}, TypeError, "revision or a datetime"),
        ({"at": True}, TypeError, "revision or a datetime"),
        ({"at": datetime(2026, 1, 1)}, ValueError, "timezone"),  # noqa: DTZ001
        ({"at": datetime.now(UTC) + timedelta(hours=1)}, ValueError, "future"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"at": 1, "min_revision": 1}, ValueError, "not both"),
        ({"min_revision": 0}, ValueError, "min_revision"),
    ):
        with pytest.raises(error, match=text):
            await kvx.get_many(kv, ["a"], **options)


async def test_server_without_batched_gets_is_unsupported() -> None:
    with NatsServer(version="2.10.26") as server:
        nc = await nats.connect(server.url, connect_timeout=10)
        try:
            kv = await nc.jetstream().create_key_value(bucket="B", direct=True)
            await kv.put("a", b"1")
            for read in (kvx.get_many(kv, ["a"]), kvx.snapshot(kv)):
                with pytest.raises(jsx.errors.UnsupportedFeatureError, match=r"2\.11"):
                    await read
        finally:
            await nc.close()


class TestMinRevision:
    async def test_the_leader_is_not_asked_for_keys_that_exist(self, make_bucket, load, monkeypatch) -> None:
        kv = await make_bucket()
        await load(kv, {f"k{n}": b"1" for n in range(2_500)})
        revision = await kv.put("k7", b"2")

        async def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("the leader was asked")

        with monkeypatch.context() as patch:
            patch.setattr(kvx.bucket.Api, "ask", refuse)
            found = await kvx.get_many(kv, [f"k{n}" for n in range(2_500)], min_revision=revision)
        assert len(found) == 2_500
        assert (found["k7"].value, found["k7"].revision) == (b"2", revision)

    async def test_keys_that_do_not_exist_are_proved_by_the_leader(self, make_bucket) -> None:
        kv = await make_bucket()
        revision = await kv.put("a", b"1")
        await kv.delete("a")
        assert await kvx.get_many(kv, ["a", "b"], min_revision=revision) == {}
        assert await kvx.get_many(kv, ["b"], min_revision=revision) == {}

    async def test_a_revision_that_is_never_reached_ends_in_time(self, make_bucket) -> None:
        kv = await make_bucket()
        await kv.put("a", b"1")
        for keys in (["a"], ["b"]):
            with pytest.raises(RequestTimeoutError):
                await kvx.get_many(kv, keys, min_revision=9, timeout=0.5)
