"""The features of the server behind a JetStream context."""

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

    Cancellation: Safe; nothing is left behind.

    Requires: Any server; 2.10 is the oldest that is tested.
    """
    context = Context(js)
    try:
        level = await Api(context, timeout).level()
    except RequestTimeoutError:
        info_level = context.connection.api_level
        if info_level is None or context.prefix != DEFAULT_PREFIX:
            raise
        level = info_level
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
