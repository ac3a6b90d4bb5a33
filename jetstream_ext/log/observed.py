"""What an observer is told of readers and workers: their lag, the handling of messages, and the storing of positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.types import BatchAck


class _Reader(Protocol):
    """A `LogReader`."""

    stream: str
    name: str | None


_consumers: Final[WeakKeyDictionary[_Reader, str]] = WeakKeyDictionary()


def consumer_of(reader: _Reader) -> str | None:
    """Return the name of the worker or group that a reader reads for, or else its own."""
    return _consumers.get(reader, reader.name)


@contextlib.contextmanager
def reading_for(reader: _Reader, consumer: str) -> Iterator[None]:
    """Let a reader read for the worker or group `consumer` meanwhile."""
    _consumers[reader] = consumer
    try:
        yield
    finally:
        observe_lag(reader, None)
        _consumers.pop(reader, None)


def observe_lag(reader: _Reader, behind: int | None) -> None:
    """Tell an observer how far a reader is behind; None: it is not known, or the reader reads no more."""
    if telemetry.observer is not None:
        telemetry.observer.lag(reader, behind, reader.stream, consumer_of(reader))


@contextlib.contextmanager
def observed_receiving(
    connection: BaseConnection, stream: str, consumer: str | None
) -> Iterator[Callable[[int], None]]:
    """Observe a read of some messages of a stream; the yielded function takes how many there were."""
    if telemetry.observer is None:
        yield lambda _: None
        return
    with telemetry.observer.begin(telemetry.Kind.RECEIVE, connection, stream=stream, consumer=consumer) as operation:
        yield lambda count: operation.describe(messages=count)


def observed_handling(
    observer: telemetry.Observer, connection: BaseConnection, consumer: str, given: StoredMsg | list[StoredMsg]
) -> telemetry.Operation:
    """Begin the handling of one message or of a list, by the worker or group `consumer`."""
    kind = telemetry.Kind.PROCESS
    if isinstance(given, list):
        operation = observer.begin(kind, connection, stream=given[0].stream, sources=given, consumer=consumer)
        operation.describe(messages=len(given))
        return operation
    return observer.begin(
        kind,
        connection,
        subject=given.subject,
        stream=given.stream,
        sources=[given],
        consumer=consumer,
        attributes={"messaging.message.id": str(given.seq)},
    )


def observed_commit(
    observer: telemetry.Observer, connection: BaseConnection, stream: str, consumer: str, position: int
) -> telemetry.Operation:
    """Begin the storing of a position in a stream, by the reader, worker or group `consumer`."""
    facts = {"jetstream_ext.position": position}
    return observer.begin(telemetry.Kind.COMMIT, connection, stream=stream, consumer=consumer, attributes=facts)


async def store_position(writer: FencedWriter, record: bytes, consumer: str, position: int) -> BatchAck:
    """Store a record of a position, without messages."""
    observer = telemetry.observer
    if observer is None:
        return await writer.store([], record)
    with observed_commit(observer, writer.context.connection, writer.stream, consumer, position):
        return await writer.store([], record)
