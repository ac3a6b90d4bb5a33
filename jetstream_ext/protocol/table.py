"""What a table of keys holds at one revision. No I/O.

`Content` is fed the messages of a stream. A live table stages them first: it is not known at once which revision they bring
it to. A bucket that keeps one message per key removes the older ones, so an answer that ends at revision E may lack the
message that a key had at E. `Content.commit` applies what is staged, once the state of every key at a revision is known:
all of it between two turns of the event loop. Readers and watchers see committed revisions only.

Some removals have no revision, because the server leaves no marker. `Content.settle` applies TTLs by the leader's clock,
and what a purge or a limit of the whole stream has removed.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from weakref import WeakSet

from jetstream_ext.protocol.headers import parse_time
from jetstream_ext.protocol.updates import FOREVER, MOST_CHANGES, Change, Record, Staged, Update, Updates, Watcher, each


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
        self._staged: Staged | None = None  # messages that wait for a commit
        self._ttls: dict[str, tuple[int, timedelta]] = {}  # by key: the newest message that has a TTL of its own
        self._deadlines: list[tuple[datetime, int, str]] = []  # a heap of theirs; some are out of date
        self._awaited: dict[str, int] = {}  # what has expired and the server will replace, by key: its sequence
        self._highest = 0
        # Lower bounds, because finding the oldest key anew costs a walk over what was removed before it in the dict.
        self._not_due_before = datetime.min.replace(tzinfo=UTC)
        self._none_below = 0
        self._in_order = True  # `values` and `deleted` are in the order of their sequences

    def __len__(self) -> int:
        """How many keys have a message."""
        return len(self.values) + len(self.deleted)

    # -- messages -----------------------------------------------------------------------------------------------------

    def feed(self, updates: Updates) -> None:
        """Apply messages at once, in any order."""
        self._apply(updates, None)

    def stage(self, updates: Updates, size: int = 0, missing: int = 0) -> None:
        """Take messages of so many bytes for the next commit, in the order of their sequences.

        So many others are missing before or between them: newer ones had replaced them before they were read.
        """
        self._staged = self._staged or Staged()
        self._staged.left_out += missing
        self._staged.add(updates, size)

    @property
    def staged(self) -> int:
        """How many messages wait for a commit."""
        return 0 if self._staged is None else self._staged.count

    def unstage(self) -> None:
        """Forget the messages that wait for a commit, because they are read again."""
        self._staged = None

    def _staged_keys(self) -> set[str]:
        return set() if self._staged is None else self._staged.keys()

    def count_after_commit(self) -> int:
        """Return how many keys will have a message after the next commit."""
        new = self._staged_keys().difference(self.values).difference(self.deleted)
        return len(self) + len(new)

    def newest_after_commit(self) -> int:
        """Return the sequence of the newest message that the next commit does not replace, or 0."""
        self._arrange()
        staged = self._staged_keys()
        every = (self.values, self.deleted)
        return max(
            next((record[0] for key, record in reversed(held.items()) if key not in staged), 0) for held in every
        )

    def commit(self, revision: int) -> None:
        """Apply what is staged. With it, the content is that of a revision, which is not below the one before."""
        staged, self._staged, self.revision = self._staged, None, revision
        if staged is not None:
            changes: list[Change] | None = [] if self.watchers else None
            for part in staged.parts:
                self._apply(part, changes)
            self._push(changes or [], skipped=staged.left_out)

    def _apply(self, updates: Updates, changes: list[Change] | None) -> None:
        # The collector finds that the young records refer to nothing that it watches, and lets go of them. Put into `values`
        # before that, they would make it walk through all of `values` again and again, which takes 30 ms for a million keys.
        gc.collect(0)
        if self._none_below and updates:
            first = next(iter(updates.values())) if isinstance(updates, dict) else updates[0][1]
            self._none_below = min(self._none_below, first[0])
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

    def own_ttls(self) -> dict[str, timedelta]:
        """Return the TTL of each key whose value has a finite one."""
        return {key: ttl for key, (_, ttl) in self._ttls.items() if ttl != FOREVER and key in self.values}

    # -- removals without a message -----------------------------------------------------------------------------------

    def next_expiry(self) -> datetime | None:
        """Return a time by the leader's clock before which nothing expires; None: nothing ever does."""
        ages = [self._not_due_before] if self._max_age is not None and self.values else []
        return min(ages + [deadline for deadline, _, _ in self._deadlines[:1]], default=None)

    @property
    def overdue(self) -> bool:
        """Whether a message has expired, and what the server replaces it by has not been read: a marker, an older message."""
        return bool(self.overdue_keys)

    @property
    def overdue_keys(self) -> list[str]:
        """The keys of such messages."""
        for key, seq in tuple(self._awaited.items()):
            held = self.values.get(key) or self.deleted.get(key)
            if held is None or held[0] != seq:
                del self._awaited[key]
        return list(self._awaited)

    def settle(self, now: datetime, first_seq: int) -> None:
        """Remove what has expired, and what is below a lowest sequence of the stream, unless a staged message replaces it.

        The caller has read every message that the stream had at that time of the leader's clock.
        """
        self.expire(now)
        self.drop_below(first_seq)

    def expire(self, now: datetime) -> list[str]:
        """Remove what has expired and leaves neither a delete marker nor an older message.

        Return the other keys that may have an older one (see `expose`).
        """
        unclear, gone = list[str](), list[str]()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq, key = heapq.heappop(self._deadlines)
            if self._ttls.get(key, (0,))[0] == seq:
                (unclear if self._deep else gone).append(key)
        if self._max_age is not None and now >= self._not_due_before:
            self._not_due_before = _later_than(now, self._max_age)
            for held in (self.values, self.deleted):
                for key, record in self._oldest(held):
                    if (due_at := _later(record, self._max_age)) > now:
                        self._not_due_before = min(self._not_due_before, due_at)
                        break
                    (unclear if self._deep and self._own_ttls else gone).append(key)
        marked = [key for key in gone if key in self.values] if self._markers else []
        self._awaited.update((key, (self.values.get(key) or self.deleted[key])[0]) for key in unclear + marked)
        self._remove_unstaged(gone if not marked else [key for key in gone if key not in self.values])
        return unclear

    def expose(self, keys: Iterable[str], stored: dict[str, Update], *, now: bool = True) -> None:
        """Take over what the server still has of keys whose newest message has expired: an older message, or nothing.

        One that is still stored counts as expired `now`, or else stays until the server has removed it.
        """
        changes: list[Change] = []
        for key in keys:
            held, found = self.values.get(key) or self.deleted.get(key), stored.get(key)
            if held is None or (not now and found is not None and found[1][0] >= held[0]):
                continue
            old = self.values.pop(key, None)
            self.deleted.pop(key, None)
            self._ttls.pop(key, None)
            if self.dirty is not None:
                self.dirty.add(key)
            if found is not None and found[1][0] < held[0]:
                self._apply_each([found], None)
            if old is not None or key in self.values:
                changes.append(Change(key, old, self.values.get(key), self.revision))
        self._push(changes)

    def _oldest(self, held: dict[str, Record]) -> Iterator[tuple[str, Record]]:
        """Yield what the maximum age applies to, the oldest first."""
        self._arrange()
        ttls = self._ttls
        return (it for it in held.items() if not (ttls and ttls.get(it[0], (0, None))[1] == FOREVER))

    def drop_below(self, first_seq: int) -> None:
        """Remove what a purge or a limit of the stream has removed: everything below a lowest sequence of the stream.

        The stream had that lowest sequence when it had no message above `revision` and what is staged.
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
        self._remove_unstaged(gone)

    def _arrange(self) -> None:
        if not self._in_order:
            self.values = dict(sorted(self.values.items(), key=lambda it: it[1][0]))
            self.deleted = dict(sorted(self.deleted.items(), key=lambda it: it[1][0]))
            self._in_order = True

    def _remove_unstaged(self, keys: list[str]) -> None:
        if keys:
            staged = self._staged_keys()
            self.remove([key for key in keys if key not in staged])

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
        self.watchers, self.dirty = before.watchers, before.dirty
        if self.dirty is not None:
            for now, then in ((self.values, before.values), (self.deleted, before.deleted)):
                self.dirty.update(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
        if not self.watchers:
            return
        self._arrange()
        changes = [
            Change(key, old, record, record[0])
            for key, record in self.values.items()
            if (old := before.values.get(key)) != record
        ]
        gone = ((key, old) for key, old in before.values.items() if key not in self.values)
        self._push(changes + [Change(key, old, None, self.revision) for key, old in gone])

    def _push(self, changes: list[Change], *, skipped: int = 0) -> None:
        if changes or skipped:
            for watcher in tuple(self.watchers):
                watcher.push(changes, skipped=skipped)


def _later_than(time: datetime, ttl: timedelta) -> datetime:
    try:
        return time + ttl
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _later(record: Record, ttl: timedelta) -> datetime:
    return _later_than(parse_time(record[2]), ttl)
