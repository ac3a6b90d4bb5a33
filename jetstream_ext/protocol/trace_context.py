"""The trace context in a message's headers: added where a message has none, and never where it would be refused for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import given_headers, message_headers
from jetstream_ext.types import BatchMessage, own_headers

# The headers of OpenTelemetry's propagators, in lower case: W3C, B3, Jaeger, OpenTracing, AWS X-Ray and Google Cloud.
_NAMES: Final = frozenset(
    {"traceparent", "tracestate", "baggage", "b3", "uber-trace-id", "x-amzn-trace-id", "x-cloud-trace-context"}
)
_PREFIXES: Final = ("x-b3-", "uberctx-", "ot-tracer-", "ot-baggage-")
# Bytes of a message that its batch may add, in a header block that is measured before.
_MARGIN: Final = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The headers that carry one trace context, such as ``traceparent``; at least one."""

    pairs: tuple[tuple[str, str], ...]
    lines: bytes = field(init=False)
    """The pairs as lines of a header block."""
    block: bytes = field(init=False)
    """A header block of nothing else."""
    _names: frozenset[str] = field(init=False)  # in lower case
    _marks: tuple[bytes, ...] = field(init=False)  # where a header block in lower case has one of them

    def __post_init__(self) -> None:
        block = h.encode(self.pairs)
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "lines", block[len(h.VERSION) + len(h.CRLF) : -len(h.CRLF)])
        names = frozenset(name.lower() for name, _ in self.pairs)
        object.__setattr__(self, "_names", names)
        object.__setattr__(self, "_marks", tuple(b"\r\n%b:" % name.encode() for name in names))

    def extend(self, block: bytes, room: int) -> bytes:
        """Return a header block with the context, which may have `room` bytes; unchanged if it has a context or no room."""
        if not block:
            return self.block if len(self.block) <= room else block
        longer = len(block) + len(self.lines)
        if longer > room or longer > h.MAX_BLOCK:
            return block
        lower = block.lower()
        if any(mark in lower for mark in self._marks):
            return block
        return block[: -len(h.CRLF)] + self.lines + h.CRLF

    def added_to(self, message: BatchMessage, room: int) -> BatchMessage:
        """Return a message with the context, which may have `room` bytes with its headers.

        It is unchanged if it has a context, is invalid, or might become too large.
        """
        try:
            headers = given_headers(message)
            size = sum(len(name) + 3 * len(value) + 4 for name, value in message_headers(message))
            size += len(self.block) + _MARGIN
            too_large = size > h.MAX_BLOCK or size + len(message.payload) > room
        except (TypeError, ValueError):
            return message  # it is refused where it is sent
        if too_large or any(name.lower() in self._names for name in headers):
            return message
        return dataclasses.replace(message, headers=own_headers([*headers.items(), *self.pairs]))


def trace_context(pairs: Iterable[tuple[str, str]]) -> TraceContext | None:
    """Return the context that `pairs` carry, or None if there are none or a message cannot have them."""
    pairs = tuple(pairs)
    try:
        return TraceContext(pairs) if pairs else None
    except (TypeError, ValueError):
        return None


def is_of_trace(name: str) -> bool:
    """Return whether a header carries a trace context, so that it does not tell a message from others."""
    name = name.lower()
    return name in _NAMES or name.startswith(_PREFIXES)
