"""Streams as logs: a reader that owns its position, positions that are stored, exactly-once processing."""

from jetstream_ext.log.dead_letters import DeadLetter
from jetstream_ext.log.offsets import Committing, First, Last, New, OffsetStore, Seq, Stored, StoredOffset, Time
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.table import MessageChange, Table
from jetstream_ext.log.worker import Processed, exactly_once

__all__ = [
    "Committing",
    "DeadLetter",
    "First",
    "Last",
    "LogReader",
    "MessageChange",
    "New",
    "OffsetStore",
    "Processed",
    "Seq",
    "Stored",
    "StoredOffset",
    "Table",
    "Time",
    "exactly_once",
]
