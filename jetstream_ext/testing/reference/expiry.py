"""What goes out of a stream by age and by TTL, and the markers that stay in its place (ADR-43)."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from . import headers, times

if TYPE_CHECKING:
    from .store import StoredMessage
    from .stream import Stream
    from .timers import Timer

__all__ = ["Expiry"]


class Expiry:
    """Removes the messages of one stream when their time is over."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._heap: list[tuple[int, int]] = []
        self._timer: Timer | None = None

    def stop(self) -> None:
        """Remove nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _when(self, message: StoredMessage) -> int | None:
        if message.ttl < 0:
            return None
        ends = [message.time + age for age in (self._stream.config["max_age"], message.ttl * times.SECOND) if age]
        return min(ends, default=None)

    def watch(self, message: StoredMessage) -> None:
        """See to it that a message goes when its time is over."""
        when = self._when(message)
        if when is not None:
            heapq.heappush(self._heap, (when, message.seq))
            self._arm()

    def restart(self) -> None:
        """Look at every message again: the stream's configuration is new."""
        pairs = ((self._when(message), message.seq) for message in self._stream.store)
        self._heap = [(when, seq) for when, seq in pairs if when is not None]
        heapq.heapify(self._heap)
        self._arm()

    def _arm(self) -> None:
        when = self._heap[0][0] if self._heap else None
        if self._timer is not None:
            if self._timer.active and self._timer.when == when:
                return
            self._timer.cancel()
        self._timer = self._stream.at(when, self._expire) if when is not None else None

    def _expire(self) -> None:
        self._timer = None
        markers = []
        while self._heap and self._heap[0][0] <= self._stream.now:
            _, seq = heapq.heappop(self._heap)
            message = self._stream.store.get(seq)
            if message is not None:
                self._stream.remove(seq)
                markers.append(message)
        if self._stream.config["subject_delete_marker_ttl"] and not self._stream.config["mirror"]:
            for message in markers:
                self._leave_marker(message)
        self._arm()

    def _leave_marker(self, message: StoredMessage) -> None:
        reason = "Nats-Applied-Limit" if self._stream.profile.draft else "Nats-Marker-Reason"
        if self._stream.store.count(message.subject) or headers.get(message.header, reason):
            return
        ttl = self._stream.config["subject_delete_marker_ttl"]
        lines = [(reason, "MaxAge"), ("Nats-TTL", times.format_duration(ttl)), ("Nats-Rollup", "sub")]
        if self._stream.profile.draft:
            lines = [(reason, "MaxAge"), ("Nats-TTL", str(ttl // times.SECOND))]
        self._store_marker(message.subject, headers.block(lines), ttl // times.SECOND)

    def _store_marker(self, subject: str, header: bytes, ttl: int) -> None:
        stored = self._stream.store.add(subject, header, b"", self._stream.now, ttl)
        self.watch(stored)
        self._stream.enforce_limits(subject)
        self._stream.announce(stored)
