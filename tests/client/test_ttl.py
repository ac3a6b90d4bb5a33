"""Times to live and delete markers, on a real server."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import nats
import nats.js.errors
import pytest
from client_cells import each
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StreamConfig, StreamSource

import jetstream_ext as jsx
from jetstream_ext.errors import BadHeaderError, MessageTTLDisabledError

# Servers expire messages to the second; the rest is for a busy machine.
SLACK = 30.0


async def until(check: Callable[[], Awaitable[bool]]) -> float:
    """Wait until `check` returns True; return the time."""
    async with asyncio.timeout(SLACK):
        while not await check():
            await asyncio.sleep(0.05)
    return time.monotonic()


@pytest.fixture
def held(js: JetStreamContext) -> Callable[[str], Awaitable[dict[str, int]]]:
    """The messages that a stream holds, by subject."""

    async def held(stream: str) -> dict[str, int]:
        return (await js.stream_info(stream, subjects_filter=">")).state.subjects or {}

    return held


@each(
    "ttl, headers, expected",
    [
        (5, None, {"Nats-TTL": "5"}),
        (5.0, {}, {"Nats-TTL": "5"}),
        (timedelta(minutes=1), {"A": "b"}, {"A": "b", "Nats-TTL": "60"}),
        (jsx.NEVER, MappingProxyType({"A": "b"}), {"A": "b", "Nats-TTL": "never"}),
        (5, {"Nats-No-Expire": "1"}, {"Nats-No-Expire": "1", "Nats-TTL": "5"}),
        (5, {"nats-ttl": "7"}, {"nats-ttl": "7", "Nats-TTL": "5"}),
    ],
)
def test_ttl_headers_add_one_header(ttl: Any, headers: Mapping[str, str] | None, expected: dict[str, str]) -> None:
    before = dict(headers or {})
    result = jsx.ttl_headers(ttl, headers)
    assert result == expected
    assert result is not headers
    assert dict(headers or {}) == before


def test_the_draft_dialect_writes_never_as_its_own_header() -> None:
    assert jsx.ttl_headers(jsx.NEVER, {"A": "b"}, dialect="draft") == {"A": "b", "Nats-No-Expire": "1"}
    assert jsx.ttl_headers(5, dialect="draft") == {"Nats-TTL": "5"}
    for taken in ("Nats-No-Expire", "Nats-TTL"):
        with pytest.raises(BadHeaderError):
            jsx.ttl_headers(jsx.NEVER, {taken: "1"}, dialect="draft")
    with pytest.raises(ValueError, match="dialect"):
        jsx.ttl_headers(5, dialect="2.10")  # type: ignore[arg-type]


@each("ttl", [0, -1, 0.5, 1.5, timedelta(milliseconds=1500), float("inf"), 2**62])
def test_a_ttl_that_servers_would_change_is_refused(ttl: Any) -> None:
    with pytest.raises(ValueError, match="TTL"):
        jsx.ttl_headers(ttl)
    with pytest.raises(ValueError, match="TTL"):
        jsx.with_ttl(StreamConfig(name="S"), marker_ttl=ttl)


def test_invalid_headers_are_refused() -> None:
    with pytest.raises(TypeError):
        jsx.ttl_headers("5")  # type: ignore[arg-type]
    with pytest.raises(BadHeaderError):
        jsx.ttl_headers(5, {"Nats-TTL": "7"})
    with pytest.raises(BadHeaderError):
        jsx.ttl_headers(5, {"A": "b\r\nNats-TTL: 7"})


@each(
    "headers, reason",
    [
        (None, None),
        ({}, None),
        ({"Nats-TTL": "1m0s"}, None),
        ({"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "1m0s"}, "MaxAge"),
        ({"Nats-Marker-Reason": "Purge"}, "Purge"),
        ({"Nats-Applied-Limit": "MaxAge"}, "MaxAge"),
        ({"Nats-Applied-Limit": "x", "Nats-Marker-Reason": "MaxAge"}, "MaxAge"),
    ],
)
def test_marker_reason_reads_both_dialects(headers: dict[str, str] | None, reason: str | None) -> None:
    assert jsx.marker_reason(headers) == reason


def test_with_ttl_sets_the_options() -> None:
    plain = StreamConfig(name="S", max_age=60)
    assert jsx.with_ttl(plain) == plain.evolve(allow_msg_ttl=True)
    assert plain.allow_msg_ttl is None
    marked = jsx.with_ttl(plain, marker_ttl=timedelta(minutes=1))
    assert marked == plain.evolve(
        allow_msg_ttl=True, allow_rollup_hdrs=True, deny_purge=False, subject_delete_marker_ttl=60
    )
    bucket = KeyValueConfig(bucket="B")
    assert jsx.with_ttl(bucket) == bucket
    assert jsx.with_ttl(bucket, marker_ttl=5).limit_marker_ttl == 5
    assert bucket.limit_marker_ttl is None
    mirror = StreamConfig(name="M", mirror=StreamSource(name="S"))
    assert jsx.with_ttl(mirror).allow_msg_ttl


@each(
    "config, marker_ttl, error",
    [
        (StreamConfig(name="S"), jsx.NEVER, ValueError),
        (StreamConfig(name="S", mirror=StreamSource(name="O")), 5, ValueError),
        (StreamConfig(name="S", deny_purge=True), 5, ValueError),
        (StreamConfig(name="S", allow_msg_counter=True), None, ValueError),
        ({"name": "S"}, None, TypeError),
    ],
)
def test_configurations_that_servers_would_refuse_or_change(
    config: Any, marker_ttl: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        jsx.with_ttl(config, marker_ttl=marker_ttl)


async def test_servers_store_the_configuration_unchanged(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    config = jsx.with_ttl(StreamConfig(name=name, subjects=[name]), marker_ttl=60)
    info = await jsx.ensure_stream(js, config)
    assert info.config.allow_msg_ttl
    assert info.config.subject_delete_marker_ttl == 60
    await jsx.ensure_stream(js, config)
    await js.create_key_value(jsx.with_ttl(KeyValueConfig(bucket=f"{name}-B"), marker_ttl=60))
    assert (await js.stream_info(f"KV_{name}-B")).config.subject_delete_marker_ttl == 60


async def test_the_ttl_of_every_publisher_is_stored(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    config = StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True, allow_atomic=True, allow_batched=True)
    await js.add_stream(jsx.with_ttl(config))
    await js.publish(f"{name}.1", b"x", headers=jsx.ttl_headers(60))
    async with jsx.AtomicBatch(js) as batch:
        await batch.add(f"{name}.2", b"x", msg_ttl=60)
        await batch.add(f"{name}.3", b"x", msg_ttl=jsx.NEVER)
    await jsx.publish_atomic(js, [jsx.BatchMessage(f"{name}.4", msg_ttl=timedelta(minutes=1))])
    async with jsx.FastPublisher(js) as publisher:
        await publisher.add(f"{name}.5", b"x", msg_ttl=60)
        await publisher.add_many([jsx.BatchMessage(f"{name}.6", b"x", msg_ttl=jsx.NEVER)])
        await publisher.commit(f"{name}.7", b"x", msg_ttl=60)
    stored = await jsx.DirectGet(js, name).scan().to_list()
    assert [message.headers.get("Nats-TTL") for message in stored] == ["60", "60", "never", "60", "60", "never", "60"]


async def test_a_stream_without_allow_msg_ttl_refuses_the_message(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[name], allow_atomic=True)
    with pytest.raises(nats.js.errors.BadRequestError) as refused:
        await js.publish(name, b"x", headers=jsx.ttl_headers(jsx.NEVER))
    assert refused.value.err_code == 10166
    advice = (
        f"; enable TTLs on stream '{name}' with allow_msg_ttl=True .* or 'jetstream-ext enable {name} --ttl' "
        r"\(error 10166\)$"
    )
    with pytest.raises(MessageTTLDisabledError, match=advice):
        await jsx.publish_atomic(js, [jsx.BatchMessage(name, msg_ttl=5)])
    await jsx.ensure_stream(js, name=name, allow_batched=True)
    with pytest.raises(MessageTTLDisabledError, match=advice):
        async with jsx.FastPublisher(js) as publisher:
            await publisher.add(name, msg_ttl=5)
    assert (await js.stream_info(name)).state.messages == 0
