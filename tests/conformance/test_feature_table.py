"""Every release line has the features of the feature table, and the library knows which.

The first half tests the features without the library, the second half tests the library. Without ``JETSTREAM_EXT_FULL=1``
they use only the newest release.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.js.api import DeliverPolicy, StreamConfig, StreamConsumerSource, StreamSource

import jetstream_ext as jsx
from jetstream_ext.errors import ConsumerInvalidResetError, UnsupportedFeatureError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.feature_table import Feature
from jetstream_ext.protocol.options import MAX_TTL
from jetstream_ext.testing import NatsServer

LEVELS = {"2.10.26": 0, "2.11.11": 1, "2.12.0": 2, "2.12.8": 3, "2.14.0": 4, "2.14.6": 4, "2.15.1": 5}
CHOSEN = list(LEVELS) if os.environ.get("JETSTREAM_EXT_FULL") else ["2.15.1"]
SLACK = 20.0

_names = itertools.count(1)


@pytest.fixture(scope="module", params=CHOSEN)
def old(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server of one release."""
    with NatsServer(version=request.param) as server:
        yield server


@pytest.fixture
async def nc(old: NatsServer) -> AsyncIterator[Client]:
    nc = await nats.connect(old.url, connect_timeout=10)
    try:
        yield nc
    finally:
        await nc.close()


@pytest.fixture
def name() -> str:
    return f"S{next(_names)}"


def line(server: NatsServer) -> str:
    return ".".join(server.version.split(".")[:2])


async def ask(nc: Client, subject: str, payload: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Send a request and return its answer's JSON."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode() if payload is not None else b""
    reply = await nc.request(subject, data, timeout=SLACK, headers=headers)
    return json.loads(reply.data or b"{}")


async def create(nc: Client, name: str, **config: Any) -> dict[str, Any]:
    """Create a stream without the library; return its echoed configuration, `{}` if it was refused."""
    answer = await ask(nc, f"$JS.API.STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})
    found: dict[str, Any] = answer.get("config", {})
    return found


# -- by hand ------------------------------------------------------------------------------------------------------------


async def has_direct_get(nc: Client, name: str) -> bool:
    await create(nc, name, allow_direct=True)
    await ask(nc, f"{name}.1", b"x")
    reply = await nc.request(f"$JS.API.DIRECT.GET.{name}", b'{"seq":1}', timeout=SLACK)
    return reply.data == b"x"


async def has_direct_batch(nc: Client, name: str) -> bool:
    await create(nc, name, allow_direct=True)
    await ask(nc, f"{name}.1", b"x")
    reply = await nc.request(f"$JS.API.DIRECT.GET.{name}", b'{"seq":1,"batch":1}', timeout=SLACK)
    return "Nats-Num-Pending" in (reply.headers or {})


async def has_msg_ttl(nc: Client, name: str) -> bool:
    echoed = (await create(nc, name, allow_msg_ttl=True)).get("allow_msg_ttl", False)
    # The value is invalid, so a server that reads the header refuses it.
    refused = "error" in await ask(nc, f"{name}.1", b"x", {"Nats-TTL": "0"})
    assert echoed == refused
    return refused


async def has_delete_markers(nc: Client, name: str) -> bool:
    return "subject_delete_marker_ttl" in await create(nc, name, subject_delete_marker_ttl=60 * 10**9)


async def batch(nc: Client, name: str, commit: str) -> Any:
    await create(nc, name, allow_atomic=True)
    headers = {"Nats-Batch-Id": "b"}
    await ask(nc, f"{name}.1", b"x", {**headers, "Nats-Batch-Sequence": "1"})
    return await ask(nc, f"{name}.1", b"x", {**headers, "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": commit})


async def has_atomic(nc: Client, name: str) -> bool:
    return (await batch(nc, name, "1")).get("count") == 2


async def has_atomic_eob(nc: Client, name: str) -> bool:
    return (await batch(nc, name, "eob")).get("count") == 1


async def has_counters(nc: Client, name: str) -> bool:
    return bool((await create(nc, name, allow_msg_counter=True)).get("allow_msg_counter"))


async def has_schedules(nc: Client, name: str) -> bool:
    return bool((await create(nc, name, allow_msg_schedules=True)).get("allow_msg_schedules"))


async def has_fast_ingest(nc: Client, name: str) -> bool:
    if not (await create(nc, name, allow_batched=True)).get("allow_batched"):
        await create(nc, name)
    inbox = nc.new_inbox()
    sub = await nc.subscribe(f"{inbox}.>")
    await nc.publish(f"{name}.1", b"x", reply=f"{inbox}.b.10.ok.1.0.$FI")
    reply = json.loads((await sub.next_msg(timeout=SLACK)).data)
    await sub.unsubscribe()
    return reply.get("type") == "ack"


async def has_consumer_reset(nc: Client, name: str) -> bool:
    await create(nc, name)
    config = {"name": "c", "durable_name": "c", "ack_policy": "explicit"}
    await ask(nc, f"$JS.API.CONSUMER.CREATE.{name}.c", {"stream_name": name, "config": config})
    inbox = nc.new_inbox()
    sub = await nc.subscribe(inbox)
    await nc.publish(f"$JS.API.CONSUMER.RESET.{name}.c", reply=inbox)
    await ask(nc, "$JS.API.INFO")  # the server has processed the reset by then
    try:
        # A server of that level answers, though perhaps late; from others, silence is the answer.
        await sub.next_msg(timeout=SLACK if nc._server_info.get("api_lvl", 0) >= 4 else 1)
    except nats.errors.TimeoutError:
        return False
    finally:
        await sub.unsubscribe()
    return True


async def has_durable_source(nc: Client, name: str) -> bool:
    await create(nc, name)
    config = {"name": "c", "durable_name": "c", "ack_policy": "flow_control", "deliver_subject": f"d.{name}"}
    made = await ask(nc, f"$JS.API.CONSUMER.CREATE.{name}.c", {"stream_name": name, "config": config})
    source = {"name": name, "consumer": {"name": "c", "deliver_subject": f"d.{name}"}}
    echoed = await create(nc, f"{name}R", subjects=[], sources=[source])
    taken = bool(echoed) and "consumer" in echoed["sources"][0]
    assert taken == ("error" not in made)
    return taken


BY_HAND: dict[Feature, Callable[[Client, str], Awaitable[bool]]] = {
    feature_table.DIRECT_GET: has_direct_get,
    feature_table.DIRECT_BATCH: has_direct_batch,
    feature_table.MSG_TTL: has_msg_ttl,
    feature_table.DELETE_MARKERS: has_delete_markers,
    feature_table.ATOMIC: has_atomic,
    feature_table.ATOMIC_EOB: has_atomic_eob,
    feature_table.COUNTERS: has_counters,
    feature_table.SCHEDULES: has_schedules,
    feature_table.FAST_INGEST: has_fast_ingest,
    feature_table.CONSUMER_RESET: has_consumer_reset,
    feature_table.DURABLE_SOURCE: has_durable_source,
}


def test_every_row_of_the_table_is_tested() -> None:
    assert list(BY_HAND) == list(feature_table.FEATURES)
    assert {".".join(version.split(".")[:2]) for version in LEVELS} == set(feature_table.RELEASES)


@pytest.mark.parametrize("feature", feature_table.FEATURES, ids=lambda feature: feature.title)
async def test_server_has_the_features_of_the_table(old: NatsServer, nc: Client, name: str, feature: Feature) -> None:
    assert await BY_HAND[feature](nc, name) == feature.on(line(old))
    # The API level implies the same.
    assert feature.at(LEVELS[old.version]) == feature.on(line(old))


# -- the library --------------------------------------------------------------------------------------------------------


async def test_features_reports_the_release(old: NatsServer, nc: Client) -> None:
    release, found = line(old), await jsx.features(nc.jetstream())
    assert found == jsx.Features(
        server_version=old.version,
        api_level=LEVELS[old.version],
        direct_batch=feature_table.DIRECT_BATCH.on(release),
        msg_ttl=feature_table.MSG_TTL.on(release),
        atomic=feature_table.ATOMIC.on(release),
        atomic_eob=feature_table.ATOMIC_EOB.on(release),
        fast_ingest=feature_table.FAST_INGEST.on(release),
        consumer_reset=feature_table.CONSUMER_RESET.on(release),
        durable_source=feature_table.DURABLE_SOURCE.on(release),
    )


async def refuses(call: Awaitable[Any], feature: Feature, server: NatsServer) -> None:
    with pytest.raises(UnsupportedFeatureError) as refused:
        await call
    assert refused.value.feature == feature.title
    assert refused.value.required_api_level == feature.api_level
    assert refused.value.server_version == server.version


@pytest.mark.parametrize("feature", feature_table.BY_FIELD.values(), ids=lambda feature: feature.field)
async def test_ensure_stream_sets_or_refuses_an_option(
    old: NatsServer, nc: Client, name: str, feature: Feature
) -> None:
    js = nc.jetstream()
    wanted = {feature.field: 60 if feature is feature_table.DELETE_MARKERS else True}
    if feature.on(line(old)):
        info = await jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], allow_rollup_hdrs=True, **wanted)
        assert getattr(info.config, feature.field)
        await jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], **wanted)
    else:
        call = jsx.ensure_stream(js, name=name, subjects=[f"{name}.>"], **wanted)
        await refuses(call, feature, old)
        with pytest.raises(nats.js.errors.NotFoundError):
            await js.stream_info(name)


async def test_ensure_stream_enables_the_features_of_the_server(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream()
    await js.add_stream(name=name, subjects=[f"{name}.>"])
    flags = [f for f in feature_table.FEATURES if f.field.startswith("allow_") and f is not feature_table.COUNTERS]
    wanted = {feature.field: True for feature in flags if feature.on(line(old))}
    info = await jsx.ensure_stream(js, name=name, **wanted)
    assert all(getattr(info.config, option) for option in wanted)


async def test_reset_consumer_resets_or_is_unsupported(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream(timeout=SLACK)
    await js.add_stream(name=name, subjects=[f"{name}.>"])
    for _ in range(5):
        await js.publish(f"{name}.1", b"x")
    await js.add_consumer(name, name="c", durable_name="c")
    await js.add_consumer(name, name="last", durable_name="last", deliver_policy=DeliverPolicy.LAST)
    sent = nc.stats["out_msgs"]
    for stream, consumer in ((name, "nope"), ("NOPE", "c")):
        with pytest.raises(nats.js.errors.NotFoundError):
            await jsx.reset_consumer(js, stream, consumer)
    assert nc.stats["out_msgs"] == sent + 2  # the reset itself would get no answer, so it is not sent
    if not feature_table.CONSUMER_RESET.on(line(old)):
        await refuses(jsx.reset_consumer(js, name, "c"), feature_table.CONSUMER_RESET, old)
        await refuses(jsx.reset_consumer(js, name, "c", time=datetime.now(UTC)), feature_table.CONSUMER_RESET, old)
        return
    assert (await jsx.reset_consumer(js, name, "c", seq=3)).reset_seq == 3
    assert (await jsx.reset_consumer(js, name, "c")).reset_seq == 3
    assert (await jsx.reset_consumer(js, name, "c", time=datetime.now(UTC))).reset_seq == 6
    assert (await jsx.reset_consumer(js, name, "last")).info.name == "last"
    with pytest.raises(ConsumerInvalidResetError):
        await jsx.reset_consumer(js, name, "last", seq=3)


async def test_durable_sourcing_copies_or_is_unsupported(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream()
    await js.add_stream(name=name, subjects=[f"{name}.>"], retention="workqueue")
    for _ in range(5):
        await js.publish(f"{name}.1", b"x")
    call = jsx.create_source_consumer(js, name, "c", deliver_subject=f"d.{name}")
    if not feature_table.DURABLE_SOURCE.on(line(old)):
        await refuses(call, feature_table.DURABLE_SOURCE, old)
        # 2.10 and 2.11 would accept the entry, ignore the consumer, and copy without it.
        by_hand = StreamSource(name=name, consumer=StreamConsumerSource(name="c", deliver_subject="d"))
        await refuses(jsx.ensure_stream(js, name=f"{name}R", sources=[by_hand]), feature_table.DURABLE_SOURCE, old)
        assert (await js.stream_info(name)).state.messages == 5
        with pytest.raises(nats.js.errors.NotFoundError):
            await js.stream_info(f"{name}R")
        return
    await jsx.ensure_stream(js, name=f"{name}R", sources=[await call])
    async with asyncio.timeout(SLACK):
        while (await js.stream_info(name)).state.messages or (await js.stream_info(f"{name}R")).state.messages != 5:
            await asyncio.sleep(0.05)
        while not (await jsx.source_health(js, f"{name}R"))[0].ok:
            await asyncio.sleep(0.05)


async def test_mirror_without_a_consumer_is_healthy(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream()
    await js.add_stream(name=name, subjects=[f"{name}.>"])
    await js.add_stream(name=f"{name}M", mirror=StreamSource(name=name))
    async with asyncio.timeout(SLACK):
        while not (await jsx.source_health(js, f"{name}M"))[0].ok:
            await asyncio.sleep(0.05)


# -- times to live ------------------------------------------------------------------------------------------------------

TAKEN = (
    *("5", "05", "1h", "1h30m", "90s", "1s", "1500ms", "1.5s", " 5", "5000000000ns"),
    *("never", "NEVER", "Never", "", str(MAX_TTL), str(2**63 - 1)),
)
REFUSED = (
    *("0", "0s", "-1", "999ms", "0.5s", "1d", "5.0", "5.5", "1e3", "+5", "1_000", "abc", "1h,2h", str(2**63)),
    *("5 ", "never "),
)


async def test_ttl_values_are_accepted_or_refused(old: NatsServer, nc: Client, name: str) -> None:
    await create(nc, name, allow_msg_ttl=True)
    seen = feature_table.MSG_TTL.on(line(old))
    # Send bytes, because nats-py strips header values.
    reader, writer = await asyncio.open_connection("127.0.0.1", old.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\nSUB answers 1\r\n')
    async with asyncio.timeout(SLACK):
        for value in TAKEN + REFUSED:
            header = f"NATS/1.0\r\nNats-TTL: {value}\r\n\r\n".encode()
            writer.write(f"HPUB {name}.1 answers {len(header)} {len(header)}\r\n".encode() + header + b"\r\n")
            while not (control := await reader.readline()).startswith(b"MSG "):
                assert control.startswith((b"INFO ", b"PING", b"PONG"))
            answer = json.loads(await reader.readexactly(int(control.split()[-1]) + 2))
            expected = 10165 if seen and value in REFUSED else None
            assert answer.get("error", {}).get("err_code") == expected, value
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("ttl", [jsx.NEVER, 5])
async def test_stream_without_allow_msg_ttl_refuses_a_ttl(old: NatsServer, nc: Client, name: str, ttl: Any) -> None:
    await create(nc, name)
    answer = await ask(nc, f"{name}.1", b"x", jsx.ttl_headers(ttl))
    assert answer.get("error", {}).get("err_code") == (10166 if feature_table.MSG_TTL.on(line(old)) else None)


async def test_allow_msg_ttl_can_be_enabled_but_not_disabled(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream()
    await create(nc, name)
    if not feature_table.MSG_TTL.on(line(old)):
        await refuses(jsx.ensure_stream(js, name=name, allow_msg_ttl=True), feature_table.MSG_TTL, old)
        return
    config = (await jsx.ensure_stream(js, name=name, allow_msg_ttl=True)).config
    with pytest.raises(nats.js.errors.ServerError) as refused:
        await js.update_stream(config.evolve(allow_msg_ttl=False))
    assert refused.value.err_code == 10052


@pytest.mark.skipif("2.10.26" not in CHOSEN, reason="nox -s conformance runs it")
@pytest.mark.parametrize("old", ["2.10.26"], indirect=True)
async def test_2_10_ignores_ttls(old: NatsServer, nc: Client, name: str) -> None:
    js = nc.jetstream()
    await js.add_stream(jsx.with_ttl(StreamConfig(name=name, subjects=[f"{name}.>"]), marker_ttl=1))
    await js.publish(f"{name}.1", b"x", headers=jsx.ttl_headers(1))
    await asyncio.sleep(1.5)  # the message stays, so there is no event to wait for
    assert (await js.stream_info(name)).state.messages == 1


@pytest.mark.parametrize("old", CHOSEN[1:] or CHOSEN, indirect=True)
async def test_effective_ttl_decides_which_messages_remain(old: NatsServer, nc: Client, name: str) -> None:
    """Publish with different TTLs to streams with different limits, and wait until only the expected messages remain."""
    js = nc.jetstream()

    async def stream(suffix: str, *, marker_ttl: int | None = None, **config: Any) -> str:
        made = StreamConfig(name=f"{name}{suffix}", subjects=[f"{name}{suffix}.>"], **config)
        await js.add_stream(jsx.with_ttl(made, marker_ttl=marker_ttl))
        return f"{name}{suffix}"

    plain = await stream("A")
    aged = await stream("B", max_age=2, duplicate_window=2)
    marked = await stream("C", marker_ttl=50)  # longer than the test takes
    single = await stream("D", marker_ttl=50, max_msgs_per_subject=1)
    start = time.monotonic()

    async def publish(stream: str, subject: str, headers: dict[str, str] | None = None) -> None:
        await js.publish(f"{stream}.{subject}", b"x", headers=headers)

    await publish(plain, "short", jsx.ttl_headers(1))
    await publish(plain, "long", jsx.ttl_headers(60))
    await publish(plain, "hundred-years", jsx.ttl_headers(MAX_TTL))
    await publish(plain, "overflow", {"Nats-TTL": str(2**63 - 1)})
    await publish(plain, "lower-case", {"nats-ttl": "1"})
    await publish(plain, "twice", jsx.ttl_headers(60))
    await publish(plain, "twice", jsx.ttl_headers(1))
    await publish(aged, "longer", jsx.ttl_headers(60))
    await publish(aged, "never", jsx.ttl_headers(jsx.NEVER))
    await publish(aged, "draft-never", jsx.ttl_headers(jsx.NEVER, dialect="draft"))
    await publish(marked, "floored", jsx.ttl_headers(1))
    await publish(single, "not-floored", jsx.ttl_headers(1))

    async def left() -> dict[str, int]:
        held: dict[str, int] = {}
        for stream in (plain, aged, marked, single):
            subjects = (await js.stream_info(stream, subjects_filter=">")).state.subjects or {}
            held |= {subject.partition(".")[2]: count for subject, count in subjects.items()}
        return held

    expected = {
        "long": 1,
        "hundred-years": 1,
        "lower-case": 1,
        "twice": 1,  # the older message is the last one again
        "never": 1,
        "floored": 1,
        "not-floored": 1,  # its delete marker
    }
    async with asyncio.timeout(SLACK):
        while await left() != expected:
            await asyncio.sleep(0.1)
    assert time.monotonic() - start > 1.9
    for stream, subject, reason in ((marked, "floored", None), (single, "not-floored", "MaxAge")):
        found = await js.get_last_msg(stream, f"{stream}.{subject}")
        assert jsx.marker_reason(found.headers) == reason
        assert (found.headers or {})["Nats-TTL"] == ("50" if reason is None else "50s")
