"""Mirrors and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store import StoredMessage
    from .stream import Stream

__all__ = ["Puller", "start_pullers"]


class Puller:
    """Copies one stream into another."""

    def close(self) -> None:
        """Stop."""

    def origin_stored(self, stream: Stream, message: StoredMessage) -> None:
        """Take a message."""

    def info_json(self) -> dict[str, Any]:
        """Return the row of an info reply."""
        return {}


def start_pullers(stream: Stream) -> None:
    """Copy what a stream mirrors and sources."""
