"""Where the package tells an observer what it does; `jetstream_ext.otel` has the only one.

Without an observer, a call costs one look at `observer`. An observer must not raise.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from jetstream_ext.client.base_connection import BaseConnection
from jetstream_ext.protocol.trace_context import TraceContext

Attributes = Mapping[str, str | int]


class Kind(enum.Enum):
    """What an operation does, by the words of OpenTelemetry's messaging conventions."""

    SEND = "send"
    COMMIT = "commit"


class Count(enum.Enum):
    """What is counted; the values are the names of the metrics."""

    ACKNOWLEDGED = "jetstream_ext.acknowledged.messages"
    LOST = "jetstream_ext.lost.messages"
    REFUSED = "jetstream_ext.refused.messages"
    GAPS = "jetstream_ext.gaps"


class Operation(Protocol):
    """One call that is observed. It is over once `end` was called; later calls change nothing."""

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

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager inside which this is the current operation."""

    def end(self, error: BaseException | None = None) -> None:
        """End the operation, which has failed with `error` if there is one."""


class Observer(Protocol):
    """What is told about the operations of this process."""

    def begin(
        self,
        kind: Kind,
        connection: BaseConnection,
        *,
        subject: str | None = None,
    ) -> Operation:
        """Begin an operation in the caller's context.

        `subject` is that of the single message that it is about, if it is about one.
        """

    def count(self, what: Count, amount: int, *, stream: str | None = None, error: str | None = None) -> None:
        """Add to a counter."""


observer: Observer | None = None
"""The observer of this process, if there is one; looked up at each call, because it may be set at any time."""


def set_observer(new: Observer | None) -> None:
    """Let `new` be told from now on; None ends that."""
    global observer
    observer = new


@contextlib.contextmanager
def observed(operation: Operation) -> Iterator[None]:
    """End an operation with the block, and with what the block raises; meanwhile it is the current one."""
    try:
        with operation.current():
            yield
    except BaseException as error:
        operation.end(error)
        raise
    operation.end()
