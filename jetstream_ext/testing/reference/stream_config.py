"""Stream configurations: what a request may hold, defaults, and the checks of create and update."""

from collections.abc import Callable
from typing import Any

from . import subjects
from .errors import api_error
from .gojson import BOOL, DURATION, INT, STRING, STRING_MAP, STRINGS, TIME, UINT, Enum, ListOf, Struct
from .times import MILLISECOND, MINUTE, SECOND, rfc3339
from .versions import Profile

__all__ = ["StreamConfig", "check_create", "check_update", "config_json", "request_schema"]

StreamConfig = dict[str, Any]
"""The fields by their JSON names, every one present; times are nanoseconds."""

_TRANSFORM = Struct("SubjectTransformConfig", {"src": STRING, "dest": STRING})
_EXTERNAL = Struct("ExternalStream", {"api": STRING, "deliver": STRING})
_DEFAULTS: StreamConfig = {
    "name": "",
    "description": "",
    "subjects": [],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "no_ack": False,
    "duplicate_window": 0,
    "placement": {},
    "mirror": {},
    "sources": [],
    "compression": "none",
    "first_seq": 0,
    "subject_transform": {},
    "republish": {},
    "allow_direct": False,
    "mirror_direct": False,
    "discard_new_per_subject": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
    "subject_delete_marker_ttl": 0,
    "allow_msg_counter": False,
    "allow_atomic": False,
    "allow_msg_schedules": False,
    "persist_mode": "default",
    "allow_batched": False,
    "metadata": {},
}
_SINCE: dict[str, Callable[[Profile], bool]] = {
    "allow_msg_ttl": lambda profile: profile.ttl,
    "subject_delete_marker_ttl": lambda profile: profile.markers,
    "allow_msg_counter": lambda profile: profile.atomic,
    "allow_atomic": lambda profile: profile.atomic,
    "allow_msg_schedules": lambda profile: profile.atomic,
    "persist_mode": lambda profile: profile.atomic,
    "allow_batched": lambda profile: profile.fast,
}
_ALWAYS_SHOWN = frozenset(
    [
        "name",
        "retention",
        "max_consumers",
        "max_msgs",
        "max_bytes",
        "max_age",
        "max_msgs_per_subject",
        "discard",
        "storage",
        "num_replicas",
        "compression",
        "allow_direct",
        "mirror_direct",
        "sealed",
        "deny_delete",
        "deny_purge",
        "allow_rollup_hdrs",
        "consumer_limits",
        "allow_msg_ttl",
    ]
)


def request_schema(profile: Profile) -> Struct:
    """Return what a create or update request may hold."""
    source: dict[str, Any] = {
        "name": STRING,
        "opt_start_seq": UINT,
        "opt_start_time": TIME,
        "filter_subject": STRING,
        "subject_transforms": ListOf(_TRANSFORM),
        "external": _EXTERNAL,
    }
    if profile.durable_sourcing:
        managed = {"server_managed": BOOL} if profile.draft else {}
        consumer = {"name": STRING, "deliver_subject": STRING, **managed}
        source["consumer"] = Struct("StreamConsumerSource", consumer)
    fields: dict[str, Any] = {
        "name": STRING,
        "description": STRING,
        "subjects": STRINGS,
        "retention": Enum(("limits", "interest", "workqueue")),
        "discard": Enum(("old", "new")),
        "storage": Enum(("file", "memory")),
        "placement": Struct("Placement", {"cluster": STRING, "tags": STRINGS, "preferred": STRING}),
        "mirror": Struct("StreamSource", source),
        "sources": ListOf(Struct("StreamSource", source)),
        "compression": Enum(("none", "s2")),
        "first_seq": UINT,
        "subject_transform": _TRANSFORM,
        "republish": Struct("RePublish", {"src": STRING, "dest": STRING, "headers_only": BOOL}),
        "consumer_limits": Struct("StreamConsumerLimits", {"inactive_threshold": DURATION, "max_ack_pending": INT}),
        "persist_mode": Enum(("", "default", "async")),
        "metadata": STRING_MAP,
        "template_owner": STRING,
        "pedantic": BOOL,
    }
    if profile.release >= (2, 12):
        del fields["template_owner"]
    for name, default in _DEFAULTS.items():
        if name not in fields:
            is_time = name in ("max_age", "duplicate_window", "subject_delete_marker_ttl")
            fields[name] = BOOL if isinstance(default, bool) else DURATION if is_time else INT
    if profile.draft:
        fields["limits_ttl"] = DURATION
    unknown = [name for name, known in _SINCE.items() if not known(profile)]
    return Struct("StreamConfigRequest", {name: kind for name, kind in fields.items() if name not in unknown})


def invalid(text: str) -> Exception:
    """Return the error of a configuration that cannot be."""
    return api_error(10052, text)


def is_asset_name(name: str) -> bool:
    """Whether a stream or consumer may have this name."""
    return bool(name) and not any(char in ". \t\r\n\f*>\\/" for char in name)


def check_create(request: dict[str, Any], profile: Profile, find: Callable[[str], StreamConfig | None]) -> StreamConfig:
    """Return the configuration that a request asks for, defaults filled in.

    Args:
        request: The decoded request.
        profile: The release.
        find: Returns the configuration of a stream by its name.

    Raises:
        ApiError: The server refuses it.
    """
    pedantic = request.get("pedantic", False)
    config = {**_DEFAULTS, **{name: value for name, value in request.items() if name in _DEFAULTS}}
    config["persist_mode"] = config["persist_mode"] or "default"
    if "limits_ttl" in request:
        config["subject_delete_marker_ttl"] = request["limits_ttl"]
    if not is_asset_name(config["name"]):
        raise invalid("stream name is required and can not contain '.', '*', '>', '\\', '/'")
    if len(config["name"]) > 255:
        raise invalid("stream name is too long, maximum allowed is 255")
    config["num_replicas"] = config["num_replicas"] or 1
    if config["num_replicas"] > 5:
        raise invalid("maximum replicas is 5")
    if config["num_replicas"] < 0:
        raise api_error(10133)
    for name in ("max_msgs", "max_msgs_per_subject", "max_bytes", "max_msg_size", "max_consumers"):
        if config[name] == 0 or (config[name] < -1 and profile.strict_json):
            if pedantic and config[name] < -1 and profile.strict_json:
                raise api_error(10157, f"{name} must be set to -1")
            config[name] = -1
    _check_times(config, profile, pedantic)
    if config["deny_purge"] and config["allow_rollup_hdrs"]:
        raise invalid("roll-ups require the purge permission")
    if config["discard_new_per_subject"]:
        if config["discard"] != "new":
            raise invalid("discard new per subject requires discard new policy to be set")
        if config["max_msgs_per_subject"] <= 0:
            raise invalid("discard new per subject requires max msgs per subject > 0")
    _check_markers(config, pedantic)
    if config["persist_mode"] == "async":
        if config["storage"] != "file":
            raise invalid("async persist mode is only supported on file storage")
        if config["num_replicas"] > 1:
            raise invalid("async persist mode is not supported on replicated streams")
        if config["allow_atomic"]:
            raise invalid("async persist mode is not supported with atomic batch publish")
    if config["mirror"]:
        _check_mirror(config, pedantic, find)
    _check_sources(config)
    _check_cycle(config, find)
    _check_subjects(config, profile)
    if profile.draft:
        config["allow_direct"] = config["max_msgs_per_subject"] > 0  # whatever the request says
    return config


def _check_times(config: StreamConfig, profile: Profile, pedantic: bool) -> None:
    age = config["max_age"]
    if age < 0 and profile.strict_json:
        raise invalid("max age can not be negative")
    if 0 < age < 100 * MILLISECOND:
        raise invalid("max age needs to be >= 100ms")
    copies = config["mirror"] or (config["sources"] and profile.strict_json)
    if config["duplicate_window"] == 0 and not copies:
        config["duplicate_window"] = 2 * MINUTE
        if age != 0 and age < 2 * MINUTE:
            if pedantic:
                raise api_error(10157, "duplicate window cannot be bigger than max age")
            config["duplicate_window"] = age
    window = config["duplicate_window"]
    if window < 0:
        raise invalid("duplicates window can not be negative")
    if age and window > age:
        raise invalid("duplicates window can not be larger then max age")
    if 0 < window < 100 * MILLISECOND:
        raise invalid("duplicates window needs to be >= 100ms")


def _check_markers(config: StreamConfig, pedantic: bool) -> None:
    ttl = config["subject_delete_marker_ttl"]
    if ttl < 0:
        raise invalid("subject delete marker TTL must not be negative")
    if ttl == 0:
        return
    if ttl < SECOND:
        raise invalid("subject delete marker TTL must be at least 1 second")
    if pedantic and not config["allow_msg_ttl"]:
        raise invalid("subject delete marker cannot be set if message TTLs are disabled")
    if pedantic and not config["allow_rollup_hdrs"]:
        raise invalid("subject delete marker cannot be set if roll-ups are disabled")
    if not config["allow_rollup_hdrs"]:
        config["deny_purge"] = False
    config["allow_msg_ttl"] = config["allow_rollup_hdrs"] = True


def _check_mirror(config: StreamConfig, pedantic: bool, find: Callable[[str], StreamConfig | None]) -> None:
    mirror = config["mirror"]
    for name, code in (
        ("first_seq", 10143),
        ("subjects", 10034),
        ("sources", 10031),
        ("allow_atomic", 10198),
        ("allow_batched", 10209),
    ):
        if config[name]:
            raise api_error(code)
    if "consumer" in mirror and not _is_durable_source(mirror):
        raise api_error(10213)
    if config["subject_delete_marker_ttl"] > 0:
        raise invalid("subject delete markers forbidden on mirrors")
    if "external" in mirror:
        return
    if not is_asset_name(mirror.get("name", "")):
        raise api_error(10142)
    origin = find(mirror["name"])
    if origin is not None:
        if pedantic and config["mirror_direct"] != origin["allow_direct"]:
            raise api_error(10157, "origin stream has direct get set, mirror has it disabled")
        config["mirror_direct"] = origin["allow_direct"]


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
        identity = (
            source["name"],
            source.get("filter_subject"),
            source.get("external"),
            source.get("subject_transforms"),
        )
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


def _check_cycle(config: StreamConfig, find: Callable[[str], StreamConfig | None]) -> None:
    waiting, visited = [config], set()
    while waiting:
        each = waiting.pop(0)
        visited.add(each["name"])
        for source in each["sources"] + ([each["mirror"]] if each["mirror"] else []):
            if "external" in source:
                continue
            pattern = source.get("filter_subject", "")
            if source["name"] in visited:
                if not pattern or any(subjects.collide(subject, pattern) for subject in each["subjects"]):
                    raise invalid("detected cycle")
            elif (other := find(source["name"])) is not None:
                waiting.append(other)


def _check_subjects(config: StreamConfig, profile: Profile) -> None:
    wanted = list(config["subjects"])
    if not wanted and not config["mirror"] and not config["sources"]:
        wanted = [config["name"]]
    for index, subject in enumerate(wanted):
        if not subjects.is_valid(subject):
            raise invalid("invalid subject")
        if subject in wanted[:index]:
            raise invalid("duplicate subjects detected")
        if subject == ">" and not config["no_ack"]:
            raise invalid("capturing all subjects requires no-ack to be true")
        if not config["no_ack"]:
            for space in ("$JS.>", "$JSC.>", "$NRG.>"):
                if subjects.collide(subject, space) and not subjects.is_subset(subject, "$JS.EVENT.>"):
                    raise invalid("subjects that overlap with jetstream api require no-ack to be true")
            if subjects.collide(subject, "$SYS.>") and not subjects.is_subset(subject, "$SYS.ACCOUNT.>"):
                raise invalid("subjects that overlap with system api require no-ack to be true")
        for other in wanted[index + 1 :]:
            if subjects.collide(other, subject) and (other != subject or profile.strict_json):
                raise invalid(f'subject "{subject}" overlaps with "{other}"')
    config["subjects"] = wanted


def check_update(old: StreamConfig, new: StreamConfig, profile: Profile) -> None:
    """Adjust a checked configuration to the one it replaces.

    Raises:
        ApiError: The change is not allowed.
    """
    if new["num_replicas"] > 1 and profile.fast:
        raise api_error(10074)
    if new["storage"] != old["storage"]:
        raise invalid("stream configuration update can not change storage type")
    if new["retention"] != old["retention"] and "workqueue" in (new["retention"], old["retention"]):
        raise invalid("stream configuration update can not change retention policy to/from workqueue")
    for name, what in (
        ("sealed", "unseal a sealed stream"),
        ("deny_delete", "cancel deny message deletes"),
        ("deny_purge", "cancel deny purge"),
    ):
        if old[name] and not new[name]:
            raise invalid(f"stream configuration update can not {what}")
    if new["mirror"] and new["mirror"] != old["mirror"]:
        raise api_error(10055)
    if old["allow_msg_ttl"] and not new["allow_msg_ttl"]:
        raise invalid("message TTL status can not be disabled")
    if new["persist_mode"] != old["persist_mode"]:
        raise invalid("stream configuration update can not change persist mode")
    if new["sealed"]:
        new.update(max_age=0, discard="new", deny_delete=True, deny_purge=True, allow_rollup_hdrs=False)


def config_json(config: StreamConfig, profile: Profile, *, stored: bool = False) -> dict[str, Any]:
    """Return a configuration as replies show it; `stored` is without what only the running server knows."""
    unknown = {name for name, known in _SINCE.items() if not known(profile)}
    shown = {
        name: config[name] for name in _DEFAULTS if name not in unknown and (name in _ALWAYS_SHOWN or config[name])
    }
    if shown.get("persist_mode") == "default":
        del shown["persist_mode"]
    if profile.draft and config["subject_delete_marker_ttl"]:
        shown["limits_ttl"] = config["subject_delete_marker_ttl"]
    if config["mirror"]:
        shown["mirror"] = _source_json(config["mirror"])
    if config["sources"]:
        shown["sources"] = [_source_json(source) for source in config["sources"]]
    if profile.metadata:
        level = (
            (3 if profile.draft else 4)
            if config["allow_batched"]
            else 2
            if config["allow_atomic"] or config["persist_mode"] == "async"
            else 0
        )
        level = max(level, 1 if config["allow_msg_ttl"] or config["subject_delete_marker_ttl"] else 0)
        own = {"_nats.req.level": str(level)}
        if not stored:
            own |= {"_nats.level": str(profile.api_level), "_nats.ver": profile.version}
        shown["metadata"] = dict(sorted({**config["metadata"], **own}.items()))
    return shown


def _source_json(source: dict[str, Any]) -> dict[str, Any]:
    order = ("name", "opt_start_seq", "opt_start_time", "filter_subject", "subject_transforms", "external", "consumer")
    shown = {name: source[name] for name in order if source.get(name)}
    if "opt_start_time" in shown:
        shown["opt_start_time"] = rfc3339(shown["opt_start_time"])
    return shown
