"""Streams as logs: a reader that owns its position, positions that are stored, exactly-once processing, groups."""

from jetstream_ext.log.dead_letter import DeadLetter
from jetstream_ext.log.group import Group, GroupStatus, MemberStatus, PartitionStatus, list_groups
from jetstream_ext.log.member import Member
from jetstream_ext.log.offsets import (
    Checkpoint,
    Committing,
    First,
    Last,
    New,
    OffsetStore,
    Seq,
    Stored,
    StoredOffset,
    Time,
)
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.redriving import Redriven, dead_letters, drop, redrive
from jetstream_ext.log.state import State
from jetstream_ext.log.table import MessageChange, Table
from jetstream_ext.log.work import Processed
from jetstream_ext.log.worker import exactly_once, exactly_once_group
from jetstream_ext.protocol.dead_letters import DeadLetterMessage
from jetstream_ext.protocol.partitions import partition_of

__all__ = [
    "Checkpoint",
    "Committing",
    "DeadLetter",
    "DeadLetterMessage",
    "First",
    "Group",
    "GroupStatus",
    "Last",
    "LogReader",
    "Member",
    "MemberStatus",
    "MessageChange",
    "New",
    "OffsetStore",
    "PartitionStatus",
    "Processed",
    "Redriven",
    "Seq",
    "State",
    "Stored",
    "StoredOffset",
    "Table",
    "Time",
    "dead_letters",
    "drop",
    "exactly_once",
    "exactly_once_group",
    "list_groups",
    "partition_of",
    "redrive",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
