"""The state that all parts of the server share: release, limits, time, timers, random numbers and router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .releases import Profile
from .router import Router
from .wire.golang import SECOND
from .wire.protocol import status_header

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many batches a server accepts; the defaults are those of a real server."""

    batch_messages: int = 1000
    atomic_per_stream: int = 50
    atomic_total: int = 1000
    fast_per_stream: int = 1000
    fast_total: int = 50_000
    batch_timeout: float = 10.0
    """Seconds without a message after which the server drops a batch."""


@dataclass(eq=False, slots=True)
class TimerHandle:
    when: int
    call: Callable[[], None]
    waiting: dict[TimerHandle, None]

    def cancel(self) -> None:
        self.waiting.pop(self, None)


class Timers:
    """Calls, ordered by time and then by creation. It never reads a clock."""

    def __init__(self) -> None:
        self._waiting: dict[TimerHandle, None] = {}

    def call_at(self, when: int, call: Callable[[], None]) -> TimerHandle:
        handle = TimerHandle(when, call, self._waiting)
        self._waiting[handle] = None
        return handle

    def next(self) -> int | None:
        return min((handle.when for handle in self._waiting), default=None)

    def pop(self, now: int) -> TimerHandle | None:
        first = min(self._waiting, key=lambda handle: handle.when, default=None)
        if first is None or first.when > now:
            return None
        first.cancel()
        return first


class ServerContext:
    def __init__(self, profile: Profile, limits: Limits, seed: int) -> None:
        self.profile = profile
        self.limits = limits
        self.now: int = 0
        self.timers: Timers = Timers()
        self.random: Random = Random(seed)  # noqa: S311 — must be reproducible, and protects no secret
        self.router: Router = Router(self.random)
        self.send: Callable[..., None] = self.router.send
        self.server_id: str = "N" + "".join(self.random.choices(_BASE32, k=55))

    def call_later(self, seconds: float, call: Callable[[], None]) -> TimerHandle:
        return self.timers.call_at(self.now + round(seconds * SECOND), call)

    def send_status(self, reply: str, line: str, *pairs: tuple[str, str]) -> None:
        self.send(reply, header=status_header(line, *pairs))

    def make_name(self, length: int = 8) -> str:
        """Return random letters and digits, as in the names that the server generates."""
        return "".join(self.random.choices(_LETTERS, k=length))


class Timer:
    """One scheduled call at most, which can be moved and cancelled."""

    def __init__(self, context: ServerContext, call: Callable[[], None]) -> None:
        self._context = context
        self._call = call
        self._handle: TimerHandle | None = None

    def set(self, when: int | None) -> None:
        """Move the call to a time, or cancel it with `None`."""
        if self._handle is not None:
            if self._handle.when == when:
                return
            self._handle.cancel()
        self._handle = None if when is None else self._context.timers.call_at(when, self._fire)

    def set_in(self, duration: int) -> None:
        """Move the call to a time from now, in nanoseconds."""
        self.set(self._context.now + duration)

    def cancel(self) -> None:
        self.set(None)

    def _fire(self) -> None:
        self._handle = None
        self._call()
