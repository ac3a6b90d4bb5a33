"""What a bucket holds now, from messages that were read while others wrote. No I/O.

A bucket of any size cannot be read in one atomic request, and while it is read keys are overwritten: the old message
is gone before the reader comes to it, the new one is further on. So a snapshot is *some messages, each valid when it
was read*, and then the log from before the first of them up to an end S that no reply before had passed. Laid over
each other by key, the newer revision winning, that is the bucket at S. For let y be the newest message of a key up to
S, and not read. It was in the store until a newer message of the key removed it, and that one has a revision above S,
for otherwise y would not be the newest. So it was stored after the last reply, and before that y was there to be read.

What removes a message without a revision of its own (a time to live that runs out and leaves no marker) is decided by
time: a message whose time had run out when revision S was stored is not in the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from jetstream_ext.kv.entries import TTL, KeyValueEntry, Row, Subjects, lives_forever, operation, ttl_of


class Latest:
    """A bucket as of the newest message that it was fed.

    Args:
        subjects: Which keys are wanted.
        max_age: The bucket's own time to live, or None.
    """

    def __init__(self, subjects: Subjects, *, max_age: timedelta | None = None) -> None:
        self._subjects = subjects
        self._max_age = max_age
        self._entries: dict[str, KeyValueEntry] = {}
        self._deleted: set[str] = set()
        """The keys among them whose entry is a marker."""
        self._ttls: dict[str, tuple[int, timedelta | None]] = {}
        """Key: the revision that has a time to live, and how long that is (None: for ever)."""

    def feed(self, records: Iterable[Row]) -> None:
        """Take messages, in any order."""
        entries, deleted = self._entries, self._deleted
        bucket, wanted = self._subjects.bucket, self._subjects.wanted
        prefix, cut = self._subjects.prefix, len(self._subjects.prefix)
        for seq, subject, data, headers, time in records:
            key = subject[cut:]
            if not wanted(key) or not subject.startswith(prefix):
                continue
            known = entries.get(key)
            if known is not None:
                if known.revision >= seq:
                    continue
                deleted.discard(key)
            if not headers:
                entries[key] = KeyValueEntry(bucket, key, data, seq, time)
                continue
            op, reason = operation(headers)
            entries[key] = KeyValueEntry(bucket, key, data, seq, time, op, reason)
            if op != "PUT":
                deleted.add(key)
            if TTL in headers:
                ttl = ttl_of(headers)
                if ttl is not None or lives_forever(headers):
                    self._ttls[key] = seq, ttl

    def entries(self, time: datetime | None = None, *, include_deletes: bool = False) -> dict[str, KeyValueEntry]:
        """Return what there was at `time`, when the newest message was stored, and give it away.

        Args:
            time: That time; None: do not judge what has expired.
            include_deletes: Return markers, too.
        """
        entries = self._entries
        gone = set() if time is None else self._expired(time)
        if not include_deletes:
            gone |= self._deleted
        for key in gone:
            del entries[key]
        return entries

    def _expired(self, time: datetime) -> set[str]:
        entries = self._entries
        own = {key: ttl for key, (seq, ttl) in self._ttls.items() if entries[key].revision == seq}
        gone = {key for key, ttl in own.items() if ttl is not None and entries[key].created + ttl <= time}
        if self._max_age is not None:
            exempt = {key for key, ttl in own.items() if ttl is None}
            oldest = time - self._max_age
            gone.update(key for key, entry in entries.items() if entry.created <= oldest and key not in exempt)
        return gone
