"""What a server supports, and streams with its options: `features` and `ensure_stream`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final, NoReturn, Unpack

import nats.errors
import orjson
from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX, PersistMode, StreamConfig, StreamInfo, StreamSource
from nats.js.errors import APIError, NotFoundError

from jetstream_ext.client.api import Api, malformed_as_error
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
from jetstream_ext.protocol.api import answering_server, check_config, parse_stream_state, parse_time
from jetstream_ext.protocol.feature_table import Feature
from jetstream_ext.protocol.options import check_unicode
from jetstream_ext.protocol.subjects import check_name

# What servers make of an empty value; of these, they leave out `persist_mode`.
_DEFAULTS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("max_consumers", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size"), -1),
    "persist_mode": PersistMode.DEFAULT,
}
_SOURCE: Final = {"name": ""}
_TRANSFORM: Final = {"src": "", "dest": ""}
# The same inside of a field, and what nats-py needs.
_NESTED_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "consumer": {"name": "", "deliver_subject": ""},
    "external": {"api": ""},
    "mirror": _SOURCE,
    "republish": {"src": ">", "dest": ">"},
    "sources": _SOURCE,
    "subject_transform": _TRANSFORM,
    "subject_transforms": _TRANSFORM,
}
_LEFT_OUT_IF_EMPTY: Final = frozenset({"duplicate_window", "mirror_direct", "num_replicas"})


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

    Options are never disabled. Any other difference between what is given and an existing stream is an error, and
    nothing is changed. What is left out matches any value of an existing stream; a new one gets the server's default,
    which is nats-py's as well. Servers before 2.12 silently drop options that they do not know. This call reports that
    as an error: if the API level shows it, before anything is created, or else from the configuration that the server
    returns.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        config: nats-py's ``StreamConfig``, if the program has one. Every field that is not None counts as given,
            including nats-py's defaults (``discard``, the limits of -1, ``deny_*``); keywords alone leave them out.
        name: The stream's name, unless `config` has it.
        timeout: Seconds for the whole call; None is the context's timeout.
        options: Fields of the configuration, as for ``js.add_stream``; they override those of `config`. Each time is in
            seconds or a timedelta. None, an empty list of subjects, an ``allow_*`` option or ``mirror_direct`` that is
            False, and a ``duplicate_window`` or ``num_replicas`` of 0 count as left out. An existing stream may have
            further metadata. Its subjects, sources and placement tags may be in another order, and an empty value is the
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
    api = Api(Context(js), timeout)
    domain = api.context.connection.domain
    if api.context.prefix != DEFAULT_PREFIX:
        wanted = _without_external(wanted, api.context.prefix)
    elif domain is not None:
        wanted = _without_external(wanted, f"$JS.{domain}.API")
    retried = False
    while True:
        try:
            info = await api.stream(str(wanted.name))
        except NotFoundError:
            pass
        else:
            return await _extend(api, wanted, info)
        await require_features(api, _needs(wanted), "nothing was created")
        try:
            return _checked(api, wanted, await api.ask(f"STREAM.CREATE.{wanted.name}", wanted.as_dict()))
        except ServerError as refusal:
            if refusal.err_code == ErrorCode.STREAM_SUBJECTS_OVERLAP:
                raise await overlap_error(
                    api,
                    f"stream {wanted.name!r}",
                    wanted.subjects or [str(wanted.name)],  # the server's default
                    refusal,
                    "give other subjects, or none and sources=[StreamSource(name={!r})] for a stream that copies its messages",
                ) from refusal
            # Another client may have created it in the meantime.
            if refusal.err_code != ErrorCode.STREAM_NAME_EXISTS or retried:
                raise
            retried = True


def _wanted(config: StreamConfig | None, name: str | None, options: StreamOptions) -> StreamConfig:
    """Return the configuration that is asked for; raise TypeError or ValueError if it is not one."""
    if isinstance(config, str):
        raise TypeError(f"config must be a nats-py StreamConfig, not {config!r}; give name={config!r}")
    if config is not None and not isinstance(config, StreamConfig):
        raise TypeError(f"config must be a nats-py StreamConfig, not {type(config).__name__}")
    known = [each.name for each in fields(StreamConfig)]
    check_known_options("ensure_stream", options, [*known, "timeout"], STREAM_SYNONYMS)
    left_out: dict[str, Any] = dict.fromkeys(known)  # None is not sent, and matches any value
    wanted: StreamConfig = (config or StreamConfig(**left_out)).evolve(**options)
    if name is not None:
        wanted = wanted.evolve(name=name)
    if wanted.name is None:
        raise ValueError("ensure_stream() needs a stream name: give name='...', or a StreamConfig with one")
    check_name(wanted.name, "stream name")
    _check_lists(wanted)
    checked = check_options(f"stream {wanted.name!r}", vars(wanted), StreamOptions, STREAM_RANGES)
    mirror = wanted.mirror
    if mirror is not None and not mirror.subject_transforms:
        # Servers refuse each update of a mirror that was created with an empty list (10055).
        mirror = mirror.evolve(subject_transforms=None)
    return wanted.evolve(**checked | {"subjects": wanted.subjects or None, "mirror": mirror})


def _check_lists(wanted: StreamConfig) -> None:
    """Raise TypeError for a single subject or source, or the mere name of one: servers call what nats-py sends invalid."""

    def refuse(field: str, what: str, given: object, example: str) -> NoReturn:
        shown = repr(given) if isinstance(given, str) else type(given).__name__
        raise TypeError(f"stream {wanted.name!r}: {field} must be {what}, not {shown}; give {field}={example}")

    def source(given: object) -> str:
        return f"StreamSource(name={given!r})" if isinstance(given, str) else "StreamSource(...)"

    if wanted.subjects is not None and not isinstance(wanted.subjects, list | tuple):
        refuse(
            "subjects",
            "a list",
            wanted.subjects,
            f"[{wanted.subjects!r}]" if isinstance(wanted.subjects, str) else "[...]",
        )
    subject: object
    for subject in wanted.subjects or ():
        if not isinstance(subject, str):
            refuse("subjects", "a list of str", subject, "['...']")
    if wanted.sources is not None and not isinstance(wanted.sources, list | tuple):
        refuse("sources", "a list", wanted.sources, f"[{source(wanted.sources)}]")
    for entry in wanted.sources or ():
        if not isinstance(entry, StreamSource):
            refuse("sources", "a list of StreamSource", entry, f"[{source(entry)}]")
    if wanted.mirror is not None and not isinstance(wanted.mirror, StreamSource):
        refuse("mirror", "a StreamSource", wanted.mirror, source(wanted.mirror))


async def overlap_error(api: Api, what: str, subjects: Iterable[str], refusal: ServerError, remedy: str) -> ServerError:
    """Return the refusal (10065) to create `what`, whose subjects other streams store, with the streams that do.

    `remedy` is what to do; "{!r}" in it stands for the first of these streams.
    """
    holders: dict[str, str] = {}
    for subject in subjects:
        with suppress(nats.errors.Error, APIError):  # the refusal alone is better than another error
            names = (await api.ask("STREAM.NAMES", {"subject": subject})).get("streams")
            holders |= {str(name): subject for name in names or ()}
    found = ", ".join(f"stream {name!r} stores messages on {subject!r}" for name, subject in sorted(holders.items()))
    advice = f"a subject belongs to one stream, so that a message is stored once: {remedy.format(min(holders, default='...'))}"
    text = f"{what}: nothing was created: {found or refusal.description}; {advice}"
    return ServerError(code=refusal.code, err_code=refusal.err_code, description=text)


def _without_external(config: StreamConfig, prefix: str) -> StreamConfig:
    """Return `config` without the ``external`` of sources and mirrors whose API prefix is `prefix`."""

    def local(entry: StreamSource) -> StreamSource:
        own = entry.external is not None and entry.external.api == prefix
        return entry.evolve(external=None) if own else entry

    sources = [local(entry) for entry in config.sources] if config.sources else config.sources
    return config.evolve(mirror=config.mirror and local(config.mirror), sources=sources)


async def _extend(api: Api, wanted: StreamConfig, info: dict[str, Any]) -> StreamInfo:
    with malformed_as_error(f"stream {wanted.name!r}"):
        found = _stream_info(info)
    if diff := config_diff(wanted, found.config):
        raise StreamConfigMismatchError(
            f"stream {wanted.name!r} exists with another configuration: {describe_diff(diff)}; nothing was changed; "
            + (
                _made_durable(diff)
                or "give the existing values, or only the options that matter (as keywords), or change the stream with js.update_stream"
            ),
            diff=diff,
        )
    missing = _missing(wanted, found.config)
    if not missing:
        return found
    await require_features(api, _needs(wanted), "nothing was changed")
    # The server's own configuration: nats-py's has only the fields that it knows.
    update = info["config"] | dict.fromkeys(missing, True)
    return _checked(api, wanted, await api.ask(f"STREAM.UPDATE.{wanted.name}", update))


async def enable_options(api: Api, stream: str, options: Iterable[str]) -> None:
    """Turn on ``allow_*`` options of an existing stream, all or none of them; raise an error if one is off afterwards.

    Raises as `ensure_stream` does, and NotFoundError if there is no such stream.
    """
    config = parse_stream_state(await api.stream(stream), stream).config
    missing = [option for option in options if not config.get(option)]
    _check_leader(api, config, missing, "nothing was changed")  # an old leader would drop one and keep the others
    if not missing:
        return
    answer = await api.ask(f"STREAM.UPDATE.{stream}", {**config, **dict.fromkeys(missing, True)})
    with malformed_as_error(f"stream {stream!r} (which was updated)"):
        found = answer["config"]
        check_config(found)
    if ignored := [option for option in missing if not found.get(option)]:
        _check_leader(api, found, ignored, f"stream {stream!r} was updated without it")
        diff = dict.fromkeys(ignored, (True, False))
        raise StreamConfigMismatchError(
            f"stream {stream!r} was updated, but the server stored other values: {describe_diff(diff)}", diff=diff
        )


def _check_leader(api: Api, config: Mapping[str, Any], options: Iterable[str], detail: str) -> None:
    """Raise UnsupportedFeatureError if the leader that answered with `config` is too old for one of `options`."""
    version, level = answering_server(config)
    for feature in (feature_table.BY_OPTION.get(option) for option in options):
        if feature is not None and not feature.at(level):
            server = version or api.context.connection.server_version
            raise feature.unsupported(server_version=server, api_level=level, detail=detail)


async def require_features(api: Api, features: Iterable[Feature], detail: str) -> None:
    """Raise UnsupportedFeatureError unless the server's API level has each of `features`."""
    needed = list(features)
    level = api.context.connection.api_level if api.context.prefix == DEFAULT_PREFIX else None
    if not needed or (level is not None and all(feature.at(level) for feature in needed)):
        return
    level = await api.level()
    for feature in needed:
        if not feature.at(level):
            version = api.context.connection.server_version
            raise feature.unsupported(server_version=version, api_level=level, detail=detail)


def _needs(wanted: StreamConfig) -> Iterator[Feature]:
    for option, feature in feature_table.BY_OPTION.items():
        if getattr(wanted, option):
            yield feature
    for source in [wanted.mirror, *(wanted.sources or [])]:
        if source is not None and source.consumer is not None:
            yield feature_table.DURABLE_SOURCE


def _checked(api: Api, wanted: StreamConfig, info: dict[str, Any]) -> StreamInfo:
    """Return the stream that was created or changed, or raise if it is not as wanted."""
    with malformed_as_error(f"stream {wanted.name!r} (which was created or updated)"):
        found = _stream_info(info)
        version, level = answering_server(info["config"])
    diff = dict.fromkeys(_missing(wanted, found.config), (True, False)) | config_diff(wanted, found.config)
    if diff:
        for feature in _needs(wanted):
            if feature.option in diff or (feature is feature_table.DURABLE_SOURCE and not feature.at(level)):
                raise feature.unsupported(
                    server_version=version or api.context.connection.server_version,
                    api_level=level,
                    detail=f"stream {wanted.name!r} was created or updated without this feature",
                )
        raise StreamConfigMismatchError(
            f"stream {wanted.name!r} was created or updated, but the server stored another configuration: "
            f"{describe_diff(diff)}",
            diff=diff,
        )
    return found


def _missing(wanted: StreamConfig, found: StreamConfig) -> list[str]:
    """Return the ``allow_*`` options that are wanted and off."""
    options = [name for name in vars(wanted) if name.startswith("allow_")]
    return [name for name in options if getattr(wanted, name) and not getattr(found, name)]


def config_diff(wanted: StreamConfig, found: StreamConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields other than ``allow_*`` that are given and differ, with (wanted, found); `found` is of `read_config`."""
    # Both sides go through `read_config`, so that units, enums and defaults are the same.
    asked = read_config(wanted.as_dict())
    diff = {}
    for name in vars(wanted):
        want, have = getattr(asked, name), getattr(found, name)
        left_out = getattr(wanted, name) is None or (name in _LEFT_OUT_IF_EMPTY and not want)
        if left_out or name.startswith("allow_"):
            continue
        if name == "metadata":
            # Servers write their own keys, which change with every update.
            own = {key: value for key, value in want.items() if not key.startswith("_nats.")}
            same = own.items() <= (have or {}).items()
        else:
            default = _DEFAULTS.get(name)
            want, have = want or default or want, have or default or have
            # False, empty and missing are the same: servers leave them out.
            same = _in_order(name, want) == _in_order(name, have) or (not want and not have)
        if not same:
            diff[name] = (want, have)
    return diff


def _in_order(name: str, value: Any) -> Any:
    """Return the value of a field, with its lists sorted if their order has no meaning."""
    if name in ("subjects", "sources") and value:
        return sorted(value, key=repr)
    if name == "placement" and value:
        return value.evolve(tags=sorted(value.tags or ()))
    return value


def read_config(config: Mapping[str, Any]) -> StreamConfig:
    """Return a configuration, of a server or of nats-py's ``as_dict``, as nats-py has it and as servers complete it."""
    copy = orjson.loads(orjson.dumps(config))  # nats-py reads it in place
    for name, value in copy.items():
        if name != "metadata":
            completed = _completed(name, value)
            copy[name] = None if completed == {} else completed  # such as an empty placement
    read: StreamConfig = StreamConfig.from_response(copy)
    return read


def _completed(name: str, value: Any) -> Any:
    """Return the value of a field without its own empty fields, of which servers return only some, and with its defaults."""
    if isinstance(value, list):
        return [_completed(name, inner) for inner in value]
    if isinstance(value, dict):
        kept = {field: inner for field, given in value.items() if (inner := _completed(field, given))}
        return {**_NESTED_DEFAULTS.get(name, {}), **kept}
    if name == "opt_start_time" and value:
        return parse_time(value).isoformat()  # nats-py fails on an offset west of UTC
    return value


def _stream_info(answer: dict[str, Any]) -> StreamInfo:
    check_config(answer["config"])
    info: StreamInfo = StreamInfo.from_response(orjson.loads(orjson.dumps(answer | {"config": {}})))
    info.config = read_config(answer["config"])
    return info


def _made_durable(diff: Mapping[str, tuple[Any, Any]]) -> str:
    """Return what to do if the difference is that an entry names a durable consumer; "" if it is another one."""
    if "mirror" in diff:
        want, have = diff["mirror"]
        if want and have and want.consumer and want.consumer != have.consumer:
            return (
                "servers never change a mirror (10055): to read it by a durable consumer, create another stream, or delete "
                "this one and create it again"
            )
    want, have = diff.get("sources", ((), ()))
    existing = {(entry.name, entry.consumer and entry.consumer.name) for entry in have or ()}
    origins = {name for name, _ in existing}
    names = [
        entry.name
        for entry in want or ()
        if entry.consumer and entry.name in origins and (entry.name, entry.consumer.name) not in existing
    ]
    if not names:
        return ""
    return (
        f"js.update_stream makes a source durable, but copies every message of {', '.join(map(repr, names))} again, unless its "
        "consumer starts behind the last copy (the second field of the header Nats-Stream-Source); "
        "see 'Make a source durable' in the how-to guides"
    )
