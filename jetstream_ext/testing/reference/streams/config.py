"""Stream configurations: fields, defaults, and the checks of create and update requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..releases import Profile
from ..wire import golang, subjects
from ..wire.errors import ApiError, api_error
from ..wire.golang import BOOL, DURATION, INT, STRING, STRING_MAP, STRINGS, TIME, UINT, Enum, ListOf, Struct

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


_TRANSFORM = Struct("SubjectTransformConfig", {"src": STRING, "dest": STRING})
_SOURCE: dict[str, golang.Kind] = {
    "name": STRING,
    "opt_start_seq": UINT,
    "opt_start_time": TIME,
    "filter_subject": STRING,
    "subject_transforms": ListOf(_TRANSFORM),
    "external": Struct("ExternalStream", {"api": STRING, "deliver": STRING}),
}
_FIELDS: dict[str, Field] = {
    "name": Field(STRING, "", shown=True),
    "description": Field(STRING, ""),
    "subjects": Field(STRINGS, []),
    "retention": Field(Enum(("limits", "interest", "workqueue")), "limits", shown=True),
    "max_consumers": Field(INT, -1, shown=True),
    "max_msgs": Field(INT, -1, shown=True),
    "max_bytes": Field(INT, -1, shown=True),
    "max_age": Field(DURATION, 0, shown=True),
    "max_msgs_per_subject": Field(INT, -1, shown=True),
    "max_msg_size": Field(INT, -1),
    "discard": Field(Enum(("old", "new")), "old", shown=True),
    "storage": Field(Enum(("file", "memory")), "file", shown=True),
    "num_replicas": Field(INT, 1, shown=True),
    "no_ack": Field(BOOL, False),
    "duplicate_window": Field(DURATION, 0),
    "placement": Field(Struct("Placement", {"cluster": STRING, "tags": STRINGS, "preferred": STRING}), {}),
    "mirror": Field(Struct("StreamSource", _SOURCE), {}),
    "sources": Field(ListOf(Struct("StreamSource", _SOURCE)), []),
    "compression": Field(Enum(("none", "s2")), "none", shown=True),
    "first_seq": Field(UINT, 0),
    "subject_transform": Field(_TRANSFORM, {}),
    "republish": Field(Struct("RePublish", {"src": STRING, "dest": STRING, "headers_only": BOOL}), {}),
    "allow_direct": Field(BOOL, False, shown=True),
    "mirror_direct": Field(BOOL, False, shown=True),
    "discard_new_per_subject": Field(BOOL, False),
    "sealed": Field(BOOL, False, shown=True),
    "deny_delete": Field(BOOL, False, shown=True),
    "deny_purge": Field(BOOL, False, shown=True),
    "allow_rollup_hdrs": Field(BOOL, False, shown=True),
    "consumer_limits": Field(
        Struct("StreamConsumerLimits", {"inactive_threshold": DURATION, "max_ack_pending": INT}), {}, shown=True
    ),
    "allow_msg_ttl": Field(BOOL, False, shown=True, since="ttl"),
    "subject_delete_marker_ttl": Field(DURATION, 0, since="ttl"),
    "allow_msg_counter": Field(BOOL, False, since="atomic"),
    "allow_atomic": Field(BOOL, False, since="atomic"),
    "allow_msg_schedules": Field(BOOL, False, since="atomic"),
    "persist_mode": Field(Enum(("", "default", "async")), "default", since="atomic"),
    "allow_batched": Field(BOOL, False, since="fast"),
    "metadata": Field(STRING_MAP, {}),
}


def known_fields(table: dict[str, Field], profile: Profile) -> dict[str, Field]:
    return {name: each for name, each in table.items() if not each.since or getattr(profile, each.since)}


def request_schema(profile: Profile) -> Struct:
    fields = {name: each.kind for name, each in known_fields(_FIELDS, profile).items()}
    if profile.durable_sourcing:
        managed: dict[str, golang.Kind] = {"server_managed": BOOL} if profile.draft else {}
        consumer = Struct("StreamConsumerSource", {"name": STRING, "deliver_subject": STRING, **managed})
        source = Struct("StreamSource", {**_SOURCE, "consumer": consumer})
        fields |= {"mirror": source, "sources": ListOf(source)}
    if profile.templates:
        fields["template_owner"] = STRING
    if profile.draft:
        fields["limits_ttl"] = DURATION
    return Struct("StreamConfigRequest", {**fields, "pedantic": BOOL})


def invalid_config(text: str) -> ApiError:
    return api_error(10052, text)


def is_asset_name(name: str) -> bool:
    return bool(name) and not any(char in ". \t\r\n\f*>\\/" for char in name)


def check_create(request: dict[str, Any], profile: Profile, find: Callable[[str], StreamConfig | None]) -> StreamConfig:
    """Return the configuration of a create request with the defaults filled in, or raise an `ApiError`.

    `find` looks up the configuration of another stream.
    """
    pedantic = request.get("pedantic", False)
    config = {name: request.get(name, each.default) for name, each in _FIELDS.items()}
    config["persist_mode"] = config["persist_mode"] or "default"
    if "limits_ttl" in request:
        config["subject_delete_marker_ttl"] = request["limits_ttl"]
    if not is_asset_name(config["name"]):
        raise invalid_config("stream name is required and can not contain '.', '*', '>', '\\', '/'")
    if len(config["name"]) > 255:
        raise invalid_config("stream name is too long, maximum allowed is 255")
    config["num_replicas"] = config["num_replicas"] or 1
    if config["num_replicas"] > 5:
        raise invalid_config("maximum replicas is 5")
    if config["num_replicas"] < 0:
        raise api_error(10133)
    for name in ("max_msgs", "max_msgs_per_subject", "max_bytes", "max_msg_size", "max_consumers"):
        if config[name] == 0 or (config[name] < -1 and profile.strict_config):
            if pedantic and config[name] < -1 and profile.strict_config:
                raise api_error(10157, f"{name} must be set to -1")
            config[name] = -1
    _check_times(config, profile, pedantic)
    if config["deny_purge"] and config["allow_rollup_hdrs"]:
        raise invalid_config("roll-ups require the purge permission")
    if config["discard_new_per_subject"]:
        if config["discard"] != "new":
            raise invalid_config("discard new per subject requires discard new policy to be set")
        if config["max_msgs_per_subject"] <= 0:
            raise invalid_config("discard new per subject requires max msgs per subject > 0")
    _check_markers(config, pedantic)
    if config["persist_mode"] == "async":
        if config["storage"] != "file":
            raise invalid_config("async persist mode is only supported on file storage")
        if config["num_replicas"] > 1:
            raise invalid_config("async persist mode is not supported on replicated streams")
        if config["allow_atomic"]:
            raise invalid_config("async persist mode is not supported with atomic batch publish")
    if config["mirror"]:
        _check_mirror(config, pedantic, find)
    _check_sources(config)
    _check_cycle(config, find)
    _check_subjects(config, profile)
    if profile.draft:
        config["allow_direct"] = config["max_msgs_per_subject"] > 0  # the field of the request has no effect
    return config


def _check_times(config: StreamConfig, profile: Profile, pedantic: bool) -> None:
    age = config["max_age"]
    if age < 0 and profile.strict_config:
        raise invalid_config("max age can not be negative")
    if 0 < age < 100 * golang.MILLISECOND:
        raise invalid_config("max age needs to be >= 100ms")
    copies = config["mirror"] or (config["sources"] and profile.strict_config)
    if config["duplicate_window"] == 0 and not copies:
        config["duplicate_window"] = 2 * golang.MINUTE
        if age != 0 and age < 2 * golang.MINUTE:
            if pedantic:
                raise api_error(10157, "duplicate window cannot be bigger than max age")
            config["duplicate_window"] = age
    window = config["duplicate_window"]
    if window < 0:
        raise invalid_config("duplicates window can not be negative")
    if age and window > age:
        raise invalid_config("duplicates window can not be larger then max age")
    if 0 < window < 100 * golang.MILLISECOND:
        raise invalid_config("duplicates window needs to be >= 100ms")


def _check_markers(config: StreamConfig, pedantic: bool) -> None:
    ttl = config["subject_delete_marker_ttl"]
    if ttl < 0:
        raise invalid_config("subject delete marker TTL must not be negative")
    if ttl == 0:
        return
    if ttl < golang.SECOND:
        raise invalid_config("subject delete marker TTL must be at least 1 second")
    if pedantic and not config["allow_msg_ttl"]:
        raise invalid_config("subject delete marker cannot be set if message TTLs are disabled")
    if pedantic and not config["allow_rollup_hdrs"]:
        raise invalid_config("subject delete marker cannot be set if roll-ups are disabled")
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
        raise invalid_config("subject delete markers forbidden on mirrors")
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
                    raise invalid_config("detected cycle")
            elif (other := find(source["name"])) is not None:
                waiting.append(other)


def _check_subjects(config: StreamConfig, profile: Profile) -> None:
    wanted = list(config["subjects"])
    if not wanted and not config["mirror"] and not config["sources"]:
        wanted = [config["name"]]
    for index, subject in enumerate(wanted):
        if not subjects.is_valid(subject):
            raise invalid_config("invalid subject")
        if subject in wanted[:index]:
            raise invalid_config("duplicate subjects detected")
        if subject == ">" and not config["no_ack"]:
            raise invalid_config("capturing all subjects requires no-ack to be true")
        if not config["no_ack"]:
            for space in ("$JS.>", "$JSC.>", "$NRG.>"):
                if subjects.collide(subject, space) and not subjects.is_subset(subject, "$JS.EVENT.>"):
                    raise invalid_config("subjects that overlap with jetstream api require no-ack to be true")
            if subjects.collide(subject, "$SYS.>") and not subjects.is_subset(subject, "$SYS.ACCOUNT.>"):
                raise invalid_config("subjects that overlap with system api require no-ack to be true")
        for other in wanted[index + 1 :]:
            if subjects.collide(other, subject) and (other != subject or profile.strict_config):
                raise invalid_config(f'subject "{subject}" overlaps with "{other}"')
    config["subjects"] = wanted


def check_update(old: StreamConfig, new: StreamConfig, profile: Profile) -> None:
    """Raise an `ApiError` if a configuration may not replace another; complete the new one."""
    if new["num_replicas"] > 1 and profile.refuses_replicas_on_update:
        raise api_error(10074)
    if new["storage"] != old["storage"]:
        raise invalid_config("stream configuration update can not change storage type")
    if new["retention"] != old["retention"] and "workqueue" in (new["retention"], old["retention"]):
        raise invalid_config("stream configuration update can not change retention policy to/from workqueue")
    for name, what in (
        ("sealed", "unseal a sealed stream"),
        ("deny_delete", "cancel deny message deletes"),
        ("deny_purge", "cancel deny purge"),
    ):
        if old[name] and not new[name]:
            raise invalid_config(f"stream configuration update can not {what}")
    if new["mirror"] and new["mirror"] != old["mirror"]:
        raise api_error(10055)
    if old["allow_msg_ttl"] and not new["allow_msg_ttl"]:
        raise invalid_config("message TTL status can not be disabled")
    if new["persist_mode"] != old["persist_mode"]:
        raise invalid_config("stream configuration update can not change persist mode")
    if new["sealed"]:
        new.update(max_age=0, discard="new", deny_delete=True, deny_purge=True, allow_rollup_hdrs=False)


def config_json(config: StreamConfig, profile: Profile, *, stored: bool = False) -> dict[str, Any]:
    """Return a configuration as replies show it; `stored` leaves out the fields of the running server."""
    known = known_fields(_FIELDS, profile).items()
    shown = {name: config[name] for name, each in known if each.shown or config[name]}
    if shown.get("persist_mode") == "default":
        del shown["persist_mode"]
    if profile.draft and config["subject_delete_marker_ttl"]:
        shown["limits_ttl"] = config["subject_delete_marker_ttl"]
    if config["mirror"]:
        shown["mirror"] = _source_json(config["mirror"])
    if config["sources"]:
        shown["sources"] = [_source_json(source) for source in config["sources"]]
    if profile.metadata:
        shown["metadata"] = metadata_json(config, profile, _required_level(config, profile), stored=stored)
    return shown


def metadata_json(config: dict[str, Any], profile: Profile, level: int, *, stored: bool) -> dict[str, str]:
    """Return the metadata of a configuration, including the server's: API levels and version."""
    own = {"_nats.req.level": str(level)}
    if not stored:
        own |= {"_nats.level": str(profile.api_level), "_nats.ver": profile.version}
    return dict(sorted({**config["metadata"], **own}.items()))


def _required_level(config: StreamConfig, profile: Profile) -> int:
    if config["allow_batched"]:
        return 3 if profile.draft else 4
    if config["allow_atomic"] or config["persist_mode"] == "async":
        return 2
    return 1 if config["allow_msg_ttl"] or config["subject_delete_marker_ttl"] else 0


def _source_json(source: dict[str, Any]) -> dict[str, Any]:
    shown = {name: source[name] for name in (*_SOURCE, "consumer") if source.get(name)}
    if "opt_start_time" in shown:
        shown["opt_start_time"] = golang.rfc3339(shown["opt_start_time"])
    return shown
