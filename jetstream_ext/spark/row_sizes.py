"""How large the message of a row can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from jetstream_ext.protocol import headers as h
from jetstream_ext.protocol.api import StreamState
from jetstream_ext.protocol.options import MAX_TTL

_NO_HEADERS: Final = len(h.encode(()))  # bytes of a block without headers
_LONGEST_TTL: Final = len(f"{h.MSG_TTL}: {MAX_TTL}\r\n")
_LINE: Final = len(": \r\n")
_ID_LINE: Final = len(h.MSG_ID) + _LINE
_BATCH_ID: Final = 22  # characters of the id of an atomic batch
_LONGEST_CHARACTER: Final = 4  # bytes in UTF-8


def batch_headers(stream: str) -> list[tuple[str, str]]:
    """Return the longest headers that an atomic batch adds to a message."""
    return [
        (h.BATCH_ID, "x" * _BATCH_ID),
        (h.BATCH_SEQUENCE, str(1 << 32)),
        (h.BATCH_COMMIT, "eob"),
        (h.EXPECTED_STREAM, stream),
    ]


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The limits for the messages of one sink, in bytes.

    Attributes:
        most: What a message can have, headers and payload together.
        limit: What limits it, for errors.
        added: The header block that the sink adds to a row, at its longest; 0 for none.
    """

    most: int
    limit: str
    added: int = 0

    @classmethod
    def of(
        cls, max_payload: int, state: StreamState, added: Iterable[tuple[str, str]] = (), *, ttl: bool = False
    ) -> RowSizes:
        """Return the limits of a server and a stream for rows that get the headers `added`."""
        limits = [(max_payload, "the server's max_payload")]
        if state.max_msg_size is not None:
            limits.append((state.max_msg_size, "the stream's max_msg_size"))
        if state.max_bytes is not None:
            limits.append((state.max_bytes, "the stream's max_bytes"))
        most, limit = min(limits)
        pairs = list(added)
        return cls(most, f"{limit} ({most})", len(h.encode(pairs)) if pairs else 0)

    def with_ttl(self) -> RowSizes:
        """Return the limits for rows that also get a time to live."""
        return replace(self, added=max(self.added, _NO_HEADERS) + _LONGEST_TTL)

    @property
    def of_data(self) -> int:
        """How large the data of a row without headers can be."""
        return self.most - self.added

    def problem(self, data: bytes, headers: Mapping[str, str] | None, msg_id: str | None) -> str | None:
        """Return why a row is too large, or None; its headers and its own id can be sent as they are."""
        characters = 0 if msg_id is None else len(msg_id) + _ID_LINE
        for name, value in headers.items() if headers else ():
            characters += len(name) + len(value) + _LINE
        most = self.added + _NO_HEADERS + _LONGEST_CHARACTER * characters
        if most <= h.MAX_BLOCK and most + len(data) <= self.most:
            return None
        items = list(headers.items()) if headers else []
        if msg_id is not None:
            items.append((h.MSG_ID, msg_id))
        size = sum(len(f"{name}: {value.strip()}\r\n".encode()) for name, value in items)
        size += max(self.added, _NO_HEADERS) if msg_id is None else _NO_HEADERS
        if not items:
            size = self.added
        if size > h.MAX_BLOCK:
            return f"its headers have {size} bytes; servers store at most {h.MAX_BLOCK} with a message"
        if size + len(data) > self.most:
            return f"it has {size + len(data)} bytes with its headers, more than {self.limit}"
        return None
