"""Reads of the past return what a key was, or report it as unavailable, even if the bucket's limits have changed."""

import asyncio
from collections.abc import Callable

import pytest
from nats.js import JetStreamContext

import jetstream_ext as jsx
import jetstream_ext.kv as kvx
from jetstream_ext.errors import HistoryUnavailableError


async def expired(js: JetStreamContext, stream: str, last: int = 1) -> None:
    """Wait until the messages up to a sequence are gone."""
    async with asyncio.timeout(60):
        while (await js.stream_info(stream)).state.first_seq <= last:
            await asyncio.sleep(0.05)


async def test_value_that_expires_without_a_marker_because_it_was_replaced_is_unavailable(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """The markers of all keys that expired since are still stored, but only the last message of a key leaves one."""
    kv = await kvx.enable(await js.create_key_value(bucket=(name := stream_name()), history=10), ttl=6)
    headers = jsx.ttl_headers(6)
    await js.publish(f"$KV.{name}.session.a", b"v1", headers=headers)
    await js.publish(f"$KV.{name}.session.b", b"v1", headers=headers)
    await kv.put("other", b"1")
    await asyncio.sleep(1)
    revision = await kv.put("unrelated", b"1")
    assert set(await kvx.snapshot(kv, ["session.*"], at=revision)) == {"session.a", "session.b"}
    await kv.put("session.a", b"v2")
    await kv.delete("session.b")
    await kv.purge("other")  # which accounts for every message that is missing
    await expired(js, f"KV_{name}", 2)
    with pytest.raises(HistoryUnavailableError, match="may have expired"):
        await kvx.snapshot(kv, ["session.*"], at=revision)
    with pytest.raises(HistoryUnavailableError) as error:
        await kvx.get_many(kv, ["session.a", "session.b"], at=revision)
    assert error.value.keys == ("session.a", "session.b")


async def test_past_before_a_purge_with_a_ttl_is_unavailable_if_other_purges_have_one(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """The marker of such a purge goes without a trace; the TTL of the other one shows that the bucket has such markers."""
    kv = await kvx.enable(await js.create_key_value(bucket=(name := stream_name()), history=5))
    await kv.put("session.a", b"1")
    revision = await kv.put("other", b"1")
    await kv.purge("session.a", msg_ttl=1)
    await kv.purge("unrelated", msg_ttl=600)
    async with asyncio.timeout(60):
        while (await js.stream_info(f"KV_{name}")).state.messages > 2:
            await asyncio.sleep(0.05)
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, ["session.*"], at=revision)
    assert not (await kvx.snapshot(kv, ["session.*"], at=revision, strict=False)).complete


async def test_past_before_a_rollup_of_the_whole_stream_is_unavailable(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    kv = await kvx.enable(await js.create_key_value(bucket=(name := stream_name()), history=64))
    await kv.put("a.1", b"v1")
    revision = await kv.put("a.2", b"v1")
    await js.publish(f"$KV.{name}.x", b"", headers={"Nats-Rollup": "all"})
    last = await kv.put("a.1", b"v2")
    with pytest.raises(HistoryUnavailableError):
        await kvx.snapshot(kv, ["a.*"], at=revision)
    with pytest.raises(HistoryUnavailableError):
        await kvx.get_many(kv, ["a.1"], at=revision)
    await kv.put("a.3", b"v1")
    assert set(await kvx.snapshot(kv, ["a.*"], at=last)) == {"a.1"}, "nothing up to it was removed after it"


async def test_subjects_of_others_in_the_stream_of_a_bucket_are_no_keys(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    other = name[:-1] + "-"
    kv = await js.create_key_value(bucket=name, history=1)
    config = (await js.stream_info(f"KV_{name}")).config
    await js.update_stream(config.evolve(subjects=[f"$KV.{name}.>", f"$KV.{other}.>"]))
    kv = await kvx.enable(kv)
    await js.publish(f"$KV.{other}.k", b"other", headers={"Nats-Expected-Last-Subject-Sequence": "0"})
    revision = await kv.put("k", b"v1")
    assert (await kvx.get_many(kv, ["k"]))["k"].value == b"v1"
    assert {key: entry.value for key, entry in (await kvx.snapshot(kv)).items()} == {"k": b"v1"}
    await kv.put("k", b"v2")
    await kv.purge("zz")
    with pytest.raises(HistoryUnavailableError) as error:
        await kvx.snapshot(kv, ["k"], at=revision)
    assert error.value.keys == ("k",)
    with pytest.raises(HistoryUnavailableError):
        await kvx.get_many(kv, ["k"], at=revision)
