"""What a server supports, and streams with its options: `features` and `ensure_stream`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final, Unpack

import nats.errors
import orjson
from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX, PersistMode, StreamConfig, StreamInfo, StreamSource
from nats.js.errors import APIError, NotFoundError

from jetstream_ext.client.api import Api, malformed_as_error, stream_names
from jetstream_ext.client.connection import Context
from jetstream_ext.client.stream_options import (
    STREAM_RANGES,
    STREAM_SYNONYMS,
    StreamOptions,
    check_known_options,
    check_options,
    describe_diff,
)
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ServerError, StreamConfigMismatchError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.api import answering_server, check_config, parse_time
from jetstream_ext.protocol.feature_table import BY_FIELD, DURABLE_SOURCE, Feature
from jetstream_ext.protocol.options import check_unicode
from jetstream_ext.protocol.subjects import check_name

# What servers make of an empty value; of these, they leave out `persist_mode`.
_DEFAULTS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("max_consumers", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size"), -1),
    "num_replicas": 1,
    "persist_mode": PersistMode.DEFAULT,
}
_NOTHING: Final[dict[str, Any]] = dict.fromkeys(each.name for each in fields(StreamConfig))
"""The fields of a configuration in which nothing is given: None is not sent, and matches any value."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a server. A stream must also allow a feature: see its option in the feature table.

    Attributes:
        server_version: The version of the connected server. Behind a domain or a leaf node another server runs the
            JetStream, and its version is unknown.
        api_level: The API level of the JetStream that answers (ADR-44); 0 is a server before 2.11.
        direct_batch: `DirectGet.batch`, `scan`, `multi_last` and `get_at` (ADR-31; 2.11, level 1).
        msg_ttl: ``Nats-TTL`` and delete markers (ADR-43; 2.11, level 1).
        atomic: `AtomicBatch` (ADR-50; 2.12, level 2).
        atomic_eob: A commit that stores no message (ADR-50; 2.14, level 4); `AtomicBatch` works without it too.
        fast_ingest: `FastPublisher` (ADR-50; 2.14, level 4).
        consumer_reset: `reset_consumer` (ADR-60; 2.14, level 4).
        durable_source: `create_source_consumer` (ADR-60; 2.14, level 4).
    """

    server_version: str
    api_level: int
    direct_batch: bool
    msg_ttl: bool
    atomic: bool
    atomic_eob: bool
    fast_ingest: bool
    consumer_reset: bool
    durable_source: bool


async def features(js: JetStreamContext, *, timeout: float | None = None) -> Features:
    """Return the features of the server behind `js`.

    Sends one request to ``$JS.API.INFO``, which the JetStream itself answers. If that is not answered (the client may
    lack the permission), the ``INFO`` of the connected server is used, which has the API level from 2.12.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        timeout: Seconds to wait for the answer; None is the context's timeout.

    Raises:
        nats.js.errors.ServiceUnavailableError: There is no JetStream.
        RequestTimeoutError: No answer in time, and the connected server's ``INFO`` has no API level.
        ServerError: The server refused, for instance because JetStream is disabled for the account.
        ResponseError: The answer is malformed.

    Cancellation: Safe; nothing is left behind.

    Requires: Any server; 2.10 is the oldest that is tested.
    """
    context = Context(js)
    try:
        level = await Api(context, timeout).level()
    except RequestTimeoutError:
        if context.connection.api_level is None or context.prefix != DEFAULT_PREFIX:
            raise
        level = context.connection.api_level
    names = [each.name for each in fields(Features) if each.type == "bool"]
    found = {name: getattr(feature_table, name.upper()).at(level) for name in names}
    return Features(context.connection.server_version, level, **found)


async def ensure_stream(
    js: JetStreamContext,
    config: StreamConfig | None = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    **options: Unpack[StreamOptions],
) -> StreamInfo:
    """Create a stream, or enable the ``allow_*`` options that an existing one lacks.

    A service can call it at every start: a stream that is as wanted is not changed, and of several processes that call
    it at once, one creates the stream and the others find it.

    Nothing else of an existing stream is ever changed: any other difference from what is given is an error, also an
    ``allow_*`` option that is False and on. What is left out matches any value of an existing stream; a new one gets the
    server's default, which is nats-py's as well. Servers before 2.12 silently drop options that they do not know. This call reports that
    as an error: if the API level shows it, before anything is created, or else from the configuration that the server
    returns.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        config: nats-py's ``StreamConfig``, if the program has one. Every field that is not None counts as given,
            including nats-py's defaults (``discard``, the limits of -1, ``deny_*``) except that of
            ``allow_rollup_hdrs``; keywords alone leave them out.
        name: The stream's name, unless `config` has it.
        timeout: Seconds for the whole call; None is the context's timeout.
        options: Fields of the configuration, as for ``js.add_stream``; they override those of `config`. Each time is in
            seconds or a timedelta. None, an empty list of subjects and a ``duplicate_window`` of 0 count as left out. An
            existing stream may have further metadata. Its subjects, sources and placement tags may be in another order, and an empty value is the
            server's default (``republish`` without ``src`` is of all subjects). A source or mirror with the domain of `js`
            (or else of the connected server) as ``external`` is made local, because a server cannot reach itself by its
            own domain.

    Returns:
        nats-py's ``StreamInfo`` of the stream as it is now.

    Raises:
        ValueError, TypeError: The name is missing or invalid, there is no such option, or its value is invalid; nothing
            was sent.
        StreamConfigMismatchError: The stream exists with another configuration, or the server changed the
            configuration; ``diff`` maps each field to (wanted, found).
        UnsupportedFeatureError: The server is too old for an option; ``required_api_level`` is the level it needs.
        ServerError: The server refused; 10065: another stream, which the error names, stores one of the subjects.
        nats.js.errors.ServiceUnavailableError, RequestTimeoutError: There is no JetStream, or no leader or answer in time.
        ResponseError: The answer is malformed.

    Cancellation: The stream may have been created or changed; nothing else is left behind.

    Requires: Any server; for each option see the feature table. Servers have no conditional update: two programs that
    enable different options of a stream at the same moment can overwrite each other's change.
    """
    wanted = _wanted(config, name, options)
    check_unicode(wanted.as_dict(), f"the configuration of stream {wanted.name!r}")
    _canonical("", wanted.as_dict())  # raises ValueError if opt_start_time is not a time
    api = Api(Context(js), timeout)
    wanted = _without_own_domain(wanted, api.context)
    info = None
    with suppress(NotFoundError):
        info = await api.stream(str(wanted.name))
    if info is None:
        remedy = (
            "give other subjects, or none and sources=[StreamSource(name={!r})] for a stream that copies its messages"
        )
        what = f"stream {wanted.name!r}"
        if created := await create_stream(api, what, wanted.as_dict(), needed_features(wanted), remedy):
            return _checked(api, wanted, created)
        # Another client has created it in the meantime.
        info = await api.stream(str(wanted.name))
    return await _extend(api, wanted, info)


async def enable_options(api: Api, stream: str, options: Iterable[str]) -> None:
    """Turn on ``allow_*`` options of an existing stream, all or none of them; raise an error if one is off afterwards.

    Raises as `ensure_stream` does, and NotFoundError if there is no such stream.
    """
    wanted = only({"name": stream} | dict.fromkeys(options, True))
    await _extend(api, wanted, await api.stream(stream))


def _wanted(config: StreamConfig | None, name: str | None, options: StreamOptions) -> StreamConfig:
    """Return the configuration that is asked for; raise TypeError or ValueError if it is not one."""
    if isinstance(config, str):
        raise TypeError(f"config must be a nats-py StreamConfig, not {config!r}; give name={config!r}")
    if config is not None and not isinstance(config, StreamConfig):
        raise TypeError(f"config must be a nats-py StreamConfig, not {type(config).__name__}")
    check_known_options("ensure_stream", options, [*_NOTHING, "timeout"], STREAM_SYNONYMS)
    given: dict[str, Any] = dict(vars(config)) if config else {}
    if not given.get("allow_rollup_hdrs"):
        given.pop("allow_rollup_hdrs", None)  # nats-py's default, and servers turn it on together with other options
    given |= options
    name = name if name is not None else given.get("name")
    if name is None:
        raise ValueError("ensure_stream() needs a stream name: give name='...', or a StreamConfig with one")
    check_name(name, "stream name")
    checked = check_options(f"stream {name!r}", given, StreamOptions, STREAM_RANGES)
    checked["subjects"] = checked.get("subjects") or None
    mirror = checked.get("mirror")
    if mirror is not None and not mirror.subject_transforms:
        # Servers refuse each update of a mirror that was created with an empty list (10055).
        checked["mirror"] = mirror.evolve(subject_transforms=None)
    return only(checked | {"name": name})


def only(fields: Mapping[str, Any]) -> StreamConfig:
    """Return a configuration in which these fields are given and nothing else is."""
    return StreamConfig(**{**_NOTHING, **fields})


async def create_stream(
    api: Api, what: str, body: dict[str, Any], features: Sequence[Feature], remedy: str
) -> dict[str, Any] | None:
    """Create the stream of `what` and return the answer, or None if there is one of this name.

    If other streams store its subjects, the error says to do `remedy`; "{!r}" in it stands for the first of these streams.
    """
    connection = api.context.connection
    level = connection.api_level if api.context.prefix == DEFAULT_PREFIX else None
    if features and (level is None or not all(feature.at(level) for feature in features)):
        level = await api.level()
        for feature in features:
            feature.check(level, connection.server_version, "nothing was created")
    try:
        return await api.ask(f"STREAM.CREATE.{body['name']}", body)
    except ServerError as refusal:
        if refusal.err_code == ErrorCode.STREAM_NAME_EXISTS:
            return None
        if refusal.err_code == ErrorCode.STREAM_SUBJECTS_OVERLAP:
            subjects = body.get("subjects") or [body["name"]]  # the server's default
            raise await _overlap_error(api, what, subjects, refusal, remedy) from refusal
        raise


async def _overlap_error(
    api: Api, what: str, subjects: Iterable[str], refusal: ServerError, remedy: str
) -> ServerError:
    """Return the refusal (10065) to create `what`, whose subjects other streams store, with the streams that do."""
    holders: dict[str, str] = {}
    for subject in subjects:
        with suppress(nats.errors.Error, APIError):  # the refusal alone is better than another error
            holders |= dict.fromkeys(await stream_names(api, subject), subject)
    found = ", ".join(f"stream {name!r} stores messages on {subject!r}" for name, subject in sorted(holders.items()))
    advice = f"a subject belongs to one stream, so that a message is stored once: {remedy.format(min(holders, default='...'))}"
    text = f"{what}: nothing was created: {found or refusal.description}; {advice}"
    return ServerError(code=refusal.code, err_code=refusal.err_code, description=text)


def _without_own_domain(config: StreamConfig, context: Context) -> StreamConfig:
    """Return `config` without the ``external`` of sources and mirrors that name the domain of the stream itself."""
    prefix, domain = context.prefix, context.connection.domain
    own = f"$JS.{domain}.API" if prefix == DEFAULT_PREFIX and domain is not None else prefix

    def local(entry: StreamSource) -> StreamSource:
        return entry.evolve(external=None) if entry.external is not None and entry.external.api == own else entry

    return config.evolve(
        mirror=config.mirror and local(config.mirror), sources=config.sources and [*map(local, config.sources)]
    )


async def _extend(api: Api, wanted: StreamConfig, info: dict[str, Any]) -> StreamInfo:
    """Turn on the ``allow_*`` options that an existing stream lacks, or raise if it differs in anything else."""
    found, diff = _compared(f"stream {wanted.name!r}", wanted, info)
    missing = [name for name, (want, _) in diff.items() if name.startswith("allow_") and want]
    if other := {name: values for name, values in diff.items() if name not in missing}:
        raise StreamConfigMismatchError(
            f"stream {wanted.name!r} exists with another configuration: {describe_diff(other)}; nothing was changed; "
            + _how_to_change(other),
            diff=other,
        )
    if not missing:
        return found
    check_leader(api.context, info["config"], needed_features(wanted, missing), "nothing was changed")
    # The server's own configuration: nats-py's has only the fields that it knows.
    update = info["config"] | dict.fromkeys(missing, True)
    return _checked(api, wanted, await api.ask(f"STREAM.UPDATE.{wanted.name}", update))


def _checked(api: Api, wanted: StreamConfig, info: dict[str, Any]) -> StreamInfo:
    """Return the stream that was created or changed, or raise if it is not as wanted."""
    found, diff = _compared(f"stream {wanted.name!r} (which was created or updated)", wanted, info)
    if diff:
        lacking = f"stream {wanted.name!r} was created or updated without this feature"
        check_leader(api.context, info["config"], needed_features(wanted, diff), lacking)
        raise StreamConfigMismatchError(
            f"stream {wanted.name!r} was created or updated, but the server stored another configuration: "
            f"{describe_diff(diff)}",
            diff=diff,
        )
    return found


def needed_features(wanted: StreamConfig, names: Iterable[str] = BY_FIELD) -> list[Feature]:
    """Return the features that these fields of a configuration need, and its sources."""
    needed = [BY_FIELD[name] for name in names if name in BY_FIELD and getattr(wanted, name)]
    if any(entry and entry.consumer for entry in (wanted.mirror, *(wanted.sources or ()))):
        needed.append(DURABLE_SOURCE)
    return needed


def check_leader(context: Context, config: Mapping[str, Any], features: Iterable[Feature], detail: str) -> None:
    """Raise UnsupportedFeatureError if the leader that answered with `config` is too old for one of `features`."""
    version, level = answering_server(config)
    for feature in features:
        feature.check(level, version or context.connection.server_version, detail)


def config_diff(wanted: StreamConfig, found: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields that are given and differ from a server's configuration, with (wanted, found) as nats-py has them."""
    asked = wanted.as_dict()
    given = [
        name for name, value in vars(wanted).items() if value or (value is not None and name != "duplicate_window")
    ]
    different = [name for name in given if not _is_same(name, asked.get(name), found.get(name))]
    shown = _read_config(found)
    return {name: (getattr(wanted, name), getattr(shown, name)) for name in different}


def _is_same(name: str, want: Any, have: Any) -> bool:
    if name == "metadata":
        # Servers write their own keys, which change with every update.
        own = {key: value for key, value in want.items() if not key.startswith("_nats.")}
        return own.items() <= (have or {}).items()
    return bool(_canonical(name, want) == _canonical(name, have))


def _canonical(name: str, value: Any) -> Any:
    """Return the value of a field of a configuration in the one form that all values have that mean the same."""
    if isinstance(value, list | tuple):
        values = [_canonical(name, each) for each in value]
        if name in ("subjects", "sources", "tags"):  # their order has no meaning
            values.sort(key=lambda each: orjson.dumps(each, option=orjson.OPT_SORT_KEYS))
        return values or None
    if isinstance(value, dict):
        kept = {field: inner for field, given in value.items() if (inner := _canonical(field, given))}
        return {"src": ">", "dest": ">", **kept} if name == "republish" else kept or None
    if name == "opt_start_time" and value:
        return parse_time(value)
    return value or _DEFAULTS.get(name)  # servers leave out what is empty


def _read_config(config: Mapping[str, Any]) -> StreamConfig:
    """Return a server's configuration as nats-py has it."""
    copy = orjson.loads(orjson.dumps(config))  # nats-py reads it in place
    for entry in (copy.get("mirror") or {}, *(copy.get("sources") or ())):
        if entry.get("opt_start_time"):
            entry["opt_start_time"] = parse_time(entry["opt_start_time"]).isoformat()  # nats-py fails on some offsets
    read: StreamConfig = StreamConfig.from_response(copy)
    return read


def _compared(what: str, wanted: StreamConfig, info: dict[str, Any]) -> tuple[StreamInfo, dict[str, tuple[Any, Any]]]:
    """Return a server's answer as nats-py has it, and `config_diff`; `what` it is about."""
    with malformed_as_error(what):
        check_config(info["config"])
        found: StreamInfo = StreamInfo.from_response(orjson.loads(orjson.dumps(info | {"config": {}})))
        found.config = _read_config(info["config"])
        return found, config_diff(wanted, info["config"])


def _how_to_change(diff: Mapping[str, tuple[Any, Any]]) -> str:
    """Return what to do about an existing stream with this difference."""
    if "mirror" in diff and all(diff["mirror"]):
        return (
            "servers never change a mirror (10055): to read it by a durable consumer, create another stream, or delete "
            "this one and create it again"
        )
    wanted, _ = diff.get("sources", ((), ()))
    if any(entry.consumer for entry in wanted or ()):
        return (
            "js.update_stream can make a source durable, but then copies every message of it again, unless its consumer "
            "starts behind the last copy (the second field of the header Nats-Stream-Source); "
            "see 'Make a source durable' in the how-to guides"
        )
    return "give the existing values, or only the options that matter (as keywords), or change the stream with js.update_stream"
