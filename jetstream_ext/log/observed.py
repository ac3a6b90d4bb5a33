"""The handling of messages, as an observer is told of it."""

from __future__ import annotations

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.protocol.direct import StoredMsg


def observed_handling(
    observer: telemetry.Observer, connection: BaseConnection, name: str, given: StoredMsg | list[StoredMsg]
) -> telemetry.Operation:
    """Begin the handling of one message or of a list, by the worker or group `name`."""
    facts: dict[str, str | int] = {"messaging.consumer.group.name": name}
    kind = telemetry.Kind.PROCESS
    if isinstance(given, list):
        operation = observer.begin(kind, connection, stream=given[0].stream, sources=given, attributes=facts)
        operation.describe(messages=len(given))
        return operation
    facts["messaging.message.id"] = str(given.seq)
    return observer.begin(
        kind, connection, subject=given.subject, stream=given.stream, sources=[given], attributes=facts
    )
