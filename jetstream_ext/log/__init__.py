"""Streams as logs: a reader that owns its position, positions that are stored, exactly-once processing."""

from jetstream_ext.log.offsets import Committing, OffsetStore, StoredOffset
from jetstream_ext.log.reader import LogReader
from jetstream_ext.log.starts import First, Last, New, Seq, Stored, Time
from jetstream_ext.log.worker import Processed, exactly_once

__all__ = [
    "Committing",
    "First",
    "Last",
    "LogReader",
    "New",
    "OffsetStore",
    "Processed",
    "Seq",
    "Stored",
    "StoredOffset",
    "Time",
    "exactly_once",
]
