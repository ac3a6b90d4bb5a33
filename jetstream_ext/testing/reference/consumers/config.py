"""Consumer configurations: fields, defaults, and the checks of create and update requests."""

from typing import Any

from ..releases import Profile
from ..streams.config import Field, StreamConfig, invalid_config, is_asset_name, known_fields, metadata_json
from ..wire import golang, subjects
from ..wire.errors import ApiError, api_error
from ..wire.golang import BOOL, DURATION, DURATIONS, INT, STRING, STRING_MAP, STRINGS, TIME, UINT, Enum, Struct

ConsumerConfig = dict[str, Any]
"""The fields by their JSON names, all of them present; times and durations are nanoseconds."""

_POLICIES = Enum(("all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"))
_ACKS = ("none", "all", "explicit")
_FIELDS: dict[str, Field] = {
    "durable_name": Field(STRING, ""),
    "name": Field(STRING, ""),
    "description": Field(STRING, ""),
    "deliver_policy": Field(_POLICIES, "all", shown=True),
    "opt_start_seq": Field(UINT, 0),
    "opt_start_time": Field(TIME, None),
    "ack_policy": Field(Enum(_ACKS), "none", shown=True),
    "ack_wait": Field(DURATION, 0),
    "max_deliver": Field(INT, 0),
    "backoff": Field(DURATIONS, []),
    "filter_subject": Field(STRING, ""),
    "filter_subjects": Field(STRINGS, []),
    "replay_policy": Field(Enum(("instant", "original")), "instant", shown=True),
    "rate_limit_bps": Field(UINT, 0),
    "sample_freq": Field(STRING, ""),
    "max_waiting": Field(INT, 0),
    "max_ack_pending": Field(INT, 0),
    "flow_control": Field(BOOL, False),
    "headers_only": Field(BOOL, False),
    "max_batch": Field(INT, 0),
    "max_expires": Field(DURATION, 0),
    "max_bytes": Field(INT, 0),
    "deliver_subject": Field(STRING, ""),
    "deliver_group": Field(STRING, ""),
    "idle_heartbeat": Field(DURATION, 0),
    "inactive_threshold": Field(DURATION, 0),
    "num_replicas": Field(INT, 0, shown=True),
    "mem_storage": Field(BOOL, False),
    "direct": Field(BOOL, False),
    "sourcing": Field(BOOL, False, since="durable_sourcing"),
    "metadata": Field(STRING_MAP, {}),
    "pause_until": Field(TIME, None),
}
_ACK_WAIT = 30 * golang.SECOND
_MAX_WAITING = 512
_MAX_ACK_PENDING = 1000
_EPHEMERAL_THRESHOLD = 5 * golang.SECOND
_SOURCING_HEARTBEAT = golang.SECOND


def consumer_schema(profile: Profile) -> Struct:
    fields = {name: each.kind for name, each in known_fields(_FIELDS, profile).items()}
    if profile.durable_sourcing:
        fields["ack_policy"] = Enum((*_ACKS, "flow_control"))
    return Struct(
        "CreateConsumerRequest",
        {
            "stream_name": STRING,
            "config": Struct("ConsumerConfig", fields),
            "action": Enum(("", "create", "update")),
            "pedantic": BOOL,
        },
    )


def check_consumer(
    request: dict[str, Any], stream: StreamConfig, profile: Profile, *, pedantic: bool
) -> ConsumerConfig:
    """Return the configuration of a create request with the defaults filled in, or raise an `ApiError`."""
    config = {name: each.default for name, each in _FIELDS.items()} | request
    _set_defaults(config, stream, profile, pedantic)
    for name, what in (("name", "consumer name"), ("durable_name", "consumer durable name")):
        if config[name] and not is_asset_name(config[name]):
            raise invalid_config(f"{what} can not contain '.', '*', '>', '\\', '/'")
    if config["num_replicas"] < 0:
        raise api_error(10133)
    if config["ack_policy"] == "flow_control":
        _check_flow_control_acks(config)
    backoff = config["backoff"]
    if backoff and config["max_deliver"] != -1 and len(backoff) > config["max_deliver"]:
        raise api_error(10116)
    if config["deliver_subject"]:
        _check_push(config, stream)
    else:
        _check_pull(config, stream, profile)
    _check_filters(config)
    _check_start(config)
    if config["flow_control"] and not config["idle_heartbeat"]:
        raise api_error(10108)
    if config["durable_name"] and config["name"] and config["durable_name"] != config["name"]:
        raise api_error(10132)
    return config


def _set_defaults(config: ConsumerConfig, stream: StreamConfig, profile: Profile, pedantic: bool) -> None:
    if config["max_deliver"] == 0 or (config["max_deliver"] < -1 and profile.strict_config):
        config["max_deliver"] = -1
    for name in ("max_waiting", "max_batch", "max_expires", "max_bytes", "idle_heartbeat", "inactive_threshold"):
        config[name] = max(config[name], 0)
    if profile.strict_config:
        config["max_ack_pending"] = max(config["max_ack_pending"], -1)
    if not config["deliver_subject"] and not config["max_waiting"]:
        config["max_waiting"] = _MAX_WAITING
    if not config["ack_wait"] and config["ack_policy"] in ("explicit", "all"):
        config["ack_wait"] = _ACK_WAIT
    if config["backoff"]:
        config["ack_wait"] = config["backoff"][0]
    limits = stream["consumer_limits"]
    config["max_ack_pending"] = config["max_ack_pending"] or limits.get("max_ack_pending", 0)
    config["inactive_threshold"] = config["inactive_threshold"] or limits.get("inactive_threshold", 0)
    if not config["max_ack_pending"] and config["ack_policy"] != "none":
        config["max_ack_pending"] = _MAX_ACK_PENDING
    if config["ack_policy"] == "flow_control" and not pedantic:
        config["flow_control"] = True
        config["idle_heartbeat"] = _SOURCING_HEARTBEAT


def _check_flow_control_acks(config: ConsumerConfig) -> None:
    if not config["deliver_subject"]:
        raise api_error(10218)
    if not config["flow_control"]:
        raise api_error(10219)
    if config["idle_heartbeat"] != _SOURCING_HEARTBEAT:
        raise invalid_config("flow control ack policy heartbeat needs to be 1s")
    if config["max_ack_pending"] <= 0:
        raise api_error(10220)
    if config["ack_wait"] or config["backoff"]:
        raise api_error(10221)
    if config["max_deliver"] > 0:
        raise api_error(10222)


def _check_push(config: ConsumerConfig, stream: StreamConfig) -> None:
    target = config["deliver_subject"]
    if subjects.has_wildcard(target):
        raise api_error(10079)
    if not subjects.is_valid(target):
        raise api_error(10112)
    if any(subjects.collide(subject, target) for subject in stream["subjects"]):
        raise api_error(10081)
    if config["max_waiting"]:
        raise api_error(10080)
    if config["max_ack_pending"] > 0 and config["ack_policy"] == "none":
        raise api_error(10082)
    if 0 < config["idle_heartbeat"] < 100 * golang.MILLISECOND:
        raise api_error(10083)


def _check_pull(config: ConsumerConfig, stream: StreamConfig, profile: Profile) -> None:
    if config["ack_policy"] == "none" and stream["retention"] == "workqueue":
        if not profile.workqueue_ack_text:
            raise ApiError(400, 10084, "consumer in pull mode requires ack policy")
        raise api_error(10084)
    if config["rate_limit_bps"]:
        raise api_error(10086)
    if config["idle_heartbeat"]:
        raise api_error(10088)
    if config["flow_control"]:
        raise api_error(10089)
    if 0 < config["max_expires"] < golang.MILLISECOND:
        raise api_error(10115)


def _check_filters(config: ConsumerConfig) -> None:
    many = config["filter_subjects"]
    if config["filter_subject"] and many:
        raise api_error(10136)
    if config["filter_subject"] and not subjects.is_valid(config["filter_subject"]):
        raise invalid_config("invalid subject")
    if "" in many:
        raise api_error(10139)
    for index, one in enumerate(many):
        if not subjects.is_valid(one):
            raise invalid_config("invalid subject")
        if any(subjects.is_subset(one, other) for position, other in enumerate(many) if position != index):
            raise api_error(10138)


def _check_start(config: ConsumerConfig) -> None:
    policy = config["deliver_policy"]
    words = policy.replace("_", " ")
    has_seq, has_time = bool(config["opt_start_seq"]), config["opt_start_time"] is not None
    unset = "consumer delivery policy is deliver {}, but optional {} is not set"
    also = "consumer delivery policy is deliver {}, but optional start {} is also set"
    if policy == "by_start_sequence" and not has_seq:
        raise api_error(10094, unset.format(words, "start sequence"))
    if policy == "by_start_time" and not has_time:
        raise api_error(10094, unset.format(words, "start time"))
    if has_seq and policy != "by_start_sequence":
        what = "start sequence" if policy == "by_start_time" else "sequence"
        raise api_error(10094, also.format(words, what))
    if has_time and policy != "by_start_time":
        raise api_error(10094, also.format(words, "time"))
    if policy == "last_per_subject" and not config["filter_subject"] and not config["filter_subjects"]:
        raise api_error(10094, unset.format(words, "filter subject"))


def set_inactive_threshold(config: ConsumerConfig) -> None:
    if not config["durable_name"] and config["inactive_threshold"] <= 0:
        config["inactive_threshold"] = _EPHEMERAL_THRESHOLD


def check_consumer_update(old: ConsumerConfig, new: ConsumerConfig, *, bound: bool) -> None:
    """Raise an `ApiError` if a configuration may not replace another.

    `bound` says whether the old deliver subject has a subscriber.
    """
    fixed = (
        ("deliver_policy", "deliver policy"),
        ("mem_storage", "storage type"),
        ("opt_start_seq", "start sequence"),
        ("opt_start_time", "start time"),
        ("ack_policy", "ack policy"),
        ("replay_policy", "replay policy"),
        ("idle_heartbeat", "heart beats"),
        ("flow_control", "flow control"),
    )
    for name, what in fixed:
        if old[name] != new[name]:
            raise api_error(10012, f"{what} can not be updated")
    if old["deliver_subject"] != new["deliver_subject"]:
        if not old["deliver_subject"]:
            raise api_error(10012, "can not update pull consumer to push based")
        if not new["deliver_subject"]:
            raise api_error(10012, "can not update push consumer to pull based")
        if bound:
            raise api_error(10013)
    if old["max_waiting"] != new["max_waiting"]:
        raise api_error(10012, "max waiting can not be updated")


def consumer_json(config: ConsumerConfig, profile: Profile, *, stored: bool = False) -> dict[str, Any]:
    """Return a configuration as replies show it; `stored` leaves out the fields of the running server."""
    shown = {name: config[name] for name, each in _FIELDS.items() if config[name] or each.shown}
    for name in ("opt_start_time", "pause_until"):
        if config[name] is not None:
            shown[name] = golang.rfc3339(config[name])
    if profile.metadata:
        level = 4 if config["ack_policy"] == "flow_control" else 1 if config["pause_until"] is not None else 0
        metadata = metadata_json(config, profile, level, stored=stored)
        pause = {"pause_until": shown.pop("pause_until")} if "pause_until" in shown else {}
        shown.pop("metadata", None)
        shown |= {"metadata": metadata, **pause}
    return shown
