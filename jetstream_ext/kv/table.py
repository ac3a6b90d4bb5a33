"""A bucket as a live table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nats.js.kv import KeyValue

from jetstream_ext.kv.bucket import Bucket
from jetstream_ext.kv.entries import KeyValueEntry, check_filters, entry_of_record
from jetstream_ext.kv.live import Live
from jetstream_ext.protocol.options import check_sequence
from jetstream_ext.protocol.table import Record


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


class Table(Mapping[str, KeyValueEntry]):
    """A bucket, or a part of it, as a live dictionary."""

    def __init__(self, kv: KeyValue, keys: Sequence[str] | None = None, *, timeout: float | None = None) -> None:
        bucket = Bucket(kv, timeout)
        self._bucket = bucket.name
        self._live = Live(bucket, check_filters(keys))

    async def __aenter__(self) -> Self:
        await self._live.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._live.close()

    @property
    def revision(self) -> int:
        return self._live.content.revision

    @property
    def lag(self) -> int:
        return max(0, self._live.leader_seq - self._live.content.revision)

    def __getitem__(self, key: str) -> KeyValueEntry:
        return self._entry(key, self._live.values[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.values)

    def __len__(self) -> int:
        return len(self._live.values)

    def __contains__(self, key: object) -> bool:
        return key in self._live.values

    def _entry(self, key: str, record: Record) -> KeyValueEntry:
        return entry_of_record(self._bucket, key, record)

    async def wait_for(self, revision: int, timeout: float | None = None) -> None:
        check_sequence(revision, "revision")
        await self._live.wait_for(revision, self._live.source.timeout if timeout is None else timeout)
