"""What a bucket held at a revision, from the messages that are left. No I/O.

A key at revision R is its newest message up to R. Servers remove the oldest messages of a key first, whatever the
reason (history, purge, maximum age), so where such a message is left it is the answer, and a delete marker says that
the key did not exist. Where none is left, either the key came later or its history is gone:

=====================================================================  ====================
the key's oldest message, which is newer than R                        the key at R
=====================================================================  ====================
none of the sequences up to R was ever removed                         did not exist
has the header that says it replaced revision N > 0                    unavailable
is a purge or a marker of the server: it removed all before it         unavailable
was created: its header says that there was nothing before it          did not exist
is one of as many as the bucket keeps of a key: some may be gone       unavailable
is one of fewer: its history has removed nothing                       did not exist
there is no message at all, and the key was asked for by name          unavailable
=====================================================================  ====================

What left nothing behind has no name: a key that expired in a bucket without markers, or that was purged from the
stream, as every client does with deleted keys (`purge_deletes`). It may have been written anew since. When there is
reason to think so (`Verdict.lost`) the read must not be taken for the whole truth, and that a key did not exist is not
known any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, Record, Row, Subjects, entry_of, follows, replaced_all, shows_expiry
from jetstream_ext.protocol.options import rfc3339
from jetstream_ext.protocol.stream_state import StreamState


@dataclass(slots=True)
class _Key:
    """The messages of a key."""

    oldest: int
    newest: int
    count: int
    entry: KeyValueEntry | None
    """The newest up to the revision."""
    replaced: bool
    """The oldest message says that there was one before it."""
    before: int | None
    """The revision that the oldest message says it replaced (0: there was none); None: it does not say."""


def _first(seq: int, subject: str, headers: Mapping[str, str]) -> _Key:
    if not headers:
        return _Key(seq, 0, 0, None, replaced=False, before=None)
    before = follows(headers, subject)
    return _Key(seq, 0, 0, None, replaced=bool(before) or replaced_all(headers), before=before)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a revision."""

    entries: dict[str, KeyValueEntry]
    unavailable: tuple[str, ...]
    """Keys whose state is not known, sorted."""
    complete: bool
    """Whether there can be no other key."""
    lost: bool
    """Whether there is reason to think that there was another key."""


class Past:
    """A bucket as of one revision.

    Args:
        subjects: Which keys are wanted.
        revision: The revision.
        history: How many messages the bucket keeps of a key (0: all).
    """

    def __init__(self, subjects: Subjects, *, revision: int, history: int) -> None:
        self.revision = revision
        self._subjects = subjects
        self._history = history
        self._keys: dict[str, _Key] = {}
        self._accounted = 0
        self.expires: bool = False
        """Whether a message showed that values of the bucket have times to live of their own."""

    def feed(self, records: Iterable[Row], *, log: bool = False) -> None:
        """Take messages, ascending for each key.

        Args:
            records: The messages: all that a key has, or its newest one up to the revision.
            log: They are part of the whole log: those of other keys may explain what is missing in it.
        """
        bucket, wanted, revision = self._subjects.bucket, self._subjects.wanted, self.revision
        keys, prefix, cut = self._keys, self._subjects.prefix, len(self._subjects.prefix)
        for seq, subject, data, headers, time in records:
            name = subject[cut:]
            asked = wanted(name) and subject.startswith(prefix)
            if not (asked or log):
                continue
            key = keys.get(name)
            if key is None:
                key = keys[name] = _first(seq, subject, headers)
            if seq <= key.newest:
                continue
            key.newest = seq
            key.count += 1
            if headers:
                self._note(headers, seq)
            if asked and seq <= revision:
                key.entry = entry_of(bucket, name, Record(seq, subject, data, headers, time))

    def feed_oldest(self, record: Record, count: int) -> None:
        """Take the oldest message of a key that has none up to the revision, and how many it has."""
        key = self._keys[record.subject[len(self._subjects.prefix) :]] = _first(
            record.seq, record.subject, record.headers
        )
        key.count = count
        self._note(record.headers, record.seq)

    def knows(self, name: str) -> bool:
        """Return whether a message of the key up to the revision was fed."""
        key = self._keys.get(name)
        return key is not None and key.entry is not None

    def _note(self, headers: Mapping[str, str], seq: int) -> None:
        if replaced_all(headers):
            self._accounted = max(self._accounted, seq)
        self.expires = self.expires or shows_expiry(headers)

    def uncertain(self, named: Iterable[str]) -> bool:
        """Return whether it matters if sequences up to the revision are missing."""
        absent = any(key.entry is None or key.entry.operation != "PUT" for key in self._keys.values())
        return absent or any(name not in self._keys for name in named)

    def _gone(self, key: _Key) -> bool:
        return key.replaced or (key.before is None and self._full(key))

    def _full(self, key: _Key) -> bool:
        return 0 < self._history <= key.count

    def accounts_for(self) -> int:
        """Return the sequence below which the history of a key that is there may explain what is missing."""
        # What a history removed of a key was no newer than what its oldest message says it replaced.
        full = (key.oldest if key.before is None else key.before for key in self._keys.values() if self._full(key))
        return max(self._accounted, max(full, default=0))

    def verdict(
        self, *, named: Iterable[str], listed: Iterable[str] = (), wild: bool, missing: bool, lost: bool
    ) -> Verdict:
        """Return what is known now that everything was fed.

        Args:
            named: Keys that were asked for by name.
            listed: Keys that match, and were there when the read began.
            wild: Whether keys were asked for by pattern, so that some may be meant that nobody can name.
            missing: Whether messages up to the revision were, or may have been, removed.
            lost: Whether there is reason to think that they were not those of the keys that are there.
        """
        wanted = self._subjects.wanted
        entries = {name: key.entry for name, key in self._keys.items() if key.entry is not None}
        if not missing:
            return Verdict(entries, (), complete=True, lost=False)
        gone = {name for name, key in self._keys.items() if key.entry is None and wanted(name) and self._gone(key)}
        gone.update(name for name in (*named, *listed) if name not in self._keys)
        if lost:
            # They may have been written, have vanished, and whatever is left of them be older or newer than that.
            doubtful = {name for name in named if name not in entries or entries[name].operation != "PUT"}
            entries = {name: entry for name, entry in entries.items() if name not in doubtful}
            gone |= doubtful
        return Verdict(entries, tuple(sorted(gone)), complete=not wild, lost=wild and lost)


_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of a bucket's history."""

    revision: int
    time: datetime
    since: datetime
    """A time that is certainly not later."""
    present: bool
    """Nothing had been written since when the leader was asked."""


async def find_instant(bucket: Bucket, state: StreamState, at: int | datetime) -> Instant:
    """Return the point in time that a caller's `at` means.

    Raises:
        ValueError: It lies in the future, or is no revision, or a naive datetime.
        TypeError: It is neither a revision nor a datetime.
    """
    if isinstance(at, datetime):
        rfc3339(at, "at")
        when = at.astimezone(UTC)
        return Instant(await _revision_at(bucket, state, when), when, since=when, present=False)
    if isinstance(at, bool) or not isinstance(at, int):
        raise TypeError(f"at must be a revision or a datetime, not {type(at).__name__}")
    if at < 1:
        raise ValueError(f"a revision is an integer from 1 up, not {at}")
    if at > state.last_seq:
        raise ValueError(f"bucket {bucket.name!r} has no revision {at} yet; its last is {state.last_seq}")
    if at == state.last_seq:
        return Instant(at, state.last_time, since=state.last_time, present=True)
    message = await bucket.at_leader(seq=at, next_by_subj=">")
    time = state.last_time if message is None else message.time
    exact = message is not None and message.seq == at
    return Instant(at, time, since=time if exact else state.created_at, present=False)


async def _revision_at(bucket: Bucket, state: StreamState, when: datetime) -> int:
    """Return the last revision stored up to `when`, that microsecond included."""
    ahead = (when - state.now).total_seconds()
    if ahead > bucket.timeout:
        raise ValueError(f"at lies in the future: the server's clock is {state.now.isoformat()}")
    if ahead >= 0:
        # Clocks differ a little. What is stored up to then is known only once the server is past it.
        await asyncio.sleep(ahead + 0.001)
        state = await bucket.state()
        if state.now <= when:
            raise ValueError(f"at lies in the future: the server's clock is {state.now.isoformat()}")
    after = when + _MICROSECOND
    if state.last_time < after:
        return state.last_seq
    found = await bucket.at_leader(start_time=after.isoformat())
    # A time beyond the last message makes some servers answer with an earlier one.
    if found is None or found.time < after:
        return state.last_seq
    return found.seq - 1
