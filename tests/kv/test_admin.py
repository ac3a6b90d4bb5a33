"""`enable` turns on the options that a bucket lacks."""

import asyncio
from datetime import timedelta
from typing import Any

import nats
import pytest
from nats.js.errors import BucketNotFoundError

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer


async def config_of(kv: Any) -> dict[str, Any]:
    return vars((await kv._js.stream_info(kv._stream)).config)


async def test_enable_turns_on_direct_and_atomic_and_changes_nothing_else(make_bucket) -> None:
    kv = await make_bucket(allow=False, history=7, description="mine", ttl=3600, max_value_size=1000)
    before = await config_of(kv)
    assert not before["allow_direct"]
    bound = await kvx.enable(kv)
    after = await config_of(kv)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"allow_direct", "allow_atomic", "subjects", "metadata"}
    await bound.put("a", b"1")
    assert bound._direct
    assert (await kvx.get_many(bound, ["a"]))["a"].value == b"1"
    assert (await kvx.get_many(kv, ["a"]))["a"].value == b"1"
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"2")


async def test_enable_turns_on_only_the_requested_options(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    await kvx.enable(kv, direct=False)
    assert not (await config_of(kv))["allow_direct"]
    await kvx.enable(kv, atomic=False)
    assert (await config_of(kv))["allow_direct"]
    assert (await config_of(kv))["allow_atomic"]
    for ttl, stays in ((timedelta(minutes=1), 60), (90, 90), (True, 90)):
        await kvx.enable(kv, ttl=ttl)
        assert (await config_of(kv))["subject_delete_marker_ttl"] == stays


async def test_enable_refuses_invalid_ttls_and_missing_buckets(make_bucket) -> None:
    kv = await make_bucket(allow=False)
    with pytest.raises(ValueError, match="turned off"):
        await kvx.enable(kv, ttl=False)
    for wrong in (0, 0.5, -3):
        with pytest.raises(ValueError, match="TTL"):
            await kvx.enable(kv, ttl=wrong)
    with pytest.raises(ValueError, match="ttl must be finite"):
        await kvx.enable(kv, ttl=jsx.NEVER)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await kvx.enable(kv, ttl="1m")  # type: ignore[arg-type]
    await kv._js.delete_key_value(kv._name)
    with pytest.raises(BucketNotFoundError):
        await kvx.enable(kv)


async def test_enable_changes_nothing_on_a_server_without_the_option() -> None:
    for version, options in (("2.11.11", {}), ("2.10.26", {"atomic": False, "ttl": 60})):
        with NatsServer(version=version) as server:
            async with await nats.connect(server.url, connect_timeout=10) as nc:
                kv = await nc.jetstream(timeout=30).create_key_value(bucket="B")
                with pytest.raises(jsx.errors.UnsupportedFeatureError, match="nothing was changed"):
                    await kvx.enable(kv, **options)
                assert not (await config_of(kv))["allow_direct"]
                await kvx.enable(kv, atomic=False)
                assert (await config_of(kv))["allow_direct"]


async def test_enable_does_not_undo_another_enable_at_the_same_time(make_bucket) -> None:
    for _ in range(4):
        kv = await make_bucket(allow=False, direct=True)
        config = (await kv._js.stream_info(kv._stream)).config
        await kv._js.update_stream(config.evolve(allow_atomic=True))  # then it lacks only the record
        await asyncio.gather(kvx.enable(kv, ttl=60), *(kvx.enable(kv) for _ in range(3)))
        await kvx.enable(kv, ttl=60)
        assert (await config_of(kv))["subject_delete_marker_ttl"] == 60
