"""`ensure_bucket`: at every start of a service, by many processes at once."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, Placement, RePublish, StorageType, StreamConfig, StreamSource
from nats.js.errors import BadBucketError, InvalidBucketNameError
from nats.js.kv import KeyValue

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.testing import NatsServer, ReferenceServer

OPTIONS: dict[str, Any] = {
    "description": "mine",
    "max_value_size": 1000,
    "history": 5,
    "ttl": timedelta(hours=1),
    "max_bytes": 1 << 20,
    "storage": "memory",
    "replicas": 1,
    "republish": RePublish(src=">", dest="copies.>"),
    "limit_marker_ttl": timedelta(minutes=1),
}


async def config_of(js: JetStreamContext, name: str) -> StreamConfig:
    return (await js.stream_info(f"KV_{name}")).config


async def test_a_new_bucket_is_nats_pys_with_direct_gets_and_atomic_batches(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, other = stream_name(), stream_name()
    kv = await kvx.ensure_bucket(js, name)
    await js.create_key_value(bucket=other)
    ours, theirs = await config_of(js, name), await config_of(js, other)
    differ = {field for field in vars(ours) if getattr(ours, field) != getattr(theirs, field)}
    assert differ == {"name", "subjects", "allow_direct", "allow_atomic", "metadata"}
    assert (ours.allow_direct, ours.allow_atomic) == (True, True)
    assert ours.subjects == [f"$KV.{name}.>", f"_reads.KV_{name}"]
    await kv.put("a", b"1")
    assert (await kvx.get_many(kv, ["a"]))["a"].value == b"1"
    async with kvx.transaction(kv) as tx:
        tx.put("a", b"2")
    assert (await (await js.key_value(name)).get("a")).value == b"2"


async def test_a_new_bucket_has_every_option_as_nats_py_sets_it(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, other = stream_name(), stream_name()
    await kvx.ensure_bucket(js, name, **OPTIONS)
    theirs = OPTIONS | {"ttl": 3600, "limit_marker_ttl": 60, "republish": RePublish(src=">", dest="others.>")}
    await js.create_key_value(KeyValueConfig(bucket=other, **theirs))
    ours, found = await config_of(js, name), await config_of(js, other)
    differ = {field for field in vars(ours) if getattr(ours, field) != getattr(found, field)}
    assert differ == {"name", "subjects", "allow_direct", "allow_atomic", "metadata", "republish"}


async def test_the_same_call_again_changes_nothing_and_asks_once(
    nc: Client, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await kvx.ensure_bucket(js, name, **OPTIONS, spark=True)
    before = vars(await config_of(js, name))
    sent = nc.stats["out_msgs"]
    kv = await kvx.ensure_bucket(js, name, **OPTIONS, spark=True)
    assert nc.stats["out_msgs"] == sent + 1
    assert vars(await config_of(js, name)) == before
    assert before["subjects"] == [f"$KV.{name}.>", f"_reads.KV_{name}", f"_spark.KV_{name}.>"]
    await kv.put("a", b"1")
    assert kv._direct


async def test_what_a_bucket_lacks_is_turned_on_and_nothing_else_changes(
    make_bucket: Any, js: JetStreamContext
) -> None:
    kv = await make_bucket(allow=False, history=7, description="mine", ttl=3600, max_value_size=1000)
    before = vars(await config_of(js, kv._name))
    bound = await kvx.ensure_bucket(js, kv._name, history=7, limit_marker_ttl=60)
    after = vars(await config_of(js, kv._name))
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"allow_direct", "allow_atomic", "subjects", "subject_delete_marker_ttl", "metadata"}
    assert bound._direct
    await kvx.ensure_bucket(js, kv._name, direct=False, atomic=False)
    assert vars(await config_of(js, kv._name)) == after


async def test_another_value_of_an_option_is_an_error_and_nothing_changes(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.create_key_value(bucket=name, description="mine", history=5, ttl=60, storage="memory", limit_marker_ttl=10)
    before = vars(await config_of(js, name))
    with pytest.raises(jsx.errors.StreamConfigMismatchError) as caught:
        await kvx.ensure_bucket(
            js, name, description="", history=1, ttl=90.0, storage=StorageType.FILE, limit_marker_ttl=20, replicas=1
        )
    assert caught.value.diff == {
        "description": ("", "mine"),
        "history": (1, 5),
        "ttl": (90.0, 60.0),
        "storage": ("file", "memory"),
        "limit_marker_ttl": (20.0, 10.0),
    }
    assert str(caught.value) == (
        f"bucket '{name}' exists with another configuration: description is 'mine', not '', history is 5, not 1, "
        "ttl is 60.0, not 90.0, storage is 'memory', not 'file', limit_marker_ttl is 10.0, not 20; nothing was "
        "changed; give the existing values, or change the bucket with js.update_stream or "
        f"'nats kv edit {name}'"
    )
    assert vars(await config_of(js, name)) == before
    await kvx.ensure_bucket(js, name)  # what is left out matches any value


VALUES: dict[str, list[Any]] = {
    "description": ["", "text"],
    "max_value_size": [-1, 0, 1000],
    "history": [1, 64],
    "ttl": [0, 0.1, 1 / 3, 119, timedelta(days=400)],
    "max_bytes": [-1, 0, 1 << 20],
    "storage": ["file", "memory", StorageType.FILE],
    "replicas": [1],
    "placement": [Placement(), Placement(cluster="", tags=[]), Placement(cluster="a"), Placement(tags=["b", "a"])],
    "republish": [
        RePublish(),
        RePublish(dest="copies.>"),
        RePublish(src="", dest="copies.>", headers_only=False),
        RePublish(src=">", dest="copies.>", headers_only=True),
    ],
    "limit_marker_ttl": [1, timedelta(minutes=1)],
}


async def test_the_same_value_again_is_no_difference(stream_name: Callable[[], str]) -> None:
    options = {each.name for each in fields(KeyValueConfig)} - {"bucket", "direct"}
    assert set(VALUES) == options
    for version in ("2.10.26", "2.12.8", "2.15.1"):
        old = {"atomic": False} if version == "2.10.26" else {}
        with NatsServer(version=version) as server:
            async with await nats.connect(server.url) as nc:
                js = nc.jetstream(timeout=30)
                for option, value in [(option, value) for option, values in VALUES.items() for value in values]:
                    if option == "limit_marker_ttl" and old:
                        continue
                    name = stream_name()
                    await kvx.ensure_bucket(js, name, **old, **{option: value})
                    before = vars(await config_of(js, name))
                    await kvx.ensure_bucket(js, name, **old, **{option: value})
                    assert vars(await config_of(js, name)) == before, (version, option, value)
                    await js.delete_key_value(name)


async def test_many_processes_at_once_get_the_same_bucket(
    nc: Client, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    count = 12
    clients = [await nats.connect(nc.connected_url.geturl()) for _ in range(count)]
    try:
        for exists in (False, True):
            name = stream_name()
            if exists:
                await js.create_key_value(bucket=name, history=3)
            buckets = await asyncio.gather(
                *(kvx.ensure_bucket(each.jetstream(timeout=30), name, history=3, spark=True) for each in clients)
            )
            for n, kv in enumerate(buckets):
                await kv.put(f"k{n}", b"1")
                assert kv._direct
            assert len(await kvx.snapshot(buckets[0])) == count
            config = await config_of(js, name)
            assert (config.allow_direct, config.allow_atomic, config.max_msgs_per_subject) == (True, True, 3)
            assert config.subjects == [f"$KV.{name}.>", f"_reads.KV_{name}", f"_spark.KV_{name}.>"]
    finally:
        for each in clients:
            await each.close()


async def test_of_two_processes_that_differ_one_gets_an_error(
    nc: Client, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    async with await nats.connect(nc.connected_url.geturl()) as other:
        results = await asyncio.gather(
            kvx.ensure_bucket(js, name, history=1),
            kvx.ensure_bucket(other.jetstream(timeout=30), name, history=2),
            return_exceptions=True,
        )
    assert {type(each) for each in results} == {KeyValue, jsx.errors.StreamConfigMismatchError}


async def test_an_old_server_is_named_before_anything_is_created() -> None:
    async with ReferenceServer(api_level=1) as server, await nats.connect(server.url) as nc:
        js = nc.jetstream()
        with pytest.raises(jsx.errors.UnsupportedFeatureError, match=r"atomic.*nothing was created"):
            await kvx.ensure_bucket(js, "B")
        kv = await kvx.ensure_bucket(js, "B", atomic=False)
        await kv.put("a", b"1")
        with pytest.raises(jsx.errors.UnsupportedFeatureError, match="nothing was changed"):
            await kvx.ensure_bucket(js, "B")


async def test_a_stream_of_the_name_that_is_no_bucket_is_refused(make_bucket: Any, js: JetStreamContext) -> None:
    kv = await make_bucket()
    await js.add_stream(name=f"KV_{kv._name}n", subjects=[f"$KV.{kv._name}n.>"])
    with pytest.raises(BadBucketError, match="is not a bucket"):
        await kvx.ensure_bucket(js, f"{kv._name}n")
    await js.add_stream(name=f"KV_{kv._name}x", mirror=StreamSource(name=kv._stream), max_msgs_per_subject=1)
    with pytest.raises(BadBucketError, match="is a mirror of stream"):
        await kvx.ensure_bucket(js, f"{kv._name}x")


async def test_the_stream_that_stores_the_subjects_of_a_bucket_is_named(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, holder = stream_name(), stream_name()
    await js.add_stream(name=holder, subjects=[f"$KV.{name}.>"])
    with pytest.raises(jsx.errors.ServerError) as caught:
        await kvx.ensure_bucket(js, name)
    assert (caught.value.code, caught.value.err_code) == (400, 10065)
    assert str(caught.value) == (
        f"bucket '{name}': nothing was created: stream '{holder}' stores messages on '$KV.{name}.>'; a subject belongs to one "
        "stream, so that a message is stored once: give the bucket another name, or remove the subject from the stream "
        "(error 10065)"
    )


async def test_the_context_of_a_domain_is_used() -> None:
    async with NatsServer(config="jetstream { domain: hub }") as server, await nats.connect(server.url) as nc:
        js = nc.jetstream(domain="hub")
        for _ in range(2):
            kv = await kvx.ensure_bucket(js, "B", history=2)
        await kv.put("a", b"1")
        assert (await kvx.snapshot(kv))["a"].value == b"1"


async def test_an_invalid_argument_is_refused_and_nothing_is_sent(nc: Client, js: JetStreamContext) -> None:
    sent = nc.stats["out_msgs"]
    for options, error, text in (
        ({"histroy": 5}, TypeError, "ensure_bucket() has no option 'histroy'; did you mean 'history'?"),
        ({"max_age": 5}, TypeError, "ensure_bucket() has no option 'max_age'; did you mean 'ttl'?"),
        ({"num_replicas": 3}, TypeError, "ensure_bucket() has no option 'num_replicas'; did you mean 'replicas'?"),
        ({"zzz": 3}, TypeError, "ensure_bucket() has no option 'zzz'; its options are atomic, description, direct,"),
        ({"history": 65}, ValueError, "history must be an integer from 1 to 64, not 65"),
        ({"replicas": 0}, ValueError, "replicas must be an integer of at least 1, not 0"),
        ({"ttl": "1h"}, TypeError, "bucket 'B': ttl must be a number of seconds, not str"),
        ({"ttl": float("inf")}, ValueError, "ttl must be at most 9223372036 seconds (292 years), not inf"),
        ({"max_value_size": 1 << 31}, ValueError, "max_value_size must be an integer from -1 to 2147483647, not 214"),
        ({"description": 5}, TypeError, "description must be str, not int"),
        ({"direct": "yes"}, TypeError, "bucket 'B': direct must be True or False, not 'yes'"),
        ({"atomic": 1}, TypeError, "atomic must be True or False, not int"),
        ({"spark": "no"}, TypeError, "spark must be True or False, not 'no'"),
        ({"limit_marker_ttl": 0.5}, ValueError, "a TTL must be a whole number of seconds of at least 1, not 0.5"),
        ({"limit_marker_ttl": jsx.NEVER}, ValueError, "limit_marker_ttl must be finite"),
        ({"storage": "memroy"}, ValueError, "storage must be 'file' or 'memory', not 'memroy'; did you mean 'memory'?"),
        ({"placement": "eu"}, TypeError, "placement must be a nats-py Placement, not 'eu'"),
        ({"description": "\ud800"}, ValueError, "has half of a surrogate pair"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            await kvx.ensure_bucket(js, "B", **options)
    for name in ("", "a.b", "a b", "ü", "a" * 253):
        with pytest.raises(InvalidBucketNameError, match="the name of a bucket must have 1 to 252 characters"):
            await kvx.ensure_bucket(js, name)
    assert nc.stats["out_msgs"] == sent
