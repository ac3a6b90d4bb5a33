"""What the bucket of a group has, as one of its members follows it."""

from __future__ import annotations

from typing import TypeVar

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.log.group_plan import Plan
from jetstream_ext.log.group_store import MemberRecord, PartitionRecord, Settings
from jetstream_ext.protocol.membership import Owner
from jetstream_ext.text import get_logger

_log = get_logger("log")

_Seen = TypeVar("_Seen", MemberRecord, PartitionRecord)


class GroupView:
    """The members that are alive and the owners of the partitions, made of the keys that a live table reports.

    Attributes:
        alive: The ids of the members that are alive.
        leaving: Those of them that hand their partitions over.
        owners: The owner of each partition that has a record of this epoch.
        revision: The bucket's revision that all this is of, at least.
    """

    def __init__(self, group: Plan, settings: Settings, output: tuple[str, str] | None, *, member: str) -> None:
        self.alive: set[str] = set()
        self.leaving: set[str] = set()
        self.owners: dict[int, Owner] = {}
        self.revision: int = 0
        self._group = group
        self._settings = settings
        self._output = output
        self._member = member

    def note(self, key: str, entry: KeyValueEntry | None) -> bool:
        """Note what a key has now (None: nothing); return whether a member or an owner is another one than before.

        Raises:
            StreamConfigMismatchError: The group was reset, or its settings were deleted.
        """
        store = self._group.store
        if (member := store.member_of(key)) is not None:
            return self._note_member(member, self._decode(MemberRecord, key, entry))
        if (number := store.partition_of(key)) is not None:
            known = self.owners.pop(number, None)
            found = self._settings.of_this_epoch(self._decode(PartitionRecord, key, entry))
            if found is not None and entry is not None:
                self.owners[number] = Owner(found.owner, entry.revision)
            return known is None or found is None or known.id != found.owner
        if key == store.config_key:
            self._check_settings(None if entry is None else store.decode_value(Settings, key, entry.value))
        return False

    def _note_member(self, member: str, record: MemberRecord | None) -> bool:
        before = member in self.alive, member in self.leaving
        self.alive.discard(member)
        self.leaving.discard(member)
        if record is not None:
            self.alive.add(member)
            if record.leaving:
                self.leaving.add(member)
        return before != (member in self.alive, member in self.leaving)

    def _check_settings(self, settings: Settings | None) -> None:
        if settings is not None:
            self._group.check_settings(settings, self._output)
        if settings is None or settings.epoch != self._settings.epoch:
            raise StreamConfigMismatchError(
                f"{self._member} ends, because the group was reset; join it again",
                diff={"epoch": (self._settings.epoch, None if settings is None else settings.epoch)},
            )

    def _decode(self, kind: type[_Seen], key: str, entry: KeyValueEntry | None) -> _Seen | None:
        if entry is None:
            return None
        try:
            return self._group.store.decode_value(kind, key, entry.value)
        except ValueError as error:
            _log.warning("%s", error)  # a member does not end because of another one's key
            return None
