"""Durable sourcing: the consumer that a mirror or source reads through, and its entry (ADR-60)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

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

from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ServerError
from jetstream_ext.protocol import feature_table
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.protocol.subjects import check_filter, check_name, check_subject

_INVALID_JSON: Final = 10025
_HEARTBEAT: Final = 1.0
"""Seconds; servers replace any other value by this one."""

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
        if refusal.err_code == _INVALID_JSON and not feature_table.DURABLE_SOURCE.at(level := await api.level()):
            raise feature_table.DURABLE_SOURCE.unsupported(
                server_version=context.connection.server_version, api_level=level, detail="nothing was created"
            ) from refusal
        raise
    if external is None and context.prefix != DEFAULT_PREFIX:
        external = ExternalStream(api=context.prefix)
    return StreamSource(
        name=stream, external=external, consumer=StreamConsumerSource(name=name, deliver_subject=deliver_subject)
    )


@dataclass
class _ServerManaged(StreamConsumerSource):
    deliver_subject: str = ""
    server_managed: bool = True

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "server_managed": True}


def server_managed_source(
    stream: str,
    name: str,
    *,
    filter_subject: str | None = None,
    opt_start_seq: int | None = None,
    opt_start_time: datetime | None = None,
    external: ExternalStream | None = None,
) -> StreamSource:
    """Return the entry that lets the reading server create the durable consumer, as a draft of ADR-60 has it.

    No released server knows this form: 2.12 and later refuse it (error 10025), 2.10 and 2.11 drop it and read
    without a durable consumer. It is for ``ReferenceServer(dialect="draft")``; elsewhere use `create_source_consumer`.

    Args:
        stream: The stream that is read.
        name: The name for its consumer.
        filter_subject: Read only this subject or filter.
        opt_start_seq: Start at this sequence, or
        opt_start_time: at this aware datetime.
        external: How the reading server reaches the other JetStream.

    Raises:
        ValueError: A name that cannot be, two starts, or a naive datetime.
    """
    check_name(stream, "stream name")
    check_name(name, "consumer name")
    if filter_subject is not None:
        check_filter(filter_subject)
    _start(None, opt_start_seq, opt_start_time)
    return StreamSource(
        name=stream,
        filter_subject=filter_subject,
        opt_start_seq=opt_start_seq,
        opt_start_time=opt_start_time,
        external=external,
        consumer=_ServerManaged(name=name),
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
