"""What an observer is told of readers and workers: their lag, the handling of messages, and the storing of positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from jetstream_ext.client import telemetry
from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.client.fenced_write import FencedWriter
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.types import BatchAck, Entry


class _Reader(Protocol):
    """A `LogReader`."""

    stream: str
    name: str | None


_NOT_OBSERVED: Final = contextlib.nullcontext()
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
    connection: BaseConnection, consumer: str, given: StoredMsg | list[StoredMsg]
) -> contextlib.AbstractContextManager[telemetry.Operation | None]:
    """Begin the handling of one message or of a list, by the worker or group `consumer`."""
    observer = telemetry.observer
    if observer is None:
        return _NOT_OBSERVED
    messages = given if isinstance(given, list) else [given]
    first, one = messages[0], given is not messages
    operation = observer.begin(
        telemetry.Kind.PROCESS,
        connection,
        subject=first.subject if one else None,
        stream=first.stream,
        sources=messages,
        consumer=consumer,
        attributes={"messaging.message.id": str(first.seq)} if one else None,
    )
    if not one:
        operation.describe(messages=len(messages))
    return operation


async def store_position(
    writer: FencedWriter, record: bytes, consumer: str, position: int, messages: Sequence[Entry] | None = None
) -> BatchAck:
    """Store a record of the position of the reader, worker or group `consumer`, behind messages if there are any."""
    observer = telemetry.observer
    if observer is None:
        return await writer.store(messages or (), record)
    kind, facts = telemetry.Kind.COMMIT, {"jetstream_ext.position": position}
    with observer.begin(
        kind, writer.context.connection, stream=writer.stream, consumer=consumer, attributes=facts
    ) as operation:
        if messages is not None:
            operation.describe(messages=len(messages))
        return await writer.store(messages or (), record)
