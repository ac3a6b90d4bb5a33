"""What a bucket held at a revision, from messages that were read. No I/O.

A key at revision R is its newest message up to R. Servers always remove the oldest messages of a key
first (history, purge, maximum age), so if such a message is stored, it is the answer, and a delete marker says that the
key did not exist. If none is stored, the key's oldest message decides: `Past.verdict` is the table of docs/key-value.md,
"Reads of the past". A key can also vanish without a trace and be written again. If that is possible (`Verdict.lost`),
the answer may be incomplete, and no key is known not to have existed. Where markers cover that, one expiry remains: that
of a message which is not the last one of its key. It leaves no marker, but a newer message of the key, which is stored or
has left a marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from jetstream_ext.kv.entries import ROLLUP, KeyValueEntry, Row, Subjects, entry_of, never_expires
from jetstream_ext.protocol.headers import EXPECTED_LAST_SUBJECT, EXPECTED_LAST_SUBJECT_SEQ, MSG_TTL
from jetstream_ext.protocol.numbers import parse_number
from jetstream_ext.ttl import marker_reason


@dataclass(slots=True)
class _Key:
    name: str | None  # None: the read does not want it, or it is no key of the bucket
    oldest: int
    newest: int
    count: int
    entry: KeyValueEntry | None  # the newest up to the revision
    replaced: bool  # the oldest message says that it replaced one
    before: int | None  # the revision that the oldest message says it replaced (0: there was none)


def _first(name: str | None, seq: int, subject: str, headers: Mapping[str, str]) -> _Key:
    if not headers:
        return _Key(name, seq, 0, 0, None, replaced=False, before=None)
    before = replaced_revision(headers, subject)
    return _Key(name, seq, 0, 0, None, replaced=bool(before) or replaced_all(headers), before=before)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known about a revision."""

    entries: dict[str, KeyValueEntry]
    unavailable: tuple[str, ...]  # keys whose state is not known, sorted
    complete: bool  # there can be no other key
    lost: bool  # another key may have existed; then `complete` is False


class Past:
    """A bucket as of one revision; `history` is how many messages it keeps of a key (0: all)."""

    def __init__(self, subjects: Subjects, *, revision: int, history: int) -> None:
        self._subjects = subjects
        self.revision = revision
        self._history = history
        self._keys: dict[str, _Key] = {}  # by subject
        self._accounted = 0
        self.emptied: bool = False
        """Whether a message showed that everything up to the revision was removed, whatever its key."""
        self.expires: bool = False
        """Whether a message showed that messages of the bucket have TTLs of their own."""
        self.since: datetime | None = None
        """When the newest message up to the revision was stored that this was fed: not after the revision."""

    def feed(self, rows: Iterable[Row], *, log: bool = False) -> None:
        """Take messages, ascending for each key: all that a key has, or its newest one up to the revision.

        With `log`, they are part of the whole log: messages of other keys may then explain what is missing in it.
        """
        bucket, key_of, keys, revision = self._subjects.bucket, self._subjects.key_of, self._keys, self.revision
        for row in rows:
            seq, subject, _, headers, time = row
            if seq <= revision and (self.since is None or time > self.since):
                self.since = time
            key = keys.get(subject)
            if key is None:
                name = key_of(subject)
                if name is None and not log:
                    continue
                key = keys[subject] = _first(name, seq, subject, headers)
            if seq <= key.newest:
                continue
            key.newest = seq
            key.count += 1
            if headers:
                if seq > revision and replaced_everything(headers):
                    self.emptied = True
                elif replaced_all(headers):
                    self._accounted = max(self._accounted, seq)
                self.expires = self.expires or shows_expiry(headers)
            if key.name is not None and seq <= revision:
                key.entry = entry_of(bucket, key.name, row)

    def feed_oldest(self, row: Row, count: int) -> None:
        """Take the oldest of the `count` messages of a key that has none up to the revision."""
        self.feed((row,))
        self._keys[row[1]].count = count

    def knows(self, name: str) -> bool:
        key = self._keys.get(self._subjects.prefix + name)
        return key is not None and key.entry is not None

    @property
    def held(self) -> int:
        """How many subjects have a message up to the revision."""
        return sum(key.oldest <= self.revision for key in self._keys.values())

    def uncertain(self, named: Iterable[str]) -> bool:
        """Whether the answer depends on sequences up to the revision being missing."""
        absent = any(key.entry is None or key.entry.operation != "PUT" for key in self._keys.values())
        return absent or any(self._subjects.prefix + name not in self._keys for name in named)

    def _full(self, key: _Key) -> bool:
        return 0 < self._history <= key.count

    def accounts_for(self) -> int:
        """Return the sequence up to which the histories of stored keys may explain missing sequences."""
        # What a history removed of a key was no newer than the revision that its oldest message says it replaced.
        full = (key.oldest if key.before is None else key.before for key in self._keys.values() if self._full(key))
        return max(self._accounted, max(full, default=0))

    def verdict(
        self,
        *,
        named: Iterable[str],
        listed: Iterable[str] = (),
        wild: bool,
        missing: bool,
        lost: bool,
        expire: bool = False,
    ) -> Verdict:
        """Return what is known after everything was fed.

        Args:
            named: The keys that the caller named.
            listed: Keys that match, and existed when the read began.
            wild: The caller gave patterns as well, so that keys may match that nothing names.
            missing: Messages up to the revision were, or may have been, removed.
            lost: They may have been messages of keys that are no longer stored.
            expire: They may have expired, without a marker if a newer message of the key was stored.
        """
        keys = {key.name: key for key in self._keys.values() if key.name is not None}
        entries = {name: key.entry for name, key in keys.items() if key.entry is not None}
        if not missing:
            return Verdict(entries, (), complete=True, lost=False)
        gone = {
            name
            for name, key in keys.items()
            if key.entry is None and (key.replaced or (key.before is None and (expire or self._full(key))))
        }
        gone.update(name for name in (*named, *listed) if name not in keys)
        if lost:
            # Such a key may have existed and vanished. What is stored of it now may be older or newer than that.
            doubtful = {name for name in named if name not in entries or entries[name].operation != "PUT"}
            entries = {name: entry for name, entry in entries.items() if name not in doubtful}
            gone |= doubtful
        return Verdict(entries, tuple(sorted(gone)), complete=not wild, lost=wild and lost)


def replaced_revision(headers: Mapping[str, str], subject: str) -> int | None:
    """Return the revision of the key that a message replaced (0: there was none), or None if it does not say.

    Servers store a message with an expectation only if the expectation held.
    """
    if replaced_all(headers):
        return None
    named = headers.get(EXPECTED_LAST_SUBJECT)
    if named is not None and (named != subject or "\ufffd" in named):  # or not known exactly
        return None
    return parse_number(headers.get(EXPECTED_LAST_SUBJECT_SEQ, ""))


def replaced_all(headers: Mapping[str, str]) -> bool:
    """Whether storing a message removed every older one of its key."""
    return bool(headers.get(ROLLUP, "").strip()) or marker_reason(headers) is not None


def replaced_everything(headers: Mapping[str, str]) -> bool:
    """Whether storing a message removed every older one of the stream."""
    return headers.get(ROLLUP, "").strip().lower() == "all"


def shows_expiry(headers: Mapping[str, str]) -> bool:
    """Whether a message shows that messages of its bucket have TTLs of their own."""
    return marker_reason(headers) is not None or (MSG_TTL in headers and not never_expires(headers))
