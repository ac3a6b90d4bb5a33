"""What a connection carries, so that a read asks for no more than other calls, and the server's buffer, can wait for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_IN_FLIGHT: Final = 8  # requests of the reads of one `Group`

# The replies in flight of one read take about this many seconds: other calls on the connection wait behind them.
_SECONDS_IN_FLIGHT: Final = 0.5
# Before anything is known of a connection: so slow that a first request keeps no other call waiting for long.
_FIRST_RATE: Final = float(1 << 19)
# One reply may come in one burst from a buffer on the way, so it raises the known rate only so far.
_FASTER: Final = 4.0
# In less time than this, the pauses of the machine are longer than those of the connection.
_SLOW: Final = 0.1
# Replies of fewer bytes show too little of a link. At the least rate, requests ask for as much, so that a link that has
# become faster is noticed.
_TELLING: Final = 1 << 16
_LEAST_RATE: Final = _TELLING / _SECONDS_IN_FLIGHT
# A server closes a connection for which it holds more bytes than its ``max_pending``, and does not say so. That is never less
# than its ``max_payload``. It counts a reply for a moment longer than the client takes to receive it, and requests grow fourfold.
# So after a loss, replies have this part of both, for so many seconds; but a connection that is lost for other reasons must not
# become very slow.
_SMALLER: Final = 8
_CAUTIOUS: Final = 600.0
_LEAST: Final = 1 << 14


class Link:
    """What a connection carries, in bytes per second, and what has cost it; the replies to reads show both."""

    def __init__(self) -> None:
        self.rate: float = _FIRST_RATE
        self.most: int | None = None
        """The bytes that the replies in flight may have together, after a reply was lost with the connection."""
        self.max_payload: int = 1 << 20
        """The server's limit for one message, in bytes."""
        self._measured = 0.0
        self._cautious_until = -math.inf

    def adapt(self, first: int, rest: int, waited: float, seconds: float, now: float) -> None:
        """Take that the first bytes of a reply arrived after a wait, and the rest in so many seconds after them.

        The wait is also that of the server and of the way to it. So it counts only for a reply whose first bytes are most of
        it, and then only shows what the link carries at least.
        """
        mostly_first = rest * 4 < first
        at_least = mostly_first or first + rest < _TELLING
        size, seconds = (first + rest, waited + seconds) if mostly_first else (rest, seconds)
        measured = size / seconds if seconds > 0 else self.rate * _FASTER
        if not at_least:
            before, self._measured = self._measured, measured
            measured = max(before, measured)  # one slow reply may be a pause of the server or of this machine
        if measured > self.rate or (seconds >= _SLOW and not at_least):
            self.rate = max(_LEAST_RATE, min(measured, self.rate * _FASTER))
        if now > self._cautious_until:
            self.most = None

    def lost(self, asked: int, now: float) -> bool:
        """Note that the connection was lost while replies of `asked` bytes came; return whether less can be asked for."""
        held = asked if self.most is None else min(asked, self.most)
        if held <= _LEAST:
            return False
        self.most = max(_LEAST, min(held, self.max_payload) // _SMALLER)
        self._cautious_until = now + _CAUTIOUS
        return True

    def limit(self, max_bytes: int) -> int:
        """Return the bytes that a request for `max_bytes` may ask for, whatever the rate."""
        return max_bytes if self.most is None else min(max_bytes, self.most)

    def room(self, requests: int) -> int:
        """Return the bytes that each of so many requests in flight may ask for."""
        return self.limit(int(self.rate * _SECONDS_IN_FLIGHT)) // requests


@dataclass(slots=True)
class Group:
    """Reads that are merged, so that together they keep to the limits of one read: `max_bytes`, and what the `Link` carries.

    A server answers the requests of a connection one after the other. So a request waits while the server answers those of
    the other reads, and that is no silence.
    """

    readers: int  # how many of the reads have not ended
    heard: float = -math.inf  # when the newest bytes of a reply to any of them arrived, by the caller's clock

    @property
    def in_flight(self) -> int:
        """The number of requests that may be in flight, each for its part of the limits."""
        return max(1, min(self.readers, MAX_IN_FLIGHT))

    @property
    def lazy(self) -> bool:
        """Whether a read may send its next request only when its rows have been taken, because the reads are too many."""
        return self.readers > MAX_IN_FLIGHT
