"""How far a consumer is: deliveries, acknowledgements, and what waits for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import gojson, times

__all__ = ["Pending", "Progress", "moved_floor", "parse_delay"]


@dataclass(slots=True)
class Pending:
    """A message that waits for its acknowledgement."""

    delivery: int
    since: int


@dataclass(slots=True)
class Progress:
    """What an info reply says of deliveries and acknowledgements: pairs of consumer and stream sequence."""

    delivered: tuple[int, int]
    stored: bool = True
    """Whether it is a store that says so: there a delivery that was acknowledged before it was made does not count."""
    floor: tuple[int, int] = (0, 0)
    last_delivery: int | None = None
    last_ack: int | None = None

    def __post_init__(self) -> None:
        self.floor = self.delivered

    def note_delivery(self, delivery: int, seq: int, now: int) -> None:
        """Take note of a delivery."""
        if not self.stored or delivery > self.floor[0]:
            self.delivered = (delivery, max(seq, self.delivered[1]))
        self.last_delivery = now

    def as_json(self, position: tuple[int, int] | None) -> dict[str, Any]:
        """Return the two fields; `position` is what to show if nothing was ever delivered, where that is not zeros."""
        delivered = position if position and self.delivered == (0, 0) else self.delivered
        return {
            "delivered": self._pair(delivered, self.last_delivery),
            "ack_floor": self._pair(self.floor, self.last_ack),
        }

    @staticmethod
    def _pair(pair: tuple[int, int], when: int | None) -> dict[str, Any]:
        active = {} if when is None else {"last_active": times.rfc3339(when)}
        return {"consumer_seq": pair[0], "stream_seq": pair[1], **active}


def moved_floor(
    pending: dict[int, Pending], floor: tuple[int, int], top: tuple[int, int], delivery: int, seq: int
) -> tuple[int, int]:
    """Return the acknowledgement floor after a message is done.

    Args:
        pending: What still waits.
        floor: The floor so far: consumer and stream sequence.
        top: The floor if nothing waits any more.
        delivery: The consumer sequence of the message.
        seq: Its stream sequence.
    """
    if not pending:
        return top
    if delivery != floor[0] + 1:
        return floor
    following = min((each for each in pending if each > seq), default=None)
    return (delivery, seq) if following is None else (pending[following].delivery - 1, following - 1)


def parse_delay(argument: bytes) -> int | None:
    """Return the nanoseconds that a negative acknowledgement asks to wait, `None` for not at all."""
    if not argument:
        return None
    if argument.startswith(b"{"):
        schema = gojson.Struct("ConsumerNakOptions", {"delay": gojson.DURATION})
        try:
            return int(gojson.decode(argument, schema, strict=False).get("delay", 0))
        except gojson.JsonError:
            return None
    return times.go_seconds(argument.decode("utf-8", "replace"))
