"""Consumer reset and durable sourcing (ADR-60), and the health of a stream's mirror and sources."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import permutations
from typing import Any, Final, TypeAlias

import orjson
from nats.js import JetStreamContext
from nats.js.api import (
    DEFAULT_PREFIX,
    AckPolicy,
    ConsumerConfig,
    ConsumerReset,
    DeliverPolicy,
    ExternalStream,
    StreamConsumerSource,
    StreamSource,
)
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api, first_since, gather_bounded, malformed_as_error, stream_state
from jetstream_ext.client.connection import Context
from jetstream_ext.client.streams import check_leader
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ServerError
from jetstream_ext.protocol.api import check_config, parse_refusal
from jetstream_ext.protocol.feature_table import CONSUMER_RESET, DURABLE_SOURCE
from jetstream_ext.protocol.numbers import json_int64, json_number
from jetstream_ext.protocol.options import check_sequence, check_unicode, rfc3339
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject, covers

_STALLED_AFTER: Final = timedelta(seconds=10)  # then a server restarts the source; heartbeats come every second
_CONFIG_OPTIONS: Final = (
    "description", "filter_subjects", "max_ack_pending", "metadata", "num_replicas", "pause_until", "rate_limit_bps",
    "replay_policy", "sample_freq",
)  # fmt: skip
_FORCED: Final[Mapping[str, Any]] = {
    "ack_policy": AckPolicy.FLOW_CONTROL,
    "flow_control": True,
    "idle_heartbeat": 1.0,  # seconds
    "max_deliver": -1,
}
"""The options of a source consumer that servers set, whatever is given."""
_ONE_OF_A_QUEUE: Final = "give filters that no other consumer of the work queue has, or delete the other one"
_ADVICE: Final[Mapping[int | None, str]] = {
    ErrorCode.CONSUMER_DELIVER_CYCLE: "give a deliver_subject that no stream stores",
    ErrorCode.CONSUMER_WORK_QUEUE_UNFILTERED: _ONE_OF_A_QUEUE,
    ErrorCode.CONSUMER_WORK_QUEUE_NOT_UNIQUE: _ONE_OF_A_QUEUE,
    ErrorCode.CONSUMER_WORK_QUEUE_NOT_ALL: "leave out deliver_policy, opt_start_seq and opt_start_time",
}
"""What to do about a refusal of a source consumer."""


async def reset_consumer(
    js: JetStreamContext,
    stream: str,
    consumer: str,
    *,
    seq: int | None = None,
    time: datetime | None = None,
    timeout: float | None = None,
) -> ConsumerReset:
    """Restart a consumer from its ack floor, a sequence or a time.

    ADR-60, Consumer delivery state reset API. Messages that were delivered and not acknowledged are delivered again,
    with delivery counts from 1. Without `seq` and `time`, this includes messages above the ack floor that were
    acknowledged out of order. Subscribers continue at the new position without any action. An acknowledgement of a
    delivery before the reset is ignored, unless the message has been delivered again since. On a work queue, the
    messages that a reset skips stay in the stream; on an interest stream they are removed.

    Servers never answer a reset of an unknown consumer, nor do servers without this feature. nats-py's
    ``js.reset_consumer`` then times out; this call first asks for the consumer, and fails at once.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        stream: The stream's name.
        consumer: The consumer's name; it may be durable or ephemeral, pull or push.
        seq: Deliver next the first message with this sequence (from 1) or a later one. If the stream does not have
            it yet, the consumer waits for it.
        time: Deliver next the first message that was stored at or after this aware datetime, or else the next one to
            be stored. Excludes `seq`.
        timeout: Seconds for the whole call; None is the context's timeout.

    Returns:
        nats-py's ``ConsumerReset``: ``reset_seq``, the first sequence that may be delivered next, and the consumer's
        new ``info``.

    Raises:
        ValueError: `seq` is not from 1 to 2**64-1, `time` is naive, or both are given.
        nats.js.errors.NotFoundError: There is no such stream or consumer.
        UnsupportedFeatureError: The consumer's server is older than 2.14.
        ConsumerInvalidResetError: 10204: with `seq` or `time`, the deliver policy must be ``all``,
            ``by_start_sequence`` or ``by_start_time``, and the new start must not be before the policy's own.
        RequestTimeoutError: No answer in time, for instance during an election. The reset may have happened.
        nats.js.errors.ServiceUnavailableError: There is no JetStream.
        ServerError: Any other refusal.
        ResponseError: The answer is malformed.

    Cancellation: The reset may have happened; nothing is left behind.

    Requires: nats-server 2.14 (API level 4).
    """
    check_name(stream, "stream name")
    check_name(consumer, "consumer name")
    if seq is not None:
        check_sequence(seq, "seq")
    if time is not None:
        if seq is not None:
            raise ValueError("give seq or time, not both")
        rfc3339(time, "time")
    context = Context(js)
    api = Api(context, timeout)
    info = await api.ask(f"CONSUMER.INFO.{stream}.{consumer}")
    with malformed_as_error(f"consumer {consumer!r}"):
        check_leader(context, info.get("config") or {}, [CONSUMER_RESET], "nothing was changed")
    if time is not None:
        seq = await first_since(api, await stream_state(api, stream), time)
    answer = await api.ask(f"CONSUMER.RESET.{stream}.{consumer}", None if seq is None else {"seq": seq})
    with malformed_as_error(f"consumer {consumer!r} (which is now reset)"):
        return ConsumerReset.from_response(answer)


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
    what the reading stream has stored (but see the warning in "Durable sources" in the documentation). One consumer
    serves one reading stream: two that share it acknowledge each other's messages.

    A repeated call with the same arguments is safe; an existing consumer is never changed.

    Args:
        js: nats-py's JetStream context of the stream that is *read*. With a domain or another prefix, the entry
            refers to it (see `external`).
        stream: The stream to read, with limits, interest or work-queue retention.
        name: The consumer's name.
        deliver_subject: A literal subject that both servers can use and that no stream stores; each consumer needs
            its own.
        filter_subject: Read only this subject or filter (on a work queue, filters of consumers must not overlap). None, and
            no ``filter_subjects`` in `config`, is every subject, with every deliver policy.
        opt_start_seq: Start at this sequence (``by_start_sequence``).
        opt_start_time: Start at this aware datetime (``by_start_time``).
        deliver_policy: Where to start; None is what the two arguments above imply, or else ``all``. A work queue can only
            be read with ``all``.
        config: Everything else: ``description``, ``filter_subjects`` (which must not include each other),
            ``max_ack_pending``, ``replay_policy``, ``num_replicas``, ``metadata``, ``pause_until``, ``rate_limit_bps`` and
            ``sample_freq``; any other option is an error. Servers force some options: ``ack_policy`` is ``flow_control``,
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
        ValueError: Servers refuse or silently replace a name or option, it would leave the stream unread, or UTF-8 cannot
            encode a text.
        TypeError: ``filter_subjects`` is not a list.
        nats.js.errors.NotFoundError: There is no such stream.
        UnsupportedFeatureError: The server is older than 2.14. Nothing was created.
        ServerError: The server refused; 10148: a consumer of this name exists with another configuration; 10101: a work
            queue is not read with ``all``.
        nats.js.errors.ServiceUnavailableError, RequestTimeoutError: There is no JetStream, or no leader or answer in time.

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
    if policy is DeliverPolicy.LAST_PER_SUBJECT and not base.filter_subjects:
        filter_subject = filter_subject or ">"  # servers refuse this policy without a filter
    body = base.evolve(
        name=name,
        durable_name=name,
        deliver_subject=deliver_subject,
        filter_subject=filter_subject,
        deliver_policy=policy,
        opt_start_seq=opt_start_seq,
        opt_start_time=opt_start_time,
        **_FORCED,
    ).as_dict()
    check_unicode(body, f"the configuration of consumer {name!r}")
    if external is not None:
        check_unicode(external.as_dict(), "external")
    context = Context(js)
    api = Api(context, timeout)
    subject = f"CONSUMER.CREATE.{stream}.{name}"
    if filter_subject not in (None, ">"):
        subject += f".{filter_subject}"
    try:
        await api.ask(subject, {"stream_name": stream, "config": body, "action": "create"})
    except ServerError as refusal:
        if refusal.err_code == ErrorCode.INVALID_JSON:  # the answer of servers that lack this ack policy
            DURABLE_SOURCE.check(await api.level(), context.connection.server_version, "nothing was created")
        if refusal.err_code in _ADVICE:
            text = f"{refusal.message}; {_ADVICE[refusal.err_code]}"
            raise ServerError(text, code=refusal.code, err_code=refusal.err_code) from refusal
        raise
    if external is None and context.prefix != DEFAULT_PREFIX:
        external = ExternalStream(api=context.prefix)
    return StreamSource(
        name=stream, external=external, consumer=StreamConsumerSource(name=name, deliver_subject=deliver_subject)
    )


def _start(policy: DeliverPolicy | None, seq: int | None, time: datetime | None) -> DeliverPolicy:
    """Return the deliver policy for the options; raise ValueError if they contradict each other."""
    if seq is not None:
        check_sequence(seq, "opt_start_seq")
    if time is not None:
        rfc3339(time, "opt_start_time")
    starts = {DeliverPolicy.BY_START_SEQUENCE: seq, DeliverPolicy.BY_START_TIME: time}
    implied = [each for each, value in starts.items() if value is not None]
    chosen = DeliverPolicy(policy or next(iter(implied), DeliverPolicy.ALL))
    if implied != [each for each in starts if each is chosen]:
        raise ValueError(
            f"deliver_policy {chosen.value!r} does not go with the start: give opt_start_seq for 'by_start_sequence', "
            "opt_start_time for 'by_start_time', and neither for another policy"
        )
    return chosen


def _check_config(config: ConsumerConfig, filter_subject: str | None) -> None:
    """Raise ValueError or TypeError unless a source consumer can have the options of `config` and these filters."""
    default = ConsumerConfig()
    for name, value in vars(config).items():
        is_given = value != getattr(default, name) and (bool(value) or name in _FORCED)
        if is_given and name not in _CONFIG_OPTIONS and value != _FORCED.get(name):
            raise ValueError(
                f"the config of a source consumer cannot have {name}={value!r}, only {', '.join(_CONFIG_OPTIONS)}; other options "
                "are arguments of create_source_consumer, or the server sets them (ADR-60)"
            )
    if (config.max_ack_pending or 0) < 0:
        raise ValueError(
            "max_ack_pending must not be negative, because flow control needs a limit; None means 1000 (ADR-60)"
        )
    if isinstance(config.filter_subjects, str):
        raise TypeError(f"filter_subjects must be a list, not {config.filter_subjects!r}; give filter_subject for one")
    if config.filter_subjects and filter_subject is not None:
        raise ValueError("give filter_subject or config.filter_subjects, not both")
    for subject in config.filter_subjects or ():
        check_filter(subject)
    for wide, narrow in permutations(config.filter_subjects or (), 2):
        if covers(wide, narrow):
            raise ValueError(f"filter_subjects: {wide!r} includes {narrow!r}; servers refuse filters that overlap")


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


_Origin: TypeAlias = tuple[SourceState, str, int | None]
"""What an origin says about an entry: the state, its cause, and the number of pending messages."""


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

    Requires: Any server; durable consumers need nats-server 2.14.
    """
    check_name(stream, "stream name")
    api = Api(Context(js), timeout)
    info = await api.stream(stream)
    with malformed_as_error(f"stream {stream!r} or one of its origins"):
        config, domain = info["config"], info.get("domain")
        check_config(config)
        mirror = config.get("mirror")
        rows = [row for row in (info.get("mirror"), *(info.get("sources") or ())) if row]

        async def health(entry: Mapping[str, Any]) -> SourceHealth:
            # The rows are in any order and lack the consumer's name.
            reported = [row for row in rows if _identity(row) == _identity(entry)]
            return _health(entry, reported, await _origin(api, entry), domain, mirror=entry is mirror)

        entries = [mirror] if mirror else config.get("sources") or []
        return await gather_bounded(health, entries, limit=len(entries))


def _api_of(entry: Mapping[str, Any]) -> str | None:
    """Return the API prefix of the origin of an entry, if it names one."""
    return (entry.get("external") or {}).get("api")


def _identity(entry: Mapping[str, Any]) -> tuple[object, ...]:
    transforms = entry.get("subject_transforms") or []
    return entry.get("name"), _api_of(entry), entry.get("filter_subject", ""), orjson.dumps(transforms)


def _health(
    entry: Mapping[str, Any], reported: list[Mapping[str, Any]], origin: _Origin, domain: str | None, *, mirror: bool
) -> SourceHealth:
    """Return the health of `entry` from what the reading server reports about it, and from what its origin answers."""
    ages = [json_int64(row.get("active", -1), "active") for row in reported]
    last_active = timedelta(microseconds=max(ages) // 1000) if ages and min(ages) >= 0 else None
    errors = [parse_refusal(row["error"]) for row in reported if row.get("error")]
    state, detail, pending = origin
    if state is SourceState.OK:
        if errors:
            state, detail = SourceState.FAILED, str(errors[0])
        elif last_active is None and domain and _api_of(entry) == f"$JS.{domain}.API":
            state = SourceState.MISCONFIGURED
            detail = (
                f"its external API prefix names the reading server's own domain {domain!r}, so nothing is ever read; "
                "remove external"
            )
        elif last_active is None:
            state, detail = SourceState.WAITING, "nothing has arrived from its origin yet"
        elif last_active > _STALLED_AFTER:
            seconds = last_active.total_seconds()
            state, detail = SourceState.STALLED, f"nothing has arrived from its origin for {seconds:.0f} s"
    return SourceHealth(
        name=entry["name"],
        consumer=(entry.get("consumer") or {}).get("name"),
        mirror=mirror,
        state=state,
        detail=detail,
        lag=max((json_number(row.get("lag", 0), "lag") for row in reported), default=0),
        pending=pending,
        last_active=last_active,
        error=errors[0] if errors else None,
    )


async def _origin(api: Api, entry: Mapping[str, Any]) -> _Origin:
    """Ask the origin of `entry` for its state, the cause, and the number of pending messages."""
    name, wanted = entry["name"], entry.get("consumer")
    prefix = _api_of(entry) or api.context.prefix
    where = f"stream {name!r}" if prefix == DEFAULT_PREFIX else f"stream {name!r} at API prefix {prefix}"
    try:
        if wanted is None:
            await api.stream(name, prefix=prefix)
            return SourceState.OK, "", None
        info = await api.ask(f"CONSUMER.INFO.{name}.{wanted['name']}", prefix=prefix)
    except NotFoundError as error:
        if error.err_code == ErrorCode.STREAM_NOT_FOUND or wanted is None:
            return SourceState.STREAM_MISSING, f"{where} does not exist", None
        return SourceState.CONSUMER_MISSING, f"consumer {wanted['name']!r} on {where} does not exist", None
    except (ServiceUnavailableError, ServerError, RequestTimeoutError) as error:
        # The text of nats-py's ServiceUnavailableError is a list of fields.
        return SourceState.UNREACHABLE, f"{where} does not answer: {getattr(error, 'description', error)}", None
    config = info.get("config") or {}
    pending = sum(json_number(info.get(name, 0), name) for name in ("num_pending", "num_ack_pending"))
    policy, subject, group = (config.get(option) for option in ("ack_policy", "deliver_subject", "deliver_group"))
    if policy != "flow_control":
        fault = f"has ack policy {policy!r}, not 'flow_control'"
    elif subject != wanted.get("deliver_subject"):
        fault = f"delivers to {subject!r}, not to {wanted.get('deliver_subject')!r}"
    elif group:
        fault = f"delivers to the group {group!r}, which a reading server does not join"
    elif info.get("paused"):
        return SourceState.PAUSED, f"its consumer is paused until {config.get('pause_until')}", pending
    else:
        return SourceState.OK, "", pending
    return SourceState.MISCONFIGURED, f"consumer {wanted['name']!r} on {where} {fault}", pending
