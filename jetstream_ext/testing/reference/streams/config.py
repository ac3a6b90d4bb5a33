"""Stream configurations: fields, defaults, and the checks of create and update requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..releases import Profile
from ..wire import golang, subjects
from ..wire.errors import ApiError, Rule, api_error, refuse
from ..wire.golang import BOOL, DURATION, INT, NOT_MODELLED, STRING, STRING_MAP, STRINGS, TIME, UINT, one_of

StreamConfig = dict[str, Any]
"""The fields by their JSON names, all of them present; times and durations are nanoseconds."""


@dataclass(frozen=True, slots=True)
class Field:
    kind: golang.Kind
    default: Any
    shown: bool = False
    """Whether replies show the field even if it has the default."""
    since: str = ""
    """The row of `Profile` that knows the field; empty for all releases."""


_SOURCE: dict[str, golang.Kind] = {
    "name": STRING,
    "opt_start_seq": UINT,
    "opt_start_time": TIME,
    "filter_subject": STRING,
    "subject_transforms": NOT_MODELLED,
    "external": NOT_MODELLED,
}
_FIELDS: dict[str, Field] = {
    "name": Field(STRING, "", shown=True),
    "description": Field(STRING, ""),
    "subjects": Field(STRINGS, []),
    "retention": Field(one_of("limits", "interest", "workqueue"), "limits", shown=True),
    "max_consumers": Field(INT, -1, shown=True),
    "max_msgs": Field(INT, -1, shown=True),
    "max_bytes": Field(INT, -1, shown=True),
    "max_age": Field(DURATION, 0, shown=True),
    "max_msgs_per_subject": Field(INT, -1, shown=True),
    "max_msg_size": Field(INT, -1),
    "discard": Field(one_of("old", "new"), "old", shown=True),
    "storage": Field(one_of("file", "memory"), "file", shown=True),
    "num_replicas": Field(INT, 1, shown=True),
    "no_ack": Field(BOOL, False),
    "duplicate_window": Field(DURATION, 0),
    "mirror": Field(_SOURCE, {}),
    "sources": Field((_SOURCE,), []),
    "compression": Field(one_of("none", "s2"), "none", shown=True),
    "first_seq": Field(UINT, 0),
    "allow_direct": Field(BOOL, False, shown=True),
    "mirror_direct": Field(BOOL, False, shown=True),
    "discard_new_per_subject": Field(NOT_MODELLED, None),
    "sealed": Field(NOT_MODELLED, False, shown=True),
    "deny_delete": Field(BOOL, False, shown=True),
    "deny_purge": Field(BOOL, False, shown=True),
    "allow_rollup_hdrs": Field(BOOL, False, shown=True),
    "consumer_limits": Field(NOT_MODELLED, {}, shown=True),
    "allow_msg_ttl": Field(BOOL, False, shown=True, since="ttl"),
    "subject_delete_marker_ttl": Field(DURATION, 0, since="ttl"),
    "allow_atomic": Field(BOOL, False, since="atomic"),
    "allow_batched": Field(BOOL, False, since="fast"),
    "metadata": Field(STRING_MAP, {}),
    "placement": Field(NOT_MODELLED, None),
    "subject_transform": Field(NOT_MODELLED, None),
    "republish": Field(NOT_MODELLED, None),
    "allow_msg_counter": Field(NOT_MODELLED, None, since="counters"),
    "allow_msg_schedules": Field(NOT_MODELLED, None, since="schedules"),
    "persist_mode": Field(NOT_MODELLED, None, since="atomic"),
}
_SHORTEST = 100 * golang.MILLISECOND


def known_fields(table: dict[str, Field], profile: Profile) -> dict[str, Field]:
    return {name: each for name, each in table.items() if not each.since or getattr(profile, each.since)}


def request_schema(profile: Profile) -> golang.Schema:
    fields = {name: each.kind for name, each in known_fields(_FIELDS, profile).items()}
    if profile.durable_sourcing:
        managed: dict[str, golang.Kind] = {"server_managed": BOOL} if profile.draft else {}
        source = _SOURCE | {"consumer": {"name": STRING, "deliver_subject": STRING, **managed}}
        fields |= {"mirror": source, "sources": (source,)}
    if profile.draft:
        fields["limits_ttl"] = DURATION
    return {**fields, "pedantic": NOT_MODELLED}


def invalid_config(text: str) -> ApiError:
    return api_error(10052, text)


def is_asset_name(name: str) -> bool:
    return bool(name) and not any(char in ". \t\r\n\f*>\\/" for char in name)


_RULES: list[Rule] = [
    (
        lambda c: not is_asset_name(c["name"]),
        10052,
        "stream name is required and can not contain '.', '*', '>', '\\', '/'",
    ),
    (lambda c: len(c["name"]) > 255, 10052, "stream name is too long, maximum allowed is 255"),
    (lambda c: c["num_replicas"] < 0, 10133, ""),
    (lambda c: c["max_age"] < 0, 10052, "max age can not be negative"),
    (lambda c: 0 < c["max_age"] < _SHORTEST, 10052, "max age needs to be >= 100ms"),
    (lambda c: c["duplicate_window"] < 0, 10052, "duplicates window can not be negative"),
    (
        lambda c: 0 < c["max_age"] < c["duplicate_window"],
        10052,
        "duplicates window can not be larger then max age",
    ),
    (lambda c: 0 < c["duplicate_window"] < _SHORTEST, 10052, "duplicates window needs to be >= 100ms"),
    (lambda c: c["deny_purge"] and c["allow_rollup_hdrs"], 10052, "roll-ups require the purge permission"),
    (lambda c: c["subject_delete_marker_ttl"] < 0, 10052, "subject delete marker TTL must not be negative"),
    (
        lambda c: 0 < c["subject_delete_marker_ttl"] < golang.SECOND,
        10052,
        "subject delete marker TTL must be at least 1 second",
    ),
]
_MIRROR_RULES: list[Rule] = [
    (lambda c: c["first_seq"], 10143, ""),
    (lambda c: c["subjects"], 10034, ""),
    (lambda c: c["sources"], 10031, ""),
    (lambda c: c["allow_atomic"], 10198, ""),
    (lambda c: c["allow_batched"], 10209, ""),
    (lambda c: "consumer" in c["mirror"] and not _is_durable_source(c["mirror"]), 10213, ""),
    (lambda c: c["subject_delete_marker_ttl"] > 0, 10052, "subject delete markers forbidden on mirrors"),
    (lambda c: not is_asset_name(c["mirror"].get("name", "")), 10142, ""),
]


def check_create(request: dict[str, Any], profile: Profile, find: Callable[[str], StreamConfig | None]) -> StreamConfig:
    """Return the configuration of a create request with the defaults filled in, or raise an `ApiError`.

    `find` looks up the configuration of another stream.
    """
    config = {name: request.get(name, each.default) for name, each in _FIELDS.items()}
    if "limits_ttl" in request:
        config["subject_delete_marker_ttl"] = request["limits_ttl"]
    config["num_replicas"] = config["num_replicas"] or 1
    for name in ("max_msgs", "max_msgs_per_subject", "max_bytes", "max_msg_size", "max_consumers"):
        config[name] = max(config[name], 0) or -1
    if config["duplicate_window"] == 0 and not config["mirror"] and not config["sources"]:
        config["duplicate_window"] = min(max(config["max_age"], 0) or 2 * golang.MINUTE, 2 * golang.MINUTE)
    refuse(_RULES, config)
    if config["subject_delete_marker_ttl"] > 0:
        config.update(deny_purge=False, allow_msg_ttl=True, allow_rollup_hdrs=True)
    if config["mirror"]:
        refuse(_MIRROR_RULES, config)
        origin = find(config["mirror"]["name"])
        config["mirror_direct"] = origin["allow_direct"] if origin is not None else config["mirror_direct"]
    _check_sources(config)
    if _reaches(config, config["name"], find):
        raise invalid_config("detected cycle")
    _check_subjects(config)
    if profile.draft:
        config["allow_direct"] = config["max_msgs_per_subject"] > 0  # the field of the request has no effect
    return config


def _is_durable_source(source: dict[str, Any]) -> bool:
    consumer = source["consumer"]
    if not is_asset_name(consumer.get("name", "")):
        return False
    if consumer.get("server_managed"):
        return True
    if not subjects.is_literal(consumer.get("deliver_subject", "")):
        return False
    return not any(source.get(name) for name in ("opt_start_seq", "opt_start_time", "filter_subject"))


def _check_sources(config: StreamConfig) -> None:
    seen: list[Any] = []
    consumers: list[Any] = []
    for source in config["sources"]:
        if not is_asset_name(source.get("name", "")):
            raise api_error(10141)
        identity = (source["name"], source.get("filter_subject"))
        if identity in seen and not ("consumer" in source and source["consumer"] not in consumers):
            raise api_error(10140)
        seen.append(identity)
        if "consumer" in source:
            if not _is_durable_source(source):
                raise api_error(10215)
            name = (source["name"], source["consumer"]["name"])
            if name in consumers:
                raise api_error(10216)
            consumers.append(name)


def _reaches(config: StreamConfig, name: str, find: Callable[[str], StreamConfig | None]) -> bool:
    """Whether a stream copies, directly or through others, the stream with this name."""
    origins = [source["name"] for source in (*config["sources"], *([config["mirror"]] if config["mirror"] else []))]
    found = [find(origin) for origin in origins]
    return name in origins or any(each is not None and _reaches(each, name, find) for each in found)


_RESERVED = {"$JS.>": "jetstream", "$JSC.>": "jetstream", "$NRG.>": "jetstream", "$SYS.>": "system"}


def _check_subjects(config: StreamConfig) -> None:
    wanted = list(config["subjects"])
    if not wanted and not config["mirror"] and not config["sources"]:
        wanted = [config["name"]]
    for index, subject in enumerate(wanted):
        if not subjects.is_valid(subject):
            raise invalid_config("invalid subject")
        if subject in wanted[:index]:
            raise invalid_config("duplicate subjects detected")
        if not config["no_ack"]:
            if subject == ">":
                raise invalid_config("capturing all subjects requires no-ack to be true")
            events = subjects.is_subset(subject, "$JS.EVENT.>") or subjects.is_subset(subject, "$SYS.ACCOUNT.>")
            for space, api in _RESERVED.items():
                if subjects.collide(subject, space) and not events:
                    raise invalid_config(f"subjects that overlap with {api} api require no-ack to be true")
        for other in wanted[index + 1 :]:
            if subjects.collide(other, subject):
                raise invalid_config(f'subject "{subject}" overlaps with "{other}"')
    config["subjects"] = wanted


def check_update(old: StreamConfig, new: StreamConfig) -> None:
    """Raise an `ApiError` if a configuration may not replace another."""
    if new["num_replicas"] > 1:
        raise api_error(10074)
    if new["storage"] != old["storage"]:
        raise invalid_config("stream configuration update can not change storage type")
    if new["retention"] != old["retention"] and "workqueue" in (new["retention"], old["retention"]):
        raise invalid_config("stream configuration update can not change retention policy to/from workqueue")
    for name, what in (("deny_delete", "cancel deny message deletes"), ("deny_purge", "cancel deny purge")):
        if old[name] and not new[name]:
            raise invalid_config(f"stream configuration update can not {what}")
    if new["mirror"] and new["mirror"] != old["mirror"]:
        raise api_error(10055)
    if old["allow_msg_ttl"] and not new["allow_msg_ttl"]:
        raise invalid_config("message TTL status can not be disabled")


def config_json(config: StreamConfig, profile: Profile) -> dict[str, Any]:
    """Return a configuration as replies show it."""
    known = known_fields(_FIELDS, profile).items()
    shown = {name: config[name] for name, each in known if each.shown or config[name]}
    if profile.draft and config["subject_delete_marker_ttl"]:
        shown["limits_ttl"] = config["subject_delete_marker_ttl"]
    if config["mirror"]:
        shown["mirror"] = _source_json(config["mirror"])
    if config["sources"]:
        shown["sources"] = [_source_json(source) for source in config["sources"]]
    if profile.metadata:
        shown["metadata"] = metadata_json(config, profile, _required_level(config, profile))
    return shown


def metadata_json(config: dict[str, Any], profile: Profile, level: int) -> dict[str, str]:
    """Return the metadata of a configuration, including the server's: API levels and version."""
    own = {"_nats.level": str(profile.api_level), "_nats.req.level": str(level), "_nats.ver": profile.version}
    return {**config["metadata"], **own}


def _required_level(config: StreamConfig, profile: Profile) -> int:
    if config["allow_batched"]:
        return 3 if profile.draft else 4
    if config["allow_atomic"]:
        return 2
    return 1 if config["allow_msg_ttl"] or config["subject_delete_marker_ttl"] else 0


def _source_json(source: dict[str, Any]) -> dict[str, Any]:
    shown = {name: source[name] for name in (*_SOURCE, "consumer") if source.get(name)}
    if "opt_start_time" in shown:
        shown["opt_start_time"] = golang.rfc3339(shown["opt_start_time"])
    return shown
