"""Mirrors and sources: durable consumers for sourcing (ADR-60), and the health of a stream's sources."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import orjson
from nats.js import JetStreamContext
from nats.js.api import (
    DEFAULT_PREFIX,
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    ExternalStream,
    StreamConsumerSource,
    StreamSource,
)
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api, reading
from jetstream_ext.client.concurrency import gather_bounded
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ServerError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.api import parse_refusal
from jetstream_ext.protocol.options import check_sequence, rfc3339
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject

_HEARTBEAT: Final = 1.0  # seconds; servers replace any other value
_STALLED_AFTER: Final = timedelta(seconds=10)  # then a server restarts the source; heartbeats come every second
_OWN_KEYWORDS: Final = (
    "name",
    "durable_name",
    "deliver_subject",
    "filter_subject",
    "opt_start_seq",
    "opt_start_time",
    "deliver_policy",
)
_START_OPTIONS: Final = {
    DeliverPolicy.BY_START_SEQUENCE: "opt_start_seq",
    DeliverPolicy.BY_START_TIME: "opt_start_time",
}


async def create_source_consumer(
    js: JetStreamContext,
    stream: str,
    name: str,
    *,
    deliver_subject: str,
    filter_subject: str | None = None,
    opt_start_seq: int | None = None,
    opt_start_time: datetime | None = None,
    deliver_policy: DeliverPolicy | None = None,
    config: ConsumerConfig | None = None,
    external: ExternalStream | None = None,
    timeout: float | None = None,
) -> StreamSource:
    """Create a durable consumer on `stream` for another stream to read through, and return that stream's entry.

    ADR-60, Pre-created durable consumer. The entry goes into the reading stream's ``sources`` or ``mirror``. Unlike the
    consumer that a server creates by default, this one stays while the servers are disconnected, and acknowledges only
    what the reading stream has stored. A work queue or an interest stream therefore loses no messages. One consumer
    serves one reading stream: two that share it acknowledge each other's messages.

    A repeated call with the same arguments is safe; an existing consumer is never changed.

    Args:
        js: nats-py's JetStream context of the stream that is *read*. With a domain or another prefix, the entry
            refers to it (see `external`).
        stream: The stream to read, with limits, interest or work-queue retention.
        name: The consumer's name.
        deliver_subject: A literal subject that both servers can use and that no stream stores; each consumer needs
            its own.
        filter_subject: Read only this subject or filter (on a work queue, filters of consumers must not overlap).
        opt_start_seq: Start at this sequence (``by_start_sequence``).
        opt_start_time: Start at this aware datetime (``by_start_time``).
        deliver_policy: Where to start; None is what the two arguments above imply, or else ``all``.
        config: Everything else (``description``, ``filter_subjects``, ``max_ack_pending``, ``replay_policy``,
            ``num_replicas``, ``metadata`` ...). Servers force some options: ``ack_policy`` is ``flow_control``,
            ``flow_control`` is on, ``idle_heartbeat`` is 1 s, ``max_deliver`` is -1, ``ack_wait`` and ``backoff`` are
            unset, ``max_ack_pending`` is over 0 (1000 by default).
        external: How the reading server reaches this JetStream; None is by the prefix of `js`, unless that is the
            default ``$JS.API``. Remove it for a stream of the same domain (``entry.evolve(external=None)``;
            `ensure_stream` does so): a server cannot reach itself by its own domain, and reports no error.
        timeout: Seconds; None is the context's timeout.

    Returns:
        nats-py's ``StreamSource``; ``evolve`` it to add ``subject_transforms``. Servers refuse a start or a filter
        in the entry: the consumer has them.

    Raises:
        ValueError: Servers refuse or silently replace a name or option, or it would leave the stream unread.
        nats.js.errors.NotFoundError: There is no such stream.
        UnsupportedFeatureError: The server is older than 2.14. Nothing was created.
        ServerError: The server refused; 10148: a consumer of this name exists with another configuration.
        nats.js.errors.ServiceUnavailableError, RequestTimeoutError: There is no JetStream, or no answer in time.

    Cancellation: The consumer may have been created; nothing else is left behind.

    Requires: nats-server 2.14 (API level 4) on both sides; an older reading server may ignore the consumer.
    """
    check_name(stream, "stream name")
    check_name(name, "consumer name")
    check_subject(deliver_subject)
    if filter_subject is not None:
        check_filter(filter_subject)
    base = config or ConsumerConfig()
    _check_config(base, filter_subject)
    policy = _start(deliver_policy, opt_start_seq, opt_start_time)
    body = base.evolve(
        name=name,
        durable_name=name,
        deliver_subject=deliver_subject,
        filter_subject=filter_subject,
        deliver_policy=policy,
        opt_start_seq=opt_start_seq,
        opt_start_time=opt_start_time,
        ack_policy=AckPolicy.FLOW_CONTROL,
        flow_control=True,
        idle_heartbeat=_HEARTBEAT,
        max_deliver=-1,
    ).as_dict()
    context = Context(js)
    api = Api(context, timeout)
    subject = f"CONSUMER.CREATE.{stream}.{name}"
    if filter_subject not in (None, ">"):
        subject += f".{filter_subject}"
    try:
        await api.ask(subject, {"stream_name": stream, "config": body, "action": "create"})
    except ServerError as refusal:
        if refusal.err_code != ErrorCode.INVALID_JSON:  # the answer of servers that lack this ack policy
            raise
        level = await api.level()
        if feature_table.DURABLE_SOURCE.at(level):
            raise
        version = context.connection.server_version
        raise feature_table.DURABLE_SOURCE.unsupported(
            server_version=version, api_level=level, detail="nothing was created"
        ) from refusal
    if external is None and context.prefix != DEFAULT_PREFIX:
        external = ExternalStream(api=context.prefix)
    return StreamSource(
        name=stream, external=external, consumer=StreamConsumerSource(name=name, deliver_subject=deliver_subject)
    )


def _start(policy: DeliverPolicy | None, seq: int | None, time: datetime | None) -> DeliverPolicy:
    """Return the deliver policy for the options, or raise ValueError if they contradict each other."""
    if seq is not None:
        check_sequence(seq, "opt_start_seq")
    if time is not None:
        rfc3339(time, "opt_start_time")
    given = {name for name, value in (("opt_start_seq", seq), ("opt_start_time", time)) if value is not None}
    if len(given) == 2:
        raise ValueError("opt_start_seq and opt_start_time exclude each other: give one, not both")
    implied = next((policy for policy, name in _START_OPTIONS.items() if name in given), DeliverPolicy.ALL)
    policy = implied if policy is None else DeliverPolicy(policy)
    needed = _START_OPTIONS.get(policy)
    if given != ({needed} if needed else set()):
        needs = f"needs {needed} and no other start" if needed else "takes no start"
        raise ValueError(f"deliver_policy {policy.value!r} {needs}")
    return policy


def _check_config(config: ConsumerConfig, filter_subject: str | None) -> None:
    """Raise ValueError for options that servers refuse or silently replace, or that would break the source."""
    default = ConsumerConfig()
    for name in _OWN_KEYWORDS:
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"give {name} as an argument of create_source_consumer, not in config")
    if config.filter_subjects and filter_subject is not None:
        raise ValueError("filter_subject and config.filter_subjects exclude each other")
    for subject in config.filter_subjects or ():
        check_filter(subject)
    wrong: dict[str, tuple[Any, str]] = {
        "ack_policy": (
            config.ack_policy not in (default.ack_policy, AckPolicy.FLOW_CONTROL),
            "the reading server acknowledges by flow control",
        ),
        "flow_control": (config.flow_control is False, "the reading server acknowledges by flow control"),
        "idle_heartbeat": (
            config.idle_heartbeat not in (None, 0, _HEARTBEAT),
            "servers replace it with 1 s, on which the reading server relies",
        ),
        "max_deliver": (
            config.max_deliver not in (None, 0, -1),
            "a lost message must be delivered again, without a limit",
        ),
        "ack_wait": (config.ack_wait, "the reading server acknowledges by flow control"),
        "backoff": (config.backoff, "the reading server acknowledges by flow control"),
        "max_ack_pending": (
            config.max_ack_pending is not None and config.max_ack_pending < 0,
            "it must limit the unacknowledged messages; None is 1000",
        ),
        "deliver_group": (config.deliver_group, "the reading server joins no group and would receive nothing"),
        "inactive_threshold": (
            config.inactive_threshold,
            "the server would delete the consumer while the reading server is away",
        ),
        "mem_storage": (config.mem_storage, "a restart of the server would delete the consumer"),
        "headers_only": (config.headers_only, "the reading stream would store the messages without their payloads"),
    }
    for name, (found, reason) in wrong.items():
        if found:
            raise ValueError(f"a source consumer cannot have {name}={getattr(config, name)!r}: {reason} (ADR-60)")


class SourceState(enum.StrEnum):
    """The state of a mirror or source."""

    OK = "ok"
    """It receives messages or heartbeats from its origin."""
    WAITING = "waiting"
    """It has not heard from its origin yet, and no cause is visible."""
    STALLED = "stalled"
    """It has not heard from its origin for over 10 s."""
    PAUSED = "paused"
    """Its consumer is paused."""
    CONSUMER_MISSING = "consumer_missing"
    """Its consumer does not exist. The server reports no error for this."""
    MISCONFIGURED = "misconfigured"
    """It cannot work, although the server reports no error. The consumer has another ack policy, another deliver
    subject or a deliver group, or the entry names the server's own domain as external."""
    STREAM_MISSING = "stream_missing"
    """Its origin does not exist."""
    UNREACHABLE = "unreachable"
    """No server answers for its origin."""
    FAILED = "failed"
    """The server reports an error."""


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """The health of one mirror or source of a stream.

    Attributes:
        name: The origin: the stream that is read.
        consumer: The durable consumer that it is read through (ADR-60); None if the server creates its own.
        mirror: Whether it is the stream's mirror, not one of its sources.
        state: The state.
        detail: The cause of the state; empty for ``ok``.
        lag: The number of messages it is behind, as the reading server knows it: 0 while it hears nothing.
        pending: The number of messages that the durable consumer has not seen acknowledged, as the origin's server
            knows it. It is right even while the servers are disconnected. None without a durable consumer, or if that
            cannot be asked.
        last_active: The time since the reading server last heard from the origin; None is never.
        error: The error that the reading server reports.
    """

    name: str
    consumer: str | None
    mirror: bool
    state: SourceState
    detail: str
    lag: int
    pending: int | None
    last_active: timedelta | None
    error: ServerError | None

    @property
    def ok(self) -> bool:
        """Whether it reads its origin, or is ready to."""
        return self.state is SourceState.OK


async def source_health(js: JetStreamContext, stream: str, *, timeout: float | None = None) -> list[SourceHealth]:
    """Return the health of the mirror and the sources of `stream`, one row each, in the order of its configuration.

    The reading server does not report a durable consumer that is missing or delivers elsewhere: it keeps showing a
    ``lag`` of 0 and no error. This call therefore also asks each origin, through the entry's ``external`` API: for its
    ``CONSUMER.INFO``, or its ``STREAM.INFO`` if the server creates its own consumer.

    Args:
        js: nats-py's JetStream context of the reading stream.
        stream: The reading stream's name.
        timeout: Seconds for the whole call; None is the context's timeout. An origin that does not answer in time, or
            that the client may not ask, is ``unreachable``.

    Returns:
        No rows for a stream without mirror and sources. Two sources with the same origin share the reading server's
        figures (lag, last activity, error), because the server does not tell them apart.

    Raises:
        nats.js.errors.NotFoundError: There is no such stream.
        nats.js.errors.ServiceUnavailableError, ServerError, RequestTimeoutError: No answer about `stream` itself.
        ResponseError: The answer is malformed.

    Cancellation: Safe; nothing is left behind.

    Requires: Any server; durable consumers nats-server 2.14.
    """
    check_name(stream, "stream name")
    api = Api(Context(js), timeout)
    info = await api.ask(f"STREAM.INFO.{stream}")
    with reading(f"stream {stream!r} or an origin of it"):
        config, domain = info["config"], info.get("domain")
        mirror, mirror_row = config.get("mirror"), info.get("mirror")
        entries = [(mirror, [mirror_row] if mirror_row else [], True)] if mirror else []
        entries += [(entry, info.get("sources") or [], False) for entry in config.get("sources") or []]

        async def health(entry: tuple[Mapping[str, Any], list[Mapping[str, Any]], bool]) -> SourceHealth:
            return await _health(api, entry[0], entry[1], domain, mirror=entry[2])

        return await gather_bounded(health, entries, limit=len(entries))


async def _health(
    api: Api, entry: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], domain: str | None, *, mirror: bool
) -> SourceHealth:
    lag, last_active, error = _reported(entry, rows)
    state, detail, pending = await _origin(api, entry)
    if state is SourceState.OK and error is not None:
        state, detail = SourceState.FAILED, str(error)
    elif state is SourceState.OK and last_active is None:
        state, detail = SourceState.WAITING, "it has not heard from its origin yet"
        if domain and (entry.get("external") or {}).get("api") == f"$JS.{domain}.API":
            state = SourceState.MISCONFIGURED
            detail = f"its external API is that of its own domain {domain!r}; remove external, or it stays unread"
    elif state is SourceState.OK and last_active is not None and last_active > _STALLED_AFTER:
        state, detail = SourceState.STALLED, f"it last heard from its origin {last_active.total_seconds():.0f} s ago"
    return SourceHealth(
        name=entry["name"],
        consumer=(entry.get("consumer") or {}).get("name"),
        mirror=mirror,
        state=state,
        detail=detail,
        lag=lag,
        pending=pending,
        last_active=last_active,
        error=error,
    )


def _reported(
    entry: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> tuple[int, timedelta | None, ServerError | None]:
    """Return lag, time since the last activity, and error of `entry` as the reading server reports them."""
    # The rows are in any order and lack the consumer's name.
    mine = [row for row in rows if _identity(row) == _identity(entry)]
    ages = [int(row.get("active", -1)) for row in mine]
    known = [age for age in ages if age >= 0]
    errors = [row["error"] for row in mine if row.get("error")]
    return (
        max((int(row.get("lag", 0)) for row in mine), default=0),
        timedelta(microseconds=max(known) // 1000) if known and len(known) == len(ages) else None,
        parse_refusal(errors[0]) if errors else None,
    )


def _identity(entry: Mapping[str, Any]) -> tuple[object, ...]:
    external = entry.get("external") or {}
    transforms = entry.get("subject_transforms") or []
    return entry.get("name"), external.get("api"), entry.get("filter_subject", ""), orjson.dumps(transforms)


async def _origin(api: Api, entry: Mapping[str, Any]) -> tuple[SourceState, str, int | None]:
    """Ask the origin of `entry` for its state, the cause, and the number of pending messages."""
    name, consumer = entry["name"], entry.get("consumer")
    prefix = (entry.get("external") or {}).get("api") or api.context.prefix
    where = f"stream {name!r}" if prefix == DEFAULT_PREFIX else f"stream {name!r} behind {prefix}"
    try:
        if consumer is None:
            await api.ask(f"STREAM.INFO.{name}", prefix=prefix)
            return SourceState.OK, "", None
        info = await api.ask(f"CONSUMER.INFO.{name}.{consumer['name']}", prefix=prefix)
    except NotFoundError as error:
        if error.err_code == ErrorCode.STREAM_NOT_FOUND or consumer is None:
            return SourceState.STREAM_MISSING, f"there is no {where}", None
        return SourceState.CONSUMER_MISSING, f"there is no consumer {consumer['name']!r} on {where}", None
    except (ServiceUnavailableError, RequestTimeoutError, ServerError) as error:
        return SourceState.UNREACHABLE, f"{where} does not answer: {error}", None
    config = info.get("config") or {}
    pending = int(info.get("num_pending", 0)) + int(info.get("num_ack_pending", 0))
    if config.get("ack_policy") != "flow_control":
        fault = f"has ack policy {config.get('ack_policy')!r}, not 'flow_control'"
    elif config.get("deliver_subject") != consumer.get("deliver_subject"):
        fault = f"delivers to {config.get('deliver_subject')!r}, not to {consumer.get('deliver_subject')!r}"
    elif config.get("deliver_group"):
        fault = f"delivers to the group {config['deliver_group']!r}, which a reading server does not join"
    elif info.get("paused"):
        return SourceState.PAUSED, f"its consumer is paused until {config.get('pause_until')}", pending
    else:
        return SourceState.OK, "", pending
    return SourceState.MISCONFIGURED, f"consumer {consumer['name']!r} on {where} {fault}", pending
