"""Expiry by age and by TTL: the TTL header, the times at which messages expire, and delete markers (ADR-43)."""

import heapq
from collections.abc import Callable, Iterable

from ..context import ServerContext, Timer
from ..releases import Profile
from ..wire import headers, times
from ..wire.errors import ApiError, api_error


def message_ttl(profile: Profile, header: bytes) -> int:
    """Return the TTL of a message in whole seconds, 0 for none and -1 for never; raise an `ApiError` if it is invalid."""
    if not profile.ttl:
        return 0
    if profile.draft and headers.get(header, "Nats-No-Expire") == "1":
        return -1
    text = headers.get(header, "Nats-TTL")
    if not text or (profile.draft and text == "0"):
        return 0
    if text.lower() == "never":
        return -1
    duration = times.parse_duration(text)
    if duration is not None:
        if duration < times.SECOND:
            raise api_error(10165)
        return duration // times.SECOND
    seconds = headers.parse_signed(text)
    if seconds < 0:
        raise api_error(10165)
    return seconds


def valid_ttl(profile: Profile, header: bytes) -> int:
    """Return the TTL of a message as `message_ttl` does, and 0 for an invalid one."""
    try:
        return message_ttl(profile, header)
    except ApiError:
        return 0


def marker_reason(profile: Profile) -> str:
    return "Nats-Applied-Limit" if profile.draft else "Nats-Marker-Reason"


def marker_header(profile: Profile, ttl: int) -> bytes:
    """Return the header block of a delete marker that expires after `ttl` nanoseconds."""
    reason = (marker_reason(profile), "MaxAge")
    if profile.draft:
        return headers.add(b"", reason, ("Nats-TTL", str(ttl // times.SECOND)))
    return headers.add(b"", reason, ("Nats-TTL", times.format_duration(ttl)), ("Nats-Rollup", "sub"))


class Expiry:
    """Call `expire` with the sequences of messages whose time has come."""

    def __init__(self, context: ServerContext, expire: Callable[[list[int]], None]) -> None:
        self._context = context
        self._expire = expire
        self._heap: list[tuple[int, int]] = []
        self._timer = Timer(context, self._fire)

    def stop(self) -> None:
        self._timer.cancel()

    def add(self, seq: int, when: int | None) -> None:
        if when is not None:
            heapq.heappush(self._heap, (when, seq))
            self._arm()

    def restart(self, messages: Iterable[tuple[int, int | None]]) -> None:
        self._heap = [(when, seq) for seq, when in messages if when is not None]
        heapq.heapify(self._heap)
        self._arm()

    def _arm(self) -> None:
        self._timer.set(self._heap[0][0] if self._heap else None)

    def _fire(self) -> None:
        due = []
        while self._heap and self._heap[0][0] <= self._context.now:
            due.append(heapq.heappop(self._heap)[1])
        self._expire(due)
        self._arm()
