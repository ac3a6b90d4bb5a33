"""The messages of one stream, indexed by sequence and by subject."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..wire import subjects

_FILE_OVERHEAD = 30
_FILE_HEADER_OVERHEAD = 4
_MEMORY_OVERHEAD = 16
_UNDO_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message with its sequence and time; `ttl` is in seconds, 0 means none and -1 that it never expires."""

    seq: int
    subject: str
    header: bytes
    payload: bytes
    time: int
    ttl: int = 0


class Store:
    """Keep messages in the order of their sequences. The stream enforces the limits, not the store."""

    def __init__(self, *, file: bool, first_seq: int = 0) -> None:
        self.file: bool = file
        self._messages: dict[int, StoredMessage] = {}
        self._order: list[int] = []
        self._subjects: dict[str, list[int]] = {}
        self.bytes: int = 0
        self.last: int = max(first_seq - 1, 0)
        self._first = first_seq
        self.last_time: int | None = None
        self._changes: deque[tuple[StoredMessage, bool]] = deque(maxlen=_UNDO_LIMIT)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[StoredMessage]:
        return iter([self._messages[seq] for seq in self._order])

    @property
    def first(self) -> int:
        """The first sequence, or the next one if there is no message."""
        return self._order[0] if self._order else self._first

    def size(self, subject: str, header: bytes, payload: bytes) -> int:
        body = len(subject.encode("utf-8", "surrogateescape")) + len(header) + len(payload)
        if not self.file:
            return body + _MEMORY_OVERHEAD
        return body + _FILE_OVERHEAD + (_FILE_HEADER_OVERHEAD if header else 0)

    @property
    def num_deleted(self) -> int:
        """The number of deleted sequences between the first and the last message."""
        return self.last + 1 - max(self.first, 1) - len(self._order)

    def deleted(self) -> list[int]:
        return [seq for seq in range(max(self.first, 1), self.last + 1) if seq not in self._messages]

    def add(self, subject: str, header: bytes, payload: bytes, time: int, ttl: int = 0, seq: int = 0) -> StoredMessage:
        """Store a message under the next sequence, or under `seq` if that is larger."""
        seq = max(seq, self.last + 1)
        message = StoredMessage(seq, subject, header, payload, time, ttl)
        self._messages[seq] = message
        self._order.append(seq)
        self._subjects.setdefault(subject, []).append(seq)
        self.bytes += self.size(subject, header, payload)
        self.last = seq
        self.last_time = time
        self._changes.append((message, True))
        return message

    def skip(self) -> int:
        """Use up the next sequence without storing a message, and return it."""
        self.last += 1
        if not self._order:
            self._first = self.last + 1
        return self.last

    def get(self, seq: int) -> StoredMessage | None:
        return self._messages.get(seq)

    def last_for(self, pattern: str, up_to: int | None = None) -> StoredMessage | None:
        """Return the newest message that matches a pattern, up to a sequence.

        For `>` that is the message with the last sequence; if it was deleted there is none, as on a real server.
        """
        if pattern == ">" and up_to is None:
            return self._messages.get(self.last)
        newest = 0
        for _, seqs in self._matching(pattern):
            index = len(seqs) if up_to is None else bisect_left(seqs, up_to + 1)
            if index:
                newest = max(newest, seqs[index - 1])
        return self._messages.get(newest)

    def next_for(self, pattern: str, seq: int) -> StoredMessage | None:
        """Return the first message from a sequence on that matches a pattern; an empty pattern matches all."""
        if pattern in ("", ">"):
            index = bisect_left(self._order, seq)
            return self._messages[self._order[index]] if index < len(self._order) else None
        if not subjects.has_wildcard(pattern):
            seqs = self._subjects.get(pattern, [])
            index = bisect_left(seqs, seq)
            return self._messages[seqs[index]] if index < len(seqs) else None
        for index in range(bisect_left(self._order, seq), len(self._order)):
            message = self._messages[self._order[index]]
            if subjects.matches(pattern, message.subject):
                return message
        return None

    def count(self, pattern: str, seq: int = 0) -> int:
        """Count the messages from a sequence on that match a pattern; an empty pattern matches all."""
        if pattern in ("", ">"):
            return len(self._order) - bisect_left(self._order, seq)
        return sum(len(seqs) - bisect_left(seqs, seq) for _, seqs in self._matching(pattern))

    def sequences(self, pattern: str) -> list[int]:
        if pattern in ("", ">"):
            return list(self._order)
        found: list[int] = []
        for _, seqs in self._matching(pattern):
            found += seqs
        return sorted(found)

    def totals(self, pattern: str) -> dict[str, int]:
        return {subject: len(seqs) for subject, seqs in self._matching(pattern)}

    def seq_from_time(self, time: int) -> int:
        """Return the sequence of the first message stored at or after a time, or the next sequence."""
        for seq in self._order:
            if self._messages[seq].time >= time:
                return seq
        return self.last + 1

    def remove(self, seq: int) -> StoredMessage | None:
        message = self._messages.pop(seq, None)
        if message is None:
            return None
        del self._order[bisect_left(self._order, seq)]
        seqs = self._subjects[message.subject]
        del seqs[bisect_left(seqs, seq)]
        if not seqs:
            del self._subjects[message.subject]
        self.bytes -= self.size(message.subject, message.header, message.payload)
        self._changes.append((message, False))
        if not self._order:
            self._first = self.last + 1
        return message

    def compact(self, seq: int) -> list[StoredMessage]:
        """Remove all messages below a sequence; beyond the end, the stream continues at that sequence."""
        removed = [self._messages[each] for each in self._order[: bisect_left(self._order, seq)]]
        for message in removed:
            self.remove(message.seq)
        if seq > self.last:
            self.last = seq - 1
        if not self._order:
            self._first = self.last + 1
        return removed

    def as_of(self, behind: int) -> Store:
        """Return a copy as it was `behind` messages ago. It can undo the last 10,000 changes."""
        copy = Store(file=self.file, first_seq=self._first)
        copy._restore(self)
        for message, added in reversed(self._changes):
            if not added:
                copy._put(message)
                continue
            if not behind:
                break
            copy.remove(message.seq)
            copy.last = message.seq - 1
            behind -= 1
        return copy

    def _restore(self, other: Store) -> None:
        for message in other:
            self._put(message)
        self.last, self.last_time = other.last, other.last_time

    def _put(self, message: StoredMessage) -> None:
        self._messages[message.seq] = message
        insort(self._order, message.seq)
        insort(self._subjects.setdefault(message.subject, []), message.seq)
        self.bytes += self.size(message.subject, message.header, message.payload)

    def undo_add(self, seq: int) -> bool:
        """Undo the newest message if it has this sequence, and return whether it did."""
        if seq != self.last or self.remove(seq) is None:
            return False
        self.last = seq - 1
        return True

    def _matching(self, pattern: str) -> list[tuple[str, list[int]]]:
        if not subjects.has_wildcard(pattern):
            seqs = self._subjects.get(pattern)
            return [(pattern, seqs)] if seqs else []
        return [(subject, seqs) for subject, seqs in self._subjects.items() if subjects.matches(pattern, subject)]
