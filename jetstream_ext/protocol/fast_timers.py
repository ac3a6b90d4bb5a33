"""When a fast batch pings, and when it gives up. Seconds of one monotonic clock; nothing here reads it."""

from __future__ import annotations

import math


class FastTimers:
    """The clocks of one batch.

    A deadline belongs to a wait: it starts when somebody begins to wait for the server (or a ping goes out), and any
    sign of the server's life starts it anew.

    Args:
        ack_timeout: How long a wait may last without a sign of life.
        stall_ping: After how much of it the server is asked where it is.
        keepalive: After how much silence on an idle batch the server is told that we are still here; 0 is never.
    """

    def __init__(self, *, ack_timeout: float, stall_ping: float, keepalive: float) -> None:
        self.ack_timeout = ack_timeout
        self.stall_ping = stall_ping
        self.keepalive = keepalive
        self._waiting_since: float | None = None
        self._unanswered_since: float | None = None  # the oldest ping with no sign of life since
        self._asked_at = 0.0
        self._wrote_at = 0.0

    def wrote(self, now: float) -> None:
        """Note that something was sent."""
        self._wrote_at = now

    def pinged(self, now: float) -> None:
        """Note that a ping was sent; an answer is due."""
        self._asked_at = self._wrote_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def asked(self, now: float) -> None:
        """Note that the server was asked to end the batch once more."""
        self._asked_at = self._wrote_at = now

    def waiting(self, now: float) -> None:
        """Note that somebody waits from now on."""
        if self._waiting_since is None:
            self._waiting_since = self._asked_at = now

    def not_waiting(self) -> None:
        """Note that nobody waits any more."""
        self._waiting_since = None

    def wait_anew(self, now: float) -> None:
        """Start another wait, whatever was waited for before."""
        self._waiting_since = self._asked_at = now
        self._unanswered_since = None

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        self._unanswered_since = None
        if self._waiting_since is not None:
            self._waiting_since = now

    def stop(self) -> None:
        """Forget every wait."""
        self._waiting_since = self._unanswered_since = None

    @property
    def deadline(self) -> float:
        """When what is waited for is given up; infinite while nothing is."""
        since = min(
            math.inf if self._waiting_since is None else self._waiting_since,
            math.inf if self._unanswered_since is None else self._unanswered_since,
        )
        return since + self.ack_timeout

    @property
    def ask_again(self) -> float:
        """When the server is to be asked again, while somebody waits or a ping is unanswered."""
        if self._waiting_since is None and self._unanswered_since is None:
            return math.inf
        return self._asked_at + self.stall_ping

    @property
    def keep_alive(self) -> float:
        """When an idle batch needs a ping."""
        return self._wrote_at + self.keepalive if self.keepalive else math.inf
