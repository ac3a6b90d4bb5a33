"""ensure_stream on a real server."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

import nats
import nats.js.errors
import pytest
from client_cells import each
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    DiscardPolicy,
    Placement,
    RePublish,
    StorageType,
    StreamConfig,
    StreamConsumerLimits,
    StreamConsumerSource,
    StreamSource,
)

import jetstream_ext as jsx
from jetstream_ext.errors import (
    RequestTimeoutError,
    ServerError,
    StreamConfigMismatchError,
    UnsupportedFeatureError,
)

FLAGS = ("allow_direct", "allow_msg_ttl", "allow_atomic", "allow_batched", "allow_rollup_hdrs", "allow_msg_schedules")
ALL_ON = dict.fromkeys(FLAGS, True)
# The fields of a StreamConfig that are not None unless they are given.
UNSET = {name: None for name, value in vars(StreamConfig()).items() if value is not None}


async def on(js: JetStreamContext, name: str) -> set[str]:
    config = (await js.stream_info(name)).config
    return {flag for flag in FLAGS if getattr(config, flag)}


async def test_a_missing_stream_is_created(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    config = StreamConfig(name=name, subjects=[f"{name}.>"], max_age=60.5, metadata={"a": "b"})
    info = await jsx.ensure_stream(js, config, **ALL_ON)
    assert info.did_create
    assert info.config.name == name
    assert info.config.max_age == 60.5
    assert info.created is not None
    assert await on(js, name) == set(FLAGS)
    assert config.allow_direct is None


async def test_missing_options_are_enabled_and_none_is_disabled(
    js: JetStreamContext, nc: Client, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(
        name=name,
        subjects=[f"{name}.>", f"{name}-2.>"],
        description="by the operator",
        max_age=3600,
        allow_atomic=True,
        metadata={"team": "a"},
    )
    await js.publish(f"{name}.1", b"x")
    info = await jsx.ensure_stream(js, name=name, allow_direct=True, allow_msg_ttl=True)
    assert (info.config.allow_direct, info.config.allow_msg_ttl, info.config.allow_atomic) == (True, True, True)
    assert info.state.messages == 1
    found = await js.stream_info(name)
    assert found.config.description == "by the operator"
    assert found.config.max_age == 3600
    assert found.config.metadata is not None
    assert found.config.metadata["team"] == "a"
    await jsx.ensure_stream(js, name=name, **ALL_ON)
    assert await on(js, name) == set(FLAGS)


async def test_an_option_that_is_off_and_wanted_so_is_no_difference(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    off: dict[str, Any] = dict.fromkeys((*FLAGS, "allow_msg_counter", "mirror_direct"), False)
    for name in (stream_name(), stream_name()):
        await jsx.ensure_stream(js, name=name, **off)
        assert not (await jsx.ensure_stream(js, name=name, **off)).did_create
        assert await on(js, name) == set()


async def test_an_option_that_is_on_and_wanted_off_is_a_difference(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, mirror, counters = stream_name(), stream_name(), stream_name()
    await js.add_stream(name=name, **ALL_ON)
    await js.add_stream(name=mirror, mirror=StreamSource(name=name))
    await js.add_stream(name=counters, allow_msg_counter=True)
    for stream, option in (
        *((name, flag) for flag in FLAGS),
        (mirror, "mirror_direct"),
        (counters, "allow_msg_counter"),
    ):
        off: dict[str, Any] = {option: False}
        text = f"{option} is True, not False; nothing was changed"
        for given in ({"name": stream, **off}, {"config": StreamConfig(name=stream), **UNSET, **off}):
            with pytest.raises(StreamConfigMismatchError, match=text) as mismatch:
                await jsx.ensure_stream(js, **given)
            assert mismatch.value.diff == {option: (False, True)}
    with pytest.raises(StreamConfigMismatchError) as mismatch:
        await jsx.ensure_stream(js, name=name, allow_atomic=False, allow_msg_counter=True)
    assert mismatch.value.diff == {"allow_atomic": (False, True)}
    assert await on(js, name) == set(FLAGS)
    with pytest.raises(StreamConfigMismatchError) as mismatch:
        await jsx.ensure_stream(js, StreamConfig(name=name, allow_direct=False, allow_batched=False))
    assert set(mismatch.value.diff) == {"allow_direct", "allow_batched"}


async def test_the_default_of_allow_rollup_hdrs_in_a_configuration_is_no_wish(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    """Servers turn it on together with other options, and nats-py's default is False."""
    config = StreamConfig(name=stream_name(), allow_msg_schedules=True)
    for _ in range(2):
        assert (await jsx.ensure_stream(js, config)).config.allow_rollup_hdrs
    with pytest.raises(StreamConfigMismatchError, match="allow_rollup_hdrs is True, not False"):
        await jsx.ensure_stream(js, config, allow_rollup_hdrs=False)


async def test_an_unchanged_stream_costs_one_request(
    js: JetStreamContext, nc: Client, stream_name: Callable[[], str]
) -> None:
    config = StreamConfig(name=stream_name(), subjects=[stream_name()], **ALL_ON)
    await jsx.ensure_stream(js, config)
    sent = nc.stats["out_msgs"]
    info = await jsx.ensure_stream(js, config)
    assert nc.stats["out_msgs"] == sent + 1
    assert not info.did_create


@each(
    "other, found",
    [
        ({"description": "x"}, None),
        ({"subjects": ["{name}.>", "{name}-2"]}, ["{name}.>"]),
        ({"retention": "interest"}, "limits"),
        ({"max_msgs": 5}, -1),
        ({"max_age": 5, "duplicate_window": 5}, 0),
        ({"max_msgs_per_subject": 1}, 3),
        ({"discard": DiscardPolicy.NEW}, "old"),
        ({"storage": StorageType.MEMORY}, "file"),
        ({"deny_delete": True}, False),
        ({"duplicate_window": 5}, 120),
        ({"metadata": {"team": "b"}}, None),
        ({"mirror": StreamSource(name="S")}, None),
        ({"republish": RePublish(src=">", dest="x.>")}, None),
        ({"placement": Placement(cluster="x")}, None),
        ({"subject_delete_marker_ttl": 5}, None),
        ({"first_seq": 7}, None),
    ],
)
async def test_another_difference_is_an_error_and_changes_nothing(
    js: JetStreamContext, stream_name: Callable[[], str], other: dict[str, Any], found: Any
) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], max_msgs_per_subject=3)
    before = (await js.stream_info(name)).config
    given = {"name": name, "max_msgs_per_subject": 3, "allow_atomic": True, **other}
    if "subjects" in other:
        given["subjects"] = [subject.format(name=name) for subject in other["subjects"]]
        found = [subject.format(name=name) for subject in found]
    with pytest.raises(StreamConfigMismatchError, match="nothing was changed") as mismatch:
        await jsx.ensure_stream(js, **given)
    field = next(iter(other))
    assert set(mismatch.value.diff) == set(other)
    assert mismatch.value.diff[field] == (given[field], found if field != "metadata" else mismatch.value.diff[field][1])
    assert field in str(mismatch.value)
    assert (await js.stream_info(name)).config == before


UNUSUAL: dict[str, Any] = {
    "max_msgs_per_subject": 5,
    "max_msg_size": 100,
    "max_msgs": 9,
    "max_age": 60,
    "duplicate_window": 5,
    "discard": "new",
    "discard_new_per_subject": True,
    "deny_delete": True,
    "deny_purge": True,
    "no_ack": True,
    "storage": "memory",
    "metadata": {"a": "b"},
}


async def test_what_is_left_out_matches_any_value(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    await js.add_stream(name=name, subjects=[f"{name}.>"], **UNUSUAL)
    before = (await js.stream_info(name)).config
    info = await jsx.ensure_stream(js, name=name, allow_direct=True, max_age=None, subjects=[])
    assert info.config.allow_direct
    after = (await js.stream_info(name)).config
    assert {field for field in vars(after) if getattr(after, field) != getattr(before, field)} <= {
        "allow_direct",
        "metadata",  # of which servers write a part
    }


@each(
    "option, default",
    [
        ("max_msgs_per_subject", -1),
        ("max_msg_size", -1),
        ("max_msgs", -1),
        ("max_age", 0),
        ("discard", "old"),
        ("discard_new_per_subject", False),
        ("deny_delete", False),
        ("deny_purge", False),
        ("no_ack", False),
    ],
)
async def test_a_default_that_is_given_is_compared(
    js: JetStreamContext, stream_name: Callable[[], str], option: str, default: object
) -> None:
    name = stream_name()
    await js.add_stream(name=name, **UNUSUAL)
    given: dict[str, Any] = {option: default}
    with pytest.raises(StreamConfigMismatchError) as mismatch:
        await jsx.ensure_stream(js, name=name, **given)
    assert mismatch.value.diff == {option: (default, UNUSUAL[option])}


async def test_a_new_stream_has_nats_py_s_defaults(js: JetStreamContext, stream_name: Callable[[], str]) -> None:
    name, other = stream_name(), stream_name()
    await jsx.ensure_stream(js, name=name)
    await js.add_stream(name=other)
    ours, theirs = (await js.stream_info(name)).config, (await js.stream_info(other)).config
    assert {field for field in vars(ours) if getattr(ours, field) != getattr(theirs, field)} == {"name", "subjects"}


async def test_the_defaults_of_a_configuration_are_compared(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    await js.add_stream(name=name, max_msgs_per_subject=1, discard=DiscardPolicy.NEW, deny_purge=True, max_msgs=9)
    with pytest.raises(StreamConfigMismatchError, match=r"only the options that matter \(as keywords\)") as mismatch:
        await jsx.ensure_stream(js, StreamConfig(name=name), max_msgs=9)
    assert mismatch.value.diff == {
        "max_msgs_per_subject": (-1, 1),
        "discard": ("old", "new"),
        "deny_purge": (False, True),
    }


INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({option: value}, error, f"{option} must be {text}")
        for option in ("max_age", "duplicate_window", "subject_delete_marker_ttl")
        for value, error, text in (
            ("1h", TypeError, "a number of seconds, not str"),
            (True, TypeError, "a number of seconds, not bool"),
            (float("nan"), ValueError, "at least 0 seconds, not nan"),
            (-1, ValueError, "at least 0 seconds, not -1"),
            (timedelta(seconds=-1), ValueError, "at least 0 seconds, not -1.0"),
            (float("inf"), ValueError, "at most 9223372036 seconds (292 years), not inf"),
            (1 << 63, ValueError, "at most 9223372036 seconds (292 years), not 9223372036854775808"),
        )
    ),
    ({"max_msgs": "5"}, ValueError, "max_msgs must be an integer of at least -1, not '5'"),
    ({"max_msgs": 5.0}, ValueError, "max_msgs must be an integer of at least -1, not 5.0"),
    ({"max_bytes": -2}, ValueError, "max_bytes must be an integer of at least -1, not -2"),
    ({"max_bytes": 1 << 63}, ValueError, "max_bytes must be an integer from -1 to 9223372036854775807, not 9223372036"),
    ({"max_msg_size": 1 << 31}, ValueError, "max_msg_size must be an integer from -1 to 2147483647, not 2147483648"),
    ({"num_replicas": -1}, ValueError, "num_replicas must be an integer of at least 0, not -1"),
    ({"first_seq": -1}, ValueError, "first_seq must be an integer from 0 to 18446744073709551615, not -1"),
    ({"storage": "mem"}, ValueError, "storage must be 'file' or 'memory', not 'mem'; did you mean 'memory'?"),
    (
        {"retention": "work_queue"},
        ValueError,
        "retention must be 'limits', 'interest' or 'workqueue', not 'work_queue'; did you mean 'workqueue'?",
    ),
    ({"discard": 1}, ValueError, "discard must be 'old' or 'new', not 1"),
    ({"compression": "zstd"}, ValueError, "compression must be 'none' or 's2', not 'zstd'"),
    ({"persist_mode": "sync"}, ValueError, "persist_mode must be 'default' or 'async', not 'sync'"),
    ({"allow_direct": "yes"}, TypeError, "allow_direct must be True or False, not 'yes'"),
    ({"allow_direct": 1}, TypeError, "allow_direct must be True or False, not int"),
    ({"deny_delete": 0}, TypeError, "deny_delete must be True or False, not int"),
    ({"description": 5}, TypeError, "description must be str, not int"),
    ({"metadata": {"a": 1}}, TypeError, "metadata['a'] must be str, not int"),
    ({"metadata": {1: "a"}}, TypeError, "metadata: each key must be str, not int"),
    ({"metadata": "a"}, TypeError, "metadata must be a dict of str to str, not 'a'"),
    ({"placement": "eu"}, TypeError, "placement must be a nats-py Placement, not 'eu'"),
    ({"republish": {}}, TypeError, "republish must be a nats-py RePublish, not dict"),
    ({"subject_transform": {}}, TypeError, "subject_transform must be a nats-py SubjectTransform, not dict"),
    ({"consumer_limits": 5}, TypeError, "consumer_limits must be a nats-py StreamConsumerLimits, not int"),
    (
        {"consumer_limits": StreamConsumerLimits(inactive_threshold="1h")},  # type: ignore[arg-type]
        TypeError,
        "consumer_limits.inactive_threshold must be a number of seconds, not str",
    ),
]


@each("as_config", [False, True])
@each("options, error, text", INVALID)
async def test_an_invalid_option_is_refused_and_nothing_is_sent(
    nc: Client, js: JetStreamContext, options: dict[str, Any], error: type[Exception], text: str, as_config: bool
) -> None:
    sent = nc.stats["out_msgs"]
    config = StreamConfig(name="S", **options) if as_config else None
    with pytest.raises(error, match=re.escape(f"stream 'S': {text}")):
        await jsx.ensure_stream(js, config, **{"name": "S"} if as_config else {"name": "S", **options})
    assert nc.stats["out_msgs"] == sent


async def test_every_option_of_nats_py_is_checked(js: JetStreamContext) -> None:
    for option in {field.name for field in fields(StreamConfig)} - {"name"}:
        with pytest.raises((TypeError, ValueError), match=f"^stream 'S': {option} must be "):
            await jsx.ensure_stream(js, name="S", **{option: object()})  # type: ignore[arg-type]


async def test_a_configuration_that_the_server_changed_is_an_error(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    with pytest.raises(StreamConfigMismatchError, match="stored another configuration") as mismatch:
        # Servers silently disable deny_purge together with markers.
        await jsx.ensure_stream(js, name=name, subject_delete_marker_ttl=5, allow_msg_ttl=True, deny_purge=True)
    assert mismatch.value.diff == {"deny_purge": (True, False)}


async def test_a_service_can_call_it_at_every_start(
    nc: Client, js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name = stream_name()

    def ensure(js: JetStreamContext) -> Any:
        return jsx.ensure_stream(
            js, name=name, subjects=[f"{name}.>"], max_age=3600, storage="memory", compression="s2", discard="old",
            retention="limits", max_msgs=1000, metadata={"owner": "me"}, **ALL_ON,
        )  # fmt: skip

    clients = [await nats.connect(nc.connected_url.geturl()) for _ in range(8)]
    try:
        found = await asyncio.gather(*(ensure(client.jetstream(timeout=30)) for client in clients))
    finally:
        for client in clients:
            await client.close()
    assert len({str(info.created) for info in found}) == 1
    before = vars((await js.stream_info(name)).config)
    sent = nc.stats["out_msgs"]
    await ensure(js)
    assert nc.stats["out_msgs"] == sent + 1
    assert vars((await js.stream_info(name)).config) == before


@each(
    "arguments, options, text",
    [
        ((), {"max_agee": 1}, "ensure_stream() has no option 'max_agee'; did you mean 'max_age'?"),
        ((), {"replicas": 3}, "ensure_stream() has no option 'replicas'; did you mean 'num_replicas'?"),
        ((), {"subject": "a.>"}, "ensure_stream() has no option 'subject'; did you mean 'subjects'?"),
        ((), {"zzz": 3}, "ensure_stream() has no option 'zzz'; its options are allow_atomic, allow_batched,"),
        (("ORDERS",), {}, "config must be a nats-py StreamConfig, not 'ORDERS'; give name='ORDERS'"),
        (({"name": "S"},), {}, "config must be a nats-py StreamConfig, not dict"),
        ((), {"subjects": "a.>"}, "stream 'S': subjects must be a list of str, not 'a.>'; give ['a.>']"),
        ((), {"subjects": ["a.>", 5]}, "stream 'S': subjects[1] must be str, not int"),
        (
            (),
            {"sources": StreamSource(name="A")},
            "stream 'S': sources must be a list of StreamSource, not StreamSource",
        ),
        ((), {"sources": "A"}, "sources must be a list of StreamSource, not 'A'"),
        ((), {"sources": ["A"]}, "sources[0] must be a nats-py StreamSource, not 'A'"),
        ((), {"sources": [None]}, "sources[0] must be a nats-py StreamSource, not NoneType"),
        ((), {"mirror": "A"}, "mirror must be a nats-py StreamSource, not 'A'"),
    ],
)
async def test_wrong_arguments_are_refused_with_what_is_meant(
    js: JetStreamContext, arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        await jsx.ensure_stream(js, *arguments, name="S", **options)


async def test_a_difference_is_shown_without_what_is_not_set(
    js: JetStreamContext, stream_name: Callable[[], str]
) -> None:
    name, origin = stream_name(), stream_name()
    await js.add_stream(name=name, subjects=["a" + name], storage="memory")
    text = (
        f"subjects is ['a{name}'], not ['b{name}'], storage is 'memory', not 'file', sources is None, not "
        f"[StreamSource(name='{origin}')]"
    )
    with pytest.raises(StreamConfigMismatchError, match=re.escape(text)):
        await jsx.ensure_stream(
            js, name=name, subjects=["b" + name], storage=StorageType.FILE, sources=[StreamSource(name=origin)]
        )


async def test_a_text_that_is_no_time_is_refused_and_nothing_is_sent(nc: Client, js: JetStreamContext) -> None:
    sent = nc.stats["out_msgs"]
    entry = StreamSource(name="A", opt_start_time="yesterday")  # type: ignore[arg-type]
    for given in ({"mirror": entry}, {"sources": [entry]}):
        with pytest.raises(ValueError, match="yesterday"):
            await jsx.ensure_stream(js, name="S", **given)  # type: ignore[arg-type]
    assert nc.stats["out_msgs"] == sent


@each("name", [None, "", "a.b", "a b", "a>"])
async def test_an_invalid_name_is_refused(js: JetStreamContext, name: str | None) -> None:
    with pytest.raises(ValueError, match="stream name"):
        await jsx.ensure_stream(js, StreamConfig(name=name))
    with pytest.raises(ValueError, match="timeout"):
        await jsx.ensure_stream(js, name="S", timeout=0)
    with pytest.raises(TypeError):
        await jsx.ensure_stream(js, name="S", no_such_field=1)


class Canned:
    """A JetStream API that gives the canned answers for each kind of request in turn."""

    def __init__(self, nc: Client, prefix: str, **answers: list[dict[str, Any] | None]) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.js = nc.jetstream(prefix=prefix, timeout=30)
        self._nc = nc
        self._prefix = prefix
        self._answers = answers

    async def start(self) -> "Canned":
        await self._nc.subscribe(f"{self._prefix}.>", cb=self._answer)
        return self

    async def _answer(self, msg: Msg) -> None:
        kind = msg.subject.removeprefix(f"{self._prefix}.").removesuffix(".S").replace("STREAM.", "").lower()
        self.asked.append((kind, json.loads(msg.data or b"{}")))
        answer = self._answers["account" if msg.subject == f"{self._prefix}.INFO" else kind].pop(0)
        if answer is not None:
            await msg.respond(json.dumps(answer).encode())


STATE = {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0, "consumer_count": 0}
MISSING = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
EXISTS = {"error": {"code": 400, "err_code": 10058, "description": "stream name already in use"}}


def answer(**config: Any) -> dict[str, Any]:
    full = {"name": "S", "discard": "old", "max_msgs_per_subject": -1, "max_msg_size": -1}
    return {"config": full | config, "state": STATE}


@each(
    "option, level",
    [
        ("allow_msg_ttl", 1),
        ("subject_delete_marker_ttl", 1),
        ("allow_atomic", 2),
        ("allow_msg_counter", 2),
        ("allow_msg_schedules", 2),
        ("allow_batched", 4),
    ],
)
async def test_an_old_server_is_refused_before_anything_is_created(
    nc: Client, stream_name: Callable[[], str], option: str, level: int
) -> None:
    account = {"api": {"level": level - 1}} if level > 1 else {"api": {"total": 0}}
    old = await Canned(nc, stream_name(), info=[MISSING, answer()], account=[account, account]).start()
    for what in ("created", "changed"):
        if what == "changed" and not option.startswith("allow_"):
            break  # servers enable it only when they create the stream
        with pytest.raises(UnsupportedFeatureError, match=f"nothing was {what}") as refused:
            await jsx.ensure_stream(old.js, name="S", **{option: 5 if option == "subject_delete_marker_ttl" else True})
        assert refused.value.required_api_level == level
    assert {kind for kind, _ in old.asked} == {"info"}


async def test_an_option_that_the_server_dropped_is_unsupported(nc: Client, stream_name: Callable[[], str]) -> None:
    new = {"api": {"level": 9}}
    liar = await Canned(nc, stream_name(), info=[MISSING], account=[new], create=[answer(allow_direct=True)]).start()
    with pytest.raises(UnsupportedFeatureError, match="was created or updated without this feature") as refused:
        await jsx.ensure_stream(liar.js, name="S", allow_direct=True, allow_atomic=True)
    assert refused.value.required_api_level == 2
    liar = await Canned(nc, stream_name(), info=[answer()], account=[new], update=[answer()]).start()
    with pytest.raises(UnsupportedFeatureError):
        await jsx.ensure_stream(liar.js, name="S", allow_batched=True)


async def test_a_stream_that_another_client_creates_meanwhile_is_used(
    nc: Client, stream_name: Callable[[], str]
) -> None:
    found = answer(allow_direct=True)
    race = await Canned(nc, stream_name(), info=[MISSING, found], create=[EXISTS]).start()
    info = await jsx.ensure_stream(race.js, name="S", allow_direct=True)
    assert info.config.allow_direct
    race = await Canned(nc, stream_name(), info=[MISSING, MISSING], create=[EXISTS]).start()
    with pytest.raises(nats.js.errors.NotFoundError, match="'S' does not exist"):
        await jsx.ensure_stream(race.js, name="S")


async def test_an_update_keeps_fields_that_nats_py_does_not_know(nc: Client, stream_name: Callable[[], str]) -> None:
    found = answer(from_the_future={"a": 1})
    future = await Canned(nc, stream_name(), info=[found], update=[answer(allow_direct=True)]).start()
    await jsx.ensure_stream(future.js, name="S", allow_direct=True)
    assert future.asked[-1] == ("update", found["config"] | {"allow_direct": True})


async def test_a_timeout_and_a_cancellation_leave_nothing_behind(
    nc: Client, stream_name: Callable[[], str], leak_check: Any, has_only: Any
) -> None:
    silent = await Canned(nc, stream_name(), info=[None, None]).start()
    before = set(nc._subs)
    with pytest.raises(RequestTimeoutError):
        await jsx.ensure_stream(silent.js, name="S", timeout=0.1)
    task = asyncio.create_task(jsx.ensure_stream(silent.js, name="S"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await has_only(nc, before)
    with pytest.raises(nats.js.errors.ServiceUnavailableError):
        await jsx.ensure_stream(nc.jetstream(prefix=stream_name()), name="S")


class TestAdvice:
    """Errors about streams that others have, or that differ, say what to do."""

    async def test_every_stream_with_one_of_the_subjects_is_named(
        self, js: JetStreamContext, stream_name: Callable[[], str]
    ) -> None:
        first, second, name = *sorted([stream_name(), stream_name()]), stream_name()
        for other in (first, second):
            await js.add_stream(name=other, subjects=[f"{name}.{other}.>"])
        with pytest.raises(ServerError, match=f"nothing was created: .*{first}.*{second}.*sources=") as caught:
            await jsx.ensure_stream(js, name=name, subjects=[f"{name}.*.a", "free"])
        assert (caught.value.code, caught.value.err_code) == (400, 10065)

    async def test_a_stream_with_the_default_subject_is_named(
        self, js: JetStreamContext, stream_name: Callable[[], str]
    ) -> None:
        first, second = stream_name(), stream_name()
        await js.add_stream(name=first, subjects=[second])
        with pytest.raises(ServerError, match=f"stream '{first}' stores messages on '{second}'") as caught:
            await jsx.ensure_stream(js, name=second)
        assert caught.value.err_code == 10065

    async def test_a_mirror_that_is_made_durable_must_be_created_again(
        self, js: JetStreamContext, stream_name: Callable[[], str]
    ) -> None:
        origin, name = stream_name(), stream_name()
        await js.add_stream(name=origin)
        await jsx.ensure_stream(js, name=name, mirror=StreamSource(name=origin))
        durable = StreamSource(name=origin, consumer=StreamConsumerSource(name="c", deliver_subject="d"))
        with pytest.raises(StreamConfigMismatchError, match=r"never change a mirror \(10055\)"):
            await jsx.ensure_stream(js, name=name, mirror=durable)
