"""`ensure_stream` on every server from 2.10: the same call again finds no difference, whatever the server made of its values."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from client_cells import each, named
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import (
    ExternalStream,
    PersistMode,
    Placement,
    RePublish,
    StreamConfig,
    StreamConsumerLimits,
    StreamConsumerSource,
    StreamSource,
    SubjectTransform,
)
from nats.js.errors import NotFoundError

import jetstream_ext as jsx
from jetstream_ext.errors import ServerError, StreamConfigMismatchError, UnsupportedFeatureError
from jetstream_ext.testing import NatsServer

VERSIONS = ["2.10.26", "2.11.0", "2.11.11", "2.12.8", "2.14.6", "2.15.1"]


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    with NatsServer(version=request.param) as server:
        yield server


def source(**options: Any) -> StreamSource:
    return StreamSource(name="ORIGIN", **options)


def transform(src: str, dest: str) -> SubjectTransform:
    return SubjectTransform(src=src, dest=dest)


TIME = datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TIMES: list[Any] = [
    TIME,
    TIME.replace(microsecond=0),
    TIME.replace(tzinfo=None),
    TIME.astimezone(timezone(timedelta(hours=-5))),
    "2024-01-02T03:04:05Z",
    "2024-01-02T03:04:05.100000000Z",
    "2024-01-02T03:04:05.123456789Z",
    "2024-01-02T03:04:05.10-02:00",
    "2024-01-02T03:04:05+02:00",
    datetime(1970, 1, 1, tzinfo=UTC),
]
ORIGINS = [
    source(),
    *(source(filter_subject=subject) for subject in ("", ">", "ORIGIN.a", "ORIGIN.>")),
    *(source(opt_start_seq=seq) for seq in (0, 1, 5)),
    *(source(opt_start_time=time) for time in TIMES),
    *(source(external=ExternalStream(api=api)) for api in ("", "$JS.hub.API")),
    *(source(external=ExternalStream(api=api, deliver=to)) for api in ("", "$JS.hub.API") for to in ("", "to")),
    source(subject_transforms=[]),
    source(subject_transforms=[transform("ORIGIN.>", "z.>")]),
    source(subject_transforms=[transform("ORIGIN.a", "z.a"), transform("ORIGIN.b", "")]),
    source(subject_transforms=[transform("ORIGIN.b", ""), transform("ORIGIN.a", "z.a")]),
    source(subject_transforms=[transform("ORIGIN.*", "z.$1")]),
    source(subject_transforms=[transform("", "z.>")]),
    source(subject_transforms=[transform("", "")]),
    source(subject_transforms=[transform(">", "")]),
    source(filter_subject="", opt_start_seq=0, subject_transforms=[]),
    source(consumer=StreamConsumerSource(name="durable", deliver_subject="to")),
]
LIMITS = [-1, 0, 1, 5]
SWITCH = [False, True]
VALUES: dict[str, list[Any]] = {
    "description": ["", "text"],
    "subjects": [[], ["S.b", "S.a"], ("S.b", "S.a"), ["S.>"]],
    "retention": ["limits", "interest", "workqueue"],
    "max_consumers": LIMITS,
    "max_msgs": LIMITS,
    "max_bytes": LIMITS,
    "max_msgs_per_subject": LIMITS,
    "max_msg_size": LIMITS,
    "discard": ["old", "new"],
    "discard_new_per_subject": [False],
    "max_age": [0, 0.1, 0.1234567891, 1 / 3, 1.1, 10, 119, 121, timedelta(microseconds=100_001), timedelta(days=400), 1e9],
    "storage": ["file", "memory"],
    "num_replicas": [0, 1],
    "no_ack": SWITCH,
    "template_owner": [],  # no server has templates that own streams
    "duplicate_window": [0, 0.1, 1 / 3, 1.1, 10, 119, 121, timedelta(microseconds=100_001), 1e6],
    "placement": [
        Placement(), Placement(cluster=""), Placement(tags=[]), Placement(cluster="", tags=[""]), Placement(cluster="a"),
        Placement(tags=["b", "a"]),
    ],
    "mirror": ORIGINS,
    "sources": [
        [], *([origin] for origin in ORIGINS), [source(), StreamSource(name="OTHER")],
        [StreamSource(name="OTHER"), source()], (source(filter_subject="ORIGIN.b"), source(filter_subject="ORIGIN.a")),
    ],
    "sealed": [False],
    "deny_delete": SWITCH,
    "deny_purge": SWITCH,
    "allow_rollup_hdrs": SWITCH,
    "first_seq": [0, 1, 2, 1 << 63],
    "republish": [
        RePublish(), RePublish(dest="c.>"), RePublish(src="", dest="c.>"), RePublish(src=">", dest="c.>"),
        RePublish(src=">", dest=""), RePublish(src="", dest=""), RePublish(src="S.>", dest="c.>", headers_only=True),
        RePublish(dest="c.>", headers_only=False), RePublish(src="S.*", dest="c.$1"),
    ],
    "subject_transform": [
        transform("", "t.>"), transform(">", "t.>"), transform("S.>", "t.>"), transform("S.*", "t.$1"), transform("", ""),
        transform("S.>", ""), transform(">", ">"),
    ],
    "allow_direct": SWITCH,
    "mirror_direct": [False],
    "compression": ["none", "s2"],
    "allow_msg_ttl": SWITCH,
    "allow_msg_schedules": SWITCH,
    "allow_atomic": SWITCH,
    "allow_batched": SWITCH,
    "allow_msg_counter": SWITCH,
    "persist_mode": ["default"],  # servers before 2.12 drop "async", which is a difference
    "metadata": [{}, {"a": "b"}, {"a": "", "": "b"}, {"_nats.ver": "1", "_nats.req.level": "7", "_nats.x": "y"}],
    "consumer_limits": [
        StreamConsumerLimits(), StreamConsumerLimits(inactive_threshold=0), StreamConsumerLimits(inactive_threshold=1 / 3),
        StreamConsumerLimits(max_ack_pending=0), StreamConsumerLimits(max_ack_pending=-1),
        StreamConsumerLimits(inactive_threshold=5, max_ack_pending=10),
    ],
    "subject_delete_marker_ttl": [0, 1, 1.5, timedelta(minutes=1)],
}  # fmt: skip
TOGETHER: list[dict[str, Any]] = [
    {"max_age": 10, "duplicate_window": 0},
    {"max_age": 10, "duplicate_window": 5},
    {"max_age": 0, "duplicate_window": 5},
    {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 3},
    {"subject_delete_marker_ttl": 5, "allow_msg_ttl": True},
    {"mirror": source(), "subjects": [], "sources": []},
    {"mirror": source(), "duplicate_window": 10, "max_age": 20, "republish": RePublish(dest="c.>")},
    {"mirror": StreamSource(name="DIRECT"), "mirror_direct": True, "allow_direct": True},
    {"mirror": StreamSource(name="MISSING"), "mirror_direct": True},
    {"sources": [source()], "duplicate_window": 10, "subjects": ["S.>"]},
    {"storage": "memory", "compression": "s2"},
    {"persist_mode": "default", "allow_atomic": True},
]
CALLS = [{option: value} for option, values in VALUES.items() for value in values] + TOGETHER


async def stored(nc: Client) -> dict[str, Any]:
    """Return the configuration of the stream ``S``, with the fields that nats-py does not know."""
    answer = await nc.request("$JS.API.STREAM.INFO.S", timeout=30)
    found: dict[str, Any] = json.loads(answer.data)["config"]
    return found


@pytest.fixture(autouse=True)
async def origins(js: JetStreamContext) -> AsyncIterator[None]:
    """Streams to copy from; the streams of the test are deleted afterwards."""
    for name in ("ORIGIN", "OTHER", "DIRECT"):
        await js.add_stream(name=name, subjects=[f"{name}.>"], allow_direct=name == "DIRECT")
    yield
    for name in ("S", "ORIGIN", "OTHER", "DIRECT"):
        with contextlib.suppress(NotFoundError):
            await js.delete_stream(name)


def test_every_option_is_in_the_table() -> None:
    assert set(VALUES) == {field.name for field in fields(StreamConfig)} - {"name"}


async def test_the_same_call_again_finds_no_difference(js: JetStreamContext, nc: Client, server: NatsServer) -> None:
    """The newest server gets every call, each of the others every second one in turn."""
    newest = server.version == VERSIONS[-1]
    accepted: list[bool] = []
    for number, options in enumerate(CALLS if newest else CALLS[VERSIONS.index(server.version) % 2 :: 2]):
        for as_config in [False, True] if newest and number % 3 == 0 else [False]:
            given: dict[str, Any] = {"name": "S", **options}
            if as_config:
                given = {"config": StreamConfig(**given)}
            with named(options=options, as_config=as_config):
                accepted.append(await check_call(js, nc, given, may_be_refused=not newest))
    assert sum(accepted) > len(accepted) * 2 // 3


def completed_later(config: StreamConfig) -> dict[str, Any]:
    """The fields whose empty values a server fills in or drops after it has created the stream."""
    return {"placement": config.placement, "republish": config.republish}


async def check_call(js: JetStreamContext, nc: Client, given: dict[str, Any], *, may_be_refused: bool) -> bool:
    """Return whether the server accepted the call."""
    try:
        first = await jsx.ensure_stream(js, **given)
    except (ServerError, UnsupportedFeatureError):
        assert may_be_refused
        with pytest.raises(NotFoundError):
            await js.stream_info("S")
        return False
    before = await stored(nc)
    again = await jsx.ensure_stream(js, **given)
    assert again.config == first.config.evolve(**completed_later(again.config))
    assert await stored(nc) == before
    if not first.config.allow_msg_counter:
        enabled = await jsx.ensure_stream(js, **given | {"allow_direct": True})
        assert enabled.config.allow_direct
        same = {"allow_direct": True, "metadata": enabled.config.metadata, **completed_later(enabled.config)}
        assert enabled.config == first.config.evolve(**same)
    await js.delete_stream("S")
    return True


@each(
    "one, other",
    [
        ({"republish": RePublish(dest="c.>")}, {"republish": RePublish(src=">", dest="c.>", headers_only=False)}),
        ({"sources": [source(), StreamSource(name="OTHER")]}, {"sources": (StreamSource(name="OTHER"), source())}),
        (
            {"sources": [source(filter_subject="ORIGIN.a"), source(filter_subject="ORIGIN.b", opt_start_seq=0)]},
            {"sources": [source(filter_subject="ORIGIN.b"), source(filter_subject="ORIGIN.a", subject_transforms=[])]},
        ),
        ({"subjects": ["S.a", "S.b"]}, {"subjects": ["S.b", "S.a"]}),
        ({"placement": Placement(tags=["a", "b"])}, {"placement": Placement(tags=["b", "a"], cluster="")}),
        ({}, {"persist_mode": "default", "mirror_direct": False, "description": "", "first_seq": 0}),
        ({"persist_mode": "default"}, {"persist_mode": PersistMode.DEFAULT}),
        ({"max_msgs": 0, "max_bytes": -1, "max_age": 0}, {"max_msgs": -1, "max_bytes": 0, "max_age": timedelta(0)}),
        ({"max_age": 60.5}, {"max_age": timedelta(seconds=60.5)}),
        (
            {"sources": [source(opt_start_time=TIME)]},
            {"sources": [source(opt_start_time="2024-01-01T22:04:05.678901-05:00")]},
        ),
        ({"sources": [source(opt_start_time="2024-01-02T03:04:05.10-02:00")]}, {}),
    ],
)
async def test_the_same_value_in_other_words_is_no_difference(
    js: JetStreamContext, nc: Client, one: dict[str, Any], other: dict[str, Any]
) -> None:
    await jsx.ensure_stream(js, name="S", **one)
    before = await stored(nc)
    for given in (other, one):
        await jsx.ensure_stream(js, name="S", **given)
        assert await stored(nc) == before
    await js.delete_stream("S")


@each(
    "one, other",
    [
        ({"republish": RePublish(dest="c.>")}, {"republish": RePublish(src="S.>", dest="c.>")}),
        ({"republish": RePublish(dest="c.>")}, {"republish": RePublish(dest="c.>", headers_only=True)}),
        ({"republish": RePublish(dest="c.>")}, {"republish": RePublish(dest="")}),
        ({"subject_transform": transform("S.>", "t.>")}, {"subject_transform": transform("", "t.>")}),
        ({"sources": [source()]}, {"sources": [source(), StreamSource(name="OTHER")]}),
        ({"sources": [source(filter_subject="ORIGIN.a")]}, {"sources": [source(filter_subject="ORIGIN.b")]}),
        (
            {"sources": [source(subject_transforms=[transform("ORIGIN.a", "z.a"), transform("ORIGIN.b", "z.b")])]},
            {"sources": [source(subject_transforms=[transform("ORIGIN.b", "z.b"), transform("ORIGIN.a", "z.a")])]},
        ),
        ({"sources": [source(opt_start_time=TIME)]}, {"sources": [source(opt_start_time=TIME.replace(second=6))]}),
        ({"mirror": source()}, {"mirror": source(external=ExternalStream(api="$JS.hub.API"))}),
        ({"placement": Placement(tags=["a", "b"])}, {"placement": Placement(tags=["a"])}),
        ({"metadata": {"a": "b"}}, {"metadata": {"a": "c"}}),
        ({"consumer_limits": StreamConsumerLimits(max_ack_pending=5)}, {"consumer_limits": StreamConsumerLimits()}),
    ],
)
async def test_another_value_is_a_difference(js: JetStreamContext, one: dict[str, Any], other: dict[str, Any]) -> None:
    await jsx.ensure_stream(js, name="S", **one)
    with pytest.raises(StreamConfigMismatchError, match="nothing was changed") as mismatch:
        await jsx.ensure_stream(js, name="S", **other)
    assert set(mismatch.value.diff) == set(other)
    await js.delete_stream("S")


async def test_a_mirror_without_the_direct_gets_that_are_wanted_is_a_difference(js: JetStreamContext) -> None:
    """Servers take the option from the origin, if it exists."""
    for _ in range(2):
        with pytest.raises(StreamConfigMismatchError) as mismatch:
            await jsx.ensure_stream(js, name="S", mirror=source(), mirror_direct=True)
        assert mismatch.value.diff == {"mirror_direct": (True, False)}
    await js.delete_stream("S")
    for _ in range(2):
        with pytest.raises(StreamConfigMismatchError) as mismatch:
            await jsx.ensure_stream(js, name="S", mirror=StreamSource(name="DIRECT"), mirror_direct=False)
        assert mismatch.value.diff == {"mirror_direct": (False, True)}
