"""What an observer is told of readers and workers: the handling of messages, and the storing of positions."""

from __future__ import annotations

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.types import BatchAck


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


def observed_commit(
    observer: telemetry.Observer, connection: BaseConnection, stream: str, name: str, position: int
) -> telemetry.Operation:
    """Begin the storing of a position in a stream, by the reader, worker or group `name`."""
    facts: dict[str, str | int] = {"messaging.consumer.group.name": name, "jetstream_ext.position": position}
    return observer.begin(telemetry.Kind.COMMIT, connection, stream=stream, attributes=facts)


async def store_position(writer: FencedWriter, record: bytes, name: str, position: int) -> BatchAck:
    """Store a record of a position, without messages."""
    observer = telemetry.observer
    if observer is None:
        return await writer.store([], record)
    with observed_commit(observer, writer.context.connection, writer.stream, name, position):
        return await writer.store([], record)
