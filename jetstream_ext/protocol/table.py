"""What a table of keys holds at one revision, and what its watchers have yet to see. No I/O.

`Content` is fed the messages of a stream. A live table stages them first: it is not known at once which revision they bring
it to. A bucket that keeps one message per key removes the older ones, so an answer that ends at revision E may lack the
message that a key had at E. `Content.commit` applies what is staged, once the state of every key at a revision is known:
all of it between two turns of the event loop. Readers and watchers see committed revisions only.

Some removals have no revision, because the server leaves no marker. `Content.expire` applies TTLs by the leader's clock,
and `Content.drop_below` what a purge or a limit of the whole stream has removed.
"""

from __future__ import annotations

import gc
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from weakref import WeakSet

from jetstream_ext.protocol.headers import parse_time

MOST_CHANGES: Final = 65_536
MOST_BYTES: Final = 64 << 20
"""After so many changes, or bytes of values, that wait for a watcher or for a commit, newer ones of a key replace older ones."""

FOREVER: Final = timedelta.max
"""As the TTL of a message: it never expires, whatever the stream's maximum age is."""

Record = tuple[int, bytes, bytes, bytes]
"""A stored message without its subject: sequence, payload, time, and its header block as in `headers.ROW_STORED`.

A tuple of plain values, because tables hold millions: the garbage collector does not look at those again.
"""

Update = tuple[str, Record, bool, timedelta | None]
"""A message of a key: the key, the record, whether it deletes the key, and its own TTL (None: it has none)."""

Updates = list[Update] | dict[str, Record]
"""Messages in the order of their sequences. In a dictionary, each is of another key, deletes nothing and has no TTL."""


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


class Content:
    """The newest message of every key as of `revision`.

    Args:
        max_age: The maximum age of the stream's messages.
        own_ttls: The server heeds the TTLs of single messages.
        markers: The server replaces a value that expires by a delete marker, which arrives as a message.
        deep: A key can have several messages, so that an older one is the newest again when a newer one expires.
    """

    def __init__(
        self,
        *,
        max_age: timedelta | None = None,
        own_ttls: bool = True,
        markers: bool = False,
        deep: bool = False,
    ) -> None:
        self.revision: int = 0
        self.values: dict[str, Record] = {}
        self.deleted: dict[str, Record] = {}
        """The delete markers of keys that have one."""
        self.watchers: WeakSet[Watcher] = WeakSet()
        self.dirty: set[str] | None = None
        """The keys that have changed since the caller emptied it; None does not count."""
        self._max_age = max_age
        self._own_ttls = own_ttls
        self._markers = markers
        self._deep = deep
        self._staged: list[Updates] = []
        self._staged_count = self._staged_bytes = 0
        self._left_out = 0  # messages that were staged, and replaced by newer ones before they were applied
        self._fold_at = 2 * MOST_CHANGES, 2 * MOST_BYTES
        self._ttls: dict[str, tuple[int, timedelta]] = {}  # by key: the newest message that has a TTL of its own
        self._deadlines: list[tuple[datetime, int, str]] = []  # a heap of theirs; some are out of date
        self._highest = 0
        # Lower bounds, because finding the oldest key anew costs a walk over what was removed before it in the dict.
        self._not_due_before = datetime.min.replace(tzinfo=UTC)
        self._none_below = 0
        self._in_order = True  # `values` and `deleted` are in the order of their sequences

    def __len__(self) -> int:
        """How many keys have a message."""
        return len(self.values) + len(self.deleted)

    def feed(self, updates: Updates) -> None:
        """Apply messages at once, in any order."""
        self._apply(updates, None)

    def stage(self, updates: Updates, size: int = 0, missing: int = 0) -> None:
        """Take messages of so many bytes for the next commit, in the order of their sequences.

        So many others are missing before or between them: newer ones had replaced them before they were read.
        """
        self._left_out += missing
        self._staged.append(updates)
        self._staged_count += len(updates)
        self._staged_bytes += size
        if self._staged_count > self._fold_at[0] or self._staged_bytes > self._fold_at[1]:
            newest = {update[0]: update for part in self._staged for update in each(part)}
            kept = sorted(newest.values(), key=lambda update: update[1][0])
            self._left_out += self._staged_count - len(kept)
            self._staged, self._staged_count = [kept], len(kept)
            self._staged_bytes = sum(len(update[1][1]) for update in kept)
            self._fold_at = 2 * max(MOST_CHANGES, len(kept)), 2 * max(MOST_BYTES, self._staged_bytes)

    @property
    def staged(self) -> int:
        """How many messages wait for a commit."""
        return self._staged_count

    def commit(self, revision: int) -> None:
        """Apply what is staged. With it, the content is that of a revision, which is not below the one before."""
        staged, left_out = self._staged, self._left_out
        self._staged, self._staged_count, self._staged_bytes, self._left_out = [], 0, 0, 0
        self._fold_at = 2 * MOST_CHANGES, 2 * MOST_BYTES
        self.revision = revision
        changes: list[Change] | None = [] if self.watchers else None
        for part in staged:
            self._apply(part, changes)
        self._push(changes or [], skipped=left_out)

    def _apply(self, updates: Updates, changes: list[Change] | None) -> None:
        # The collector finds that the young records refer to nothing that it watches, and lets go of them. Put into `values`
        # before that, they would make it walk through all of `values` again and again, which takes 30 ms for a million keys.
        gc.collect(0)
        none_deleted = not self.deleted or (isinstance(updates, dict) and self.deleted.keys().isdisjoint(updates))
        if isinstance(updates, dict) and changes is None and none_deleted and not self._ttls:
            self._put_all(updates)
        else:
            self._apply_each(each(updates), changes)

    def _put_all(self, records: dict[str, Record]) -> None:
        if not records:
            return
        values, before = self.values, len(self.values)
        if next(iter(records.values()))[0] <= self._highest:  # some may be older than those that the table has
            self._in_order = False
            records = {key: it for key, it in records.items() if key not in values or values[key][0] < it[0]}
        elif self.revision:  # else it is being loaded, and sorting once costs less
            for key in records:  # a key that is put again comes last, which keeps the order
                values.pop(key, None)
            before = len(values)
        values.update(records)
        self._in_order = self._in_order and len(values) == before + len(records)
        self._highest = max(self._highest, next(reversed(records.values()))[0]) if records else self._highest
        if self.dirty is not None:
            self.dirty.update(records)

    def _apply_each(self, updates: Iterable[Update], changes: list[Change] | None) -> None:
        values, deleted, ttls, highest, dirty = self.values, self.deleted, self._ttls, self._highest, self.dirty
        for key, record, deletes, ttl in updates:
            seq = record[0]
            old = values.get(key)
            if old is not None:
                if old[0] >= seq:
                    continue  # the same message, or one that a newer one replaces
                del values[key]
            elif deleted and (marker := deleted.get(key)) is not None:
                if marker[0] >= seq:
                    continue
                del deleted[key]
            if deletes:
                deleted[key] = record
            else:
                values[key] = record
            if seq > highest:
                highest = seq
            else:
                self._in_order = False
            if ttl is not None and self._own_ttls:
                self._set_ttl(key, record, ttl)
            elif ttls:
                ttls.pop(key, None)
            if dirty is not None:
                dirty.add(key)
            if changes is not None and (old is not None or not deletes):
                changes.append(Change(key, old, None if deletes else record, seq))
        self._highest = highest

    def _set_ttl(self, key: str, record: Record, ttl: timedelta) -> None:
        self._ttls[key] = record[0], ttl
        if ttl == FOREVER:
            return
        heapq.heappush(self._deadlines, (_later(record, ttl), record[0], key))
        if len(self._deadlines) > 2 * len(self._ttls) + MOST_CHANGES:  # a key whose TTL is renewed leaves one each time
            self._deadlines = [it for it in self._deadlines if self._ttls.get(it[2], (0,))[0] == it[1]]
            heapq.heapify(self._deadlines)

    def next_expiry(self) -> datetime | None:
        """Return a time by the leader's clock before which nothing expires without a message; None: nothing ever does."""
        times = [self._deadlines[0][0]] if self._deadlines and (self._deep or not self._markers) else []
        if self._max_age is not None and self.values and not self._markers:
            times.append(self._not_due_before)
        return min(times, default=None)

    def expire(self, now: datetime) -> list[str]:
        """Remove what has expired at a time of the leader's clock, and has left no delete marker.

        The caller has read every message that was stored at that time. Return keys whose newest message has expired, and that
        may have an older one or be about to get a delete marker: they are not removed, and the caller must look (see `expose`).
        """
        due, gone, unclear = self._deadlines, list[str](), list[str]()
        while due and due[0][0] <= now:
            _, seq, key = heapq.heappop(due)
            if self._ttls.get(key, (0,))[0] == seq:
                (unclear if self._deep else gone).append(key)
        if self._max_age is not None and now >= self._not_due_before:
            next_due = _later_than(now, self._max_age)
            for held in (self.values, self.deleted):
                for key, record in self._oldest(held):
                    if (due_at := _later(record, self._max_age)) > now:
                        next_due = min(next_due, due_at)
                        break
                    gone.append(key)
            self._not_due_before = next_due
        self.remove([key for key in gone if key in self.deleted] if self._markers else gone)
        return unclear

    def expose(self, keys: Iterable[str], stored: dict[str, Update], again: datetime | None = None) -> None:
        """Take over what the server still has of keys whose newest message has expired: an older message, or nothing.

        A key that still has its message, or a newer one that the log will bring, is looked at `again`; None removes it.
        """
        changes: list[Change] | None = [] if self.watchers else None
        for key in keys:
            held = self.values.get(key) or self.deleted.get(key)
            found = stored.get(key)
            if held is None:
                continue
            if found is not None and found[1][0] >= held[0] and again is not None:
                heapq.heappush(self._deadlines, (again, held[0], key))
            elif found is None or found[1][0] >= held[0]:
                self.remove([key])
            else:
                old = self.values.pop(key, None)
                self.deleted.pop(key, None)
                self._ttls.pop(key, None)
                self._apply_each([found], None)
                self._in_order = False
                new = self.values.get(key)
                if changes is not None and (old or new):
                    changes.append(Change(key, old, new, self.revision))
        self._push(changes or [])

    def _oldest(self, held: dict[str, Record]) -> Iterator[tuple[str, Record]]:
        """Yield what the maximum age applies to, the oldest first."""
        self._arrange()
        for key, record in held.items():
            if not (self._ttls and self._ttls.get(key, (0, None))[1] == FOREVER):
                yield key, record

    def drop_below(self, first_seq: int) -> None:
        """Remove what a purge or a limit of the stream has removed: everything below a lowest sequence of the stream.

        The stream had that lowest sequence when it had no message above `revision`, so nothing has replaced what is below.
        """
        if first_seq <= self._none_below:
            return
        gone: list[str] = []
        self._arrange()
        lowest = first_seq
        for held in (self.values, self.deleted):
            for key, record in held.items():
                if record[0] >= first_seq:
                    lowest = record[0] if held is self.values else min(lowest, record[0])
                    break
                gone.append(key)
        self._none_below = lowest
        self.remove(gone)

    def _staged_keys(self, last_seq: int | None = None) -> set[str]:
        return {
            key for part in self._staged for key, record, *_ in each(part) if last_seq is None or record[0] <= last_seq
        }

    def _goes(self, key: str, record: Record, first_seq: int, now: datetime) -> bool:
        """Whether a message is gone without another one: by a limit or a purge of the stream, or because it has expired."""
        if record[0] < first_seq:
            return True
        own = self._ttls.get(key, (0, None))
        ttl = own[1] if own[0] == record[0] else None
        if ttl == FOREVER or (self._markers and key in self.values):
            return False
        age = self._max_age if ttl is None else min(ttl, self._max_age or ttl)
        return age is not None and _later(record, age) <= now

    def has_more_than(self, count: int, first_seq: int, last_seq: int, now: datetime) -> bool:
        """Whether more keys than `count` had a message when the stream's first and last sequences were these.

        Everything up to `last_seq` is staged or committed.
        """
        if len(self) + self._staged_count <= count:
            return False
        staged = self._staged_keys(last_seq)
        new = {key for key in staged if key not in self.values and key not in self.deleted}
        if len(self) + len(new) <= count:
            return False
        gone = sum(
            1
            for held in (self.values, self.deleted)
            for key, record in held.items()
            if key not in staged and self._goes(key, record, first_seq, now)
        )
        ttls = {key: (record[0], ttl) for part in self._staged for key, record, _, ttl in each(part)}
        for part in self._staged:
            for key, record, deletes, ttl in each(part):
                age = ttl if ttl is not None and self._own_ttls else self._max_age
                expired = age is not None and age != FOREVER and _later(record, age) <= now
                if ttls[key][0] == record[0] and (
                    record[0] < first_seq or (expired and (deletes or not self._markers))
                ):
                    gone += 1
        return len(self) + len(new) - gone > count

    def has_lost(self, after: int, up_to: int, first_seq: int, now: datetime) -> bool:
        """Whether it has a message with a sequence from `after` (exclusive) to `up_to` that nothing staged replaces.

        The stream has none there, so such a message was lost or removed without a trace.
        """
        if after >= up_to:
            return False
        staged = self._staged_keys()
        self._arrange()
        for held in (self.values, self.deleted):
            for key, record in reversed(held.items()):
                if record[0] <= after:
                    break
                if record[0] <= up_to and key not in staged and not self._goes(key, record, first_seq, now):
                    return True
        return False

    def keep_only(self, stored: set[str], up_to: int) -> None:
        """Remove the keys with a message up to a sequence that are not in `stored`, unless a staged message puts them.

        `stored` has U+FFFD for bytes that are not UTF-8, as servers list subjects.
        """
        staged = self._staged_keys()

        def listed(key: str) -> bool:
            return key in stored or (
                not key.isascii() and key.encode("utf-8", "surrogateescape").decode("utf-8", "replace") in stored
            )

        self.remove(
            [
                key
                for held in (self.values, self.deleted)
                for key, record in held.items()
                if record[0] <= up_to and key not in staged and not listed(key)
            ]
        )

    def _arrange(self) -> None:
        if not self._in_order:
            self.values = dict(sorted(self.values.items(), key=lambda it: it[1][0]))
            self.deleted = dict(sorted(self.deleted.items(), key=lambda it: it[1][0]))
            self._in_order = True

    def remove(self, keys: Collection[str]) -> None:
        """Remove keys that were removed without a message."""
        changes: list[Change] = []
        if self.dirty is not None:
            self.dirty.update(keys)
        for key in keys:
            self._ttls.pop(key, None)
            self.deleted.pop(key, None)
            old = self.values.pop(key, None)
            if old is not None:
                changes.append(Change(key, old, None, self.revision))
        self._push(changes)

    def succeed(self, before: Content) -> None:
        """Take over the watchers of an earlier content of the same keys, and tell them what has changed since."""
        self.watchers = before.watchers
        if not self.watchers:
            return
        self._arrange()
        changes: list[Change] = []
        for key, record in self.values.items():
            old = before.values.get(key)
            if old is None or old[0] != record[0]:
                changes.append(Change(key, old, record, record[0]))
        changes += [
            Change(key, old, None, self.revision) for key, old in before.values.items() if key not in self.values
        ]
        self._push(changes)

    def _push(self, changes: list[Change], *, skipped: int = 0) -> None:
        if changes or skipped:
            for watcher in tuple(self.watchers):
                watcher.push(changes, skipped=skipped)


def each(updates: Updates) -> Iterable[Update]:
    if isinstance(updates, dict):
        return [(key, record, False, None) for key, record in updates.items()]
    return updates


def _later_than(time: datetime, ttl: timedelta) -> datetime:
    try:
        return time + ttl
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _later(record: Record, ttl: timedelta) -> datetime:
    return _later_than(parse_time(record[2]), ttl)
