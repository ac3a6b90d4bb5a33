"""Where a consumer is in its stream: which messages are for it, and which is the next new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import subjects

if TYPE_CHECKING:
    from .consumer_config import ConsumerConfig
    from .store import StoredMessage
    from .stream import Stream

__all__ = ["Cursor"]


class Cursor:
    """The position of one consumer.

    `next` is the stream sequence to look at next. A `last_per_subject` consumer begins with a list of sequences to
    deliver before all else, and goes on normally after the last message that the stream then had.
    """

    next: int

    def __init__(self, stream: Stream, config: ConsumerConfig) -> None:
        self._stream = stream
        self.config: ConsumerConfig = config
        self._first_of_each: list[int] = []
        self._resume = stream.store.state().last_seq
        self._start()

    @property
    def filters(self) -> list[str]:
        """The filter subjects; none means all messages."""
        one = self.config["filter_subject"]
        return [one] if one else list(self.config["filter_subjects"])

    def wants(self, subject: str) -> bool:
        """Whether messages on a subject are for it."""
        filters = self.filters
        return not filters or any(subjects.matches(each, subject) for each in filters)

    def overlaps(self, filters: list[str]) -> bool:
        """Whether some message could be both for it and for these filters."""
        return any(subjects.collide(one, other) for one in self.filters or [">"] for other in filters)

    def num_pending(self) -> int:
        """Return how many messages were never taken."""
        if self._first_of_each:
            return len(self._first_of_each) + self._count(self._resume + 1)
        return self._count(self.next) if len(self._stream.store) else 0

    def take(self) -> StoredMessage | None:
        """Return the next new message, and go on behind it; `None` if there is none yet.

        One of the list that is gone is also `None`: a real server then waits for the next message or request.
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
        """Take the message that was taken last again the next time; one of the list is lost, as on real servers."""
        self.next = seq

    def restart(self, seq: int) -> None:
        """Go on at a sequence, wherever it was."""
        self._first_of_each = []
        self.next = seq

    def _count(self, seq: int) -> int:
        return sum(self._stream.store.count(each, seq) for each in self.filters or [""])

    def _start(self) -> None:
        stream, config, filters = self._stream, self.config, self.filters
        store = stream.store
        state = store.state()
        policy = config["deliver_policy"]
        if config["opt_start_seq"]:
            first = max(int(config["opt_start_seq"]), state.first_seq)
            self.next = first if stream.profile.metadata else min(first, state.last_seq + 1)
            return
        if policy == "all" or (policy == "last_per_subject" and stream.config["max_msgs_per_subject"] == 1):
            first = state.first_seq
        elif policy == "last":
            newest = [store.last_for(each, store.last) for each in filters]
            first = max((message.seq for message in newest if message), default=0) if filters else state.last_seq
        elif policy == "last_per_subject":
            newest = [store.last_for(subject) for each in filters for subject in store.totals(each)]
            self._first_of_each = sorted({message.seq for message in newest if message})
            first = self._first_of_each[0] if self._first_of_each else state.last_seq
        elif config["opt_start_time"] is not None:
            first = store.seq_from_time(config["opt_start_time"])
        else:
            first = state.last_seq + 1
        self.next = 1 if state.first_seq == 0 else max(min(first, state.last_seq + 1), state.first_seq)
