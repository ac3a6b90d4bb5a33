"""The trace context in a message's headers: added where a message has none, and never where it would be refused for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.options import as_message, given_headers, message_headers
from jetstream_ext.types import BatchMessage, Entry, own_headers

# Bytes of a message that its batch may add, in a header block that is measured before.
_MARGIN: Final = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The headers that carry one trace context, such as ``traceparent``; at least one."""

    pairs: tuple[tuple[str, str], ...]
    headers: h.EncodedHeaders = field(init=False)  # of a message that has no others
    _names: frozenset[str] = field(init=False)  # in lower case

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", h.EncodedHeaders(h.encode(self.pairs)))
        object.__setattr__(self, "_names", frozenset(name.lower() for name, _ in self.pairs))

    def carried_by(self, entry: Entry, room: int) -> Entry:
        """As `added_to`, for a message of a bulk; TypeError if it is none."""
        if type(entry) is tuple and len(entry) == 2 and type(entry[1]) is bytes:
            fits = len(self.headers.block) + len(entry[1]) <= room
            return (entry[0], entry[1], self.headers) if fits else entry
        return self.added_to(as_message(entry), room)

    def added_to(self, message: BatchMessage, room: int) -> BatchMessage:
        """Return a message with the context, which may have `room` bytes with its headers.

        It is unchanged if it has a context, is invalid, or might become too large.
        """
        try:
            headers = given_headers(message)
            size = sum(len(name) + 3 * len(value) + 4 for name, value in message_headers(message))
            size += len(self.headers.block) + _MARGIN
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
