"""The values that key-value reads return."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Operation = Literal["PUT", "DEL", "PURGE"]


@dataclass(frozen=True, slots=True)
class KeyValueEntry:
    """A key as a read found it.

    Attributes:
        bucket: The bucket's name.
        key: The key.
        value: Its value; ``b""`` where it was deleted.
        revision: The stream sequence that wrote it.
        created: When that was, by the server's clock (aware, UTC).
        operation: ``"PUT"``, ``"DEL"`` or ``"PURGE"``.
        reason: On a marker that the server placed, why (``"MaxAge"``: the time to live ran out); else None.
    """

    bucket: str
    key: str
    value: bytes
    revision: int
    created: datetime
    operation: Operation = "PUT"
    reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeyValueSnapshot(Mapping[str, KeyValueEntry]):
    """Which keys had which values at one point of a bucket's history: a mapping from key to entry.

    Attributes:
        revision: The revision (stream sequence) at which it is exact.
        time: When that was, by the server's clock (aware, UTC); for a snapshot at a time, that time. A revision whose
            message is not stored any more has the time of the next one that is.
        unavailable: Keys left out because the history needed for them is gone (only with ``strict=False``), sorted.
        complete: Whether it is certain that no key is missing from both. False only for reads of the past: messages
            up to the revision were removed since, and a key that left nothing behind cannot be seen.
    """

    _entries: dict[str, KeyValueEntry]
    revision: int
    time: datetime
    unavailable: tuple[str, ...] = ()
    complete: bool = True

    def __getitem__(self, key: str) -> KeyValueEntry:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    # The dict's own views: those of Mapping look every key up again.

    def keys(self) -> KeysView[str]:
        """Return the keys."""
        return self._entries.keys()

    def values(self) -> ValuesView[KeyValueEntry]:
        """Return the entries."""
        return self._entries.values()

    def items(self) -> ItemsView[str, KeyValueEntry]:
        """Return the pairs of key and entry."""
        return self._entries.items()

    def __repr__(self) -> str:
        more = f", {len(self.unavailable)} unavailable" if self.unavailable else ""
        return f"<KeyValueSnapshot of {len(self)} keys at revision {self.revision} ({self.time.isoformat()}){more}>"
