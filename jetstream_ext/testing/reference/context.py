"""The state that all parts of the server share: release, limits, time, timers, random numbers and router."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from .releases import Profile
from .router import Router
from .wire.golang import SECOND
from .wire.protocol import status_header

_FEW_TIMERS = 64
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


@dataclass(order=True, slots=True)
class TimerHandle:
    when: int
    order: int
    call: Callable[[], None] = field(compare=False)
    active: bool = field(default=True, compare=False)

    def cancel(self) -> None:
        self.active = False


class Timers:
    """A heap of calls, ordered by time and then by creation. It never reads a clock."""

    def __init__(self) -> None:
        self._heap: list[TimerHandle] = []
        self._count = 0
        self._sweep_at = _FEW_TIMERS

    def __len__(self) -> int:
        return len(self._heap)

    def call_at(self, when: int, call: Callable[[], None]) -> TimerHandle:
        if len(self._heap) >= self._sweep_at:
            # Every message of a batch cancels a timer; a virtual clock that stands still never reaches them.
            self._heap = [handle for handle in self._heap if handle.active]
            heapq.heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), _FEW_TIMERS)
        self._count += 1
        handle = TimerHandle(when, self._count, call)
        heapq.heappush(self._heap, handle)
        return handle

    def next(self) -> int | None:
        while self._heap and not self._heap[0].active:
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def pop(self, now: int) -> TimerHandle | None:
        when = self.next()
        return heapq.heappop(self._heap) if when is not None and when <= now else None


class ServerContext:
    def __init__(self, profile: Profile, limits: Limits, seed: int) -> None:
        self.profile = profile
        self.limits = limits
        self.now: int = 0
        self.timers: Timers = Timers()
        self.random: Random = Random(seed)  # noqa: S311 — must be reproducible, and protects no secret
        self.router: Router = Router(profile, self.random)
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
