"""Durable sourcing on a real server: the consumer, the entry that uses it, and the health of sources."""

import asyncio
import json
import pickle
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    ExternalStream,
    ReplayPolicy,
    RetentionPolicy,
    StreamConsumerSource,
    StreamSource,
)

import jetstream_ext as jsx
from jetstream_ext.errors import ServerError
from jetstream_ext.testing import NatsServer

SLACK = 60.0


@pytest.fixture
def origin(js: JetStreamContext, stream_name: Callable[[], str]) -> Callable[..., Awaitable[str]]:
    """Create a stream to read from, with subjects ``<name>.>``."""

    async def make(**config: Any) -> str:
        name = stream_name()
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=True, **config)
        return name

    return make


async def publish(js: JetStreamContext, stream: str, numbers: range) -> None:
    for number in numbers:
        await js.publish(f"{stream}.{number % 3}", b"%d" % number)


async def holds(js: JetStreamContext, stream: str, numbers: list[int]) -> None:
    """Wait until `stream` holds exactly these payloads, in order."""
    async with asyncio.timeout(SLACK):
        while (await js.stream_info(stream)).state.messages != len(numbers):
            await asyncio.sleep(0.02)
    stored = await jsx.DirectGet(js, stream).scan().to_list()
    assert [int(message.data) for message in stored] == numbers


async def messages(js: JetStreamContext, stream: str) -> int:
    return (await js.stream_info(stream)).state.messages


async def becomes(js: JetStreamContext, stream: str, state: jsx.SourceState) -> jsx.SourceHealth:
    """Wait until the one mirror or source of `stream` is in `state`."""
    async with asyncio.timeout(SLACK):
        while True:
            (health,) = await jsx.source_health(js, stream)
            if health.state is state:
                return health
            await asyncio.sleep(0.05)


# -- the consumer and its entry ---------------------------------------------------------------------------------------


@each("retention", RetentionPolicy, together=True)
@each("mirror", [False, True], together=True)
async def test_streams_of_every_retention_can_be_read(
    js: JetStreamContext, origin: Any, stream_name: Callable[[], str], retention: RetentionPolicy, mirror: bool
) -> None:
    name, copy = await origin(retention=retention), stream_name()
    if retention is not RetentionPolicy.INTEREST:
        await publish(js, name, range(10))
    entry = await jsx.create_source_consumer(js, name, "copy", deliver_subject=f"deliver.{copy}")
    assert entry == StreamSource(
        name=name, consumer=StreamConsumerSource(name="copy", deliver_subject=f"deliver.{copy}")
    )
    if retention is RetentionPolicy.INTEREST:
        await publish(js, name, range(10))  # the consumer keeps messages even before a stream reads
    await jsx.ensure_stream(js, name=copy, allow_direct=True, **({"mirror": entry} if mirror else {"sources": [entry]}))
    await holds(js, copy, list(range(10)))
    await publish(js, name, range(10, 20))
    await holds(js, copy, list(range(20)))
    if retention is not RetentionPolicy.LIMITS:
        async with asyncio.timeout(SLACK):  # the reading stream acknowledges with the next heartbeat at the latest
            while await messages(js, name):
                await asyncio.sleep(0.02)
    health = await becomes(js, copy, jsx.SourceState.OK)
    assert (health.name, health.consumer, health.mirror, health.lag) == (name, "copy", mirror, 0)
    assert health.last_active is not None
    assert (health.error, health.detail, health.ok) == (None, "", True)


async def test_servers_create_the_consumer_as_adr_60_says(js: JetStreamContext, origin: Any) -> None:
    name = await origin()
    config = ConsumerConfig(description="mine", max_ack_pending=50, replay_policy=ReplayPolicy.ORIGINAL)
    await jsx.create_source_consumer(js, name, "c", deliver_subject=f"deliver.{name}", config=config)
    found = (await js.consumer_info(name, "c")).config
    assert found.ack_policy == AckPolicy.FLOW_CONTROL
    assert (found.durable_name, found.deliver_subject, found.flow_control) == ("c", f"deliver.{name}", True)
    assert (found.idle_heartbeat, found.max_deliver, found.ack_wait, found.backoff) == (1.0, -1, None, None)
    assert (found.description, found.max_ack_pending, found.replay_policy) == ("mine", 50, "original")
    assert config == ConsumerConfig(description="mine", max_ack_pending=50, replay_policy=ReplayPolicy.ORIGINAL)


async def test_a_repeated_call_succeeds_and_a_different_one_fails(js: JetStreamContext, origin: Any) -> None:
    name = await origin()
    first = await jsx.create_source_consumer(js, name, "c", deliver_subject="d.1", filter_subject=f"{name}.1")
    assert await jsx.create_source_consumer(js, name, "c", deliver_subject="d.1", filter_subject=f"{name}.1") == first
    with pytest.raises(ServerError, match="already exists") as exists:
        await jsx.create_source_consumer(js, name, "c", deliver_subject="d.2", filter_subject=f"{name}.1")
    assert exists.value.err_code == 10148
    assert (await js.consumer_info(name, "c")).config.deliver_subject == "d.1"


@each(
    "options, expected",
    [
        ({"filter_subject": "{name}.1"}, [1, 4, 7]),
        ({"filter_subject": ">"}, list(range(10))),
        ({"config": ConsumerConfig(filter_subjects=["{name}.1", "{name}.2"])}, [1, 2, 4, 5, 7, 8]),
        ({"opt_start_seq": 8}, [7, 8, 9]),
        ({"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": 10}, [9]),
        ({"deliver_policy": DeliverPolicy.LAST_PER_SUBJECT, "filter_subject": "{name}.>"}, [7, 8, 9]),
        ({"deliver_policy": DeliverPolicy.LAST_PER_SUBJECT}, [7, 8, 9]),
        ({"deliver_policy": DeliverPolicy.LAST_PER_SUBJECT, "config": ConsumerConfig(filter_subjects=[])}, [7, 8, 9]),
        (
            {
                "deliver_policy": DeliverPolicy.LAST_PER_SUBJECT,
                "config": ConsumerConfig(filter_subjects=["{name}.0", "{name}.2"]),
            },
            [8, 9],
        ),
        ({"deliver_policy": DeliverPolicy.ALL}, list(range(10))),
        ({"deliver_policy": DeliverPolicy.NEW}, []),
    ],
    together=True,
)
async def test_filters_and_start_sequences_apply(
    js: JetStreamContext, origin: Any, stream_name: Callable[[], str], options: dict[str, Any], expected: list[int]
) -> None:
    name, copy = await origin(), stream_name()
    await publish(js, name, range(10))
    if "filter_subject" in options:
        options = options | {"filter_subject": options["filter_subject"].format(name=name)}
    if "config" in options:
        subjects = [subject.format(name=name) for subject in options["config"].filter_subjects]
        options = options | {"config": options["config"].evolve(filter_subjects=subjects)}
    entry = await jsx.create_source_consumer(js, name, "c", deliver_subject=f"deliver.{copy}", **options)
    await jsx.ensure_stream(js, name=copy, sources=[entry], allow_direct=True)
    await holds(js, copy, expected)
    await publish(js, name, range(10, 13))  # one for each filter
    filters = {subject[-1] for subject in options["config"].filter_subjects} if "config" in options else None
    filters = filters or {options.get("filter_subject", ">")[-1]}
    await holds(js, copy, [*expected, *(n for n in range(10, 13) if ">" in filters or str(n % 3) in filters)])


@each("mirror", [False, True], together=True)
async def test_a_reset_of_the_consumer_repeats_nothing(
    js: JetStreamContext, origin: Any, stream_name: Callable[[], str], mirror: bool
) -> None:
    name, copy = await origin(), stream_name()
    await publish(js, name, range(10))
    entry = await jsx.create_source_consumer(js, name, "c", deliver_subject=f"deliver.{copy}")
    await jsx.ensure_stream(js, name=copy, allow_direct=True, **({"mirror": entry} if mirror else {"sources": [entry]}))
    await holds(js, copy, list(range(10)))
    await jsx.reset_consumer(js, name, "c", seq=1)
    await publish(js, name, range(10, 20))
    async with asyncio.timeout(SLACK):  # the first ten are delivered and acknowledged again before the others
        while (await js.consumer_info(name, "c")).ack_floor.stream_seq < 20:
            await asyncio.sleep(0.05)
    await holds(js, copy, list(range(20)))


@each(
    "wrong, words",
    [
        ({"config": ConsumerConfig(ack_policy=AckPolicy.ALL)}, "ack_policy"),
        ({"config": ConsumerConfig(flow_control=False)}, "flow_control"),
        ({"config": ConsumerConfig(idle_heartbeat=5)}, "idle_heartbeat=5"),
        ({"config": ConsumerConfig(max_deliver=3)}, "max_deliver"),
        ({"config": ConsumerConfig(ack_wait=30)}, "ack_wait"),
        ({"config": ConsumerConfig(backoff=[1, 2])}, "backoff"),
        ({"config": ConsumerConfig(max_ack_pending=-1)}, "max_ack_pending"),
        ({"config": ConsumerConfig(deliver_group="g")}, "deliver_group"),
        ({"config": ConsumerConfig(inactive_threshold=60)}, "inactive_threshold"),
        ({"config": ConsumerConfig(mem_storage=True)}, "mem_storage"),
        ({"config": ConsumerConfig(max_waiting=5)}, "max_waiting=5"),
        ({"config": ConsumerConfig(headers_only=True)}, "headers_only"),
        ({"config": ConsumerConfig(deliver_subject="d")}, "only description"),
        ({"config": ConsumerConfig(durable_name="d")}, "only description"),
        ({"config": ConsumerConfig(deliver_policy=DeliverPolicy.NEW)}, "only description"),
        ({"config": ConsumerConfig(filter_subjects=["a"]), "filter_subject": "b"}, "filter_subjects"),
        ({"config": ConsumerConfig(filter_subjects=["a", "b..c"])}, "empty token"),
        ({"config": ConsumerConfig(filter_subjects=["a.b", "c", "a.*"])}, r"'a\.\*' includes 'a\.b'"),
        ({"config": ConsumerConfig(filter_subjects=["a", "a"])}, "'a' includes 'a'"),
        ({"config": ConsumerConfig(filter_subjects=["a", ">"])}, "'>' includes 'a'"),
        ({"opt_start_seq": 0}, "opt_start_seq"),
        ({"opt_start_seq": True}, "opt_start_seq"),
        ({"opt_start_time": datetime(2026, 1, 1)}, "aware"),  # noqa: DTZ001
        ({"opt_start_seq": 1, "opt_start_time": datetime.now(UTC)}, "does not go with the start"),
        ({"deliver_policy": DeliverPolicy.BY_START_SEQUENCE}, "give opt_start_seq for"),
        (
            {"deliver_policy": DeliverPolicy.BY_START_TIME, "opt_start_seq": 1},
            "opt_start_time for",
        ),
        ({"deliver_policy": DeliverPolicy.NEW, "opt_start_seq": 1}, "neither for another"),
        ({"deliver_policy": "often"}, "often"),
        ({"deliver_subject": "d.*"}, "wildcard"),
        ({"deliver_subject": "d..e"}, "empty token"),
        ({"filter_subject": "a.>.b"}, "filter"),
        ({"timeout": 0}, "timeout"),
    ],
)
async def test_options_that_servers_refuse_or_replace_are_refused_before_any_request(
    js: JetStreamContext, nc: Client, wrong: dict[str, Any], words: str
) -> None:
    await js.account_info()
    sent = nc.stats["out_msgs"]
    with pytest.raises(ValueError, match=words):
        await jsx.create_source_consumer(js, "S", "c", **({"deliver_subject": "d"} | wrong))
    assert nc.stats["out_msgs"] == sent


async def test_every_start_and_filter_is_accepted_or_refused_with_advice(js: JetStreamContext, origin: Any) -> None:
    starts: list[dict[str, Any]] = [
        {},
        *({"deliver_policy": policy} for policy in DeliverPolicy if "start" not in policy),
        {"opt_start_seq": 1},
        {"opt_start_time": datetime.now(UTC)},
    ]
    for retention in RetentionPolicy:
        name = await origin(retention=retention)
        filters: list[dict[str, Any]] = [
            {},
            {"filter_subject": ">"},
            {"filter_subject": f"{name}.1"},
            {"config": ConsumerConfig(filter_subjects=[])},
            {"config": ConsumerConfig(filter_subjects=[f"{name}.1"])},
            {"config": ConsumerConfig(filter_subjects=[f"{name}.1", f"{name}.2.*", f"{name}.*.3"])},
        ]
        for start in starts:
            for each_filter in filters:
                options = {"deliver_subject": f"d.{name}", **start, **each_filter}
                if retention is not RetentionPolicy.WORK_QUEUE or start in ({}, {"deliver_policy": DeliverPolicy.ALL}):
                    await jsx.create_source_consumer(js, name, "c", **options)
                    await js.delete_consumer(name, "c")
                    continue
                with pytest.raises(ServerError, match="leave out deliver_policy, opt_start_seq and") as refused:
                    await jsx.create_source_consumer(js, name, "c", **options)
                assert refused.value.err_code == 10101


async def test_a_second_consumer_of_a_work_queue_is_refused_with_advice(js: JetStreamContext, origin: Any) -> None:
    name = await origin(retention=RetentionPolicy.WORK_QUEUE)
    await jsx.create_source_consumer(js, name, "a", deliver_subject=f"d.{name}")
    for options, code in (({}, 10099), ({"filter_subject": f"{name}.1"}, 10100)):
        with pytest.raises(ServerError, match=f"stream '{name}'.*give filters that no other consumer") as refused:
            await jsx.create_source_consumer(js, name, "b", deliver_subject=f"d.{name}", **options)
        assert refused.value.err_code == code


async def test_a_deliver_subject_that_the_stream_stores_is_refused_with_advice(
    js: JetStreamContext, origin: Any
) -> None:
    name = await origin()
    with pytest.raises(ServerError, match="give a deliver_subject that no stream stores") as refused:
        await jsx.create_source_consumer(js, name, "c", deliver_subject=f"{name}.d")
    assert refused.value.err_code == 10081


async def test_an_unknown_stream_is_not_found(js: JetStreamContext) -> None:
    with pytest.raises(nats.js.errors.NotFoundError) as missing:
        await jsx.create_source_consumer(js, "NOPE", "c", deliver_subject="d")
    assert missing.value.err_code == 10059
    with pytest.raises(nats.js.errors.NotFoundError):
        await jsx.source_health(js, "NOPE")


async def test_the_entry_of_a_domain_has_an_external_api() -> None:
    async with (
        NatsServer(config="jetstream { domain: hub }") as server,
        await nats.connect(server.url, connect_timeout=10) as nc,
    ):
        js = nc.jetstream(domain="hub")
        await js.add_stream(name="S", subjects=["s.>"], retention=RetentionPolicy.WORK_QUEUE)
        await publish(js, "s", range(3))
        entry = await jsx.create_source_consumer(js, "S", "c", deliver_subject="d")
        assert entry.external == ExternalStream(api="$JS.hub.API")
        await jsx.ensure_stream(js, name="T", sources=[entry], allow_direct=True)
        await holds(js, "T", [0, 1, 2])
        await becomes(js, "T", jsx.SourceState.OK)
        await js.delete_stream("T")
        await js.add_stream(name="T", sources=[entry])  # unchanged: servers accept it and never read it
        assert "own domain 'hub'" in (await becomes(js, "T", jsx.SourceState.MISCONFIGURED)).detail
        await js.delete_stream("T")
        await jsx.ensure_stream(nc.jetstream(), name="T", sources=[entry], allow_direct=True)  # the same server
        await becomes(js, "T", jsx.SourceState.OK)
        given = ExternalStream(api="$JS.elsewhere.API", deliver="x")
        again = await jsx.create_source_consumer(js, "S", "c", deliver_subject="d", external=given)
        assert again.external == given


# -- health -----------------------------------------------------------------------------------------------------------


@each("with_stream", [True, False])
async def test_a_consumer_that_never_existed_is_missing(
    js: JetStreamContext, origin: Any, stream_name: Callable[[], str], with_stream: bool
) -> None:
    name, copy = await origin() if with_stream else stream_name(), stream_name()
    entry = StreamSource(name=name, consumer=StreamConsumerSource(name="nope", deliver_subject="d"))
    await js.add_stream(name=copy, sources=[entry])
    (health,) = await jsx.source_health(js, copy)
    # The server reports only lag 0, active -1 and no error.
    assert (health.lag, health.last_active, health.error, health.pending) == (0, None, None, None)
    assert health.state is (jsx.SourceState.CONSUMER_MISSING if with_stream else jsx.SourceState.STREAM_MISSING)
    assert name in health.detail
    assert not health.ok
    assert pickle.loads(pickle.dumps(health)) == health
    assert hash(health) == hash(pickle.loads(pickle.dumps(health)))


@each(
    "config, words",
    [
        ({"ack_policy": "explicit", "deliver_subject": "d"}, "ack policy 'explicit'"),
        ({"ack_policy": "explicit"}, "ack policy 'explicit'"),
        ({"ack_policy": "flow_control", "deliver_subject": "e"}, "delivers to 'e'"),
        ({"ack_policy": "flow_control", "deliver_subject": "d", "deliver_group": "g"}, "group 'g'"),
    ],
)
async def test_a_consumer_with_unsuitable_options_is_misconfigured(
    js: JetStreamContext, origin: Any, stream_name: Callable[[], str], config: dict[str, Any], words: str
) -> None:
    name, copy = await origin(), stream_name()
    if "deliver_subject" in config:
        config = config | {"deliver_subject": f"{config['deliver_subject']}.{copy}"}
    await js.add_consumer(name, ConsumerConfig(name="c", durable_name="c", **config))
    entry = StreamSource(name=name, consumer=StreamConsumerSource(name="c", deliver_subject=f"d.{copy}"))
    await js.add_stream(name=copy, sources=[entry])
    health = await becomes(js, copy, jsx.SourceState.MISCONFIGURED)
    assert words.replace("'e'", f"'e.{copy}'") in health.detail


async def test_a_paused_consumer_is_paused(js: JetStreamContext, origin: Any, stream_name: Callable[[], str]) -> None:
    name, copy = await origin(), stream_name()
    entry = await jsx.create_source_consumer(js, name, "c", deliver_subject=f"deliver.{copy}")
    await js.pause_consumer(name, "c", (datetime.now(UTC) + timedelta(hours=1)).isoformat())
    await js.add_stream(name=copy, sources=[entry], allow_direct=True)
    await publish(js, name, range(4))
    assert (await becomes(js, copy, jsx.SourceState.PAUSED)).pending == 4
    await js.resume_consumer(name, "c")
    await holds(js, copy, [0, 1, 2, 3])
    await becomes(js, copy, jsx.SourceState.OK)


SECOND = 1_000_000_000


@each(
    "row, state",
    [
        ({"lag": 3, "active": SECOND}, jsx.SourceState.OK),
        ({"lag": 0, "active": -1}, jsx.SourceState.WAITING),
        ({"lag": 3, "active": 11 * SECOND}, jsx.SourceState.STALLED),
        ({"lag": 3, "active": SECOND, "error": {"code": 500, "err_code": 10012, "description": "no"}}, "failed"),
        (None, jsx.SourceState.WAITING),
    ],
)
async def test_an_error_of_the_reading_server_is_reported(
    nc: Client, stream_name: Callable[[], str], row: dict[str, Any] | None, state: jsx.SourceState
) -> None:
    prefix = stream_name()
    entry = {"name": "S", "consumer": {"name": "c", "deliver_subject": "d"}}
    info = {"config": {"name": "T", "sources": [entry]}, "sources": None if row is None else [{"name": "S", **row}]}
    consumer = {
        "config": {"ack_policy": "flow_control", "deliver_subject": "d"},
        "num_pending": 2,
        "num_ack_pending": 1,
    }

    async def answer(msg: Msg) -> None:
        await msg.respond(json.dumps(info if ".STREAM." in msg.subject else consumer).encode())

    await nc.subscribe(f"{prefix}.>", cb=answer)
    (health,) = await jsx.source_health(nc.jetstream(prefix=prefix), "T")
    assert health.state == state
    assert health.pending == 3
    assert health.lag == (row or {"lag": 0})["lag"]
    if state == "failed":
        assert health.error is not None
        assert (health.error.err_code, health.detail) == (10012, "no (error 10012)")
