"""Dead letters: inputs whose handler fails again and again, stored aside with their origin and error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from jetstream_ext.protocol.options import check_int, check_seconds
from jetstream_ext.protocol.subjects import check_subject

_MOST_ATTEMPTS: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Where an input is stored whose handler fails, and after how many attempts.

    Args:
        subject: The dead letters' subject, without wildcards: one of the output stream's, or for `Member.run` of any stream.
            Nothing else belongs there.
        attempts: How often the handler may fail for one input, from 1.
        backoff: Seconds before the next attempt: a number, or one for each attempt, of which the last one repeats. Kept as
            a tuple.

    Raises:
        BadSubjectError: `subject` is not one that messages can be published to.
        ValueError, TypeError: A number is out of range, or of another type.
    """

    subject: str
    attempts: int = 5
    backoff: float | Sequence[float] = (1.0, 2.0, 5.0, 10.0, 30.0)

    def __post_init__(self) -> None:
        check_subject(self.subject)
        check_int(self.attempts, "attempts", high=_MOST_ATTEMPTS)
        given: Any = self.backoff
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            given = (given,)
        pauses = tuple(check_seconds(pause, "backoff", zero=True) for pause in given)
        if not pauses or not all(map(math.isfinite, pauses)):
            raise ValueError(f"backoff must be a finite number of seconds, or a sequence of them, not {self.backoff!r}")
        object.__setattr__(self, "backoff", pauses)

    def pause_after(self, attempts: int) -> float:
        """Return the seconds between a failed attempt, counted from 1, and the next one."""
        assert isinstance(self.backoff, tuple)
        return float(self.backoff[min(attempts, len(self.backoff)) - 1])


def check_dead_letter(given: object) -> None:
    """Raise TypeError unless it is a `DeadLetter` or None."""
    if not isinstance(given, DeadLetter | None):
        raise TypeError(f"dead_letter must be a DeadLetter or None, not {type(given).__name__}")
