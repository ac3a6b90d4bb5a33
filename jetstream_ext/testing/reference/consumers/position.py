"""Where a consumer is: the next message to deliver, and the delivered and acknowledged sequences."""

from dataclasses import dataclass
from typing import Any

from ..streams.store import StoredMessage
from ..streams.stream import Stream
from ..wire import subjects, times
from .config import ConsumerConfig

Pair = tuple[int, int]
"""A consumer sequence and a stream sequence."""


class Cursor:
    """The position of one consumer in its stream.

    `next` is the next stream sequence to look at. A `last_per_subject` consumer first delivers a list of sequences, and
    continues after the last message that the stream had when the consumer was created.
    """

    next: int

    def __init__(self, stream: Stream, config: ConsumerConfig) -> None:
        self._stream = stream
        self.config: ConsumerConfig = config
        self._first_of_each: list[int] = []
        self._resume = stream.store.last
        self._start()

    @property
    def filters(self) -> list[str]:
        """The filter subjects; an empty list matches all messages."""
        one = self.config["filter_subject"]
        return [one] if one else list(self.config["filter_subjects"])

    def wants(self, subject: str) -> bool:
        filters = self.filters
        return not filters or any(subjects.matches(each, subject) for each in filters)

    def overlaps(self, filters: list[str]) -> bool:
        return any(subjects.collide(one, other) for one in self.filters or [">"] for other in filters)

    def num_pending(self) -> int:
        """Count the messages that were never taken."""
        if self._first_of_each:
            return len(self._first_of_each) + self._count(self._resume + 1)
        return self._count(self.next) if len(self._stream.store) else 0

    def take(self) -> StoredMessage | None:
        """Return the next new message and move past it, or `None` at the end of the stream.

        A deleted message of the `last_per_subject` list also gives `None`: a real server then waits for the next message
        or request.
        """
        store = self._stream.store
        if self._first_of_each:
            seq = self._first_of_each.pop(0)
            self.next = (seq if self._first_of_each else self._resume) + 1
            return store.get(seq)
        found = [store.next_for(each, self.next) for each in self.filters or [""]]
        message = min((each for each in found if each), key=lambda each: each.seq, default=None)
        self.next = max(self.next, store.last + 1) if message is None else message.seq + 1
        return message

    def put_back(self, seq: int) -> None:
        """Move back to the message taken last; one of the `last_per_subject` list is lost, as on real servers."""
        self.next = seq

    def restart(self, seq: int) -> None:
        self._first_of_each = []
        self.next = seq

    def _count(self, seq: int) -> int:
        return sum(self._stream.store.count(each, seq) for each in self.filters or [""])

    def _start(self) -> None:
        stream, config, filters = self._stream, self.config, self.filters
        store = stream.store
        policy = config["deliver_policy"]
        if config["opt_start_seq"]:
            first = max(int(config["opt_start_seq"]), store.first)
            self.next = first if stream.profile.starts_beyond_end else min(first, store.last + 1)
            return
        if policy == "all" or (policy == "last_per_subject" and stream.config["max_msgs_per_subject"] == 1):
            first = store.first
        elif policy == "last":
            newest = [store.last_for(each, store.last) for each in filters]
            first = max((message.seq for message in newest if message), default=0) if filters else store.last
        elif policy == "last_per_subject":
            newest = [store.last_for(subject) for each in filters for subject in store.totals(each)]
            self._first_of_each = sorted({message.seq for message in newest if message})
            first = self._first_of_each[0] if self._first_of_each else store.last
        elif config["opt_start_time"] is not None:
            first = store.seq_from_time(config["opt_start_time"])
        else:
            first = store.last + 1
        self.next = 1 if store.first == 0 else max(min(first, store.last + 1), store.first)


@dataclass(slots=True)
class Pending:
    """A delivered message that is not acknowledged."""

    delivery: int
    since: int


@dataclass(slots=True)
class Progress:
    delivered: Pair
    stored: bool = True
    """Whether this is the stored state: it leaves out a delivery below the acknowledgement floor."""
    floor: Pair = (0, 0)
    last_delivery: int | None = None
    last_ack: int | None = None

    def __post_init__(self) -> None:
        self.floor = self.delivered

    def add_delivery(self, delivery: int, seq: int, now: int) -> None:
        if not self.stored or delivery > self.floor[0]:
            self.delivered = (delivery, max(seq, self.delivered[1]))
        self.last_delivery = now

    def as_json(self, position: Pair | None) -> dict[str, Any]:
        """Return the `delivered` and `ack_floor` fields; `position` replaces the former before the first delivery."""
        delivered = position if position and self.delivered == (0, 0) else self.delivered
        return {
            "delivered": self._pair(delivered, self.last_delivery),
            "ack_floor": self._pair(self.floor, self.last_ack),
        }

    @staticmethod
    def _pair(pair: Pair, when: int | None) -> dict[str, Any]:
        active = {} if when is None else {"last_active": times.rfc3339(when)}
        return {"consumer_seq": pair[0], "stream_seq": pair[1], **active}


def moved_floor(pending: dict[int, Pending], floor: Pair, top: Pair, done: Pair) -> Pair:
    """Return the acknowledgement floor after the message `done` is acknowledged or no longer delivered.

    `pending` are the messages that are still unacknowledged, by stream sequence. `top` is the floor if there are none.
    """
    delivery, seq = done
    if not pending:
        return top
    if delivery != floor[0] + 1:
        return floor
    following = min((each for each in pending if each > seq), default=None)
    return done if following is None else (pending[following].delivery - 1, following - 1)
