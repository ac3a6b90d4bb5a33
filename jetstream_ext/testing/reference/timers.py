"""A heap of timers that never reads a clock."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Timer", "Timers"]

_FEW = 64


@dataclass(order=True, slots=True)
class Timer:
    """A call that is due at an instant, unless cancelled."""

    when: int
    order: int
    call: Callable[[], None] = field(compare=False)
    active: bool = field(default=True, compare=False)

    def cancel(self) -> None:
        """Make sure that it does not fire."""
        self.active = False


class Timers:
    """Timers in order of their instants, and of their making where these are equal."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._count = 0
        self._enough = _FEW

    def __len__(self) -> int:
        """Return how many are kept, cancelled ones included."""
        return len(self._heap)

    def at(self, when: int, call: Callable[[], None]) -> Timer:
        """Arrange a call."""
        if len(self._heap) >= self._enough:
            # Every message of a batch cancels a timer; while a virtual clock stands still, none of them comes up.
            self._heap = [timer for timer in self._heap if timer.active]
            heapq.heapify(self._heap)
            self._enough = max(2 * len(self._heap), _FEW)
        self._count += 1
        timer = Timer(when, self._count, call)
        heapq.heappush(self._heap, timer)
        return timer

    def next(self) -> int | None:
        """Return when the next one is due, `None` if there is none."""
        while self._heap and not self._heap[0].active:
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None

    def pop(self, now: int) -> Timer | None:
        """Take out the next timer that is due by `now`."""
        when = self.next()
        return heapq.heappop(self._heap) if when is not None and when <= now else None
