"""Messages of keys and the changes that they make: what waits for a commit, and what watchers have yet to see. No I/O."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Final, NamedTuple

MOST_CHANGES: Final = 65_536
MOST_BYTES: Final = 64 << 20
"""After so many changes, or bytes of values, that wait for a watcher or for a commit, newer ones of a key replace older ones."""

Record = tuple[int, bytes, bytes, bytes]
"""A stored message without its subject: sequence, payload, time, and its header block as in `headers.ROW_STORED`.

A tuple of plain values, because tables hold millions: the garbage collector does not look at those again.
"""

Update = tuple[str, Record, bool, timedelta | None]
"""A message of a key: the key, the record, whether it deletes the key, and its own TTL (None: it has none)."""

Updates = list[Update] | dict[str, Record]
"""Messages in the order of their sequences. In a dictionary, each is of another key, deletes nothing and has no TTL."""

FOREVER: Final = timedelta.max
"""As the TTL of a message: it never expires, whatever the stream's maximum age is."""


def each(updates: Updates) -> Iterable[Update]:
    if isinstance(updates, dict):
        return [(key, record, False, None) for key, record in updates.items()]
    return updates


class Staged:
    """Messages that wait for a commit; if they are many, the newest of each key."""

    def __init__(self) -> None:
        self.parts: list[Updates] = []
        self.count: int = 0
        self._bytes = 0
        self.left_out: int = 0  # messages that newer ones have replaced
        self._fold_at = 2 * MOST_CHANGES, 2 * MOST_BYTES

    def add(self, updates: Updates, size: int) -> None:
        self.parts.append(updates)
        self.count += len(updates)
        self._bytes += size
        if self.count > self._fold_at[0] or self._bytes > self._fold_at[1]:
            newest = {update[0]: update for part in self.parts for update in each(part)}
            kept = sorted(newest.values(), key=lambda update: update[1][0])
            self.left_out += self.count - len(kept)
            self.parts, self.count = [kept], len(kept)
            self._bytes = sum(len(update[1][1]) for update in kept)
            self._fold_at = 2 * max(MOST_CHANGES, len(kept)), 2 * max(MOST_BYTES, self._bytes)

    def keys(self) -> set[str]:
        return {key for part in self.parts for key in (part if isinstance(part, dict) else [it[0] for it in part])}


class Change(NamedTuple):
    """A change of one key, as records (None: the key does not exist); `skipped` were left out before it."""

    key: str
    old: Record | None
    new: Record | None
    revision: int
    skipped: int = 0


def _size(change: Change) -> int:
    return 0 if change.new is None else len(change.new[1])


class Watcher:
    """The changes that one watcher has yet to see: all of them in order, or if they are many the newest of each key."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._all: deque[Change] = deque()
        self._newest: OrderedDict[str, Change] = OrderedDict()  # in the order of their revisions
        self._size = 0  # bytes of the values in `_all`
        self._skipped = 0

    def __len__(self) -> int:
        return len(self._all) + len(self._newest)

    def push(self, changes: Collection[Change], *, skipped: int = 0) -> None:
        """Take the next changes; `skipped` were left out before them."""
        self._skipped += skipped
        if self._newest:
            self._fold(changes)
        else:
            self._all.extend(changes)
            self._size += sum(map(_size, changes))
            if len(self._all) > MOST_CHANGES or self._size > MOST_BYTES:
                changes, self._all, self._size = self._all, deque(), 0
                self._fold(changes)
        self._wake()

    def _fold(self, changes: Iterable[Change]) -> None:
        newest = self._newest
        for change in changes:
            before = newest.pop(change.key, None)
            if before is None:
                newest[change.key] = change
                continue
            self._skipped += 1
            if before.old is None and change.new is None:
                self._skipped += 1  # the watcher has not seen that the key existed
            else:
                newest[change.key] = change._replace(old=before.old)

    def pop(self) -> Change | None:
        """Return the next change, or None."""
        if self._all:
            change = self._all.popleft()
            self._size -= _size(change)
        elif self._newest:
            change = self._newest.popitem(last=False)[1]
        else:
            return None
        if self._skipped:
            change, self._skipped = change._replace(skipped=self._skipped), 0
        return change
