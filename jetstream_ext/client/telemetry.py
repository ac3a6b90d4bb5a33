"""Where the package tells an observer what it does; `jetstream_ext.otel` has the only one.

Without an observer, a call costs one look at `observer`. An observer must not raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.direct import StoredMsg
from jetstream_ext.protocol.trace_context import TraceContext

Attributes = Mapping[str, str | int]


class Kind(enum.Enum):
    """What an operation does, by the words of OpenTelemetry's messaging conventions where they have one."""

    SEND = "send"
    COMMIT = "commit"
    RECEIVE = "receive"
    PROCESS = "process"
    TRANSACTION = "transaction"
    INGEST = "ingest"


class Count(enum.Enum):
    """What is counted; the values are the names of the metrics."""

    ACKNOWLEDGED = "jetstream_ext.acknowledged.messages"
    LOST = "jetstream_ext.lost.messages"
    REFUSED = "jetstream_ext.refused.messages"
    GAPS = "jetstream_ext.gaps"
    RETRIES = "jetstream_ext.retries"


class Operation(Protocol):
    """One call that is observed: a context manager inside which it is the current one, and which ends it.

    Without ``with``, `end` ends it. Later calls change nothing.
    """

    @property
    def trace(self) -> TraceContext | None:
        """What the messages of the call carry; None: nothing."""

    def describe(
        self,
        *,
        stream: str | None = None,
        subjects: Sequence[str] = (),
        messages: int | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        """Add what became known: the stream, its subjects, how many messages are sent or read, other attributes."""

    def exclude(self, seconds: float) -> None:
        """Leave out of its duration what the caller did meanwhile."""

    def end(self, error: BaseException | None = None) -> None:
        """End the operation, which has failed with `error` if there is one."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Observer(Protocol):
    """What is told about the operations of this process."""

    def begin(
        self,
        kind: Kind,
        connection: BaseConnection,
        *,
        subject: str | None = None,
        stream: str | None = None,
        subjects: Sequence[str] = (),
        sources: Sequence[StoredMsg] = (),
        consumer: str | None = None,
        attributes: Attributes | None = None,
    ) -> Operation:
        """Begin an operation in the caller's context.

        `subject` is that of its single message, `sources` are the messages that it handles, and `consumer` is the name of
        the reader, worker or group that it belongs to. `attributes` are only those of a span.
        """

    def count(self, what: Count, amount: int, *, stream: str | None = None, error: str | None = None) -> None:
        """Add to a counter."""

    def lag(self, reader: object, behind: int | None, stream: str, consumer: str | None) -> None:
        """Note how many sequences of a stream a reader has not read; None: it is not known any more."""


class Call:
    """One call on a batch, and its operation if it is observed: its messages carry `trace`, and `messages` counts them."""

    __slots__ = ("_operation", "_stream", "messages", "trace")

    def __init__(
        self,
        kind: Kind,
        connection: BaseConnection,
        batch_id: str,
        stream: Callable[[], StreamState | None],
        *,
        subject: str | None = None,
        observed: bool = True,
    ) -> None:
        self.messages: int = 0
        self.trace: TraceContext | None = None
        self._stream = stream  # is asked again at the end: it is known once the batch is open
        self._operation: Operation | None = None
        if observed and observer is not None:
            ids = {"jetstream_ext.batch.id": batch_id}
            self._operation = observer.begin(kind, connection, subject=subject, attributes=ids, **_facts(stream()))
            self.trace = self._operation.trace

    def __enter__(self) -> Self:
        if self._operation is not None:
            self._operation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._operation is not None:
            self._operation.describe(messages=self.messages, **_facts(self._stream()))
            self._operation.__exit__(kind, error, traceback)


def _facts(stream: StreamState | None) -> dict[str, Any]:
    return {} if stream is None else {"stream": stream.name, "subjects": stream.subjects}


observer: Observer | None = None
"""The observer of this process, if there is one; looked up at each call, because it may be set at any time."""


def set_observer(new: Observer | None) -> None:
    """Let `new` be told from now on; None ends that."""
    global observer
    observer = new
