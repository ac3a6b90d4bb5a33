"""Consumer configurations: fields, defaults, and the checks of create and update requests."""

from itertools import permutations
from typing import Any

from ..releases import Profile
from ..streams.config import Field, StreamConfig, is_asset_name, known_fields, metadata_json
from ..wire import golang, subjects
from ..wire.errors import Rule, refuse
from ..wire.golang import (
    BOOL,
    DURATION,
    DURATIONS,
    INT,
    NOT_MODELLED,
    STRING,
    STRING_MAP,
    STRINGS,
    TIME,
    UINT,
    one_of,
)

ConsumerConfig = dict[str, Any]
"""The fields by their JSON names, all of them present; times and durations are nanoseconds."""

_POLICIES = one_of("all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject")
_ACKS = ("none", "all", "explicit")
_FIELDS: dict[str, Field] = {
    "durable_name": Field(STRING, ""),
    "name": Field(STRING, ""),
    "description": Field(STRING, ""),
    "deliver_policy": Field(_POLICIES, "all", shown=True),
    "opt_start_seq": Field(UINT, 0),
    "opt_start_time": Field(TIME, None),
    "ack_policy": Field(one_of(*_ACKS), "none", shown=True),
    "ack_wait": Field(DURATION, 0),
    "max_deliver": Field(INT, 0),
    "backoff": Field(DURATIONS, []),
    "filter_subject": Field(STRING, ""),
    "filter_subjects": Field(STRINGS, []),
    "max_waiting": Field(INT, 0),
    "max_ack_pending": Field(INT, 0),
    "flow_control": Field(BOOL, False),
    "headers_only": Field(BOOL, False),
    "deliver_subject": Field(STRING, ""),
    "deliver_group": Field(STRING, ""),
    "idle_heartbeat": Field(DURATION, 0),
    "inactive_threshold": Field(DURATION, 0),
    "num_replicas": Field(INT, 0, shown=True),
    "mem_storage": Field(BOOL, False),
    "metadata": Field(STRING_MAP, {}),
    "max_batch": Field(NOT_MODELLED, None),
    "max_expires": Field(NOT_MODELLED, None),
    "max_bytes": Field(NOT_MODELLED, None),
    "pause_until": Field(NOT_MODELLED, None, since="pause"),
    "replay_policy": Field(NOT_MODELLED, "instant", shown=True),
    "rate_limit_bps": Field(NOT_MODELLED, None),
    "sample_freq": Field(NOT_MODELLED, None),
    "direct": Field(NOT_MODELLED, None),
    "sourcing": Field(NOT_MODELLED, False, since="durable_sourcing"),  # the server's own consumers have it
    "priority_groups": Field(NOT_MODELLED, None, since="priorities"),
    "priority_policy": Field(NOT_MODELLED, None, since="priorities"),
    "priority_timeout": Field(NOT_MODELLED, None, since="priorities"),
}
_ACK_WAIT = 30 * golang.SECOND
_MAX_WAITING = 512
_MAX_ACK_PENDING = 1000
_EPHEMERAL_THRESHOLD = 5 * golang.SECOND
_SOURCING_HEARTBEAT = golang.SECOND


def consumer_schema(profile: Profile) -> golang.Schema:
    fields = {name: each.kind for name, each in known_fields(_FIELDS, profile).items()}
    if profile.durable_sourcing:
        fields["ack_policy"] = one_of(*_ACKS, "flow_control")
    action = one_of("", "create", "update")
    return {"stream_name": STRING, "config": fields, "action": action, "pedantic": NOT_MODELLED}


_NO_NAME = "{} can not contain '.', '*', '>', '\\', '/'"
_ALL_RULES: list[Rule] = [
    (lambda c: c["name"] and not is_asset_name(c["name"]), 10052, _NO_NAME.format("consumer name")),
    (
        lambda c: c["durable_name"] and not is_asset_name(c["durable_name"]),
        10052,
        _NO_NAME.format("consumer durable name"),
    ),
    (lambda c: c["num_replicas"] < 0, 10133, ""),
    (lambda c: 0 < c["max_deliver"] < len(c["backoff"]), 10116, ""),
]
_FLOW_CONTROL_RULES: list[Rule] = [
    (lambda c: not c["deliver_subject"], 10218, ""),
    (lambda c: c["max_ack_pending"] <= 0, 10220, ""),
    (lambda c: c["ack_wait"] or c["backoff"], 10221, ""),
    (lambda c: c["max_deliver"] > 0, 10222, ""),
]
_PUSH_RULES: list[Rule] = [
    (lambda c: subjects.has_wildcard(c["deliver_subject"]), 10079, ""),
    (lambda c: not subjects.is_valid(c["deliver_subject"]), 10112, ""),
    (lambda c: any(subjects.collide(subject, c["deliver_subject"]) for subject in c["stream"]["subjects"]), 10081, ""),
    (lambda c: c["max_waiting"], 10080, ""),
    (lambda c: c["max_ack_pending"] > 0 and c["ack_policy"] == "none", 10082, ""),
    (lambda c: 0 < c["idle_heartbeat"] < 100 * golang.MILLISECOND, 10083, ""),
]
_PULL_RULES: list[Rule] = [
    (lambda c: c["ack_policy"] == "none" and c["stream"]["retention"] == "workqueue", 10084, ""),
    (lambda c: c["idle_heartbeat"], 10088, ""),
    (lambda c: c["flow_control"], 10089, ""),
]
_LAST_RULES: list[Rule] = [
    (lambda c: c["filter_subject"] and c["filter_subjects"], 10136, ""),
    (lambda c: "" in c["filter_subjects"], 10139, ""),
    (lambda c: not all(subjects.is_valid(each) for each in _filters(c)), 10052, "invalid subject"),
    (lambda c: any(subjects.is_subset(*pair) for pair in permutations(c["filter_subjects"], 2)), 10138, ""),
    (lambda c: bool(c["opt_start_seq"]) != (c["deliver_policy"] == "by_start_sequence"), 10094, "start sequence"),
    (lambda c: (c["opt_start_time"] is None) == (c["deliver_policy"] == "by_start_time"), 10094, "start time"),
    (lambda c: c["deliver_policy"] == "last_per_subject" and not _filters(c), 10094, "filter subject"),
    (lambda c: c["flow_control"] and not c["idle_heartbeat"], 10108, ""),
    (lambda c: c["durable_name"] and c["name"] and c["durable_name"] != c["name"], 10132, ""),
]


def check_consumer(request: dict[str, Any], stream: StreamConfig) -> ConsumerConfig:
    """Return the configuration of a create request with the defaults filled in, or raise an `ApiError`."""
    config = {name: each.default for name, each in _FIELDS.items()} | request
    _set_defaults(config)
    acks = _FLOW_CONTROL_RULES if config["ack_policy"] == "flow_control" else []
    delivery = _PUSH_RULES if config["deliver_subject"] else _PULL_RULES
    refuse([*_ALL_RULES, *acks, *delivery, *_LAST_RULES], config | {"stream": stream})
    return config


def _filters(config: ConsumerConfig) -> list[str]:
    return [*config["filter_subjects"], *([config["filter_subject"]] if config["filter_subject"] else [])]


def _set_defaults(config: ConsumerConfig) -> None:
    config["max_deliver"] = config["max_deliver"] if config["max_deliver"] > 0 else -1
    for name in ("max_waiting", "idle_heartbeat", "inactive_threshold"):
        config[name] = max(config[name], 0)
    config["max_ack_pending"] = max(config["max_ack_pending"], -1)
    if not config["durable_name"] and not config["inactive_threshold"]:
        config["inactive_threshold"] = _EPHEMERAL_THRESHOLD
    if not config["deliver_subject"] and not config["max_waiting"]:
        config["max_waiting"] = _MAX_WAITING
    if not config["ack_wait"] and config["ack_policy"] in ("explicit", "all"):
        config["ack_wait"] = _ACK_WAIT
    if config["backoff"]:
        config["ack_wait"] = config["backoff"][0]
    if not config["max_ack_pending"] and config["ack_policy"] != "none":
        config["max_ack_pending"] = _MAX_ACK_PENDING
    if config["ack_policy"] == "flow_control":
        config["flow_control"] = True
        config["idle_heartbeat"] = _SOURCING_HEARTBEAT


def consumer_json(config: ConsumerConfig, profile: Profile) -> dict[str, Any]:
    """Return a configuration as replies show it."""
    shown = {name: config[name] for name, each in _FIELDS.items() if config[name] or each.shown}
    if config["opt_start_time"] is not None:
        shown["opt_start_time"] = golang.rfc3339(config["opt_start_time"])
    if profile.metadata:
        level = 4 if config["ack_policy"] == "flow_control" else 0
        shown["metadata"] = metadata_json(config, profile, level)
    return shown
