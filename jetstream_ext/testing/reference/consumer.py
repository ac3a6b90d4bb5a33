"""Consumers, as far as streams know them."""

from __future__ import annotations

from .store import StoredMessage

__all__ = ["Consumer"]


class Consumer:
    """One consumer."""

    def close(self) -> None:
        """Stop."""

    def wants(self, subject: str) -> bool:
        """Whether messages on a subject are for it."""
        return True

    def message_stored(self, message: StoredMessage) -> None:
        """Take note of a new message."""

    def message_removed(self, message: StoredMessage) -> None:
        """Take note of a message that is gone."""

    def stream_purged(self, pattern: str) -> None:
        """Take note of a purge."""

    def interest_changed(self) -> None:
        """See who listens now."""
