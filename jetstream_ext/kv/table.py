"""A bucket as a live table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nats.js.kv import KeyValue

from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, check_filters, entry_of_record
from jetstream_ext.kv.live import Live, LiveMapping
from jetstream_ext.protocol.table import Change, Record


@dataclass(frozen=True, slots=True)
class KeyValueChange:
    """A change of one key.

    Attributes:
        key: The key.
        old: The entry that the watcher saw last; None if the key did not exist.
        new: The entry that it has now; None if it was deleted or purged, or has expired.
        revision: The revision of the message that changed it. For a removal without a message (an expiry without a delete
            marker, a purge of the stream), the table's revision.
        skipped: How many changes the watcher did not get before this one, because it was slow: then newer changes of a key
            replace older ones.
    """

    key: str
    old: KeyValueEntry | None
    new: KeyValueEntry | None
    revision: int
    skipped: int = 0


class Table(LiveMapping[KeyValueEntry, KeyValueChange]):
    """A bucket, or a part of it, as a live dictionary."""

    def __init__(
        self,
        kv: KeyValue,
        keys: Sequence[str] | None = None,
        *,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        patterns = check_filters(keys)
        bucket = Bucket(kv, timeout)
        self._bucket = bucket.name
        super().__init__(Live(bucket, patterns, None if checkpoint is None else Path(checkpoint)))

    def _entry(self, key: str, record: Record) -> KeyValueEntry:
        return entry_of_record(self._bucket, key, record)

    def _change(self, change: Change) -> KeyValueChange:
        key, old, new, revision, skipped = change
        return KeyValueChange(
            key,
            None if old is None else self._entry(key, old),
            None if new is None else self._entry(key, new),
            revision,
            skipped,
        )
