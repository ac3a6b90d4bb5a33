"""Mirrors and sources: the durable consumer that one reads through (ADR-60), and how they are doing."""

from __future__ import annotations

import asyncio
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
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ServerError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.api import parse_refusal
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject

_HEARTBEAT: Final = 1.0
"""Seconds; servers replace any other value by this one."""

STALLED_AFTER: Final = timedelta(seconds=10)
"""Without a sign of its origin for so long, a server gives up and asks again; heartbeats come every second."""
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
    """Create the durable consumer that another stream reads `stream` through, and return the entry for it.

    ADR-60, Pre-created durable consumer. The entry goes into the reading stream's ``sources`` or ``mirror``. Unlike the
    consumer that a server makes for itself, this one stays while the two are apart and acknowledges only what the
    reading stream has stored, so that nothing is lost from a work queue or an interest stream either. One consumer
    serves one reading stream: two that share it acknowledge for each other.

    Calling it again with the same arguments is fine; an existing consumer is never changed.

    Args:
        js: nats-py's JetStream context of the stream that is *read*; with a domain or another prefix the entry
            refers to it (see `external`).
        stream: The stream that is read: of limits, interest or work-queue retention.
        name: The consumer's name.
        deliver_subject: A literal subject that both servers can use and that no stream stores; each consumer needs
            its own.
        filter_subject: Read only this subject or filter (on a work queue, filters of consumers must not overlap).
        opt_start_seq: Start at this sequence (``by_start_sequence``).
        opt_start_time: Start at this aware datetime (``by_start_time``).
        deliver_policy: Where to start; None is ``all``, or what the two arguments before imply.
        config: Everything else (``description``, ``filter_subjects``, ``max_ack_pending``, ``replay_policy``,
            ``num_replicas``, ``metadata`` ...). What servers force is not open to choice: ``ack_policy`` is
            ``flow_control``, ``flow_control`` is on, ``idle_heartbeat`` is 1 s, ``max_deliver`` is -1, ``ack_wait``
            and ``backoff`` are unset, ``max_ack_pending`` is over 0 (1000 by default).
        external: How the reading server reaches this JetStream; None is by the prefix of `js` if that is not the
            default ``$JS.API``. A stream of the same domain must not have it (``entry.evolve(external=None)``; as
            `ensure_stream` does by itself): servers never reach themselves by their own domain, and do not say so.
        timeout: Seconds; None is the context's timeout.

    Returns:
        nats-py's ``StreamSource``; ``evolve`` it to add ``subject_transforms``. Servers refuse a start or a filter
        in the entry: those are the consumer's.

    Raises:
        ValueError: A name or option that servers refuse, silently replace, or that would leave the stream unread.
        nats.js.errors.NotFoundError: there is no such stream.
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
        # Older servers know no such ack policy, and say that the JSON is invalid.
        if refusal.err_code == ErrorCode.INVALID_JSON and not feature_table.DURABLE_SOURCE.at(
            level := await api.level()
        ):
            raise feature_table.DURABLE_SOURCE.unsupported(
                server_version=context.connection.server_version, api_level=level, detail="nothing was created"
            ) from refusal
        raise
    if external is None and context.prefix != DEFAULT_PREFIX:
        external = ExternalStream(api=context.prefix)
    return StreamSource(
        name=stream, external=external, consumer=StreamConsumerSource(name=name, deliver_subject=deliver_subject)
    )


def _start(policy: DeliverPolicy | None, seq: int | None, time: datetime | None) -> DeliverPolicy:
    """Return the deliver policy that the options say together."""
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq < 1 << 64):
        raise ValueError(f"opt_start_seq must be a stream sequence from 1 up, not {seq!r}")
    if time is not None:
        rfc3339(time, "opt_start_time")
    given = {name for name, value in (("opt_start_seq", seq), ("opt_start_time", time)) if value is not None}
    if len(given) == 2:
        raise ValueError("give opt_start_seq or opt_start_time, not both")
    implied = next((policy for policy, name in _START_OPTIONS.items() if name in given), DeliverPolicy.ALL)
    policy = implied if policy is None else DeliverPolicy(policy)
    needed = _START_OPTIONS.get(policy)
    if given != ({needed} if needed else set()):
        raise ValueError(f"deliver_policy {policy.value!r} {f'needs {needed}' if needed else 'takes no start'}")
    return policy


def _check_config(config: ConsumerConfig, filter_subject: str | None) -> None:
    """Refuse what servers would refuse or silently replace on a source's consumer, and what cannot work."""
    default = ConsumerConfig()
    for name in _OWN_KEYWORDS:
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"give {name} as an argument of create_source_consumer, not in config")
    if config.filter_subjects and filter_subject is not None:
        raise ValueError("give filter_subject or config.filter_subjects, not both")
    for subject in config.filter_subjects or ():
        check_filter(subject)
    wrong: dict[str, tuple[Any, str]] = {
        "ack_policy": (
            config.ack_policy not in (default.ack_policy, AckPolicy.FLOW_CONTROL),
            "the reading server acknowledges by flow control",
        ),
        "flow_control": (config.flow_control is False, "flow control is how the reading server acknowledges"),
        "idle_heartbeat": (
            config.idle_heartbeat not in (None, 0, _HEARTBEAT),
            "servers replace it by 1 s, which the reading server relies on",
        ),
        "max_deliver": (
            config.max_deliver not in (None, 0, -1),
            "a message that is lost on the way must be delivered again, however often",
        ),
        "ack_wait": (config.ack_wait, "flow control, not a time, says what is acknowledged"),
        "backoff": (config.backoff, "flow control, not a time, says what is acknowledged"),
        "max_ack_pending": (
            config.max_ack_pending is not None and config.max_ack_pending < 0,
            "it bounds what is on the way; None is 1000",
        ),
        "deliver_group": (config.deliver_group, "the reading server joins no group, and would get nothing"),
        "inactive_threshold": (
            config.inactive_threshold,
            "the consumer, and with it the interest, would go while the reading server is away",
        ),
        "mem_storage": (config.mem_storage, "the consumer, and with it the interest, would go when a server restarts"),
        "headers_only": (config.headers_only, "the reading stream would store the messages without their payloads"),
    }
    for name, (found, reason) in wrong.items():
        if found:
            raise ValueError(f"a source's consumer cannot have {name}={getattr(config, name)!r}: {reason} (ADR-60)")


class SourceState(enum.StrEnum):
    """How a mirror or source is."""

    OK = "ok"
    """It hears from its origin."""
    WAITING = "waiting"
    """Nothing is wrong with it that can be seen, but it has not heard from its origin yet."""
    STALLED = "stalled"
    """It has not heard from its origin for over 10 s."""
    PAUSED = "paused"
    """Its consumer is paused."""
    CONSUMER_MISSING = "consumer_missing"
    """There is no such consumer; the server keeps asking, is never answered, and says nothing."""
    MISCONFIGURED = "misconfigured"
    """It can never work, although the server reports no error. The consumer has another ack policy, another deliver
    subject or a deliver group, or the entry names the server's own domain as another's."""
    STREAM_MISSING = "stream_missing"
    """There is no such stream."""
    UNREACHABLE = "unreachable"
    """Nobody answers for its origin."""
    FAILED = "failed"
    """The server reports an error."""


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How one mirror or source of a stream is.

    Attributes:
        name: The stream that is read.
        consumer: The durable consumer that it is read through (ADR-60); None where the server makes its own.
        mirror: Whether it is the stream's mirror, not one of its sources.
        state: The verdict.
        detail: The verdict in words; empty when all is well.
        lag: How many messages it is behind, as the reading server knows it: 0 while it hears nothing.
        pending: How many messages the durable consumer has not seen acknowledged, as its own server knows it: also
            right while the two are apart. None without such a consumer, or where it cannot be asked.
        last_active: How long ago the reading server last heard from the origin; None is never.
        error: What the reading server reports.
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
        """Whether it reads, or would as soon as there is something to read."""
        return self.state is SourceState.OK


async def source_health(js: JetStreamContext, stream: str, *, timeout: float | None = None) -> list[SourceHealth]:
    """Return how the mirror and the sources of `stream` are, one row each, in the order of its configuration.

    The server's own rows stay silent about a durable consumer that does not exist, never did, or delivers elsewhere
    (``lag`` 0, no error, for ever). So the origin is asked as well: for each row one ``CONSUMER.INFO``, or one
    ``STREAM.INFO`` where the server makes its own consumer, through the entry's ``external`` API.

    Args:
        js: nats-py's JetStream context of the stream that reads.
        stream: Its name.
        timeout: Seconds for all of it; None is the context's timeout. An origin that does not answer in time is
            ``unreachable``; so is one that the user may not ask.

    Returns:
        No rows for a stream that reads no other. Two sources of one stream share what the server says of them (lag,
        last activity, error): it does not tell them apart.

    Raises:
        nats.js.errors.NotFoundError: there is no such stream.
        nats.js.errors.ServiceUnavailableError, ServerError, RequestTimeoutError: `stream` itself could not be asked
            for.
        ResponseError: An answer that makes no sense.

    Cancellation: Safe; nothing is left behind.

    Requires: Any server; durable consumers nats-server 2.14.
    """
    check_name(stream, "stream name")
    api = Api(Context(js), timeout)
    info = await api.ask(f"STREAM.INFO.{stream}")
    with reading(f"stream {stream!r} or an origin of it"):
        config, domain = info["config"], info.get("domain")
        mirror = [entry for entry in (config.get("mirror"),) if entry]
        sources = config.get("sources") or []
        reported = [row for row in (info.get("mirror"),) if row], info.get("sources") or []
        found = await asyncio.gather(
            *(_health(api, entry, reported[0], domain, mirror=True) for entry in mirror),
            *(_health(api, entry, reported[1], domain, mirror=False) for entry in sources),
            return_exceptions=True,
        )
        healths: list[SourceHealth] = []
        for health in found:
            if isinstance(health, BaseException):
                raise health
            healths.append(health)
        return healths


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
            detail = f"it names its own domain {domain!r} as external, by which a server never reaches itself"
    elif state is SourceState.OK and last_active is not None and last_active > STALLED_AFTER:
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
    """Return lag, time since the last activity, and error of `entry` as its server reports them."""
    # The rows come in any order and without the consumer's name.
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
    """Ask the origin of `entry`: what is wrong there, and how much it has pending for it."""
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
        return SourceState.UNREACHABLE, f"{where} cannot be asked: {error}", None
    config = info.get("config") or {}
    pending = int(info.get("num_pending", 0)) + int(info.get("num_ack_pending", 0))
    if config.get("ack_policy") != "flow_control":
        unfit = f"has ack policy {config.get('ack_policy')!r}, not 'flow_control'"
    elif config.get("deliver_subject") != consumer.get("deliver_subject"):
        unfit = f"delivers to {config.get('deliver_subject')!r}, not to {consumer.get('deliver_subject')!r}"
    elif config.get("deliver_group"):
        unfit = f"delivers to the group {config['deliver_group']!r}, which a reading server does not join"
    elif info.get("paused"):
        return SourceState.PAUSED, f"its consumer is paused until {config.get('pause_until')}", pending
    else:
        return SourceState.OK, "", pending
    return SourceState.MISCONFIGURED, f"consumer {consumer['name']!r} on {where} {unfit}", pending
