"""What the server behind a JetStream context can do."""

from __future__ import annotations

from dataclasses import dataclass

from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX

from jetstream_ext.client.api import Api
from jetstream_ext.client.context import Context
from jetstream_ext.errors import RequestTimeoutError
from jetstream_ext.protocol import feature_table


@dataclass(frozen=True, slots=True)
class Features:
    """What a server can do. A stream must also allow it: see the option in the table of features.

    Attributes:
        server_version: The version of the server that the client is connected to. Behind a domain or a leaf node the
            JetStream is another server's, whose version it does not tell.
        api_level: The JetStream API level of the JetStream that answers (ADR-44); 0 is a server before 2.11.
        direct_batch: `DirectGet.batch`, `scan`, `multi_last` and `get_at` (ADR-31; 2.11, level 1).
        msg_ttl: ``Nats-TTL`` and delete markers (ADR-43; 2.11, level 1).
        atomic: `AtomicBatch` (ADR-50; 2.12, level 2).
        atomic_eob: A commit that stores nothing (ADR-50; 2.14, level 4); `AtomicBatch` does without where it must.
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
    """Return what the server behind `js` can do.

    One request to ``$JS.API.INFO``, which the JetStream itself answers: the greeting of a connection speaks only of
    the server at its other end, and says nothing before 2.12. Where that request is not answered (a user may lack the
    permission), the greeting has to do.

    Args:
        js: nats-py's JetStream context; its prefix and domain are honoured.
        timeout: Seconds to wait for the answer; None is the context's timeout.

    Raises:
        nats.js.errors.ServiceUnavailableError: there is no JetStream.
        RequestTimeoutError: No answer in time, and the greeting does not say it either.
        ServerError: The server refused, for instance because JetStream is off for the account.

    Cancellation: Safe; nothing is left behind.

    Requires: Any server; 2.10 is the oldest that is tested.
    """
    context = Context(js)
    try:
        level = await Api(context, timeout).level()
    except RequestTimeoutError:
        greeted = context.connection.api_level
        if greeted is None or context.prefix != DEFAULT_PREFIX:
            raise
        level = greeted
    return Features(
        server_version=context.connection.server_version,
        api_level=level,
        direct_batch=feature_table.DIRECT_BATCH.at(level),
        msg_ttl=feature_table.MSG_TTL.at(level),
        atomic=feature_table.ATOMIC.at(level),
        atomic_eob=feature_table.ATOMIC_EOB.at(level),
        fast_ingest=feature_table.FAST_INGEST.at(level),
        consumer_reset=feature_table.CONSUMER_RESET.at(level),
        durable_source=feature_table.DURABLE_SOURCE.at(level),
    )
