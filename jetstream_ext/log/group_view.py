"""What the bucket of a group has, as one of its members follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from jetstream_ext.errors import StreamConfigMismatchError
from jetstream_ext.kv.entries import KeyValueEntry
from jetstream_ext.log.group_plan import GroupPlan
from jetstream_ext.log.group_store import MemberRecord, Settings
from jetstream_ext.protocol.membership import Owner
from jetstream_ext.protocol.records import Record
from jetstream_ext.text import get_logger

_log = get_logger("log")

_Seen = TypeVar("_Seen", MemberRecord, Record)


@dataclass(slots=True)
class GroupView:
    """The members that are alive and the owners of the partitions, made of the keys that a live table reports.

    Args:
        member: The name of the member in errors.

    Attributes:
        members: The ids of the members that are alive, and whether they hand their partitions over.
        owners: The owner of each partition that has a record of this epoch.
        revision: The bucket's revision that all this is of, at least.
    """

    plan: GroupPlan
    settings: Settings
    member: str
    members: dict[str, bool] = field(default_factory=dict)
    owners: dict[int, Owner] = field(default_factory=dict)
    revision: int = 0

    @property
    def leaving(self) -> set[str]:
        """Those members that hand their partitions over."""
        return {member for member, leaving in self.members.items() if leaving}

    def note(self, key: str, entry: KeyValueEntry | None) -> bool:
        """Note what a key has now (None: nothing); return whether a member or an owner is another one than before.

        Raises:
            StreamConfigMismatchError: The group was reset, or its settings were deleted.
        """
        store = self.plan.store
        if (member := store.member_of(key)) is not None:
            before, record = self.members.pop(member, None), self._decode(MemberRecord, key, entry)
            if record is not None:
                self.members[member] = record.leaving
            return before != self.members.get(member)
        if (number := store.partition_of(key)) is not None:
            known, found = self.owners.pop(number, None), self._decode(Record, key, entry)
            found = self.settings.of_this_epoch(found)
            if found is not None and entry is not None:
                self.owners[number] = Owner(found.owner or "", entry.revision)
            return known is None or found is None or known.id != self.owners[number].id
        if key == store.config_key:
            self._check_settings(None if entry is None else store.decode_value(Settings, key, entry.value))
        return False

    def _check_settings(self, settings: Settings | None) -> None:
        if settings is not None:
            self.plan.check_settings(settings, self.settings.output)
        if settings is None or settings.epoch != self.settings.epoch:
            raise StreamConfigMismatchError(
                f"{self.member} ends, because the group was reset; join it again",
                diff={"epoch": (self.settings.epoch, None if settings is None else settings.epoch)},
            )

    def _decode(self, kind: type[_Seen], key: str, entry: KeyValueEntry | None) -> _Seen | None:
        if entry is None:
            return None
        try:
            return self.plan.store.decode_value(kind, key, entry.value)
        except ValueError as error:
            _log.warning("%s", error)  # a member does not end because of another one's key
            return None
