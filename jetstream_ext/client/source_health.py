"""What a stream's mirror and sources are doing, the failures that servers keep silent about included."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import orjson
from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX
from nats.js.errors import NotFoundError, ServiceUnavailableError

from jetstream_ext.client.api import Api, reading
from jetstream_ext.client.context import Context
from jetstream_ext.errors import ErrorCode, RequestTimeoutError, ServerError
from jetstream_ext.protocol.api import parse_refusal
from jetstream_ext.protocol.subjects import check_name

STALLED_AFTER: Final = timedelta(seconds=10)
"""Without a sign of its origin for so long, a server gives up and asks again; heartbeats come every second."""


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
    elif not consumer.get("server_managed") and config.get("deliver_subject") != consumer.get("deliver_subject"):
        unfit = f"delivers to {config.get('deliver_subject')!r}, not to {consumer.get('deliver_subject')!r}"
    elif config.get("deliver_group"):
        unfit = f"delivers to the group {config['deliver_group']!r}, which a reading server does not join"
    elif info.get("paused"):
        return SourceState.PAUSED, f"its consumer is paused until {config.get('pause_until')}", pending
    else:
        return SourceState.OK, "", pending
    return SourceState.MISCONFIGURED, f"consumer {consumer['name']!r} on {where} {unfit}", pending
